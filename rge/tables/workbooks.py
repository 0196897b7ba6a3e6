"""Read a sheet of a workbook (.xlsx, .xlsm), in time and memory of its cells.

A styled cell without a value may be far from all others, and a sheet's dimensions include it.
"""

import datetime
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse

from openpyxl.chartsheet import Chartsheet
from openpyxl.reader.excel import ExcelReader
from openpyxl.utils import range_boundaries
from openpyxl.utils.cell import coordinate_to_tuple

from rge.common.errors import Fault
from rge.tables.errors import Broken, TableError


@dataclass(frozen=True)
class Sheet:
    """A sheet's rows with their numbers, without empty ones; a cell is a value, None or `Broken`."""

    rows: Iterator[tuple[int, list[Any]]]
    num_hidden: int
    """Hidden rows, which are read like the others."""


def read_sheet(path: str, data: BinaryIO, wanted: str | None = None) -> Sheet:
    """Read the sheet of this name, or the only one that is not empty.

    Values that formulas gave when the file was saved are read. A cell that is merged with those below it holds for all their rows.

    Raises:
        TableError: it is no workbook, has no such sheet, or has several.
    """
    try:
        reader = _Reader(data, read_only=True, data_only=True)
        reader.read()
    except Exception as error:  # noqa: BLE001 - openpyxl raises anything on files that it does not expect
        raise TableError(
            f"it cannot be read as a workbook ({error}): remove its password, or save it as .xlsx", path
        ) from None
    sheets = {sheet.title: sheet for sheet in reader.wb.worksheets}
    if wanted is None:
        filled = [title for title, sheet in sheets.items() if next(_filled(sheet), None) is not None]
        if not filled:
            return Sheet(iter(()), 0)
        if len(filled) != 1:
            raise TableError(
                f"it has {len(filled)} non-empty sheets ({', '.join(filled)}): pass sheet=NAME", path
            ).about(Fault("choice", "sheet", tuple(filled)))
        (wanted,) = filled
    if wanted not in sheets:
        raise TableError(f"it has no sheet {wanted!r}; its sheets: {', '.join(sheets)}", path).about(
            Fault("choice", "sheet", tuple(sheets))
        )
    sheet = sheets[wanted]
    try:
        facts = _facts(sheet)
    except ParseError as error:
        raise TableError(f"it cannot be read as a workbook ({error})", path) from None
    return Sheet(_rows(sheet, facts), facts.num_hidden)


class _Reader(ExcelReader):
    """Leaves sheets of charts unread: they have no cells, and openpyxl fails on one without a chart."""

    def read_chartsheet(self, sheet: Any, rel: Any) -> None:
        """Keep its place among the sheets."""
        self.wb._add_sheet(Chartsheet(parent=self.wb, title=sheet.name))


@dataclass
class _Facts:
    """What openpyxl does not tell of a sheet that it reads row by row; places are (row, column)."""

    num_hidden: int = 0
    uncomputed: set[tuple[int, int]] = field(default_factory=set)  # have a formula, but no value of it
    holders: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """From a place within a vertical merger to the one that holds its value."""


def _facts(sheet: Any) -> _Facts:
    facts = _Facts()
    with sheet._get_source() as xml:
        for _, element in iterparse(xml):
            tag = _name(element)
            if tag == "c":
                parts = {_name(part): part.text for part in element}
                # The value of a formula that gives an empty text is stored as such.
                if "f" in parts and not parts.get("v") and not (element.get("t") == "str" and "v" in parts):
                    facts.uncomputed.add(coordinate_to_tuple(element.get("r")))
            elif tag == "row":
                facts.num_hidden += element.get("hidden") in ("1", "true")
                element.clear()
            elif tag == "mergeCell":
                left, top, _, bottom = range_boundaries(element.get("ref"))
                facts.holders.update({(row, left): (top, left) for row in range(top + 1, bottom + 1)})
    return facts


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _rows(sheet: Any, facts: _Facts) -> Iterator[tuple[int, list[Any]]]:
    holders, held = set(facts.holders.values()), dict[tuple[int, int], Any]()
    columns = sorted({column for _, column in facts.holders})
    for number, cells in _filled(sheet, facts.uncomputed):
        row = [_value(cell, (number, at) in facts.uncomputed) for at, cell in enumerate(cells, start=1)]
        for column in columns:
            place = number, column
            if place in holders and column <= len(row):
                held[place] = row[column - 1]
            elif (holder := facts.holders.get(place)) in held:
                row += [None] * (column - len(row))
                row[column - 1] = held[holder]
        yield number, row


def _filled(sheet: Any, uncomputed: Container[tuple[int, int]] = ()) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows with a value or a formula, and their numbers."""
    sheet.reset_dimensions()  # else each row is as wide as the widest
    for number, cells in enumerate(sheet.iter_rows(), start=1):
        if any(
            cell.value is not None or (number, at) in uncomputed for at, cell in enumerate(cells, start=1)
        ):
            yield number, cells


def _value(cell: Any, is_uncomputed: bool) -> Any:
    if cell.data_type == "e":
        return Broken(f"the formula gives {cell.value}")
    if is_uncomputed and cell.value is None:
        return Broken("the formula was never calculated: open and save the file in a spreadsheet program")
    if isinstance(cell.value, datetime.datetime) and cell.value.time() == datetime.time():
        return cell.value.date()
    return cell.value
