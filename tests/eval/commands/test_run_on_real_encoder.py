"""`eval.commands.run` on the real encoder: what it asks of `rge.embedder` is what `rge.embedder` gives."""

import inspect
import json

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, write_set

from eval.commands.run import RunOptions, run
from eval.embedding.fill_cache import Embeds
from rge.checkpoints.export import export, settings_of
from rge.embedder import Embedder


@pytest.fixture
def checkpoint(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "checkpoint", settings)
    return tmp_path / "checkpoint"


@pytest.mark.slow
def test_two_modes_of_a_real_checkpoint(checkpoint, tmp_path):
    data = write_set(tmp_path / "set", num_queries=10, num_candidates=12)
    options = {"checkpoint": checkpoint, "set": data, "query_mode": ("reasoning", "direct"), "report": False}
    dirs = run(RunOptions(**options, out=tmp_path / "a", batch_size=4))
    run(RunOptions(**options, out=tmp_path / "b", batch_size=1))
    for folder in dirs:
        one, other = (
            pd.read_parquet(path / "per_query.parquet") for path in (folder, tmp_path / "b" / folder.name)
        )
        assert one["rationale"].tolist() == other["rationale"].tolist()
        for left, right in zip(one["top10_scores"], other["top10_scores"], strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)
    results = json.loads((dirs[0] / "results.json").read_text())
    assert (results["dtype"], results["decoding"]["max_new_tokens"]) == ("float32", 6)
    assert results["checkpoint_hash"] == Embedder.from_pretrained(checkpoint).checkpoint_hash
    reasoning, direct = (pd.read_parquet(folder / "per_query.parquet") for folder in dirs)
    assert reasoning["rationale_tokens"].gt(0).any()
    assert direct["rationale_tokens"].eq(0).all()
    assert set(direct["stop_reason"]) == {"prefilled"}


@pytest.mark.slow
def test_another_prompt_profile_words_candidates_otherwise(checkpoint, tmp_path):
    """As MMEB needs it, whose texts carry their instructions; the cache must not mix the two up."""
    data = write_set(tmp_path / "set", num_queries=3, num_candidates=6)
    options = {"checkpoint": checkpoint, "set": data, "query_mode": ("direct",), "report": False}
    scores = {}
    for prompts in (None, "plain"):
        (out,) = run(
            RunOptions(**options, out=tmp_path / str(prompts), cache=tmp_path / "c", prompts=prompts)
        )
        scores[prompts] = np.stack(pd.read_parquet(out / "per_query.parquet")["top10_scores"])
    results = json.loads((out / "results.json").read_text())
    assert (results["prompts"]["profile"], results["settings"]["profile"]) == ("plain", "plain")
    assert np.abs(scores[None] - scores["plain"]).max() > 1e-4


def test_the_fake_and_the_protocol_have_the_real_signatures():
    real = [
        name for name in inspect.signature(Embedder.encode).parameters if name != "progress"
    ]  # a bar is ours
    assert list(inspect.signature(Embeds.encode).parameters) == real
    assert list(inspect.signature(FakeEncoder.encode).parameters) == real
