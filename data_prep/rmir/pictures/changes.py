"""Detect pictures that were added, removed or changed since the seed stage read a library."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.rmir.pictures.download import is_address
from data_prep.rmir.pictures.library import Library, encodable, fetched
from rge.common.errors import UserError
from rge.common.files import read_json, write_json
from rge.common.images import ImageError, picture_bytes
from rge.tables.pictures import stamp_of

SHOWN = 3
"""Picture names listed in a message."""


def note_files(library: Library, notes: Path, stamps: Mapping[str, str]) -> None:
    """Write what saves opening files again: stamps of tars, and of pictures whose file was touched but not changed, by id."""
    write_json(notes, {"files": _files_of(library), "stamps": dict(stamps)})


def changes(library: Library, inspected: pa.Table, notes: Path, *, complete: bool) -> str:
    """How a library differs from the table ``inspected``, in words; "" if it does not.

    Only pictures with a new stamp are opened.

    Args:
        library: as it is now.
        inspected: as it was read.
        notes: file of `note_files`, which is brought up to date if nothing changed.
        complete: the whole library was read; if not, others may have been added.

    Raises:
        UserError: the library cannot be read, or an id occurs twice.
    """
    noted = read_json(notes) or {"files": {}, "stamps": {}}
    if noted["files"] and noted["files"] == _files_of(library):
        return ""
    stamps = noted["stamps"]
    columns = (inspected[name].to_pylist() for name in ("id", "stamp", "caption", "sha256"))
    known = {name: about for name, *about in zip(*columns, strict=True)}
    listed = _listed(library)
    shared = [name for name in known if name in listed]
    touched = [name for name in shared if listed[name][0] != stamps.get(name, known[name][0])]
    kinds = {
        "added": [name for name in listed if name not in known] if complete else [],
        "removed": [name for name in known if name not in listed],
        "changed": _changed(library, {name: known[name][2] for name in touched}, stamps),
        "given another caption": [name for name in shared if listed[name][1] != known[name][1]],
    }
    found = "; ".join(f"{len(ids):,} {kind} ({_some(ids)})" for kind, ids in kinds.items() if ids)
    if not found:
        note_files(library, notes, stamps)
    return found


def _listed(library: Library) -> dict[str, tuple[str, str | None]]:
    """Stamp and caption of each picture of a library, by id."""
    listed: dict[str, tuple[str, str | None]] = {}
    for row in map(encodable, library.rows(pictures=False)):
        if row["id"] in listed:
            raise UserError(f"library.path {library.config.path}: the id {row['id']!r} occurs twice")
        listed[row["id"]] = row["stamp"], row["caption"]
    return listed


def _changed(library: Library, digests: Mapping[str, str | None], stamps: dict[str, str]) -> list[str]:
    """Pictures whose content no longer has their digest; the stamps of the others are noted."""
    found = []
    rows = (row for row in library.rows() if encodable(row)["id"] in digests) if digests else ()
    for row in map(encodable, fetched(rows)):
        if (digest := digests[row["id"]]) is not None and _digest(row) == digest:
            stamps[row["id"]] = row["stamp"]
        else:
            found.append(row["id"])
    return found


def _files_of(library: Library) -> dict[str, str]:
    """Stamps of the files of a tar library, whose rows cannot be listed without reading all of it; else empty."""
    files = library.files
    return {path: stamp_of(files, path) for path in files.paths} if files.kind == "tar" else {}


def _digest(row: dict[str, Any]) -> str | None:
    """SHA-256 of a picture's bytes; None if it is missing, unreadable or at a web address (a new address is a new picture)."""
    if row["data"] is None and (row["ref"] is None or is_address(row["ref"])):
        return None
    try:
        return hashlib.sha256(picture_bytes(row["data"] or row["ref"])).hexdigest()
    except ImageError:
        return None


def _some(ids: list[str]) -> str:
    return ", ".join(map(repr, ids[:SHOWN])) + (", ..." if len(ids) > SHOWN else "")
