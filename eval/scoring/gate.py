"""A gate decides which queries reason, by the margin between direct mode's top two candidates.

A gate beats a random choice of as many queries only if the chosen queries gain more from a rationale than the others, that is,
if its signal correlates with the gain (accuracy with a rationale minus accuracy without). A small margin signals doubt only if
direct mode is often right. If it hardly ever is, the gain depends on whether reasoning succeeds, which is more likely for
large margins, because crowded candidates are hard in both modes. The direction is therefore learned on another set; if it is
not significant, there is no gate.

Shape suffixes: Q = queries, W = width of a ranking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.scoring.search import Ranking, stack_rankings
from rge.common.schema import Encoded
from rge.stats.intervals import cluster_bootstrap, figures

WIDEST = 2.0
"""Largest difference of two cosines."""


@dataclass(frozen=True)
class Gate:
    """Lets queries reason whose margin is below a threshold, or ``above`` it."""

    threshold: float
    above: bool = False

    def opens(self, margin_Q: np.ndarray) -> np.ndarray:
        """Mask of the queries that reason, (Q,) bool."""
        return margin_Q > self.threshold if self.above else margin_Q < self.threshold

    def about(self) -> dict[str, float]:
        """For results.json."""
        return {"margin_above" if self.above else "margin_below": self.threshold}


def gate_for(margin_Q: np.ndarray, share: float, *, above: bool = False) -> Gate:
    """The gate for a share of the queries: those with the smallest margins, or with the largest."""
    return Gate(float(np.quantile(margin_Q, 1 - share if above else share)), above)


def large_minus_small(
    margin_Q: np.ndarray, gain_Q: np.ndarray, group_Q: np.ndarray, *, seed: int
) -> dict[str, Any]:
    """Mean gain from a rationale above the median margin minus that below it: value, and 95 % interval or None.

    ``margin_Q``: margins in direct mode. ``gain_Q``: metric with a rationale minus metric without; NaN if undefined.
    """
    known = np.isfinite(gain_Q)
    margin_Q, gain_Q, group_Q = margin_Q[known], gain_Q[known], group_Q[known]
    large_Q = margin_Q > np.median(margin_Q)
    share = large_Q.mean()
    if not 0 < share < 1:
        return {"value": 0.0, "low": None, "high": None}
    difference_Q = np.where(large_Q, gain_Q / share, -gain_Q / (1 - share))
    return figures(cluster_bootstrap(difference_Q[:, None], group_Q, seed=seed))[0]


def margin(ranking: Ranking) -> np.ndarray:
    """Difference of cosine between each query's first and second candidate, (Q,); `WIDEST` without a second."""
    return np.array([lead(scores) for scores in ranking.score_QW[:, :2].astype(np.float64)])


def lead(scores: Sequence[float]) -> float:
    """`margin` of one query, from the scores of its candidates."""
    known = [score for score in scores[:2] if np.isfinite(score)]
    return known[0] - known[1] if len(known) > 1 else WIDEST


def choose(reason_Q: np.ndarray, reasoned: Ranking, direct: Ranking) -> Ranking:
    """Choose each query's ranking: `reasoned` where `reason_Q`, else `direct`."""
    parts = [
        (chosen, ranking.rows_QW[chosen], ranking.score_QW[chosen])
        for chosen, ranking in ((reason_Q, reasoned), (~reason_Q, direct))
    ]
    return Ranking(*stack_rankings(len(reason_Q), parts), direct.depth)


def gated(reason_Q: np.ndarray, reasoned: Encoded, direct: Encoded) -> Encoded:
    """Results and costs with a gate: all queries are embedded directly, and the chosen ones also reason."""

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
