"""Decoders that never end, or take all memory, in place of those of `rge.content`; importable by another process."""

import os
import time

from rge.content.pdf import PdfError


def sleep(data: bytes) -> None:
    """Does not return."""
    time.sleep(600)


def fill(data: bytes) -> int:
    """Takes memory without end."""
    kept = []
    while True:
        kept.append(bytearray(16 << 20))


def crash(data: bytes) -> None:
    """Ends its process, as a decoder with a fault does."""
    os.abort()


def fail(data: bytes) -> None:
    """Refuses the file."""
    raise PdfError("it is damaged", f"<{len(data)} bytes>", 3)


def about(data: bytes, *more: int) -> tuple[int, int, tuple[int, ...]]:
    """Its process, the file's size, and what else it was given."""
    return os.getpid(), len(data), more
