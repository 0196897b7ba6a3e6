"""The nearest allowed candidates of every query, block by block of candidates.

Shape suffixes: Q = queries, C = candidates, D = embedding dimension, K = candidates kept.

Blocks are searched in float32. What they leave is scored again in float64 and rounded, so that a score does not depend on the
block, the division over processes, or the device. Limits and the final order, by score and then by row, apply to these scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

QUERY_ROWS, CANDIDATE_ROWS = 1024, 8192
"""Scores held at once: 32 MB in float32."""
SPARE = 16
"""Candidates fetched beyond those wanted, so that rounding cannot hide one."""
ROUNDING = 1e-5
"""Bound of a float32 score's error."""


@dataclass(frozen=True)
class Nearest:
    """The best allowed candidates of Q queries."""

    row_QK: np.ndarray  # best first, int64, padded with -1
    score_QK: np.ndarray  # float32, padded with -inf
    dropped_Q: dict[str, np.ndarray]  # candidates above a limit, by the first rule that they break, int64


class Groups:
    """Candidates that are right together, and the groups that are right for each query; nothing of size Q x C."""

    def __init__(
        self, group_C: np.ndarray, right: Sequence[Sequence[int]], left_out: Sequence[Sequence[int]]
    ):
        """`right`: group numbers of each query's right answers; `left_out`: rows that are not to be found for another reason."""
        self.size = len(group_C)
        order_C = np.argsort(group_C, kind="stable")
        self._rows = order_C.astype(np.int64)
        self._keys = group_C[order_C].astype(np.int64) * self.size + order_C
        self._right, self._left_out = right, left_out

    def hidden(self, queries: range, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """(query - first query, row - first row) of all pairs that are not to be found."""
        pairs = [(place, group) for place, query in enumerate(queries) for group in self._right[query]]
        place_P, group_P = np.array(pairs, np.int64).reshape(-1, 2).T
        low_P, high_P = (
            np.searchsorted(self._keys, group_P * self.size + end) for end in (rows.start, rows.stop)
        )
        count_P = high_P - low_P
        offset = np.arange(count_P.sum()) - np.repeat(np.cumsum(count_P) - count_P, count_P)
        found = self._rows[np.repeat(low_P, count_P) + offset]
        more = [
            (place, row)
            for place, query in enumerate(queries)
            for row in self._left_out[query]
            if rows.start <= row < rows.stop
        ]
        more_place, more_row = np.array(more, np.int64).reshape(-1, 2).T
        return (
            np.concatenate([np.repeat(place_P, count_P), more_place]),
            np.concatenate([found, more_row]) - rows.start,
        )


def exact_scores(query_ND: np.ndarray, candidate_ND: np.ndarray) -> np.ndarray:
    """(N,) float32 inner products of rows, computed in float64."""
    return np.einsum("nd,nd->n", query_ND, candidate_ND, dtype=np.float64).astype(np.float32)


def nearest(
    query_QD: np.ndarray,
    candidate_CD: np.ndarray,
    groups: Groups,
    limits: Mapping[str, np.ndarray],
    *,
    depth: int,
    first_row: int = 0,
    allowed_C: np.ndarray | None = None,
    device: str | torch.device = "cpu",
    on_progress: Callable[[int], object] = lambda _: None,
) -> Nearest:
    """The `depth` best candidates of each query whose score is within all limits, and which are not right.

    `candidate_CD` are float32 rows of a pool from `first_row` on (a memory map is read block by block); `allowed_C`, if given,
    says which of them may be found. Memory beside the two: `QUERY_ROWS` x `CANDIDATE_ROWS` scores and Q x depth results.
    """
    limit_Q = np.full(len(query_QD), np.inf, np.float32)
    for one_Q in limits.values():
        limit_Q = np.minimum(limit_Q, one_Q)
    row_QK = np.full((len(query_QD), depth), -1, np.int64)
    score_QK = np.full((len(query_QD), depth), -np.inf, np.float32)
    dropped_Q = {name: np.zeros(len(query_QD), np.int64) for name in limits}
    open_Q, fetch = np.arange(len(query_QD)), depth + SPARE
    while len(open_Q):
        is_first = fetch == depth + SPARE
        fetch = min(fetch, len(candidate_CD))
        search = _Search(query_QD, open_Q, limit_Q, limits if is_first else {}, fetch, device)
        for start in range(0, len(candidate_CD), CANDIDATE_ROWS):
            rows = range(start, min(start + CANDIDATE_ROWS, len(candidate_CD)))
            block_CD = np.ascontiguousarray(candidate_CD[rows.start : rows.stop])
            allowed = None if allowed_C is None else allowed_C[rows.start : rows.stop]
            search.add(block_CD, groups, rows, first_row, allowed)
            if is_first:
                on_progress(len(rows))
        for name, counted_Q in search.dropped.items():
            dropped_Q[name] += counted_Q
        done = []
        for place, query in enumerate(open_Q.tolist()):
            row_F, bound = search.found(place)
            score_F = exact_scores(
                np.broadcast_to(query_QD[query], (len(row_F), query_QD.shape[1])), candidate_CD[row_F]
            )
            keep = score_F <= limit_Q[query]
            row_F, score_F = row_F[keep], score_F[keep]
            best = np.lexsort((row_F, -score_F))[:depth]
            last = score_F[best[-1]] if len(best) == depth else -np.inf
            # Candidates that were not fetched score at most `bound`, up to rounding.
            done.append(bound + ROUNDING < last or fetch == len(candidate_CD) or bound == -np.inf)
            if done[-1]:
                row_QK[query, : len(best)] = row_F[best] + first_row
                score_QK[query, : len(best)] = score_F[best]
        open_Q, fetch = open_Q[~np.array(done)], 2 * fetch
    return Nearest(row_QK, score_QK, dropped_Q)


def merged(parts: Sequence[Nearest]) -> Nearest:
    """The result over a pool from those over its parts, in any order."""
    depth = parts[0].row_QK.shape[1]
    row_QK = np.concatenate([part.row_QK for part in parts], axis=1)
    score_QK = np.concatenate([part.score_QK for part in parts], axis=1)
    row_QK = np.where(row_QK < 0, np.iinfo(np.int64).max, row_QK)
    order = np.lexsort((row_QK, -score_QK), axis=1)[:, :depth]
    row_QK, score_QK = np.take_along_axis(row_QK, order, 1), np.take_along_axis(score_QK, order, 1)
    dropped = {name: np.sum([part.dropped_Q[name] for part in parts], axis=0) for name in parts[0].dropped_Q}
    return Nearest(np.where(np.isinf(score_QK), -1, row_QK), score_QK, dropped)


class _Search:
    """The best `fetch` rows of the open queries over the blocks so far, by float32 scores."""

    def __init__(
        self,
        query_QD: np.ndarray,
        open_Q: np.ndarray,
        limit_Q: np.ndarray,
        limits: Mapping[str, np.ndarray],
        fetch: int,
        device: str | torch.device,
    ):
        self.open_Q, self.fetch, self.device = open_Q, fetch, torch.device(device)
        self.query_QD = query_QD
        self.limit_Q = self._moved(limit_Q) + ROUNDING
        self.limits = {name: self._moved(one_Q) for name, one_Q in limits.items()}
        self.dropped = {name: np.zeros(len(query_QD), np.int64) for name in limits}
        self.score_QF = torch.full((len(open_Q), 0), float("-inf"))
        self.row_QF = torch.full((len(open_Q), 0), -1, dtype=torch.long)
        self.bound_Q = torch.full((len(open_Q),), float("-inf"))

    def add(
        self, block_CD: np.ndarray, groups: Groups, rows: range, first_row: int, allowed_C: np.ndarray | None
    ) -> None:
        """Search a block of candidates."""
        block = self._moved(block_CD)
        banned = None if allowed_C is None else self._moved(~allowed_C)
        found = [
            self._chunk(start, block, banned, groups, rows, first_row)
            for start in range(0, len(self.open_Q), QUERY_ROWS)
        ]
        score, row, bound = (torch.cat(parts) for parts in zip(*found, strict=True))
        self.score_QF, self.row_QF, self.bound_Q = score, row, bound

    def _chunk(
        self,
        start: int,
        block_CD: Tensor,
        banned_C: Tensor | None,
        groups: Groups,
        rows: range,
        first_row: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(start, start + QUERY_ROWS)
        queries = self.open_Q[part]
        score_QC = self._moved(self.query_QD[queries]) @ block_CD.T
        of_pool = range(rows.start + first_row, rows.stop + first_row)
        place, column = groups.hidden(queries, of_pool)  # type: ignore[arg-type]  # any sequence of queries
        score_QC[self._moved(place), self._moved(column)] = float("-inf")
        if banned_C is not None:
            score_QC.masked_fill_(banned_C, float("-inf"))
        at = self._moved(queries)
        seen_QC: Tensor | None = None
        for name, limit_Q in self.limits.items():
            above_QC = score_QC > limit_Q[at][:, None]
            fresh_QC = above_QC if seen_QC is None else above_QC & ~seen_QC
            self.dropped[name][queries] += fresh_QC.sum(dim=1).cpu().numpy()
            seen_QC = above_QC if seen_QC is None else above_QC | seen_QC
        score_QC.masked_fill_(score_QC > self.limit_Q[at][:, None], float("-inf"))
        best, index = score_QC.topk(min(self.fetch, len(rows)), dim=1)
        bound = self.bound_Q[part]
        if best.shape[1] < len(rows):
            bound = torch.maximum(bound, best[:, -1].cpu())
        score = torch.cat([self.score_QF[part], best.cpu()], dim=1)
        row = torch.cat([self.row_QF[part], index.cpu() + rows.start], dim=1)
        if score.shape[1] > self.fetch:
            score, order = score.sort(dim=1, descending=True, stable=True)
            bound = torch.maximum(bound, score[:, self.fetch])
            score, row = score[:, : self.fetch], row.gather(1, order)[:, : self.fetch]
        return score, row, bound

    def found(self, place: int) -> tuple[np.ndarray, float]:
        """Rows (F,) of an open query, unordered, and an upper bound of the float32 score of all others."""
        is_found = torch.isfinite(self.score_QF[place])
        return self.row_QF[place][is_found].numpy(), float(self.bound_Q[place])

    def _moved(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
