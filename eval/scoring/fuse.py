"""Fuse several rationales or runs into one ranking: mean of embeddings, maximum of scores, sum of ranks or scores.

Shape suffixes: Q = queries, D = embedding dimension, W = width of a ranking, S = samples.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from eval.scoring.search import Ranking, cut_ranking, in_final_order, stack_rankings
from rge.common.schema import Encoded

RRF = 60
"""Rank offset of reciprocal rank fusion."""


def mean_embedding(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Unit-norm mean of each query's embeddings, (Q, D) float32."""
    total_QD = np.sum([sample.astype(np.float64) for sample in samples], axis=0)
    return (total_QD / np.linalg.norm(total_QD, axis=1, keepdims=True)).astype(np.float32)


def max_score(rankings: Sequence[Ranking]) -> Ranking:
    """Rank each candidate by its best score over several rankings.

    Exact for the first ``depth`` ranks, since each of their candidates is also in the top of the ranking in which it scores
    best.

    Args:
        rankings: rankings of the same queries and depth, each with all ties of its last rank (see `eval.scoring.search`).
    """
    rows_QW = np.concatenate([one.rows_QW for one in rankings], axis=1)
    score_QW = np.concatenate([one.score_QW for one in rankings], axis=1)
    # sorted by row, best score first: further entries of the same row are repeats
    order = np.lexsort((-score_QW, rows_QW), axis=1)
    rows_QW = np.take_along_axis(rows_QW, order, axis=1)
    score_QW = np.take_along_axis(score_QW, order, axis=1)
    again = np.zeros(rows_QW.shape, bool)
    again[:, 1:] = rows_QW[:, 1:] == rows_QW[:, :-1]
    rows_QW[again | (rows_QW < 0)], score_QW[again | (rows_QW < 0)] = -1, -np.inf
    return cut_ranking(*in_final_order(rows_QW, score_QW), rankings[0].depth)


def added(
    rankings: Sequence[Ranking], by: Literal["rrf", "score"] = "rrf", weights: Sequence[float] | None = None
) -> Ranking:
    """Rank candidates by the sum of their values in several rankings; a missing candidate counts 0.

    ``by``: rrf sums 1 / (60 + rank) (Cormack, Clarke and Büttcher 2009); score sums scores scaled to [0, 1] per query, since
    different programs' scores have different ranges.
    """
    found = []
    depth = max(one.depth for one in rankings)
    for query in range(len(rankings[0].rows_QW)):
        rows, shares = [], []
        for one, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
            listed = one.rows_QW[query, : one.depth]
            listed = listed[listed >= 0]
            score = one.score_QW[query, : len(listed)].astype(np.float64)
            if by == "rrf":
                share = 1.0 / (RRF + 1 + np.arange(len(listed)))
            else:
                spread = np.ptp(score) if len(score) else 0.0
                share = (score - score.min()) / spread if spread > 0 else np.ones(len(score))
            rows.append(listed)
            shares.append(weight * share)
        row, place = np.unique(np.concatenate(rows), return_inverse=True)
        total = np.bincount(place, np.concatenate(shares), minlength=len(row))
        order = np.lexsort((row, -total))
        found.append(
            (np.array([query]), row[order][None].astype(np.int32), total[order][None].astype(np.float32))
        )
    return cut_ranking(*in_final_order(*stack_rankings(len(rankings[0].rows_QW), found)), depth)


def together(samples: Sequence[Encoded], embeddings: np.ndarray) -> Encoded:
    """Total rationales and costs of several samples of each query, with one embedding."""
    reasons = zip(*(one.stop_reasons for one in samples), strict=True)
    return Encoded(
        embeddings=embeddings,
        rationales=["\n\n".join(texts) for texts in zip(*(one.rationales for one in samples), strict=True)],
        num_rationale_tokens=np.sum([one.num_rationale_tokens for one in samples], axis=0),
        stop_reasons=["forced" if "forced" in one else one[0] for one in reasons],
        generate_ms=np.sum([one.generate_ms for one in samples], axis=0),
        embed_ms=np.sum([one.embed_ms for one in samples], axis=0),
    )
