"""Read tables: .parquet, .jsonl, .json (a list of objects), .csv, .tsv, .xlsx or .xlsm.

    for row in table_rows("photos.csv"):                      # every column; an empty cell is None
        row["image"]
    for row in table_rows("photos.parquet", ["id", "caption"], first=1000):
        ...                                                    # only these columns, from row 1,000 on

All commands read tables with this module, so that the same file means the same rows to all of them. Rows are read lazily: about
`BATCH_BYTES` of a Parquet file are decoded at once. Values of a CSV stay strings (an id "007" stays "007"). It may use commas,
semicolons or tabs; the headings decide. For folders and archives see `rge.tables.pictures`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import islice, zip_longest
from os import PathLike
from typing import Any, TextIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.files import POINTER_NOTE, is_pointer
from rge.common.options import Quoting
from rge.tables.delimited import delimited_rows
from rge.tables.errors import Broken, TableError, reading

Cells = dict[str, Any]
"""A row of a table, or an object of a file of JSON lines: values by column."""
WORKBOOKS = (".xlsx", ".xlsm")
SHEETS = (*WORKBOOKS, ".csv", ".tsv")
"""Tables whose cells have addresses."""
TABLES = (".csv", ".tsv", *WORKBOOKS, ".jsonl", ".json", ".parquet")
BUFFER_BYTES = 1 << 20
"""Bytes of a Parquet file read at once, so that a row group of 2 GB is never completely in memory."""
BATCH_BYTES, MAX_BATCH_ROWS = 8 << 20, 1024
"""Approximate bytes, and maximum rows, of Parquet decoded at once."""
INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"))
"""For `str.translate`: characters without width. Within a text they are letters of many languages, and parts of emoji."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """What a table's file does not say itself."""

    quoting: Quoting = "auto"  # whether quotation marks enclose cells of a CSV or TSV
    sheet: str | None = None  # of a workbook; None: the only one that is not empty


AS_FOUND = TableFormat()


def table_rows(
    path: str | PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    first: int = 0,
    fs: Any = None,
    form: TableFormat = AS_FOUND,
) -> Iterator[Cells]:
    """The rows of a table (`path` ends in one of `TABLES`) from row `first` on, in order; `fs` is an fsspec file system.

    Of a Parquet file only these columns are read, as far as they exist; other tables are always read completely. A missing value is
    None in every format: an empty cell, null, or NaN, which pandas writes for one.

    Raises:
        TableError: the file cannot be read, or a line is invalid.
    """
    name = str(path)
    ending = name.lower().rpartition(".")[2]
    with reading(name):
        if ending == "parquet":
            with open_parquet(path, fs) as file:
                yield from parquet_rows(file, columns, first)
            return
        if f".{ending}" in SHEETS:
            rows: Iterable[Cells] = Grid(name, fs, form).plain_rows()
        else:
            rows = map(_without_nan, (_json_list if ending == "json" else _json_lines)(name, fs))
        yield from islice(rows, first, None)


def num_rows(path: str | PathLike[str]) -> int:
    """Number of rows of a local Parquet or JSON-lines file."""
    with reading(str(path)):
        if str(path).lower().endswith(".parquet"):
            return pq.read_metadata(path).num_rows
        with open(path, "rb") as lines:
            return sum(1 for line in lines if line.strip())


@contextmanager
def open_parquet(path: str | PathLike[str], fs: Any = None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for reading in small pieces."""
    with _opened(str(path), fs) as data:
        file = pq.ParquetFile(data, pre_buffer=False, buffer_size=BUFFER_BYTES)
        _check_columns(str(path), file.schema_arrow.names)
        yield file


def _check_columns(path: str, names: Sequence[str]) -> None:
    if repeated := next((name for name, number in Counter(names).items() if number > 1), None):
        raise TableError("two columns have this name: rename or delete one", path, key=repeated)


def parquet_rows(
    file: pq.ParquetFile, columns: Sequence[str] | None = None, first: int = 0
) -> Iterator[Cells]:
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
        yield from map(_without_nan, batch.slice(skipped).to_pylist())


def picture_cell(cell: Any) -> Any:
    """A cell with a picture: its bytes or path, which the library `datasets` keeps in a dict."""
    is_picture = isinstance(cell, dict) and cell.keys() & {"bytes", "path"}
    return cell.get("bytes") or cell.get("path") if is_picture else cell


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings, such as paths of pictures."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, no bytes, or a text of which nothing is visible."""
    if isinstance(cell, str):
        text = cell.strip()
        return not text or (ord(text[0]) in INVISIBLE and not text.translate(INVISIBLE).strip())
    return cell is None or cell == b"" or (isinstance(cell, float) and cell != cell)


def _without_nan(row: Cells) -> Cells:
    return {
        name: None if isinstance(value, float) and value != value else value for name, value in row.items()
    }


@contextmanager
def _opened(path: str, fs: Any) -> Iterator[Any]:
    with (fs or fsspec.filesystem("file")).open(path, "rb") as data:
        if data.seekable():
            if is_pointer(data.read(64)):
                raise TableError(POINTER_NOTE, path)
            data.seek(0)
        yield data


@contextmanager
def _text(path: str, fs: Any, encoding: str = "utf-8-sig") -> Iterator[TextIO]:
    with _opened(path, fs) as data:
        yield TextIOWrapper(data, encoding=encoding, newline="")


def _json_lines(path: str, fs: Any) -> Iterator[Cells]:
    with _text(path, fs) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield json_object(line, path, number)


def _json_list(path: str, fs: Any) -> Iterator[Cells]:
    with _text(path, fs) as text:
        try:
            content = json.load(text)
        except (ValueError, RecursionError) as error:
            raise TableError(f"not valid JSON: {error}", path, kind="json") from None
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise TableError("a list of objects is needed", path)
    yield from content


class Grid:
    """Rows of a workbook's sheet, a CSV or a TSV, whose cells have addresses.

    Headings are in the first row that is not empty. Empty rows are left out.

    Attributes:
        letters: letter of each column, by heading, in order.
        rows: row numbers and cells by heading: None, a value or `Broken`; to be read once. A cell without a
            heading is under "".
        repeated: cells whose heading another column has, too, and what is wrong with them.
        unnamed: first cell of each column without a heading; complete when the rows have been read.
        num_hidden: hidden rows of a sheet, which are read like the others.
    """

    def __init__(self, path: str, fs: Any = None, form: TableFormat = AS_FOUND):
        """Read the headings. Raises `TableError`, as does reading the rows: see `table_rows`."""
        self.path, self.letters, self.num_hidden = path, dict[str, str](), 0
        self.repeated, self.unnamed = dict[str, str](), dict[str, str]()
        if path.lower().endswith(WORKBOOKS):
            lines: Iterator[tuple[int, Sequence[Any]]] = self._sheet(fs, form.sheet)
        elif form.sheet is not None:
            raise TableError(f"it is no workbook, so sheet={form.sheet} is not for it", path).about("sheet")
        else:
            with reading(path):
                lines = delimited_rows(path, _encoded(path, fs), form.quoting)
        lines = _with_content(path, lines)
        number, headings = next(lines, (0, []))
        names = ["" if name is None else " ".join(str(name).split()) for name in headings]
        for letter, name in zip(map(_letter, range(len(names))), names, strict=True):
            if name in self.letters:
                self.repeated[f"{letter}{number}"] = (
                    f"{name!r} is already the heading of column {self.letters[name]}"
                )
            elif name:
                self.letters[name] = letter
        self.rows = self._below(names, lines)

    def _sheet(self, fs: Any, wanted: str | None) -> Iterator[tuple[int, Sequence[Any]]]:
        from rge.tables.workbooks import read_sheet  # takes long to import

        with _opened(self.path, fs) as data:
            sheet = read_sheet(self.path, data, wanted)
            self.num_hidden = sheet.num_hidden
            yield from sheet.rows

    def _below(
        self, names: list[str], lines: Iterable[tuple[int, Sequence[Any]]]
    ) -> Iterator[tuple[int, Cells]]:
        all_named = len(self.letters) == len(names)
        for number, cells in lines:
            if all_named and len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
                continue
            row: Cells = dict.fromkeys(self.letters)
            for at, (name, cell) in enumerate(zip_longest(names, cells)):
                if name:
                    row[name] = cell
                elif cell is not None:
                    self.unnamed.setdefault(_letter(at), f"{_letter(at)}{number}")
                    row[""] = cell
            yield number, row

    def plain_rows(self) -> Iterator[Cells]:
        """The rows, for readers that do not list all problems; a `TableError` for the first one."""
        if self.repeated:
            place, why = next(iter(self.repeated.items()))
            raise TableError(f"{why}: rename or delete one", self.path, place)
        for number, row in self.rows:
            if len(self.unnamed) > 1:
                lacking = " and ".join(self.unnamed.values())
                raise TableError(f"{lacking} have no heading: give their columns one", self.path)
            broken = None
            if self.path.lower().endswith(WORKBOOKS):
                broken = next((name for name, cell in row.items() if isinstance(cell, Broken)), None)
            if broken is not None:
                raise TableError(
                    row[broken].why, self.path, f"{self.letters.get(broken, '')}{number}", broken
                )
            yield row


def _with_content(path: str, lines: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[tuple[int, list[Any]]]:
    with reading(path):
        for number, values in lines:
            cells = [None if is_missing(value) else value for value in values]
            if any(cell is not None for cell in cells):
                yield number, cells


def _letter(at: int) -> str:
    """A column's letter, by its number from 0."""
    letters = ""
    while at >= 0:
        letters = chr(ord("A") + at % 26) + letters
        at = at // 26 - 1
    return letters


def _encoded(path: str, fs: Any) -> Callable[[], AbstractContextManager[TextIO]]:
    """Opens a CSV in its encoding: UTF-8, or UTF-16 with a byte order mark."""
    with _opened(path, fs) as data:
        is_wide = data.read(2) in (b"\xff\xfe", b"\xfe\xff")
    return partial(_text, path, fs, "utf-16" if is_wide else "utf-8-sig")


def json_object(text: str | bytes, file: str, place: int | str) -> Cells:
    """Parse a JSON object at a place of a file. Raises `TableError`: it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"not valid JSON: {error}", file, place, kind="json") from None
    if not isinstance(value, dict):
        raise TableError(f"an object is needed, got {type(value).__name__}", file, place)
    return value
