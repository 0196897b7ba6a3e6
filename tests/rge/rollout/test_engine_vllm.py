"""`engine=vllm`: a finished checkpoint whose rationales vLLM writes, against our own engine."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from family_models import build
from faults import error_about
from own_engine import OwnEngine
from paths import ROOT
from recorded import settings_of

from eval.commands.run import RunOptions, run
from rge.checkpoints.export import export
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.embedders.registry import load_model
from rge.model.backbone import BackboneError, load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.rollout import vllm_engine, vllm_writer

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
CAP = 12


def exported(path, backbone_path):
    model = EmbeddingModel(load_backbone(backbone_path)).eval()
    settings = settings_of(
        emb_id=model.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=784, max_pixels=7056, max_new_tokens=CAP,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip
    known = {"default": "find it", "known": ["find it"], "by_task": {}}
    settings = settings.but(instructions=known)
    export(model, path, settings)
    return path


def test_without_vllm_the_engine_is_refused_with_the_mend(lively_path, tmp_path, monkeypatch):
    checkpoint = exported(tmp_path / "final", lively_path)
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: None)
    with error_about(BackboneError, "engine", "package"):
        Embedder.from_pretrained(checkpoint, engine="vllm")


@pytest.mark.parametrize("lively_path", ["idefics3"], indirect=True)
def test_a_family_whose_pictures_vllm_lays_out_itself_is_refused(lively_path, tmp_path, monkeypatch):
    checkpoint = exported(tmp_path / "final", lively_path)
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: name)
    with error_about(BackboneError, "pictures"):
        Embedder.from_pretrained(checkpoint, engine="vllm")


@pytest.mark.slow
def test_states_are_the_models_own_after_what_the_engine_wrote(lively_path, tmp_path, monkeypatch, picture):
    checkpoint = exported(tmp_path / "final", lively_path)
    ours = Embedder.from_pretrained(checkpoint)
    items = [
        Item(str(row), content_of(f"what opens {row}?", (picture(40, 60, row),) * (row % 3)))
        for row in range(9)
    ]
    prompts = [ours.builder.build(item, "query") for item in items]
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32"))
    monkeypatch.setattr(vllm_engine, "Engine", lambda *args, **settings: OwnEngine(args[0], prompts))
    vllm = Embedder.from_pretrained(checkpoint, engine="vllm")
    assert vllm.settings.engine == "vllm 0.32"
    for mode in ("reasoning", "direct"):
        whole, found = (one.encode(items, side="query", mode=mode) for one in (ours, vllm))
        assert found.rationales == whole.rationales
        assert found.stop_reasons == whole.stop_reasons
        np.testing.assert_allclose(found.embeddings, whole.embeddings, atol=2e-5)
    with error_about(UserError, "engine"):
        vllm.with_(min_new_tokens=1).encode(items, side="query", mode="reasoning")
    with pytest.raises(ValueError):
        vllm.with_(exact=True).encode_query("a")


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def checkpoint(request, tmp_path_factory, enliven):
    """Of a model that vLLM's CPU kernels can run, whose states and tokens vary."""
    path = tmp_path_factory.mktemp("vllm states") / request.param
    build(request.param, path, head_size=32)
    backbone = load_backbone(path, add_emb=True)
    enliven(backbone.model, 1)
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[backbone.emb_id] *= 2.0
    backbone.model.save_pretrained(path)
    backbone.processor.save_pretrained(path)
    return exported(path.with_name("final"), path)


@pytest.fixture(scope="module")
def ours(checkpoint):
    return Embedder.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def vllm(checkpoint):
    embedder = Embedder.from_pretrained(checkpoint, engine="vllm", vllm_rows=16)
    yield embedder
    embedder._inference.engine.engine.close()


@pytest.fixture
def asked(make_items, picture):
    """Texts and pictures of 18 queries: none, one, two of different sizes."""
    texts = [item.text for item in make_items(18)]
    images = [
        [picture(40 + 9 * row, 90 - 3 * row, row + 50 * place) for place in range(row % 3)]
        for row in range(18)
    ]
    return texts, images


def assert_same(ours, theirs):
    np.testing.assert_allclose((ours * theirs).sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@with_vllm
@pytest.mark.vllm
def test_rationales_and_states_are_those_of_our_own_engine(ours, vllm, asked):
    expected, rationales = ours.encode_query(*asked, return_rationales=True)
    found, written = vllm.encode_query(*asked, return_rationales=True)
    assert written == rationales
    assert len({*written}) > 12
    assert_same(found, expected)
    items = [
        Item(str(row), content_of(text, tuple(images)))
        for row, (text, images) in enumerate(zip(*asked, strict=True))
    ]
    whole, again = (one.encode(items, side="query", mode="reasoning") for one in (ours, vllm))
    assert again.stop_reasons == whole.stop_reasons
    assert {*again.stop_reasons} == {"emb", "forced"}
    assert again.num_rationale_tokens.tolist() == whole.num_rationale_tokens.tolist()
    assert_same(vllm.encode_query(*asked, mode="direct"), ours.encode_query(*asked, mode="direct"))
    assert_same(vllm.encode_document(*asked), ours.encode_document(*asked))
    assert vllm.settings.engine.startswith("vllm 0.")
    assert ours.settings.engine is None
    prompts = [vllm.builder.build(item, "query") for item in items]
    given = [[5, 6, 7][: row % 4] for row in range(18)]
    assert_same(vllm.encode_after(prompts, given), ours.encode_after(prompts, given))


@with_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl"], indirect=True)
def test_a_wider_checkpoint_than_the_engine_holds_is_said(checkpoint, tmp_path):
    settings = json.loads((checkpoint / "rge.json").read_text())
    assert settings["max_prompt_tokens"] == 512
    with error_about(BackboneError, "engine", "vllm_memory", "start"):
        Embedder.from_pretrained(checkpoint, engine="vllm", max_new_tokens=10**7)


@with_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl"], indirect=True)
def test_evaluations_with_vllm_rank_as_with_our_own_engine(checkpoint, tmp_path):
    ran = {}
    for engine in ("own", "vllm"):
        for command, words in (("run", ["query_mode=reasoning,direct"]), ("budget", ["k=2", "gate=0.5"])):
            out = tmp_path / engine / command
            words = [
                *words,
                f"checkpoint={checkpoint}",
                f"set={ROOT}/data_prep/demo/data/test",
                f"out={out}",
                "limit=10",
            ]
            done = subprocess.run(
                [sys.executable, "-m", "rge", "eval", command, *words, f"engine={engine}", "report=false"],
                env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        ran[engine] = {
            name: pd.read_parquet(tmp_path / engine / name / "per_query.parquet")
            for name in (
                "run/reasoning-both",
                "run/direct-both",
                "budget/reasoning",
                "budget/direct",
                "budget/mean-2",
            )
        }
        ran[engine]["settings"] = json.loads(
            (tmp_path / engine / "run/direct-both/results.json").read_text()
        )["settings"]
    for name in ("run/reasoning-both", "run/direct-both", "budget/reasoning", "budget/direct"):
        pd.testing.assert_frame_equal(
            ran["own"][name][["query_id", "rationale", "first_hit_rank"]], ran["vllm"][name][["query_id", "rationale", "first_hit_rank"]]
        )  # fmt: skip
    assert len(ran["vllm"]["budget/mean-2"]) == 10
    assert ran["vllm"]["settings"]["engine"].startswith("vllm ")
    assert "engine" not in ran["own"]["settings"]


def test_engine_vllm_is_for_our_checkpoints_and_computes_no_row_alone(lively_path, tmp_path):
    checkpoint = exported(tmp_path / "final", lively_path)
    with error_about(UserError, checkpoint, "engine", ("choice", "adapter", ("rge",))):
        load_model(checkpoint, adapter="qwen-vl", engine="vllm")
    set_dir = ROOT / "data_prep/demo/data/test"
    options = RunOptions(
        checkpoint=checkpoint, set=set_dir, out=tmp_path / "out", engine="vllm", exact=True, limit=2
    )
    with error_about(UserError, "exact"):
        run(options, load=lambda: Embedder.from_pretrained(checkpoint))
