"""Embedding with a finished checkpoint: the same row whatever it is batched with."""

import numpy as np
import pytest
import torch

from rge.checkpoints.export import export, settings_of
from rge.common.images import ImageError
from rge.common.schema import Item
from rge.encoder import load_encoder
from rge.model.packing import Branch


@pytest.fixture
def encoder(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=7,
    )  # fmt: skip
    export(lively, tmp_path / "final", settings)
    return load_encoder(tmp_path / "final")


@pytest.fixture
def items(make_items, picture, tmp_path):
    """21 items, so that windows and batches end unevenly."""
    found = []
    for number, item in enumerate(make_items(21)):
        paths = []
        for place in range(number % 3):
            paths.append(str(tmp_path / f"{number}_{place}.png"))
            picture(30 + 7 * number, 100 - 3 * number, number).save(paths[-1])
        found.append(Item(item.id, item.text, tuple(paths), "find it" if number % 2 else None))
    return found


@pytest.mark.parametrize("mode", ["direct", "reasoning"])
@pytest.mark.parametrize("side", ["query", "candidate"])
def test_batch_one_equals_batch_n(encoder, items, mode, side):
    settings = {"side": side, "mode": mode}
    alone = encoder.encode(items, batch_size=1, **settings)
    for batch_size in (2, 5, 64):
        found = encoder.encode(items, batch_size=batch_size, **settings)
        np.testing.assert_allclose(found.embeddings, alone.embeddings, atol=1e-5)
        assert found.rationales == alone.rationales
        assert found.stop_reasons == alone.stop_reasons
        assert np.array_equal(found.num_rationale_tokens, alone.num_rationale_tokens)
    backwards = encoder.encode(items[::-1], batch_size=5, **settings)
    np.testing.assert_allclose(backwards.embeddings[::-1], alone.embeddings, atol=1e-5)


def test_direct_mode_is_the_state_at_a_prefilled_emb(encoder, items):
    found = encoder.encode(items, side="candidate", mode="direct", batch_size=4)
    embedder = encoder.embedder
    prompts = [encoder.builder.build(item, "candidate") for item in items]
    with torch.no_grad():
        states = torch.cat(
            [
                embedder(embedder.pack([p], [[Branch([embedder.emb_id], read_state=True)]]))[0].state_ND
                for p in prompts
            ]
        )
    np.testing.assert_allclose(found.embeddings, states.numpy(), atol=1e-5)
    assert found.rationales == [""] * 21
    assert found.stop_reasons == ["prefilled"] * 21
    assert not found.num_rationale_tokens.any()
    assert not found.generate_ms.any()
    assert (found.embed_ms > 0).all()


def test_reasoning_mode_reports_what_was_written(encoder, items):
    found = encoder.encode(items, side="query", mode="reasoning", batch_size=4)
    direct = encoder.encode(items, side="query", mode="direct", batch_size=4)
    assert set(found.stop_reasons) == {"emb", "forced"}
    for row in range(21):
        assert (found.stop_reasons[row] == "forced") == (found.num_rationale_tokens[row] == 12)
        assert "<emb>" not in found.rationales[row]
    assert (found.generate_ms > 0).all()
    # A rationale changes the embedding, unless it is empty.
    moved = np.linalg.norm(found.embeddings - direct.embeddings, axis=1) > 1e-3
    assert np.array_equal(moved, found.num_rationale_tokens > 0)


def test_embeddings_are_float32_of_unit_norm(encoder, items):
    for mode in ("direct", "reasoning"):
        found = encoder.encode(items, side="query", mode=mode)
        assert found.embeddings.dtype == np.float32
        assert found.embeddings.shape == (21, 32)
        np.testing.assert_allclose(np.linalg.norm(found.embeddings, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("mode", ["direct", "reasoning"])
def test_nothing_to_embed(encoder, mode):
    found = encoder.encode([], side="query", mode=mode)
    assert found.embeddings.shape == (0, 32)
    assert found.embeddings.dtype == np.float32
    assert (found.rationales, found.stop_reasons) == ([], [])
    assert len(found.num_rationale_tokens) == len(found.generate_ms) == len(found.embed_ms) == 0


@pytest.mark.parametrize("mode", ["direct", "reasoning"])
def test_progress_adds_up(encoder, items, mode):
    seen = []
    encoder.encode(items, side="query", mode=mode, batch_size=2, on_progress=seen.append)
    assert sum(seen) == 21
    assert max(seen) == 2


def test_overrides_of_the_checkpoints_generation(encoder, items):
    short = load_encoder(encoder.checkpoint, max_new_tokens=2)
    assert short.encode(items, side="query", mode="reasoning").num_rationale_tokens.max() == 2
    sampling = load_encoder(encoder.checkpoint, temperature=1.5)
    with pytest.raises(ValueError, match="needs one seed a rationale"):
        sampling.encode(items, side="query", mode="reasoning")
    runs = [
        sampling.encode(items, side="query", mode="reasoning", batch_size=size, seeds=range(21)).rationales
        for size in (1, 8)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != encoder.encode(items, side="query", mode="reasoning").rationales
    assert short.settings["generation"]["max_new_tokens"] == 2
    assert short.settings["dtype"] == "float32"


def test_bfloat16_embeds_about_the_same(encoder, items):
    exact = encoder.encode(items[:4], side="query", mode="direct")
    coarse = load_encoder(encoder.checkpoint, dtype="bfloat16").encode(items[:4], side="query", mode="direct")
    assert coarse.embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(coarse.embeddings, axis=1), 1, atol=1e-6)
    assert ((exact.embeddings * coarse.embeddings).sum(axis=1) > 0.98).all()


def test_errors(encoder, items, tmp_path):
    with pytest.raises(ValueError, match="mode must be reasoning or direct, got 'fast'"):
        encoder.encode(items, side="query", mode="fast")
    with pytest.raises(ValueError, match="side must be query or candidate, got 'doc'"):
        encoder.encode(items, side="doc", mode="direct")
    with pytest.raises(ImageError, match=r"gone\.png cannot be read"):
        encoder.encode([Item("x", "egg", (str(tmp_path / "gone.png"),))], side="query", mode="direct")
    with pytest.raises(ValueError, match="item 'x' has neither text nor images"):
        encoder.encode([Item("x", " ")], side="query", mode="direct")
