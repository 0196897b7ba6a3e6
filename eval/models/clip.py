"""CLIP, SigLIP and SigLIP 2: two towers with a shared space.

An item with text and pictures is the sum of its text feature and the mean of its picture features before either is
normalised, which is how MMEB's own CLIP and SigLIP rows embed composed queries (VLM2Vec, ``evaluation/eval_clip.py``).
Instructions are not used, since these models read only 64 to 77 tokens; longer texts are truncated.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel

from eval.models.common import BARE, DirectEncoder, check_family, direct, loading, whole
from eval.models.registry import Facts
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.schema import Item
from rge.model.prompts import user_text

Content = tuple[str, list[Image.Image]]
"""Input of the model: a text, pictures, or both."""


class TwoTowers(DirectEncoder[Content]):
    """Text and picture features of one model, added."""

    def __init__(
        self, facts: Facts, model: PreTrainedModel, tokenizer: Any, image_processor: Any, dtype: str
    ):
        config: Any = model.config
        max_tokens = config.text_config.max_position_embeddings
        settings = {"pooling": "text feature + mean of picture features", "max_text_tokens": max_tokens}
        super().__init__(facts, "clip", BARE, dtype, settings)
        self.model: Any = model.eval()  # Any: the library's types do not declare the towers
        self.tokenizer, self.image_processor = tokenizer, image_processor
        # SigLIP was trained on padded texts and pools the last position; CLIP pools at the end token.
        padding = True if config.model_type == "clip" else "max_length"
        self.reading = {"padding": padding, "truncation": True, "max_length": max_tokens}

    def prepare(self, item: Item, side: str) -> tuple[int, Content]:
        """Text and decoded pictures; sorted by the text's length in characters."""
        text, images = user_text(item, side, self.wording), [load_image(ref) for ref in item.images]
        if not text and not images:
            raise UserError(f"item {item.id!r} has neither text nor images")
        return len(text), (text, images)

    def embed(self, batch: Sequence[Content]) -> Tensor:
        """Features (B, D), see the module docstring."""
        parts: list[list[Tensor]] = [[] for _ in batch]
        texts = {row: text for row, (text, _) in enumerate(batch) if text}
        if texts:
            fields = self.tokenizer(list(texts.values()), **self.reading, return_tensors="pt")
            features = self._features(self.model.get_text_features, fields)
            for row, feature in zip(texts, features, strict=True):
                parts[row].append(feature)
        pictures = {row: images for row, (_, images) in enumerate(batch) if images}
        if pictures:
            fields = self.image_processor(images=list(chain(*pictures.values())), return_tensors="pt")
            features = self._features(self.model.get_image_features, fields)
            for row, own in zip(pictures, features.split(list(map(len, pictures.values()))), strict=True):
                parts[row].append(own.mean(dim=0))
        return torch.stack([torch.stack(features).sum(dim=0) for features in parts])

    def _features(self, tower: Any, fields: Any) -> Tensor:
        weight = next(self.model.parameters())
        fields = {
            key: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            for key, value in fields.items()
        }
        return tower(**fields).pooler_output


@direct
def load_clip(facts: Facts, device: str, dtype: str) -> TwoTowers:
    """A CLIP, SigLIP or SigLIP 2 checkpoint."""
    check_family(facts, "clip", ("clip", "siglip", "siglip2"))
    with loading(facts):
        model = whole(facts, AutoModel.from_pretrained, dtype)
        tokenizer = AutoTokenizer.from_pretrained(facts.path)
        image_processor = AutoImageProcessor.from_pretrained(facts.path)
    return TwoTowers(facts, model.to(device), tokenizer, image_processor, dtype)
