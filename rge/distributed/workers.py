"""Worker processes, one per device, for an embedder that uses several.

    workers = Workers(make, ["cuda:0", "cuda:1"])
    workers.run(jobs, on_result)

Each worker imports this process's plugins, calls ``make(device)`` once, and calls the result for every job; an idle worker
gets the next job. Workers are started on first use as separate programs: a script without ``if __name__ == "__main__"``
does not run a second time, and no process with GPU threads is forked. They end with this process, and all of them end when
one dies, is silent for too long, or this process is interrupted.
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rge.common.errors import UserError, how_it_ended, portable
from rge.common.registry import load_plugins, plugins_loaded

SILENCE_S = 1800.0
"""How long a worker may be silent, while loading or between two progress reports."""

PARENT_S = 1.0
"""How often a worker checks that the process that started it is alive."""

Work = Callable[[Any, Callable[[int], object]], Any]
"""Does a job, and calls its second argument with the number of items just finished."""

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from rge.distributed.workers import serve; serve({handle}, {parent})"
)


class WorkerError(UserError):
    """A worker died or stopped responding; the message says which and why."""


class Workers:
    """Worker processes, one per device. Calls from several threads take turns.

    Args:
        make: ``make(device)`` returns a `Work`. It is pickled: a module's function, or a `functools.partial` of one.
        devices: one per process; may repeat.
    """

    def __init__(self, make: Callable[[str], Work], devices: Sequence[str]):
        self.make, self.devices = make, tuple(devices)
        self._workers: list[_Worker] = []
        self._round = 0
        self._one_at_a_time = threading.Lock()
        weakref.finalize(self, _end, self._workers)

    def run(
        self,
        jobs: Iterable[Any],
        on_result: Callable[[int, Any], object],
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        """Run jobs; each is drawn when a worker is idle.

        Args:
            jobs: pickled to a worker.
            on_result: called with a job's number and its result, in the order of completion.
            on_progress: called with the number of items just finished.

        Raises:
            WorkerError: a worker died or fell silent. All are ended then; the next call starts new ones.
            Exception: what a job or `make` raised. It ends the call for all workers.
        """
        with self._one_at_a_time:
            self._round += 1
            try:
                self._run(enumerate(jobs), on_result, on_progress or (lambda _: None))
            except (WorkerError, KeyboardInterrupt, SystemExit):
                _end(self._workers)
                raise

    def close(self) -> None:
        """End the workers; they would also end with this object."""
        with self._one_at_a_time:
            _end(self._workers)

    def _run(
        self,
        jobs: Iterator[tuple[int, Any]],
        on_result: Callable[[int, Any], object],
        on_progress: Callable[[int], object],
    ) -> None:
        job = next(jobs, None)
        if job is not None and not self._workers:
            self._workers.extend(_Worker(self.make, device) for device in self.devices)
        waited_for = 0
        while job is not None or waited_for:
            for worker in self._workers:
                if job is not None and worker.is_idle and all(one.is_ready for one in self._workers):
                    worker.send((self._round, *job))
                    waited_for += 1
                    job = next(jobs, None)
            for kind, said in filter(None, map(self._message, self._with_message())):
                if kind == "progress":
                    on_progress(*said)
                if kind == "result":
                    waited_for -= 1
                    on_result(*said)

    def _message(self, worker: "_Worker") -> tuple[str, list[Any]] | None:
        """A worker's message of this round; None for one of an earlier round that ended with an error."""
        kind, round_, *said = worker.receive()
        if kind == "cannot start":
            _end(self._workers)
            raise said[0]
        if round_ == self._round and kind == "error":
            raise said[0]
        return (kind, said) if round_ == self._round else None

    def _with_message(self) -> list["_Worker"]:
        """Wait for workers with a message, at least one."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        until = min(worker.heard_at for worker in busy) + SILENCE_S
        ready = wait([worker.connection for worker in busy], max(0.0, until - time.monotonic()))
        if not ready:
            worker = min(busy, key=lambda one: one.heard_at)
            raise WorkerError(
                f"it was silent for {SILENCE_S:.0f} s while it {'worked' if worker.is_ready else 'started'}; all workers were ended",
                place=f"the worker on {worker.device}",
                kind="silent",
            )
        return [worker for worker in busy if worker.connection in ready]


class _Worker:
    def __init__(self, make: Callable[[str], Work], device: str):
        self.device = device
        self.is_ready = self.is_idle = False
        self.heard_at = time.monotonic()
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # in case it stops in mid-message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(SILENCE_S), 0))
        program = _PROGRAM.format(path=sys.path, handle=theirs.fileno(), parent=os.getpid())
        # A separate session: a terminal's Ctrl-C must reach only the process that started the worker.
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.owner = os.getpid()
        theirs.close()  # so that reading ends when the process does
        self.connection = Connection(ours.detach())
        self.send((make, device, plugins_loaded()))

    def send(self, what: Any) -> None:
        """Send a message; WorkerError if the process is gone."""
        self.is_idle, self.heard_at = False, time.monotonic()
        try:
            self.connection.send(what)
        except OSError:
            raise self._gone() from None

    def receive(self) -> tuple[Any, ...]:
        """Receive a message: kind, round and payload; WorkerError if the process is gone."""
        try:
            said = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        self.heard_at, self.is_ready = time.monotonic(), True
        self.is_idle = said[0] != "progress"
        return said

    def _gone(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        code = self.process.returncode
        how = "stopped in the middle of a message" if code is None else how_it_ended(code)
        return WorkerError(
            f"{how}{'' if self.is_ready else ' before it was ready'}; all workers were ended. If memory ran out, lower "
            "batch_size",
            place=f"the worker on {self.device}",
            kind="died",
        )

    def end(self) -> None:
        """Kill it, unless called in a fork of the process that started it."""
        if os.getpid() != self.owner:
            return
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def serve(handle: int, parent: int) -> None:
    """Run a worker: call `make`, then do jobs until the parent process is gone."""
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(handle)
    with contextlib.suppress(EOFError, OSError):
        make, device, plugins = connection.recv()
        try:
            load_plugins(plugins)
            work = make(device)
        except Exception as error:  # noqa: BLE001 - raised in the parent
            connection.send(("cannot start", 0, portable(error)))
            return
        connection.send(("ready", 0))
        while True:
            round_, number, job = connection.recv()

            def report(num_items: int, round_: int = round_) -> None:
                connection.send(("progress", round_, num_items))

            try:
                result = work(job, report)
            except Exception as error:  # noqa: BLE001 - likewise
                connection.send(("error", round_, portable(error)))
            else:
                connection.send(("result", round_, number, result))


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)
