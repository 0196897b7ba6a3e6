"""Paired tests by cluster, Holm's correction, effect sizes, power, statistics over paraphrases.

Differences are tested by flipping the signs of whole groups (Smucker, Allan and Carterette 2007 recommend
randomisation; Wilcoxon and sign tests err at large n), with p = (b + 1) / (B + 1), which is never 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rge.stats.intervals import (
    CHUNK,
    LEVEL,
    NORMAL,
    NUM_RESAMPLES,
    cluster_bootstrap,
    figures,
    group_sums,
    index_of,
)

POWER = 0.8


def sign_flip_p(
    difference_QM: np.ndarray,
    group_Q: np.ndarray,
    *,
    stratum_Q: np.ndarray | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """Two-sided p under the null hypothesis that the sign of each group's difference is random, (M,).

    ``difference_QM``: per-query values of one run minus those of the other; NaN if undefined. ``num_resamples``: B. Errors
    as in `cluster_bootstrap`.
    """
    num_GSM, count_GSM = group_sums(difference_QM, group_Q, stratum_Q)
    size_SM = count_GSM.sum(axis=0)
    # flips do not change counts, so each group contributes its share of the mean
    share_GM = np.divide(num_GSM, size_SM, out=np.zeros(num_GSM.shape), where=size_SM > 0).sum(axis=1)
    observed_M = np.abs(share_GM.sum(axis=0))
    # sums of the same numbers in another order differ by rounding, and must count as equal
    bar_M = observed_M - 1e-12 * np.maximum(1.0, np.abs(share_GM).sum(axis=0))
    rng = np.random.default_rng(seed)
    reached_M = np.zeros(share_GM.shape[1], np.int64)
    for start in range(0, num_resamples, CHUNK):
        size = min(CHUNK, num_resamples - start)
        sign_BG = rng.integers(0, 2, (size, len(share_GM)), dtype=np.int8).astype(np.float64) * 2 - 1
        reached_M += (np.abs(sign_BG @ share_GM) >= bar_M).sum(axis=0)
    return (reached_M + 1) / (num_resamples + 1)


def over_groups(
    value_Q: np.ndarray,
    same: Sequence[str],
    group: Sequence[str],
    *,
    seed: int,
    of: Callable[..., Any] = np.ptp,
    least: int = 2,
) -> dict[str, float | None] | None:
    """Mean over paraphrase groups of a statistic of their values, with an interval; None if no group has enough queries.

    NaN is left out. ``same``: each query's paraphrase group. ``group``: unit of resampling, which may contain several
    of them. ``of``: range, `numpy.std`, or mean, which weights all groups equally.
    """
    table = pd.DataFrame({"value": value_Q, "group": group, "same": same}).dropna(subset="value")
    table = table.groupby("same", sort=False).filter(lambda rows: len(rows) >= least)
    if table.empty:
        return None
    parts = table.groupby("same", sort=False)
    value_G = np.array([[float(of(values.to_numpy()))] for _, values in parts["value"]])
    means = cluster_bootstrap(value_G, index_of(parts["group"].first().tolist()), seed=seed)
    return figures(means, (0.0, 1.0))[0] | {"value": float(value_G.mean())}


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm-adjusted p values of a family of tests, in their order."""
    p_T = np.asarray(p, dtype=np.float64)
    order = np.argsort(p_T, kind="stable")
    adjusted = np.maximum.accumulate(p_T[order] * np.arange(len(p_T), 0, -1))
    out = np.empty(len(p_T))
    out[order] = np.minimum(adjusted, 1.0)
    return out


def effect_size(difference_QM: np.ndarray) -> np.ndarray:
    """Mean difference over the standard deviation of the per-query differences (Cohen's d_z), (M,).

    0 if nothing differs; NaN if all queries differ by the same amount, or fewer than two are defined.
    """
    out = np.full(difference_QM.shape[1], np.nan)
    for m, column in enumerate(difference_QM.T):
        column = column[np.isfinite(column)]
        if len(column) > 1:
            mean, deviation = column.mean(), column.std(ddof=1)
            # the mean of equal numbers is rounded
            varies = deviation > 1e-12 * max(1.0, abs(mean))
            out[m] = mean / deviation if varies else (0.0 if mean == 0 else np.nan)
    return out


def minimum_detectable(standard_error_M: np.ndarray) -> np.ndarray:
    """Smallest true difference that a two-sided test at `LEVEL` finds with probability `POWER`, (M,).

    Normal approximation: 2.80 standard errors of the paired difference. A smaller measured difference is inconclusive. NaN
    if the standard error is.
    """
    return (NORMAL.inv_cdf((1 + LEVEL) / 2) + NORMAL.inv_cdf(POWER)) * standard_error_M
