"""Exact fp32 inner-product search by faiss, or on a GPU by torch, with ties broken by id.

Shape suffixes: Q = queries, C = candidates, D = embedding dimension, K = candidates fetched, W = width of the result
(depth plus ties).

A score is the float32 number that the library computes. Equal scores are ordered by row, which is the order of ids
(`eval.sets.retrieval_set`). Unlike a plain top-k call, this is exact:

- A top-k call drops arbitrary candidates that tie with its last one; here all of them are fetched.
- A matrix product may round equal inner products differently at different positions. Identical embeddings are therefore
  searched only once, so that they always tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rge.index.nearest import top

DEPTH = 1000
BLOCK_ROWS = 1 << 18
"""Candidates per search block: 2 GB of float32 at D = 2048."""
SPARE = 8
"""Candidates fetched beyond the depth, to detect ties of the last one."""


@dataclass(frozen=True)
class Ranking:
    """Ranked candidates of Q queries."""

    rows_QW: np.ndarray  # candidate rows, best first, int32, padded with -1
    score_QW: np.ndarray  # float32 in the same order, non-increasing, padded with -inf
    depth: int  # length of the ranking; further columns only hold ties of the candidate at this rank


def search(
    query_QD: np.ndarray,
    candidate_CD: np.ndarray,
    *,
    depth: int = DEPTH,
    excluded: Sequence[np.ndarray] | None = None,
    candidates: Sequence[np.ndarray] | None = None,
    block_rows: int = BLOCK_ROWS,
    device: str | None = None,
) -> Ranking:
    """Rank candidates by inner product: highest score first, then lowest row.

    Embeddings are float32 of unit norm, those of candidates in the order of ids, possibly a memory map. A query's ranking has
    no rows of ``excluded`` and only rows of ``candidates`` (None: all). ``block_rows`` bounds the memory. ``device`` is where torch searches a shared pool; None: faiss on the CPU.
    """
    query_QD = np.ascontiguousarray(query_QD)
    same_C = _first_equal(candidate_CD, block_rows)
    if candidates is None:
        row_QW, score_QW = _search_pool(query_QD, candidate_CD, same_C, depth, excluded, block_rows, device)
    else:
        row_QW, score_QW = _search_lists(query_QD, candidate_CD, same_C, candidates, excluded)
    return cut_ranking(row_QW, score_QW, depth)


def rows_within(memory_mb: float, dim: int) -> int:
    """Number of candidates of ``dim`` float32 dimensions that fit into this memory; at least one."""
    return max(1, int(memory_mb * 2**20) // (4 * dim))


def ordered_integers(score: np.ndarray) -> np.ndarray:
    """Map float32 numbers to int64, preserving order; adjacent floats differ by one, and 0.0 and -0.0 are both 0."""
    bits = np.ascontiguousarray(score, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def from_ordered_integers(key: np.ndarray) -> np.ndarray:
    """Inverse of `ordered_integers`, float32."""
    bits = np.where(key >= 0, key, -key | 0x80000000)
    return bits.astype(np.uint32).view(np.float32)


def _first_equal(candidate_CD: np.ndarray, block_rows: int) -> np.ndarray | None:
    """First row with the same embedding for each candidate, (C,) int32; None if all differ."""
    blocks = (candidate_CD[start : start + block_rows] for start in range(0, len(candidate_CD), block_rows))
    sum_C = np.concatenate([block.sum(axis=1) for block in blocks])  # equal for equal rows
    order = np.argsort(sum_C, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], sum_C[order][1:] != sum_C[order][:-1]]))
    sizes = np.diff(np.append(starts, len(order)))
    same_C = np.arange(len(sum_C), dtype=np.int32)
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        first: dict[bytes, int] = {}
        for row in order[start : start + size].tolist():
            same_C[row] = first.setdefault(candidate_CD[row].tobytes(), row)
    return same_C if (same_C != np.arange(len(same_C))).any() else None


def _search_pool(
    query_QD: np.ndarray,
    candidate_CD: np.ndarray,
    same_C: np.ndarray | None,
    depth: int,
    excluded: Sequence[np.ndarray] | None,
    block_rows: int,
    device: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The best ``depth`` candidates of a shared pool, or more, with all ties of the last one, in final order."""
    kept = None if same_C is None else np.flatnonzero(same_C == np.arange(len(same_C)))
    num_kept = len(candidate_CD) if kept is None else len(kept)
    most_excluded = max((len(rows) for rows in excluded), default=0) if excluded is not None else 0
    open_Q = np.arange(len(query_QD))
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    fetch = depth + most_excluded + SPARE
    while len(open_Q):
        fetch = min(fetch, num_kept)
        row_QW, score_QW, unseen_Q = _fetch(query_QD[open_Q], candidate_CD, kept, fetch, block_rows, device)
        if same_C is not None:
            row_QW, score_QW = _expand(row_QW, score_QW, same_C)
        if excluded is not None:
            for index, query in enumerate(open_Q.tolist()):
                gone = np.isin(row_QW[index], excluded[query])
                row_QW[index, gone], score_QW[index, gone] = -1, -np.inf
        row_QW, score_QW = in_final_order(row_QW, score_QW)
        # Candidates that were not fetched score at most unseen_Q. If that reaches the last score within the depth, ties
        # may be missing; the few such queries are searched again with twice the fetch.
        last_Q = score_QW[:, min(depth, score_QW.shape[1]) - 1]
        done_Q = (unseen_Q < last_Q) | (fetch == num_kept)
        parts.append((open_Q[done_Q], row_QW[done_Q], score_QW[done_Q]))
        open_Q = open_Q[~done_Q]
        fetch *= 2
    return stack_rankings(len(query_QD), parts)


def _fetch(
    query_QD: np.ndarray,
    candidate_CD: np.ndarray,
    kept: np.ndarray | None,
    k: int,
    block_rows: int,
    device: str | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best k: rows (Q, k), scores (Q, k), and an upper bound of the scores of the others (Q,)."""
    num_rows = len(candidate_CD) if kept is None else len(kept)
    row_QK = np.empty((len(query_QD), 0), np.int32)
    score_QK = np.empty((len(query_QD), 0), np.float32)
    unseen_Q = np.full(len(query_QD), -np.inf, np.float32)
    for start in range(0, num_rows, block_rows):
        stop = min(start + block_rows, num_rows)
        block = candidate_CD[start:stop] if kept is None else candidate_CD[kept[start:stop]]
        take = min(k, len(block))
        score, index = top(query_QD, np.ascontiguousarray(block), take, device)
        row = (index + start).astype(np.int32) if kept is None else kept[index + start].astype(np.int32)
        if take < len(block):
            unseen_Q = np.maximum(unseen_Q, score[:, -1])
        if start:  # keep the best k of both; the best dropped one bounds the others
            row, score = np.concatenate([row_QK, row], axis=1), np.concatenate([score_QK, score], axis=1)
            order = np.argsort(-score, axis=1, kind="stable")
            row, score = np.take_along_axis(row, order, axis=1), np.take_along_axis(score, order, axis=1)
            if score.shape[1] > k:
                unseen_Q = np.maximum(unseen_Q, score[:, k])
        row_QK, score_QK = row[:, :k], score[:, :k]
    return row_QK, score_QK, unseen_Q


def _expand(row_QW: np.ndarray, score_QW: np.ndarray, same_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add all candidates with the same embedding as the one that was searched."""
    members = np.argsort(same_C, kind="stable").astype(np.int32)  # by the searched row, then by row
    count_C = np.bincount(same_C, minlength=len(same_C))
    start_C = np.cumsum(count_C) - count_C
    parts: list[tuple[int | np.ndarray, np.ndarray, np.ndarray]] = []
    for query, (rows, scores) in enumerate(zip(row_QW, score_QW, strict=True)):
        count = count_C[rows]
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        expanded = members[np.repeat(start_C[rows], count) + offset]
        parts.append((query, expanded, np.repeat(scores, count)))
    return stack_rankings(len(row_QW), parts)


def _search_lists(
    query_QD: np.ndarray,
    candidate_CD: np.ndarray,
    same_C: np.ndarray | None,
    candidates: Sequence[np.ndarray],
    excluded: Sequence[np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Each query's whole candidate list, in final order."""
    parts: list[tuple[int | np.ndarray, np.ndarray, np.ndarray]] = []
    for query, rows in enumerate(candidates):
        if excluded is not None:
            rows = np.setdiff1d(rows, excluded[query])
        # the lists are short and differ, so one matrix-vector product per query instead of faiss
        searched, place = np.unique(rows if same_C is None else same_C[rows], return_inverse=True)
        score = (candidate_CD[searched] @ query_QD[query])[place]
        parts.append((np.array([query]), *in_final_order(rows[None].astype(np.int32), score[None])))
    return stack_rankings(len(query_QD), parts)


def in_final_order(row_QW: np.ndarray, score_QW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order by (score descending, row ascending); padding goes last."""
    # the best come sorted by score, so only the few queries with ties need sorting
    todo = np.flatnonzero(~(score_QW[:, 1:] < score_QW[:, :-1]).all(axis=1))
    if len(todo):
        # one integer per pair: score descending in the upper half, row ascending in the lower; all differ
        key = -ordered_integers(score_QW[todo]) << 32 | (row_QW[todo].astype(np.int64) & 0xFFFFFFFF)
        order = np.argsort(key, axis=1)
        row_QW[todo] = np.take_along_axis(row_QW[todo], order, axis=1)
        score_QW[todo] = np.take_along_axis(score_QW[todo], order, axis=1)
    return row_QW, score_QW


def stack_rankings(
    num_queries: int, parts: Sequence[tuple[int | np.ndarray, np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Combine (query or queries, rows, scores) of different widths into one array, padded with -1 and -inf."""
    width = max(rows.shape[-1] for _, rows, _ in parts)
    row_QW = np.full((num_queries, width), -1, np.int32)
    score_QW = np.full((num_queries, width), -np.inf, np.float32)
    for queries, rows, scores in parts:
        row_QW[queries, : rows.shape[-1]] = rows
        score_QW[queries, : rows.shape[-1]] = scores
    return row_QW, score_QW


def cut_ranking(row_QW: np.ndarray, score_QW: np.ndarray, depth: int) -> Ranking:
    """Drop candidates beyond the depth that do not tie with the last one."""
    if row_QW.shape[1] > depth:
        beyond = score_QW[:, depth:] < score_QW[:, depth - 1 : depth]
        row_QW[:, depth:][beyond], score_QW[:, depth:][beyond] = -1, -np.inf
        width = depth + int((row_QW[:, depth:] >= 0).sum(axis=1).max())
        row_QW, score_QW = row_QW[:, :width], score_QW[:, :width]
    return Ranking(row_QW, score_QW, depth)


def trec_ties(ranking: Ranking) -> Ranking:
    """Reorder equal scores as trec_eval does: larger ids first."""
    rows_QW, score_QW = ranking.rows_QW.copy(), ranking.score_QW
    tied = (score_QW[:, 1:] == score_QW[:, :-1]) & np.isfinite(score_QW[:, 1:])
    for query in np.flatnonzero(tied.any(axis=1)):
        order = np.lexsort((-rows_QW[query].astype(np.int64), -score_QW[query]))
        rows_QW[query] = rows_QW[query][order]
    return replace(ranking, rows_QW=rows_QW)


def choose(reason_Q: np.ndarray, reasoned: Ranking, direct: Ranking) -> Ranking:
    """Choose each query's ranking: `reasoned` where `reason_Q`, else `direct`."""
    parts = [
        (chosen, ranking.rows_QW[chosen], ranking.score_QW[chosen])
        for chosen, ranking in ((reason_Q, reasoned), (~reason_Q, direct))
    ]
    return Ranking(*stack_rankings(len(reason_Q), parts), direct.depth)
