"""Several ways of asking, one ranking: embeddings averaged, scores maximised, and a gate that reasons where it must.

Shape suffixes: Q = queries, D = embedding dimension, W = width of a ranking, S = samples.
"""

from collections.abc import Sequence

import numpy as np

from eval.scoring.search import Ranking, cut_ranking, in_final_order
from rge.common.schema import Encoded


def mean_embedding(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Unit-norm mean of each query's embeddings, (Q, D) float32.

    Args:
        samples: (Q, D) each, unit norm.
    """
    total_QD = np.sum([sample.astype(np.float64) for sample in samples], axis=0)
    return (total_QD / np.linalg.norm(total_QD, axis=1, keepdims=True)).astype(np.float32)


def max_score(rankings: Sequence[Ranking]) -> Ranking:
    """Rank each candidate by its best score over several rankings.

    Exact for the first ``depth`` ranks: a candidate among them is, by the ranking in which it scores best, among that
    ranking's first too.

    Args:
        rankings: of the same queries, equally deep, each with all ties of its last rank (as `eval.scoring.search` gives them).
    """
    rows_QW = np.concatenate([one.rows_QW for one in rankings], axis=1)
    score_QW = np.concatenate([one.score_QW for one in rankings], axis=1)
    # by row, the best score first: what follows with the same row is a repetition
    order = np.lexsort((-score_QW, rows_QW), axis=1)
    rows_QW = np.take_along_axis(rows_QW, order, axis=1)
    score_QW = np.take_along_axis(score_QW, order, axis=1)
    again = np.zeros(rows_QW.shape, bool)
    again[:, 1:] = rows_QW[:, 1:] == rows_QW[:, :-1]
    rows_QW[again | (rows_QW < 0)], score_QW[again | (rows_QW < 0)] = -1, -np.inf
    return cut_ranking(*in_final_order(rows_QW, score_QW), rankings[0].depth)


def margin(ranking: Ranking) -> np.ndarray:
    """By how much each query's first candidate beats its second, (Q,); infinite where there is no second."""
    second_Q = (
        ranking.score_QW[:, 1] if ranking.score_QW.shape[1] > 1 else np.full(len(ranking.score_QW), -np.inf)
    )
    return ranking.score_QW[:, 0].astype(np.float64) - second_Q


def choose(reason_Q: np.ndarray, reasoned: Ranking, direct: Ranking) -> Ranking:
    """Each query's ranking from the one or the other.

    Args:
        reason_Q: bool, True takes ``reasoned``.
        reasoned: ranking after a rationale.
        direct: ranking without; equally deep.
    """
    width = max(reasoned.rows_QW.shape[1], direct.rows_QW.shape[1])

    def widened(one: Ranking) -> tuple[np.ndarray, np.ndarray]:
        more = ((0, 0), (0, width - one.rows_QW.shape[1]))
        return np.pad(one.rows_QW, more, constant_values=-1), np.pad(
            one.score_QW, more, constant_values=-np.inf
        )

    (rows, scores), (direct_rows, direct_scores) = widened(reasoned), widened(direct)
    pick = reason_Q[:, None]
    return Ranking(np.where(pick, rows, direct_rows), np.where(pick, scores, direct_scores), direct.depth)


def together(samples: Sequence[Encoded], embeddings: np.ndarray) -> Encoded:
    """What several samples of each query wrote and cost in all, under one embedding."""
    reasons = zip(*(one.stop_reasons for one in samples), strict=True)
    return Encoded(
        embeddings=embeddings,
        rationales=["\n\n".join(texts) for texts in zip(*(one.rationales for one in samples), strict=True)],
        num_rationale_tokens=np.sum([one.num_rationale_tokens for one in samples], axis=0),
        stop_reasons=["forced" if "forced" in one else one[0] for one in reasons],
        generate_ms=np.sum([one.generate_ms for one in samples], axis=0),
        embed_ms=np.sum([one.embed_ms for one in samples], axis=0),
    )


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
