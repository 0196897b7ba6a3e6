"""Metrics against hand-worked values, a naive loop, and trec_eval by way of ir-measures."""

import itertools
import math

import ir_measures
import numpy as np
import pytest
from faults import error_about
from ir_measures import AP, RR, P, R, Success, nDCG

from eval.scoring.metrics import (
    compute,
    cut,
    first_hit_rank,
    judge,
    lower_is_better,
    metric_words,
    names_of,
    parse_name,
    random_floor,
    tied_order,
)
from rge.common.errors import UserError

ALL_NAMES = names_of(negatives=True)


def judged_rows(rows, positives, negatives=None, *, num_candidates=100):
    """One query: ranked rows, {row: gain}, negative rows."""
    items = sorted(positives.items())
    arrays = (np.array([r for r, _ in items], np.int32), np.array([g for _, g in items], float))
    listed = None if negatives is None else [np.array(sorted(negatives), np.int32)]
    return judge(np.array([rows], np.int32), [arrays], listed, num_candidates=num_candidates)


def naive(name, rows, positives, negatives):
    """The definitions once more, as loops over one query."""
    kind, _, k = name.partition("@")
    negatives = set(negatives) - set(positives)
    if kind == "mrr":
        return next((1 / rank for rank, row in enumerate(rows, 1) if row in positives), 0.0)
    k = int(k)

    def precision_sum(ranked):
        total, hits = 0.0, 0
        for rank, row in enumerate(ranked[:k], 1):
            if row in positives:
                hits += 1
                total += hits / rank
        return total

    hits = sum(row in positives for row in rows[:k])
    wrong = sum(row in negatives for row in rows[:k])
    capped = precision_sum(rows) / min(len(positives), k)
    if kind == "recall":
        return hits / len(positives)
    if kind == "hit":
        return float(hits > 0)
    if kind == "precision":
        return hits / k
    if kind == "ndcg":
        gains = [positives.get(row, 0) for row in rows[:k]]
        best = sorted(positives.values(), reverse=True)[:k]
        dcg, ideal = (sum(g / math.log2(rank + 1) for rank, g in enumerate(x, 1)) for x in (gains, best))
        return dcg / ideal
    if kind == "map":
        return precision_sum(rows) / len(positives)
    if kind == "map_capped":
        return capped
    if not negatives:
        return math.nan
    if kind == "negative_recall":
        return wrong / min(len(negatives), k)
    assert kind == "delta_map_capped"
    return precision_sum([row for row in rows if row not in negatives]) / min(len(positives), k) - capped


def random_case(rng, *, num_queries=40, num_candidates=80, depth=60):
    rankings, positives, negatives = [], [], []
    for query in range(num_queries):
        length = 0 if query == 0 else rng.integers(1, depth + 1)
        rankings.append(rng.permutation(num_candidates)[:length].tolist())
        chosen = rng.permutation(num_candidates)[: rng.integers(1, 16)]
        positives.append({int(row): int(rng.integers(1, 4)) for row in chosen})
        listed = rng.permutation(num_candidates)[: 0 if query % 5 == 1 else rng.integers(1, 20)]
        negatives.append({int(row) for row in listed})
    rows = np.full((num_queries, depth), -1, np.int32)
    for query, ranking in enumerate(rankings):
        rows[query, : len(ranking)] = ranking
    pairs = [
        (np.array(sorted(p), np.int32), np.array([p[row] for row in sorted(p)], float)) for p in positives
    ]
    listed = [np.array(sorted(n), np.int32) for n in negatives]
    return rankings, positives, negatives, judge(rows, pairs, listed, num_candidates=num_candidates)


def test_hand_worked_values():
    """Ranks 1-5: miss, gain 2, explicit negative, miss, gain 1; a third positive (gain 1) is never retrieved."""
    judged = judged_rows([9, 2, 7, 8, 5], {2: 2, 5: 1, 6: 1}, {7, 3})
    expected = {
        "recall@1": 0.0,
        "recall@5": 2 / 3,
        "hit@1": 0.0,
        "hit@5": 1.0,
        "precision@10": 2 / 10,
        "mrr": 1 / 2,
        "map@5": (1 / 2 + 2 / 5) / 3,
        "map@2": (1 / 2) / 3,
        "map_capped@2": (1 / 2) / 2,
        "ndcg@5": (2 / math.log2(3) + 1 / math.log2(6)) / (2 + 1 / math.log2(3) + 1 / 2),
        "negative_recall@5": 1 / 2,
        "negative_recall@1": 0 / 1,
        # without row 7 the second positive moves to rank 4
        "delta_map_capped@5": (1 / 2 + 2 / 4) / 3 - (1 / 2 + 2 / 5) / 3,
    }
    for name, value in expected.items():
        assert compute(name, judged)[0] == pytest.approx(value, abs=1e-15), name
    assert first_hit_rank(judged).tolist() == [2]


@pytest.mark.parametrize(
    "name", [*ALL_NAMES, "recall@3", "ndcg@100", "map@1", "map_capped@50", "delta_map_capped@3"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_naive_loop(name, seed):
    rankings, positives, negatives, judged = random_case(np.random.default_rng(seed))
    expected = [naive(name, *case) for case in zip(rankings, positives, negatives, strict=True)]
    np.testing.assert_allclose(compute(name, judged), expected, rtol=0, atol=1e-14)


def trec_values(rankings, scores, positives, names):
    """By ir-measures; its ties go to the larger id, so ids count down where ours count up."""
    measures = {"recall": R, "hit": Success, "precision": P, "ndcg": nDCG, "map": AP}
    wanted = {}
    for name in names:
        kind, k = parse_name(name)
        wanted[RR if k is None else measures[kind] @ k] = name
    qrels = [
        ir_measures.Qrel(f"{q:03d}", f"{9999 - c}", g) for q, p in enumerate(positives) for c, g in p.items()
    ]
    run = [
        ir_measures.ScoredDoc(f"{q:03d}", f"{9999 - c}", s)
        for q, (ranked, points) in enumerate(zip(rankings, scores, strict=True))
        for c, s in zip(ranked, points, strict=True)
    ]
    out = {name: np.zeros(len(rankings)) for name in names}
    for found in ir_measures.iter_calc(list(wanted), qrels, run):
        out[wanted[found.measure]][int(found.query_id)] = found.value
    return out


@pytest.mark.parametrize("levels", [None, 7])
def test_agrees_with_trec_eval(levels):
    """On random and, with few score levels, on heavily tied runs."""
    rng = np.random.default_rng(3)
    _, positives, _, _ = random_case(rng)
    num_queries, num_candidates = len(positives), 80
    scores = rng.standard_normal((num_queries, num_candidates))
    if levels is not None:
        scores = np.round(scores * levels / 4).clip(-levels, levels)
    order = np.argsort(-scores, axis=1, kind="stable")  # ties to the smaller row
    pairs = [(np.array(sorted(p), np.int32), np.array([p[r] for r in sorted(p)], float)) for p in positives]
    judged = judge(order.astype(np.int32), pairs, None, num_candidates=num_candidates)
    names = [name for name in names_of() if not name.startswith("map_capped")]
    theirs = trec_values(order.tolist(), np.take_along_axis(scores, order, 1).tolist(), positives, names)
    for name in names:
        np.testing.assert_allclose(compute(name, judged), theirs[name], rtol=0, atol=1e-12, err_msg=name)


def test_perfect_ranking_is_one_only_where_it_can_be():
    """20 positives on top: AP over all of them, and recall, cannot reach 1 at 10; the capped AP does."""
    judged = judged_rows(range(30), dict.fromkeys(range(20), 1))
    assert compute("map_capped@10", judged)[0] == 1.0
    assert compute("map@10", judged)[0] == 0.5
    assert compute("recall@10", judged)[0] == 0.5
    assert compute("ndcg@10", judged)[0] == pytest.approx(1.0)


def test_unretrieved_positives_stay_in_the_denominator():
    whole, short = judged_rows(range(50), {0: 1, 40: 1}), judged_rows(range(10), {0: 1, 40: 1})
    for name in ("recall@10", "map@10", "ndcg@10"):
        assert compute(name, whole) == compute(name, short)


def test_positive_that_is_also_negative_counts_as_positive():
    judged = judged_rows([1, 2, 3], {1: 1}, {1, 2})
    assert compute("negative_recall@3", judged)[0] == 1.0  # one negative is left, row 2, and it is retrieved
    assert compute("recall@1", judged)[0] == 1.0
    only = judged_rows([1, 2, 3], {1: 1}, {1})
    assert math.isnan(compute("negative_recall@3", only)[0])
    assert math.isnan(compute("delta_map_capped@3", only)[0])


def test_an_empty_ranking_scores_zero():
    judged = judge(np.empty((1, 0), np.int32), [(np.array([1]), np.array([1.0]))], None, num_candidates=3)
    assert [compute(name, judged)[0] for name in names_of()] == [0.0] * len(names_of())
    assert first_hit_rank(judged)[0] == 0


@pytest.mark.parametrize(
    "name", [*(n for n in ALL_NAMES if n != "delta_map_capped@10"), "recall@3", "map_capped@4"]
)
def test_tied_orders_bound_every_order(name):
    """All orders of two tie groups, by brute force."""
    rows, scores = [0, 1, 2, 3, 4, 5], np.array([[3.0, 2.0, 2.0, 2.0, 1.0, 1.0]])
    positives, negatives = {2: 1, 3: 3, 5: 2}, {1, 4}
    judged = judged_rows(rows, positives, negatives)
    orders = [
        [0, *middle, *last]
        for middle in itertools.permutations([1, 2, 3])
        for last in itertools.permutations([4, 5])
    ]
    values = [naive(name, order, positives, negatives) for order in orders]
    best, worst = (compute(name, tied_order(judged, scores, best=best))[0] for best in (True, False))
    if name.startswith("negative_recall"):
        best, worst = worst, best
    assert best == pytest.approx(max(values), abs=1e-15)
    assert worst == pytest.approx(min(values), abs=1e-15)


def test_tied_order_leaves_untied_queries_and_endings_alone():
    judged = judge(
        np.array([[0, 1, -1, -1], [2, 1, 0, -1]], np.int32),
        [(np.array([1]), np.array([1.0])), (np.array([0]), np.array([1.0]))],
        None,
        num_candidates=3,
    )
    scores = np.array([[2.0, 1.0, -np.inf, -np.inf], [1.0, 1.0, 1.0, -np.inf]])
    best = tied_order(judged, scores, best=True)
    assert best.gain_QK.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert tied_order(judged, scores, best=False).gain_QK.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_ties_beyond_the_cut_count_in_the_best_case():
    """Depth 2, and the positive ties with the second candidate from outside: it may be in, and may be out."""
    judged = judged_rows([0, 1, 2], {2: 1})
    scores = np.array([[2.0, 1.0, 1.0]])
    assert compute("mrr", cut(tied_order(judged, scores, best=True), 2))[0] == 0.5
    assert compute("mrr", cut(judged, 2))[0] == 0.0


@pytest.mark.parametrize(
    "name", [*ALL_NAMES, "recall@3", "hit@2", "map@4", "map_capped@4", "delta_map_capped@2"]
)
def test_random_floor_is_the_mean_over_all_orders(name):
    """Six candidates have 720 orders, so the expectation is checked exactly; depth 5 matters to mrr only."""
    positives, negatives = {1: 2, 3: 1, 4: 1}, {0, 2}
    values = [naive(name, order[:5] if name == "mrr" else order, positives, negatives) for order in itertools.permutations(range(6))]  # fmt: skip
    judged = judged_rows(range(6), positives, negatives, num_candidates=6)
    floor = random_floor(name, judged, np.array([6]), depth=5)
    assert floor[0] == pytest.approx(np.mean(values), abs=1e-13)


def test_random_floor_of_a_smaller_pool_than_k_is_certain():
    judged = judged_rows(range(6), {1: 1}, num_candidates=6)
    assert random_floor("recall@20", judged, np.array([6]), depth=6)[0] == 1.0
    assert random_floor("hit@20", judged, np.array([6]), depth=6)[0] == pytest.approx(1.0)


def test_rmir_floor():
    """One positive among 35,803: R@20 0.056 %, R@50 0.140 %, as published beside RMIR's table."""
    judged = judged_rows([0], {1: 1})
    floors = [random_floor(f"recall@{k}", judged, np.array([35_803]), depth=1000)[0] for k in (20, 50)]
    assert [round(100 * floor, 3) for floor in floors] == [0.056, 0.140]


@pytest.mark.parametrize("name", ["recal@10", "recall", "recall@0", "mrr@0", "recall@x"])
def test_unknown_names_are_refused(name):
    with error_about(ValueError, name):
        parse_name(name)


def test_a_metric_of_the_whole_ranking_may_be_cut():
    judged = judged_rows([3, 4, 0], {0: 1})
    assert [compute(name, judged)[0] for name in ("mrr", "mrr@3", "mrr@2")] == [1 / 3, 1 / 3, 0]
    floor = random_floor("mrr@2", judged, np.array([4]), depth=1000)
    assert floor[0] == pytest.approx((1 + 1 / 2) / 4)
    assert metric_words("mrr@2") == f"{metric_words('mrr')}, in the first 2"


@pytest.mark.parametrize("name", ["negative_recall@10", "delta_map_capped@10"])
def test_metrics_of_negatives_need_negatives(name):
    with error_about(UserError, "negatives.parquet"):
        compute(name, judged_rows([0], {0: 1}))
    with error_about(UserError, "negatives.parquet"):
        random_floor(name, judged_rows([0], {0: 1}), np.array([6]), depth=5)


def test_a_first_candidate_of_another_kind_than_every_right_one():
    """Kinds 0, 1, 1, 2; the second query has right candidates of two kinds, the third none in the pool, the fourth no ranking."""
    rows = np.array([[0, 1], [2, 0], [3, 0], [-1, -1]], np.int32)
    right = [(np.array(one, np.int32), np.ones(len(one))) for one in ([1], [1, 3], [], [0])]
    kinds = np.array([0, 1, 1, 2])
    judged = judge(rows, right, None, num_candidates=4, num_missing_Q=np.array([0, 0, 1, 0]), kind_C=kinds)
    assert names_of(kinds=True) == (*names_of(), "wrong_kind@1")
    assert lower_is_better("wrong_kind@1")
    np.testing.assert_array_equal(compute("wrong_kind@1", judged), [1.0, 0.0, np.nan, np.nan])
    np.testing.assert_array_equal(compute("wrong_kind@2", judged), [0.5, 0.5, np.nan, np.nan])
    with error_about(UserError, "wrong_kind", "pool"):
        compute("wrong_kind@1", judge(rows, right, None, num_candidates=4))
