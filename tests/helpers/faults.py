"""What an error is about, by its fields and by what it names; its words are tested in tests/rge/common/test_messages.py."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def error_about(kind: type[Exception], *named: object) -> Iterator[pytest.ExceptionInfo]:
    """An error that names these keys, files, records, numbers and values, in whatever words and order."""
    with pytest.raises(kind) as caught:
        yield caught
    said = str(caught.value)
    missing = [name for name in map(str, named) if not re.search(_whole(name), said)]
    assert not missing, f"{missing} not in: {said}"


@contextmanager
def raises(kind: type[Exception], expected: str | tuple) -> Iterator[pytest.ExceptionInfo]:
    """An error with this fault: its kind, its key and, optionally, the nearest keys or the choices; or with this wording."""
    if isinstance(expected, str):
        with pytest.raises(kind, match=expected) as caught:
            yield caught
        return
    with pytest.raises(kind) as caught:
        yield caught
    faults = {(fault.kind, fault.key, fault.instead)[: len(expected)] for fault in caught.value.faults}
    assert expected in faults, f"{caught.value} has {caught.value.faults}"


def _whole(name: str) -> str:
    return rf"(?<![\d.]){name}(?!\d)" if name.isdigit() else re.escape(name)
