"""One process of two: rge/train.py under sharded back ends, stopped in the middle of writing a state, and resumed.

    torchrun ... saves.py HOW FOLDER [key=value ...]

``FOLDER/environments.json`` says what `accelerate launch --config_file` would set, by name of the back end; the run of NAME
is ``FOLDER/NAME``. HOW is ``killed``, ``full`` (the second process's disk) or ``whole``: the runs resumed and, beside each, one
that was not disturbed, ``FOLDER/NAME whole``.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed
from back_ends import pretend

from rge import train
from rge.checkpoints.checkpoint_manager import CheckpointManager
from rge.checkpoints.training_state import States
from rge.distributed import collectives as dist

SAVED, HALF_SAVED, KILLED = 2, 4, 5
"""Steps: the first state is written after the next step has changed the weights; of the second only a part, and then a kill."""

_moved_on, _half_written = threading.Event(), threading.Event()
write_state, after_step = States._write, CheckpointManager.after_step


def held_write(self, writes, step, *rest) -> None:
    if step == HALF_SAVED:
        try:
            writes.pop(0)()
        finally:
            _half_written.set()
        threading.Event().wait()
    assert _moved_on.wait(600)
    write_state(self, writes, step, *rest)


def killed_after_step(self, step: int) -> None:
    after_step(self, step)
    if step == SAVED + 1:
        assert not list(self.states.folder.glob("step_*")), "training has waited for the state"
        _moved_on.set()
    if step == KILLED:
        assert _half_written.wait(600)
        os.kill(os.getpid(), signal.SIGKILL)


def write_to_full_disk(self, *given) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        write_state(self, *given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


if __name__ == "__main__":
    how, folder, *words = sys.argv[1:]
    environments = json.loads((Path(folder) / "environments.json").read_text())
    runs = [(name, name) for name in environments]
    close = dist.close
    if how == "killed":
        States._write, CheckpointManager.after_step = held_write, killed_after_step
    elif how == "full":
        States._write = write_to_full_disk
    else:
        runs += [(name, f"{name} whole") for name in environments]
        # accelerate ends the group with a run; a second one would find the first one's addresses in the store, and hang.
        close, torch.distributed.destroy_process_group = (
            torch.distributed.destroy_process_group,
            lambda *_: None,
        )
    for name, out in runs:
        pretend(environments[name])
        train.main([*words, f"out={Path(folder) / out}", "train.num_processes=2"])
        if how == "whole":
            dist.gather_sizes(0, torch.device("cpu"))
    close()
