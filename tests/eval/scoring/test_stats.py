"""Resampling against loops and closed forms, and its coverage on simulated data."""

import itertools
import math
import time

import numpy as np
import pytest
import scipy.stats
from faults import error_about

from eval.scoring.stats import effect_size, holm, minimum_detectable, sign_flip_p
from rge.stats import intervals
from rge.stats.intervals import (
    OF_DIFFERENCES,
    cluster_bootstrap,
    few_groups,
    figures,
    in_words,
    index_of,
    interval,
    over_seeds,
)


def clusters(rng, num_groups):
    return np.repeat(np.arange(num_groups), rng.integers(1, 4, num_groups))


def test_index_of_numbers_sorted_names():
    assert index_of(["b", "a", "b", "é"]).tolist() == [1, 0, 1, 2]


def test_bootstrap_equals_a_loop_over_groups():
    """The same draws, resampled query by query: whole groups come and go, sizes included."""
    rng = np.random.default_rng(0)
    group = clusters(rng, 7)
    value = rng.random((len(group), 2))
    value[3, 1] = np.nan
    found = cluster_bootstrap(value, group, num_resamples=20, seed=4)
    drawn = np.random.default_rng(4).integers(0, 7, (20, 7))
    for draw, mean in zip(drawn, found.draws_BM, strict=True):
        rows = np.concatenate([value[group == g] for g in draw])
        np.testing.assert_allclose(mean, np.nanmean(rows, axis=0))
    np.testing.assert_allclose(found.estimate_M, np.nanmean(value, axis=0))
    for g in range(7):
        np.testing.assert_allclose(found.jackknife_GM[g], np.nanmean(value[group != g], axis=0))


def test_macro_bootstrap_is_the_mean_of_categories_in_every_draw():
    rng = np.random.default_rng(1)
    group = clusters(rng, 9)
    value, category = rng.random((len(group), 1)), rng.integers(0, 3, len(group))
    found = cluster_bootstrap(value, group, stratum_Q=category, num_resamples=20, seed=2)
    drawn = np.random.default_rng(2).integers(0, 9, (20, 9))
    for draw, mean in zip(drawn, found.draws_BM, strict=True):
        rows = np.concatenate([np.flatnonzero(group == g) for g in draw])
        each = [value[rows[category[rows] == c]].mean() for c in range(3) if (category[rows] == c).any()]
        assert mean[0] == pytest.approx(np.mean(each))
    assert found.estimate_M[0] == pytest.approx(np.mean([value[category == c].mean() for c in range(3)]))


def test_interval_is_scipys_bca_without_clusters():
    rng = np.random.default_rng(2)
    value = rng.exponential(size=80)
    ours = interval(cluster_bootstrap(value[:, None], np.arange(80), num_resamples=20_000, seed=0))
    theirs = scipy.stats.bootstrap(
        (value,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose([ours[0][0], ours[1][0]], [theirs.low, theirs.high], rtol=0.02)


def test_correlated_queries_widen_the_interval():
    """Every query copied five times within its group says no more than once."""
    value = np.random.default_rng(3).random((60, 1))
    copies, group = np.repeat(value, 5, axis=0), np.repeat(np.arange(60), 5)
    once = interval(cluster_bootstrap(value, np.arange(60), seed=0))
    clustered = interval(cluster_bootstrap(copies, group, seed=0))
    naive = interval(cluster_bootstrap(copies, np.arange(300), seed=0))
    np.testing.assert_allclose(clustered, once)
    assert (naive[1] - naive[0])[0] < 0.55 * (once[1] - once[0])[0]


@pytest.mark.parametrize(("num_groups", "mean"), [(60, 0.1), (60, 0.5)])
def test_coverage_on_simulated_clusters(num_groups, mean):
    rng = np.random.default_rng(5)
    covered, num = 0, 300
    for trial in range(num):
        group = clusters(rng, num_groups)
        chance = rng.beta(2 * mean, 2 * (1 - mean), num_groups)
        value = (rng.random(len(group)) < chance[group]).astype(float)[:, None]
        low, high = interval(cluster_bootstrap(value, group, num_resamples=600, seed=trial))
        covered += low[0] <= mean <= high[0]
    assert 0.91 <= covered / num <= 0.985


def hits_of(rng, num_groups):
    """Hits of one run: each group has its own chance, .5 on average."""
    group = clusters(rng, num_groups)
    return rng.random(len(group)) < rng.beta(1, 1, num_groups)[group], group, 0.5, (0.0, 1.0)


def rare_hits_of(rng, num_groups):
    group = clusters(rng, num_groups)
    return rng.random(len(group)) < rng.beta(0.2, 1.8, num_groups)[group], group, 0.1, (0.0, 1.0)


def gains_of(rng, num_groups):
    """A graded metric of one run, .5 on average."""
    group = clusters(rng, num_groups)
    level_Q = 4 * rng.random(num_groups)[group]
    return rng.beta(1 + level_Q, 5 - level_Q), group, 0.5, (0.0, 1.0)


def differences_of(rng, num_groups):
    """A graded metric's paired difference between two equal runs."""
    group = clusters(rng, num_groups)
    value = rng.normal(0, 0.3, num_groups)[group] + rng.normal(0, 0.2, len(group))
    return value.clip(-1, 1), group, 0.0, OF_DIFFERENCES


def coverage(draw, num_groups, monkeypatch, trials=300):
    """Of intervals as they are, and of BCa alone."""
    inside = np.zeros(2)
    for trial in range(trials):
        value, group, mean, bounds = draw(np.random.default_rng((trial, num_groups)), num_groups)
        found = cluster_bootstrap(value.astype(float)[:, None], group, num_resamples=600, seed=trial)
        with monkeypatch.context() as alone:
            both = [interval(found, bounds=bounds)]
            alone.setattr(intervals, "FEW_GROUPS", 0)
            alone.setattr(intervals, "T_GROUPS", 0)
            both.append(interval(found, bounds=bounds))
        inside += [low[0] <= mean <= high[0] for low, high in both]
    return inside / trials


@pytest.mark.slow
@pytest.mark.parametrize("draw", [hits_of, rare_hits_of, gains_of, differences_of])
def test_coverage_with_few_groups(draw, monkeypatch):
    """Prints the coverage that docs/evaluation.md speaks of: nominal 95 % covers, with BCa alone and as it is."""
    sizes = (3, 5, 10, 20)
    found, alone = zip(*(coverage(draw, size, monkeypatch) for size in sizes), strict=True)
    for size, before, after in zip(sizes, alone, found, strict=True):
        print(f"{draw.__name__:15} {size:3} groups: BCa {before:.2f}, now {after:.2f}")  # noqa: T201
    assert min(found) >= 0.9
    assert min(alone) < min(found)


def test_quantiles_of_student_s_t_are_scipys():
    degrees = np.arange(1, len(intervals.T_QUANTILES) + 1)
    np.testing.assert_allclose(intervals.T_QUANTILES, scipy.stats.t.ppf(0.975, degrees), atol=6e-5)
    assert len(degrees) == intervals.FEW_GROUPS - 2


def test_few_groups_have_student_s_t_over_groups():
    """Three equal groups: the mean, and 4.30 standard errors of it."""
    value = np.array([0.2, 0.5, 0.6])
    found = cluster_bootstrap(value[:, None], np.arange(3), num_resamples=40_000)
    low, high = interval(found)
    half = scipy.stats.t.ppf(0.975, 2) * value.std(ddof=1) / np.sqrt(3)
    np.testing.assert_allclose([low[0], high[0]], [value.mean() - half, value.mean() + half], atol=0.01)
    low, high = interval(found, bounds=(0.0, 1.0))
    assert (low[0], round(high[0], 2)) == (0.0, 0.95)
    assert few_groups(intervals.FEW_GROUPS) is None
    assert few_groups(3).startswith("3 groups: intervals are wide")


def test_p_is_uniform_when_nothing_differs():
    rng = np.random.default_rng(6)
    group = clusters(rng, 40)
    effect = rng.standard_normal((40, 400))[group] + rng.standard_normal((len(group), 400))
    p = sign_flip_p(effect, group, num_resamples=500, seed=0)
    assert 0.02 <= (p <= 0.05).mean() <= 0.09
    assert 0.4 <= p.mean() <= 0.6


def test_p_is_that_of_all_sign_patterns():
    """Six groups have 64 patterns, which can be enumerated; the p of a random sample of them comes close."""
    rng = np.random.default_rng(7)
    group = clusters(rng, 6)
    value = rng.standard_normal((len(group), 1)) + 0.6
    sums = np.bincount(group, value[:, 0])
    patterns = np.array(list(itertools.product([-1, 1], repeat=6)))
    exact = np.mean(np.abs(patterns @ sums) >= abs(sums.sum()) - 1e-12)
    assert sign_flip_p(value, group, num_resamples=20_000, seed=0)[0] == pytest.approx(exact, abs=0.012)


def test_p_is_never_zero_and_one_where_nothing_differs():
    value = np.stack([np.ones(50), np.zeros(50)], axis=1)
    p = sign_flip_p(value, np.arange(50), num_resamples=999, seed=0)
    assert p.tolist() == [1 / 1000, 1.0]


def test_macro_p_weighs_categories_equally():
    """One category of two queries against one of fifty: only the macro mean sees the small one."""
    difference = np.concatenate([np.full(8, 1.0), np.tile([0.5, -0.5], 100)])[:, None]
    category = np.array([0] * 8 + [1] * 200)
    groups = np.arange(208)
    micro, macro = (sign_flip_p(difference, groups, stratum_Q=s, seed=0)[0] for s in (None, category))
    assert macro < 0.02 < micro


def test_what_does_not_vary_has_no_interval_and_nothing_is_detectable():
    """Not even with bounds where there is one group; an interval of width 0 would be certainty."""
    constant = cluster_bootstrap(np.full((10, 1), 0.1), np.arange(10), num_resamples=50)
    one_group = cluster_bootstrap(np.arange(4.0)[:, None] / 3, np.zeros(4, int), num_resamples=50)
    one_defined = cluster_bootstrap(np.array([[0.5], [np.nan], [np.nan]]), np.arange(3), num_resamples=50)
    for found in (constant, one_group, one_defined):
        assert np.isnan(interval(found)).all()
        assert np.isnan(minimum_detectable(found.standard_error_M)).all()
    for found in (one_group, one_defined):
        assert figures(found, (0.0, 1.0)) == [{"value": 0.5, "low": None, "high": None}]
        assert in_words(None, None) == "–"
    assert in_words(-0.05, 0.25, "+.1f") == "[-5.0, +25.0]"
    # two groups have a value, and some resamples hold neither
    gaps = cluster_bootstrap(np.array([[0.0], [1.0], [np.nan]]), np.arange(3), num_resamples=50)
    assert np.isnan(gaps.draws_BM).any()
    assert 0.2 < gaps.standard_error_M[0] < 0.6
    assert not np.isnan(interval(gaps)).any()


def test_equal_differences_reach_as_far_as_equal_values():
    """No difference in 12 groups: as many as 26.5 % of groups may differ, by as much as 1 either way."""
    value = np.stack([np.zeros(12), np.full(12, 0.5), np.ones(12)], axis=1)
    low, high = interval(cluster_bootstrap(value, np.arange(12), num_resamples=50), bounds=OF_DIFFERENCES)
    exact = scipy.stats.beta.ppf(0.975, 1, 12)
    np.testing.assert_allclose(low, [-exact, 0.5 - 1.5 * exact, 1 - 2 * exact])
    np.testing.assert_allclose(high, [exact, 0.5 + 0.5 * exact, 1])


def test_a_zoo_of_degenerate_input_gives_no_number_that_is_none():
    undefined = cluster_bootstrap(np.full((4, 1), np.nan), np.arange(4), num_resamples=50)
    assert np.isnan(undefined.estimate_M[0])
    assert np.isnan(interval(undefined)).all()
    gaps = cluster_bootstrap(np.array([[0.0], [1.0]]), np.array([3, 90]), num_resamples=50)
    assert len(gaps.jackknife_GM) == 2


def test_no_hit_at_all_is_no_proof_that_there_never_is_one():
    """Clopper and Pearson: none of 12 groups leaves at most 26.5 % at 95 %, from scipy's beta quantile."""
    group = np.repeat(np.arange(12), 2)
    value = np.stack([np.zeros(24), np.ones(24), np.full(24, 0.5)], axis=1)
    found = cluster_bootstrap(value, group, num_resamples=50)
    low, high = interval(found, bounds=(0.0, 1.0))
    exact = scipy.stats.beta.ppf(0.975, 1, 12)
    np.testing.assert_allclose(low, [0, 1 - exact, 0.5 - exact / 2])
    np.testing.assert_allclose(high, [exact, 1, 0.5 + exact / 2])


def test_reversed_sign_reverses_everything():
    rng = np.random.default_rng(8)
    group = clusters(rng, 30)
    value = rng.integers(-2, 3, (len(group), 3)) / 2
    plus, minus = (cluster_bootstrap(sign * value, group, seed=1) for sign in (1, -1))
    low, high = interval(plus)
    reversed_low, reversed_high = interval(minus)
    np.testing.assert_allclose(reversed_low, -high, atol=1e-9)
    np.testing.assert_allclose(reversed_high, -low, atol=1e-9)
    np.testing.assert_array_equal(sign_flip_p(value, group), sign_flip_p(-value, group))


def test_seed_decides():
    value, group = np.random.default_rng(9).random((50, 1)), np.arange(50)
    one, same, other = (cluster_bootstrap(value, group, num_resamples=99, seed=s).draws_BM for s in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


def test_holm_by_hand():
    """Sorted .01 .02 .03 .04 times 4 3 2 1 is .04 .06 .06 .04, then made monotone."""
    np.testing.assert_allclose(holm([0.03, 0.01, 0.04, 0.02]), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(holm([0.6, 0.7]), [1.0, 1.0])
    assert holm([]).tolist() == []


def test_effect_size_by_hand():
    value = np.array([[1.0, 0.0, 2.0, np.nan], [3.0, 0.0, 2.0, 1.0]])
    found = effect_size(value)
    assert found[0] == pytest.approx(2 / math.sqrt(2))
    assert found[1] == 0.0
    assert np.isnan(found[2])
    assert np.isnan(found[3])
    assert np.isnan(effect_size(np.full((6, 1), 0.1))).all()  # whose mean is rounded


def test_minimum_detectable_difference_is_found_four_times_in_five():
    """At 2.80 standard errors, a two-sided 5 % test has a power of 0.80."""
    assert minimum_detectable(np.array([1.0]))[0] == pytest.approx(2.8016, abs=1e-4)
    rng = np.random.default_rng(10)
    true = minimum_detectable(np.array([1 / math.sqrt(80)]))[0]
    data = rng.standard_normal((80, 300)) + true
    assert 0.73 <= (sign_flip_p(data, np.arange(80), num_resamples=500) <= 0.05).mean() <= 0.87


@pytest.mark.slow
def test_ten_thousand_resamples_of_1634_queries_cost_a_few_times_their_random_numbers():
    """No resampling can do without drawing, for each resample and query, a number: timed here and now, on this machine."""
    value, group = np.random.default_rng(11).random((1634, 3)), np.arange(1634)

    def draw():
        rng = np.random.default_rng(0)
        for _ in range(20):
            rng.integers(0, 1634, (500, 1634))

    def resample():
        interval(cluster_bootstrap(value, group))
        sign_flip_p(value, group)

    def seconds(work):
        start = time.process_time()
        work()
        return time.process_time() - start

    ratios = [seconds(resample) / seconds(draw) for _ in range(3)]
    assert min(ratios) < 15


@pytest.mark.parametrize(
    ("value", "group", "change"),
    [
        (np.ones((3, 1)), np.arange(2), {}),
        (np.ones(3), np.arange(3), {}),
        (np.ones((0, 1)), np.arange(0), {}),
        (np.full((3, 1), np.inf), np.arange(3), {}),
        (np.ones((3, 1)), np.arange(3), {"num_resamples": 0}),
        (np.ones((3, 1)), np.arange(3), {"stratum_Q": np.zeros(2, int)}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(value, group, change):
    with error_about(ValueError):
        cluster_bootstrap(value, group, **change)


def seeds_of(value_QS, groups):
    """Over seeds and groups, and over groups alone with the seeds given: (low, mean, high) each."""
    joint = over_seeds(cluster_bootstrap(value_QS, groups), value_QS.shape[1])
    given = cluster_bootstrap(value_QS.mean(axis=1, keepdims=True), groups)
    return [
        (low[0], found.estimate_M[0], high[0]) for found in (joint, given) for low, high in [interval(found)]
    ]


def test_seeds_are_resampled_with_the_groups():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 4)
    base_Q1 = rng.normal(0.1, 0.3, 60).repeat(4)[:, None]
    apart, given = seeds_of(base_Q1 + np.array([-0.2, 0.0, 0.2]), groups)
    assert apart[1] == pytest.approx(given[1])
    assert apart[0] < given[0] - 0.1
    assert apart[2] > given[2] + 0.1
    # Seeds that say the same add nothing, and one seed is taken as given.
    alike, given = seeds_of(base_Q1.repeat(3, axis=1), groups)
    assert alike == pytest.approx(given, abs=0.005)
    one, given = seeds_of(base_Q1, groups)
    assert one == given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_seeds", "covered"),
    [
        (2, (0.94, 0.93, 0.82, 0.72, 0.63)),
        (3, (0.93, 0.92, 0.83, 0.80, 0.76)),
        (4, (0.94, 0.95, 0.94, 0.91, 0.88)),
        (6, (0.95, 0.93, 0.92, 0.90, 0.89)),
    ],
)
def test_coverage_over_seeds_is_what_the_docstring_says(num_seeds, covered):
    """100 groups and a true mean of 0; seeds differ by 0 to 10 standard errors of the groups."""
    num_groups, trials = 100, 400
    ratio_R = np.array([0, 1.3, 3, 5, 10])
    rng, inside_R = np.random.default_rng(0), np.zeros(len(ratio_R))
    for trial in range(trials):
        group_G = rng.normal(0, 0.5, num_groups)
        seed_S = rng.normal(0, 0.5 / math.sqrt(num_groups), num_seeds)
        value_GSR = group_G[:, None, None] + seed_S[:, None] * ratio_R  # ratios are as metrics
        drawn = cluster_bootstrap(
            value_GSR.reshape(num_groups, -1), np.arange(num_groups), num_resamples=2000, seed=trial
        )
        low_R, high_R = interval(over_seeds(drawn, num_seeds))
        inside_R += (low_R <= 0) & (high_R >= 0)
    np.testing.assert_allclose(inside_R / trials, covered, atol=0.011)


def test_the_variance_of_few_seeds_is_not_made_smaller():
    """Of groups that are all alike, what is left is the standard error of the mean of the seeds."""
    seeds = np.array([0.1, 0.2, 0.6])
    found = over_seeds(cluster_bootstrap(np.tile(seeds, (40, 1)), np.arange(40)), 3)
    assert found.standard_error_M[0] == pytest.approx(seeds.std(ddof=1) / np.sqrt(3), rel=0.03)


def test_columns_of_several_metrics_stay_apart():
    value_QSM = np.random.default_rng(1).random((50, 3, 2))
    both = over_seeds(cluster_bootstrap(value_QSM.reshape(50, 6), np.arange(50)), 3)
    second = over_seeds(cluster_bootstrap(value_QSM[:, :, 1], np.arange(50)), 3)
    np.testing.assert_allclose(both.draws_BM[:, 1], second.draws_BM[:, 0])
    assert both.estimate_M[0] == pytest.approx(value_QSM[:, :, 0].mean())
