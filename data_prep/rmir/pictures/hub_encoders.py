"""Encoders from the Hugging Face hub: SigLIP 2 for pictures, Qwen3-Embedding for captions."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoProcessor, AutoTokenizer

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import ImageRef
from rge.common.schema import check_finite

T = TypeVar("T")
MAX_TEXT_TOKENS = 64
"""SigLIP was trained on captions padded to this length."""
MAX_CAPTION_TOKENS = 512
TASK = "Instruct: Given the description of a picture, find captions of pictures that show it\nQuery:"
"""Qwen3-Embedding expects a task before queries and nothing before documents."""


class _HubModel:
    """A model by hub name or folder, on the GPU if there is one."""

    def __init__(self, path: str, batch_size: int):
        self.name, self.batch_size = path, batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = self.load(AutoModel).to(self.device).eval()

    def load(self, kind: Any, **settings: Any) -> Any:
        """A part of the model. Raises `UserError`: it cannot be loaded."""
        try:
            return kind.from_pretrained(self.name, **settings)
        except (OSError, ValueError) as error:
            raise UserError(f"the encoder cannot be loaded: {error}", self.name) from None

    @torch.no_grad()
    def in_batches(self, items: Sequence[T], forward: Callable[[list[T]], Tensor]) -> np.ndarray:
        """(N, D) float32, unit norm: `forward` gives the rows (B, D) of a batch. Raises `UserError`: one is not finite."""
        starts = range(0, len(items), self.batch_size)
        rows = [forward(list(items[start : start + self.batch_size])).float().cpu() for start in starts]
        return check_finite(F.normalize(torch.cat(rows), dim=-1).numpy(), f"encoder {self.name}")


class SiglipEncoder(_HubModel):
    """SigLIP and similar models: anything with ``get_image_features`` and ``get_text_features``."""

    def __init__(self, path: str, batch_size: int):
        super().__init__(path, batch_size)
        self.processor = self.load(AutoProcessor)

    def pictures(self, refs: Sequence[ImageRef]) -> np.ndarray:
        """(N, D) float32, unit norm."""

        def forward(batch: list[ImageRef]) -> Tensor:
            return self._run(self.model.get_image_features, images=[load_image(ref) for ref in batch])

        return self.in_batches(refs, forward)

    def texts(self, texts: Sequence[str], *, query: bool = True) -> np.ndarray:
        """(N, D) float32, unit norm."""
        settings = {"padding": "max_length", "truncation": True, "max_length": MAX_TEXT_TOKENS}

        def forward(batch: list[str]) -> Tensor:
            return self._run(self.model.get_text_features, text=batch, **settings)

        return self.in_batches([text.lower() for text in texts], forward)

    def _run(self, tower: Any, **inputs: Any) -> Tensor:
        found = tower(**self.processor(**inputs, return_tensors="pt").to(self.device))
        return getattr(found, "pooler_output", found)


class HubTextEncoder(_HubModel):
    """A text encoder with last-token pooling, such as Qwen3-Embedding."""

    def __init__(self, path: str, batch_size: int):
        super().__init__(path, batch_size)
        # With left padding the last token is at the end of every row.
        self.tokenizer = self.load(AutoTokenizer, padding_side="left")

    def texts(self, texts: Sequence[str], *, query: bool) -> np.ndarray:
        """(N, D) float32, unit norm."""

        def forward(batch: list[str]) -> Tensor:
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=MAX_CAPTION_TOKENS, return_tensors="pt"
            )
            return self.model(**tokens.to(self.device)).last_hidden_state[:, -1]

        return self.in_batches([f"{TASK}{text}" if query else text for text in texts], forward)
