"""What an error is about, by its fields; its words are tested in tests/rge/common/test_messages.py."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

import pytest

from rge.common.errors import UserError


@contextmanager
def error_about(kind: type[Exception], *fields: object) -> Iterator[pytest.ExceptionInfo]:
    """An error with these fields: its file (or the end of its path), place, key or kind; a key or choice of its faults.

    A tuple is a whole fault: its kind, its key and, optionally, the nearest keys or the choices.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    has = fields_of(error)
    missing = [one for one in fields if not any(_fits(one, field) for field in has)]
    if not isinstance(error, UserError):  # it has no fields: by what its message names
        missing = [name for name in map(str, fields) if not re.search(_whole(name), str(error))]
    assert not missing, f"{missing} not in {has}: {error}"


def fields_of(error: Exception) -> list[object]:
    """The fields that an error has, and those of its cause."""
    if not isinstance(error, UserError):
        return []
    has = [error.file and PurePath(error.file), error.place, error.key, error.kind]
    for fault in error.faults:
        has += [fault.key, *fault.instead, (fault.kind, fault.key, fault.instead)]
    has = [field for field in has if field not in (None, "")]
    return has if error.cause is None else has + fields_of(error.cause)


def _fits(wanted: object, field: object) -> bool:
    if isinstance(wanted, tuple):
        return isinstance(field, tuple) and field[: len(wanted)] == wanted
    if isinstance(field, PurePath):
        parts = PurePath(str(wanted)).parts
        return field.parts[-len(parts) :] == parts
    return str(wanted) == str(field)


def _whole(name: str) -> str:
    return rf"(?<![\d.]){name}(?!\d)" if name.isdigit() else re.escape(name)
