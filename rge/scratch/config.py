"""The section `model.scratch`: sizes of a model that is built from nothing."""

from dataclasses import dataclass, field
from typing import Any

from rge.common.options import AtLeastOne, Positive, Share


@dataclass
class ScratchConfig:
    """A model built from nothing instead of loaded: Qwen2.5-VL's architecture and processor, own sizes.

    ``text`` and ``vision`` are passed to the sub-configs unchanged.
    """

    vocab_size: AtLeastOne = 2048
    """Size of the BPE vocabulary learned from the training records' texts, not counting special tokens."""
    text: dict[str, Any] = field(default_factory=dict)
    """Sizes of the language model, as its Hugging Face config calls them."""
    vision: dict[str, Any] = field(default_factory=dict)
    """Sizes of the vision tower, as its Hugging Face config calls them; or, with the model_type efficientnet_lite0, a
    pretrained tower from a package (extra photos, docs/smol.md), of which only the merger is trained."""
    naming: str | None = None
    """Records for pretraining the vision tower, which learns to name what their query pictures show; null: none."""
    naming_steps: AtLeastOne = 1000
    """Optimizer steps of that pretraining."""
    naming_batch_size: AtLeastOne = 64
    """Pictures per step of that pretraining."""
    naming_lr: Positive = 3e-3
    """Learning rate of that pretraining."""
    naming_style: Share = 0.0
    """Strength of the style augmentation in that pretraining, from 0 (none) to 1: palette, tone, line width, sharpness,
    background. It keeps the tower from recognising objects by the style of a drawing."""
    naming_say_from: Share = 0.0
    """Share of that pretraining's steps that only choose among names, at half the cost; the others also write the name."""
