"""A gate: which queries reason, decided by how far direct mode's first candidate leads its second.

A gate beats as many queries chosen at random exactly where the queries that it lets through gain more from a rationale than the
others, that is where its signal goes with the gain (right after a rationale minus right without). A small lead means doubt only where
direct mode knows something. Where direct mode is hardly ever right, the gain is whether reasoning succeeds, which a small
lead says less of than a large one: crowded candidates are hard in both modes. So the direction is learned, on another set, and without a direction that is sure
there is no gate.

Shape suffixes: Q = queries, W = width of a ranking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.scoring.search import Ranking, stack_rankings
from rge.common.schema import Encoded
from rge.stats.intervals import cluster_bootstrap, figures


@dataclass(frozen=True)
class Gate:
    """Queries whose margin lies below a threshold reason; or those ``above`` it."""

    threshold: float
    above: bool = False

    def opens(self, margin_Q: np.ndarray) -> np.ndarray:
        """Which queries reason, (Q,) bool."""
        return margin_Q > self.threshold if self.above else margin_Q < self.threshold

    def about(self) -> dict[str, float]:
        """For results.json."""
        return {"margin_above" if self.above else "margin_below": self.threshold}


def gate_for(margin_Q: np.ndarray, share: float, *, above: bool = False) -> Gate:
    """The gate that lets a share of these queries through, those with the smallest margins, or the largest."""
    return Gate(float(np.quantile(margin_Q, 1 - share if above else share)), above)


def large_minus_small(
    margin_Q: np.ndarray, gain_Q: np.ndarray, group_Q: np.ndarray, *, seed: int
) -> dict[str, Any]:
    """How much more queries with large margins gain from a rationale than those with small ones.

    ``margin_Q``: of direct mode. ``gain_Q``: metric after a rationale minus metric without; NaN where it is not defined.

    Returns:
        ``value``, the mean gain above the median margin minus that below it, with ``low`` and ``high`` of its 95 % interval,
        None where nothing can be said of it.
    """
    known = np.isfinite(gain_Q)
    margin_Q, gain_Q, group_Q = margin_Q[known], gain_Q[known], group_Q[known]
    large_Q = margin_Q > np.median(margin_Q)
    share = large_Q.mean()
    if not 0 < share < 1:
        return {"value": 0.0, "low": None, "high": None}
    difference_Q = np.where(large_Q, gain_Q / share, -gain_Q / (1 - share))
    (found,) = figures(cluster_bootstrap(difference_Q[:, None], group_Q, seed=seed))
    return found


def margin(ranking: Ranking) -> np.ndarray:
    """By how much each query's first candidate beats its second, (Q,); infinite where there is no second."""
    second_Q = (
        ranking.score_QW[:, 1] if ranking.score_QW.shape[1] > 1 else np.full(len(ranking.score_QW), -np.inf)
    )
    return ranking.score_QW[:, 0].astype(np.float64) - second_Q


def lead(scores: Sequence[float]) -> float:
    """`margin` of one query, by the scores of its candidates."""
    return scores[0] - scores[1] if len(scores) > 1 else np.inf


def choose(reason_Q: np.ndarray, reasoned: Ranking, direct: Ranking) -> Ranking:
    """Each query's ranking from the one or the other."""
    found = [
        (chosen, one.rows_QW[chosen], one.score_QW[chosen])
        for chosen, one in ((reason_Q, reasoned), (~reason_Q, direct))
    ]
    return Ranking(*stack_rankings(len(reason_Q), found), direct.depth)


def gated(reason_Q: np.ndarray, reasoned: Encoded, direct: Encoded) -> Encoded:
    """What a gate costs: every query is embedded directly, and those that it lets through reason as well."""

    def either(name: str) -> list[str]:
        pairs = zip(reason_Q, getattr(reasoned, name), getattr(direct, name), strict=True)
        return [one if chosen else other for chosen, one, other in pairs]

    return Encoded(
        embeddings=np.where(reason_Q[:, None], reasoned.embeddings, direct.embeddings),
        rationales=either("rationales"),
        num_rationale_tokens=np.where(reason_Q, reasoned.num_rationale_tokens, 0),
        stop_reasons=either("stop_reasons"),
        generate_ms=np.where(reason_Q, reasoned.generate_ms, 0.0),
        embed_ms=direct.embed_ms + np.where(reason_Q, reasoned.embed_ms, 0.0),
    )
