"""Base class of user-fixable errors: every command shows them as one message, without a traceback."""

import difflib
import pickle
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Self

USER = 2
"""Exit code of a user-fixable error, in every process of a run."""

BUG = 3
"""Exit code of any other failure: a bug, whose traceback is shown, or a process that vanished."""

SIGNALLED = 128
"""Plus the signal's number: exit code of a process ended by a signal, as in shells, Kubernetes and Slurm."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with options, for programs and tests; the error's message says it in words."""

    kind: Literal["unknown", "missing", "twice", "choice", "range", "type", "value"]
    key: str
    instead: tuple[str, ...] = ()
    """The nearest keys of an unknown one, or the choices."""


_KEY = re.compile(r"\w+(?=[=:])|\w+(\.\w+|\[\d+\])+")
"""The key that a problem begins with."""


class UserError(ValueError):
    """The user can fix it: an option, a file, a launch. The message names the fix.

    Any other exception is a bug, and keeps its traceback. Programs and tests look at the fields; the message,
    ``FILE:PLACE: KEY: REASON``, is made of them here, and only here.

    Args:
        reason: what is wrong and what to do, as a sentence.
        file: path, address or ``<N bytes>`` of what cannot be used.
        place: where in it: the number of a line, or "row 3", "B5", an id.
        key: the column, field, option or part at fault.
        kind: one word for programs, where several things can be wrong at one place.
    """

    exit_code = USER
    noun = ""
    """What `file` is, for the message."""
    numbered = ":{}"
    """How a number as `place` follows the file."""
    faults: tuple[Fault, ...] = ()
    """What is wrong with which options, in the order of the message; empty for other errors."""
    cause: Exception | None = None
    """The error that is this one's reason, see `caused_by`."""

    def __init__(
        self,
        reason: str = "",
        file: object = None,
        place: int | str | None = None,
        key: str | None = None,
        kind: str = "",
    ):
        super().__init__(reason)
        self.reason, self.file = reason, None if file is None else str(file)
        self.place, self.key, self.kind = place, key, kind

    @classmethod
    def caused_by(
        cls, cause: Exception, file: object = None, place: int | str | None = None, key: str | None = None
    ) -> Self:
        """Another error, at a place that it does not know."""
        error = cls(str(cause), file, place, key)
        error.cause = cause
        return error

    @classmethod
    def choice(cls, key: str, value: object, allowed: Iterable[object]) -> Self:
        """An option has a value that is not allowed."""
        names = tuple(map(str, allowed))
        return cls(not_one_of(key, value, names)).about(Fault("choice", key, names))

    @classmethod
    def of_problems(cls, problems: Sequence[str]) -> Self:
        """Several options are wrong; each problem begins with its key."""
        keys = filter(None, map(_KEY.match, problems))
        return cls("\n".join(problems)).about(*dict.fromkeys(key[0] for key in keys))

    def about(self, *faults: Fault | str) -> Self:
        """The same error, which has these faults; an option alone stands for a value that does not fit."""
        self.faults = tuple(Fault("value", fault) if isinstance(fault, str) else fault for fault in faults)
        return self

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.noun} {self.file}".strip()
        if self.place is not None:
            where += (self.numbered if isinstance(self.place, int) else ", {}").format(self.place)
        return brief(": ".join(filter(None, (where.removeprefix(", "), self.key, self.reason))))


class RecipeError(UserError):
    """A recipe or an override is wrong; the message names the key and the fix."""


@contextmanager
def ungrouped(kind: type[Exception]) -> Iterator[None]:
    """Raise the first exception of a group by itself if all are of this kind; `asyncio.TaskGroup` raises groups."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException | None
        error, others = group.split(kind)
        if error is None or others is not None:
            raise
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def not_one_of(key: str, value: object, allowed: Iterable[object]) -> str:
    """The message for a value that is not allowed, with the nearest one that is."""
    names = [str(name) for name in allowed]
    return f"{key} must be one of {', '.join(names)}, got {shortened(repr(value))}{did_you_mean(str(value), names)}"


def shortened(text: str, most: int = 200) -> str:
    """The text, or its beginning and end with the number of characters: a picture in base64 would fill the screen."""
    if len(text) <= most:
        return text
    return f"{text[: most - 70]}... ({len(text):,} characters) ...{text[-30:]}"


_LONG = re.compile(
    r"(?<![^\s(\[=])'(?:[^'\\\n]|\\.){200,}'(?![^\s)\]:;,.])"  # a quoted value; an apostrophe follows a letter
    r"|\S{201,}"
)


def brief(message: str) -> str:
    """The message with each word, and each value in quotes, `shortened`."""
    return _LONG.sub(lambda found: shortened(found[0]), message) if len(message) > 200 else message


_VARIABLE = re.compile(
    r"(?<=picture )(?!library |folder ).+?(?=: | (?:does|cannot|has|is) )"  # a file's name may contain spaces
    r"|'(?:[^'\\\n]|\\.)*'"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|\S*[/\\]\S*"
    r"|\d[\d.,]*"
)
"""What differs between messages about the same fault: quoted values, paths and numbers."""


FEW = 3
"""Faults of one kind that are listed one by one."""


def grouped(faults: Iterable[str], most: int) -> list[str]:
    """Each kind of fault, in their order: up to `FEW` faults, or the first and the number of those like it; at most `most` lines.

    Faults are of the same kind if they differ only in quoted values, paths and numbers.
    """
    kinds: dict[str, tuple[list[str], int]] = {}
    for fault in faults:
        kind = _VARIABLE.sub("*", brief(fault))
        examples, count = kinds.get(kind, ([], 0))
        if count < FEW:
            examples.append(fault)
        kinds[kind] = examples, count + 1
    lines: list[tuple[str, int]] = []  # with the number of faults that each stands for
    for examples, count in kinds.values():
        if count > FEW:
            lines.append((f"{examples[0]} (and {count - 1:,} more like this)", count))
        else:
            lines += [(example, 1) for example in examples]
    more = sum(count for _, count in lines[most:])
    return [line for line, _ in lines[:most]] + [f"... and {more:,} more"] * (more > 0)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the most similar name, if there is one."""
    near = difflib.get_close_matches(shortened(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def how_it_ended(code: int) -> str:
    """Describe an exit code of `subprocess` or `multiprocessing`, for messages."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def portable(error: Exception) -> Exception:
    """The error in a form that pickles, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    with suppress(Exception):  # pickling may raise anything
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301 - our own
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
