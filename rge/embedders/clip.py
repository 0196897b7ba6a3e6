"""CLIP, Meta CLIP 2, SigLIP and SigLIP 2: two towers with a shared space.

An item with text and pictures is the sum of its text feature and the mean of its picture features before either is
normalised, which is how MMEB's own CLIP and SigLIP rows embed composed queries (VLM2Vec, ``evaluation/eval_clip.py``).
PinPoint's baselines combine features of unit length instead: a weighted sum, or a point of the arc between them (slerp).
Instructions are not used, since these models read only 64 to 77 tokens; longer texts are truncated.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.schema import Item
from rge.embedders.common import BARE, DirectEncoder, check_family, direct, loading, neither, whole
from rge.embedders.registry import CLIPS, Combine, Facts
from rge.model.embedding_model import normalise
from rge.model.prompts import user_text

Content = tuple[str, list[Image.Image]]
"""Input of the model: a text, pictures, or both."""
ALMOST_PARALLEL = 1e-4
"""Sine of the angle below which the arc between two features is a line for float32."""


class TwoTowers(DirectEncoder[Content]):
    """Text and picture features of one model, added."""

    def __init__(
        self,
        facts: Facts,
        model: PreTrainedModel,
        tokenizer: Any,
        image_processor: Any,
        dtype: str,
        combine: Combine = "sum",
        text_weight: float | None = None,
    ):
        config: Any = model.config
        max_tokens = config.text_config.max_position_embeddings
        if (combine == "sum") != (text_weight is None):
            raise UserError("text_weight= is for combine=weighted and combine=slerp, which need it").about(
                "text_weight"
            )
        self.combine, self.text_weight = combine, text_weight or 0.0
        pooling = "text feature + mean of picture features"
        settings: dict[str, Any] = {"pooling": pooling, "max_text_tokens": max_tokens}
        if combine != "sum":
            settings |= {"pooling": f"{combine} of unit features", "text_weight": text_weight}
        if facts.code:
            settings["code"] = list(facts.code)
        super().__init__(facts, "clip", BARE, dtype, settings)
        self.model: Any = model.eval()  # Any: the library's types do not declare the towers
        self.tokenizer, self.image_processor = tokenizer, image_processor
        # SigLIP was trained on padded texts and pools the last position; CLIP pools at the end token.
        padding = "max_length" if config.model_type.startswith("siglip") else True
        self.reading = {"padding": padding, "truncation": True, "max_length": max_tokens}

    def prepare(self, item: Item, side: str) -> tuple[int, Content]:
        """Text and decoded pictures; sorted by the text's length in characters."""
        text, images = user_text(item, side, self.wording), [load_image(ref) for ref in item.pictures]
        if not text and not images:
            raise neither(item)
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
        return torch.stack([self._combined(features) for features in parts])

    def _combined(self, features: list[Tensor]) -> Tensor:
        if len(features) == 1 or self.combine == "sum":
            return torch.stack(features).sum(dim=0)
        text, picture = (normalise(feature) for feature in features)
        share = self.text_weight
        if self.combine == "slerp":
            angle = torch.arccos((text @ picture).clamp(-1, 1))
            if (sine := angle.sin()) > ALMOST_PARALLEL:
                return (share * angle).sin() / sine * text + ((1 - share) * angle).sin() / sine * picture
        return share * text + (1 - share) * picture

    def _features(self, tower: Any, fields: Any) -> Tensor:
        weight = next(self.model.parameters())
        fields = {
            key: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            for key, value in fields.items()
        }
        found = tower(**fields)
        return found if isinstance(found, Tensor) else found.pooler_output  # own code may give either


@direct
def load_clip(
    facts: Facts, device: str, dtype: str, *, combine: Combine = "sum", text_weight: float | None = None
) -> TwoTowers:
    """A CLIP, Meta CLIP 2, SigLIP or SigLIP 2 checkpoint."""
    check_family(facts, "clip", CLIPS)
    with loading(facts):
        model = whole(facts, AutoModel.from_pretrained, dtype)
        tokenizer = AutoTokenizer.from_pretrained(facts.path)
        image_processor = AutoImageProcessor.from_pretrained(facts.path)
    model = model.to(device)
    return TwoTowers(facts, model, tokenizer, image_processor, dtype, combine, text_weight)
