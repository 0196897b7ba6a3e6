"""A GPU that is not there: tensors that say they are on ``cuda:0``, compute on the CPU, and are strict as a GPU is.

    with FakeGpu() as gpu:
        gpu.move(model)
        ...
    gpu.waits, gpu.kernels

Mixing devices is an error. What would make the host wait for the device is counted, with the line that asked for it. Every
operation that writes new memory counts as a kernel; on a real device some are several, and a captured step, once
replayed, is one launch whatever it holds. `torch.nn.attention.varlen` runs by the definition of attention. CUDA graphs
are recorded as lists of operations on fixed memory: what the host decides while recording is decided once and for all,
and waiting then is an error.

It is an approximation: it knows no streams, no times and no memory limit, and counts what torch's operations do as they
are called from Python.
"""

import collections
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from rge.model import varlen
from rge.rollout import cuda_graphs

DEVICE = torch.device("cuda:0")
ROOT = str(Path(__file__).resolve().parents[2])
_WAITING = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal",
    "is_nonzero", "masked_scatter_backward",
}  # fmt: skip
_VIEWS = {
    "view", "_unsafe_view", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "alias", "detach",
    "split", "unbind", "as_strided", "permute", "_reshape_alias", "diagonal", "lift_fresh", "unfold", "split_with_sizes",
    "_conj", "_neg_view", "chunk", "narrow", "view_as", "reshape",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_current = threading.local()


class OnGpu(Tensor):
    """A tensor that says it is on the device; `inner` holds the numbers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        """Wrap a tensor of the host."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",  # for torch's C++ alone, whose backward would want a thread of the device
            requires_grad=False,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def __repr__(self) -> str:
        return f"OnGpu({self.inner})"

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """To the host, which is a wait, or of another dtype."""
        copies = kwargs.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            _gpu()._wait("copy to host")
            return self.inner.to(dtype or self.dtype)
        if dtype in (None, self.dtype):
            return self.clone() if copies else self
        return super().to(dtype)

    def cpu(self) -> Tensor:  # type: ignore[override]
        """A wait."""
        return self.to("cpu")

    def tolist(self) -> Any:
        """A wait."""
        _gpu()._wait("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        """Of the numbers."""
        return self.inner.data_ptr()

    def numpy(self, *args: object, **kwargs: object) -> Any:
        """As on a device."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_counted(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_counted(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation."""
        return _gpu().run(func, args, kwargs or {})


def _counted(index: Any) -> Any:
    """Lists in an index become tensors on the device, by way of the host."""
    if isinstance(index, tuple):
        return tuple(_counted(part) for part in index)
    if isinstance(index, list):
        return torch.tensor(index, device=DEVICE)
    return index


def _gpu() -> "FakeGpu":
    return _current.gpu


class _Recording:
    """Operations of a captured piece of work, in order, on the memory that they had."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple, dict, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()
        self.kernels = 0

    def note_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self.before[storage.data_ptr()] = (whole, whole.clone())

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            if func._schema.is_mutable or func._schema.name.split("::")[1] in _VIEWS:
                continue
            for kept, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class FakeGpu(TorchDispatchMode):
    """Context in which tensors may be on the device.

    Args:
        flash_in_float32: let flash attention compute in float32, which no GPU does, so that a step can be compared with the
            CPU's to rounding; training in bfloat16 would write other tokens after a few.

    Attributes:
        phase: name under which counts are kept now.
        waits: by phase, kind and place in the code.
        kernels: by phase and operation; a replayed graph is one, ``graph``.
        graphs: pieces of work captured, by phase.
        replayed: kernels in replayed graphs, by phase.
        copies: from host to device without a wait, by phase.
        unpinned: those of them from memory that is not pinned, which a device's driver copies once more and cannot queue.
        attention: which attention was computed how often, by phase.
    """

    def __init__(self, flash_in_float32: bool = False) -> None:
        super().__init__()
        self.flash_in_float32 = flash_in_float32
        self.phase = "-"
        self.waits: collections.Counter = collections.Counter()
        self.kernels: collections.Counter = collections.Counter()
        self.graphs: collections.Counter = collections.Counter()
        self.copies: collections.Counter = collections.Counter()
        self.unpinned: collections.Counter = collections.Counter()
        self.attention: collections.Counter = collections.Counter()
        self.replayed: collections.Counter = collections.Counter()
        self._recording: _Recording | None = None
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "FakeGpu":
        """Tensors may be made on the device from here on."""
        _current.gpu = self
        lazy_init, capture, tensor = torch.cuda._lazy_init, cuda_graphs.CAPTURES["cuda"], torch.tensor

        def from_items(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(data, (list, tuple)):
                data = [each.item() if isinstance(each, Tensor) else each for each in data]
            return tensor(data, *args, **kwargs)

        torch.tensor = from_items
        checked, verified = set(cuda_graphs._checked), set(varlen._verified)
        torch.cuda._lazy_init = lambda: None
        torch._C._set_only_lift_cpu_tensors(True)
        cuda_graphs.CAPTURES["cuda"] = lambda: self.capture
        if self.flash_in_float32:
            varlen.TOLERANCE[torch.float32] = 1e-5
        cuda_graphs._checked.clear()
        varlen._verified.clear()

        def undo() -> None:
            torch.cuda._lazy_init, torch.tensor = lazy_init, tensor
            torch._C._set_only_lift_cpu_tensors(False)
            cuda_graphs.CAPTURES["cuda"] = capture
            varlen.TOLERANCE.pop(torch.float32, None)
            cuda_graphs._checked.clear()
            cuda_graphs._checked.update(checked)
            varlen._verified.clear()
            varlen._verified.update(verified)

        self._undo.append(undo)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Back to the host."""
        super().__exit__(*error)
        self._undo.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation."""
        return self.run(func, args, kwargs or {})

    def of(self, counts: collections.Counter, phase: str) -> int:
        """Sum of a phase's counts."""
        return sum(
            number for key, number in counts.items() if (key if isinstance(key, str) else key[0]) == phase
        )

    def move(self, module: nn.Module) -> nn.Module:
        """Put parameters and buffers on the device; tied ones stay tied."""
        known: dict[int, Tensor] = {}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                there: Tensor = OnGpu(tensor.detach().clone())
                if isinstance(tensor, nn.Parameter):
                    there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                known[id(tensor)] = there
            return known[id(tensor)]

        for part in module.modules():
            for group in (part._parameters, part._buffers):
                for name, tensor in list(group.items()):
                    if tensor is not None:
                        group[name] = moved(tensor)  # type: ignore[assignment]
        return module

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As a CUDA graph: `work` leaves no trace, and is run by calling what comes back. A device is waited for first."""
        self._wait("capture")
        self._recording = recording = _Recording()
        self.graphs[self.phase] += 1
        try:
            work()
        finally:
            self._recording = None
        for whole, before in recording.before.values():
            whole.copy_(before)

        def replay() -> None:
            self.kernels[self.phase, "graph"] += 1
            self.replayed[self.phase] += recording.kernels
            # What was recorded is cast already.
            uncast = torch.autocast("cpu", enabled=False)
            with uncast, torch.utils._python_dispatch._disable_current_modes():
                recording.replay()

        return replay

    def _wait(self, kind: str) -> None:
        if self._recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind}")
        self.waits[self.phase, kind, _place()] += 1

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation, on whichever side it belongs."""
        name = func._schema.name.split("::")[1]
        flat = tree_flatten((args, kwargs))[0]
        there = [each for each in flat if isinstance(each, OnGpu)]
        here = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, OnGpu)]
        device = kwargs.get("device")
        asks = None if device is None else torch.device(device).type
        self._check(name, func, args, kwargs, there, here, asks)
        # Where torch's C++ names the CPU it means a tensor's own device; `OnGpu.to` is how others say it.
        on_gpu = asks == "cuda" or bool(there)
        if name == "_local_scalar_dense":
            on_gpu = False
        if asks == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if name in ("pin_memory", "_pin_memory"):
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        inner_args, inner_kwargs = tree_map(
            lambda each: each.inner if isinstance(each, OnGpu) else each, (args, kwargs)
        )
        if self._recording is not None and func._schema.is_mutable:
            self._recording.note_written(func, inner_args, inner_kwargs)
        out = _run(func, name, inner_args, inner_kwargs)
        if self._recording is not None and on_gpu:
            call = (
                (lambda *a, **k: _run(func, name, a, k))
                if name.startswith(("_varlen", "_flash_attention"))
                else func
            )
            if call is not func:
                call._schema = func._schema  # type: ignore[attr-defined]
            self._recording.operations.append((call, inner_args, inner_kwargs, out))
            self._recording.made |= {
                each.untyped_storage().data_ptr()
                for each in tree_flatten(out)[0]
                if isinstance(each, Tensor) and not func._schema.is_mutable and name not in _VIEWS
            }
        if not on_gpu:
            return out
        if name not in _VIEWS and self._recording is not None:
            self._recording.kernels += 1
        elif name not in _VIEWS:
            self.kernels[self.phase, name] += 1
            if "attn" in name or "attention" in name:
                masked = name.startswith("_scaled") and any(
                    isinstance(each, Tensor) for each in (*args[3:4], kwargs.get("attn_mask"))
                )
                self.attention[self.phase, name + (" with a mask" if masked else "")] += 1
        if func._schema.is_mutable:
            return _same(args, out, there)
        wrapped = tree_map(
            lambda each: OnGpu(each) if isinstance(each, Tensor) and not isinstance(each, OnGpu) else each,
            out,
        )
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped

    def _check(
        self, name: str, func: Any, args: tuple, kwargs: dict, there: list, here: list, asks: str | None
    ) -> None:
        if there and name in _WAITING:
            self._wait(name)
        if there and name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._wait(name)
        if there and name in _INDEXING:
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    self._wait("index by mask")
        if name == "_to_copy":
            if asks == "cuda" and not there:
                self._copy(args[0], bool(kwargs.get("non_blocking")))
        elif name == "copy_":
            if isinstance(args[0], OnGpu) and here:
                self._copy(args[1], len(args) > 2 and bool(args[2]))
            elif there and not isinstance(args[0], OnGpu) and not (len(args) > 2 and args[2]):
                self._wait("copy to host")  # otherwise as into pinned memory
        elif there and any(each.dim() for each in here):
            if name in _INDEXING and isinstance(args[0], OnGpu):
                self._wait("index from host")
                return
            sizes = [tuple(each.shape) for each in here if each.dim()]
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} got {sizes} on the CPU at {_place()}"
            )

    def _copy(self, source: Tensor, non_blocking: bool) -> None:
        if non_blocking:
            if self._recording is not None:
                raise RuntimeError("operation not permitted when stream is capturing: copy from host")
            self.copies[self.phase] += 1
            self.unpinned[self.phase] += not hasattr(source, "is_pinned_here")
        else:
            self._wait("copy from host")


def _same(args: tuple, out: Any, there: list[OnGpu]) -> Any:
    """What an operation in place gives back: the tensors that it was given."""
    by_id = {id(each.inner): each for each in there}
    return tree_map(lambda each: by_id.get(id(each), each) if isinstance(each, Tensor) else each, out)


def _place() -> str:
    """The innermost line of this project, or else of transformers, that is running."""
    frame: Any = sys._getframe(1)
    found = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "site-packages" not in name and name != __file__:
            return f"{name.removeprefix(ROOT + '/')}:{frame.f_lineno}"
        if found == "?" and "/transformers/models/" in name:
            found = f"transformers {Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def _run(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    if name == "_varlen_attn":
        return _attention(*args, **kwargs)
    if name == "_flash_attention_forward":  # its wrapper before torch 2.13 lacks an argument
        q, k, v, cu_q, cu_k, max_q, max_k = args[:7]
        window = [kwargs["window_size_left"], kwargs["window_size_right"]]
        found = _attention(
            q, k, v, cu_q, cu_k, max_q, max_k, False, kwargs["scale"], window, seqused_k=kwargs["seqused_k"]
        )
        return *found, torch.zeros(0), torch.zeros(0)
    if name == "_varlen_attn_backward":
        return _attention_backward(*args, **kwargs)
    return func(*args, **kwargs)


def _sequences(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, window: Any, used: Tensor | None) -> Any:
    """Places of each sequence's queries and keys, and what they see: aligned at the ends."""
    left, right = window if window is not None else (-1, -1)
    for number in range(len(cu_q) - 1):
        first, last = int(cu_k[number]), int(cu_k[number + 1])
        if used is not None:
            last = first + int(used[number])
        queries = slice(int(cu_q[number]), int(cu_q[number + 1]))
        away = torch.arange(first, last) - first - (last - first)
        at = torch.arange(queries.stop - queries.start) - (queries.stop - queries.start)
        apart = away[None] - at[:, None]
        seen = torch.ones_like(apart, dtype=torch.bool)
        if right >= 0:
            seen &= apart <= right
        if left >= 0:
            seen &= apart >= -left
        yield queries, slice(first, last), seen


def _weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    scores = scale * torch.einsum("thd,uhd->htu", q.float(), k.float())
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, is_causal: bool = False,
    scale: float | None = None, window_size: Any = None, enable_gqa: bool = False, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention by its definition."""
    if q.dtype not in varlen.TOLERANCE:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    groups, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for queries, keys, seen in _sequences(q, k, cu_q, cu_k, window_size, seqused_k):
        many_k, many_v = (part[keys].repeat_interleave(groups, dim=1) for part in (k, v))
        weight = _weights(q[queries], many_k, seen, scale or q.shape[-1] ** -0.5)
        out[queries] = torch.einsum("htu,uhd->thd", weight, many_v.float()).to(out.dtype)
    return out, q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, is_causal: bool, rng: Tensor, scale: float | None = None, window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its gradients."""
    groups, scale = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    d_q, d_k, d_v = (torch.zeros_like(part) for part in (q, k, v))
    for queries, keys, seen in _sequences(q, k, cu_q, cu_k, window_size, None):
        many_k, many_v = (part[keys].repeat_interleave(groups, dim=1).float() for part in (k, v))
        weight, above = _weights(q[queries], many_k, seen, scale), grad[queries].float()
        d_weight = torch.einsum("thd,uhd->htu", above, many_v)
        d_score = scale * weight * (d_weight - (weight * d_weight).sum(dim=-1, keepdim=True))
        d_q[queries] = torch.einsum("htu,uhd->thd", d_score, many_k).to(q.dtype)
        for target, found in (
            (d_k, torch.einsum("htu,thd->uhd", d_score, q[queries].float())),
            (d_v, torch.einsum("htu,thd->uhd", weight, above)),
        ):
            target[keys] = found.unflatten(1, (-1, groups)).sum(dim=2).to(target.dtype)
    return d_q, d_k, d_v
