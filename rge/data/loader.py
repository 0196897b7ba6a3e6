"""Data workers: batches through pipes, bounded in bytes; workers end when training does.

    worker 0: step 0, step 2, ... --pipe 0-->  reading thread --at most so many bytes wait--> training
    worker 1: step 1, step 3, ... --pipe 1-->

A batch is sent as one buffer of pixels and one of everything else (`rge.data.collate.flatten`). Pipes hold next to nothing, so
a worker that is ahead blocks in its write, with one finished batch; there is no shared memory to overflow and no file
descriptor per tensor. PyTorch's `DataLoader` bounds batches instead of bytes, keeps them in shared memory, and waits at its
end for workers that must outlive a SIGTERM.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from rge.common.errors import UserError, how_it_ended, portable
from rge.config import DataConfig
from rge.data.collate import Batch, StepBatches, flatten, unflatten

PATIENCE_S = 1800.0
"""How long training waits for one batch, e.g. while a file system hangs."""

PIPE_BYTES = 1 << 20
"""Linux's maximum pipe size without privileges, so that a batch passes in fewer pieces."""

_FORK = multiprocessing.get_context("fork")
_HEADER = struct.Struct("<QQ")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class WorkerError(UserError):
    """A data worker died or stopped delivering batches; the message says which and why."""


class Loader:
    """Batches of the given steps in order, prefetched by worker processes. Can be iterated once.

    Workers are forks of this process. One batch is always prefetched, however large, and each worker holds another. Pixels are
    copied to `device` once, from pinned memory; everything else stays on the CPU.
    """

    def __init__(
        self,
        batches: StepBatches,
        steps: range,
        settings: DataConfig,
        device: torch.device | str = "cpu",
    ):
        self.batches, self.steps = batches, steps
        self.num_workers = min(settings.num_workers, len(steps))
        self.prefetch_bytes = settings.prefetch_mb << 20
        self.device = torch.device(device)

    def __iter__(self) -> Iterator[Batch]:
        """The batches. Raises the workers' errors, and WorkerError if one was killed or no batch came for `PATIENCE_S`."""
        if not self.num_workers:
            for step in self.steps:
                yield self._on_device(*flatten(self.batches[step]))
            return
        queue = _Queue(self.batches, self.steps, self.num_workers, self.prefetch_bytes, self.device)
        try:
            for _ in self.steps:
                yield self._on_device(*queue.get())
        finally:
            queue.close()

    def _on_device(self, head: dict[str, Any], pixels: Tensor) -> Batch:
        return unflatten(head, pixels.to(self.device, non_blocking=True))


class _Worker:
    """A process that makes every n-th batch, and the reading end of its pipe."""

    def __init__(self, number: int, batches: StepBatches, steps: Sequence[int], others: Sequence["_Worker"]):
        self.number = number
        self.inlet, outlet = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # smaller pieces, if the system does not allow it
            fcntl.fcntl(outlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        inlets = [self.inlet, *(worker.inlet for worker in others)]
        self.process: BaseProcess = _FORK.Process(
            target=_work,
            args=(batches, steps, outlet, inlets, os.getpid()),
            name=f"data worker {number}",
            daemon=True,
        )
        self.process.start()
        os.close(outlet)  # so that reading ends when the worker does

    def read_into(self, view: memoryview, step: int) -> None:
        """Fill `view` from the pipe; WorkerError if the worker is gone."""
        while len(view):
            count = os.readv(self.inlet, [view])
            if not count:
                self.process.join(5.0)
                how = how_it_ended(self.process.exitcode or 0)
                raise WorkerError(
                    f"data worker {self.number} {how} while it made the batch of step {step + 1}; if memory ran out, "
                    "lower data.num_workers or data.prefetch_mb"
                )
            view = view[count:]


class _Queue:
    """The workers, and the thread that reads their batches in step order."""

    def __init__(
        self, batches: StepBatches, steps: range, num_workers: int, limit: int, device: torch.device
    ):
        self.steps, self.limit, self.device = steps, limit, device
        self.workers: list[_Worker] = []
        # Runs before multiprocessing's own clean-up at exit, which would wait for them.
        self._end = Finalize(self, _kill, args=(self.workers,), exitpriority=100)
        for number in range(num_workers):
            self.workers.append(_Worker(number, batches, steps[number::num_workers], self.workers))
        self.waiting: deque[tuple[int, Any]] = deque()
        self.num_bytes = 0
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._read, name="batches", daemon=True)
        self.thread.start()

    def get(self) -> tuple[dict[str, Any], Tensor]:
        """The next batch, flat; see `flatten`."""
        until = time.monotonic() + PATIENCE_S
        with self.changed:
            while not self.waiting:
                if not self.changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise WorkerError(
                        f"no batch came from the data workers for {PATIENCE_S / 60:.0f} minutes: is the file system with "
                        "the pictures available?"
                    )
            num_bytes, found = self.waiting.popleft()
            self.num_bytes -= num_bytes
            self.changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Stop the workers immediately."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._end()
        self.thread.join(5.0)
        for worker in self.workers:
            os.close(worker.inlet)

    def _read(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device.index or 0)  # per thread; memory is pinned for its context
            for place, step in enumerate(self.steps):
                if not self._read_one(self.workers[place % len(self.workers)], step):
                    return
        except BaseException as error:  # noqa: BLE001 - training raises it
            self._put(0, error)

    def _read_one(self, worker: _Worker, step: int) -> bool:
        header = bytearray(_HEADER.size)
        worker.read_into(memoryview(header), step)
        head_bytes, pixel_bytes = _HEADER.unpack(header)
        # Pinned memory comes in powers of two.
        pinned = self.device.type == "cuda" and pixel_bytes > 0
        num_bytes = head_bytes + (1 << (pixel_bytes - 1).bit_length() if pinned else pixel_bytes)
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or not self.waiting or self.num_bytes + num_bytes <= self.limit
            )
            if self.closed:
                return False
        packed = bytearray(head_bytes)
        worker.read_into(memoryview(packed), step)
        found = pickle.loads(packed)  # noqa: S301 - written by a fork of this process
        if isinstance(found, BaseException):
            self._put(0, found)
            return False
        pixels = torch.empty(pixel_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        worker.read_into(pixels.numpy().data, step)
        self._put(num_bytes, (found["head"], pixels.view(found["shape"])))
        return True

    def _put(self, num_bytes: int, found: Any) -> None:
        with self.changed:
            self.waiting.append((num_bytes, found))
            self.num_bytes += num_bytes
            self.changed.notify_all()


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(5.0)


def _work(
    batches: StepBatches, steps: Sequence[int], outlet: int, inlets: Sequence[int], parent: int
) -> None:
    """Make and write batches until none are left or the reader has exited."""
    # Schedulers send SIGTERM, and terminals SIGINT, to every process of a job, but training needs its workers to finish
    # the step and save. Training kills them at its end, or the kernel does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent ended before prctl
    for inlet in inlets:
        os.close(inlet)  # so that writing fails when the reader is gone
    # Threads in the workers would compete with the training step for cores.
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        for step in steps:
            try:
                head, pixels = flatten(batches[step])
            except Exception as error:  # noqa: BLE001 - training raises it
                _write(outlet, portable(error), torch.empty(0, dtype=torch.uint8))
                return
            _write(outlet, {"head": head, "shape": pixels.shape}, pixels)
            del head, pixels


def _write(outlet: int, found: Any, pixels: Tensor) -> None:
    packed = pickle.dumps(found)
    parts: list[bytes | memoryview] = [
        _HEADER.pack(len(packed), pixels.nbytes),
        packed,
        pixels.numpy().data.cast("B"),
    ]
    for part in parts:
        view = memoryview(part)
        while len(view):
            view = view[os.write(outlet, view) :]
