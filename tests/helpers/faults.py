"""What an error is about, by its fields; the words of messages are tested in tests/rge/common/test_options.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


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
