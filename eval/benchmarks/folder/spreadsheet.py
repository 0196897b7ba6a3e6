"""A table of queries, with the addresses of its cells where it has any.

Harmless artefacts of spreadsheets are ignored (docs/own_data.md lists them). Anything ambiguous is reported as a
problem with the address of its cell.
"""

import datetime
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import ReleaseError
from rge.tables.errors import Broken
from rge.tables.rows import SHEETS, TABLES, Cells, Grid, TableFormat, is_missing, table_rows


class Table:
    """Rows of a table, by heading.

    Attributes:
        names: headings, in order.
        rows: (row number, heading -> value), without empty rows. A value is text, a list, a date, or `Broken`; "" if it is missing.
        problems: problems of the table itself.
        notes: remarks for readers of the figures.
    """

    def __init__(self, path: Path, form: TableFormat):
        if not path.is_file():
            raise ReleaseError("it does not exist", path, kind="missing")
        if path.suffix.lower() not in TABLES:
            raise ReleaseError(f"it must end in {', '.join(TABLES)}: save it as .xlsx", path, kind="format")
        self.path, self.problems, self.notes = path, list[ReleaseError](), list[str]()
        self._letters: dict[str, str] = {}
        if path.suffix.lower() in SHEETS:
            rows = self._of_sheet(Grid(str(path), form=form))
        else:
            rows = list(enumerate(table_rows(path, form=form), start=1))
        plain = ((number, {name: _plain(cell) for name, cell in row.items()}) for number, row in rows)
        self.rows = [
            (number, row) for number, row in plain if any(cell not in ("", []) for cell in row.values())
        ]
        self.names = list(self._letters or dict.fromkeys(name for _, row in self.rows for name in row))
        if not self.rows and not self.problems:
            raise ReleaseError("it has no rows", path, kind="empty")

    def _of_sheet(self, grid: Grid) -> list[tuple[int, Cells]]:
        rows = list(grid.rows)
        self._letters = grid.letters
        for cell, reason in grid.repeated.items():
            self.problems.append(ReleaseError(reason, place=cell))
        for letter, cell in grid.unnamed.items():
            self.problems.append(ReleaseError(f"column {letter} has no heading", place=cell))
        if grid.num_hidden:
            self.notes.append(f"hidden rows of {self.path.name}, read like the others: {grid.num_hidden}")
        return rows

    def address(self, number: int, name: str) -> str:
        """Address of a cell: ``C5``, or ``row 5, right``."""
        return f"{self._letters[name]}{number}" if name in self._letters else f"row {number}, {name}"


def _plain(value: Any) -> Any:
    """Text without white space around it; whole numbers without a point."""
    if is_missing(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Broken | datetime.date | datetime.time):
        return value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
