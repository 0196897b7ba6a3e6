"""Pairs of processes that exchange something all the time, one pair a case, in each of which rank 1 goes wrong.

    fellow.py FOLDER [CASE=PORT ...]

Everything is imported once; then every process is forked, as if on a machine of its own: no launcher sees two, so none
can end one because of the other. CASE is what rank 1 does in its fifth exchange: ``raises``, ``is_killed``, ``is_stopped``,
``is_interrupted`` or ``exits``; or, with ``main_`` before it, what rank 0 does while rank 1 waits for it in `after_main`. What rank
r says goes to FOLDER/CASE_r; FOLDER/codes.json has the other rank's exit code of every case, or None where it had to be killed.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from rge.distributed import collectives as dist
from rge.distributed.failure_detection import after_main, watch_other_ranks

PATIENCE_S = 600
"""Long for the slowest machine, and far below the limit of an exchange, which would end a process as well."""

SIGNALS = {"is_killed": signal.SIGKILL, "is_stopped": signal.SIGSTOP, "is_interrupted": signal.SIGINT}


def exchange(what: str) -> None:
    """Go on until something goes wrong."""
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))])
    if dist.rank() == 1:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # which a shell's job in the background lacks
    with watch_other_ranks(silence_s=10.0):
        number = 0
        if what.startswith("main"):
            if dist.rank() == 0:
                store = dist.connect_to_store()
                while not store.check(["alive/1"]):  # until then, the other waits with torch's own limit
                    time.sleep(0.1)
                time.sleep(2.0)
                os.kill(os.getpid(), SIGNALS[what.removeprefix("main_")])
            after_main("work")
        while True:
            number += 1
            if dist.rank() == 1 and number == 5:
                if what == "raises":
                    raise FloatingPointError("the loss is nan")
                if what == "exits":
                    sys.exit(7)
                os.kill(os.getpid(), SIGNALS[what])
            dist.sum_over_ranks([1.0], torch.device("cpu"))
            time.sleep(0.05)


def fork(folder: Path, what: str, port: str, rank: int) -> int:
    """Start one process; returns its id."""
    if child := os.fork():
        return child
    try:
        with (folder / f"{what}_{rank}").open("w") as said:
            os.dup2(said.fileno(), 2)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        exchange(what)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def ended(process: int, deadline: float) -> int | None:
    """Exit code of a process, or None if it had to be killed at the deadline."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, cases = Path(sys.argv[1]), dict(case.split("=") for case in sys.argv[2:])
    pairs = {what: [fork(folder, what, port, rank) for rank in range(2)] for what, port in cases.items()}
    deadline = time.monotonic() + PATIENCE_S
    left = {what: pair[::-1] if what.startswith("main") else pair for what, pair in pairs.items()}
    codes = {what: ended(first, deadline) for what, (first, _) in left.items()}
    for _, second in left.values():
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)
    (folder / "codes.json").write_text(json.dumps(codes))
