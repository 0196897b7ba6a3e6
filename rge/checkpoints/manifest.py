"""``done.json``: the files of a folder with sizes and checksums, written last, checked before use."""

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DONE = "done.json"


def write_manifest(
    folder: Path, meta: dict[str, Any], *, files: Iterable[Path] | None = None, checksums: bool = True
) -> None:
    """Flush a folder to the disk and write its ``done.json`` with `meta` and a list of `files` (None: all).

    With `checksums` the files are read back; otherwise only sizes are recorded.
    """
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in every:
        flush(path)
    listed = {}
    for path in every if files is None else sorted(files):
        crc32 = checksum(path) if checksums else None
        listed[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": crc32}
    (folder / DONE).write_text(json.dumps({**meta, "files": listed}))
    flush(folder / DONE)
    flush(folder)


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """The first missing, truncated or changed file of a folder with a ``done.json``, or None; by size, and with `contents` checksum."""
    try:
        files = json.loads((folder / DONE).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{DONE} cannot be read ({type(error).__name__})"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if contents and expected["crc32"] is not None and checksum(file) != expected["crc32"]:
            return f"{name} does not match its checksum"
    return None


def discard(folder: Path) -> None:
    """Delete a state or checkpoint, if it exists; renamed first, so that a kill does not leave half of it under its name."""
    if folder.exists():
        gone = folder.with_name(f"tmp_{folder.name}_old")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def flush(path: Path, *, evict: bool = False) -> None:
    """Flush a file's content, or a folder's list of names, to the disk; `evict` drops it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if evict:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with path.open("rb") as content:
        while block := content.read(1 << 22):
            total = zlib.crc32(block, total)
    return total
