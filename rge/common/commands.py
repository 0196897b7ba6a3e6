"""Shared behaviour of commands: subcommands, help, progress bars, exit codes."""

import errno
import io
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from tqdm import tqdm

from rge.common.errors import BUG, SIGNALLED, Fault, UserError, brief
from rge.common.options import HELP, nearest
from rge.common.registry import place_in_plugin

T = TypeVar("T")

USER_FIXABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
    errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG,
}  # fmt: skip
"""Errors of files that the user can fix: permissions, a full disk, a wrong place or name."""
LINE_S = 10.0
"""Seconds between two lines of progress in a log file."""


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Call something that may never return; whoever waits for it, as by ``exception(timeout)``, may go on and end without it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def start(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command on the arguments of the command line, and exit.

    Exit codes of all commands: 0: success; 1: the answer is no (a plan that does not fit); 2: a user-fixable error, one
    message without a traceback; 3: a bug, with its traceback; 128 + n: ended by signal n: 130 after Ctrl-C, 143 after
    SIGTERM, 141 when the output pipe is closed (``| head``).
    """
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        # A file name may hold what the terminal's encoding has no form for: `\xfc` is better than losing the whole answer.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _code_of(main)
        sys.stdout.flush()
    except BrokenPipeError as error:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed:  # another pipe
            sys.exit(_bug(error))
        for stream in closed:  # Python flushes once more when it exits
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = SIGNALLED + signal.SIGPIPE
    sys.exit(code)


def answer_first(read: Callable[[list[str]], object]) -> None:
    """Let `read` refuse the command line, or show its help, before slow modules are imported."""
    try:
        read(sys.argv[1:])
    except UserError as error:
        sys.exit(_refusal(error))


FLAWED = {"PIL": "a picture has a flaw, and is read as far as possible"}
"""What warnings of a library are about, where its own words do not say."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: Any = None,
) -> None:
    """Print a warning as one line that names the library it is from, instead of a line of its source."""
    parts = Path(filename).parts
    library = parts[parts.index("site-packages") + 1] if "site-packages" in parts[:-1] else ""
    text = brief(" ".join(str(message).split()))
    about = f"{FLAWED[library]}: " if library in FLAWED else ""
    source = f" (from {library})" if library else ""
    print(f"warning: {about}{text}{source}", file=sys.stderr)  # noqa: T201 - output of a command


def _code_of(main: Callable[[list[str]], int | None]) -> int | str | None:
    try:
        return main(sys.argv[1:]) or 0
    except SystemExit as ended:
        return ended.code
    except UserError as error:
        return _refusal(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in USER_FIXABLE or error.filename is None:
            return _bug(error)
        print(f"error: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)  # noqa: T201
        return UserError.exit_code
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - shown as Python shows it; but its exit code, 1, is our "no"
        return _bug(error)


def _refusal(error: UserError) -> int:
    """Say what the user can fix."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 - output of a command
    return error.exit_code


def _bug(error: Exception) -> int:
    """Show a traceback, and whose error it is."""
    if where := place_in_plugin(error):
        error.add_note(f"This is an error in the {where}, not in rge.")
    sys.excepthook(type(error), error, error.__traceback__)
    return BUG


def _is_closed_pipe(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # no file descriptor
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def progress_bar(items: Iterable[T] | None = None, **options: Any) -> "tqdm[T]":
    """A `tqdm` progress bar with its options; if stderr is not a terminal, a line every `LINE_S` seconds and one at the end."""
    if not sys.stderr.isatty():
        options = {
            "file": _Lines(sys.stderr),
            "mininterval": LINE_S,
            "maxinterval": LINE_S,
            "delay": LINE_S,
            "ncols": 120,
            **options,
            "dynamic_ncols": False,
        }
    return tqdm(items, **options)


class _Lines:
    """Turns updates of a progress bar into lines."""

    def __init__(self, file: TextIO):
        self.file, self.last, self.encoding = file, "", file.encoding

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line and line != self.last:
            self.file.write(line + "\n")
            self.last = line

    def flush(self) -> None:
        self.file.flush()


def pick(words: Sequence[str], commands: Mapping[str, str], usage: str) -> tuple[str, list[str]]:
    """Split arguments into the name of a subcommand and its arguments.

    Without arguments, or with ``--help`` first, lists the subcommands with their descriptions after `usage` and exits.

    Raises:
        UserError: there is no such command.
    """
    if not words or words[0] in HELP:
        width = max(map(len, commands))
        lines = [f"  {name:<{width}}  {about}" for name, about in commands.items()]
        print(f"{usage} COMMAND [key=value ...]\n", *lines, sep="\n")  # noqa: T201
        print(f"\n`{usage} COMMAND --help` lists its keys.")  # noqa: T201
        sys.exit(0 if words else 2)
    if words[0] not in commands:
        raise UserError(f"unknown command {words[0]!r}{nearest(words[0], commands)}").about(
            Fault("unknown", words[0], tuple(commands))
        )
    return words[0], list(words[1:])
