"""States to resume from: written in the background, atomic, verified before use.

A state is ``<stage>/state/step_00000100``: weights, optimizer, random states and ``done.json``, which lists every file
with its size and checksum. It is written under a temporary name, flushed to the disk and renamed when complete, so a
kill or a full disk leaves the last good one. A file damaged later (a lost disk cache, a half-copied folder) is detected by
its checksum, and the previous state is used.

Training only waits for the copy to main memory; a thread writes it. On one process and under DDP the main process writes.
Frozen weights are left out: they come from the stage's start. Sharded back ends have their own file formats: every process
copies and writes its shard, and the state is complete once all have.
"""

import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from rge.checkpoints.export import WRITE_ERRORS
from rge.checkpoints.manifest import DONE, damage, discard, flush, write_manifest
from rge.checkpoints.settings import CheckpointError
from rge.distributed import collectives as dist

Done = dict[str, Any]
"""Content of a state's ``done.json``: its step, and what it was made with."""
Snapshot = dict[str, Any]
"""What a state holds, by file, in main memory."""

WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.bin", "random_states.bin"
REGISTERED = "registered.bin"
"""States of objects registered with the accelerator, such as what RL counts; equal on all processes. A ``state_dict()`` of
theirs must not change afterwards: it is written while training goes on."""


class States:
    """The training states of one stage.

    What batches contain depends on `generators`, each process's own, so that only as many processes can resume as saved.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        embedder: nn.Module,
        optimizer,
        folder: Path,
        *,
        keep_last: int,
        background: bool = True,
        generators: Sequence[torch.Generator] = (),
    ):
        self.accelerator, self.embedder, self.optimizer = accelerator, embedder, optimizer
        self.folder, self.keep_last = folder, keep_last
        self.background, self.generators = background, generators
        self._thread: threading.Thread | None = None
        self._group = dist.background_group() if dist.is_sharded(accelerator) else None
        self._failure: Exception | None = None
        self._damaged: set[Path] = set()

    def save(self, step: int, meta: Done) -> None:
        """Save the state after `step` steps, then delete all but the newest `keep_last`. All processes call it.

        Returns once training may go on; `wait` returns once everything is on the disk. CheckpointError: this or the previous
        state could not be written, e.g. a full disk; earlier states are untouched and nothing partial is left.
        """
        self.wait()
        temporary, final = self.folder / f"tmp_{step_name(step)}", self.folder / step_name(step)
        if dist.is_sharded(self.accelerator):
            writes = self._copy_shard(step, temporary)
        else:
            snapshot = self._snapshot()
            if not self.accelerator.is_main_process:
                return
            writes = [partial(_write_snapshot, snapshot, temporary)]
        self._thread = threading.Thread(
            target=self._write, args=(writes, step, temporary, final, meta), name="save_state", daemon=True
        )
        self._thread.start()
        if not self.background:
            self.wait()

    def check(self) -> None:
        """Raise CheckpointError if a state could not be written in the background."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the state that is being written, then `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """End the stage: `wait` for its last state, and unregister its objects from the accelerator.

        A later stage's states must not contain them: a run that resumes there does not register them again.
        """
        try:
            self.wait()
        finally:
            self._registered().clear()

    def _snapshot(self) -> Snapshot:
        rngs = dist.gather_objects(_random_states(self.generators))
        if not self.accelerator.is_main_process:
            return {}
        # Safetensors wants each weight contiguous and in memory of its own.
        weights = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in trained_tensors(self.embedder).items()
        }
        optimizer = dist.in_main_memory(self.optimizer.state_dict())
        # Their `state_dict()` returns copies; torch would take seconds to copy the lists of token ids again.
        registered = [each.state_dict() for each in self._registered()]
        return {WEIGHTS: weights, OPTIMIZER: optimizer, RANDOM: rngs, REGISTERED: registered}

    def _registered(self) -> list[Any]:
        return self.accelerator._custom_objects

    def _copy_shard(self, step: int, temporary: Path) -> list[Callable[[], None]]:
        """Copy this process's shard and return what writes it; without `background`, write it now."""
        deferred: AbstractContextManager[list[Callable[[], None]]] = nullcontext([])
        if self.background:
            deferred = dist.writes_deferred(self.accelerator, self._group)
        if self.accelerator.is_main_process:
            _fresh(temporary)
        self.accelerator.wait_for_everyone()
        try:
            with deferred as writes:
                self.accelerator.save_state(str(temporary), safe_serialization=True)
        except WRITE_ERRORS as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _unwritten(step, self.folder, error) from error
        return writes

    def _write(
        self, writes: list[Callable[[], None]], step: int, temporary: Path, final: Path, meta: Done
    ) -> None:
        def write() -> None:
            while writes:
                writes.pop(0)()  # frees its copy

        def complete() -> None:
            if self.accelerator.is_main_process:
                self._complete(step, temporary, final, meta)

        try:
            self._together(write)
            self._together(complete)
        except Exception as error:  # noqa: BLE001 - what a thread does not report is lost
            shutil.rmtree(temporary, ignore_errors=True)
            self._failure = error if dist.is_connection_loss(error) else _unwritten(step, self.folder, error)

    def _together(self, work: Callable[[], None]) -> None:
        """Do this process's part of a write; raise any process's failure in all that write."""
        failure = None
        try:
            work()
        except Exception as error:  # otherwise the others would wait for this one
            if self._group is None or dist.is_connection_loss(error):
                raise
            failure = _reason(error)
        if self._group is not None:
            for found in filter(None, dist.gather_objects(failure, self._group)):
                raise OSError(found)

    def _complete(self, step: int, temporary: Path, final: Path, meta: Done) -> None:
        # Other nodes wrote most of a sharded state: sizes are checked, contents are not read again.
        write_manifest(temporary, {"step": step, **meta}, checksums=self._group is None)
        discard(final)
        temporary.rename(final)
        flush(self.folder)
        # Damaged states do not count towards `keep_last`, and are deleted once there is a newer good one.
        self._damaged.discard(final)
        states = complete_states(self.folder)
        sound = [path for path in states if path not in self._damaged]
        for old in {*sound[: -self.keep_last], *self._damaged.intersection(states)}:
            discard(old)

    def latest(self) -> tuple[Path, Done] | None:
        """The newest intact state and its ``done.json``, or None; CheckpointError if all are damaged. All processes call it."""
        found, damaged = None, list[str]()
        if self.accelerator.is_main_process:
            for leftover in self.folder.glob("tmp_step_*"):  # of a run that was killed while it wrote
                shutil.rmtree(leftover, ignore_errors=True)
            for path in reversed(complete_states(self.folder)):
                if (problem := damage(path)) is None:
                    found = path, json.loads((path / DONE).read_text())
                    break
                self._damaged.add(path)
                damaged.append(f"{path} is damaged: {problem}")
                self.accelerator.print(damaged[-1])
        found, damaged = dist.from_main((found, damaged))
        if damaged and found is None:
            raise CheckpointError(
                f"it holds no intact state to resume from: {'; '.join(damaged)}. Delete it to start again",
                self.folder,
                kind="damaged",
            )
        return found

    def announce(self, name: str, step: int, path: Path, changed: Sequence[str]) -> None:
        """Print where a stage resumes, and what has changed since its state that affects rounding."""
        self.accelerator.print(f"{name}: resuming after step {step} from {path}")
        if changed:
            self.accelerator.print(
                f"{name}: the result will not be bit-identical to that of an uninterrupted run, since these were changed: "
                + "; ".join(changed)
            )

    def load(self, path: Path) -> None:
        """Restore weights, optimizer and random states.

        CheckpointError: it has other parameters than are trained now, or `generators` of another number of processes.
        """
        if dist.is_sharded(self.accelerator):
            self.accelerator.load_state(str(path))
            return
        weights = load_file(path / WEIGHTS)
        ours = trained_tensors(self.embedder)
        if different := sorted(weights.keys() ^ ours.keys()):
            raise CheckpointError(
                "it contains other parameters than those trained now; use another out=, or the settings it was made with",
                path,
                key=different[0],
            )
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(weights[name])
        self.optimizer.load_state_dict(torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True))
        registered = torch.load(path / REGISTERED, weights_only=True)
        for kept, state in zip(self._registered(), registered, strict=True):
            kept.load_state_dict(state)
        states = torch.load(path / RANDOM, weights_only=True)
        if len(states) == dist.world_size():
            _set_random_states(states[dist.rank()], self.generators)
        elif self.generators:
            raise CheckpointError(
                f"it was saved by {len(states)} processes. With {dist.world_size()}, batches would differ, so it cannot be continued: "
                f"launch {len(states)} processes, or delete {self.folder} to start this stage again",
                path,
                kind="processes",
            )
        else:
            self.accelerator.print(
                f"{path} was saved by {len(states)} processes and is resumed by {dist.world_size()}: batches are the same, "
                "dropout draws new numbers"
            )


def trained_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters and persistent buffers, by name; shared ones once."""
    found = {name: value for name, value in module.named_parameters() if value.requires_grad}
    kept = module.state_dict(keep_vars=True)
    return found | {name: value for name, value in module.named_buffers() if name in kept}


def step_name(step: int) -> str:
    """Name of the folder of a state or checkpoint."""
    return f"step_{step:08d}"


def _unwritten(step: int, folder: Path, error: Exception) -> CheckpointError:
    fix = "free some space and start" if isinstance(error, WRITE_ERRORS) else "start"
    return CheckpointError(
        f"the state could not be written: {_reason(error)}; earlier states are intact; {fix} the same command again",
        folder,
        f"step {step}",
        kind="unwritten",
    )


def _reason(error: Exception) -> str:
    # Never empty, since an empty one would count as none.
    return (isinstance(error, WRITE_ERRORS) and str(error)) or repr(error)


def _write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    _fresh(folder)
    save_file(snapshot[WEIGHTS], folder / WEIGHTS)
    for name in (OPTIMIZER, RANDOM, REGISTERED):
        torch.save(snapshot[name], folder / name)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def complete_states(folder: Path) -> list[Path]:
    """Completely written states, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if re.fullmatch(r"step_\d{8}", path.name) and (path / DONE).is_file()
    )


def newest_state(folder: Path) -> tuple[Path, Done] | None:
    """The newest state and its ``done.json``; None if there is none, or it cannot be read, which `States.latest` reports."""
    for path in complete_states(folder)[-1:]:
        with suppress(OSError, ValueError):
            return path, json.loads((path / DONE).read_text())
    return None


def _random_states(generators: Sequence[torch.Generator]) -> dict[str, Any]:
    name, keys, *rest = cast(tuple, np.random.get_state(legacy=True))
    states = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "generators": [each.get_state() for each in generators],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any], generators: Sequence[torch.Generator]) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    for generator, state in zip(generators, states["generators"] if generators else (), strict=True):
        generator.set_state(state)
