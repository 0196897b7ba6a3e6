"""Mine one file of records: embed, search, judge, choose."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from data_prep.negatives.options import NegativesOptions
from rge.calls.store import AnswerStore
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.common.schema import Item, Target
from rge.judging.pairs import Judgement, judgements
from rge.judging.scorer import Scorer
from rge.mining.rules import limits, order
from rge.mining.search import Nearest, nearest
from rge.mining.table import RecordTable, pair_scores
from rge.vectors import shards
from rge.vectors.caches import EmbeddingCaches
from rge.vectors.fill_cache import Embeds, check_collapse
from rge.vectors.processes import ProcessGroup

CHUNK = 8
"""Batches of a judge between two saves."""


@dataclass
class Chosen:
    """The candidates of one query."""

    rows: list[int] = field(default_factory=list)  # negatives, as they were taken
    right: list[int] = field(
        default_factory=list
    )  # candidates that the judge calls right, and which were left out


@dataclass
class Mined:
    """The result for one file of records.

    Attributes:
        chosen: of each query of the table.
        score: of pairs of a query and a candidate: a judge's if there is one, else the cosine; None where the judge gave none.
        cosine: of the same pairs.
        counts: for the report.
    """

    table: RecordTable
    chosen: list[Chosen]
    score: dict[tuple[int, int], float | None]
    cosine: dict[tuple[int, int], float]
    counts: dict[str, Any]


class Miner:
    """An embedder, a judge and rules, applied to any number of files. All processes of a group take part."""

    def __init__(
        self,
        options: NegativesOptions,
        encoder: Embeds,
        mode: Mode,
        judge: Callable[[], Scorer] | None,
        answers: AnswerStore,
        process_group: ProcessGroup,
    ):
        self.options, self.encoder, self.mode, self.judge = options, encoder, mode, judge
        self.answers, self.process_group = answers, process_group

    def mine(self, table: RecordTable) -> Mined | None:
        """Mine a file's table; the result is in the first process only."""
        queries, rationales, candidates = self._embedded(table)
        found = self.process_group.once(lambda: self._search(table, queries, candidates))
        mined = self._choose(table, found, rationales)
        if not self.process_group.is_first:
            return None
        self._score(mined, queries, candidates)
        return mined

    def _embedded(self, table: RecordTable) -> tuple[np.ndarray, dict[str, str], np.ndarray]:
        """Embeddings (Q, D) and rationales of queries, and embeddings (C, D) of candidates; empty but in the first process."""
        options = self.options
        caches = EmbeddingCaches(
            self.encoder,
            options.root,
            process_group=self.process_group,
            batch_size=options.batch_size,
            seed=options.seed,
            cluster=options.cluster(),
        )
        pool = caches.fill("candidate", "direct", table.items, table.digests, table.ids)
        digests = [query.digest for query in table.queries]
        asked: list[Item] = [query.item for query in table.queries]
        cache = caches.fill("query", self.mode, asked, digests, [item.id for item in asked])
        if not self.process_group.is_first:
            return np.empty((0, 0)), {}, np.empty((0, 0))
        candidate_CD = shards.read_embeddings(pool, np.arange(len(table.ids)), options.memory_mb)
        encoded = shards.read(cache)
        check_collapse(candidate_CD, table.digests, "candidate")
        check_collapse(encoded.embeddings, digests, "query")
        rationales = dict(zip([item.id for item in asked], encoded.rationales, strict=True))
        return encoded.embeddings, {name: text for name, text in rationales.items() if text}, candidate_CD

    def _search(
        self, table: RecordTable, query_QD: np.ndarray, candidate_CD: np.ndarray
    ) -> tuple[Nearest, np.ndarray]:
        """The candidates within the limits, and the score (Q,) of each query's lowest positive."""
        options = self.options
        lowest_Q = table.lowest_positive(query_QD, candidate_CD)
        if options.num == 0:
            none_Q0 = np.empty((len(query_QD), 0))
            return Nearest(none_Q0.astype(np.int64), none_Q0.astype(np.float32), {}), lowest_Q
        with progress_bar(total=len(candidate_CD), desc="searching", unit="candidate") as bar:
            found = nearest(
                query_QD,
                candidate_CD,
                table.groups(keep=options.keep),
                limits(options, lowest_Q),
                depth=options.depth(filtered=self.judge is not None),
                allowed_C=table.allowed_C,
                device=_device(options.device),
                on_progress=bar.update,
            )
        return found, lowest_Q

    def _choose(
        self, table: RecordTable, searched: tuple[Nearest, np.ndarray], rationales: dict[str, str]
    ) -> Mined:
        """Take candidates in their order; with a judge, those that it calls wrong."""
        options, (found, lowest_Q) = self.options, searched
        waiting: list[Iterator[int]] = []
        for place, query in enumerate(table.queries):
            rows = found.row_QK[place][found.row_QK[place] >= 0]
            waiting.append(iter(rows[order(options, len(rows), query.digest)].tolist()))
        if self.judge is None:
            chosen = [Chosen(list(islice(rows, options.num))) for rows in waiting]
            return Mined(table, chosen, {}, {}, _counts(table, chosen, found, lowest_Q, options.num))
        judging = _Judging(self.judge(), table, rationales, self)
        positives = [(place, row) for place, query in enumerate(table.queries) for row in query.positives]
        own = [(place, row) for place, query in enumerate(table.queries) for row in query.negatives]
        known = judging(sorted({*positives, *(own if options.keep else ())}), "judging targets")
        confirmed = sum(_is_right(known[pair], options.max_judged) for pair in positives)
        chosen, judged = self._judged(judging, waiting)
        counts = _counts(table, chosen, found, lowest_Q, options.num)
        right = sum(len(of_query.right) for of_query in chosen)
        counts["judge"] = {
            "candidates": len(judged),
            "called_right": right,
            "called_right_share": right / len(judged) if judged else None,
            "positives_called_right_share": confirmed / len(positives),
            "without_score": dict(Counter(one.why for one in judged.values() if one.value is None)),
        }
        score = {pair: one.value for pair, one in (known | judged).items()}
        return Mined(table, chosen, score, {}, counts)

    def _judged(
        self, judging: "_Judging", waiting: Sequence[Iterator[int]]
    ) -> tuple[list[Chosen], dict[tuple[int, int], Judgement]]:
        """Judge in rounds, as many candidates as are lacking, until each query has enough or none are waiting."""
        options, chosen = self.options, [Chosen() for _ in waiting]
        judged: dict[tuple[int, int], Judgement] = {}
        places = list(range(len(chosen)))
        while places:
            pairs = [
                (place, row)
                for place in places
                for row in islice(waiting[place], options.num - len(chosen[place].rows))
            ]
            found = judging(pairs, "judging candidates")
            for (place, row), one in found.items():
                if _is_right(one, options.max_judged):
                    chosen[place].right.append(row)
                elif one.value is not None:
                    chosen[place].rows.append(row)
            judged |= found
            places = [
                place
                for place in dict.fromkeys(place for place, _ in pairs)
                if len(chosen[place].rows) < options.num
            ]
        return chosen, judged

    def _score(self, mined: Mined, query_QD: np.ndarray, candidate_CD: np.ndarray) -> None:
        """Cosines of all pairs that are written or shown, and without a judge the scores."""
        pairs = [
            (place, row)
            for place, (query, chosen) in enumerate(zip(mined.table.queries, mined.chosen, strict=True))
            for row in dict.fromkeys((*query.positives, *query.negatives, *chosen.rows, *chosen.right))
        ]
        place_P, row_P = np.array(pairs, np.int64).reshape(-1, 2).T
        found = pair_scores(query_QD, candidate_CD, place_P, row_P).tolist()
        mined.cosine = dict(zip(pairs, found, strict=True))
        if self.judge is None:
            mined.score = dict(mined.cosine)


class _Judging:
    """A judge on the pairs of one table."""

    def __init__(self, judge: Scorer, table: RecordTable, rationales: dict[str, str], miner: Miner):
        self.judge, self.table, self.miner = judge, table, miner
        group, answers = miner.process_group, miner.answers
        asked = [query.item for query in table.queries]
        self.queries = group.once(lambda: judge.prepare(asked, rationales, answers))
        self.digests = [query.digest for query in table.queries]

    def __call__(self, pairs: Sequence[tuple[int, int]], desc: str) -> dict[tuple[int, int], Judgement]:
        """Judge (query, candidate) pairs."""
        table, miner = self.table, self.miner
        if not pairs:
            return {}
        found = judgements(
            self.judge,
            pairs,
            self.queries,
            table.items,
            miner.answers,
            query_digests=self.digests,
            candidate_digests=table.digests,
            chunk=CHUNK * miner.options.judge_batch_size,
            process_group=miner.process_group,
            desc=desc,
        )
        return dict(zip(pairs, found, strict=True))


def _is_right(judged: Judgement, from_score: float) -> bool:
    return judged.value is not None and judged.value >= from_score


def targets_of(mined: Mined, place: int) -> list[Target]:
    """The mined negatives of a query, with scores."""
    found = []
    for row in mined.chosen[place].rows:
        target = mined.table.targets[row]
        fields = {name: getattr(target, name) for name in Target.model_fields}  # not those of a positive
        found.append(Target.model_construct(**fields | {"score": mined.score.get((place, row))}))
    return found


def _counts(
    table: RecordTable, chosen: Sequence[Chosen], found: Nearest, lowest_Q: np.ndarray, num: int
) -> dict[str, Any]:
    best_Q = np.where(found.row_QK[:, :1] >= 0, found.score_QK[:, :1], np.nan) if found.row_QK.size else None
    with np.errstate(all="ignore"):
        margin = None if best_Q is None else np.nanmean(lowest_Q[:, None] - best_Q)
    return {
        "queries": len(table.queries),
        "candidates": len(table.targets) if table.allowed_C is None else int(table.allowed_C.sum()),
        "negatives": sum(len(one.rows) for one in chosen),
        "queries_with_fewer": sum(len(one.rows) < num for one in chosen),
        "dropped": {
            "same_content": table.num_merged,
            "same_identity": table.num_same(),
            **{rule: int(of_Q.sum()) for rule, of_Q in found.dropped_Q.items()},
        },
        "margin_mean": None if margin is None or np.isnan(margin) else float(margin),
    }


def _device(asked: str | None) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def check_judge(process_group: ProcessGroup, options: NegativesOptions) -> None:
    """Raise a `UserError` for an endpoint that several processes would ask."""
    if options.judge_endpoint is not None and process_group.size > 1:
        raise UserError(
            "an endpoint is asked by one process, which makes judge_endpoint.concurrency calls at a time"
        )
