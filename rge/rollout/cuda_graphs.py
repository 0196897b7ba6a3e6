"""The steps of a rollout as CUDA graphs, captured once per number of rows and buffer length, and kept for the whole run.

On a GPU a step consists of thousands of small kernels that take longer to launch than to run. A graph launches them at once, on
the memory that they had when it was captured, so every tensor of a batch has the same address in every rollout, and a batch is
padded with finished rows to one of few sizes.
"""

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rge.model.attention import Cache, EncodedParts, RunningCache, bucket
from rge.model.embedding_model import EmbeddingModel
from rge.model.varlen import KernelError
from rge.rollout.decoding import WORTH_DROPPING, Decoding

_log = logging.getLogger(__name__)


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function without running it; each call of the result replays it."""


def _cuda_graphs() -> Capture:
    """Captures CUDA graphs that share one memory pool for temporaries, since no two run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's thread may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": _cuda_graphs}
"""Capture factory by device type."""

MOST_COPIES_BYTES = 1 << 30
"""Memory that bfloat16 copies of float32 weights may take for the whole run, so that captured steps stay valid under autocast."""

LOOK_EVERY = 8
"""Steps between looks for finished rows. Each waits for the device, and keeping a finished row in the batch costs little."""

_checked: set[str] = set()
"""Device types on which this process has compared a captured step with a plain one."""


class CapturedSteps:
    """Captured steps of one embedder, by size, and their memory; see `rge.rollout.decoding.Steps`.

    There is one buffer per name, as large as the largest request so far. Rows are the first dimension of every tensor, so the
    rows of a small rollout have the same addresses as the first rows of a large one, and steps captured on one run on the other.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.in_use = threading.Lock()
        self.weights: tuple = ()
        self.copies: list[Tensor] = []
        self.memory: dict[str, Tensor] = {}
        self.barred_V: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all captured steps. A memory pool ends with its last graph, so the next ones get a new pool."""
        self.steps: dict[tuple, Callable[[], None]] = {}
        self.capture = CAPTURES[self.device.type]()

    @contextmanager
    def rollout(self, embedder: EmbeddingModel) -> Iterator[None]:
        """Drop captured steps if the weights have moved since the last rollout, and keep them where they are during this one.

        Optimizers update weights in place, but loading and gathering (ZeRO-3, FSDP2) move them. So does autocast, with a temporary
        copy of each float32 weight: linear layers, those of adapters included, get copies that stay where they are instead. If
        these are too large, steps are captured in every rollout.
        """
        kinds = [kind for kind in (self.device.type, "cpu") if torch.is_autocast_enabled(kind)]
        dtype = torch.get_autocast_dtype(kinds[0]) if kinds else None
        tensors = [*embedder.parameters(), *embedder.buffers()]
        cast = _linear_weights(embedder) if kinds else []
        now = (dtype, *(tensor.data_ptr() for tensor in tensors))
        lasting = sum(2 * weight.numel() for _, _, weight in cast) <= MOST_COPIES_BYTES
        if now != self.weights or not lasting:
            self.forget()
            self.copies = [torch.empty_like(weight, dtype=dtype) for _, _, weight in cast] if lasting else []
        self.weights = now
        if not kinds or not lasting:
            yield
            return
        if cast:
            torch._foreach_copy_(self.copies, [weight.detach() for _, _, weight in cast])
        try:
            for (module, name, _), copy in zip(cast, self.copies, strict=True):
                module._parameters[name] = nn.Parameter(copy, requires_grad=False)
            # Without autocast's own cache, whatever else it casts is cast again by each replay.
            with torch.autocast(kinds[0], dtype=dtype, cache_enabled=False):
                yield
        finally:
            for module, name, weight in cast:
                module._parameters[name] = weight

    def room(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros in the buffer of that name, at the same address as before if the buffer is large enough."""
        size, known = math.prod(shape), self.memory.get(name)
        if known is None or known.dtype != like.dtype or len(known) < size:
            self.forget()  # captured steps read the buffer that is freed here
            del known
            self.memory.pop(name, None)
            self.memory[name] = like.new_empty(size)
        return self.memory[name][:size].view(shape).zero_()

    def padded(self, number: int) -> int:
        """One of few sizes, so that few steps are captured."""
        return bucket(number)

    def cache(
        self, encoded: EncodedParts, places: Sequence[int], num_new_tokens: int
    ) -> Cache | RunningCache:
        """A cache in lasting memory; the prompts are flat."""
        longest = max(encoded.lengths[place] for place in places)
        self.capacity = bucket(longest + num_new_tokens)
        return RunningCache(encoded, places, self.capacity, self.room)

    def put(self, name: str, value: Tensor) -> Tensor:
        """A copy in lasting memory."""
        return self.room(name, tuple(value.shape), value).copy_(value)

    def kept(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """These rows, moved to the front of the same memory."""
        return tensor[: len(rows)].copy_(tensor[rows])

    def write(self, batch: Decoding) -> None:
        """Run captured steps; the first of a size runs plainly, since libraries choose their kernels then."""
        warm = False
        for step in range(batch.num_steps):
            chooses = step < batch.choice.max_new_tokens
            if chooses and (warm or self._size(batch) in self.steps):
                self._replay(batch)
            else:
                batch.read()
                if step == batch.num_steps - 1:
                    return
                batch.choose(chooses)
            warm = True
            if batch.looks(step, LOOK_EVERY):
                num_alive = batch.num_alive()
                if num_alive == 0:
                    return
                if (num_kept := bucket(num_alive)) <= WORTH_DROPPING * len(batch.row_B):
                    batch.keep(num_kept)
                    warm = False
            batch.tell()

    def _size(self, batch: Decoding) -> tuple:
        """Everything but memory that a captured step depends on."""
        absent = [of_rows is None for of_rows in (batch.uniform_RL, batch.cap_R)]
        return len(batch.row_B), self.capacity, batch.choice, *absent

    def _replay(self, batch: Decoding) -> None:
        size, kind = self._size(batch), batch.row_B.device.type
        if size not in self.steps:
            self.steps[size] = self.capture(lambda: _whole_step(batch))
            if kind not in _checked:
                _check(batch, self.steps[size])
                _checked.add(kind)
                return
        self.steps[size]()


def _whole_step(batch: Decoding) -> None:
    batch.read()
    batch.choose()


def _check(batch: Decoding, replay: Callable[[], None]) -> None:
    """Run a plain and a captured step from the same state; KernelError if they differ."""
    changed = [batch.token_B, batch.done_B, batch.step_1, batch.written_RL, batch.state_RD]
    changed.append(batch.cache.length_B)  # type: ignore[union-attr]
    before = [tensor.clone() for tensor in changed]
    _whole_step(batch)
    expected = [tensor.clone() for tensor in changed]
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)
    replay()
    tokens = int((expected[0] != changed[0]).sum())
    apart = float((expected[4] - changed[4]).abs().max())
    equal = all(torch.equal(expected[place], changed[place]) for place in (1, 2, 5))
    if tokens or not equal or apart > 1e-3:
        raise KernelError(
            f"a step of the rollout as a CUDA graph differs from the plain step: {tokens} of {len(batch.token_B)} tokens differ, "
            f"states by {apart:.1e}; set model.cuda_graphs=false, and please report it with the output of "
            "scripts/gpu_check.py"
        ).about("model.cuda_graphs")
    _log.warning(
        "model.cuda_graphs: a captured step checked against the plain one: tokens equal, states to %.1e",
        apart,
    )


def _linear_weights(embedder: EmbeddingModel) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Float32 parameters of linear layers, which autocast copies: the layer, their name in it, and themselves."""
    return [
        (module, name, parameter)
        for module in embedder.modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype == torch.float32
    ]


_CAPTURED: "weakref.WeakKeyDictionary[EmbeddingModel, CapturedSteps]" = weakref.WeakKeyDictionary()


@contextmanager
def capturing(embedder: EmbeddingModel) -> Iterator[CapturedSteps | None]:
    """Captured steps of an embedder; None if capturing is off or another rollout is using them."""
    device, captured = embedder.device, None
    if device.type in CAPTURES and embedder.cuda_graphs:
        captured = _CAPTURED.get(embedder)
        if captured is None or captured.device != device:
            captured = _CAPTURED[embedder] = CapturedSteps(device)
    if captured is None or not captured.in_use.acquire(blocking=False):
        yield None
        return
    try:
        with captured.rollout(embedder):
            yield captured
    finally:
        captured.in_use.release()
