"""What the figures of an evaluation mean: one protocol for every benchmark and profile.

``clean`` is the protocol that can be defended; ``official`` is what the benchmark's released code computes, so that
published figures can be compared with. Both say in words what they do, and those words go into results.json. A protocol
changes three things: which candidates are out of a ranking and which count as right (`Protocol.prepare`), the values of
each query (`Protocol.score`), and figures that no single query has (`Protocol.figures`).

Shape suffixes: Q = queries, M = metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eval.scoring.metrics import deepest, names_of
from eval.scoring.output_files import Scored, figures, score_ranking
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet
from rge.common.errors import UserError

PROFILES = ("clean", "official")


@dataclass(frozen=True)
class Protocol:
    """Protocol of a set without a benchmark of its own; the others derive from it.

    Attributes:
        benchmark: its name, ``generic`` for a set without one.
        profile: one of `PROFILES`.
        headline: metrics that the benchmark is known by, the first of them first.
        average: ``micro``, the mean over queries, or ``macro``.
        statements: what is computed, in words.
        skips_missing: whether a query without a line in a run file is left out instead of counting 0.
        metrics: what the user asked for beside the metrics that every evaluation reports.
    """

    benchmark: str = "generic"
    profile: str = "clean"
    headline: tuple[str, ...] = ("recall@1", "recall@10", "mrr", "ndcg@10")
    average: str = "micro"
    statements: tuple[str, ...] = ()
    skips_missing: bool = False
    metrics: tuple[str, ...] = ()

    def names(
        self, wanted: RetrievalSet, more: Sequence[str] = (), *, negatives: bool = True
    ) -> tuple[str, ...]:
        """Metrics to compute: those of every evaluation, a protocol's own ``more``, and what the user asked for."""
        everywhere = names_of(negatives=negatives and wanted.negatives is not None)
        return tuple(dict.fromkeys((*everywhere, *more, *self.metrics)))

    def check_depth(self, wanted: RetrievalSet, depth: int) -> None:
        """Refuse rankings that are shorter than a metric needs.

        Raises:
            UserError: they are.
        """
        if depth < min(needed := deepest(self.names(wanted)), len(wanted.corpus_ids)):
            raise UserError(f"depth must be at least {needed}, the deepest metric, got {depth}")

    def prepare(self, wanted: RetrievalSet) -> RetrievalSet:
        """The set with this protocol's exclusions and judgements."""
        return wanted

    def score(self, wanted: RetrievalSet, ranking: Ranking, missing: Sequence[str] = ()) -> Scored:
        """Every metric of every query."""
        return self._skip(wanted, score_ranking(wanted, ranking, names=self.names(wanted)), missing)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Figures of the whole set beside those of `eval.scoring.output_files.figures`; ``micro`` is merged into theirs."""
        return {}

    def suite_figures(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Figures of a suite from those of its members."""
        return {}

    def _skip(self, wanted: RetrievalSet, scored: Scored, missing: Sequence[str]) -> Scored:
        if not self.skips_missing or not missing:
            return scored
        rows_Q1 = np.isin(wanted.query_ids, list(missing))[:, None]
        value, best, worst, random = (
            np.where(rows_Q1, np.nan, values_QM)
            for values_QM in (scored.value_QM, scored.best_QM, scored.worst_QM, scored.random_QM)
        )
        return replace(scored, value_QM=value, best_QM=best, worst_QM=worst, random_QM=random)


def all_figures(wanted: RetrievalSet, scored: Scored, protocol: Protocol, *, seed: int) -> dict[str, Any]:
    """Figures of `eval.scoring.output_files.figures` and the protocol's own, with its headline."""
    out = figures(wanted, scored, seed=seed)
    more = protocol.figures(wanted, scored, seed=seed)
    out["micro"] |= more.pop("micro", {})
    if protocol.benchmark != "generic":
        average = (
            "micro" if protocol.average == "macro" else protocol.average
        )  # one set is one member of a suite
        out["headline"] = [
            {"metric": name, "average": average, **out[average][name]}
            for name in protocol.headline
            if name in out[average]
        ]
    return out | more
