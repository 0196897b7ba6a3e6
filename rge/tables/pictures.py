"""Iterate over a collection of pictures with only the current rows in memory.

A folder of pictures, a table that lists them, Parquet files, WebDataset tars, or a folder saved by `datasets`; on this machine or
at any address that fsspec supports (``s3://``, ``gs://``, ``hf://``, ``memory://`` ...):

    files = find("photos")                                     # or "shards/*.parquet", "s3://bucket/folder", "list.csv"
    for row in picture_rows(files, "image", ["id", "caption"]):
        row.cells["image"]                                     # encoded bytes, a path, an address, or None

The order is always the same, so `first` continues where an earlier run stopped. ``row.stamp`` changes when a picture may have
changed, without opening it.
"""

import glob
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from rge.common.images import SUFFIXES
from rge.tables.errors import TableError, reading, reason
from rge.tables.listing import Exclude, Skipped, files_below, is_hidden
from rge.tables.rows import (
    AS_FOUND,
    TABLES,
    Cells,
    TableFormat,
    is_text,
    json_object,
    open_parquet,
    parquet_rows,
    table_rows,
)
from rge.tables.stores import open_store

KINDS = {
    **dict.fromkeys(TABLES, "table"), ".parquet": "parquet", ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar",
}  # fmt: skip
SAVED = ("state.json", "dataset_dict.json")
"""A folder written by `datasets.Dataset.save_to_disk` contains one of these."""
SAVED_ROWS = 32
"""Rows of such a folder that are decoded at once."""
NAME = ""
"""Column with the name of a file in a folder or of a sample in a tar."""


@dataclass(frozen=True, slots=True)
class Row:
    """One picture of a collection."""

    shard: str  # the file that contains it; for a folder of pictures, the folder
    number: int  # from 1, within the shard
    cells: Cells  # by column; a picture is bytes, a path or address, or a dict with one of them
    # Changes when the picture may have changed; None if the cell only refers to a picture elsewhere.
    stamp: str | None = None


@dataclass(frozen=True)
class Files:
    """The files of a collection."""

    fs: Any  # fsspec file system
    kind: str  # folder, table, parquet, tar or saved
    root: str  # the folder itself, or that of the files; a path of `fs`
    paths: tuple[str, ...]  # in order; empty for a folder
    is_local: bool  # whether they can be opened by their paths
    exclude: Exclude  # what is left out of a folder

    def address(self, path: str) -> str:
        """A file's address, protocol included."""
        return path if self.is_local else self.fs.unstrip_protocol(path)


def find(path: str, exclude: Sequence[str] = ()) -> Files:
    """Find the files of a collection: a folder, a file, a pattern such as ``shards/*.parquet``, or the address of one.

    `exclude` are patterns of what is left out of a folder, see `Exclude`.

    Raises:
        UserError: such a pattern is not valid.
        TableError: it does not exist, needs a package that is not installed, or is of an unsupported kind.
    """
    left_out = Exclude(exclude)
    fs, place = open_store(path)
    is_local = "://" not in path
    place = path if is_local else place  # as given, so that references stay short
    try:
        if fs.isdir(place):
            return _in_folder(path, fs, place.rstrip("/") or "/", is_local, left_out)
        files = [place] if fs.isfile(place) else _matching(fs, place, is_local)
    except TableError:
        raise
    except Exception as error:  # every file system has its own errors
        raise TableError(f"it cannot be read: {reason(error)}", path) from error
    if not files:
        raise TableError("it does not exist", path, kind="missing")
    return Files(fs, _kind_of(path, files), os.path.dirname(files[0]), tuple(files), is_local, left_out)


def _matching(fs: Any, pattern: str, is_local: bool) -> list[str]:
    if not any(mark in pattern for mark in "*?["):
        return []
    if is_local:
        return sorted(map(os.path.normpath, glob.glob(pattern, recursive=True)))
    root = os.path.dirname(re.split(r"[*?[]", pattern)[0])
    return sorted(file for file in fs.glob(pattern) if not is_hidden(file.removeprefix(root).strip("/")))


def would_find(pattern: str, file: Path) -> bool:
    """Whether `find` of a pattern on this machine would find an absolute path, if it existed."""
    fixed = os.path.dirname(re.split(r"[*?[]", pattern)[0])
    root, rest = Path(fixed).resolve(), pattern.removeprefix(fixed).strip("/").split("/")
    return file.is_relative_to(root) and _fits(file.relative_to(root).parts, rest)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not parts:
        return not parts and set(pattern) <= {"**"}
    is_hidden = parts[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or (not is_hidden and _fits(parts[1:], pattern))
    return not is_hidden and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _in_folder(path: str, fs: Any, root: str, is_local: bool, exclude: Exclude) -> Files:
    if any(fs.isfile(f"{root}/{name}") for name in SAVED):
        return Files(fs, "saved", root, (), is_local, exclude)
    if next(picture_files(fs, root, is_local, exclude), None) is not None:
        return Files(fs, "folder", root, (), is_local, exclude)
    skipped = Skipped()
    every = sorted(file for file, _ in files_below(fs, root, is_local, exclude, skipped))
    for kind in ("parquet", "tar"):
        if files := [file for file in every if _ending_kind(file) == kind]:
            return Files(fs, kind, root, tuple(files), is_local, exclude)
    for file in every:
        skipped.add(file)
    only = f"; it holds {skipped}" if skipped else ""
    raise TableError(
        f"it holds no picture ({', '.join(SUFFIXES)}), no Parquet file and no tar, and was not saved by `datasets`{only}",
        path,
        kind="empty",
    )


def _ending_kind(file: str) -> str | None:
    return next((kind for ending, kind in KINDS.items() if file.lower().endswith(ending)), None)


def _kind_of(path: str, files: Sequence[str]) -> str:
    kinds = {_ending_kind(file) for file in files}
    kind = kinds.pop()
    if kinds or kind is None or (kind == "table" and len(files) > 1):
        raise TableError(
            f"it must be a folder, one {', '.join(TABLES[:-1])}, or one or more .parquet or .tar",
            path,
            kind="form",
        )
    return kind


def picture_rows(
    files: Files,
    image: str = "image",
    columns: Sequence[str] = (),
    *,
    first: int = 0,
    pictures: bool = True,
    form: TableFormat = AS_FOUND,
) -> Iterator[Row]:
    """The rows of a collection from row `first` on, in an order that is always the same.

    Reads the column `image` and further `columns`, as far as they exist. Without `pictures`, cells with encoded pictures are missing
    or None.

    Raises:
        TableError: a file cannot be read.
    """
    readers: dict[str, Callable[..., Iterator[Row]]] = {
        "folder": _folder,
        "table": partial(_table, form),
        "parquet": _parquet,
        "tar": _tars,
        "saved": _saved,
    }
    with reading(files.address(files.root)):
        for row in readers[files.kind](files, image, columns, first, pictures):
            if pictures and isinstance(row.cells.get(image), list):
                raise TableError(
                    "it has a list of pictures: write one row for each",
                    files.address(row.shard),
                    f"row {row.number}",
                    image,
                )
            yield row


def stamp_of(files: Files, path: str) -> str:
    """Size and modification time of a file, or the store's substitute."""
    return store_stamp(files.fs.info(path))


def store_stamp(info: Mapping[str, Any]) -> str:
    """Size and modification time of a file, or the store's substitute, from its `fsspec` description."""
    times = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    return f"{info.get('size')}:{next((info[key] for key in times if info.get(key) is not None), '')}"


# -------------------------------------------------------------------------------------------------------------- folder


def picture_files(
    fs: Any, root: str, is_local: bool, exclude: Exclude | None = None, skipped: Skipped | None = None
) -> Iterator[tuple[str, str]]:
    """Path and stamp of the picture files below a folder, by name and grouped by folder; `skipped` counts the others."""
    for file, info in files_below(fs, root, is_local, exclude, skipped):
        if file.lower().endswith(SUFFIXES):
            yield file, file_stamp(file) if info is None else store_stamp(info)
        elif skipped is not None:
            skipped.add(file)


def file_stamp(file: str | Path) -> str:
    """Size and modification time of a local file."""
    try:
        stat = os.stat(file)
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return "gone"
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _folder(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    number = 0
    stamped = picture_files(files.fs, files.root, files.is_local, files.exclude)
    for folder, group in groupby(stamped, key=lambda pair: os.path.dirname(pair[0])):
        # `a.jpg` beside `a.png`: both keep their ending, so that no id depends on the order.
        pairs = list(group)
        stems = Counter(os.path.splitext(file)[0] for file, _ in pairs)
        for file, stamp in pairs:
            number += 1
            if number > first:
                stem = os.path.splitext(file)[0]
                name = os.path.relpath(file if stems[stem] > 1 else stem, files.root).replace(os.sep, "/")
                yield Row(folder, number, {NAME: name, image: files.address(file)}, stamp)


# -------------------------------------------------------------------------------------------------------------- tables


def _table(
    form: TableFormat, files: Files, image: str, columns: Sequence[str], first: int, pictures: bool
) -> Iterator[Row]:
    (path,) = files.paths
    for number, cells in enumerate(table_rows(path, first=first, fs=files.fs, form=form), start=first + 1):
        yield Row(path, number, cells)


def _parquet(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    for path in files.paths:
        with reading(files.address(path)), open_parquet(path, files.fs) as file:
            encoded = _check_column(path, image, file.schema_arrow)
            wanted = [*columns] if encoded and not pictures else [image, *columns]
            stamp = stamp_of(files, path) if encoded else None
            skipped = min(first, file.metadata.num_rows)
            for number, cells in enumerate(parquet_rows(file, wanted, skipped), start=skipped + 1):
                yield Row(path, number, cells, stamp)
            first -= skipped


def _check_column(path: str, image: str, schema: Any) -> bool:
    """Whether a table contains encoded pictures; raises `TableError` if there is no such column."""
    if image not in schema.names:
        why = f"there is no such column; there are: {', '.join(schema.names)}"
        raise TableError(why, path, key=image, kind="missing column")
    kind = schema.field(image).type
    return not is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


# ---------------------------------------------------------------------------------------------------------- WebDataset


def _tars(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    rows = (row for path in files.paths for row in _tar(files, path, image, pictures))
    yield from islice(rows, first, None)


def _tar(files: Files, path: str, image: str, pictures: bool) -> Iterator[Row]:
    """A sample is a run of files with the same name: its pictures, its text and the values of its JSON."""
    number, stamp = 0, stamp_of(files, path)
    with (
        reading(files.address(path)),
        files.fs.open(path, "rb") as data,
        tarfile.open(fileobj=data, mode="r|*") as tar,
        closing(_Links(files.fs, path)) as links,
    ):

        def text(member: tarfile.TarInfo) -> bytes:
            content = _content(tar, member, links)
            if content is None:
                raise TableError(
                    f"it is a link to {member.linkname}, which is not in the archive: pack the file itself, as "
                    "tar --dereference does",
                    path,
                    member.name,
                )
            return content

        for key, members in groupby(_members(tar), key=lambda member: _key(member.name)):
            cells: Cells = {}
            found: list[tuple[str, bytes | None]] = []
            for member in members:
                ending = member.name[len(key) + 1 :].lower()
                if f".{ending}".endswith(SUFFIXES):
                    found.append((ending, _content(tar, member, links) if pictures else None))
                elif ending == "json":
                    cells = {**json_object(text(member), path, member.name), **cells}
                elif ending in ("txt", "caption"):
                    cells["caption"] = text(member).decode("utf-8-sig", "replace")
            for ending, picture in found:
                number += 1
                name = key if len(found) == 1 else f"{key}.{ending}"
                yield Row(path, number, {**cells, NAME: name, image: picture}, stamp)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # keeps the list from growing
        if (member.isfile() or member.islnk() or member.issym()) and not os.path.basename(
            member.name
        ).startswith("."):
            yield member


def _key(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0])


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, links: "_Links") -> bytes | None:
    """A member's bytes, or those of the member that it is a link to; None if that is not in the archive."""
    if not member.isfile():
        return links.content(member)
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


class _Links:
    """Links within an archive: GNU tar stores equal files as hard links. The archive is opened a second time for the first one."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path, self._open = fs, path, ExitStack()

    def content(self, link: tarfile.TarInfo) -> bytes | None:
        """The bytes that a link leads to; None if it leads out of the archive, to a folder or in a circle."""
        name, seen = _target(link), set[str]()
        while name not in seen:
            seen.add(name)
            found = self._members.get(name)
            if found is None:
                return None
            if not isinstance(found, str):
                file = self._tar.extractfile(found)
                assert file is not None
                return file.read()
            name = found
        return None

    def close(self) -> None:
        """Close the archive if it was opened."""
        self._open.close()

    @cached_property
    def _tar(self) -> tarfile.TarFile:
        data = self._open.enter_context(self._fs.open(self._path, "rb"))
        return self._open.enter_context(tarfile.open(fileobj=data, mode="r:*"))

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo | str]:
        """Files, and the targets of links, by their normalised names."""
        return {
            posixpath.normpath(member.name): member if member.isfile() else _target(member)
            for member in self._tar
            if member.isfile() or member.islnk() or member.issym()
        }


def _target(link: tarfile.TarInfo) -> str:
    """The name that a link leads to: a hard link's counts from the top of the archive, a symbolic link's from its own folder."""
    folder = posixpath.dirname(link.name) if link.issym() else ""
    return posixpath.normpath(posixpath.join(folder, link.linkname))


# ------------------------------------------------------------------------------------------------------------ datasets


def _saved(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    import datasets

    address = files.address(files.root)
    try:
        saved = datasets.load_from_disk(address)
    except (ValueError, TypeError, KeyError) as error:
        raise TableError(f"it cannot be read by the library datasets: {error}", address) from error
    splits = saved.items() if isinstance(saved, datasets.DatasetDict) else [(saved.split, saved)]
    several = len(splits) > 1
    for name, split in splits:
        encoded = _check_column(address, image, split.data.schema)
        skipped, first = min(first, len(split)), max(0, first - len(split))
        wanted = [column for column in dict.fromkeys((image, *columns)) if column in split.column_names]
        if encoded and not pictures:
            wanted.remove(image)
        part = split.split or (name if several else None)
        place = address if part is None else f"{address}/{part}"
        tables = split.select_columns(wanted).with_format("arrow")  # mapped from the disk
        for start in range(skipped, len(split), SAVED_ROWS):
            some = range(start, min(start + SAVED_ROWS, len(split)))
            rows = tables[some].to_pylist() if wanted else [{}] * len(some)  # without columns it has no rows
            for number, cells in zip(some, rows, strict=True):
                yield Row(place, number + 1, cells, split._fingerprint if encoded else None)
