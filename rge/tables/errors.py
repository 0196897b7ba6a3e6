"""Errors of tables, folders and archives."""

import csv
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from rge.common.errors import UserError


class TableError(UserError):
    """A table, folder or archive cannot be read; `place` is a line's number, a cell's address or ``row N``."""

    numbered = ", line {}"


@dataclass(frozen=True, slots=True)
class Broken:
    """A cell of a workbook without a usable value, with the reason."""

    why: str


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of file readers into a `TableError` that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise TableError(
            f"it cannot be read: it is not UTF-8 ({error.reason}): save it as CSV UTF-8, or as .xlsx", name
        ) from error
    except (OSError, pa.ArrowException, csv.Error, tarfile.TarError, EOFError) as error:
        file = getattr(error, "filename", None) or name
        raise TableError(f"it cannot be read: {reason(error)}", file) from error


def reason(error: BaseException) -> str:
    """An error's message without its number and file name."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
