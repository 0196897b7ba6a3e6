"""Adapters as a checkpoint: the merged model to rounding, PEFT's own files, and never on another base."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import every_family
from faults import error_about
from peft import PeftModel
from recorded import settings_of
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForImageTextToText

from eval.verify.__main__ import VerifyOptions, verify
from eval.verify.routes import RouteError
from rge.checkpoints.export import checkpoint_hash, export
from rge.checkpoints.settings import CheckpointError, read_settings
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.adapter_files import CONFIG, WEIGHTS, Base
from rge.model.adapters import AdapterError, add_adapters, merge
from rge.model.backbone import load_backbone, load_plain, load_processor, read_config
from rge.model.config import LoraConfig, ModelConfig
from rge.model.embedding_model import EmbeddingModel, embedder_to_train

LORA = {"rank": 3, "alpha": 6.0}
ITEMS = [
    Item("1", content_of("what is this")),
    Item("2", content_of("open a locked chick")),
    Item("3", content_of("key")),
]


def settings(embedder, **more):
    return settings_of(
        emb_id=embedder.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", stage="joint", step=7,
    ).but(**more)  # fmt: skip


def adapt(embedder, **changes):
    """With adapters that do something: PEFT's start with B = 0."""
    torch.manual_seed(0)
    add_adapters(embedder.model, LoraConfig(**LORA, **changes), embedder.emb_id)
    return stir(embedder)


def stir(embedder, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in embedder.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return embedder


def write(embedder, base, folder):
    """Checkpoints ``merged`` and ``adapters`` of one model."""
    export(embedder, folder / "merged", settings(embedder), dict(merge(embedder.model)))
    named = Base.of(str(base), None, embedder.rows_of_base).as_recorded_in(folder / "adapters")
    export(embedder, folder / "adapters", settings(embedder, base=named))
    return folder / "merged", folder / "adapters"


@pytest.fixture
def base(lively_path, tmp_path):
    """A base that a test may change."""
    return shutil.copytree(lively_path, tmp_path / "base")


@pytest.fixture
def written(lively, base, tmp_path):
    return write(adapt(lively), base, tmp_path / "run")


def assert_equal_models(one, other, tolerance=1e-6):
    weights, expected = other.state_dict(), one.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.slow
@every_family
def test_they_are_the_merged_model_for_us_and_for_peft(lively, lively_path, picture, tmp_path):
    merged, adapters = write(adapt(lively), lively_path, tmp_path)
    assert sorted(path.name for path in adapters.glob("*.safetensors")) == [WEIGHTS]
    picture(50, 80).save(tmp_path / "egg.png")
    items = [Item("0", content_of("what is this", (str(tmp_path / "egg.png"),))), *ITEMS]
    ours, expected = (Embedder.from_pretrained(path) for path in (adapters, merged))
    assert_equal_models(expected.model.model, ours.model.model)
    found, wanted = (one.encode(items, side="query", mode="reasoning") for one in (ours, expected))
    assert found.rationales == wanted.rationales
    np.testing.assert_allclose(found.embeddings, wanted.embeddings, atol=2e-6, rtol=0)
    theirs = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(lively_path), adapters
    ).eval()
    ids = torch.tensor([[5, 6, 7, lively.emb_id, 9, lively.emb_id]])
    with torch.no_grad():
        logits, exact = theirs(input_ids=ids).logits, expected.model.model(input_ids=ids).logits
    torch.testing.assert_close(logits, exact, atol=1e-4 * float(exact.abs().max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"dora": True, "vision": True}, {"rslora": True, "targets": ["q_proj"]}], ids=str
)
def test_every_kind_of_adapter_and_untied_matrices(untied, tmp_path, changes):
    path = tmp_path / "base"
    untied.model.save_pretrained(path)
    untied.processor.save_pretrained(path)
    merged, adapters = write(adapt(EmbeddingModel(load_backbone(path)).eval(), **changes), path, tmp_path)
    assert_equal_models(load_backbone(merged).model, load_backbone(adapters).model)


@pytest.mark.slow
def test_a_merger_that_is_trained_whole_is_beside_them(lively, lively_path, picture, tmp_path):
    merged, adapters = write(adapt(lively, modules_to_save=["merger"]), lively_path, tmp_path)
    stored = {name for name in load_file(adapters / WEIGHTS) if ".merger." in name}
    merger = lively.model.model.visual.merger
    assert len(stored) == len(list(merger.parameters())) > 2
    assert not any("lora" in name for name in stored)
    picture(50, 80).save(tmp_path / "egg.png")
    items = [Item("0", content_of("what is this", (str(tmp_path / "egg.png"),))), ITEMS[0]]
    ours, expected = (Embedder.from_pretrained(path) for path in (adapters, merged))
    assert_equal_models(expected.model.model, ours.model.model)
    found, wanted = (one.encode(items, side="query", mode="direct").embeddings for one in (ours, expected))
    np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=0)
    own = Embedder.from_pretrained(
        write(adapt(EmbeddingModel(load_backbone(lively_path)).eval()), lively_path, tmp_path / "without")[1]
    )
    assert np.abs(own.encode(items[:1], side="query", mode="direct").embeddings - wanted[:1]).max() > 1e-3
    theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(lively_path), adapters)
    assert_equal_models(expected.model.model, theirs.merge_and_unload())
    # Training goes on from it, and from no adapters of another form.
    lora = LoraConfig(**LORA | {"modules_to_save": ["merger"]})
    model = ModelConfig(path=str(lively_path), lora=lora, dtype="float32")
    again = embedder_to_train(str(adapters), model, adapters_only=True).model
    torch.testing.assert_close(again.model.visual.merger.state_dict(), merger.state_dict(), atol=0, rtol=0)
    assert all(parameter.requires_grad for parameter in again.model.visual.merger.parameters())
    with error_about(AdapterError, adapters, "model.lora.modules_to_save"):
        embedder_to_train(
            str(adapters), dataclasses.replace(model, lora=LoraConfig(**LORA)), adapters_only=True
        )


def test_modules_to_save_that_cannot_be(lively):
    with error_about(AdapterError, "model.lora.modules_to_save", "unknown"):
        adapt(lively, modules_to_save=["bridge"])
    with error_about(AdapterError, "model.lora.modules_to_save", "whole"):
        adapt(lively, modules_to_save=["language_model"])


def test_rows_that_the_base_has_not_are_beside_them(tiny_path, tmp_path):
    """A matrix without a free row grows for new tokens, and what fills it up is kept too."""
    plain, processor = load_plain(tiny_path), load_processor(tiny_path, read_config(tiny_path))
    plain.resize_token_embeddings(len(processor.tokenizer), mean_resizing=False)
    plain.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    backbone = load_backbone(tmp_path / "base", add_emb=True)
    grown = backbone.model.get_input_embeddings()
    assert backbone.rows_of_base < grown.num_embeddings
    embedder = EmbeddingModel(backbone).eval()
    add_adapters(embedder.model, LoraConfig(**LORA), embedder.emb_id)
    merged, adapters = write(stir(embedder), tmp_path / "base", tmp_path)
    one, other = (load_backbone(path).model for path in (merged, adapters))
    assert_equal_models(one, other)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


def test_the_base_is_found_named_or_missed(written, base, lively_path, tmp_path):
    _, adapters = written
    expected = Embedder.from_pretrained(adapters).checkpoint_hash
    moved = shutil.move(tmp_path, tmp_path.with_name(f"{tmp_path.name}_moved"))  # both together
    adapters = Path(moved) / "run/adapters"
    found = Embedder.from_pretrained(adapters)
    assert found.base.samefile(adapters / "../../base")
    assert found.checkpoint_hash == expected
    went_on = Base.of(str(adapters), None, 320).as_recorded_in(adapters.with_name("next"))
    assert Path(went_on["path"]).samefile(adapters / "../../base"), "where it is now, not where it was"
    assert went_on["beside"] == "../../base"
    shutil.rmtree(adapters / "../../base")
    elsewhere = Base.of(str(adapters), None, 320, str(lively_path))
    assert Path(elsewhere.path).samefile(lively_path)
    with error_about(AdapterError, adapters, "model.path", "missing"):
        embedder_to_train(str(adapters), ModelConfig(path="nowhere/else/at/all", dtype="float32"))
    with error_about(AdapterError, adapters, "base", "missing"):
        Embedder.from_pretrained(adapters)
    assert Embedder.from_pretrained(adapters, base=lively_path).base == lively_path
    recorded = json.loads((adapters / "rge.json").read_text())
    recorded["base"]["path"] = "models/base"  # relative, it looks like an id on the hub
    (adapters / "rge.json").write_text(json.dumps(recorded))
    with error_about(AdapterError, adapters, "base", "missing"):
        Embedder.from_pretrained(adapters)


def test_another_base_is_one_error_with_both_identities(written, base, tiny_path):
    _, adapters = written
    with error_about(AdapterError, adapters, "base", "other"):
        Embedder.from_pretrained(adapters, base=tiny_path)
    weights = load_file(base / "model.safetensors")
    save_file(
        {name: value * 1.001 for name, value in weights.items()}, base / "model.safetensors", {"format": "pt"}
    )
    with error_about(AdapterError, adapters, "base", "other"):
        Embedder.from_pretrained(adapters)


def test_what_they_cannot_do_is_said(written, base):
    merged, adapters = written
    with error_about(UserError, merged, "base"):
        Embedder.from_pretrained(merged, base=base)
    with error_about(UserError, adapters, "engine"):
        Embedder.from_pretrained(adapters, engine="vllm")
    with error_about(UserError, adapters, "quantization"):
        Embedder.from_pretrained(adapters, quantization="8bit")


def test_sentence_transformers_takes_them_and_saves_them_merged(written, lively_path, base, tmp_path):
    merged, adapters = written
    shutil.rmtree(base)
    model = SentenceTransformer(
        str(adapters), trust_remote_code=True, model_kwargs={"base": str(lively_path)}
    )
    model.save_pretrained(str(tmp_path / "whole"))
    assert_equal_models(load_backbone(merged).model, load_backbone(tmp_path / "whole").model)


def test_verify_compares_them_merged_and_not(written, records, capsys):
    merged, adapters = written
    few = VerifyOptions(str(adapters), items=records, limit=2, candidates=2, against=("adapters", "st"))
    verdict = verify(few)
    assert verdict.same
    assert {row.route for row in verdict.rows} == {"adapters, not merged", "sentence-transformers"}
    assert max(row.difference for row in verdict.rows) < 1e-5
    with pytest.raises(RouteError):
        verify(dataclasses.replace(few, checkpoint=str(merged)))


@pytest.fixture
def records(tmp_path):
    lines = [
        {"query": {"text": f"what is {word}"}, "positives": [{"text": word, "rationale": f"a {word}"}]}
        for word in ("key", "chick")
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("limit", [0, 2_000, 9_000])
def test_a_full_disk_leaves_an_earlier_checkpoint(lively, written, limit, files_of_at_most):
    _, adapters = written
    before = checkpoint_hash(adapters)
    with (
        files_of_at_most(limit),
        error_about(CheckpointError, adapters, "unwritten"),
    ):
        export(lively, adapters, read_settings(adapters).but(step=8))
    assert checkpoint_hash(adapters) == before
    assert sorted(path.name for path in adapters.parent.iterdir()) == ["adapters", "merged"]


@pytest.mark.slow
def test_training_goes_on_from_them_or_from_them_merged(written, lively):
    merged, adapters = written
    lora = LoraConfig(rank=3, alpha=6.0)
    model = ModelConfig(path="nowhere/else", dtype="float32", lora=lora, min_pixels=784, max_pixels=7056)
    went_on = embedder_to_train(str(adapters), model, adapters_only=True)
    trained = {name: value for name, value in went_on.named_parameters() if value.requires_grad}
    assert trained.keys() == {name for name, value in lively.named_parameters() if value.requires_grad}
    for name, value in lively.named_parameters():
        assert torch.equal(went_on.get_parameter(name), value), name
    again = Base.of(str(adapters), None, went_on.rows_of_base)
    assert again.as_recorded_in(adapters) == read_settings(adapters).base.content()
    anew = dict(merge(embedder_to_train(str(adapters), model).model))
    for name, value in load_backbone(merged).model.state_dict().items():
        torch.testing.assert_close(anew[name], value, atol=1e-6, rtol=1e-6)
    model.lora = None  # PEFT freezes what it adapts
    assert all(parameter.requires_grad for parameter in embedder_to_train(str(adapters), model).parameters())
    model.lora = LoraConfig(rank=2, alpha=6.0, targets=["q_proj"])
    with error_about(AdapterError, adapters, "model.lora.rank"):
        embedder_to_train(str(adapters), model, adapters_only=True)


def test_the_config_is_the_same_however_often_it_is_written(written, lively, tmp_path):
    """PEFT writes a set in the order of its hashes, which differs from process to process."""
    _, adapters = written
    config = json.loads((adapters / CONFIG).read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert config["trainable_token_indices"] == {"model.language_model.embed_tokens": [lively.emb_id]}
    card = (adapters / "README.md").read_text()
    assert 'Embedder.from_pretrained("./adapters", base="base")' in card
