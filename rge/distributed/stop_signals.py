"""SIGTERM and Ctrl-C take effect between two steps, on all processes together.

The step is finished, a state is saved, and every process exits with 143 or 130.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator

from rge.common.errors import SIGNALLED
from rge.distributed import collectives as dist
from rge.distributed.failure_detection import CoordinatedExit

SIGNALS = (signal.SIGTERM, signal.SIGINT)

SAME_PRESS_S = 1.0
"""SIGINTs this close together are one Ctrl-C: the terminal sends it to every process, and launchers forward it."""

_received: dict[signal.Signals, float] = {}
"""Time of the first signal of each kind."""


def stop_after_this_step_at_signals() -> None:
    """Let `received_by_any` report SIGTERM and SIGINT from now on; a second SIGINT ends the process."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _remember)


@contextmanager
def restoring_handlers() -> Iterator[None]:
    """Restore what SIGTERM and SIGINT did before, and forget those received: a program, such as a notebook, may go on."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        _received.clear()
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # it was set by Python
                    signal.signal(number, handler)


def _remember(number: int, _: object) -> None:
    now = time.monotonic()
    first = _received.setdefault(signal.Signals(number), now)
    if number == signal.SIGINT and now - first > SAME_PRESS_S:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    if number == signal.SIGINT and now == first and dist.rank() == 0:
        os.write(
            2, b"\nstopping after this step and saving a state; press Ctrl-C again to stop immediately\n"
        )


def received_by_any(device: torch.device) -> signal.Signals | None:
    """The signal that any process has received so far, SIGTERM first; all processes call it after a step."""
    counts = dist.sum_over_ranks([float(each in _received) for each in SIGNALS], device)
    return next((each for each, count in zip(SIGNALS, counts, strict=True) if count), None)


def exit_after(
    received: signal.Signals, accelerator: Accelerator, name: str, step: int, num_steps: int, states: Path
) -> NoReturn:
    """Exit once the state in `states` is written, with 143 or 130: neither success, nor the 1 of a crash, to a scheduler."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(  # noqa: T201
            f"{name}: stopped by {received.name} after step {step} of {num_steps}; the state is in {states}; run the same "
            "command to continue",
            file=sys.stderr,
        )
    dist.close()
    raise CoordinatedExit(SIGNALLED + received)
