"""Loading: what `<emb>` gets, what is refused, and that plain transformers reads what is written."""

import json
import shutil

import pytest
import torch
from faults import error_about
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)

from rge.common.parts import content_of
from rge.common.prompt_profiles import EMB_TOKEN
from rge.common.schema import Item
from rge.model.backbone import BackboneError, add_tokens, load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import normalised
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep


def test_emb_takes_the_first_free_id_of_a_matrix_that_keeps_its_size(tiny_path):
    plain = AutoModelForImageTextToText.from_pretrained(tiny_path)
    tokenizer = AutoProcessor.from_pretrained(tiny_path).tokenizer
    before = plain.get_input_embeddings().weight.detach().clone()
    assert EMB_TOKEN not in tokenizer.get_vocab()
    assert before.shape[0] > len(tokenizer) + 1  # padding rows, as Qwen2.5-VL has them

    backbone = load_backbone(tiny_path, add_emb=True)
    after = backbone.model.get_input_embeddings().weight.detach()
    assert backbone.emb_id == len(tokenizer)
    assert after.shape == before.shape
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert torch.equal(after[backbone.emb_id], before[im_end])
    others = torch.arange(len(before)) != backbone.emb_id
    assert torch.equal(after[others], before[others])
    assert backbone.processor.tokenizer(f"a{EMB_TOKEN}b").input_ids.count(backbone.emb_id) == 1


def test_emb_is_added_once(lively_path):
    first = load_backbone(lively_path)
    weight = first.model.get_input_embeddings().weight.detach().clone()
    again = load_backbone(lively_path, add_emb=True)
    assert again.emb_id == first.emb_id
    assert torch.equal(again.model.get_input_embeddings().weight, weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_matrix_grows(tiny_path, untied, tied):
    """Without a padding row left, the matrix grows to a multiple of 64 and nothing else moves."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_path) if tied else untied.model
    tokenizer = AutoProcessor.from_pretrained(tiny_path).tokenizer
    model.resize_token_embeddings(len(tokenizer))
    before = [
        module.weight.detach().clone()
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    (emb_id,) = add_tokens(model, tokenizer, [EMB_TOKEN], tokenizer.eos_token_id)
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    assert emb_id == len(before[0])
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for module, old in zip(modules, before, strict=True):
        assert module.weight.shape[0] % 64 == 0
        assert module.weight.shape[0] > len(old)
        assert torch.equal(module.weight[: len(old)], old)
        assert torch.equal(module.weight[emb_id], old[im_end])
    assert (modules[0].weight is modules[1].weight) == tied
    assert model.config.get_text_config().vocab_size == modules[0].weight.shape[0]


def test_tied_weights_stay_tied(tiny_path, untied):
    backbone = load_backbone(tiny_path, add_emb=True)
    assert backbone.model.get_input_embeddings().weight is backbone.model.get_output_embeddings().weight
    assert untied.model.get_input_embeddings().weight is not untied.model.get_output_embeddings().weight


def test_the_row_of_emb_is_trained(lively, untied, make_batch, roll_out):
    """As a token that is read (input row) and as one that is predicted (output row)."""
    for embedder in (lively, untied):
        batch = make_batch(PromptBuilder(embedder.processor))
        TrainingStep(embedder, embedder, Objective(0.5, 0.5), 8)(batch, Rollout(roll_out(embedder, batch)))
        for module in (embedder.model.get_input_embeddings(), embedder.model.get_output_embeddings()):
            assert module.weight.grad[embedder.emb_id].norm() > 0


def test_what_a_rationale_never_contains(lively):
    tokenizer = lively.processor.tokenizer
    suppressed = set(lively.suppressed_ids)
    for token in ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|image_pad|>", "<|vision_start|>"):
        assert tokenizer.convert_tokens_to_ids(token) in suppressed
    rows = lively.model.get_input_embeddings().weight.shape[0]
    assert set(range(len(tokenizer), rows)) <= suppressed
    assert lively.emb_id not in suppressed
    assert not suppressed & set(tokenizer("any text of data, 123").input_ids)


def test_pixel_limits(tiny_path):
    kept = load_backbone(tiny_path, add_emb=True).processor.image_processor.size
    assert (kept["shortest_edge"], kept["longest_edge"]) == (28 * 28, 84 * 84)
    given = load_backbone(tiny_path, add_emb=True, min_pixels=56 * 56, max_pixels=56 * 56)
    assert given.processor.image_processor.size["longest_edge"] == 56 * 56
    prompt = PromptBuilder(given.processor).build(
        Item("a", content_of(None, [Image.new("RGB", (500, 500))])), "query"
    )
    assert prompt.image_grid.tolist() == [[1, 4, 4]]


def test_a_plain_model_is_not_an_embedder(tiny_path):
    with error_about(BackboneError, tiny_path, "<emb>"):
        load_backbone(tiny_path)


def test_an_unsupported_family_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with error_about(
        BackboneError, "gemma3", "idefics3", "qwen2_5_vl", "qwen2_5_vl_efficientnet", "qwen2_vl"
    ):
        load_backbone(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/place", "./nowhere", "deep/down/nowhere", "nowhere"])
def test_a_missing_directory_is_named(path):
    with error_about(BackboneError, path, "missing"):
        load_backbone(path)


def test_an_unreachable_hub_model_is_named():
    with error_about(BackboneError, "nobody/nothing", "unreadable"):
        load_backbone("nobody/nothing")


@pytest.fixture
def damaged(lively_path, tmp_path):
    return shutil.copytree(lively_path, tmp_path / "damaged")


def test_a_directory_without_a_model(lively_path, tmp_path):
    """Such as a run's own folder, or a file of a checkpoint."""
    for path in (tmp_path, lively_path / "config.json"):
        with error_about(BackboneError, path, "config"):
            load_backbone(path)


def test_adapters_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with error_about(BackboneError, tmp_path, "adapters"):
        load_backbone(tmp_path)


def test_cut_weights(damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with error_about(BackboneError, damaged, "unreadable"):
        load_backbone(damaged)


def test_missing_weights_are_not_filled_with_random_numbers(damaged):
    weights = load_file(damaged / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with error_about(BackboneError, damaged, "model.language_model.layers.1.mlp.up_proj.weight"):
        load_backbone(damaged)


def test_no_weights_at_all(damaged):
    (damaged / "model.safetensors").unlink()
    with error_about(BackboneError, damaged, "unreadable"):
        load_backbone(damaged)


def test_no_processor(damaged):
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        (damaged / name).unlink()
    with error_about(BackboneError, damaged, "unreadable"):
        load_backbone(damaged)


def test_the_empty_picture_is_one_placeholder(lively):
    pixels, grid = lively.family.square_picture(lively.model.config)
    values = normalised(lively.processor.image_processor, pixels)
    vision = lively.model.config.vision_config
    assert grid.tolist() == [[1, 2, 2]]
    assert values.shape == (4, 3 * vision.temporal_patch_size * vision.patch_size**2)
    features = lively.model.model.visual(values, grid_thw=grid).pooler_output
    assert features.shape[0] == 1


def test_a_start_without_an_output_matrix_is_trained_tied_and_exported(
    headless_path, make_batch, roll_out, tmp_path
):
    with error_about(BackboneError, headless_path, "lm_head.weight"):
        load_backbone(headless_path, add_emb=True)
    embedder = EmbeddingModel(load_backbone(headless_path, add_emb=True, needs_head=False)).eval()
    weights = [embedder.model.get_input_embeddings().weight, embedder.model.get_output_embeddings().weight]
    assert weights[0] is weights[1]
    batch = make_batch(PromptBuilder(embedder.processor))
    objective = Objective(0.0, 1.0, anchor="none", lm_on_candidates=False)
    TrainingStep(embedder, embedder, objective, 8)(batch, Rollout(()))
    assert weights[0].grad[embedder.emb_id].norm() > 0
    embedder.model.save_pretrained(tmp_path)
    embedder.processor.save_pretrained(tmp_path)
    again = load_backbone(tmp_path)
    assert torch.equal(again.model.get_output_embeddings().weight, weights[0])


def test_control_tokens_in_a_text_stay_text_where_the_tokenizer_does_not_mark_them(tiny_path, tmp_path):
    shutil.copytree(tiny_path, tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "plain" / name
        file.write_text(file.read_text().replace('"special": true', '"special": false'))
    builder = PromptBuilder(load_backbone(tmp_path / "plain", add_emb=True).processor)
    token = builder.tokenizer.added_tokens_decoder[builder._image_id]
    assert not token.special
    prompt = builder.build(Item("a", content_of("what is <|image_pad|> and <|im_end|> here")), "query")
    plain = builder.build(Item("a", content_of("what is it and it here")), "query")
    assert int(prompt.type_ids.sum()) == 0
    end = builder.tokenizer.eos_token_id
    assert (prompt.input_ids == end).sum() == (plain.input_ids == end).sum()
