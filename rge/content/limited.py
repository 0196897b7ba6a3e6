"""Decode untrusted documents and clips in a process with limits, so that a hostile file ends that process and not the server.

    with Decoder() as decode:
        num_pages = decode(pdf.num_pages, data)

A process serves one decoder after another, and is replaced when it had to be ended.
"""

import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

from rge.common.errors import UserError
from rge.common.parts import VideoPart
from rge.content import video, visuals
from rge.content.media_errors import MediaError, title
from rge.content.pdf import PdfError
from rge.content.video import VideoError, VideoRule

SECONDS = 30.0
"""Most time that a decoder waits for its process, all calls together."""
MEGABYTES = 2048
"""Most memory that decoding takes, beyond what the libraries do."""
START_S = 60.0
"""Most time that a process takes to start."""
T = TypeVar("T")


class LimitError(MediaError):
    """A file could not be decoded within the limits.

    `key` is the function that did not return, `kind` what was used up: time, or memory (also why a decoder crashes).
    """


@dataclass(frozen=True)
class SizedRule(VideoRule):
    """A rule whose frames have one given size."""

    size: tuple[int, int] = (0, 0)

    def frame_size(self, size: tuple[int, int], count: int) -> tuple[int, int]:
        """See `rge.content.video.VideoRule.frame_size`."""
        return self.size


class _Process:
    """A process that runs functions, and the pipe to it."""

    def __init__(self, megabytes: int):
        self.pipe, theirs = Pipe()
        # No fork, since other threads may hold locks, and no `multiprocessing`, since it would import the program's main module.
        code = f"import sys; sys.path[:] = {sys.path!r}; from rge.content.limited import work; work({theirs.fileno()}, {megabytes})"
        self.running = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the server's, which may still answer
        )  # fmt: skip
        theirs.close()
        with suppress(EOFError):
            if self.pipe.poll(START_S) and self.pipe.recv():
                return
        self.end()
        raise UserError(f"the process that decodes files did not start within {START_S:g} s")

    def end(self) -> None:
        self.pipe.close()
        self.running.kill()
        self.running.wait()


_IDLE: dict[int, list[_Process]] = {}
"""By their limit of memory."""


class Decoder:
    """Calls functions of `rge.content` on files, in one process; a context manager.

    Calling it with a function, a file's bytes and further arguments returns what the function does, or raises its error.

    Raises:
        LimitError: time or memory is used up.
    """

    def __init__(self, seconds: float = SECONDS, megabytes: int = MEGABYTES):
        self.seconds, self.megabytes = seconds, megabytes
        self._left = seconds
        self._process: _Process | None = None
        self._sent: dict[int, bytes] = {}  # by identity, which a file keeps as long as it is here

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with suppress(OSError):  # it has ended, which `_started` sees
                self._process.pipe.send(None)  # forget the files
            _IDLE.setdefault(self.megabytes, []).append(self._process)
            self._process = None

    def __call__(self, function: Callable[..., T], source: bytes, *args: Any, **options: Any) -> T:
        """See the class. A function is told by its module and name, so it must be importable."""
        limit: Literal["time", "memory"] = "memory"
        if self._process is None:
            self._process = self._started()
        began = time.monotonic()
        pipe, key = self._process.pipe, id(source)
        answer = None
        with suppress(EOFError, OSError):  # it has ended
            left = max(0.0, self._left)
            pipe.send((function, key, None if key in self._sent else source, args, options, left))
            self._sent[key] = source
            if pipe.poll(left):
                answer = pipe.recv()
            else:
                limit = "time"
        if answer is not None:
            self._left -= time.monotonic() - began
            is_fine, found = answer
            if is_fine:
                return found
            if not isinstance(found, MemoryError):
                raise found
        self._process.end()
        self._process, self._sent = None, {}
        most = f"{self.seconds:g} s" if limit == "time" else f"{self.megabytes:,} MB"
        error = LimitError(f"it took more than {most}", title(source), key=function.__name__, kind=limit)
        error.noun = PdfError.noun if b"%PDF" in source[:1024] else VideoError.noun
        raise error

    def _started(self) -> _Process:
        idle = _IDLE.get(self.megabytes, [])
        with suppress(IndexError):
            while (process := idle.pop()).running.poll() is not None:
                process.end()
            return process
        return _Process(self.megabytes)


def here(function: Callable[..., T], source: object, *args: Any, **options: Any) -> T:
    """In place of a `Decoder`, for what needs none."""
    return function(source, *args, **options)


def sampled(
    decode: Callable[..., Any],
    source: bytes | tuple[bytes, ...],
    part: VideoPart,
    rule: VideoRule,
    allow: Callable[[video.Probe, int, tuple[int, int]], object] = lambda *_: None,
) -> VideoPart:
    """A clip as its decoded frames; `allow` is told what it is, and the number and size of its frames, and may refuse them.

    Raises:
        MediaError: as `rge.content.video.sample`, and `LimitError`.
    """
    asked, *span = visuals.asked(replace(part, video=source), rule)
    known = {
        field.name: getattr(asked, field.name) for field in fields(VideoRule)
    }  # what another process can be told
    about = decode(video.probe, source, part.fps)
    count = decode(video.count, source, VideoRule(**known), *span)
    size = asked.frame_size((about.width, about.height), count)
    allow(about, count, size)
    images, seconds = decode(video.sample, source, SizedRule(**known, size=size), *span)
    step = seconds[1] - seconds[0] if count > 1 else 0.0
    return VideoPart(tuple(images), fps=1 / step if step else None, num_frames=count)


def work(number: int, megabytes: int) -> None:
    """Run what comes through the pipe with this file number, until it is closed."""
    with suppress(
        UserError
    ):  # before the limit, so that it counts as a library; if it is missing, using it says so
        video.library()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    pipe, files = Connection(number), dict[int, bytes]()
    pipe.send(True)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            asked = pipe.recv()
            if asked is None:
                files.clear()
                continue
            function, key, source, args, options, seconds = asked
            signal.alarm(math.ceil(seconds) + 1)  # ends this process even if the other one is gone
            try:
                if source is not None:
                    files[key] = source
                pipe.send((True, function(files[key], *args, **options)))
            except Exception as error:  # noqa: BLE001 the caller's to judge
                pipe.send((False, error))
            signal.alarm(0)
