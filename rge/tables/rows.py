"""Read tables: .parquet, .jsonl, .csv or .tsv.

    for row in table_rows("photos.csv"):                      # every column; an empty cell is None
        row["image"]
    for row in table_rows("photos.parquet", ["id", "caption"], first=1000):
        ...                                                    # only these columns, from row 1,000 on

Rows are read lazily: about `BATCH_BYTES` of a Parquet file are decoded at once. Values of a text table stay strings (an id "007"
stays "007"), which pyarrow's readers do not guarantee. A CSV may use commas, semicolons or tabs; the header decides.
For folders and archives see `rge.tables.pictures`.
"""

import csv
import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain, islice
from os import PathLike
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
BUFFER_BYTES = 1 << 20
"""Bytes of a Parquet file read at once, so that a row group of 2 GB is never completely in memory."""
BATCH_BYTES, MAX_BATCH_ROWS = 8 << 20, 1024
"""Approximate bytes, and maximum rows, of Parquet decoded at once."""
csv.field_size_limit(1 << 30)  # the library's 128 kB are less than a long document


class TableError(UserError):
    """A table, folder or archive cannot be read; the message names file, row and reason."""


def table_rows(
    path: str | PathLike[str], columns: Sequence[str] | None = None, *, first: int = 0, fs: Any = None
) -> Iterator[dict[str, Any]]:
    """The rows of a table (`path` ends in one of `TABLES`) from row `first` on, in order; `fs` is an fsspec file system.

    Of a Parquet file only these columns are read, as far as they exist; text tables are always read completely.

    Raises:
        TableError: the file cannot be read, or a line is invalid.
    """
    with reading(str(path)):
        if str(path).lower().endswith(".parquet"):
            with open_parquet(path, fs) as file:
                yield from parquet_rows(file, columns, first)
        else:
            with (fs or fsspec.filesystem("file")).open(str(path), "rb") as data:
                lines = TextIOWrapper(data, encoding="utf-8-sig", newline="")
                yield from islice(_text_rows(str(path), lines), first, None)


def num_rows(path: str | PathLike[str]) -> int:
    """Number of rows of a local Parquet or JSON-lines file."""
    with reading(str(path)):
        if str(path).lower().endswith(".parquet"):
            return pq.read_metadata(path).num_rows
        with open(path, "rb") as lines:
            return sum(1 for line in lines if line.strip())


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of file readers into a `TableError` that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException, csv.Error, tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        file = getattr(error, "filename", None) or name
        raise TableError(f"{file} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error's message without its number and file name."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


@contextmanager
def open_parquet(path: str | PathLike[str], fs: Any = None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for reading in small pieces."""
    with (fs or fsspec.filesystem("file")).open(str(path), "rb") as data:
        file = pq.ParquetFile(data, pre_buffer=False, buffer_size=BUFFER_BYTES)
        _check_columns(str(path), file.schema_arrow.names)
        yield file


def _check_columns(path: str, names: Sequence[str]) -> None:
    # A spreadsheet exports empty columns without a name.
    if repeated := next((name for name, number in Counter(names).items() if name and number > 1), None):
        raise TableError(f"{path}: two columns are called {repeated!r}: rename or delete one")


def parquet_rows(
    file: pq.ParquetFile, columns: Sequence[str] | None = None, first: int = 0
) -> Iterator[dict[str, Any]]:
    """See `table_rows`; row groups before the first row are not read."""
    wanted = None
    if columns is not None:
        wanted = [name for name in dict.fromkeys(columns) if name in file.schema_arrow.names]
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    start = 0
    while start < len(groups) and first >= groups[start].num_rows:
        first -= groups[start].num_rows
        start += 1
    bytes_per_row = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
    batch_rows = int(max(1, min(MAX_BATCH_ROWS, BATCH_BYTES / max(1.0, bytes_per_row))))
    for batch in file.iter_batches(batch_rows, row_groups=range(start, len(groups)), columns=wanted):
        skipped = min(first, len(batch))
        first -= skipped
        yield from batch.slice(skipped).to_pylist()


def picture_cell(cell: Any) -> Any:
    """A cell with a picture: its bytes or path, which the library `datasets` keeps in a dict."""
    is_picture = isinstance(cell, dict) and cell.keys() & {"bytes", "path"}
    return cell.get("bytes") or cell.get("path") if is_picture else cell


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings, such as paths of pictures."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _text_rows(path: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    if path.lower().endswith(".jsonl"):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield json_object(f"{path}, line {number}", line)
        return
    lines = iter(lines)
    header = next(lines, "")
    separator = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=header.count)
    reader = csv.DictReader(chain([header], lines), delimiter=separator, strict=True)
    _check_columns(path, reader.fieldnames or [])
    for row in reader:
        if None in row or None in row.values():
            raise TableError(
                f"{path}, line {reader.line_num}: {len(reader.fieldnames or [])} columns are named, but this row has "
                "a different number"
            )
        yield {key: value or None for key, value in row.items()}


def json_object(where: str, text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; error messages begin with `where`. Raises `TableError`: not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TableError(f"{where}: an object is needed, got {type(value).__name__}")
    return value
