"""From data workers to training: the same batches, few descriptors, no shared memory, bounded, and workers that end."""

import os
import resource
import signal
import time
from dataclasses import fields
from pathlib import Path

import forked
import numpy as np
import psutil
import pytest
import torch
from faults import error_about

from rge.common.images import ImageError
from rge.data import collate, loader
from rge.data.collate import Batch, flatten, unflatten
from rge.data.config import DataConfig
from rge.data.loader import Loader, WorkerError
from rge.model.prompts import Prompt


def batch_of(step: int, num_patches: int = 8) -> Batch:
    """Two queries, one with a picture, and two candidates, one with two; pixels say which step they belong to."""

    def prompt(name: str, length: int, sizes: list[int]) -> Prompt:
        ids = torch.arange(length) + 100 * step
        pixels = torch.full((sum(sizes), 3, 4, 4), step % 256, dtype=torch.uint8) if sizes else None
        grid = torch.tensor([[1, 1, size] for size in sizes]) if sizes else None
        positions = torch.stack([ids, ids + 1, ids + 2])
        return Prompt(name, ids, (ids % 3 == 0).long(), positions, pixels, grid, num_cut_tokens=length)

    return Batch(
        record_ids=["a", "b"],
        queries=[prompt("a", 5, [num_patches]), prompt("b", 3, [])],
        oracle_ids=[[1, 2], []],
        candidates=[prompt("c", 4, []), prompt("d", 2, [num_patches, 4])],
        candidate_identity=[7, -8],
        positive=[0, 1],
        negatives=[[], [0]],
        right_answers=[[7], [-8, 9]],
        seeds=[2**62, step],
        more_positives=[[], []],
    )


def assert_same(one: Batch, other: Batch) -> None:
    for item in fields(Batch):
        mine, theirs = getattr(one, item.name), getattr(other, item.name)
        if item.name not in ("queries", "candidates"):
            assert mine == theirs
            continue
        assert len(mine) == len(theirs)
        for left, right in zip(mine, theirs, strict=True):
            assert (left.id, left.num_cut_tokens) == (right.id, right.num_cut_tokens)
            for name in ("input_ids", "type_ids", "position_3T", "pixels", "image_grid"):
                first, second = getattr(left, name), getattr(right, name)
                assert (first is None) == (second is None)
                if first is not None:
                    assert first.dtype == second.dtype
                    assert torch.equal(first, second)


class Made:
    """Stands for `StepBatches`: a function of the step."""

    readers = ()

    def __init__(self, make=batch_of):
        self.make = make

    def __getitem__(self, step: int) -> Batch:
        return self.make(step)


def settings(num_workers: int, prefetch_mb: int = 64) -> DataConfig:
    return DataConfig(num_workers=num_workers, prefetch_mb=prefetch_mb)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def gone(pids: list[int], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def test_a_batch_survives_the_way():
    whole = batch_of(3)
    head, pixels = flatten(whole)
    assert_same(unflatten(head, pixels), whole)
    assert pixels.shape == (20, 3, 4, 4)
    # Views of one run of bytes: nothing is copied on the way to the prompts.
    assert unflatten(head, pixels).candidates[1].pixels.data_ptr() == pixels[8:].data_ptr()


def test_a_batch_without_pictures_survives_the_way():
    whole = batch_of(3)
    text = Batch(
        **{
            item.name: [
                Prompt(p.id, p.input_ids, p.type_ids, p.position_3T, None, None)
                if isinstance(p, Prompt)
                else p
                for p in getattr(whole, item.name)
            ]
            for item in fields(Batch)
        }
    )
    assert_same(unflatten(*flatten(text)), text)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("steps", [range(0), range(4, 5), range(2, 12)])
@pytest.mark.parametrize("in_files", [False, True])
def test_batches_come_whole_and_in_order(num_workers, steps, in_files, monkeypatch):
    monkeypatch.setattr(collate, "WHOLE_BYTES", 1 if in_files else collate.WHOLE_BYTES)
    before = children()
    found = list(Loader(Made(), steps, settings(num_workers)))
    assert len(found) == len(steps)
    for step, batch in zip(steps, found, strict=True):
        assert_same(batch, batch_of(step))
    assert set(children()) <= set(before)  # what another test left may have ended meanwhile


@pytest.mark.parametrize("limit_mb", [1, 4])
def test_what_waits_is_bounded_in_bytes(monkeypatch, limit_mb):
    """Slow training, fast workers: what is read ahead stays within the limit, and one batch may always wait."""
    size = flatten(batch_of(0, 20_000))[1].nbytes
    assert size > 1 << 20
    queues = []

    class Watched(loader._Queue):
        def __init__(self, *args):
            queues.append(self)
            self.seen = []
            super().__init__(*args)

        def _put(self, num_bytes, found):
            super()._put(num_bytes, found)
            self.seen.append((len(self.waiting), self.num_bytes))

    monkeypatch.setattr(loader, "_Queue", Watched)
    every = Loader(Made(lambda step: batch_of(step, 20_000)), range(12), settings(2, limit_mb))
    for number, batch in enumerate(every):
        time.sleep(0.1 if number < 4 else 0)
        assert batch.queries[0].pixels[0, 0, 0, 0] == number
    [queue] = queues
    assert max(count for count, _ in queue.seen) == max((limit_mb << 20) // size, 1)
    assert max(num_bytes for _, num_bytes in queue.seen) <= max(limit_mb << 20, size + 10_000)


@pytest.mark.slow
def test_few_descriptors_and_no_shared_memory():
    """A batch of a thousand pictures under 40 descriptors more than there are."""
    many = Batch([], [batch_of(n).queries[0] for n in range(1000)], [], [], [], [], [], [], [])

    def shared() -> set[str]:  # by torch; other processes of this machine have semaphores there
        return {name for name in os.listdir("/dev/shm") if "torch" in name}

    names = shared()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        kept = []
        for batch in Loader(Made(lambda step: many), range(6), settings(3)):
            kept.append(batch)
            for pid in ["self", *children()]:
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert not [line for line in maps.splitlines() if "/dev/shm/torch" in line]
            assert shared() == names
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 6


def fails_at(step: int):
    def make(which: int) -> Batch:
        if which == step:
            raise ImageError("cannot be read", "x.png")
        return batch_of(which)

    return make


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_comes_in_its_turn_and_ends_the_workers(num_workers):
    before = children()
    began = time.monotonic()
    batches = iter(Loader(Made(fails_at(4)), range(20), settings(num_workers)))
    assert [next(batches).seeds[1] for _ in range(4)] == [0, 1, 2, 3]
    with error_about(ImageError, "x.png") as caught:
        next(batches)
    assert gone([pid for pid in children() if pid not in before])
    assert time.monotonic() - began < 10
    if num_workers:
        assert "in make" in caught.value.__notes__[0]  # where in the worker


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_an_error_that_cannot_travel_comes_as_text():
    def make(step):
        raise Stubborn("what happened", 2)

    with pytest.raises(RuntimeError):
        list(Loader(Made(make), range(3), settings(1)))


def test_a_killed_worker_is_named():
    def make(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_of(step)

    batches = iter(Loader(Made(make), range(12), settings(2)))
    assert [next(batches).seeds[1] for _ in range(5)] == [0, 1, 2, 3, 4]
    with error_about(WorkerError, "data worker 1", "died"):
        next(batches)


def test_training_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(loader, "PATIENCE_S", 0.5)
    before = children()
    with error_about(WorkerError, "silent"):
        list(Loader(Made(lambda step: time.sleep(60)), range(3), settings(2)))
    assert set(children()) <= set(before)


def test_leaving_early_ends_the_workers():
    before = children()
    batches = iter(Loader(Made(lambda step: batch_of(step, 100_000)), range(100), settings(3, 1)))
    next(batches)
    mine = [pid for pid in children() if pid not in before]
    assert len(mine) == 3
    batches.close()
    assert gone(mine)


def test_workers_outlive_the_signals_that_ask_training_to_end():
    before = children()
    batches = iter(Loader(Made(), range(40), settings(2, 1)))
    next(batches), next(batches)  # one of each worker: both are past their start
    for pid in children():
        if pid not in before:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
    assert len(list(batches)) == 38


PROGRAM = """
import os, signal, sys, threading, time
import psutil
sys.path.insert(0, {tests!r})
from test_loader import Made, batch_of, settings
from rge.data.loader import Loader
batches = iter(Loader(Made(lambda step: batch_of(step, 100_000)), range(100), settings(3, 1)))
next(batches)
print(*(child.pid for child in psutil.Process().children()), flush=True)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError('no more')", 1),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)", -2),
        ("os.abort()", -6),
        ("threading.Timer(0.1, os._exit, [5]).start(); time.sleep(60)", 5),
    ],
)
def test_workers_end_with_their_run_whatever_ends_it(end, code, tmp_path):
    program = tmp_path / "a program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), end=end))
    began = time.monotonic()
    done = forked.run(program)
    assert done.returncode == code, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3
    assert gone(pids, 5.0)
    assert time.monotonic() - began < 60


def test_pixels_are_moved_once_and_the_rest_stays_on_the_cpu():
    [batch] = Loader(Made(), range(1), settings(1), "meta")
    prompt = batch.queries[0]
    assert prompt.pixels.device.type == "meta"
    assert {prompt.input_ids.device.type, prompt.image_grid.device.type} == {"cpu"}
    assert prompt.pixels.untyped_storage() is not None
    shown = [batch.queries[0].pixels, batch.candidates[1].pixels]
    assert len({one.untyped_storage()._cdata for one in shown}) == 1


def test_pixels_in_a_file_go_to_a_device_with_what_shows_them(monkeypatch):
    monkeypatch.setattr(collate, "WHOLE_BYTES", 1)
    [batch] = Loader(Made(), range(1), settings(1), "meta")
    assert batch.queries[0].pixels.device.type == "cpu"


@pytest.mark.gpu
def test_a_gpu_gets_the_pixels_from_pinned_memory():
    for step, batch in enumerate(
        Loader(Made(lambda step: batch_of(step, 5000)), range(8), settings(2, 1), "cuda")
    ):
        assert batch.queries[0].pixels.is_cuda
        assert np.array_equal(batch.queries[0].pixels.cpu(), batch_of(step, 5000).queries[0].pixels)
