"""One ranking from several: fused from several rationales, or chosen for each query by a gate, the margin in direct mode.

A gate beats a random choice of as many queries only if the chosen ones gain more from a rationale than the others. A small
margin signals doubt only if direct mode is often right.

Shape suffixes: Q = queries, D = embedding dimension, W = width of a ranking, S = samples.
"""

from collections.abc import Sequence

import numpy as np

from eval.scoring.search import Ranking, cut_ranking, in_final_order, stack_rankings
from rge.common.schema import Encoded

WIDEST = 2.0
"""Largest difference of two cosines."""


def mean_embedding(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Unit-norm mean of each query's embeddings, (Q, D) float32."""
    total_QD = np.sum([sample.astype(np.float64) for sample in samples], axis=0)
    return (total_QD / np.linalg.norm(total_QD, axis=1, keepdims=True)).astype(np.float32)


def max_score(rankings: Sequence[Ranking]) -> Ranking:
    """Rank each candidate by its best score over several rankings.

    Exact for the first ``depth`` ranks, since each of their candidates is also in the top of the ranking in which it scores
    best. The rankings have the same queries and depth, and all ties of their last rank (see `eval.scoring.search`).
    """
    rows_QW = np.concatenate([ranking.rows_QW for ranking in rankings], axis=1)
    score_QW = np.concatenate([ranking.score_QW for ranking in rankings], axis=1)
    # sorted by row, best score first: further entries of the same row are repeats
    order = np.lexsort((-score_QW, rows_QW), axis=1)
    rows_QW = np.take_along_axis(rows_QW, order, axis=1)
    score_QW = np.take_along_axis(score_QW, order, axis=1)
    dropped = rows_QW < 0
    dropped[:, 1:] |= rows_QW[:, 1:] == rows_QW[:, :-1]
    rows_QW[dropped], score_QW[dropped] = -1, -np.inf
    return cut_ranking(*in_final_order(rows_QW, score_QW), rankings[0].depth)


def together(samples: Sequence[Encoded], embeddings: np.ndarray) -> Encoded:
    """Total rationales and costs of several samples of each query, with one embedding."""
    rationales = zip(*(sample.rationales for sample in samples), strict=True)
    reasons = zip(*(sample.stop_reasons for sample in samples), strict=True)
    return Encoded(
        embeddings=embeddings,
        rationales=list(map("\n\n".join, rationales)),
        num_rationale_tokens=np.sum([sample.num_rationale_tokens for sample in samples], axis=0),
        stop_reasons=["forced" if "forced" in of_query else of_query[0] for of_query in reasons],
        generate_ms=np.sum([sample.generate_ms for sample in samples], axis=0),
        embed_ms=np.sum([sample.embed_ms for sample in samples], axis=0),
    )


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
