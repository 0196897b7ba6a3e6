"""Detect pictures that were added, removed or changed since a library was read.

The seed stage's table ``inspected`` is never rewritten; ``library.json`` next to it records what has changed since.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa

from data_prep.rmir.pictures.library import Library, encodable, fetched
from rge.common.errors import UserError
from rge.common.files import read_json, write_text
from rge.common.images import ImageError, picture_bytes
from rge.tables.pictures import stamp_of

SHOWN = 3
"""Picture names listed in a message."""


@dataclass
class LibraryState:
    """Changes accepted since the library was first read."""

    # stamp of each tar; while all stamps are equal, nothing changed and no tar has to be read
    files: dict[str, str] = field(default_factory=dict)
    # rows of ``inspected`` whose picture was removed or changed
    gone: list[int] = field(default_factory=list)
    captions: dict[str, str | None] = field(default_factory=dict)  # of pictures whose caption changed, by id
    # of pictures whose file was touched but not changed, by id
    stamps: dict[str, str] = field(default_factory=dict)
    in_order: bool = True  # whether ``inspected`` holds the library's first pictures, in its order
    # for each extension of a finished seed set: rows of ``inspected`` before it, and counts of its changes
    extensions: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "LibraryState":
        """Load the state of a seed stage, or an empty one."""
        return cls(**(read_json(folder / "library.json") or {}))

    def write(self, folder: Path) -> None:
        """Save the state."""
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
        """Summary of the changes, for messages."""
        kinds = {
            "added": self.added, "removed": self.removed, "changed": self.changed, "given another caption": [*self.captions],
        }  # fmt: skip
        return "; ".join(
            f"{len(ids):,} {kind} ({', '.join(map(repr, ids[:SHOWN]))}{', ...' if len(ids) > SHOWN else ''})"
            for kind, ids in kinds.items()
            if ids
        )


def files_of(library: Library) -> dict[str, str]:
    """Stamps of the files of a tar library, whose rows cannot be listed without reading all of it; else empty."""
    files = library.files
    return {path: stamp_of(files, path) for path in files.paths} if files.kind == "tar" else {}


def compare(library: Library, inspected: pa.Table, state: LibraryState) -> Changes:
    """Compare a library with the table ``inspected`` and the changes accepted since.

    Only pictures with a new stamp are opened. Raises `UserError`: the library cannot be read, or an id occurs twice.
    """
    gone = set(state.gone)
    columns = (inspected[name].to_pylist() for name in ("id", "stamp", "caption", "sha256"))
    known = {row[0]: row[1:] for number, row in enumerate(zip(*columns, strict=True)) if number not in gone}
    order, found, seen, touched = iter(known), Changes(), set(), set()
    for row in map(encodable, library.rows(pictures=False)):
        name = row["id"]
        if name in seen:
            raise UserError("the id occurs twice", library.config.path, key=name, kind="twice")
        seen.add(name)
        found.in_order &= next(order, name) == name
        if name not in known:
            found.added.append(name)
            continue
        stamp, caption, _ = known[name]
        if row["stamp"] != state.stamps.get(name, stamp):
            touched.add(name)
        before = state.captions.get(name, caption)
        # Runs may have been begun when a missing cell of pandas was read as this text.
        if row["caption"] != (None if before == "nan" and row["caption"] is None else before):
            found.captions[name] = row["caption"]
    found.removed = [name for name in known if name not in seen]
    if touched:
        _inspect_changed(library, touched, {name: digest for name, (_, _, digest) in known.items()}, found)
    return found


def _inspect_changed(
    library: Library, touched: set[str], digests: dict[str, str | None], found: Changes
) -> None:
    """Separate changed pictures, or new addresses, from those whose file was only touched."""
    rows = (row for row in library.rows() if encodable(row)["id"] in touched)
    for row in map(encodable, fetched(rows)):
        name = row["id"]
        try:
            digest = hashlib.sha256(picture_bytes(row["data"] or row["ref"] or "")).hexdigest()
        except ImageError:  # missing, or at a web address
            digest = None
        if digest is not None and digest == digests[name]:
            found.stamps[name] = row["stamp"]
        else:
            found.changed.append(name)
            found.captions.pop(name, None)
