"""When one process dies, end the others with its reason.

A launcher ends the processes of its own machine. Those of other machines would wait in their next collective until its
time-out, which must be long enough for writing a checkpoint. So every process publishes heartbeats, and the reason if it
fails, in the launch's key-value store.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rge.common.errors import BUG, SIGNALLED, UserError
from rge.distributed import collectives as dist

POLL_S = 1.0
"""Polling interval."""

GRACE_S = 5.0
"""Time for a process to end with its own message after another one has failed."""


class RankError(UserError):
    """Another process, of rank `file` on the host `place`, failed first; has its reason and exit code."""

    noun = "failure of rank"


class CoordinatedExit(SystemExit):
    """An exit that all processes reach by themselves."""


@contextmanager
def watch_other_ranks(silence_s: float) -> Iterator[None]:
    """End processes together: one that fails publishes its reason, and the others exit with it; `silence_s` is the recipe's.

    RankError: another process failed first, and this one only as a consequence, e.g. of a broken connection.
    """
    if dist.world_size() == 1:
        yield
        return
    watch = _Watch(silence_s)
    watch.start()
    try:
        yield
    except CoordinatedExit:
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if dist.is_connection_loss(error):
            # Another process has ended. Its published reason, or its silence, ends this process.
            watch.join(silence_s + 2 * GRACE_S)
        first = watch.failed(error)
        if first["rank"] != watch.rank and first["reason"] != _reason(error):
            raise _failure(first) from error
        # The store may end with this process; let the others poll it first.
        watch.join(2 * POLL_S)
        raise
    finally:
        watch.stop()


def after_main(what: str) -> None:
    """Wait for the main process to reach this point, identified by `what`.

    Unlike a collective, this has no time-out; `watch_other_ranks` ends the wait if the main process fails or dies.
    """
    if dist.world_size() == 1:
        return
    store, key = dist.connect_to_store(), f"done/{what}"
    if dist.rank() == 0:
        store.set(key, "")
    while not store.check([key]):
        time.sleep(POLL_S)


class _Watch(threading.Thread):
    """Publishes heartbeats, watches those of the next process, and checks for failures."""

    def __init__(self, silence_s: float):
        super().__init__(name="fellow ranks", daemon=True)
        self.rank, self.silence_s = dist.rank(), silence_s
        # In a ring, so that the load on the store grows linearly with the number of processes.
        self.next_rank = (self.rank + 1) % dist.world_size()
        self.store = dist.connect_to_store()
        self._rounds, self._is_ending = 0, False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Publish this process's failure, and return the first one, its own or another's."""
        reason = {"reason": _reason(error), "code": _code(error)}
        mine = {"rank": self.rank, "host": socket.gethostname(), **reason}
        try:
            with self._lock:
                # Sets the value only if it is unset.
                return json.loads(self.store.compare_set("failed", "", json.dumps(mine)))
        except RuntimeError:
            return mine  # the store's process has ended

    def stop(self) -> None:
        """Stop watching, and let the others expect no more heartbeats."""
        self._ended.set()
        self.join()
        with suppress(RuntimeError):  # the store ended first
            self._say("left")

    def run(self) -> None:
        """Watch until this process stops, or end it."""
        threading.Thread(target=self._watch_the_store, name="the store", daemon=True).start()
        seen, silent_s = "", 0.0
        while not self._ended.wait(POLL_S):
            self._rounds += 1
            try:
                self._say(str(self._rounds))
                said, failure = self._look()
            except RuntimeError as error:
                self._end(
                    f"the store on the main process cannot be reached, so that process or its machine is gone: {error}",
                    BUG,
                )
                return
            if failure:
                found = json.loads(failure)
                self._end(str(_failure(found)), found["code"])
                return
            # Count polls, not seconds: a suspended machine has missed the others' heartbeats along with its own.
            silent_s = 0.0 if said != seen or said == "left" else silent_s + POLL_S
            seen = said
            if silent_s >= self.silence_s:
                with self._lock:
                    reason = f"no sign of life for {silent_s:.0f} s: killed (out of memory?), stopped, or its machine is gone"
                    missed = {"rank": self.next_rank, "host": "unknown host", "reason": reason, "code": BUG}
                    self.store.compare_set("failed", "", json.dumps(missed))

    def _watch_the_store(self) -> None:
        """End this process if the store no longer answers: torch's calls have no time-out, so `run` would hang."""
        seen, silent_s = 0, 0.0
        while not self._ended.wait(POLL_S):
            silent_s = 0.0 if self._rounds != seen else silent_s + POLL_S
            seen = self._rounds
            if silent_s >= self.silence_s:
                self._end(
                    f"the store on the main process has not answered for {silent_s:.0f} s: that process is stopped, or its "
                    "machine or the way there is gone",
                    BUG,
                )
                return

    def _say(self, text: str) -> None:
        with self._lock:
            self.store.set(f"alive/{self.rank}", text)

    def _look(self) -> tuple[str, str]:
        with self._lock:
            key = f"alive/{self.next_rank}"
            said = self.store.get(key).decode() if self.store.check([key]) else ""
            failure = self.store.get("failed").decode() if self.store.check(["failed"]) else ""
        return said, failure

    def _end(self, message: str, code: int) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        # The main thread may end with a better message, unless it hangs in a collective.
        if not self._ended.wait(GRACE_S):
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(code)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _code(error: BaseException) -> int:
    """Exit code for the other processes; never 0, since they did not finish."""
    if isinstance(error, KeyboardInterrupt):
        return SIGNALLED + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", BUG)
    return code if isinstance(code, int) and code else BUG


def _failure(of: dict[str, Any]) -> RankError:
    error = RankError(of["reason"], of["rank"], of["host"])
    error.exit_code = of["code"]
    return error
