"""Fusions and the gate against a loop over every query and candidate."""

import numpy as np
import pytest

from eval.scoring.fuse import choose, gated, margin, max_score, mean_embedding, together
from eval.scoring.search import Ranking, search
from rge.common.schema import Encoded


def integers(rng, rows, dim=5):
    return rng.integers(-2, 3, (rows, dim)).astype(np.float32)


def encoded(rng, num, *, reasons=True):
    x = rng.standard_normal((num, 4)).astype(np.float32)
    return Encoded(
        embeddings=x / np.linalg.norm(x, axis=1, keepdims=True),
        rationales=[f"r{n}" if reasons else "" for n in range(num)],
        num_rationale_tokens=rng.integers(1, 9, num) if reasons else np.zeros(num, np.int64),
        stop_reasons=["emb" if reasons else "prefilled"] * num,
        generate_ms=rng.random(num) if reasons else np.zeros(num),
        embed_ms=rng.random(num),
    )


@pytest.mark.parametrize("depth", [1, 7, 60, 100])
def test_the_best_score_ranks_as_a_full_sort_of_all_scores_does(depth):
    rng = np.random.default_rng(depth)
    samples, candidates = [integers(rng, 20) for _ in range(3)], integers(rng, 60)
    found = max_score([search(one, candidates, depth=depth) for one in samples])
    best_QC = np.max([one @ candidates.T for one in samples], axis=0)
    for query, scores in enumerate(best_QC):
        order = np.lexsort((np.arange(60), -scores))
        kept = order[scores[order] >= scores[order][min(depth, 60) - 1]]
        rows = found.rows_QW[query]
        np.testing.assert_array_equal(rows[rows >= 0], kept)
        np.testing.assert_array_equal(found.score_QW[query][rows >= 0], scores[kept])
    assert found.depth == depth


def test_the_mean_embedding_is_that_of_unit_vectors():
    samples = [np.array([[1, 0], [0, 1]], np.float32), np.array([[0, 1], [0, 1]], np.float32)]
    np.testing.assert_allclose(mean_embedding(samples), [[0.5**0.5, 0.5**0.5], [0, 1]], rtol=1e-6)
    one = encoded(np.random.default_rng(0), 5).embeddings
    np.testing.assert_allclose(mean_embedding([one]), one, atol=1e-7)
    assert mean_embedding([one]).dtype == np.float32


def test_margin_and_choice():
    wide = Ranking(
        np.array([[0, 1, 2], [2, 1, 0]], np.int32), np.array([[0.9, 0.5, 0.5], [0.7, 0.7, 0.1]]), 2
    )
    narrow = Ranking(np.array([[1, 0], [0, 1]], np.int32), np.array([[0.8, 0.2], [0.6, 0.3]]), 2)
    np.testing.assert_allclose(margin(wide), [0.4, 0.0])
    single = Ranking(np.array([[0]], np.int32), np.array([[0.3]]), 1)
    assert margin(single).tolist() == [2.0]  # the largest difference of cosines
    found = choose(np.array([True, False]), wide, narrow)
    assert found.rows_QW.tolist() == [[0, 1, 2], [0, 1, -1]]
    np.testing.assert_array_equal(found.score_QW, np.float32([[0.9, 0.5, 0.5], [0.6, 0.3, -np.inf]]))


def test_costs_add_up():
    rng = np.random.default_rng(1)
    one, other, direct = encoded(rng, 4), encoded(rng, 4), encoded(rng, 4, reasons=False)
    other.stop_reasons[2] = "forced"
    both = together([one, other], one.embeddings)
    np.testing.assert_array_equal(
        both.num_rationale_tokens, one.num_rationale_tokens + other.num_rationale_tokens
    )
    np.testing.assert_allclose(both.generate_ms, one.generate_ms + other.generate_ms)
    assert both.rationales[1] == "r1\n\nr1"
    assert both.stop_reasons == ["emb", "emb", "forced", "emb"]
    reason_Q = np.array([True, False, True, False])
    gate = gated(reason_Q, one, direct)
    np.testing.assert_allclose(gate.embed_ms, direct.embed_ms + np.where(reason_Q, one.embed_ms, 0))
    np.testing.assert_array_equal(gate.num_rationale_tokens, np.where(reason_Q, one.num_rationale_tokens, 0))
    assert gate.stop_reasons == ["emb", "prefilled", "emb", "prefilled"]
    np.testing.assert_array_equal(gate.embeddings[1], direct.embeddings[1])
