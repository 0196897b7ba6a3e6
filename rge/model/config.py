"""The section `model`: which backbone, how it is held in memory, and its adapters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import Field

from rge.common.options import ROUNDING, AtLeastOne, Positive

Part = Literal["vision", "merger", "text", "emb"]
PARTS: tuple[str, ...] = get_args(Part)
"""Parts of a model, see `rge.model.backbone.parts_of`."""

Attention = Literal["auto", "varlen", "sdpa", "eager"]
"""Forms of attention, see `ModelConfig`."""


@dataclass
class LoraConfig:
    """Low-rank adapters and the ``<emb>`` row instead of full fine-tuning; merged on export unless `export.adapters_only`."""

    rank: AtLeastOne = 16
    """Inner dimension of an adapter."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    """Dropout on an adapter's inputs. Above zero, gradient caching encodes queries once more, since the rollout
    computes its states without dropout."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the last part of their name, such as q_proj; empty: all of them."""
    dora: bool = False
    """DoRA: magnitude and direction learned separately (arXiv:2402.09353)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps large ranks stable (arXiv:2312.03732)."""
    vision: bool = False
    """Whether the vision tower gets adapters too; otherwise it is frozen."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules (PEFT's own key) trained in full and stored with adapters, by the last part of their name, such as merger."""


@dataclass
class ModelConfig:
    """Which backbone, and how it is held in memory."""

    path: str = ""
    """Hugging Face id or directory; demo_base is the demo's, which comes with the package. `rge small-model` builds small ones."""
    revision: str | None = None
    """Commit or tag of a hub model; null: the newest."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the computation and of frozen weights. Trained weights, their gradients summed over micro batches, the
    optimizer's state, embeddings and losses are always float32, on every back end."""
    attn_implementation: Annotated[Attention, ROUNDING] = "auto"
    """Attention of the text model. varlen: concatenated sequences without mask or padding, with torch's flash attention
    on a GPU (bfloat16); sdpa: padded rows with a mask; eager: the same in plain operations; auto: varlen on a GPU if
    possible, else sdpa."""
    vision_attn_implementation: Annotated[Attention, ROUNDING] = "auto"
    """Attention of the vision tower: varlen, sdpa (all pictures or windows of one size at once), eager, or auto."""
    cuda_graphs: Annotated[bool, ROUNDING] = True
    """On a GPU, capture the decoding steps of rationales as CUDA graphs, if attention is varlen; false launches every
    kernel separately. The first captured step of a run is checked against the plain one."""
    fused_kernels: Annotated[Literal["auto", "liger", "none"], ROUNDING] = "auto"
    """On a GPU, norms, gated activations and the vision tower's rotary embeddings in one kernel each: liger, by
    liger-kernel, checked against plain code in the first step; none; auto: liger if it is installed."""
    gradient_checkpointing: Annotated[bool, ROUNDING] = True
    """Recompute activations in the backward pass: about a third more compute, memory per layer instead of per op."""
    freeze: list[Part] = field(default_factory=list)
    """Parts that are not trained: vision (the tower without its merger), merger, text, and emb, the rows of all tokens with that of
    `<emb>`. With `lora`, what has no adapters is not trained anyway."""
    lora: LoraConfig | None = None
    """Train adapters only; null trains all weights."""
    min_pixels: AtLeastOne = 200_704
    """Smallest picture, in pixels: 256 patches of 28x28, as released with RGE."""
    max_pixels: AtLeastOne = 802_816
    """Largest picture, in pixels: 1024 patches of 28x28, as released with RGE."""

    @property
    def pixels(self) -> dict[str, int]:
        """The limits of a picture's size, as arguments of a processor."""
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def problems(self) -> Iterator[str]:
        """What contradicts itself."""
        if not self.path:
            yield "model.path is missing: give a Hugging Face id or a directory"
        adapted = {"text", *(["vision"] if self.lora and self.lora.vision else [])}
        for part in sorted(adapted.intersection(self.freeze) if self.lora else ()):
            key = "lora" if part == "text" else "lora.vision"
            yield f"model.freeze={self.freeze} leaves the adapters of model.{key} nothing to train; choose one"
        if not set(PARTS) - set(self.freeze):
            yield "model.freeze names all parts, which leaves nothing to train: leave one out"
        if self.min_pixels > self.max_pixels:
            yield f"model.min_pixels ({self.min_pixels}) must not exceed model.max_pixels ({self.max_pixels})"
