"""The reference model of the KL divergence: the stage's start.

With adapters it is the model without them, at no cost; otherwise a frozen copy.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rge.distributed import collectives as dist
from rge.model.adapters import has_adapters, without_adapters
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel, eval_mode
from rge.model.packing import Branch
from rge.model.prompts import Prompt
from rge.rl.config import RLConfig
from rge.rollout.generate import Rationale

NOT_UNDER_ZERO3 = (
    "rl.beta needs the weights that the stage starts from, and under ZeRO-3 no process holds them whole: use "
    "model.lora, whose reference is the model without adapters, another back end, or rl.beta=0"
)


@dataclass
class Reference:
    """Log probabilities of rationales under the stage's initial weights."""

    embedder: EmbeddingModel  # a frozen copy, or the model in training if it has adapters
    temperature: float  # of the sampled rationales
    micro_batch_size: int  # queries per forward

    @torch.no_grad()
    def log_probs(self, prompts: Sequence[Prompt], rationales: Sequence[Rationale]) -> Tensor:
        """Of all tokens, ``<emb>`` included, rationale after rationale, (L,) without gradient."""
        embedder, num_each, parts = self.embedder, len(rationales) // len(prompts), []
        branches = [Branch([*one.ids, embedder.emb_id], sampled=True) for one in rationales]
        rows = [branches[start : start + num_each] for start in range(0, len(branches), num_each)]
        plain = without_adapters(embedder.model) if has_adapters(embedder.model) else nullcontext()
        with eval_mode(embedder), without_pictures(embedder), plain:
            for start in range(0, len(prompts), self.micro_batch_size):
                chosen = slice(start, start + self.micro_batch_size)
                packed = embedder.pack(prompts[chosen], rows[chosen], self.temperature)
                parts.append(embedder(packed)[0].log_prob_L)
        return torch.cat(parts)


@contextmanager
def without_pictures(embedder: EmbeddingModel) -> Iterator[None]:
    """Without the picture features of the current step, and without adding to them."""
    pictures, embedder.pictures = embedder.pictures, None
    try:
        yield
    finally:
        embedder.pictures = pictures


def make_reference(
    rl: RLConfig, micro_batch_size: int, embedder: EmbeddingModel, accelerator: Accelerator
) -> Reference:
    """The reference of a stage that is about to start, and has no `problems`."""
    if has_adapters(embedder.model):
        kept = embedder
    else:
        kept = copy.deepcopy(embedder)
        if not dist.is_sharded(accelerator):  # sharded training computes with weights in model.dtype too
            _as_under_autocast(kept)
        kept = kept.eval().requires_grad_(False).to(accelerator.device)
    return Reference(kept, rl.temperature, micro_batch_size)


def problems(rl: RLConfig, lora: LoraConfig | None, *, zero3: bool) -> Iterator[str]:
    """Why the stage rl cannot keep its reference."""
    if not rl.has_reference:
        return
    if zero3 and lora is None:
        yield NOT_UNDER_ZERO3
    if lora is not None and lora.modules_to_save:
        yield (
            "rl.beta's reference is the model without adapters, and model.lora.modules_to_save trains modules that would change "
            "it: leave out one of them"
        )


def _as_under_autocast(embedder: EmbeddingModel) -> None:
    """Make a copy compute exactly what the trained model computes in mixed precision at step 0, so that the KL is 0.

    `dist.prepare` makes trained weights float32. Autocast multiplies matrices in bfloat16 in any case, so a bfloat16 copy of
    those is the same; but embeddings and norms decide the dtype of the residual stream.
    """
    for module in embedder.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and (parameter.ndim == 1 or isinstance(module, nn.Embedding)):
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
