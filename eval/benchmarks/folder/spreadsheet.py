"""Read a table of queries: a workbook, CSV or TSV (with spreadsheet addresses of cells), JSON lines, JSON or Parquet.

Harmless artefacts of spreadsheets are ignored (docs/own_data.md lists them). Anything ambiguous is reported as a
problem with the address of its cell.
"""

import csv
import datetime
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openpyxl import Workbook, load_workbook
from openpyxl.utils import get_column_letter
from openpyxl.utils.exceptions import InvalidFileException

from eval.benchmarks.release_files import ReleaseError, iter_rows

WORKBOOKS = (".xlsx", ".xlsm")
SHEETS = (*WORKBOOKS, ".csv", ".tsv")
"""Table formats whose cells have addresses."""
ENDINGS = (*SHEETS, ".jsonl", ".json", ".parquet")
SPACES = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"))
"""Invisible characters, common in pasted text."""


@dataclass(frozen=True)
class Broken:
    """A cell without a usable value, with the reason."""

    why: str


@dataclass
class Table:
    """Rows of a table, by heading."""

    path: Path
    names: list[str] = field(default_factory=list)  # headings, in order
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(row number, heading -> value), without empty rows. A value is text, a list, a date, or `Broken`."""
    letters: dict[str, str] = field(default_factory=dict)
    """Heading -> column letter; empty for formats without cell addresses."""
    problems: list[str] = field(default_factory=list)  # problems of the table itself
    notes: list[str] = field(default_factory=list)  # remarks for readers of the figures

    def address(self, number: int, name: str) -> str:
        """Address of a cell: ``C5``, or ``row 5, right``."""
        return f"{self.letters[name]}{number}" if name in self.letters else f"row {number}, {name}"


def read_table(path: Path, sheet: str | None = None) -> Table:
    """Read a table."""
    ending = path.suffix.lower()
    if not path.is_file():
        raise ReleaseError(f"table {path} does not exist")
    if ending not in ENDINGS:
        raise ReleaseError(f"table {path} must end in {', '.join(ENDINGS)}: save it as .xlsx")
    if sheet is not None and ending not in WORKBOOKS:
        raise ReleaseError(f"sheet={sheet} is for workbooks, but {path} is not one")
    table = Table(path)
    if ending in WORKBOOKS:
        _read_grid(table, _workbook(table, sheet), "")
    elif ending in SHEETS:
        delimiter, lines = _csv(path)
        hint = f"; a cell that contains {delimiter!r} needs quotes around it"
        _read_grid(table, enumerate(lines, 1), hint)
    else:
        _read_objects(table)
    if not table.rows and not table.problems:
        raise ReleaseError(f"{path} has no rows")
    return table


def _read_objects(table: Table) -> None:
    rows = [{key: _plain(value) for key, value in row.items()} for row in iter_rows(table.path)]
    rows = [row for row in rows if any(value not in ("", []) for value in row.values())]
    table.names = list(dict.fromkeys(name for row in rows for name in row))
    table.rows = list(enumerate(rows, 1))


def _read_grid(table: Table, grid: Iterator[tuple[int, Sequence[Any]]], hint: str) -> None:
    """Read headings from the first non-empty row, and the rows below it."""
    lines = [(n, cells) for n, values in grid if any(cells := list(map(_plain, values)))]
    if not lines:
        return
    width = max(len(cells) for _, cells in lines)
    (head, names), *rows = [(n, cells + [""] * (width - len(cells))) for n, cells in lines]
    column_of: dict[str, int] = {}
    for column, name in enumerate(" ".join(str(name).split()) for name in names):
        letter = get_column_letter(column + 1)
        filled = [n for n, cells in rows if cells[column] != ""]
        if name in column_of:
            other = get_column_letter(column_of[name] + 1)
            table.problems.append(f"{letter}{head}: {name!r} is already the heading of column {other}")
        elif name:
            column_of[name] = column
            table.letters[name] = letter
        elif filled:
            table.problems.append(
                f"{letter}{filled[0]}: column {letter} has no heading in {letter}{head}{hint}"
            )
    table.names = list(column_of)
    table.rows += [(n, {name: cells[at] for name, at in column_of.items()}) for n, cells in rows]


def _plain(value: Any) -> Any:
    """Text without invisible characters; whole numbers without a point."""
    if isinstance(value, str):
        return value.translate(SPACES).strip()
    if value is None or value != value:  # NaN, which other programs write for an empty cell
        return ""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date()
    if isinstance(value, Broken | datetime.date | datetime.time):
        return value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _csv(path: Path) -> tuple[str, list[list[str]]]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReleaseError(
            f"{path} is not UTF-8 ({error.reason}): save it as .xlsx, or as CSV UTF-8"
        ) from None
    head, _, rest = text.partition("\n")
    if declared := head.strip().lower().startswith("sep="):
        text = rest
    delimiter = head.strip()[4:5] if declared else max("\t,;", key=text.lstrip().partition("\n")[0].count)
    try:
        return delimiter, list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter or ","))
    except csv.Error as error:
        raise ReleaseError(f"{path} cannot be read as a table: {error}") from None


def _workbook(table: Table, wanted: str | None) -> Iterator[tuple[int, Sequence[Any]]]:
    path = table.path
    try:
        values, formulas = (load_workbook(path, data_only=only) for only in (True, False))
    except (InvalidFileException, zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ReleaseError(
            f"{path} cannot be read as a workbook ({error}): remove its password, or save it as .xlsx"
        ) from None
    title = _sheet(path, values, wanted)
    computed, typed = values[title], formulas[title]
    covers = {  # a vertically merged cell holds the value of all its rows
        (row, block.min_col): (block.min_row, block.min_col)
        for block in typed.merged_cells.ranges
        for row in range(block.min_row + 1, block.max_row + 1)
    }
    if hidden := sum(dimension.hidden for dimension in typed.row_dimensions.values()):
        table.notes.append(f"hidden rows of {path.name}, read like the others: {hidden}")
    for number in range(1, computed.max_row + 1):
        if any(cell.value is not None for cell in typed[number]):  # a row within a merged block may be empty
            places = [(number, column) for column in range(1, computed.max_column + 1)]
            places = [covers.get(place, place) for place in places]
            yield number, [_cell(computed.cell(*place), typed.cell(*place)) for place in places]


def _sheet(path: Path, book: Workbook, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in book.sheetnames:
            raise ReleaseError(f"{path} has no sheet {wanted!r}; its sheets: {', '.join(book.sheetnames)}")
        return wanted
    filled = [sheet.title for sheet in book.worksheets if sheet.max_row > 1 or sheet["A1"].value is not None]
    if len(filled) != 1:
        names = ", ".join(filled)
        raise ReleaseError(f"{path} has {len(filled)} non-empty sheets ({names}): pass sheet=NAME")
    return filled[0]


def _cell(computed: Any, typed: Any) -> Any:
    if computed.data_type == "e":
        return Broken(f"the formula gives {computed.value}")
    if typed.data_type == "f" and computed.value is None:
        return Broken("the formula was never calculated: open and save the file in a spreadsheet program")
    return computed.value
