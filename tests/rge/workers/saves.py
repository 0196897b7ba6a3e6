"""One process of two: rge/train.py under sharded back ends, stopped in the middle of writing a state, and resumed.

    torchrun ... saves.py FOLDER [key=value ...]

``FOLDER/launches.json`` says, by name of the back end, what `accelerate launch --config_file` would set, and ports of
launches by the accident that each of them meets with: ``killed``, or ``full``, the second process's disk. Such a launch is a
fork of this process, so that all of them import everything once; it trains in ``FOLDER/NAME ACCIDENT``, and what it prints goes
to ``FOLDER/NAME ACCIDENT_RANK``. The first process writes ``FOLDER/codes.json``, their exit codes. Then the killed runs, of which
``FOLDER/NAME left`` is a copy, are resumed, and beside each ``FOLDER/NAME whole`` is one that was not disturbed.
"""

import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import deepspeed.ops  # noqa: F401 - once, for all forks
import torch
import torch.distributed
from back_ends import pretend

from rge import train
from rge.checkpoints.checkpoint_manager import CheckpointManager
from rge.checkpoints.training_state import States
from rge.distributed import collectives as dist

SAVED, HALF_SAVED, KILLED = 1, 2, 3
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
    if step == SAVED + 1:
        assert not list(self.states.folder.glob("step_*")), "training has waited for the state"
        _moved_on.set()
    if step == KILLED:
        assert _half_written.wait(600)
        os.kill(os.getpid(), signal.SIGKILL)
    after_step(self, step)


def write_to_full_disk(self, *given) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        write_state(self, *given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def launched(accident: str, port: int, environment: dict[str, str], words: list[str], said: Path) -> int:
    """Exit code of a fork of this process that trains and meets with an accident."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(port)
    if accident == "killed":
        States._write, CheckpointManager.after_step = held_write, killed_after_step
    else:
        States._write = write_to_full_disk
    pretend(environment)
    train.main(words)
    sys.exit()


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    launches = json.loads((Path(folder) / "launches.json").read_text())
    codes = {}
    for name, launch in launches.items():
        for accident, port in launch["ports"].items():
            out = Path(folder) / f"{name} {accident}"
            said = Path(folder) / f"{out.name}_{os.environ['RANK']}"
            given = [*words, f"out={out}", "train.num_processes=2"]
            codes[out.name] = launched(accident, port, launch["environment"], given, said)
    if os.environ["RANK"] == "0":
        (Path(folder) / "codes.json").write_text(json.dumps(codes))
        for name in launches:
            shutil.copytree(Path(folder) / f"{name} killed", Path(folder) / f"{name} left")
    # accelerate ends the group with a run; a second one would find the first one's addresses in the store, and hang.
    close, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
    for name, launch in launches.items():
        for out in (f"{name} killed", f"{name} whole"):
            pretend(launch["environment"])
            train.main([*words, f"out={Path(folder) / out}", "train.num_processes=2"])
            dist.gather_sizes(0, torch.device("cpu"))
    close()
