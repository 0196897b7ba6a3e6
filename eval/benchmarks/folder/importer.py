"""Make a retrieval set from a folder of photos and a spreadsheet, see docs/own_data.md.

Copies of a picture under two names are one candidate, or else a right answer would count as wrong. A query's own picture
would be its best match, so it is removed from that query's ranking. All problems are reported together, with their cells.
"""

import datetime
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from eval.benchmarks.folder.pool import Pool
from eval.benchmarks.folder.spreadsheet import Table
from eval.benchmarks.release_files import ReleaseError, match_columns, need_columns
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.options import Quoting
from rge.common.registry import PluginOptions
from rge.common.schema import safe_id
from rge.tables.errors import Broken
from rge.tables.rows import TABLES, Cells, TableFormat

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
T = TypeVar("T")


@dataclass(kw_only=True)
class TableOptions(PluginOptions):
    """How a table of queries is read."""

    queries: Path | None = None
    """Table of the queries (.csv, .tsv, .xlsx, .jsonl, .json or .parquet); null: queries.xlsx, queries.csv ... in src, or the
    only table there."""
    quoting: Quoting = "auto"
    """Whether quotation marks enclose cells of a CSV or TSV (``quoted``) or belong to the text (``none``); ``auto``: what its
    lines show, and an error if that is unclear."""
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
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, by patterns as in ``.gitignore``. Folders of thumbnails and deleted files
    (``@eaDir/``, ``#recycle/`` and the like) always are, unless a pattern brings them back: ``!@eaDir/``."""
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
        raise ReleaseError("it contains the pictures: choose a different folder", options.out, key="out")
    table = Table(options.queries or _table_in(options.src), TableFormat(options.quoting, options.sheet))
    read = _Rows(table, Pool(options.src, out=options.out, exclude=options.exclude), options)
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
    names = [f"queries{ending}" for ending in TABLES]
    others = (path for path in sorted(src.glob("[!.~]*")) if path.suffix.lower() in TABLES)
    tables = [src / name for name in names if (src / name).is_file()] or list(others)
    if len(tables) != 1:
        present = " and ".join(path.name for path in tables) or f"no table ({', '.join(names)})"
        raise ReleaseError(f"it has {present}: pass queries=FILE", src, key="queries")
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
        field_map, report_by = self.options.field_map, self.options.report_by
        mapped = {word.partition("=")[0].strip() for word in field_map}
        kept = [name for name in self.table.names if name not in report_by or name in mapped]
        self.columns = match_columns(self.table.path, kept, ALIASES, field_map, needed=["right"])
        need_columns((self.table.path, None), self.table.names, report_by)

    def add(self, number: int, row: Cells) -> None:
        """Read one row."""
        where = {
            key: self.table.address(number, self.columns[key]) if key in self.columns else f"row {number}"
            for key in ALIASES
        }
        cells = {key: row.get(self.columns.get(key, ""), "") for key in ALIASES}
        texts = {
            key: self._text(where[key], cells[key], is_label=key in ("category", "group"))
            for key in ("id", "text", "category", "group", "instruction")
        }
        pictures, good, bad = (self._pictures(where[key], cells[key]) for key in ("image", "right", "wrong"))
        name = safe_id(unicodedata.normalize("NFC", texts["id"])) or f"q{len(self.queries) + 1:05d}"
        if (first := self.places.setdefault(name, where["id"])) != where["id"]:
            self.problems.append(
                ReleaseError(f"the id is already used in {first}", place=where["id"], key=name)
            )
        if cells["right"] in ("", []):
            self.problems.append(ReleaseError("no right answer", place=where["right"]))
        if cells["text"] in ("", []) and cells["image"] in ("", []):
            self.problems.append(ReleaseError("neither text nor picture", place=f"row {number}"))
        for picture in sorted(set(good) & set(bad)):
            self.problems.append(
                ReleaseError("it is listed as right and as wrong", place=where["wrong"], key=picture)
            )
        columns = {
            column: self._text(self.table.address(number, column), row.get(column), is_label=True) or "none"
            for column in self.options.report_by
        }
        self.queries.append(
            Query(
                id=name,
                text=texts["text"] or None,
                images=tuple(map(self.pool.files.__getitem__, pictures)),
                category=texts["category"] or None,
                group=texts["group"] or "+".join(sorted(pictures)) or name,
                instruction=texts["instruction"] or self.options.instruction,
                columns=columns,
            )
        )
        self.right += [(name, picture, 1) for picture in good]
        self.wrong += [(name, picture) for picture in bad]
        self.own += [(name, picture) for picture in pictures if picture not in good]

    def finish(self) -> None:
        """Raise a `ReleaseError` that lists the problems, if there are any."""
        if num := len(self.problems):
            lines = [f"{num} {'problem' if num == 1 else 'problems'}"]
            lines += map(str, self.problems[:MOST_PROBLEMS])
            if num > MOST_PROBLEMS:
                lines.append(f"and {num - MOST_PROBLEMS} more")
            error = ReleaseError("\n".join(lines), self.table.path)
            error.problems = self.problems
            raise error

    def _value(self, where: str, value: Any, *, dates: bool = False) -> Any:
        """A cell's value; "" and a problem if it cannot be used."""
        if isinstance(value, Broken):
            self.problems.append(ReleaseError(value.why, place=where))
        elif isinstance(value, datetime.date | datetime.time) and not dates:
            date = f"the spreadsheet turned the value into a date ({value}): format the column as text and retype it"
            self.problems.append(ReleaseError(date, place=where))
        else:
            return value
        return ""

    def _text(self, where: str, value: Any, *, is_label: bool) -> str:
        value = self._value(where, value, dates=is_label)
        if isinstance(value, list):
            self.problems.append(ReleaseError(f"one text is needed, not a list: {value}", place=where))
        text = "" if value is None else str(value)
        return unicodedata.normalize("NFC", text) if is_label else text

    def _pictures(self, where: str, value: Any) -> list[str]:
        value = self._value(where, value)
        names = value if isinstance(value, list) else self._tried(where, self.pool.names, value) or []
        ids = [self._tried(where, self.pool.resolve, str(name)) for name in names]
        return list(dict.fromkeys(filter(None, ids)))

    def _tried(self, where: str, find: Callable[[str], T], name: str) -> T | None:
        """A picture's id, or the names in a cell; None and a problem if there is an error."""
        try:
            return find(name)
        except ReleaseError as error:
            error.place = where
            self.problems.append(error)
            return None
