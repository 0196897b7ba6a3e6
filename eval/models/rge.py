"""Our own checkpoints, and the released RGE checkpoint, which is the same model without our ``rge.json``."""

from typing import Any

from eval.models.common import placed, settings_of
from eval.models.registry import Facts
from rge.embedder import Embedder
from rge.inference import Inference
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder

RELEASE = {"min": 256 * 28 * 28, "max": 1024 * 28 * 28}
"""Pixel limits of the released evaluation."""
RELEASE_TOKENS = 128
"""Cap on a rationale in the paper and in the released evaluation."""
DIFFERS = (
    "a rationale that reaches the cap is read at an appended <emb>, not at its last ordinary token",
    "decoding is plain greedy, without the repetition penalty of Qwen's generation settings",
    "special tokens are barred while a rationale is written",
    "texts are stripped and their line breaks kept as the set has them; a picture's placeholder stands before the text, "
    "wherever the release's text has it, and one without a picture is dropped",
    "pictures are resized by the installed image backend, and those below 28 pixels by the processor's rule, not by a "
    "resize of their short side before it",
)
"""Known differences from the released evaluation code."""
MAX_PROMPT_TOKENS = 32_768
"""The released evaluation does not truncate below this length."""


def load_own(facts: Facts, **options: Any) -> Embedder:
    """A finished checkpoint of rge; see `rge.embedder.Embedder.from_pretrained` for the options."""
    return Embedder.from_pretrained(facts.path, **options)


@placed
def load_release(
    facts: Facts,
    device: str,
    dtype: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
) -> Embedder:
    """The released RGE checkpoint (github.com/MCG-NJU/RGE) with its prompts.

    Chat template with the default system prompt; pictures, a newline, instruction and text, a newline; the query writes
    at most 128 tokens up to ``<emb>``; a candidate is wrapped in "Summarize the ... in one word". Differences from the
    released evaluation are listed in `DIFFERS` and recorded in results.json.
    """
    backbone = load_backbone(facts.path, dtype=dtype, min_pixels=RELEASE["min"], max_pixels=RELEASE["max"])
    cap = max_new_tokens or RELEASE_TOKENS
    settings = settings_of(
        facts,
        "rge-release",
        dtype,
        profile="rge",
        pixels=RELEASE,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        generation={"max_new_tokens": cap, "temperature": temperature or 0.0, "stop": "<emb>"},
        reasons="query",
        differs_from_release=list(DIFFERS),
    )
    builder = PromptBuilder(backbone.processor, "rge", MAX_PROMPT_TOKENS)
    return Embedder(Inference(EmbeddingModel(backbone).to(device), builder), facts.path, settings)
