"""Read CSV and TSV: the rows that were written, or an error with the line.

The same text can be read with quotation marks (RFC 4180: they enclose a cell, which may contain delimiters and line breaks) and
without (they are letters, as in most TSV). A caption that begins with a quotation mark and a later one that ends with one then
enclose all lines between them, and no parser notices. So a file with such marks is first read in both ways. Some lines
can only be read in one way; that way is used. If no line decides, the error names the line, and `quoting` decides.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, TextIO

from rge.common.options import Quoting
from rge.tables.errors import TableError

MAX_CELL_CHARS = 64 << 20
"""Longest run of lines that one quoted cell may join."""
csv.field_size_limit(1 << 30)  # the library's 128 kB are less than a long document
_CELL = re.compile(r'"(?:[^"]|"")*"?')
_ENCLOSED = re.compile(r'".*"', re.DOTALL)


def delimited_rows(
    path: str, opened: Callable[[], AbstractContextManager[TextIO]], quoting: Quoting = "auto"
) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV or TSV with their numbers, from 1, as a spreadsheet counts them; all have as many cells as the first.

    The first one holds the headings; blank rows are left out. `opened` opens the file, with ``newline=""``, once or twice.

    Raises:
        TableError: a row has another number of cells, a quoted cell never ends, or it is unclear whether quotation marks enclose
            cells.
    """
    with opened() as lines:
        layout = _Layout.of(path, lines)
    if layout is None:
        return
    is_quoted = quoting == "quoted"
    if quoting == "auto":
        with opened() as lines:
            is_quoted = _has_quotes(lines)
        if is_quoted:
            with opened() as lines:
                is_quoted = _Evidence(path, layout).is_quoted(lines)
    with opened() as lines:
        layout.start(lines)
        try:
            for row in _rows(layout, lines, is_quoted):
                yield row.number, row.cells
        except _Fault as fault:
            raise TableError(fault.why, path, fault.line) from None


class _Fault(Exception):
    """A line that cannot be read."""

    def __init__(self, line: int, why: str):
        super().__init__(line, why)
        self.line, self.why = line, why


@dataclass(frozen=True)
class _Layout:
    """What the lines up to the headings show."""

    delimiter: str
    first: int  # number of the first line that is read: 2 below a line ``sep=;``
    headings: str  # the line with the headings

    @classmethod
    def of(cls, path: str, lines: TextIO) -> "_Layout | None":
        """None for a file without a line."""
        declared, first = None, 1
        for number, line in enumerate(lines, start=1):
            if number == 1 and re.fullmatch(r"sep=.", line.strip("\r\n"), re.IGNORECASE):
                declared, first = line[4], 2
            elif line.strip(",;\t\r\n "):
                bare = _CELL.sub("", line)
                guess = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=bare.count)
                return cls(declared or guess, first, line)
        return None

    def start(self, lines: TextIO) -> None:
        """Skip to the first line."""
        for _ in range(1, self.first):
            next(lines)

    def width(self, line: str) -> int:
        """Number of a line's cells, if quotation marks are letters."""
        return line.count(self.delimiter) + 1


@dataclass(frozen=True)
class _Read:
    number: int  # as a spreadsheet counts
    line: int  # number of its first line in the file
    cells: list[str]
    lines: list[str]  # until the next row is read


def _rows(layout: _Layout, lines: Iterable[str], is_quoted: bool) -> Iterator[_Read]:
    """Rows that are not blank, all of the same width; raises `_Fault`."""
    taken: list[str] = []

    def noted() -> Iterator[str]:
        size = 0
        for line in lines:
            size = size + len(line) if taken else len(line)
            if size > MAX_CELL_CHARS:
                raise _Fault(start, "a quoted cell begins here and does not end")
            taken.append(line)
            yield line

    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    number = width = 0
    reader = csv.reader(noted(), delimiter=layout.delimiter, quoting=quoting, strict=True)
    while True:
        start = layout.first + reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error as error:
            never = "unexpected end" in str(error)
            why = "a quoted cell begins here and does not end" if never else str(error).replace("'", "")
            raise _Fault(start, f"{why}; if its quotation marks are letters, pass quoting=none") from None
        if cells is None:
            return
        number += 1
        if any(cell.strip() for cell in cells):
            width = width or len(cells)
            if len(cells) != width:
                raise _Fault(start, _ragged(layout, width, len(cells)))
            yield _Read(number, start, cells, taken)
        taken.clear()


def _ragged(layout: _Layout, named: int, found: int) -> str:
    hint = f"; a cell that contains {layout.delimiter!r} needs quotes around it" if found > named else ""
    return f"{named} columns are named, but this row has {found} cells{hint}"


def _has_quotes(lines: TextIO) -> bool:
    while text := lines.read(1 << 20):
        if '"' in text:
            return True
    return False


@dataclass
class _Evidence:
    """Reads a file in both ways, to find out in which it was written.

    Attributes are numbers of lines, 0 for none.
    """

    path: str
    layout: _Layout
    proof: int = 0  # only makes sense with quoted cells
    escaped: int = 0  # has a quotation mark after a backslash, which is no form of CSV that we read
    joined: int = 0  # begins a row of several lines, two of which would be rows by themselves
    idle: int = 0  # a cell is in quotes, but needs none
    ragged: int = 0  # is no row without quotes
    _line: int = field(default=0, init=False)

    def is_quoted(self, lines: TextIO) -> bool:
        """Whether quotation marks enclose cells; raises `TableError` if that is unclear, or both ways fail."""
        self.layout.start(lines)
        self._line = self.layout.first - 1
        fault = None
        read = self._noted(lines)
        try:
            for row in _rows(self.layout, read, is_quoted=True):
                self._compare(row)
        except _Fault as found:
            fault = found
            for _ in read:  # the other lines, without quotes
                pass
        return self._verdict(fault)

    def _noted(self, lines: TextIO) -> Iterator[str]:
        """Pass lines on, and note how each looks without quotes."""
        delimiter = self.layout.delimiter
        width = self.layout.width(self.layout.headings)
        for line in lines:
            self._line += 1
            if line.strip() and self.layout.width(line) != width:
                self.ragged = self.ragged or self._line
            if '"' in line:
                cells = [cell for cell in line.strip("\r\n").split(delimiter) if _ENCLOSED.fullmatch(cell)]
                if cells:
                    self.idle = self.idle or self._line
                if cells and (line == self.layout.headings or any('""' in cell for cell in cells)):
                    self.proof = self.proof or self._line
                if '\\"' in line:
                    self.escaped = self.escaped or self._line
            yield line

    def _compare(self, row: _Read) -> None:
        """Note what a row says about its lines."""
        if any(line.startswith('"') or f'{self.layout.delimiter}"' in line for line in row.lines):
            fitting = sum(
                bool(line.strip()) and self.layout.width(line) == len(row.cells) for line in row.lines
            )
            if fitting >= 2:
                self.joined = self.joined or row.line
            elif len(row.lines) > fitting:
                self.proof = self.proof or row.line

    def _verdict(self, fault: _Fault | None) -> bool:
        is_tsv = self.layout.delimiter == "\t"
        if fault is None:
            doubt = self.joined or (self.idle if is_tsv else 0)
            if doubt and not self.proof:
                raise TableError(
                    "it is unclear whether its quotation marks enclose a cell or belong to the text: pass quoting=quoted or "
                    "quoting=none",
                    self.path,
                    doubt,
                ).about("quoting")
            return True
        if not (self.ragged or self.proof or self.escaped or (self.idle and not is_tsv)):
            return False
        without = ""
        if self.ragged:
            without = (
                f"; nor can it be read without quotes, as line {self.ragged} has another number of cells"
            )
        raise TableError(f"{fault.why}{without}", self.path, fault.line)
