"""Picture augmentation for models trained from scratch on few drawings; off for pretrained backbones."""

import random
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transform

from rge.common.registry import Registry

Augmentation = Callable[[Image.Image, int], Image.Image]
"""An RGB picture and a seed, from which everything random has to come; an RGB picture."""

AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation", "rge.augmentations")
"""By the name that ``data.augment`` gives; ``none`` is none."""

register_augmentation = AUGMENTATIONS.register
"""Decorator: ``data.augment=NAME`` sends every picture of training through the function."""


@register_augmentation("drawing")
def augment_drawing(image: Image.Image, seed: int) -> Image.Image:
    """Move, turn, scale, mirror and recolour a drawing on a white ground, keeping its size."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        image = ImageOps.mirror(image)
    width, height = image.size
    image = transform.affine(
        image,
        angle=chance.uniform(-20, 20),
        translate=[int(chance.uniform(-0.1, 0.1) * width), int(chance.uniform(-0.1, 0.1) * height)],
        scale=chance.uniform(0.7, 1.15),
        shear=[chance.uniform(-8, 8), 0.0],
        interpolation=InterpolationMode.BILINEAR,
        fill=[255, 255, 255],
    )
    # A random matrix near the identity mixes the colour channels: families differ in palette more than in shape.
    mix = np.eye(3) + np.random.default_rng(seed).normal(0.0, 0.1, size=(3, 3))
    pixels = np.asarray(image, dtype=np.float32) / 255 - 0.5
    pixels = pixels @ mix.astype(np.float32) * chance.uniform(0.75, 1.25) + 0.5 + chance.uniform(-0.1, 0.1)
    return Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))
