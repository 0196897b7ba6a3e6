"""List, inspect and filter the picture library, with a reason for each picture left out."""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
from PIL import Image

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.download import LOST, Lost, is_address, without_secrets
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, picture_bytes
from rge.common.parts import ImageRef
from rge.common.registry import load_plugins
from rge.content.near_duplicates import phash
from rge.tables import pictures as tables
from rge.tables.errors import TableError
from rge.tables.listing import Skipped
from rge.tables.names import resolved, web_address
from rge.tables.rows import SHEETS, TableFormat, is_missing, picture_cell

DUPLICATE, NEAR_DUPLICATE, TOO_SMALL = "same bytes as another picture", "near-duplicate", "too small"
NOT_UTF8 = "its name is not UTF-8"
ORIGINS = {"source": "source_column", "author": "author_column", "licence": "licence_column"}
"""Provenance fields of a picture, and the settings that name their columns."""
ENCODED_BY = {
    "id": "backslashreplace", "ref": "backslashreplace", "caption": "replace", "stamp": "backslashreplace",
}  # fmt: skip
"""Text fields of a row, and how characters that UTF-8 cannot encode are replaced."""
FETCHED_AT_ONCE = 32
"""Concurrent reads from an object store."""


class Library:
    """The pictures to start from; each pass reads them anew. Raises `UserError`: see `rge.tables.pictures.find`."""

    def __init__(self, config: LibraryConfig):
        self.config, self.files = config, tables.find(str(config.path), config.exclude)

    def skipped(self) -> Skipped:
        """What a folder holds besides its pictures; nothing of other libraries."""
        skipped, files = Skipped(), self.files
        if files.kind == "folder":
            deque(tables.picture_files(files.fs, files.root, files.is_local, files.exclude, skipped), 0)
        return skipped

    def rows(self, first: int = 0, *, pictures: bool = True) -> Iterator[dict[str, Any]]:
        """Yield every picture as ``id``, ``ref``, ``data``, ``caption`` (or None) and ``stamp``, in a fixed order.

        Either ``data`` holds the encoded bytes and ``ref`` is None, or ``ref`` is a path, ``library.parquet#id`` or an
        address. A row with neither has no picture. Equal stamps in two readings mean an unchanged picture.

        The first `first` pictures are skipped; without `pictures`, their bytes are not read. Raises `UserError`: missing
        columns or values, an unreadable file, or an empty library.
        """
        config, is_empty = self.config, not first
        # Those that only the export reads, too: a misspelt one must be reported before any cost arises.
        named = ("caption_column", *ORIGINS.values())
        columns = [getattr(config, setting) for setting in ("id_column", *named)]
        rows = self._listed([*filter(None, columns)], first=first, pictures=pictures)
        for row in self._with_columns(rows, *(() if first else named)):
            is_empty = False
            ref, data = self._picture(row)
            yield {
                "id": self._name(row),
                "ref": ref,
                "data": data,
                "caption": self._caption(row, strict=pictures),
                "stamp": row.stamp or _stamp(ref or ""),
            }
        if is_empty:
            raise UserError("it holds no picture", config.path, key="library.path", kind="empty")

    def _picture(self, row: tables.Row) -> tuple[str | None, bytes | None]:
        value = picture_cell(row.cells.get(self.config.image_column))
        if isinstance(value, bytes):
            return None, value
        if value and not is_missing(value):
            return self._reference(str(value)), None
        if self.files.kind == "table":
            raise self._error(row, "image_column", f"it has no {self.config.image_column}")
        return None, None

    def _caption(self, row: tables.Row, *, strict: bool) -> str | None:
        """A row's caption. Not ``strict``: a list as Python writes it, which runs may have been begun with."""
        # None is a setting, and "" the column of a folder's file names.
        column = self.config.caption_column
        value = None if column is None else row.cells.get(column)
        if strict and isinstance(value, list | dict) and value:
            other = f"{self.config.caption_column} is not a text but a {type(value).__name__}"
            raise self._error(
                row, "caption_column", f"{other}: write one into each cell, or choose another column"
            )
        if is_missing(value) or value is False or value in ([], {}):
            return None
        return str(value).strip()

    def _listed(self, columns: Sequence[str], **how: Any) -> Iterator[tables.Row]:
        form = TableFormat(self.config.quoting, self.config.sheet)
        try:
            yield from tables.picture_rows(self.files, self.config.image_column, columns, form=form, **how)
        except TableError as error:
            if error.kind == "missing column":
                error.reason += "; see library.image_column"
            raise UserError.caused_by(error, key="library.path") from None

    def _with_columns(self, rows: Iterable[tables.Row], *settings: str) -> Iterator[tables.Row]:
        """Pass the rows on; raises if none of them has a column that the user named in one of the settings."""
        usual = LibraryConfig()
        given = {key: getattr(self.config, key) for key in settings}
        named = {key: name for key, name in given.items() if name not in (None, getattr(usual, key))}
        # In JSON lines and tars the rows may have different keys.
        all_alike = self.files.kind == "parquet" or all(
            path.lower().endswith(SHEETS) for path in self.files.paths
        )
        present: Collection[str] = ()
        for row in rows:
            present = row.cells.keys()
            named = {key: name for key, name in named.items() if name not in present}
            if named and all_alike:
                break
            yield row
        if named and present:
            key, name = next(iter(named.items()))
            has = ", ".join(filter(None, present))
            raise UserError(f"there is no column {name}, but {has}", self.config.path, key=f"library.{key}")

    def _name(self, row: tables.Row) -> str:
        given = row.cells.get(tables.NAME)  # the file name, if each picture is a file
        if self.config.id_column is None:
            place = os.path.relpath(row.shard, self.files.root).replace(os.sep, "/")
            return str(given) if self.files.kind == "folder" else f"{place}/{given or row.number}"
        name = row.cells.get(self.config.id_column, given)
        if is_missing(name):
            raise self._error(row, "id_column", f"it has no {self.config.id_column}; null numbers the rows")
        return str(name)

    def _error(self, row: tables.Row, setting: str, reason: str) -> UserError:
        return UserError(reason, self.files.address(row.shard), f"row {row.number}", f"library.{setting}")

    def _reference(self, value: str) -> str:
        if self.files.kind == "folder":
            return value
        if self.files.is_local and (value.lower().startswith("file:") or "://" not in value):
            return str(Path(resolved(value, self.files.root)))
        if "://" in value:
            return web_address(value) or value
        return self.files.address(f"{self.files.root}/{value}")

    def origins(self, wanted: Collection[str]) -> dict[str, dict[str, str]]:
        """Source, author and licence of the wanted pictures, by id, as far as the library has them."""
        config = self.config
        column_of = {key: getattr(config, setting) for key, setting in ORIGINS.items()}
        rows = self._listed([*column_of.values(), *filter(None, [config.id_column])], pictures=False)
        return {
            name: {
                key: str(row.cells[column])
                for key, column in column_of.items()
                if not is_missing(row.cells.get(column))
            }
            for row in self._with_columns(rows, *ORIGINS.values())
            if (name := self._name(row)) in wanted
        }


def _stamp(ref: str) -> str:
    if is_address(ref):
        return without_secrets(ref)  # signatures change while the picture does not
    if "://" in ref:
        return ref
    path, mark, _ = ref.partition(".parquet#")
    return f"{ref}:{tables.file_stamp(path + '.parquet' if mark else ref)}"


def blocks(rows: Iterable[dict[str, Any]], most: int, most_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Group rows of `Library.rows` into blocks of at most `most` rows and `most_bytes` bytes of pictures."""
    block: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        more = len(row["data"] or b"")
        if block and (len(block) == most or size + more > most_bytes):
            yield block
            block, size = [], 0
        block.append(row)
        size += more
    if block:
        yield block


def fetched(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Read the bytes of pictures in object stores, `FETCHED_AT_ONCE` at a time.

    A picture that cannot be read keeps its address as ``ref``; `look` then reports it as missing. If it may exist, the reason
    is under `LOST`. Raises `UserError`: the store needs a package that is not installed.
    """

    def read(row: dict[str, Any]) -> dict[str, Any]:
        if row["ref"] is None or "://" not in row["ref"] or is_address(row["ref"]):
            return row
        try:
            fs, place = fsspec.core.url_to_fs(row["ref"])
        except (ImportError, ValueError) as error:
            raise UserError(str(error), without_secrets(row["ref"]), row["id"]) from None
        try:
            return {**row, "ref": None, "data": fs.cat_file(place)}
        except FileNotFoundError:
            return row
        except Exception as error:  # noqa: BLE001 - each store raises its own errors
            return {**row, LOST: Lost(type(error).__name__, may_pass=True)}

    left = iter(rows)
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        waiting = deque(pool.submit(read, row) for row in islice(left, FETCHED_AT_ONCE))
        while waiting:
            row = waiting.popleft().result()
            waiting.extend(pool.submit(read, row) for row in islice(left, 1))
            yield row


def inspect(rows: list[dict[str, Any]], config: LibraryConfig) -> list[dict[str, Any]]:
    """Rows of the table ``inspected``: hash and size of each picture, or the reason to leave it out (None for usable pictures).

    Decodes each picture once, on all cores.
    """
    for name in config.filters:
        load_filter(name)  # report a missing filter before opening any picture

    def looked(row: dict[str, Any]) -> dict[str, Any]:
        written = encodable(row)
        named = {name: written[name] for name in ENCODED_BY}
        if row["id"] == written["id"] and row["ref"] == written["ref"]:
            return named | look(row["data"] or row["ref"] or "", config.min_side_px, config.filters)
        return named | look(row["data"] or "", config.min_side_px, config.filters) | {"reason": NOT_UTF8}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(looked, rows))


def encodable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `Library.rows` with its texts made encodable as UTF-8; different ids stay different."""
    return row | {
        name: row[name] and row[name].encode("utf-8", errors).decode() for name, errors in ENCODED_BY.items()
    }


def look(ref: ImageRef, min_side_px: int, filters: Sequence[str] = ()) -> dict[str, Any]:
    """Hashes and size of a picture, or the reason to leave it out; `filters` as in `load_filter`."""
    found: dict[str, Any] = {"sha256": None, "width": None, "height": None, "phash": None, "reason": None}
    try:
        data = picture_bytes(ref)
    except ImageError:
        return {**found, "reason": "missing"}
    try:
        image = load_image(data)
    except ImageError as error:
        known = error.kind in ("animated", "huge", "truncated")
        return {**found, "reason": error.kind if known else "unreadable"}
    found |= {"sha256": hashlib.sha256(data).hexdigest(), "width": image.width, "height": image.height}
    found["phash"] = phash(image)
    return {**found, "reason": TOO_SMALL if min(image.size) < min_side_px else unwanted(image, filters)}


@lru_cache(maxsize=16)
def load_filter(name: str) -> Callable[[Image.Image], str | None]:
    """Load a filter of ``library.filters``, once per process. Raises `UserError`: it does not exist."""
    module, mark, function = name.partition(":")
    if not mark:
        raise UserError(f"it must be module:function; got {name!r}", key="library.filters")
    load_plugins([module])  # also finds modules in the current folder
    found = getattr(sys.modules[module], function, None)
    if not callable(found):
        raise UserError(f"the module has no function {function!r}", module, key="library.filters")
    return found


def unwanted(image: Image.Image, filters: Sequence[str]) -> str | None:
    """The reason of the first filter that rejects a picture, or None. Raises `UserError`: a reason is not a text."""
    for name in filters:
        reason = load_filter(name)(image)
        if reason is not None and not isinstance(reason, str):
            raise UserError(
                f"it must return a reason or None, got {type(reason).__name__}", name, key="library.filters"
            )
        if reason:
            return reason
    return None
