"""A name becomes an embedder: by its files, by an explicit choice, or with an error that says what there is."""

import json
import shutil

import numpy as np
import pytest
from faults import error_about
from recorded import settings_of

from eval.__main__ import main
from rge.checkpoints.export import export
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.embedders.common import hash_of_files
from rge.embedders.registry import adapters, facts_of, load_model


@pytest.fixture
def own(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "own", settings)
    return tmp_path / "own"


@pytest.mark.parametrize("name", ["weights.npz", "model.onnx", "model.safetensors"])
def test_weights_in_any_format_decide_the_hash(tmp_path, name):
    """An embedder's own format is no error once its `matches` has accepted the files."""
    hashes = set()
    for content in (b"1", b"2"):
        (tmp_path / name).write_bytes(content)
        hashes.add(hash_of_files(facts_of(tmp_path)))
    (tmp_path / f"._{name}").write_bytes(b"a Mac's")
    hashes.add(hash_of_files(facts_of(tmp_path)))
    assert len(hashes) == 2


def adapter_of(path):
    return next((one.name for one in adapters() if one.matches(facts_of(path))), None)


def test_our_checkpoint_is_loaded_as_it_always_was(own):
    items = [Item("1", content_of("What opens this?")), Item("2", content_of("a padlock"))]
    found = load_model(own).encode(items, side="query", mode="reasoning")
    expected = Embedder.from_pretrained(own).encode(items, side="query", mode="reasoning")
    np.testing.assert_array_equal(found.embeddings, expected.embeddings)
    assert found.rationales == expected.rationales


def test_the_released_checkpoint_has_the_limits_of_its_evaluation(lively_path):
    """`lively_path` is what the release is: Qwen2.5-VL with <emb> and no rge.json."""
    assert adapter_of(lively_path) == "rge-release"
    encoder = load_model(lively_path)
    settings = encoder.settings.content()
    assert settings["generation"] == {"max_new_tokens": 128, "temperature": 0.0, "stop": "<emb>"}
    assert (settings["pixels"], settings["profile"]) == ({"min": 200_704, "max": 802_816}, "rge")
    assert settings["model"] == str(lively_path)
    assert any("repetition penalty" in one for one in settings["differs_from_release"])
    prompt = encoder.builder.build(Item("1", content_of("What opens this?")), "query")
    assert encoder.builder.tokenizer.decode(prompt.input_ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat opens this?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(UserError, match="missing is not a directory: pass one, or an id"):
        load_model("./missing")
    with error_about(UserError, "nobody/nothing"):
        load_model("nobody/nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3_v"}))
    with error_about(UserError, "phi3_v", "unknown"):
        load_model(tmp_path)
    with error_about(UserError, tmp_path, "adapter", "qwen2_vl"):
        load_model(tmp_path, adapter="vlm2vec")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with error_about(UserError, "gpt2", "unknown"):
        load_model(tmp_path)
    with error_about(UserError, "rge-release"):
        load_model(tmp_path, adapter="rge-relase")
    with error_about(UserError, tmp_path, "revision"):
        load_model(tmp_path, revision="main")
    (tmp_path / "config.json").write_text("{")
    with error_about(UserError, "config.json"):
        load_model(tmp_path)


@pytest.mark.slow
def test_either_checkpoint_or_model(own, tmp_path, capsys):
    from eval_fakes import write_set

    data = write_set(tmp_path / "set", num_queries=3, num_candidates=6)
    words = [f"set={data}", "query_mode=direct", "report=false"]
    assert main(["run", *words, f"out={tmp_path / 'a'}"]) == 2
    assert main(["run", *words, f"out={tmp_path / 'a'}", f"checkpoint={own}", f"model={own}"]) == 2
    assert capsys.readouterr().err.count("give checkpoint=DIR or model=NAME") == 2
    assert main(["run", *words, f"out={tmp_path / 'a'}", f"model={own}"]) == 0
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert results["model"] == {"name": str(own), "adapter": "rge", "revision": None}


def test_a_model_of_the_hub_is_recorded_with_its_commit(lively_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(lively_path))
    facts = facts_of("owner/name")
    assert (facts.name, facts.revision) == ("owner/name", lively_path.name)


def test_a_model_with_emb_that_cannot_be_the_release_is_refused(lively_path, tmp_path):
    path = shutil.copytree(lively_path, tmp_path / "lost")
    config = json.loads((path / "config.json").read_text()) | {"model_type": "qwen2_vl"}
    (path / "config.json").write_text(json.dumps(config))
    with error_about(UserError, "rge.json"):
        load_model(path)
