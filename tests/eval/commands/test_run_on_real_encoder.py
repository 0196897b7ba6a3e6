"""`eval.commands.run` on the real encoder: what it asks of `rge.embedder` is what `rge.embedder` gives."""

import inspect
import json

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, tables, write_set, write_tables
from recorded import settings_of

from eval.__main__ import main
from eval.commands.run import RunOptions, run
from eval.scoring.identity import differences
from eval.scoring.results import Results
from rge.checkpoints.export import export
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.prompts import PromptBuilder
from rge.vectors.fill_cache import Embeds


@pytest.fixture
def checkpoint(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
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


@pytest.mark.slow
def test_queries_with_more_pictures_than_a_prompt_holds(lively, checkpoint, tmp_path, capsys):
    """The command names the query and what makes room; only then is anything but ``rge.json`` recorded."""
    content = tables(num_queries=3, num_candidates=6)
    content["queries"]["image"] = [pictures * 3 for pictures in content["queries"]["image"]]
    data = write_tables(tmp_path / "set", content)
    words = ["run", f"checkpoint={checkpoint}", f"set={data}", "query_mode=direct", "report=false"]
    one = Item("", content_of(None, tuple(content["queries"]["image"][0][:1])))
    room = (
        len(PromptBuilder(lively.processor, "plain").build(one, "query")) + 2
    )  # for one picture, not for three
    rge_json = json.loads((checkpoint / "rge.json").read_text())
    (checkpoint / "rge.json").write_text(json.dumps(rge_json | {"max_prompt_tokens": room}))
    assert main([*words, f"out={tmp_path / 'a'}"]) == 2
    [message] = [line for line in capsys.readouterr().err.splitlines() if "max_prompt_tokens" in line]
    assert "item 'q" in message
    assert f"exceed max_prompt_tokens={room} (3 pictures, " in message
    given = {"b": ["max_prompt_tokens=200"], "c": ["max_prompt_tokens=200", "max_pixels=784"]}
    found: dict = {}
    for out, more in given.items():
        assert main([*words, *more, f"out={tmp_path / out}"]) == 0
        found[out] = json.loads((tmp_path / out / "results.json").read_text())
    assert found["b"]["settings"]["pixels"] == rge_json["pixels"]
    assert found["b"]["settings"]["max_prompt_tokens"] == 200
    assert found["b"]["again"]["options"]["max_prompt_tokens"] == 200
    assert set(differences(*(Results.model_validate(found[name]) for name in ("b", "c")))) == {
        "settings.pixels.max"
    }
    (checkpoint / "rge.json").write_text(json.dumps(rge_json))
    assert main([*words, f"out={tmp_path / 'd'}"]) == 0
    usual = json.loads((tmp_path / "d/results.json").read_text())["settings"]
    assert {key: usual[key] for key in ("max_prompt_tokens", "pixels")} == {
        key: rge_json[key] for key in ("max_prompt_tokens", "pixels")
    }


def test_the_fake_and_the_protocol_have_the_real_signatures():
    ours = (
        "progress",
        "max_rationale_tokens",
    )  # an evaluation has its own bar, and asks for a cap by `asking`
    real = [name for name in inspect.signature(Embedder.encode).parameters if name not in ours]
    assert list(inspect.signature(Embeds.encode).parameters) == real
    assert list(inspect.signature(FakeEncoder.encode).parameters) == real
