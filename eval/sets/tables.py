"""Parquet tables of a retrieval set, checked when they are read, and items with their pictures."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.parts import (
    Content,
    ImagePart,
    ImageRef,
    Part,
    PdfPart,
    TextPart,
    VideoPart,
    content_of,
    parts_from_json,
)
from rge.common.schema import Item
from rge.tables.rows import Cells, is_text

READ_ROWS = 64
"""Rows decoded at a time, since a row group of pictures can be gigabytes large."""


class SetError(UserError):
    """A retrieval set violates the format: its ``file``, the row or the id (``place``), the column or a candidate (``key``)."""


class Table:
    """A Parquet file of a set; its columns are checked when they are read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise SetError(f"it cannot be read as Parquet: {error}", path) from None
        self.names = self.file.schema_arrow.names

    def check(self, column: str, words: str = "strings", *, null: bool = False) -> None:
        """Check that a column holds strings or integers; ``null``: it may hold nothing else than null."""
        if column not in self.names:
            raise SetError(f"the column is missing; there are {', '.join(self.names)}", self.path, key=column)
        kind = self.file.schema_arrow.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        fits = is_text(kind) if words == "strings" else pa.types.is_integer(kind)
        if not fits and not (null and pa.types.is_null(kind)):
            raise SetError(f"it must hold {words}, and holds {kind}", self.path, key=column, kind="type")

    def read(self, column: str, words: str = "strings", *, null: bool = False) -> list[Any]:
        """The values of a column; an error if one is null, unless `null`."""
        self.check(column, words, null=null)
        values = self.file.read(columns=[column]).column(0).to_pylist()
        if None in values and not null:
            raise SetError("it is null", self.path, f"row {values.index(None)}", column)
        return values

    def ids(self) -> list[str]:
        """The column ``id``, of distinct names that TREC run files can hold: they separate columns by white space."""
        ids = self.read("id")
        if {"text", "image", "content"}.isdisjoint(self.names):
            raise SetError(
                f"the columns are all missing; there are {', '.join(self.names)}",
                self.path,
                key="text, image, content",
            )
        if not ids:
            raise SetError("it has no rows", self.path)
        seen: set[str] = set()
        for row, name in enumerate(ids):
            if name.split() != [name]:
                raise SetError(f"{name!r} is empty or contains white space", self.path, f"row {row}", "id")
            if name in seen:
                raise SetError(f"{name!r} occurs twice", self.path, f"row {row}", "id", "twice")
            seen.add(name)
        return ids


def optional_rows(path: Path, *columns: str) -> Iterator[tuple[str, ...]]:
    """Rows of a table of strings; none without it."""
    return zip(*map(Table(path).read, columns), strict=True) if path.exists() else iter(())


def items_of(table: Table) -> Iterator[Item]:
    """The queries or candidates of a table, read lazily; a SetError if one shows nothing."""
    wanted = [name for name in ("id", "text", "image", "content", "instruction") if name in table.names]
    for name in {"text", "content", "instruction"}.intersection(wanted):
        table.check(name, null=True)
    for batch in table.file.iter_batches(batch_size=READ_ROWS, columns=wanted):
        for row in batch.to_pylist():
            item = Item(row["id"], _content(table.path, row), row.get("instruction") or None)
            if not item.text and not item.is_visual:
                raise SetError("it has neither text nor image", table.path, item.id)
            yield item


def _content(path: Path, row: Cells) -> Content:
    """The column ``content``, parts in their order as JSON, or the short form in the columns ``image`` and ``text``."""
    short = content_of(row.get("text") or None, _pictures(path, row["id"], row.get("image")))
    if not row.get("content"):
        return short
    if short:
        raise SetError(
            "it also has text or image, which are its short form: leave one out", path, row["id"], "content"
        )
    try:
        parts = parts_from_json(json.loads(row["content"]))
    except ValueError as error:
        raise SetError(str(error), path, row["id"], "content") from None
    return tuple(_located(path, row["id"], part) for part in parts)


def _located(path: Path, name: str, part: Part) -> Part:
    """A part whose files are in the set's folder."""

    def located(ref: Any) -> Any:
        return _in_folder(path, name, ref) if isinstance(ref, str) else ref

    if isinstance(part, ImagePart):
        return replace(part, image=located(part.image))
    if isinstance(part, PdfPart):
        return replace(part, pdf=located(part.pdf))
    if isinstance(part, VideoPart):
        frames = part.video
        return replace(
            part, video=tuple(map(located, frames)) if isinstance(frames, tuple) else located(frames)
        )
    return part


PARTS = (TextPart, ImagePart, VideoPart, PdfPart)
"""Kinds of content."""


def kinds_of(table: Table) -> np.ndarray:
    """What each row consists of, as a sum of powers of two by `PARTS`, int64; no picture is read where statistics suffice."""
    kind_N = np.zeros(table.file.metadata.num_rows, np.int64)
    for place, name in enumerate(("text", "image")):  # of the short form
        if name in table.names:
            kind_N |= _filled(table, name).astype(np.int64) << place
    if "content" in table.names:
        kind_N |= [_kind_of(cell) for cell in table.read("content", null=True)]
    return kind_N


def _kind_of(content: str | None) -> int:
    shown = {type(part) for part in parts_from_json(json.loads(content))} if content else set()
    return sum(1 << place for place, part in enumerate(PARTS) if part in shown)


def _filled(table: Table, name: str) -> np.ndarray:
    """Where a column is neither null nor empty, (N,) bool."""
    kind, metadata, parts = table.file.schema_arrow.field(name).type, table.file.metadata, [np.zeros(0, bool)]
    read_rows = 1 << 16 if is_text(kind) else READ_ROWS
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(place) for place in range(metadata.num_columns)]
        nulls = {
            chunk.statistics and chunk.statistics.null_count
            for chunk in chunks
            if chunk.path_in_schema.partition(".")[0] == name
        }
        if pa.types.is_struct(kind) and 0 in nulls:  # pictures as {bytes, path}
            parts.append(np.ones(group.num_rows, bool))
        elif not pa.types.is_list(kind) and nulls == {group.num_rows}:
            parts.append(np.zeros(group.num_rows, bool))
        else:
            batches = table.file.iter_batches(batch_size=read_rows, row_groups=[number], columns=[name])
            parts.append(np.array([_has_content(cell) for batch in batches for cell in batch[0].to_pylist()]))
    return np.concatenate(parts)


def _has_content(cell: Any) -> bool:
    if isinstance(cell, dict):
        return any(map(_has_content, cell.values()))
    return any(map(_has_content, cell)) if isinstance(cell, list) else bool(cell)


def _pictures(path: Path, name: str, cell: Any) -> tuple[ImageRef, ...]:
    if cell is None or cell == "":
        return ()
    if isinstance(cell, list):
        return tuple(ref for part in cell for ref in _pictures(path, name, part))
    if isinstance(cell, dict):
        return _pictures(path, name, cell.get("bytes") or cell.get("path"))
    if isinstance(cell, bytes):
        return (cell,)
    if isinstance(cell, str):
        return (_in_folder(path, name, cell),)
    kind = type(cell).__name__
    raise SetError(f"it must be bytes, a path or {{bytes, path}}, got {kind}", path, name, "image")


def _in_folder(path: Path, name: str, cell: str) -> str:
    """Resolve a picture reference, which must stay in the set, since a foreign set could otherwise expose any file."""
    file, library, row = cell.partition(".parquet#")
    target = path.parent / (file + library.removesuffix("#"))
    real = _real(str(target.parent)) / target.name
    real = Path(os.path.realpath(real)) if real.is_symlink() else Path(os.path.normpath(real))
    folder = _real(str(path.parent))
    # the hub's cache links to files in blobs/; sets may share a library of pictures beside them
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(allowed) for allowed in (folder.parent if library else folder, *blobs)):
        raise SetError(
            f"{cell!r} is outside the set's folder: copy the file, or its content, into the set",
            path,
            name,
            "image",
            "outside",
        )
    return str(target) + (f"#{row}" if library else "")


@lru_cache(maxsize=1024)
def _real(folder: str) -> Path:
    return Path(os.path.realpath(folder))
