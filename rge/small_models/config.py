"""Options of ``rge small-model``: sizes of a model that is built from nothing, and what its vision tower learns first."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rge.common.options import MAY_DIFFER, AtLeastOne, Positive, Share

Sizes = dict[str, Any]
"""Sizes of a part of a model, as its Hugging Face config calls them."""


@dataclass
class Naming:
    """Pretraining of the vision tower, which learns to name what pictures show."""

    records: Annotated[Path, MAY_DIFFER]  # what counts is their content
    """Records whose query pictures are named; their oracle rationales are the names."""
    steps: AtLeastOne = 1000
    """Optimizer steps."""
    batch_size: AtLeastOne = 64
    """Pictures per step, over all processes."""
    lr: Positive = 3e-3
    """Learning rate."""
    style: Share = 0.0
    """Strength of the style augmentation, from 0 (none) to 1: palette, tone, line width, sharpness, background. It keeps
    the tower from recognising objects by the style of a drawing."""
    say_from: Share = 0.0
    """Share of the steps that only choose among names, at half the cost; the others also write the name."""
    save_every: Annotated[AtLeastOne, MAY_DIFFER] = 500
    """Steps between states to resume from."""
    log_every: Annotated[AtLeastOne, MAY_DIFFER] = 10
    """Steps between lines of metrics.jsonl."""


@dataclass
class SmallModel:
    """Build a small base model: Qwen2.5-VL's architecture and processor, own sizes, for `model.path` of a recipe.

    ``text`` and ``vision`` are passed to the sub-configs unchanged.
    """

    recipe: Annotated[str, MAY_DIFFER]
    """Name of the file with the sizes, in recipes/small_models."""
    texts: Annotated[list[Path], MAY_DIFFER]  # what counts is their content
    """Records from whose texts the tokenizer's vocabulary is learned."""
    out: Annotated[str, MAY_DIFFER] = "runs/small_models/{recipe}"
    """Folder of the model; ``{recipe}`` stands for the recipe's name."""
    vocab_size: AtLeastOne = 2048
    """Size of the BPE vocabulary, not counting special tokens."""
    text: Sizes = field(default_factory=dict)
    """Sizes of the language model, as its Hugging Face config calls them; or the model_type smollm2 alone, a pretrained
    model from a package (docs/smol.md)."""
    vision: Sizes = field(default_factory=dict)
    """Sizes of the vision tower, as its Hugging Face config calls them; or, with the model_type efficientnet_lite0, a
    pretrained tower from a package (extra photos, docs/smol.md), of which only the merger is trained."""
    min_pixels: AtLeastOne = 200_704
    """Smallest picture, in pixels."""
    max_pixels: AtLeastOne = 802_816
    """Largest picture, in pixels."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the weights and of the naming stage."""
    naming: Naming | None = None
    """Pretraining of the vision tower; null: none."""

    def problems(self) -> Iterator[str]:
        """What contradicts itself."""
        if self.min_pixels > self.max_pixels:
            yield f"min_pixels={self.min_pixels} must not exceed max_pixels={self.max_pixels}"
