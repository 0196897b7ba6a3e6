"""What holds for every family of backbones beyond the tests that `every_family` repeats: it learns, and its numbers are right."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from family_models import PLUGINS, every_family, train
from recorded import settings_of
from stock import state_at_end, stock_forward

from rge.checkpoints.export import export
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import load_recipe
from rge.embedders.registry import load_model
from rge.model.adapters import add_adapters
from rge.model.backbone import load_backbone, parts_of, vision_parameters
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import FAMILIES, family_of, normalised
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.plan.costs import cost_of_picture
from rge.plan.known_models import outline
from rge.plan.options import PlanOptions
from rge.plan.report import plan
from rge.rollout.generate import generate


@pytest.mark.slow
@every_family
def test_a_few_steps_learn_a_batch_by_heart_and_move_every_weight(lively, make_batch, roll_out):
    batch = make_batch(PromptBuilder(lively.processor))
    before = {name: parameter.detach().clone() for name, parameter in lively.named_parameters()}
    losses = train(lively, batch, roll_out(lively, batch), steps=8, lr=1e-2)
    assert losses[-1] < 0.5 * losses[0]
    still = [name for name, parameter in lively.named_parameters() if torch.equal(parameter, before[name])]
    assert not still


@pytest.mark.slow
@every_family
def test_adapters_leave_the_vision_tower_alone(lively, make_batch, roll_out):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    add_adapters(lively.model, LoraConfig(rank=4, alpha=8), lively.emb_id)
    assert not any(parameter.requires_grad for parameter in vision_parameters(lively.model))
    losses = train(lively, batch, rationales, steps=8, lr=3e-2)
    assert losses[-1] < 0.8 * losses[0]


@every_family
@pytest.mark.parametrize("side_px", [28, 64, 84])
def test_the_number_of_placeholders_of_a_square_picture(lively_path, picture, side_px):
    """What a plan counts is what the processor writes."""
    backbone = load_backbone(lively_path, min_pixels=side_px**2, max_pixels=side_px**2)
    embedder = EmbeddingModel(backbone)
    prompt = PromptBuilder(backbone.processor).build(Item("p", content_of("egg", [picture(84, 84)])), "query")
    shown = int((prompt.input_ids == embedder.model.config.image_token_id).sum())
    cost = cost_of_picture(embedder.model, side_px**2)
    assert cost.placeholders == shown
    assert cost.num_bytes == prompt.pixels.numel()


@every_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bit_pixels_become_what_the_processor_makes(lively_path, picture, dtype):
    """Bit for bit: pixels travel as bytes, and nothing of what is trained changes."""
    processor = load_backbone(lively_path).processor
    prompt_builder = PromptBuilder(processor)
    images = [picture(40 + 33 * number, 90 - 12 * number, number) for number in range(3)]
    prompt = prompt_builder.build(Item("p", content_of("egg", images)), "query")
    text = prompt_builder._render((*[None] * len(images), "egg"))
    images = [processor.rge_family.scaled(image, processor.image_processor) for image in images]
    expected = processor(text=[text], images=images, return_tensors="pt")
    assert prompt.pixels.dtype == torch.uint8
    values = normalised(processor.image_processor, prompt.pixels).to(getattr(torch, dtype))
    wanted = expected["pixel_values"].to(getattr(torch, dtype))
    assert torch.equal(values, wanted.reshape(values.shape))
    assert prompt.input_ids.tolist() == expected["input_ids"][0].tolist()


@every_family
def test_positions_come_with_the_prompt_and_are_transformers_own(lively, make_prompts, monkeypatch):
    """Made once, where there is no model: of texts, of a picture and of two; by counting where a family counts."""
    prompts = make_prompts(PromptBuilder(lively.processor), 4)
    for prompt in prompts:
        expected = torch.arange(len(prompt)).expand(3, -1)
        if hasattr(lively.model.model, "get_rope_index"):
            expected = lively.model.model.get_rope_index(
                prompt.input_ids[None],
                mm_token_type_ids=prompt.type_ids[None],
                image_grid_thw=prompt.image_grid,
            )[0][:, 0]
        assert prompt.position_3T.dtype == torch.long
        assert torch.equal(prompt.position_3T, expected)
    monkeypatch.setattr(type(family_of(lively.model)), "positions", None)
    roll = generate(lively, prompts, max_new_tokens=2, batch_size=4)
    lively(lively.pack(prompts, [[Branch([*one.ids, lively.emb_id], read_state=True)] for one in roll]))


@every_family
def test_the_empty_picture_is_the_smallest(lively, picture):
    family, config = family_of(lively.model), lively.model.config
    pixels, grid = family.square_picture(config)
    values = normalised(lively.processor.image_processor, pixels)
    ids = family.picture_ids(config, lively.processor.tokenizer)
    features = family.features(lively.model, values, grid)
    assert len(features) == ids.count(config.image_token_id)
    # Beside another it stays one picture of its own.
    prompt = PromptBuilder(lively.processor).build(Item("p", content_of("egg", [picture(84, 84)])), "query")
    both = family.features(
        lively.model,
        normalised(lively.processor.image_processor, torch.cat([prompt.pixels, pixels])),
        torch.cat([prompt.image_grid, grid]),
    )
    torch.testing.assert_close(both[-len(features) :], features, atol=1e-5, rtol=1e-5)


def test_every_family_has_a_tiny_model():
    import family_models

    assert {
        *family_models.SCRATCH,
        *family_models.PLUGINS,
        *(name[1:] for name in vars(family_models) if name[1:] in FAMILIES),
    } == set(FAMILIES)


@pytest.mark.parametrize("lively_path", ["idefics3"], indirect=True)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_give_what_the_models_own_features_give(lively64, make_prompts, checkpointing):
    """Without its looks for padding: values and every gradient of the tower, bit for bit."""
    model, processor = lively64.model, lively64.processor.image_processor
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    shown = [
        prompt for prompt in make_prompts(PromptBuilder(lively64.processor), 6) if prompt.pixels is not None
    ]
    pixels = normalised(processor, torch.cat([prompt.pixels for prompt in shown])).double()
    grid = torch.cat([prompt.image_grid for prompt in shown])
    results = []
    for features in (
        torch.cat(list(model.model.get_image_features(pixels[None], return_dict=True).pooler_output)),
        family_of(model).features(model, pixels, grid),
    ):
        model.zero_grad()
        (features * torch.arange(features.numel()).view_as(features).cos()).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((features.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    assert len(results[0][1]) > 20
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


@pytest.mark.parametrize("lively_path", ["internvl", "idefics3"], indirect=True)
def test_every_tile_counts(lively, picture):
    """The state after a prompt moves with each tile of its picture."""
    prompt = PromptBuilder(lively.processor).build(Item("p", content_of("egg", [picture(84, 84)])), "query")
    stock = lively.processor(
        text=[lively.processor.image_token], images=[picture(84, 84)], return_tensors="pt"
    )
    assert len(prompt.pixels) == stock["pixel_values"].flatten(0, -4).shape[0] > 4
    shown = [prompt]
    for tile in range(len(prompt.pixels)):
        pixels = prompt.pixels.clone()
        pixels[tile] = 255 - pixels[tile]
        shown.append(replace(prompt, pixels=pixels))
    direct = [[Branch([lively.emb_id], read_state=True)]] * len(shown)
    assert torch.pdist(lively(lively.pack(shown, direct))[0].state_ND).min() > 1e-4


@pytest.mark.parametrize("lively_path", PLUGINS, indirect=True)
def test_a_plugins_checkpoint_is_planned_embedded_and_evaluated(lively_path, lively, picture, tmp_path):
    """From a recipe's plan to an embedding that is the one of transformers alone."""
    recipe = load_recipe(["recipe=demo", f"model.path={lively_path}", "joint.batch_size=8"])
    model, _ = outline(recipe.model)
    planned = plan(recipe, model, PlanOptions(num_gpus=2))
    assert planned.shapes.parameters == sum(parameter.numel() for parameter in lively.model.parameters())
    assert all(vars(planned.shapes.picture).values()) or planned.shapes.picture.fixed == 0
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "own", settings)
    items = [
        Item("a", content_of("what is this egg", (_bytes(picture(90, 40, 1)),))),
        Item("b", content_of("a key", (_bytes(picture(60, 60, 2)), _bytes(picture(40, 120, 3))))),
        Item("c", content_of("a chick of this egg")),
    ]
    embedder = load_model(tmp_path / "own")
    found = embedder.encode(items, side="candidate", mode="direct")
    prompts = [embedder.builder.build(item, "candidate") for item in items]
    direct = [[lively.emb_id]] * len(items)
    hidden, _, starts = stock_forward(lively, prompts, direct, "right")
    expected = torch.stack(state_at_end(hidden, starts, prompts, direct))
    np.testing.assert_allclose(found.embeddings, expected.detach().numpy(), atol=1e-5)
    written = embedder.encode(items, side="query", mode="reasoning")
    assert written.num_rationale_tokens.any()


def _bytes(image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@every_family
def test_every_parameter_belongs_to_one_part(lively):
    """The tower, its projection, the tokens' rows, and the rest; together they are what `vision_parameters` has, and all else."""
    parts = parts_of(lively.model)
    ids = {part: set(map(id, own)) for part, own in parts.items()}
    assert sum(map(len, ids.values())) == len(list(lively.model.parameters()))
    assert set().union(*ids.values()) == set(map(id, lively.model.parameters()))
    assert all(ids[part] for part in ("merger", "emb", "text"))  # a pretrained tower may have no trained ones
    assert ids["vision"] | ids["merger"] == set(map(id, vision_parameters(lively.model)))
    assert id(lively.model.get_input_embeddings().weight) in ids["emb"]
    width = lively.model.config.get_text_config().hidden_size
    assert any(parameter.shape[0] == width for parameter in parts["merger"])
