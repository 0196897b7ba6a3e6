"""Make a retrieval set from a folder of photos and a spreadsheet, see docs/own_data.md.

Copies of a picture under two names are one candidate, or else a right answer would count as wrong. A query's own picture
would be its best match, so it is removed from that query's ranking. All problems are reported together, with their cells.
"""

import datetime
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eval.benchmarks.folder.pool import Pool
from eval.benchmarks.folder.spreadsheet import ENDINGS, Broken, Table, read_table
from eval.benchmarks.release_files import ReleaseError, match_columns, need_columns
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.registry import PluginOptions
from rge.common.schema import safe_id

ALIASES = {
    "id": ("id", "query_id"),
    "text": ("text", "query", "question", "query_text"),
    "image": ("image", "images", "picture", "pictures", "photo", "photos", "query_image"),
    "right": (
        "right", "right_answer", "right_answers", "answer", "answers", "positive", "positives", "correct",
    ),
    "wrong": ("wrong", "wrong_answer", "wrong_answers", "negative", "negatives"),
    "category": ("category", "type", "kind"),
    "group": ("group",),
    "instruction": ("instruction", "task"),
}  # fmt: skip
MOST_PROBLEMS = 200
_Cell = tuple[str, Any]
"""A cell's address and value."""


@dataclass(kw_only=True)
class TableOptions(PluginOptions):
    """How a table of queries is read."""

    queries: Path | None = None
    """Table of the queries (.xlsx, .csv, .tsv, .jsonl, .json or .parquet); null: queries.xlsx, queries.csv ... in src, or the
    only table there."""
    sheet: str | None = None
    """Sheet of a workbook; null: the only one that is not empty."""
    name: str | None = None
    """Name of the set; null: the folder's name."""
    instruction: str | None = None
    """Task instruction for queries without one; use that of the model's training."""
    field_map: tuple[str, ...] = ()
    """theirs=ours maps a column with another name; theirs=ignore drops one."""
    report_by: tuple[str, ...] = ()
    """Further columns to report figures by."""
    exclude_query_image: bool = True
    """Remove a query's own picture from its ranking, unless it is a right answer."""
    pictures: Literal["embed", "link"] = "embed"
    """embed copies pictures into the set's tables, link makes hard links to them in its folder."""


@dataclass(kw_only=True)
class FolderOptions(TableOptions):
    """Make a retrieval set from a folder of pictures and a table of queries."""

    src: Path
    """Folder with the pictures, at any depth."""
    out: Path
    """Retrieval set to write."""
    overwrite: bool = False
    """Replace a set that is already at out."""


def import_folder(options: FolderOptions) -> RetrievalSet:
    """Read folder and table and write a retrieval set."""
    if options.src.resolve().is_relative_to(options.out.resolve()):
        raise ReleaseError(f"out {options.out} contains the pictures: choose a different folder")
    table = read_table(options.queries or _table_in(options.src), options.sheet)
    read = _Rows(table, Pool(options.src, exclude=options.out), options)
    for number, row in table.rows:
        read.add(number, row)
    read.finish()
    return write_set(
        options.out,
        meta={
            "name": options.name or options.src.resolve().name,
            "source": "a folder, imported by eval.benchmarks.folder.importer",
            "notes": [*table.notes, *read.pool.notes],
            "exclude_query_image": options.exclude_query_image,
            **({"report_by": list(options.report_by)} if options.report_by else {}),
        },
        queries=read.queries,
        corpus=(Candidate(id=name, image=file) for name, file in read.pool.files.items()),
        qrels=read.right,
        negatives=read.wrong or None,
        excluded=read.own if options.exclude_query_image and read.own else None,
        embed=options.pictures == "embed",
        decode=False,  # the pool has already opened every picture
        overwrite=options.overwrite,
    )


def _table_in(src: Path) -> Path:
    names = [f"queries{ending}" for ending in ENDINGS]
    tables = [src / name for name in names if (src / name).is_file()] or sorted(
        path for path in src.glob("*") if path.suffix.lower() in ENDINGS and path.name[0] not in ".~"
    )
    if len(tables) != 1:
        present = " and ".join(path.name for path in tables) or f"no table ({', '.join(names)})"
        raise ReleaseError(f"{src} has {present}: pass queries=FILE")
    return tables[0]


@dataclass
class _Rows:
    """Collects queries, judgements and problems, row by row."""

    table: Table
    pool: Pool
    options: FolderOptions
    queries: list[Query] = field(default_factory=list)
    right: list[tuple[str, str, int]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    own: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problems = list(self.table.problems)
        self.places: dict[str, str] = {}
        mapped = {word.partition("=")[0].strip() for word in self.options.field_map}
        kept = [name for name in self.table.names if name not in self.options.report_by or name in mapped]
        field_map = self.options.field_map
        self.columns = match_columns(self.table.path, kept, ALIASES, field_map, needed=["right"])
        need_columns(self.table.path, self.table.names, self.options.report_by)

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Read one row."""
        cells = {key: self._cell(number, row, key) for key in ALIASES}
        name = self._name(cells)
        text, instruction, category, group = (
            self._text(cells, key) for key in ("text", "instruction", "category", "group")
        )
        pictures, good, bad = (self._pictures(cells, key) for key in ("image", "right", "wrong"))
        self._check(number, row, cells, set(good) & set(bad))
        self.queries.append(
            Query(
                id=name,
                text=text or None,
                images=tuple(map(self.pool.files.__getitem__, pictures)),
                category=category or None,
                group=group or "+".join(sorted(pictures)) or name,
                instruction=instruction or self.options.instruction,
                columns={column: _words(row.get(column)) or "none" for column in self.options.report_by},
            )
        )
        self.right += [(name, picture, 1) for picture in good]
        self.wrong += [(name, picture) for picture in bad]
        self.own += [(name, picture) for picture in pictures if picture not in good]

    def _cell(self, number: int, row: dict[str, Any], key: str) -> _Cell:
        if key not in self.columns:
            return f"row {number}", ""
        return self.table.address(number, self.columns[key]), row.get(self.columns[key], "")

    def _name(self, cells: dict[str, _Cell]) -> str:
        """The query's id, which must be unique."""
        name = safe_id(self._text(cells, "id")) or f"q{len(self.queries) + 1:05d}"
        where = cells["id"][0]
        if (first := self.places.setdefault(name, where)) != where:
            self.problems.append(f"{where}: id {name!r} is already used in {first}")
        return name

    def _check(self, number: int, row: dict[str, Any], cells: dict[str, _Cell], both: set[str]) -> None:
        """Record a row's missing values, and ``both``: pictures listed as right and as wrong."""
        empty = {key for key, (_, value) in cells.items() if value in ("", [])}
        if "right" in empty:
            self.problems.append(f"{cells['right'][0]}: no right answer")
        if {"text", "image"} <= empty:
            self.problems.append(f"row {number}: neither text nor picture")
        for picture in sorted(both):
            self.problems.append(f"{cells['wrong'][0]}: {picture!r} is listed as right and as wrong")
        for column in self.options.report_by:
            self._refuse(self.table.address(number, column), row.get(column), dates=True)

    def finish(self) -> None:
        """Raise a `ReleaseError` that lists the problems, if there are any."""
        if num := len(self.problems):
            lines = [f"{self.table.path}: {num} {'problem' if num == 1 else 'problems'}"]
            lines += self.problems[:MOST_PROBLEMS]
            if num > MOST_PROBLEMS:
                lines.append(f"and {num - MOST_PROBLEMS} more")
            raise ReleaseError("\n".join(lines))

    def _text(self, cells: dict[str, _Cell], key: str) -> str:
        where, value = cells[key]
        self._refuse(where, value, dates=key in ("category", "group"))
        if isinstance(value, list):
            self.problems.append(f"{where}: one text is needed, not a list: {value}")
        return _words(value)

    def _pictures(self, cells: dict[str, _Cell], key: str) -> list[str]:
        where, value = cells[key]
        if self._refuse(where, value):
            return []
        names, ids = value if isinstance(value, list) else [], dict[str, None]()
        if not isinstance(value, list):
            with self._collecting(where):
                names = self.pool.names(value)
        for name in names:
            with self._collecting(where):
                ids[self.pool.resolve(str(name))] = None
        return list(ids)

    @contextmanager
    def _collecting(self, where: str) -> Iterator[None]:
        """Record a `ReleaseError` as a problem of a cell."""
        try:
            yield
        except ReleaseError as error:
            self.problems.append(f"{where}: {error}")

    def _refuse(self, where: str, value: Any, *, dates: bool = False) -> bool:
        if isinstance(value, Broken):
            self.problems.append(f"{where}: {value.why}")
        elif isinstance(value, datetime.date | datetime.time) and not dates:
            self.problems.append(
                f"{where}: the spreadsheet turned the value into a date ({value}): format the column as text and retype it"
            )
        else:
            return False
        return True


def _words(value: Any) -> str:
    return unicodedata.normalize("NFC", "" if value is None or isinstance(value, Broken) else str(value))
