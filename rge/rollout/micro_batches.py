"""Micro batches: how a rank's share of a batch is cut, and what waits between a chunk's first forward and its backward."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.model.attention import EncodedParts
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Prompt

Chunk = tuple[slice, slice]
"""Queries and candidates of one forward."""

LEAST_BYTES = 2**20
"""Smaller tensors stay on the device: copying them would cost more than their memory is worth."""


def chunks_of(
    batch: Batch,
    shares: Sequence[int],
    micro_batch_size: int,
    micro_batch_tokens: int | None = None,
    device: torch.device | None = None,
) -> list[Chunk]:
    """Split queries and candidates into the same number of chunks, of nearly equally many rows, or tokens if these are limited.

    Every rank gets equally many, since ZeRO and FSDP2 communicate in each forward; with a limit of tokens, all ranks have to call
    this. If a rank has fewer queries than another needs chunks (micro batches of one, uneven `shares` of the ranks), the other's
    chunks have one more.
    """
    most = min(shares)
    count = min(max(-(-share // micro_batch_size) for share in shares), most)
    rows, columns = [*map(len, batch.queries)], [*map(len, batch.candidates)]
    if micro_batch_tokens is None:
        return _cut([1] * len(rows), [1] * len(columns), count)
    while count < most and any(
        sum(rows[queries]) + sum(columns[candidates]) > micro_batch_tokens
        for queries, candidates in _cut(rows, columns, count)
    ):
        count += 1
    if len(shares) > 1:  # as many as the rank that needs most
        count = max(dist.gather_sizes(count, device or torch.device("cpu")))
    return _cut(rows, columns, count)


def within(lengths: Sequence[int], most: int | None) -> list[slice]:
    """Runs of rows of at most `most` tokens together, or of one row that has more; None: all in one run."""
    ends, tokens = [0], 0
    for row, length in enumerate(lengths):
        if row > ends[-1] and most is not None and tokens + length > most:
            ends, tokens = [*ends, row], 0
        tokens += length
    return [
        slice(start, end) for start, end in zip(ends, [*ends[1:], len(lengths)], strict=True) if end > start
    ]


def _cut(rows: Sequence[int], columns: Sequence[int], count: int) -> list[Chunk]:
    """Queries and candidates of these weights in `count` chunks."""
    return list(zip(_even(rows, count), _even(columns, count), strict=True))


def _even(weights: Sequence[int], count: int) -> list[slice]:
    """Runs of nearly equal weight, with a row each where there are enough."""
    if len(set(weights)) <= 1:  # to the row, as weights of one would be
        ends = [number * len(weights) // count for number in range(count + 1)]
    else:
        total = [*accumulate(weights, initial=0)]
        ends = [0]
        for number in range(1, count):
            end = bisect_left(total, number * total[-1] / count)
            least, rest = ends[-1] + 1, len(weights) - (count - number)
            ends.append(max(min(max(end, least), rest), ends[-1]))
        ends.append(len(weights))
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class Kept:
    """What a stage's micro batches keep between their first forward and their backward, and where (see `keeping`, or ``none``).

    `prompt_pass` is `rollout.prompt_pass`; ``twice`` if there is room for the candidates' activations alone.
    """

    where: str
    prompt_pass: str


def keeping(where: str) -> AbstractContextManager:
    """Context of forwards whose saved tensors wait for the backward on the ``device`` or the ``host``, pinned for a GPU.

    Copies to and from the host are queued with the device's own work, so that the host never waits for them. Weights always
    stay on the device.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    return hooks(_to_host, _from_host) if where == "host" else nullcontext()


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if is_weight or tensor.device.type == "cpu" or tensor.numel() * tensor.element_size() < LEAST_BYTES:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


def encode_prompts(
    model: nn.Module,
    embedder: EmbeddingModel,
    prompts: Sequence[Prompt],
    parts: Sequence[slice] = (slice(None),),
    where: str = "device",
) -> EncodedParts:
    """Keys and values of prompts, with gradient, for the rollout and then `rge.step.training_step.TrainingStep`; kept as in `keeping`.

    `model` is the wrapped embedder: its next forward is the training step's, and both share one backward. For a step in
    several chunks (`parts`), whose backwards belong to the wrapper's own forwards, it is the embedder itself.
    """
    with keeping(where):
        return EncodedParts([model(embedder.pack_prompts(prompts[part]))[0].encoded for part in parts])


def has_dropout(module: nn.Module) -> bool:
    """Whether a forward of the module in its current mode is random."""

    def rates(part: nn.Module) -> list[Any]:
        if isinstance(part, nn.modules.dropout._DropoutNd):
            return [part.p]
        # Attention hands its rate to a function; layers of SigLIP and Idefics3 call it ``dropout``.
        return [getattr(part, name, 0.0) for name in ("attention_dropout", "dropout")]

    found = (rate for part in module.modules() if part.training for rate in rates(part))
    return module.training and any(isinstance(rate, float | int) and rate > 0 for rate in found)


class RandomState:
    """State of the random generators of the CPU and the model's device.

    Gradient caching computes a chunk twice, with the same dropout masks.
    """

    def __init__(self, device: torch.device):
        self.cpu = torch.get_rng_state()
        self.device = device
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def set(self) -> None:
        """Restore it."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
