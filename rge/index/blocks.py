"""Blocks of a source: what a cluster's device embeds at once, and where finished ones wait until the command commits all of them.

A finished block is a Parquet file in ``OUT.parts``, named by its items. Whoever embeds the same items again writes the same file, so
that neither a second attempt nor an actor that outlives its command can harm what is there.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.index.sources import Entry
from rge.tables.stores import is_stored, open_store

T = TypeVar("T")
WINDOW = 4
"""Batches that are read, sorted by length and embedded together."""
BLOCK_ROWS = 1024
"""About as many items are a block of work for one of a cluster's devices: what is done again if the device dies."""
ABOUT = "about.json"


def blocks_of(items: Sequence[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Blocks of whole windows, so that all items are embedded next to the same others as in one process."""
    window = WINDOW * batch_size
    size = window * max(1, BLOCK_ROWS // window)
    for at in range(0, len(items), size):
        yield items[at : at + size]


class Finished:
    """The finished blocks in a folder or at an address of an object store."""

    def __init__(self, folder: str | Path):
        self.folder = str(folder)
        if is_stored(self.folder):
            self._fs, self._root = open_store(self.folder)
        else:
            self._fs, self._root = fsspec.filesystem("file"), self.folder

    def start(self, about: dict[str, Any]) -> None:
        """Note what the blocks are made with, but for the path of the checkpoint.

        Raises:
            UserError: there are blocks that were made with something else.
        """
        before = json.loads(self._fs.cat_file(f"{self._root}/{ABOUT}")) if self else about
        differs = [key for key, value in about.items() if before.get(key) != value and key != "checkpoint"]
        if differs:
            changes = ", ".join(f"{key}: {before.get(key)!r}, now {about[key]!r}" for key in differs)
            raise UserError(
                f"it was started with other settings ({changes}): continue with the same settings, delete it, or"
                f" give another out=",
                self.folder,
            ).about(*differs)
        self._put(ABOUT, json.dumps(about, indent=1, ensure_ascii=False).encode())

    def write(self, rows: pa.Table) -> None:
        """Write a block, whose rows have ``id`` and ``stamp`` of their entries."""
        keys = json.dumps([rows["id"].to_pylist(), rows["stamp"].to_pylist()])
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink)
        name = hashlib.sha256(keys.encode()).hexdigest()[:32]
        self._put(f"{name}.parquet", sink.getvalue().to_pybytes())

    def left(self, entries: Sequence[Entry], batch_size: int) -> list[list[Entry]]:
        """Blocks of the entries, without those that are in a finished block as they are now.

        The blocks are those of all entries, so that what is finished does not change which others the rest is embedded next to.
        """
        done = {key for path in self._paths() for key in _keys(self._read(path, ["id", "stamp"]))}
        blocks = blocks_of(entries, batch_size)
        left = ([entry for entry in block if (entry.id, entry.stamp) not in done] for block in blocks)
        return list(filter(None, left))

    def tables(self, entries: Sequence[Entry]) -> Iterator[pa.Table]:
        """The rows of these entries, each once, block by block in the order of the entries."""
        place_of = {(entry.id, entry.stamp): place for place, entry in enumerate(entries)}
        first: dict[str, int] = {}
        for path in self._paths():
            places = [place_of[key] for key in _keys(self._read(path, ["id", "stamp"])) if key in place_of]
            if places:
                first[path] = min(places)
        for path in sorted(first, key=lambda path: first[path]):
            rows = self._read(path)
            # What was embedded twice is left out the second time.
            is_left = pa.array([place_of.pop(key, None) is not None for key in _keys(rows)], pa.bool_())
            yield rows.filter(is_left)

    def __bool__(self) -> bool:
        return bool(self._paths())

    def remove(self) -> None:
        """Remove all, once what they hold is elsewhere."""
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def _paths(self) -> list[str]:
        if not self._fs.exists(self._root):
            return []
        self._fs.invalidate_cache(self._root)  # others write here
        return sorted(path for path in self._fs.ls(self._root, detail=False) if path.endswith(".parquet"))

    def _read(self, path: str, columns: list[str] | None = None) -> pa.Table:
        with self._fs.open(path, "rb") as file:
            return pq.read_table(file, columns=columns)

    def _put(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all, as an object store does anyway."""
        if is_stored(self.folder):
            self._fs.pipe_file(f"{self._root}/{name}", data)
        else:
            write_bytes(Path(self._root) / name, data)


def _keys(rows: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(rows["id"].to_pylist(), rows["stamp"].to_pylist(), strict=True)
