"""Mixtures: exact shares, a pure function of the step."""

from collections import Counter

import numpy as np
import pytest

from rge.data import mixture as mixtures
from rge.data.mixture import Mixture, permuted

SHARES = [
    ([1.0], 8),
    ([0.5, 0.25, 0.25], 48),
    ([0.911, 0.051, 0.714, 0.015], 8),
    ([0.537, 0.739, 0.035, 0.394, 0.731], 16),
    ([0.001, 1.0], 4),
    ([1, 1, 1], 1),
]


@pytest.mark.parametrize(("weights", "batch_size"), SHARES)
def test_every_batch_is_full_and_shares_are_exact_over_time(weights, batch_size):
    mixture = Mixture([50] * len(weights), weights, batch_size, seed=0)
    share = np.array(weights) / sum(weights)
    drawn: Counter[int] = Counter()
    for step in range(400):
        batch = mixture.batch(step)
        assert len(batch) == batch_size
        drawn.update(draw.source for draw in batch)
        expected = share * (step + 1) * batch_size
        assert all(abs(drawn[source] - expected[source]) < len(weights) for source in range(len(weights)))


def test_whole_shares_are_met_in_every_batch():
    """0.2 / (1 - 0.7) * 3 is a little less than 2 in floating point."""
    mixture = Mixture([100] * 3, [0.7, 0.2, 0.1], 10, seed=0)
    for step in range(50):
        assert Counter(draw.source for draw in mixture.batch(step)) == {0: 7, 1: 2, 2: 1}


@pytest.mark.parametrize("seed", [0, 1])
def test_each_record_comes_once_an_epoch_in_a_new_order(seed):
    mixture = Mixture([7, 13], [0.4, 0.6], 5, seed)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for step in range(60):
        # Within a step the order is mixed, so put a source's draws back by epoch.
        for source in (0, 1):
            seen[source] += sorted(draw.index for draw in mixture.batch(step) if draw.source == source)
    for source, size in enumerate((7, 13)):
        counts = Counter(seen[source])
        assert max(counts.values()) - min(counts[index] for index in range(size)) <= 1
    orders = [tuple(mixture._index(0, epoch, place) for place in range(7)) for epoch in range(5)]
    assert len(set(orders)) == 5
    assert all(sorted(order) == list(range(7)) for order in orders)


def test_one_source_is_gone_through_epoch_by_epoch():
    mixture = Mixture([12], [3.0], 4, seed=5)
    assert mixture.num_records == 12
    for epoch in range(3):
        indices = [draw.index for step in range(3 * epoch, 3 * epoch + 3) for draw in mixture.batch(step)]
        assert sorted(indices) == list(range(12))


def test_a_batch_is_a_pure_function_of_seed_and_step():
    mixture = Mixture([30, 40], [1, 2], 6, seed=3)
    forwards = [mixture.batch(step) for step in range(50)]
    assert [mixture.batch(step) for step in reversed(range(50))][::-1] == forwards
    assert Mixture([30, 40], [1, 2], 6, seed=3).batch(49) == forwards[49]
    assert Mixture([30, 40], [1, 2], 6, seed=4).batch(49) != forwards[49]
    seeds = [draw.seed for batch in forwards for draw in batch]
    assert len(set(seeds)) == len(seeds)


def test_sources_are_interleaved():
    """The share of a rank is a slice, so a batch must not come source by source."""
    halves = Counter()
    mixture = Mixture([1000, 1000], [1, 1], 16, seed=0)
    for step in range(100):
        halves.update(draw.source for draw in mixture.batch(step)[:8])
    assert abs(halves[0] - 400) < 60


@pytest.mark.parametrize(("weights", "batch_size"), SHARES)
def test_sources_of_their_own_take_turns_by_their_weights(weights, batch_size):
    size = 50
    mixture = Mixture([size] * len(weights), weights, batch_size, seed=0, groups=range(len(weights)))
    share = np.array(weights) / sum(weights)
    steps: Counter[int] = Counter()
    drawn: dict[int, list[int]] = {source: [] for source in range(len(weights))}
    for step in range(400):
        batch = mixture.batch(step)
        assert len(batch) == batch_size
        [source] = {draw.source for draw in batch}
        steps[source] += 1
        drawn[source] += [draw.index for draw in batch]
        assert abs(steps[source] - share[source] * (step + 1)) < len(weights)
    for indices in drawn.values():  # every record as often as the others, give or take the epoch under way
        counts = Counter(indices)
        assert not indices or max(counts.values()) - min(counts[index] for index in range(size)) <= 2
    assert mixture.batch(7) == Mixture(
        [size] * len(weights), weights, batch_size, 0, groups=range(len(weights))
    ).batch(7)


@pytest.mark.parametrize("sub_batches", [1, 2, 4])
def test_a_sub_batch_is_of_one_group_and_shares_stay_exact(sub_batches):
    """Sources 0 and 2 share their sub-batches, the others have their own."""
    weights, groups, batch_size = [3, 2, 1, 2], [0, 1, 0, 2], 12
    mixture = Mixture([50] * 4, weights, batch_size, seed=0, groups=groups, sub_batches=sub_batches)
    size = batch_size // sub_batches
    drawn: Counter[int] = Counter()
    at_once = Counter()
    for step in range(200):
        found = Counter(draw.source for draw in mixture.batch(step))
        of_group = Counter()
        for source, count in found.items():
            of_group[groups[source]] += count
            at_once[source] = max(at_once[source], count)
        assert all(count % size == 0 for count in of_group.values())
        assert sum(found.values()) == batch_size
        drawn.update(found)
        assert [drawn[source] for source in range(4)] == mixture.drawn_before(step + 1)
        for source, weight in enumerate(weights):
            assert abs(drawn[source] - weight / 8 * (step + 1) * batch_size) <= 3 * size
    assert len(set(map(len, (mixture.batch(step) for step in range(9))))) == 1
    assert all(at_once[source] <= mixture.most_at_once(source) + size for source in range(4))
    assert all(mixture.most_at_once(source) <= at_once[source] for source in (1, 3))


def test_the_order_of_sources_and_which_share_a_step_are_drawn():
    def steps(seed: int, sub_batches: int = 1) -> list[tuple[int, ...]]:
        mixture = Mixture([50] * 6, [1] * 6, 12, seed, groups=range(6), sub_batches=sub_batches)
        return [tuple(sorted({draw.source for draw in mixture.batch(step)})) for step in range(120)]

    once = steps(0)
    rounds = {tuple(once[start : start + 6]) for start in range(0, 120, 6)}
    assert len(rounds) > 15
    assert all(sorted(one) == [(source,) for source in range(6)] for one in rounds)  # each once in a round
    assert once == steps(0)
    assert once != steps(1)
    assert len(set(steps(0, 2))) > 12  # of 15 pairs; in a fixed order three


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_permuted_is_a_permutation(size):
    orders = [[permuted(place, size, key) for place in range(size)] for key in ("a", "b")]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size >= 7:
        assert orders[0] != orders[1]
        assert orders[0] != list(range(size))


def test_a_large_source_is_gone_through_without_an_order_in_memory(monkeypatch):
    monkeypatch.setattr(mixtures, "LARGE", 20)
    mixture = Mixture([21, 5], [1, 1], 14, seed=0)
    assert mixture._orders == {}
    seen = [[draw.index for draw in mixture.batch(step) if draw.source == 0] for step in range(6)]
    assert mixture._orders.keys() == {(1, epoch) for epoch in range(9)} or len(mixture._orders) <= 9
    assert all(source == 1 for source, _ in mixture._orders)
    first, second = sum(seen[:3], []), sum(seen[3:], [])
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second
