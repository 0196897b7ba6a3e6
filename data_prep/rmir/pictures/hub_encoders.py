"""Encoders of the Hugging Face format: SigLIP 2 for pictures; Qwen3-Embedding and MiniLM for captions."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModel, AutoProcessor, AutoTokenizer

from data_prep.rmir.pictures.vectors import unit
from rge.common.images import load_image

MAX_TEXT_TOKENS = 64
"""SigLIP was trained on captions padded to this."""
MAX_CAPTION_TOKENS = 512
TASK = "Instruct: Given the description of a picture, find captions of pictures that show it\nQuery:"
"""Qwen3-Embedding reads a task before a query and nothing before what is searched."""


class SiglipEncoder:
    """SigLIP and its like: anything with ``get_image_features`` and ``get_text_features``.

    Args:
        path: hub name or folder.
        batch_size: rows a forward.
    """

    def __init__(self, path: str, batch_size: int):
        self.name, self.batch_size = path, batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModel.from_pretrained(path).to(self.device).eval()
        self.processor = AutoProcessor.from_pretrained(path)

    def pictures(self, refs: Sequence[str]) -> np.ndarray:
        """(N, D) float32, unit norm."""
        return self._encode(
            refs,
            lambda batch: self.processor(images=[load_image(ref) for ref in batch], return_tensors="pt"),
            self.model.get_image_features,
        )

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(N, D) float32, unit norm."""
        return self._encode(
            texts,
            lambda batch: self.processor(
                text=[text.lower() for text in batch],
                padding="max_length",
                truncation=True,
                max_length=MAX_TEXT_TOKENS,
                return_tensors="pt",
            ),
            self.model.get_text_features,
        )

    @torch.no_grad()
    def _encode(self, items, prepare, forward) -> np.ndarray:
        rows = []
        for start in range(0, len(items), self.batch_size):
            found = forward(**prepare(list(items[start : start + self.batch_size])).to(self.device))
            rows.append(getattr(found, "pooler_output", found).float().cpu().numpy())
        return unit(np.concatenate(rows))


class HubTextEncoder:
    """A text encoder that is read at its last token, as Qwen3-Embedding is.

    Args:
        path: hub name or folder.
        batch_size: rows a forward.
    """

    def __init__(self, path: str, batch_size: int):
        self.name, self.batch_size = path, batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModel.from_pretrained(path).to(self.device).eval()
        # With padding on the left the last token is at the end of every row.
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")

    @torch.no_grad()
    def texts(self, texts: Sequence[str], *, query: bool) -> np.ndarray:
        """(N, D) float32, unit norm."""
        rows = []
        for start in range(0, len(texts), self.batch_size):
            batch = [f"{TASK}{text}" if query else text for text in texts[start : start + self.batch_size]]
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=MAX_CAPTION_TOKENS, return_tensors="pt"
            ).to(self.device)
            rows.append(self.model(**tokens).last_hidden_state[:, -1].float().cpu().numpy())
        return unit(np.concatenate(rows))


class MeanTextEncoder:
    """A text encoder whose embedding is the mean of its tokens, as MiniLM's is.

    Args:
        path: hub name or folder.
        batch_size: rows a forward.
        name: for the report.
    """

    def __init__(self, path: str, batch_size: int, name: str | None = None):
        self.name, self.batch_size = name or path, batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModel.from_pretrained(path).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @torch.no_grad()
    def texts(self, texts: Sequence[str], *, query: bool) -> np.ndarray:
        """(N, D) float32, unit norm; ``query`` makes no difference."""
        rows = []
        for start in range(0, len(texts), self.batch_size):
            batch = list(texts[start : start + self.batch_size])
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=MAX_CAPTION_TOKENS, return_tensors="pt"
            ).to(self.device)
            hidden = self.model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"][..., None].float()
            rows.append(((hidden * mask).sum(1) / mask.sum(1)).cpu().numpy())
        return unit(np.concatenate(rows))
