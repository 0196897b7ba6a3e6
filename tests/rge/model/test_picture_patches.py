"""Pictures for the vision tower: patches cut on tensors equal the processor's own."""

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.small_models.config import Naming
from rge.small_models.naming import augment, named, patches, restyle, teach


def test_patches_equal_the_processors(embedder, picture):
    processor = embedder.processor.image_processor
    pictures = [picture(84, 84, seed) for seed in range(3)]
    expected = processor(images=pictures, return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, 6, 6]] * 3
    stacked = (
        torch.from_numpy(np.stack([np.asarray(image) for image in pictures])).permute(0, 3, 1, 2).float()
        / 255
    )
    found = patches(stacked, processor)
    torch.testing.assert_close(found, expected["pixel_values"], atol=1e-5, rtol=0)


def test_augmented_pictures_stay_pictures_and_repeat():
    white = torch.ones(4, 3, 28, 28)
    white[:, :, 8:20, 8:20] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    one = augment(white, torch.Generator().manual_seed(1))
    assert torch.equal(one, augment(white, torch.Generator().manual_seed(1)))
    assert not torch.equal(one, augment(white, torch.Generator().manual_seed(2)))
    assert one.shape == white.shape
    assert one.min() >= 0
    assert one.max() <= 1
    assert not torch.equal(one[0], one[1])  # each row is moved in its own way
    assert one[:, :, 0, 0].min() > 0.5  # what moves in from outside is white, mixed in colour


def test_styles_change_the_look_of_a_share_of_the_pictures_and_repeat():
    drawing = torch.ones(200, 3, 12, 12)
    drawing[:, :, 4:8, 4:8] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    before = drawing.clone()
    assert torch.equal(restyle(drawing, 0.0, torch.Generator()), before)
    changed = {}
    for share in (0.1, 0.3, 1.0):
        one, again = (restyle(drawing, share, torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(one, again)
        assert 0 <= one.min() < one.max() <= 1
        changed[share] = (one != before).flatten(1).any(dim=1).float().mean()
    assert torch.equal(drawing, before)  # the caller's pictures stay
    assert 0.15 < changed[0.1] < 0.4  # ten kinds, each with a likelihood of .02 to .05
    assert changed[0.1] < changed[0.3] < changed[1.0]
    assert changed[1.0] > 0.95


def test_styles_are_those_that_families_differ_in():
    drawing = torch.ones(400, 3, 12, 12)
    drawing[:, :, 4:8, 4:8] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    found = restyle(drawing, 0.15, torch.Generator().manual_seed(0))
    ground, ink = found[:, :, 0, 0], found[:, :, 5, 5]
    width = (found[:, 1] - ground[:, 1, None, None]).abs().gt(0.3).any(dim=1).sum(dim=1)
    assert bool((ground < 0.2).all(dim=1).any())  # inverted
    assert bool(((ground > 0.3) & (ground < 0.95)).any())  # another ground
    assert bool((ink.amax(dim=1) - ink.amin(dim=1) < 1e-6).any())  # grey
    assert bool((ink[:, 1] > ink[:, 0] + 0.1).any())  # another palette
    assert bool((width > 4).any())  # thicker strokes
    assert bool((width[width > 0] < 4).any())  # thinner ones
    assert bool((found[:, :, 5, 5] == 1).all(dim=1).any())  # outlines alone


def test_pictures_are_chosen_for_before_names_are_written(tiny_path, picture, tmp_path):
    """Steps that only choose leave the text model alone, and naming counts what is right."""
    processor = AutoProcessor.from_pretrained(tiny_path)
    stacked = [np.asarray(picture(28, 28, seed)) for seed in range(4)]
    pictures = torch.from_numpy(np.stack(stacked)).permute(0, 3, 1, 2).float() / 255
    names, labels = ["This is a key.", "This is a door."], torch.tensor([0, 1, 0, 1])
    before, found = {}, {}
    for say_from in (1.0, 0.5):
        model = AutoModelForImageTextToText.from_pretrained(tiny_path)
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        config = Naming(Path("names.jsonl"), steps=8, batch_size=8, lr=1e-3, say_from=say_from)
        folder = tmp_path / str(say_from)
        teach(model, Accelerator(cpu=True), processor, pictures, labels, names, folder, config)
        found[say_from] = {
            key for key, weight in model.state_dict().items() if not torch.equal(weight, before[key])
        }
        assert all(parameter.requires_grad for parameter in model.parameters())
    layers = {key for key in before if ".language_model.layers." in key}
    assert any(".visual." in key for key in found[1.0])
    assert not found[1.0] & layers
    assert found[0.5] & layers


def test_naming_is_counted_over_all_pictures(tiny_path, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(tiny_path)
    processor = AutoProcessor.from_pretrained(tiny_path)
    names, labels = ["skis", "key"], torch.arange(70) % 2  # more than one batch
    pictures = labels[:, None, None, None].float().expand(-1, 3, 28, 28).contiguous()
    assert not named(model, processor, pictures, labels, names).all()
    config = Naming(Path("names.jsonl"), steps=40, batch_size=8, lr=3e-2)
    teach(model, Accelerator(cpu=True), processor, pictures, labels, names, tmp_path, config)
    assert named(model, processor, pictures, labels, names).tolist() == [True] * 70
    assert named(model, processor, pictures, 1 - labels, names).tolist() == [False] * 70
