"""Definition of an evaluation's figures, ties included: one protocol per benchmark and profile.

``clean`` is the protocol that we consider sound; ``official`` is what the benchmark's released code computes, for comparison
with published figures. Both describe themselves in statements that go into results.json. A protocol defines which candidates
are excluded and which are right (`Protocol.prepare`), the values of each query (`Protocol.score`), and figures of the whole
set (`Protocol.figures`).

Shape suffixes: Q = queries, M = metrics.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from eval.scoring.metrics import deepest, names_of
from eval.scoring.output_files import Scored, figures, means, score_ranking
from eval.scoring.results import Figures, Number, Results
from eval.scoring.search import DEPTH, Ranking, trec_ties
from eval.scoring.stats import over_groups
from eval.sets.retrieval_set import RetrievalSet, paraphrases
from rge.common.errors import UserError

PROFILES = ("clean", "official")


@dataclass(frozen=True)
class Protocol:
    """Protocol of sets without a benchmark, and base class of the others."""

    benchmark: str = "generic"  # its name; ``generic`` for sets without one
    profile: str = "clean"  # one of `PROFILES`
    headline: tuple[str, ...] = ("recall@1", "recall@10", "mrr", "ndcg@10")
    """The benchmark's headline metrics, most important first."""
    statements: tuple[str, ...] = ()  # description of what is computed
    ties: Literal["id", "best", "worst", "trec"] = "id"
    """How equal scores count: in the order of ids, for (best) or against (worst) the model, or in trec_eval's order."""
    skips_missing: bool = False  # whether queries without a ranking are left out instead of counting 0
    metrics: tuple[str, ...] = ()  # further metrics requested by the user

    def names(self, wanted: RetrievalSet) -> tuple[str, ...]:
        """Metrics to compute: those that every evaluation reports, and those requested by the user."""
        known = names_of(negatives=wanted.negatives is not None, kinds=wanted.kind_C is not None)
        return tuple(dict.fromkeys((*known, *self.metrics)))

    def depth(self, wanted: RetrievalSet, asked: int | None) -> int:
        """Length of rankings, deep enough for all metrics; a `UserError` if less is asked for."""
        needed = deepest(self.names(wanted))
        if asked is None:
            return max(needed, DEPTH) if len(wanted.corpus_ids) > DEPTH else DEPTH
        if asked < min(needed, len(wanted.corpus_ids)):
            raise UserError(
                f"it must be at least {needed}, the largest cutoff of the metrics, got {asked}", key="depth"
            )
        return asked

    def prepare(self, wanted: RetrievalSet) -> RetrievalSet:
        """The set with this protocol's exclusions and judgements."""
        return wanted

    def main_metric(self, wanted: RetrievalSet) -> str:
        """The headline metric of one set; some benchmarks have different ones for different sets."""
        return self.headline[0]

    def ordered(self, wanted: RetrievalSet, ranking: Ranking) -> Ranking:
        """The ranking that is scored and written: equal scores are in this protocol's order, if it has one."""
        return trec_ties(ranking) if self.ties == "trec" else ranking

    def score(self, wanted: RetrievalSet, ranking: Ranking) -> Scored:
        """All metrics for every query; ``ranking``: see `ordered`."""
        scored = score_ranking(wanted, ranking, self.names(wanted))
        value_QM = {"best": scored.best_QM, "worst": scored.worst_QM}.get(self.ties, scored.value_QM)
        return replace(scored, value_QM=value_QM)

    def main_score(self, wanted: RetrievalSet, scored: Scored) -> dict[str, Any]:
        """Name and mean of `main_metric`."""
        name = self.main_metric(wanted)
        return {"metric": name, "value": means(scored.names, scored.value_QM)[name]}

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Further figures, merged with those of `eval.scoring.output_files.figures`: ``micro``, slices (``by_COLUMN``), and others."""
        return {}

    def suite_figures(self, results: Mapping[str, Results]) -> dict[str, Any]:
        """Figures of a suite from those of its members."""
        return {}

    def without(self, missing: Sequence[str], wanted: RetrievalSet, scored: Scored) -> Scored:
        """Values without those of queries that have no ranking, if the protocol leaves these out."""
        if not self.skips_missing or not missing:
            return scored
        rows_Q1 = np.isin(wanted.query_ids, list(missing))[:, None]
        tables = ("value_QM", "best_QM", "worst_QM", "random_QM")
        kept: dict[str, Any] = {name: np.where(rows_Q1, np.nan, getattr(scored, name)) for name in tables}
        return replace(scored, **kept)


def all_figures(wanted: RetrievalSet, scored: Scored, protocol: Protocol, *, seed: int) -> dict[str, Any]:
    """Figures of `eval.scoring.output_files.figures` and of the protocol, with its headline."""
    out = figures(wanted, scored, seed=seed)
    more = protocol.figures(wanted, scored, seed=seed)
    out["micro"] |= more.pop("micro", {})
    for block in [name for name in more if name.startswith("by_")]:
        for value, figures_of in more.pop(block).items():
            out[block][value] |= figures_of
    if "paraphrase_groups" not in more and (same := paraphrases(wanted)) is not None:
        more["paraphrase_groups"] = sum(count > 1 for count in Counter(same).values())
        out["micro"] |= _sensitivity(wanted, scored, protocol, same, seed=seed)
    if protocol.benchmark != "generic":
        out["headline"] = headline_figures(protocol, out["micro"], "micro")
    return out | more


def _sensitivity(
    wanted: RetrievalSet, scored: Scored, protocol: Protocol, same: Sequence[str], *, seed: int
) -> Figures:
    """For each headline metric, the largest minus the smallest value of a question's wordings, mean over the questions."""
    column = dict(zip(scored.names, scored.value_QM.T, strict=True))
    ranges = {
        f"linguistic_sensitivity_{name}": over_groups(
            column[name], same=same, group=wanted.columns["group"], seed=seed
        )
        for name in protocol.headline
        if name in column
    }
    return {name: figure for name, figure in ranges.items() if figure}


def headline_figures(protocol: Protocol, figures_of: Figures, average: str) -> list[dict[str, str | Number]]:
    """The headline metrics among figures that are averages over queries (micro) or categories (macro)."""
    known = (name for name in protocol.headline if name in figures_of)
    return [{"metric": name, "average": average, **figures_of[name]} for name in known]
