"""Search against a full sort. Embeddings of small integers make every float32 score exact, and ties frequent."""

import faiss
import numpy as np
import pytest

from eval.scoring.search import from_ordered_integers, ordered_integers, search
from rge.index import nearest


def integers(rng, rows, dim=6, high=2):
    return rng.integers(-high, high + 1, (rows, dim)).astype(np.float32)


def full_sort(query_QD, candidate_CD, depth, *, excluded=None, candidates=None):
    """Every score, one lexsort a query; rows and scores within the depth, and the rows tied with its last."""
    out = []
    for number, query in enumerate(query_QD):
        rows = np.arange(len(candidate_CD)) if candidates is None else candidates[number]
        if excluded is not None:
            rows = np.setdiff1d(rows, excluded[number])
        scores = (candidate_CD[rows].astype(np.float64) @ query).astype(np.float32)
        order = np.lexsort((rows, -scores))
        rows, scores = rows[order], scores[order]
        last = scores[min(depth, len(rows)) - 1]
        keep = (np.arange(len(rows)) < depth) | (scores == last)
        out.append((rows[keep], scores[keep]))
    return out


def check(ranking, expected):
    for number, (rows, scores) in enumerate(expected):
        found = ranking.rows_QW[number] >= 0
        np.testing.assert_array_equal(ranking.rows_QW[number][found], rows)
        np.testing.assert_array_equal(ranking.score_QW[number][found], scores)
        assert np.isneginf(ranking.score_QW[number][~found]).all()
        assert found[: len(rows)].all()  # padding only at the end


@pytest.fixture(params=[None, "cpu"], ids=["faiss", "torch"])
def device(request, monkeypatch):
    """What a GPU does is done on CPU tensors, a few queries at a time."""
    monkeypatch.setattr(nearest, "SCORES", 1000)
    return request.param


@pytest.mark.parametrize("depth", [1, 3, 50, 200, 400, 1000])
@pytest.mark.parametrize("high", [1, 3])
def test_equals_a_full_sort_with_ties(depth, high, device):
    rng = np.random.default_rng(depth + high)
    queries, candidates = integers(rng, 30, high=high), integers(rng, 400, high=high)
    check(search(queries, candidates, depth=depth, device=device), full_sort(queries, candidates, depth))


@pytest.mark.parametrize("block_rows", [1, 7, 64, 399, 400])
def test_blocks_change_nothing(block_rows, device):
    rng = np.random.default_rng(5)
    queries, candidates = integers(rng, 25), integers(rng, 400)
    check(
        search(queries, candidates, depth=20, block_rows=block_rows, device=device),
        full_sort(queries, candidates, 20),
    )


@pytest.mark.parametrize("block_rows", [50, 1000])
def test_exclusions(block_rows, device):
    rng = np.random.default_rng(6)
    queries, candidates = integers(rng, 25), integers(rng, 300)
    excluded = [np.sort(rng.choice(300, rng.integers(0, 40), replace=False)) for _ in range(25)]
    found = search(queries, candidates, depth=30, excluded=excluded, block_rows=block_rows, device=device)
    check(found, full_sort(queries, candidates, 30, excluded=excluded))
    assert not any(np.isin(found.rows_QW[n], rows).any() for n, rows in enumerate(excluded))


def test_own_candidate_lists_with_and_without_exclusions():
    rng = np.random.default_rng(7)
    queries, candidates = integers(rng, 25), integers(rng, 300)
    lists = [np.sort(rng.choice(300, rng.integers(1, 60), replace=False)) for _ in range(25)]
    check(
        search(queries, candidates, depth=20, candidates=lists),
        full_sort(queries, candidates, 20, candidates=lists),
    )
    excluded = [rows[1::3] for rows in lists]
    check(
        search(queries, candidates, depth=20, candidates=lists, excluded=excluded),
        full_sort(queries, candidates, 20, candidates=lists, excluded=excluded),
    )


def test_a_pool_of_equals_comes_in_the_order_of_ids(device):
    """All of the pool ties with the last candidate that counts, far beyond what is fetched at first."""
    candidates = np.tile(np.array([[0.6, 0.8]], np.float32), (500, 1))
    found = search(np.array([[1.0, 0.0]], np.float32), candidates, depth=5, device=device)
    assert found.rows_QW.tolist() == [list(range(500))]


def test_ties_at_the_cut_are_fetched_in_rounds(monkeypatch):
    """300 different embeddings of equal score: the fetch doubles until the ties are complete, for that query only."""
    candidates = np.zeros((400, 3), np.float32)
    candidates[:, 0] = np.where(np.arange(400) < 300, 1.0, -1.0)
    candidates[:, 1] = np.arange(400)
    fetched = []
    knn = faiss.knn
    monkeypatch.setattr(faiss, "knn", lambda q, c, k, **kw: fetched.append((len(q), k)) or knn(q, c, k, **kw))
    queries = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    found = search(queries, candidates, depth=10)
    assert fetched == [(2, 18), (1, 36), (1, 72), (1, 144), (1, 288), (1, 400)]
    check(found, full_sort(queries, candidates, 10))


def test_identical_embeddings_tie_even_if_the_product_rounds_them_apart(monkeypatch):
    """A matrix product that is off by an ulp in every other column must not order equals."""
    knn = faiss.knn

    def noisy(q, c, k, **kw):
        score, row = knn(q, c, len(c), **kw)
        score = np.where(row % 2 == 0, score, np.nextafter(score, np.float32(2)))
        order = np.argsort(-score, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(score, order, 1), np.take_along_axis(row, order, 1)

    monkeypatch.setattr(faiss, "knn", noisy)
    rng = np.random.default_rng(8)
    base = integers(rng, 40)
    base = base[np.unique(base @ rng.standard_normal(6), return_index=True)[1]]  # all different
    same = rng.integers(0, len(base), 200)
    query = rng.standard_normal((1, 6)).astype(np.float32)
    rows = search(query, base[same], depth=200).rows_QW[0]
    for start, stop in zip(*_runs(same[rows]), strict=True):
        assert (np.diff(rows[start:stop]) > 0).all()
    assert len(_runs(same[rows])[0]) == len(set(same.tolist()))  # copies stay together


def _runs(values):
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts, np.append(starts[1:], len(values))


def test_real_vectors_agree_with_float64_up_to_rounding():
    rng = np.random.default_rng(9)
    queries, candidates = (rng.standard_normal((n, 64)).astype(np.float32) for n in (40, 3000))
    queries, candidates = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, candidates))
    found = search(queries, candidates, depth=100)
    assert found.rows_QW.shape == (40, 100)
    exact = queries.astype(np.float64) @ candidates.T.astype(np.float64)
    np.testing.assert_allclose(found.score_QW, np.take_along_axis(exact, found.rows_QW, 1), atol=1e-6)
    assert (found.score_QW.min(axis=1) >= np.sort(exact, axis=1)[:, -100] - 1e-6).all()


def test_a_memory_map_is_searched_in_blocks(tmp_path):
    rng = np.random.default_rng(10)
    candidates = integers(rng, 120)
    np.save(tmp_path / "c.npy", candidates)
    queries = integers(rng, 3)
    mapped = np.load(tmp_path / "c.npy", mmap_mode="r")
    check(search(queries, mapped, depth=10, block_rows=32), full_sort(queries, candidates, 10))


def test_ordered_integers_keep_order_and_come_back():
    values = np.array([-np.inf, -3.5, -1e-45, -0.0, 0.0, 1e-45, 0.1, 1.0, np.inf], np.float32)
    keys = ordered_integers(values)
    assert (np.diff(keys) >= 0).all()
    assert keys[3] == keys[4] == 0
    assert (np.diff(np.delete(keys, 3)) > 0).all()
    np.testing.assert_array_equal(from_ordered_integers(keys), values)
    assert ordered_integers(np.nextafter(np.float32(0.1), np.float32(1))) - keys[6] == 1
