"""run.trec is the same to the last byte for every batch size and number of processes; and embedders need not know how."""

import json

import numpy as np
import pytest
from eval_fakes import write_set
from eval_processes import start
from recorded import settings_of

from eval.commands.run import RunOptions, run
from rge.checkpoints.export import export
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.rollout.generate import generate

ITEMS = [Item(f"i{n}", content_of(f"What opens this number {n}? " + "really " * (n % 5))) for n in range(14)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, lively_paths, backbone_of):
    from rge.model.embedding_model import EmbeddingModel

    model = EmbeddingModel(backbone_of(lively_paths("qwen2_5_vl")))
    settings = settings_of(
        emb_id=model.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=8, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("exact") / "own"
    export(model, path, settings)
    return path


def evaluate(checkpoint, data, out, **more):
    run(RunOptions(checkpoint=checkpoint, set=data, out=out, report=False, **more))
    return {path.parent.name: path.read_bytes() for path in out.rglob("run.trec")}


@pytest.mark.slow
def test_run_files_are_byte_equal_for_batches_of_1_8_and_32(checkpoint, tmp_path):
    data = write_set(tmp_path / "set", num_queries=12, num_candidates=16)
    both = {"query_mode": ("reasoning", "direct")}
    first = evaluate(checkpoint, data, tmp_path / "1", batch_size=1, **both)
    assert set(first) == {"reasoning-both", "direct-both"}
    for size in (8, 32):
        assert evaluate(checkpoint, data, tmp_path / str(size), batch_size=size, **both) == first
    drawn = {"temperature": 0.7, "candidate_mode": "reasoning"}
    (first,) = evaluate(checkpoint, data, tmp_path / "drawn1", batch_size=1, **drawn).values()
    (other,) = evaluate(checkpoint, data, tmp_path / "drawn8", batch_size=8, **drawn).values()
    assert other == first
    results = json.loads((tmp_path / "1" / "direct-both" / "results.json").read_text())
    assert results["exact"] is True
    assert results["identity"]["settings"]["exact"] is True


@pytest.mark.slow
def test_run_files_are_byte_equal_for_two_processes(checkpoint, tmp_path):
    data = write_set(tmp_path / "set", num_queries=12, num_candidates=16)
    (one,) = evaluate(checkpoint, data, tmp_path / "one", batch_size=32).values()
    words = (f"checkpoint={checkpoint}", f"set={data}", f"out={tmp_path / 'two'}", "batch_size=3")
    done = start(*words, pair=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "run.trec").read_bytes() == one


def test_exact_states_are_those_of_a_row_alone(checkpoint):
    embedder = Embedder.from_pretrained(checkpoint)
    alone = [embedder.encode([item], side="query", mode="direct").embeddings[0] for item in ITEMS]
    together = embedder.encode(ITEMS, side="query", mode="direct", batch_size=8).embeddings
    assert not np.array_equal(together, np.stack(alone))  # otherwise there is nothing to be exact about
    np.testing.assert_allclose(together, np.stack(alone), atol=2e-6)
    exact = embedder.with_(exact=True).encode(ITEMS, side="query", mode="direct", batch_size=8).embeddings
    np.testing.assert_array_equal(exact, np.stack(alone))


@pytest.mark.slow
def test_a_rationale_that_rounding_might_change_is_written_alone(checkpoint, monkeypatch):
    embedder = Embedder.from_pretrained(checkpoint).with_(exact=True)
    asked = []

    def watched(model, prompts, **options):
        asked.append((len(prompts), options["batch_size"]))
        return generate(model, prompts, **options)

    monkeypatch.setattr("rge.inference.generate", watched)
    monkeypatch.setattr("rge.inference.CLOSE", {"greedy": float("inf")})
    embedder.encode(ITEMS, side="query", mode="reasoning", batch_size=8)
    assert asked == [(14, 8)] + [(1, 1)] * 14
    asked.clear()
    monkeypatch.setattr("rge.inference.CLOSE", {"greedy": 0.0})
    embedder.encode(ITEMS, side="query", mode="reasoning", batch_size=8)
    assert asked == [(14, 8)]


def test_margins_by_hand(checkpoint):
    """The least lead of a chosen token, against a plain forward over what was written."""
    import torch

    embedder = Embedder.from_pretrained(checkpoint)
    prompts = [embedder.builder.build(item, "query") for item in ITEMS[:3]]
    found = generate(embedder.model, prompts, max_new_tokens=8, batch_size=3, margins=True)
    barred = torch.tensor(embedder.model.suppressed_ids)
    for prompt, rationale in zip(prompts, found, strict=True):
        written = [*rationale.ids, *([] if rationale.forced else [embedder.model.emb_id])]
        ids = torch.cat([prompt.input_ids, torch.tensor(written, dtype=torch.long)])[None]
        with torch.no_grad():
            logit = embedder.model.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        logit[:, barred] = float("-inf")
        best = logit.topk(2, dim=-1).values
        assert rationale.margin == pytest.approx(float((best[:, 0] - best[:, 1]).min()), abs=1e-4)
    drawn = generate(
        embedder.model,
        prompts,
        max_new_tokens=8,
        batch_size=3,
        temperature=0.7,
        seeds=[1, 2, 3],
        margins=True,
    )
    assert all(0 <= rationale.margin < 0.5 for rationale in drawn)
    assert all(
        r.margin == float("inf") for r in generate(embedder.model, prompts, max_new_tokens=8, batch_size=3)
    )
