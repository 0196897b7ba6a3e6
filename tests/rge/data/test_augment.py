"""Augmentation: repeatable, size-keeping, and a change."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from rge.data.augment import AUGMENTATIONS, augment_drawing


@pytest.fixture
def drawing():
    image = Image.new("RGB", (60, 40), "white")
    ImageDraw.Draw(image).rectangle((20, 10, 45, 30), fill=(200, 40, 40))
    return image


def test_the_seed_decides(drawing):
    one, again, other = (np.asarray(augment_drawing(drawing, seed)) for seed in (5, 5, 6))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("seed", range(30))
def test_the_drawing_stays_in_the_picture_on_a_light_ground(drawing, seed):
    before = np.asarray(drawing).copy()
    moved = augment_drawing(drawing, seed)
    assert (moved.mode, moved.size) == ("RGB", drawing.size)
    assert np.array_equal(np.asarray(drawing), before)  # the original is left alone
    pixels = np.asarray(moved).astype(int)
    ground = np.median(pixels.reshape(-1, 3), axis=0)
    assert ground.min() > 150
    shown = (np.abs(pixels - ground).sum(axis=2) > 90).mean()
    assert 0.08 < shown < 0.5  # the square covers 22 percent of the picture


def test_it_is_a_change_of_place_and_of_colour(drawing):
    pictures = np.stack([np.asarray(augment_drawing(drawing, seed)) for seed in range(20)]).astype(int)
    assert len({picture.tobytes() for picture in pictures}) == 20
    assert pictures[:, 20, 30].std(axis=0).min() > 5  # the middle of the square changes colour


def test_names_of_the_recipe_exist():
    assert set(AUGMENTATIONS) == {"drawing"}
