"""95 % bootstrap intervals of means, by cluster: for evaluations, diagnoses and sweeps.

Shape suffixes: Q = queries, M = metrics, G = groups (clusters), S = strata (categories), B = resamples, T = terms.

Queries that share their input picture are not independent, so groups are resampled instead of queries: a resample needs only each
group's sums. Means over all queries have one stratum; a macro mean is the mean of the strata's means, with the groups resampled
jointly. NaN marks a query for which a metric is not defined, and is omitted.

Intervals are BCa (Efron 1987: bias-corrected and accelerated, acceleration from leaving out one group at a time): with
rare hits, percentile intervals are too short on the important side. Simulated with 60 groups of 1 to 3 queries and a true
mean of 0.05, nominal 95 % covered 0.96 (BCa) against 0.91 (percentile); with 250 groups, or a mean near 0.5, the two agree.

Few groups vary less among themselves than the population that they come from, so with fewer than `FEW_GROUPS` the tails are those of
Student's t (Hesterberg 2015, "expanded" percentiles), and up to `T_GROUPS`, whose resamples take few values, the interval is Student's t
itself: the mean, plus and minus t standard errors. A single group has no interval. docs/evaluation.md has the coverage, which
``pytest -s tests/eval/scoring/test_stats.py -k few_groups`` prints.

Runs that differ in their seed are resampled together with the groups (`over_seeds`). Such an interval generalises to other queries
and training seeds, not to other data, recipes, or whatever else the runs share, such as one cold start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 10_000
LEVEL = 0.95
OF_DIFFERENCES = (-1.0, 1.0)
"""Bounds of the difference of two metrics, each within [0, 1]."""
FEW_GROUPS, T_GROUPS = 30, 10
"""With fewer groups than the first, intervals are wider than BCa's; up to the second, they are Student's t."""
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
)  # fmt: skip
"""Quantiles at (1 + `LEVEL`) / 2 of Student's t with 1, 2, 3 ... degrees of freedom."""
CHUNK = 500
"""Resamples drawn at once."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class Bootstrap:
    """Resampled means of M metrics."""

    estimate_M: np.ndarray  # the means; NaN if a metric is defined for no query
    draws_BM: np.ndarray  # their resamples
    jackknife_GM: np.ndarray  # the means without one group
    num_groups_M: np.ndarray  # number of groups with a defined value

    @property
    def standard_error_M(self) -> np.ndarray:
        """Standard deviation of the resamples; NaN if they are all equal, or for a single group."""
        deviation_M = np.std(self.draws_BM, axis=0)
        for m in np.flatnonzero(np.isnan(deviation_M)):  # some resamples have no value
            draws = self.draws_BM[:, m][np.isfinite(self.draws_BM[:, m])]
            deviation_M[m] = np.std(draws) if len(draws) else np.nan
        # rounding depends on the order of summation
        varies_M = deviation_M > 1e-12 * np.maximum(1.0, np.abs(self.estimate_M))
        return np.where(varies_M & (self.num_groups_M > 1), deviation_M, np.nan)


def index_of(names: Sequence[str]) -> np.ndarray:
    """Number the distinct names in sorted order, (Q,) int64."""
    return np.unique(np.asarray(names, dtype=object).astype(str), return_inverse=True)[1].astype(np.int64)


def cluster_bootstrap(
    value_QM: np.ndarray,
    group_Q: np.ndarray,
    *,
    stratum_Q: np.ndarray | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Bootstrap:
    """Resample groups with replacement.

    `value_QM` may be differences of two runs; NaN where not defined. With `stratum_Q`, the mean is a macro mean; a stratum without
    queries in a resample is omitted from it. The same seed and groups give the same resamples, for any values.
    """
    num_GSM, count_GSM = group_sums(value_QM, group_Q, stratum_Q)
    shape = num_GSM.shape[1:]

    def means(terms_XT: np.ndarray) -> np.ndarray:
        """Mean of the strata's means, (X, M), without empty strata."""
        num_XSM, count_XSM = (half.reshape(-1, *shape) for half in np.split(terms_XT, 2, axis=1))
        has_XSM = count_XSM > 0
        mean_XSM = np.divide(num_XSM, count_XSM, out=np.zeros(num_XSM.shape), where=has_XSM)
        total_XM, strata_XM = mean_XSM.sum(axis=1), has_XSM.sum(axis=1)
        return np.divide(total_XM, strata_XM, out=np.full(total_XM.shape, np.nan), where=strata_XM > 0)

    terms_GT = np.concatenate([num_GSM, count_GSM], axis=1).reshape(len(num_GSM), -1)
    num_groups_M = (count_GSM.sum(axis=1) > 0).sum(axis=0)
    return resampled(terms_GT, means, num_groups_M, num_resamples=num_resamples, seed=seed)


def over_seeds(bootstrap: Bootstrap, num_seeds: int) -> Bootstrap:
    """The mean over training runs that differ in their seed, with seeds and groups resampled together.

    S - 1 of S seeds are drawn, with replacement, which adds the variance of a mean of S seeds (Rao and Wu 1988); drawing S would
    make it a third too small for three seeds. But few seeds say little about that variance, and the interval does not allow for it:
    if seeds differ by more than the groups' standard error, it is too narrow. Simulated with 100 groups, nominal 95 % covered, by the
    standard deviation of seeds in standard errors of groups (``pytest -m slow tests/eval/scoring/test_stats.py -k over_seeds``):

        seeds     0    1.3      3      5     10
        2       .94    .93    .82    .72    .63
        3       .93    .92    .83    .80    .76
        4       .94    .95    .94    .91    .88
        6       .95    .93    .92    .90    .89

    `bootstrap` has S x M columns, all metrics of the first seed, then those of the second, from one `cluster_bootstrap`. With one
    seed, only groups are resampled.
    """
    if num_seeds == 1:
        return bootstrap
    rng = np.random.default_rng((0, num_seeds))  # independent of the resampling of groups
    drawn = rng.integers(0, num_seeds, (len(bootstrap.draws_BM), num_seeds - 1))
    times_BS = (drawn[:, :, None] == np.arange(num_seeds)).sum(axis=1)

    def by_seed(columns_XM: np.ndarray) -> np.ndarray:
        return columns_XM.reshape(len(columns_XM), num_seeds, -1)

    return Bootstrap(
        estimate_M=by_seed(bootstrap.estimate_M[None])[0].mean(axis=0),
        draws_BM=np.einsum("bs,bsm->bm", times_BS / (num_seeds - 1), by_seed(bootstrap.draws_BM)),
        jackknife_GM=by_seed(bootstrap.jackknife_GM).mean(axis=1),
        num_groups_M=by_seed(bootstrap.num_groups_M[None])[0].min(axis=0),
    )


def ratio_bootstrap(
    part_Q: np.ndarray, whole_Q: np.ndarray, group_Q: np.ndarray, *, seed: int = 0
) -> Bootstrap:
    """The ratio of two means over the queries that have both values; NaN if the second mean is 0. See `cluster_bootstrap`."""
    both_Q = np.isfinite(part_Q) & np.isfinite(whole_Q)
    sums_GSM, _ = group_sums(np.stack([part_Q, whole_Q], axis=1)[both_Q], group_Q[both_Q], None)

    def ratio(terms_X2: np.ndarray) -> np.ndarray:
        part_X1, whole_X1 = np.split(terms_X2, 2, axis=1)
        return np.divide(part_X1, whole_X1, out=np.full(whole_X1.shape, np.nan), where=whole_X1 > 0)

    num_groups = np.array([len(sums_GSM)])
    return resampled(sums_GSM[:, 0], ratio, num_groups, seed=seed)


def resampled(
    terms_GT: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    num_groups_M: np.ndarray,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int,
) -> Bootstrap:
    """Resample groups with replacement, for any statistic of sums over groups.

    ``terms_GT``: each group's contribution to the sums. ``statistic``: sums (X, T) to values (X, M).
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be >= 1, got {num_resamples}")
    num_groups = len(terms_GT)
    rng = np.random.default_rng(seed)
    draws = []
    for start in range(0, num_resamples, CHUNK):
        size = min(CHUNK, num_resamples - start)
        drawn = rng.integers(0, num_groups, (size, num_groups)) + np.arange(size)[:, None] * num_groups
        times = np.bincount(drawn.ravel(), minlength=size * num_groups).reshape(size, num_groups)
        draws.append(statistic(times.astype(np.float64) @ terms_GT))
    total_T = terms_GT.sum(axis=0)
    return Bootstrap(
        estimate_M=statistic(total_T[None])[0],
        draws_BM=np.concatenate(draws),
        jackknife_GM=statistic(total_T - terms_GT),
        num_groups_M=num_groups_M,
    )


def interval(
    bootstrap: Bootstrap, *, bounds: tuple[float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Interval of each mean at `LEVEL`, (low_M, high_M): BCa, and for few groups as the top of this file says.

    If the estimate lies outside its resamples, the corrections do not exist, and percentiles are used. A single group has no
    interval: NaN. If all values are equal, so are all resamples, but no hit in twenty groups does not prove that there never is
    one. Then the interval assumes that the largest share of groups that the exact binomial interval (Clopper and Pearson 1934)
    allows lies on a bound; without bounds it is NaN.

    ``bounds``: smallest and largest possible value, see `OF_DIFFERENCES`; None: unbounded.
    """
    low_M, high_M = np.full((2, len(bootstrap.estimate_M)), np.nan)
    spread_M = bootstrap.standard_error_M
    for m, estimate in enumerate(bootstrap.estimate_M):
        draws = bootstrap.draws_BM[:, m]
        draws = draws[np.isfinite(draws)]
        if not np.isfinite(estimate) or not len(draws) or bootstrap.num_groups_M[m] < 2:
            continue
        if not np.isfinite(spread_M[m]):
            if bounds is not None and bounds[0] <= estimate <= bounds[1]:
                reach = 1 - ((1 - LEVEL) / 2) ** (1 / bootstrap.num_groups_M[m])
                low_M[m] = estimate - reach * (estimate - bounds[0])
                high_M[m] = estimate + reach * (bounds[1] - estimate)
            continue
        num_groups = int(bootstrap.num_groups_M[m])
        reach = _reach(num_groups)
        if num_groups <= T_GROUPS:
            least, most = (-np.inf, np.inf) if bounds is None else bounds
            low_M[m] = max(estimate - reach * spread_M[m], least)
            high_M[m] = min(estimate + reach * spread_M[m], most)
            continue
        tails = [NORMAL.cdf(-reach), NORMAL.cdf(reach)]
        # ties with the estimate count half, else coarse metrics look biased, and a - b would differ from b - a; the margin
        # absorbs rounding, which depends on the order of summation
        margin = 1e-12 * max(1.0, abs(estimate))
        below = np.mean(draws < estimate - margin) + 0.5 * np.mean(np.abs(draws - estimate) <= margin)
        jackknife = bootstrap.jackknife_GM[:, m]
        influence = np.nanmean(jackknife) - jackknife if np.isfinite(jackknife).any() else np.zeros(1)
        spread = np.nansum(influence**2)
        if 0 < below < 1 and spread > 0:
            bias = NORMAL.inv_cdf(float(below))
            acceleration = np.nansum(influence**3) / (6 * spread**1.5)
            shifted = [bias + NORMAL.inv_cdf(tail) for tail in tails]
            tails = [NORMAL.cdf(bias + shift / (1 - acceleration * shift)) for shift in shifted]
        low_M[m], high_M[m] = np.quantile(draws, tails)
    return low_M, high_M


def _reach(num_groups: int) -> float:
    """Half an interval in standard errors of the resamples; these are too small by the factor in the square root."""
    if num_groups >= FEW_GROUPS:
        return NORMAL.inv_cdf((1 + LEVEL) / 2)
    return T_QUANTILES[num_groups - 2] * math.sqrt(num_groups / (num_groups - 1))


def few_groups(num_groups: int) -> str | None:
    """A warning for readers of intervals, or None if there are enough groups."""
    if num_groups >= FEW_GROUPS:
        return None
    if num_groups == 1:
        return "1 group: there are no intervals"
    return f"{num_groups} groups: intervals are wide, and below {FEW_GROUPS} groups rest on Student's t"


def figures(bootstrap: Bootstrap, bounds: tuple[float, float] | None = None) -> list[dict[str, float | None]]:
    """Each mean for a JSON file: ``value``, ``low`` and ``high``, None instead of NaN; see `interval`."""
    rows = np.stack([bootstrap.estimate_M, *interval(bootstrap, bounds=bounds)], axis=1).tolist()
    return [
        {key: None if x != x else x for key, x in zip(("value", "low", "high"), row, strict=True)}
        for row in rows
    ]


def in_words(low: float | None, high: float | None, digits: str = ".1f") -> str:
    """An interval of fractions in per cent, or a dash."""
    return "–" if low is None or high is None else f"[{100 * low:{digits}}, {100 * high:{digits}}]"


def group_sums(
    value_QM: np.ndarray, group_Q: np.ndarray, stratum_Q: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the defined values by group and stratum, both (G, S, M) float64."""
    value_QM = np.asarray(value_QM, dtype=np.float64)
    if value_QM.ndim != 2 or not len(value_QM) or len(group_Q) != len(value_QM):
        raise ValueError(
            f"values must be (Q, M) with Q >= 1 groups, got {value_QM.shape} and {len(group_Q)} groups"
        )
    if np.isinf(value_QM).any():
        raise ValueError("values must be finite or NaN, got infinity")
    stratum_Q = np.zeros(len(value_QM), np.int64) if stratum_Q is None else stratum_Q
    if len(stratum_Q) != len(value_QM):
        raise ValueError(f"{len(value_QM)} queries need as many strata, got {len(stratum_Q)}")
    num_strata = int(stratum_Q.max()) + 1
    _, group_Q = np.unique(
        group_Q, return_inverse=True
    )  # without unused numbers, which would be empty groups
    defined = np.isfinite(value_QM)
    shape = ((int(group_Q.max()) + 1) * num_strata, value_QM.shape[1])
    sums, counts = np.zeros(shape), np.zeros(shape)
    cell_Q = group_Q * num_strata + stratum_Q
    np.add.at(sums, cell_Q, np.where(defined, value_QM, 0.0))
    np.add.at(counts, cell_Q, defined.astype(np.float64))
    return sums.reshape(-1, num_strata, shape[1]), counts.reshape(-1, num_strata, shape[1])
