"""A folder of photos and a spreadsheet become a retrieval set: see docs/own_data.md.

Layout: pictures at any depth below ``src``, and ``queries.csv`` (or .tsv, .jsonl, .json, .parquet) beside them, one query a
row: text, image, right answers, wrong answers, category, group, instruction. Pictures are named by file name or path; a
cell that names several separates them by ``;``, ``|`` or a line break.

What a plain reading would get wrong: Excel writes a byte order mark and, in half of Europe, semicolons between columns;
copies of one picture under two names would make a right answer count as wrong, so they stand in the pool once; a query's own
picture is its own best match, so it is taken out of that query's ranking.
"""

import csv
import difflib
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import PICTURES, Fields, ReleaseError, iter_rows
from eval.sets.retrieval_set import MAX_REPORT_VALUES, RetrievalSet
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.options import one_of
from rge.common.registry import PluginOptions
from rge.common.schema import safe_id

TABLES = tuple(f"queries{ending}" for ending in (".csv", ".tsv", ".jsonl", ".json", ".parquet"))
ALIASES = {
    "id": ("id", "query_id", "query-id"),
    "text": ("text", "query", "question", "query_text"),
    "image": ("image", "images", "picture", "pictures", "photo", "photos", "query_image"),
    "right": ("right", "right_answers", "answer", "answers", "positive", "positives", "correct"),
    "wrong": ("wrong", "wrong_answers", "negative", "negatives"),
    "category": ("category", "type", "kind"),
    "group": ("group",),
    "instruction": ("instruction", "task"),
}
SEPARATORS = re.compile(r"[;|\n]")


@dataclass
class FolderOptions(PluginOptions):
    """Make a retrieval set from a folder of pictures and a table of queries."""

    src: Path
    """Folder with the pictures, at any depth."""
    out: Path
    """Retrieval set to write."""
    queries: Path | None = None
    """Table of the queries; null: queries.csv, .tsv, .jsonl, .json or .parquet in src."""
    name: str | None = None
    """Name of the set; null: that of the folder."""
    instruction: str | None = None
    """Task instruction of queries that have none of their own; use the one that the model was trained with."""
    field_map: tuple[str, ...] = ()
    """theirs=ours for columns of other names; theirs=ignore drops one."""
    report_by: tuple[str, ...] = ()
    """Further columns to report figures by."""
    exclude_query_image: bool = True
    """Take a query's own picture out of its ranking, unless it is a right answer."""
    pictures: str = "embed"
    """embed copies pictures into the set, link writes their paths."""
    overwrite: bool = False
    """Replace a set that is already at out."""


def import_folder(options: FolderOptions) -> RetrievalSet:
    """Read folder and table and write a retrieval set.

    Raises:
        UserError: there is no table or no picture, a row lacks what it needs, or names a picture that is not there.
    """
    one_of("pictures", [options.pictures], ("embed", "link"))
    if not options.src.is_dir():
        raise ReleaseError(f"src {options.src} is not a directory")
    table = _table(options)
    pool = _Pool(options.src, exclude=options.out)
    rows = [row for row in _rows(table) if any(str(value or "").strip() for value in row.values())]
    if not rows:
        raise ReleaseError(f"{table} has no rows")
    known = {word.partition("=")[0].strip() for word in options.field_map}
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = Fields(ALIASES, options.field_map).columns(
        table, [name for name in names if name not in options.report_by or name in known]
    )
    for needed in ("right",):
        if needed not in columns:
            raise ReleaseError(
                f"{table} has no column of right answers ({', '.join(ALIASES['right'])}); it has {', '.join(names)}"
            )
    for name in options.report_by:
        if name not in names:
            raise ReleaseError(f"report_by={name}: {table} has no such column; it has {', '.join(names)}")
        if len({str(row.get(name)) for row in rows}) > MAX_REPORT_VALUES:
            raise ReleaseError(f"report_by={name}: more than {MAX_REPORT_VALUES} values are no grouping")

    queries: list[Query] = []
    right: list[tuple[str, str, int]] = []
    wrong: list[tuple[str, str]] = []
    own: list[tuple[str, str]] = []
    problems: list[str] = []
    for number, row in enumerate(rows, 1):

        def cell(field: str, row: dict[str, Any] = row) -> str:
            value = row.get(columns.get(field, ""))
            return "" if value is None else str(value).strip()

        def found(field: str, row: dict[str, Any] = row, number: int = number) -> list[str]:
            names = _names(row.get(columns.get(field, "")))
            missing = [name for name in names if pool.find(name) is None]
            problems.extend(f"row {number}: {pool.missing(name)}" for name in missing)
            return list(dict.fromkeys(one for name in names if (one := pool.find(name)) is not None))

        name = safe_id(cell("id")) or f"q{number:05d}"
        shown, good, bad = found("image"), found("right"), found("wrong")
        if not _names(row.get(columns["right"])):
            problems.append(f"row {number}: no right answer")
        if not cell("text") and not shown:
            problems.append(f"row {number}: neither text nor picture")
        if both := sorted(set(good) & set(bad)):
            problems.append(f"row {number}: {both[0]!r} is listed as right and as wrong")
        queries.append(
            Query(
                id=name,
                text=cell("text") or None,
                images=tuple(pool.files[one] for one in shown),
                category=cell("category") or None,
                group=cell("group") or "+".join(sorted(shown)) or name,
                instruction=cell("instruction") or options.instruction,
                columns={column: str(row.get(column) or "none") for column in options.report_by},
            )
        )
        right += [(name, one, 1) for one in good]
        wrong += [(name, one) for one in bad]
        own += [(name, one) for one in shown if one not in good]
    ids = [query.id for query in queries]
    problems += [f"id {name!r} occurs twice" for name in dict.fromkeys(n for n in ids if ids.count(n) > 1)]
    if problems:
        more = f"\nand {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ReleaseError(f"{table}:\n" + "\n".join(problems[:20]) + more)

    return write_set(
        options.out,
        meta={
            "name": options.name or options.src.resolve().name,
            "source": "a folder, imported by eval.benchmarks.folder.importer",
            "notes": pool.notes,
            "exclude_query_image": options.exclude_query_image,
            **({"report_by": list(options.report_by)} if options.report_by else {}),
        },
        queries=queries,
        corpus=(Candidate(id=name, image=file) for name, file in pool.files.items()),
        qrels=right,
        negatives=wrong or None,
        excluded=own if options.exclude_query_image and own else None,
        embed=options.pictures == "embed",
        overwrite=options.overwrite,
    )


class _Pool:
    """The pictures of a folder, each once however many names it has.

    Attributes:
        files: candidate id -> picture, in the order of their paths.
        notes: what was left out or joined, in words.
    """

    def __init__(self, root: Path, *, exclude: Path):
        self.files: dict[str, Path] = {}
        self.notes: list[str] = []
        self._by_path: dict[str, str] = {}
        self._by_name: dict[str, list[str]] = {}
        copies, skipped = 0, dict[str, int]()
        id_of: dict[bytes, str] = {}
        out = exclude.resolve()
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if (
                not path.is_file()
                or any(part.startswith(".") for part in inside.parts)
                or out in path.resolve().parents
            ):
                continue
            if path.suffix.lower() not in PICTURES:
                if path.suffix.lower() in NO_TABLE:
                    skipped[path.suffix.lower()] = skipped.get(path.suffix.lower(), 0) + 1
                continue
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            copies += content in id_of
            name = id_of.setdefault(content, safe_id(inside.as_posix()))
            self.files.setdefault(name, path.resolve())
            self._by_path[inside.as_posix().lower()] = name
            for key in {path.name.lower(), path.stem.lower()}:
                self._by_name.setdefault(key, []).append(name)
        if not self.files:
            raise ReleaseError(
                f"there is no picture below {root}: endings that are read are {', '.join(PICTURES)}"
            )
        if copies:
            self.notes.append(
                f"{copies} pictures are copies of others, byte for byte, and stand in the pool once"
            )
        for ending, count in sorted(skipped.items()):
            self.notes.append(f"{count} {ending} files are not in the pool: convert them to .jpg or .png")

    def find(self, name: str) -> str | None:
        """Candidate id of a path or an unambiguous file name."""
        name = name.replace("\\", "/").removeprefix("./").lower()
        if name in self._by_path:
            return self._by_path[name]
        found = set(self._by_name.get(name, []))
        return found.pop() if len(found) == 1 else None

    def missing(self, name: str) -> str:
        """Why `find` found nothing, in words."""
        several = sorted(set(self._by_name.get(name.lower(), [])))
        if several:
            return f"{name!r} could be {' or '.join(map(repr, several[:3]))}: write the path"
        near = difflib.get_close_matches(name.lower(), [*self._by_path, *self._by_name], n=1)
        return f"picture {name!r} is not in the folder" + (f"; did you mean {near[0]!r}?" if near else "")


NO_TABLE = (".heic", ".heif", ".avif", ".raw", ".cr2", ".nef", ".arw", ".dng", ".psd", ".svg", ".pdf", ".jp2")
"""Endings of pictures that cannot be read here; other files beside the pictures are nobody's concern."""


def _table(options: FolderOptions) -> Path:
    if options.queries is not None:
        if options.queries.suffix.lower() in (".xlsx", ".xls", ".ods"):
            raise ReleaseError(f"{options.queries} is a workbook: save it as CSV (UTF-8) first")
        if not options.queries.is_file():
            raise ReleaseError(f"queries {options.queries} is not there")
        return options.queries
    there = [options.src / name for name in TABLES if (options.src / name).is_file()]
    if len(there) != 1:
        raise ReleaseError(
            f"{options.src} has {' and '.join(path.name for path in there) or 'none of ' + ', '.join(TABLES)}: give queries=FILE"
        )
    return there[0]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix.lower() not in (".csv", ".tsv"):
        yield from iter_rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReleaseError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as CSV UTF-8"
        ) from None
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    for number, row in enumerate(reader, 1):
        if None in row:
            raise ReleaseError(
                f"{path}, row {number}: more cells than the {len(reader.fieldnames or [])} columns; a cell that holds "
                f"{delimiter!r} needs quotes, and several file names in one cell are separated by | or a line break"
            )
        yield {str(name).strip(): value for name, value in row.items()}


def _names(cell: Any) -> list[str]:
    parts: Sequence[Any] = cell if isinstance(cell, list | tuple) else SEPARATORS.split(str(cell or ""))
    return [str(part).strip() for part in parts if str(part).strip()]
