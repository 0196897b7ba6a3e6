"""Our own checkpoints, and the released RGE checkpoint, which is the same model without our ``rge.json``."""

from typing import Any

import torch

from eval.models.registry import Facts
from rge.embedder import Embedder
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder

RELEASE = {"min": 256 * 28 * 28, "max": 1024 * 28 * 28}
"""Pixel limits of the released evaluation."""
RELEASE_TOKENS = 128
"""Cap on a rationale in the paper and in the released evaluation."""
MAX_PROMPT_TOKENS = 32_768
"""The released evaluation cuts nothing shorter."""


def load_own(facts: Facts, **options: Any) -> Embedder:
    """A finished checkpoint of rge; see `rge.embedder.Embedder.from_pretrained` for the options."""
    return Embedder.from_pretrained(facts.path, **options)


def load_release(
    facts: Facts,
    *,
    device: str | None = None,
    dtype: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
) -> Embedder:
    """The released RGE checkpoint (github.com/MCG-NJU/RGE), asked as its evaluation asks it.

    Chat template with the default system prompt; pictures, a newline, instruction and text, a newline; the query writes
    at most 128 tokens up to ``<emb>``; a candidate is wrapped in "Summarize the ... in one word". Two things differ on
    purpose: where the release embeds the last ordinary token of a rationale that reached the cap, ``<emb>`` is
    appended (and counted as forced), and decoding is greedy without Qwen's repetition penalty.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    pixels = {"min_pixels": RELEASE["min"], "max_pixels": RELEASE["max"]}
    backbone = load_backbone(facts.path, dtype=dtype, **pixels)
    settings = {
        "adapter": "rge-release",
        "model": facts.name,
        "revision": facts.revision,
        "profile": "rge",
        "pixels": RELEASE,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "generation": {
            "max_new_tokens": max_new_tokens or RELEASE_TOKENS,
            "temperature": temperature or 0.0,
            "stop": "<emb>",
        },
        "dtype": dtype,
        "reasons": "query",
        "recipe": {},
    }
    builder = PromptBuilder(backbone.processor, "rge", MAX_PROMPT_TOKENS)
    return Embedder(EmbeddingModel(backbone).to(device), builder, facts.path, settings)
