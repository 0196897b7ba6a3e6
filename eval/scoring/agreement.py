"""How far two judges agree on marks: pure functions of numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.scoring.stats import LEVEL

NUM_RESAMPLES = 2_000
CLOSE = 0.1
"""One step of the scale: ten of a hundred points."""


def agreement(
    a_N: np.ndarray, b_N: np.ndarray, group_N: Sequence[int] | np.ndarray, *, seed: int
) -> dict[str, Any]:
    """Agreement of two judges on the same answers.

    ``kappa`` is Cohen's kappa with quadratic weights, on the marks as they are: 1 where both give the same, 0 where they agree
    as often as their own marks in random order would. For numbers it equals Lin's concordance coefficient, which falls with
    a difference in level as well as with noise. ``bias`` is the mean of a - b.

    Args:
        a_N: marks, 0 to 1; NaN where there is none.
        b_N: of the other judge.
        group_N: answers that are resampled together.
        seed: of the resampling.

    Returns:
        ``num`` answers that both marked; ``kappa`` and ``bias``, each with value, low and high of a 95 % interval (percentiles);
        ``close``, the share that differ by at most ten points of a hundred. None where it is not defined: nothing was marked by
        both, or both said one and the same of everything.
    """
    both = np.isfinite(a_N) & np.isfinite(b_N)
    a_N, b_N = np.asarray(a_N, np.float64)[both], np.asarray(b_N, np.float64)[both]
    if not len(a_N):
        return {"num": 0, "kappa": None, "bias": None, "close": None}
    _, group_N = np.unique(np.asarray(group_N)[both], return_inverse=True)
    terms_N6 = np.stack([np.ones(len(a_N)), a_N, b_N, a_N**2, b_N**2, (a_N - b_N) ** 2], axis=1)
    sums_G6 = np.zeros((int(group_N.max()) + 1, 6))
    np.add.at(sums_G6, group_N, terms_N6)
    draws = np.random.default_rng(seed).multinomial(
        len(sums_G6), np.full(len(sums_G6), 1 / len(sums_G6)), size=NUM_RESAMPLES
    )
    drawn_B6 = draws @ sums_G6
    whole = sums_G6.sum(axis=0)[None]
    return {
        "num": len(a_N),
        "kappa": _interval(_kappa(whole), _kappa(drawn_B6), len(sums_G6)),
        "bias": _interval(_bias(whole), _bias(drawn_B6), len(sums_G6)),
        "close": float((np.abs(a_N - b_N) <= CLOSE + 1e-9).mean()),
    }


def _kappa(sums_B6: np.ndarray) -> np.ndarray:
    num, a, b, aa, bb, dd = sums_B6.T
    # Mean squared difference of all pairs: what marks in random order would differ by.
    chance_B = (aa + bb) / num - 2 * a * b / num**2
    return np.where(chance_B > 1e-12, 1 - dd / num / np.maximum(chance_B, 1e-12), np.nan)


def _bias(sums_B6: np.ndarray) -> np.ndarray:
    return (sums_B6[:, 1] - sums_B6[:, 2]) / sums_B6[:, 0]


def _interval(value: np.ndarray, draws_B: np.ndarray, num_groups: int) -> dict[str, float | None] | None:
    draws_B = draws_B[np.isfinite(draws_B)]
    if not np.isfinite(value[0]) or not len(draws_B):
        return None
    if num_groups < 2:
        return {"value": float(value[0]), "low": None, "high": None}
    low, high = np.quantile(draws_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(value[0]), "low": float(low), "high": float(high)}
