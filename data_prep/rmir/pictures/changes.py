"""Detect pictures that were added, removed or changed since a library was read.

The table ``inspected`` of the seed stage is never rewritten. ``library.json`` beside it holds what no longer applies.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.rmir.pictures.download import is_address
from data_prep.rmir.pictures.library import Library, LibraryError, encodable, fetched
from rge.common.files import write_text
from rge.common.images import ImageError, picture_bytes
from rge.tables.pictures import stamp_of

SHOWN = 3
"""Names of pictures in a message."""


@dataclass
class LibraryState:
    """What was settled since the library was first read."""

    # stamp of each tar; while all are as they were, none has to be read to know that nothing changed
    files: dict[str, str] = field(default_factory=dict)
    # rows of ``inspected`` whose picture was removed or changed
    gone: list[int] = field(default_factory=list)
    captions: dict[str, str | None] = field(default_factory=dict)  # of pictures whose caption changed, by id
    # of pictures whose file was touched and not changed, by id
    stamps: dict[str, str] = field(default_factory=dict)
    in_order: bool = True  # whether ``inspected`` holds the library's first pictures, in its order
    # rows of ``inspected`` before each extension of a finished seed set, and what it brought
    extensions: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "LibraryState":
        """That of a seed stage; an empty one where there is none."""
        path = folder / "library.json"
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls()

    def write(self, folder: Path) -> None:
        """Keep it."""
        write_text(folder / "library.json", json.dumps(asdict(self)) + "\n")


@dataclass
class Changes:
    """How a library differs from ``inspected``; ids in the order of the library or the table."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    captions: dict[str, str | None] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    in_order: bool = True

    def __str__(self) -> str:
        """In words."""
        kinds = {
            "added": self.added, "removed": self.removed, "changed": self.changed, "given another caption": [*self.captions],
        }  # fmt: skip
        return "; ".join(f"{len(ids):,} {kind} ({_some(ids)})" for kind, ids in kinds.items() if ids)


def _some(ids: list[str]) -> str:
    return ", ".join(map(repr, ids[:SHOWN])) + (", ..." if len(ids) > SHOWN else "")


def files_of(library: Library) -> dict[str, str]:
    """Stamp of each file of a library whose rows cannot be listed without reading all of it."""
    files = library.files
    return {path: stamp_of(files, path) for path in files.paths} if files.kind == "tar" else {}


def compare(library: Library, inspected: pa.Table, state: LibraryState) -> Changes:
    """How a library differs from what was read of it (with the rows that have gone since) and settled before.

    Only pictures whose stamp is another one are opened.

    Raises:
        LibraryError: the library cannot be read, or an id occurs twice.
    """
    gone = set(state.gone)
    columns = (inspected[name].to_pylist() for name in ("id", "stamp", "caption", "sha256"))
    known = {row[0]: row[1:] for number, row in enumerate(zip(*columns, strict=True)) if number not in gone}
    order, found, seen, touched = iter(known), Changes(), set(), set()
    for row in map(encodable, library.rows(pictures=False)):
        name = row["id"]
        if name in seen:
            raise LibraryError(f"library.path {library.config.path}: the id {name!r} occurs twice")
        seen.add(name)
        found.in_order &= next(order, name) == name
        if name not in known:
            found.added.append(name)
            continue
        stamp, caption, _ = known[name]
        if row["stamp"] != state.stamps.get(name, stamp):
            touched.add(name)
        if row["caption"] != state.captions.get(name, caption):
            found.captions[name] = row["caption"]
    found.removed = [name for name in known if name not in seen]
    if touched:
        _inspect_changed(library, touched, {name: digest for name, (_, _, digest) in known.items()}, found)
    return found


def _inspect_changed(
    library: Library, touched: set[str], digests: dict[str, str | None], found: Changes
) -> None:
    """Tell pictures that changed from those whose file was only touched."""
    rows = (row for row in library.rows() if encodable(row)["id"] in touched)
    for row in map(encodable, fetched(rows)):
        name = row["id"]
        if digests[name] is not None and _digest(row) == digests[name]:
            found.stamps[name] = row["stamp"]
        else:
            found.changed.append(name)
            found.captions.pop(name, None)


def _digest(row: dict[str, Any]) -> str | None:
    """Of a picture's bytes; None where another address says that it is another picture."""
    if row["data"] is None and (row["ref"] is None or is_address(row["ref"])):
        return None
    try:
        return hashlib.sha256(picture_bytes(row["data"] or row["ref"])).hexdigest()
    except ImageError:
        return None


def rows_of(inspected: pa.Table, ids: Iterable[str], gone: Iterable[int]) -> list[int]:
    """The rows of pictures, among those that have not gone before."""
    wanted, before = set(ids), set(gone)
    return [
        row for row, name in enumerate(inspected["id"].to_pylist()) if name in wanted and row not in before
    ]
