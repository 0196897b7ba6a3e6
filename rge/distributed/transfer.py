"""Move many small tensors to a device by one copy from one pinned buffer.

A copy from pageable memory goes through a buffer of the driver and is not queued behind the device's work, and a step has
hundreds of index tensors of a few kilobytes.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")

ALIGNMENT = 64
"""Bytes; that of the allocator, so that kernels see equally aligned addresses."""


def moved(tree: Tree, device: torch.device | str) -> Tree:
    """The same on a device: every host tensor in lists, tuples, dicts and dataclasses becomes a view of one buffer.

    Without a GPU the buffer is not pinned. Nothing waits for the copy.
    """
    device = torch.device(device)
    tensors: list[Tensor] = []
    _each(tree, tensors.append)
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=True):
        _view(buffer, start, tensor).copy_(tensor)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    on_device = buffer.to(device, non_blocking=True)
    views = (_view(on_device, start, tensor) for tensor, start in zip(tensors, starts, strict=True))
    return _each(tree, lambda _: next(views))


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _each(tree: Any, change: Callable[[Tensor], object]) -> Any:
    """The tree with `change` applied to every tensor, in order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _each(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_each(value, change) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = {item.name: _each(getattr(tree, item.name), change) for item in fields(tree)}
        return replace(tree, **parts)
    return tree
