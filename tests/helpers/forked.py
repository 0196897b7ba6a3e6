"""Programs as processes of their own, without the time that importing torch, transformers and PEFT takes.

`python rge/train.py` begins with some twelve seconds of imports. Here one server process (multiprocessing's fork server)
does them once, and each program is a fork of it: it has a process id, arguments, an environment, output and an exit code
of its own, and may be killed. Tests of starting itself start Python anew.
"""

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ports import free_port

LIMIT_S = 1800.0
"""Against hanging; never against being slow."""

KNOWN_CODE = "tests.helpers.known_code"
"""Found if the server is started in the repository; what cannot be found is left out."""

_CONTEXT = multiprocessing.get_context("forkserver")
# What the programs import, slowest first; nothing here may start threads that a fork would have to share.
_CONTEXT.set_forkserver_preload(
    [
        "peft",
        "rge.step.training_step",
        "rge.validation",
        "rge.checkpoints.checkpoint_manager",
        "rge.embedder",
        "data_prep.rmir.main",
        "eval.commands.run",
        KNOWN_CODE,
    ]
)


class Program:
    """A program under way, as a context manager that leaves nothing of it running.

    Args:
        words: a script and its arguments, or ``-m``, a module and its arguments.
        cwd: its working directory; None: that of the tests.
        environment: variables to be set.
    """

    def __init__(self, *words: str | Path, cwd: Path | None = None, **environment: str):
        self.words = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory()
        self._process = _CONTEXT.Process(
            target=_become, args=(self.words, cwd, environment, *map(str, self._files())), name=self.words[0]
        )

    def _files(self) -> tuple[Path, Path]:
        return Path(self._folder.name) / "stdout", Path(self._folder.name) / "stderr"

    def __enter__(self) -> "Program":
        for path in self._files():
            path.touch()
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL, group=True)
        self._process.join()
        self._folder.cleanup()

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to its group: what it has started too."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until something is true; that the program ends before is an error."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self._process.is_alive(), f"ended too early\n{self._said()}"
            assert time.monotonic() < deadline, f"waited for {LIMIT_S} s\n{self._said()}"
            time.sleep(0.005)

    def printed(self, pattern: str) -> re.Match[str]:
        """Wait until its output has a pattern, such as the address that a server listens on."""
        out = self._files()[0]
        self.wait_until(lambda: re.search(pattern, out.read_text(errors="replace")))
        return re.search(pattern, out.read_text(errors="replace"))

    def kill(self) -> None:
        """Kill it without warning."""
        assert self._process.is_alive(), f"ended before it could be killed\n{self._said()}"
        self._process.kill()
        self._process.join()

    def finished(self, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Wait for the end."""
        self._process.join(limit_s)
        assert self._process.exitcode is not None, f"not over after {limit_s} s\n{self._said()}"
        out, err = (path.read_text(errors="replace") for path in self._files())
        return subprocess.CompletedProcess(self.words, self._process.exitcode, out, err)

    def _said(self) -> str:
        return self._files()[1].read_text(errors="replace")[-4000:]


def run(*words: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `Program`."""
    with Program(*words, cwd=cwd, **environment) as program:
        return program.finished()


def run_pair(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program as two processes on CPU, with the variables that a launcher sets; what both print, the first one first."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank} | environment for rank in "01"]
    with Program(*words, **ranks[0]) as first, Program(*words, **ranks[1]) as second:
        ends = [first.finished(), second.finished()]
    out, err = "".join(end.stdout for end in ends), "".join(end.stderr for end in ends)
    return subprocess.CompletedProcess(ends[0].args, ends[0].returncode or ends[1].returncode, out, err)


def _become(words: list[str], cwd: Path | None, environment: dict[str, str], out: str, err: str) -> None:
    os.setsid()
    for name in ("tests", "tests.helpers", KNOWN_CODE):  # no modules of the program's
        sys.modules.pop(name, None)
    if cwd is not None:
        os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())  # as Python does
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
