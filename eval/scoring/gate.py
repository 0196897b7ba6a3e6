"""A gate decides which queries reason, by the margin between direct mode's top two candidates.

A gate beats a random choice of as many queries only if the chosen queries gain more from a rationale than the others, that is,
if its signal correlates with the gain (accuracy with a rationale minus accuracy without). A small margin signals doubt only if
direct mode is often right. If it hardly ever is, the gain depends on whether reasoning succeeds, which is more likely for
large margins, because crowded candidates are hard in both modes.

Shape suffixes: Q = queries, W = width of a ranking.
"""

import numpy as np

from eval.scoring.search import Ranking, stack_rankings
from rge.common.schema import Encoded

WIDEST = 2.0
"""Largest difference of two cosines."""


def margin(ranking: Ranking) -> np.ndarray:
    """Difference of cosine between each query's first and second candidate, (Q,); `WIDEST` without a second."""
    score_Q2 = ranking.score_QW[:, :2].astype(np.float64)
    has_two_Q = (score_Q2.shape[1] > 1) & np.isfinite(score_Q2).all(axis=1)
    margin_Q = np.full(len(score_Q2), WIDEST)
    margin_Q[has_two_Q] = score_Q2[has_two_Q, 0] - score_Q2[has_two_Q, -1]
    return margin_Q


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
