"""Data workers: batches through pipes, bounded in bytes; workers end when training does.

    worker 0: step 0, step 2, ... --pipe 0-->  reading thread --at most so many bytes wait--> training
    worker 1: step 1, step 3, ... --pipe 1-->

Streams are read by one more process, which sends each worker the rows of its step, so that they are read once per rank.

A batch is sent as one buffer of pixels and one of everything else (`rge.data.collate.flatten`). Pipes hold next to nothing, so
a worker that is ahead blocks in its write, with one finished batch; there is no shared memory to overflow and no file
descriptor per tensor. PyTorch's `DataLoader` bounds batches instead of bytes, keeps them in shared memory, and waits at its
end for workers that must outlive a SIGTERM.
"""

import contextlib
import ctypes
import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rge.common.errors import UserError, how_it_ended, portable
from rge.data import collate
from rge.data.collate import Batch, StepBatches, StreamRows, flatten, unflatten
from rge.data.config import DataConfig

PATIENCE_S = 1800.0
"""How long training waits for one batch, e.g. while a file system hangs."""

PIPE_BYTES = 1 << 20
"""Linux's maximum pipe size without privileges, so that a batch passes in fewer pieces."""

_FORK = multiprocessing.get_context("fork")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class WorkerError(UserError):
    """A data worker died or stopped delivering batches; the message says which and why."""


class Loader:
    """Batches of the given steps in order, prefetched by worker processes. Can be iterated once.

    Workers are forks of this process. One batch is always prefetched, however large, and each worker holds another. Pixels of up
    to `WHOLE_BYTES` are copied to `device` once, from pinned memory; more wait in a file, and go there with what shows them.
    Everything else stays on the CPU.
    """

    def __init__(
        self,
        batches: StepBatches,
        steps: range,
        settings: DataConfig,
        device: torch.device | str = "cpu",
    ):
        self.batches, self.steps, self.device = batches, steps, torch.device(device)
        self.num_workers = min(settings.num_workers, len(steps))
        self.prefetch_bytes = settings.prefetch_mb << 20

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
        return unflatten(
            head, pixels if _is_large(pixels.shape) else pixels.to(self.device, non_blocking=True)
        )


class _Queue:
    """The workers, each of which makes every n-th batch, and the thread that reads their pipes in step order.

    With streams, the last process is the one that reads them.
    """

    def __init__(
        self, batches: StepBatches, steps: range, num_workers: int, limit: int, device: torch.device
    ):
        self.steps, self.limit, self.device = steps, limit, device
        self.processes: list[BaseProcess] = []
        self.inlets: list[BinaryIO] = []
        # Runs before multiprocessing's own clean-up at exit, which would wait for them.
        self._end = Finalize(self, _kill, args=(self.processes,), exitpriority=100)
        self.num_workers = num_workers
        feeds: list[BinaryIO] = []
        outlets: list[int] = []
        for _ in range(num_workers if batches.readers else 0):
            inlet, outlet = _pipe()
            feeds.append(open(inlet, "rb"))
            outlets.append(outlet)
        for number in range(num_workers):
            self._start(batches, steps[number::num_workers], number, feeds, outlets)
        if feeds:
            self._fork(_feed, batches, steps, outlets, [*feeds, *self.inlets], os.getpid())
        for feed in feeds:
            feed.close()
        for outlet in outlets:
            os.close(outlet)
        self.waiting: deque[tuple[int, Any]] = deque()
        self.num_bytes = 0
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._read, name="batches", daemon=True)
        self.thread.start()

    def _start(
        self,
        batches: StepBatches,
        steps: Sequence[int],
        number: int,
        feeds: Sequence[BinaryIO],
        outlets: Sequence[int],
    ) -> None:
        inlet, outlet = _pipe()
        self.inlets.append(open(inlet, "rb"))
        feed = feeds[number] if feeds else None
        others = [*self.inlets, *(one for one in feeds if one is not feed)]
        self._fork(_work, batches, steps, outlet, feed, others, outlets, os.getpid())
        os.close(outlet)  # so that reading ends when the worker does

    def _fork(self, target: Callable[..., None], *arguments: Any) -> None:
        process = _FORK.Process(target=target, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)

    def get(self) -> tuple[dict[str, Any], Tensor]:
        """The next batch, flat; see `flatten`."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.waiting, PATIENCE_S):
                raise WorkerError(
                    f"no batch came from the data workers for {PATIENCE_S / 60:.0f} minutes: is the file system with "
                    "the pictures available?",
                    kind="silent",
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
        if not self.thread.is_alive():  # else a worker hangs, and closing would wait for it
            for inlet in self.inlets:
                inlet.close()

    def _read(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device.index or 0)  # per thread; memory is pinned for its context
            for place, step in enumerate(self.steps):
                self._read_one(place % self.num_workers, step)
        except BaseException as error:  # noqa: BLE001 - training raises it
            self._put(0, error)

    def _read_one(self, number: int, step: int) -> None:
        inlet, pinned = self.inlets[number], self.device.type == "cuda"
        try:
            head_bytes, shape = pickle.load(inlet)  # noqa: S301 - written by a fork of this process
            num_pixels, in_memory = math.prod(shape), not _is_large(shape)
            # Pinned memory comes in powers of two.
            is_rounded = pinned and num_pixels and in_memory
            room = head_bytes + (1 << (num_pixels - 1).bit_length() if is_rounded else num_pixels)
            with self.changed:  # once it is closed, the worker is killed, and reading ends
                self.changed.wait_for(
                    lambda: self.closed or not self.waiting or self.num_bytes + room <= self.limit
                )
            found = pickle.load(inlet)  # noqa: S301
            pixels = _received(inlet, shape, pinned) if in_memory else _filed(inlet, shape)
        except (EOFError, pickle.UnpicklingError):
            self.processes[number].join(5.0)
            how = how_it_ended(self.processes[number].exitcode or 0)
            raise WorkerError(
                f"{how} while it made the batch of step {step + 1}; if memory ran out, lower data.num_workers or "
                "data.prefetch_mb",
                place=f"data worker {number}",
                kind="died",
            ) from None
        if isinstance(found, BaseException):
            raise found
        self._put(room, (found, pixels))

    def _put(self, num_bytes: int, found: Any) -> None:
        with self.changed:
            self.waiting.append((num_bytes, found))
            self.num_bytes += num_bytes
            self.changed.notify_all()


def _is_large(shape: Sequence[int]) -> bool:
    """Whether pixels are left in a file."""
    return math.prod(shape) > collate.WHOLE_BYTES


def _received(inlet: Any, shape: Sequence[int], pinned: bool) -> Tensor:
    pixels = torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=pinned)
    if inlet.readinto(pixels.numpy().data) < pixels.numel():
        raise EOFError
    return pixels


def _filed(inlet: Any, shape: Sequence[int]) -> Tensor:
    left = math.prod(shape)
    with collate.room_for_pixels(), tempfile.TemporaryFile(prefix="rge-pixels-") as file:
        while left:
            if not (piece := inlet.read(min(left, PIPE_BYTES))):
                raise EOFError
            file.write(piece)
            left -= len(piece)
        return collate.in_file(file, shape)


def _pipe() -> tuple[int, int]:
    inlet, outlet = os.pipe()
    with contextlib.suppress(OSError, AttributeError):  # smaller pieces, if the system does not allow it
        fcntl.fcntl(outlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return inlet, outlet


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5.0)


def _is_orphan(parent: int) -> bool:
    """Prepare a fork: it ends with its parent, and no signal ends it; True if the parent has already ended."""
    # Schedulers send SIGTERM, and terminals SIGINT, to every process of a job, but training needs its workers to finish
    # the step and save. Training kills them at its end, or the kernel does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() != parent  # it ended before prctl


def _feed(
    batches: StepBatches,
    steps: Sequence[int],
    outlets: Sequence[int],
    inlets: Sequence[BinaryIO],
    parent: int,
) -> None:
    """Read each step's rows of streams and write them to the step's worker, or the error that this ended with."""
    if _is_orphan(parent):
        return
    for inlet in inlets:
        inlet.close()
    torch.set_num_threads(1)
    outs = [open(outlet, "wb") for outlet in outlets]
    with contextlib.suppress(BrokenPipeError):
        for place, step in enumerate(steps):
            found: Any
            try:
                found = batches.read(step)
            except Exception as error:  # noqa: BLE001 - the step's worker raises it
                found = portable(error)
            out = outs[place % len(outs)]
            pickle.dump(found, out, pickle.HIGHEST_PROTOCOL)
            out.flush()
            if isinstance(found, Exception):
                return


def _work(
    batches: StepBatches,
    steps: Sequence[int],
    outlet: int,
    feed: BinaryIO | None,
    inlets: Sequence[BinaryIO],
    outlets: Sequence[int],
    parent: int,
) -> None:
    """Make and write batches until none are left or the reader has exited."""
    if _is_orphan(parent):
        return
    for inlet in inlets:
        inlet.close()  # so that writing fails when the reader is gone
    for other in outlets:
        os.close(other)  # so that reading ends when the process that reads streams does
    # Threads in the workers would compete with the training step for cores.
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError), open(outlet, "wb") as out:
        for step in steps:
            found: Any
            try:
                found, pixels = flatten(batches[step] if feed is None else batches.make(step, _fed(feed)))
            except Exception as error:  # noqa: BLE001 - training raises it
                found, pixels = portable(error), torch.empty(0, dtype=torch.uint8)
            packed = pickle.dumps(found)
            pickle.dump((len(packed), tuple(pixels.shape)), out)
            out.write(packed)
            out.write(pixels.numpy().data)
            out.flush()
            if isinstance(found, Exception):
                return
            del found, packed, pixels


def _fed(feed: BinaryIO) -> StreamRows:
    """The step's rows of streams."""
    try:
        rows = pickle.load(feed)  # noqa: S301 - written by a fork of the same process
    except (EOFError, pickle.UnpicklingError):
        raise WorkerError(
            "the process that reads the streams was killed or crashed; if memory ran out, lower the sources' shuffle_buffer"
        ) from None
    if isinstance(rows, BaseException):
        raise rows
    return rows
