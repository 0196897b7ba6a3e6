"""Iterate over a collection of pictures with only the current rows in memory.

A folder of pictures, a table that lists them, Parquet files, WebDataset tars, or what `datasets` saved; on this machine or
at any address that fsspec knows (``s3://``, ``gs://``, ``hf://``, ``memory://`` ...):

    files = find("photos")                                     # or "shards/*.parquet", "s3://bucket/folder", "list.csv"
    for row in picture_rows(files, "image", ["id", "caption"]):
        row.cells["image"]                                     # encoded bytes, a path, an address, or None

The order is always the same, and `first` continues where an earlier reading stopped. ``row.stamp`` tells whether a picture
may have changed since, without opening it.
"""

import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import fsspec

from rge.tables.rows import (
    TableError,
    is_text,
    json_object,
    open_parquet,
    parquet_rows,
    reading,
    reason,
    table_rows,
)

PICTURES = {
    ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm", ".heic", ".heif",
}  # fmt: skip
"""Endings of picture files; what Pillow cannot read of them is reported as unreadable, not passed over."""
SUFFIXES = tuple(sorted(PICTURES))
KINDS = {
    ".parquet": "parquet", ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar",
    ".csv": "table", ".tsv": "table", ".jsonl": "table",
}  # fmt: skip
SAVED = ("state.json", "dataset_dict.json")
"""One of these is in a folder that `datasets.Dataset.save_to_disk` wrote."""
SAVED_ROWS = 32
"""Rows of what `datasets` saved that are decoded at once."""
NAME = ""
"""Column of a row's own name: of a file in a folder, of a sample in a tar."""


@dataclass(frozen=True, slots=True)
class Row:
    """One picture of a collection.

    Attributes:
        shard: the file that holds it; for a folder of pictures, the folder.
        number: from 1, within the shard.
        cells: by column; a picture is bytes, a path or address, or a dict with one of them.
        stamp: differs where the picture may have changed; None where the cell only refers to a picture elsewhere.
    """

    shard: str
    number: int
    cells: dict[str, Any]
    stamp: str | None = None


@dataclass(frozen=True)
class Files:
    """The files of a collection.

    Attributes:
        fs: where they are; an fsspec file system.
        kind: folder, table, parquet, tar or saved.
        root: the folder itself, or the folder of the file; as `fs` names it.
        paths: files in order; of a folder none.
        is_local: whether they can be opened by their paths.
    """

    fs: Any
    kind: str
    root: str
    paths: tuple[str, ...]
    is_local: bool

    def address(self, path: str) -> str:
        """A file's address, protocol included."""
        return path if self.is_local else self.fs.unstrip_protocol(path)


def find(path: str) -> Files:
    """What a collection is: a folder, a file, a pattern such as ``shards/*.parquet``, or the address of one.

    Raises:
        TableError: it does not exist, needs a package that is not installed, or is of no kind that can be read.
    """
    try:
        fs, place = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise TableError(f"{path}: {error}") from None
    is_local = "://" not in path
    place = path if is_local else place  # as it was written, so that references stay short
    try:
        if fs.isdir(place):
            return _in_folder(path, fs, place.rstrip("/") or "/", is_local)
        files = [place] if fs.isfile(place) else _matching(fs, place, is_local)
    except TableError:
        raise
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        raise TableError(f"{path} cannot be read: {reason(error)}") from error
    if not files:
        raise TableError(f"{path} does not exist")
    return Files(fs, _kind_of(path, files), os.path.dirname(files[0]), tuple(files), is_local)


def _matching(fs: Any, pattern: str, is_local: bool) -> list[str]:
    if not any(mark in pattern for mark in "*?["):
        return []
    files = sorted(fs.glob(pattern))
    return [os.path.relpath(file) for file in files] if is_local and not os.path.isabs(pattern) else files


def _in_folder(path: str, fs: Any, root: str, is_local: bool) -> Files:
    if any(fs.isfile(f"{root}/{name}") for name in SAVED):
        return Files(fs, "saved", root, (), is_local)
    if next(picture_files(fs, root, is_local), None) is not None:
        return Files(fs, "folder", root, (), is_local)
    for kind in ("parquet", "tar"):
        if files := sorted(file for file in fs.find(root) if _ending_kind(file) == kind):
            if is_local:
                files = [os.path.join(root, os.path.relpath(file, root)) for file in files]
            return Files(fs, kind, root, tuple(files), is_local)
    raise TableError(
        f"{path} holds no picture ({', '.join(SUFFIXES)}), no Parquet file and no tar, and was not saved by `datasets`"
    )


def _ending_kind(file: str) -> str | None:
    return next((kind for ending, kind in KINDS.items() if file.lower().endswith(ending)), None)


def _kind_of(path: str, files: Sequence[str]) -> str:
    kinds = {_ending_kind(file) for file in files}
    kind = kinds.pop()
    if kinds or kind is None or (kind == "table" and len(files) > 1):
        raise TableError(
            f"{path} must be a folder, one .csv, .tsv or .jsonl, or one or more .parquet or .tar"
        )
    return kind


def picture_rows(
    files: Files, image: str = "image", columns: Sequence[str] = (), *, first: int = 0, pictures: bool = True
) -> Iterator[Row]:
    """The rows of a collection, in an order that is always the same.

    Args:
        files: of `find`.
        image: column with pictures.
        columns: further ones that are wanted; those that are missing are passed over.
        first: skip the rows before this one.
        pictures: read encoded pictures; without, such a cell is missing or None.

    Raises:
        TableError: a file cannot be read.
    """
    read = {"folder": _folder, "table": _table, "parquet": _parquet, "tar": _tars, "saved": _saved}[
        files.kind
    ]
    with reading(files.address(files.root)):
        try:
            yield from read(files, image, columns, first, pictures)
        except tarfile.TarError as error:
            raise TableError(f"{files.address(files.root)} cannot be read: {reason(error)}") from error


def stamp_of(files: Files, path: str) -> str:
    """Size and time, or what the store has in its place, of a file."""
    return _stamp(files.fs.info(path))


def _stamp(info: Mapping[str, Any]) -> str:
    times = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    return f"{info.get('size')}:{next((info[key] for key in times if info.get(key) is not None), '')}"


# -------------------------------------------------------------------------------------------------------------- folder


def picture_files(fs: Any, root: str, is_local: bool) -> Iterator[tuple[str, str]]:
    """Path and stamp of the picture files below a folder, by name; those of one folder follow one another."""
    if not is_local:
        found = fs.find(root, detail=True)
        for file in sorted(found, key=os.path.split):
            if file.lower().endswith(SUFFIXES):
                yield file, _stamp(found[file])
        return
    # A folder at a time: a million paths need not be held.
    with os.scandir(root) as entries:
        names = sorted((entry.is_dir(follow_symlinks=False), entry.name, entry) for entry in entries)
    for is_folder, name, entry in names:
        if is_folder:
            yield from picture_files(fs, os.path.join(root, name), True)
        elif name.lower().endswith(SUFFIXES):
            yield os.path.join(root, name), file_stamp(entry)


def file_stamp(file: Any) -> str:
    """Size and time of a file on this machine, by its path or its entry in a folder."""
    try:
        stat = os.stat(file)
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return "gone"
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _folder(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    number = 0
    found = picture_files(files.fs, files.root, files.is_local)
    for folder, group in groupby(found, key=lambda one: os.path.dirname(one[0])):
        # `a.jpg` beside `a.png`: both keep their ending, so that neither's id depends on which comes first.
        some = list(group)
        stems = Counter(os.path.splitext(file)[0] for file, _ in some)
        for file, stamp in some:
            number += 1
            if number > first:
                stem = os.path.splitext(file)[0]
                name = os.path.relpath(file if stems[stem] > 1 else stem, files.root).replace(os.sep, "/")
                yield Row(folder, number, {NAME: name, image: files.address(file)}, stamp)


# -------------------------------------------------------------------------------------------------------------- tables


def _table(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    (path,) = files.paths
    for number, cells in enumerate(table_rows(path, first=first, fs=files.fs), start=first + 1):
        yield Row(path, number, cells)


def _parquet(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    for path in files.paths:
        with open_parquet(path, files.fs) as file:
            encoded = _check_column(path, image, file.schema_arrow)
            wanted = [*columns] if encoded and not pictures else [image, *columns]
            stamp = stamp_of(files, path) if encoded else None
            skipped = min(first, file.metadata.num_rows)
            for number, cells in enumerate(parquet_rows(file, wanted, skipped), start=skipped + 1):
                yield Row(path, number, cells, stamp)
            first -= skipped


def _check_column(path: str, image: str, schema: Any) -> bool:
    """Whether the pictures of a table are encoded in it.

    Raises:
        TableError: there is no such column.
    """
    if image not in schema.names:
        raise TableError(f"{path}: no column {image} (there are: {', '.join(schema.names)})")
    return not is_text(schema.field(image).type)


# ---------------------------------------------------------------------------------------------------------- WebDataset


def _tars(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    rows = (row for path in files.paths for row in _tar(files, path, image, pictures))
    yield from islice(rows, first, None)


def _tar(files: Files, path: str, image: str, pictures: bool) -> Iterator[Row]:
    """A sample is the files of one name that follow one another; its picture, its text and the values of its JSON."""
    number, stamp = 0, stamp_of(files, path)
    with files.fs.open(path, "rb") as data, tarfile.open(fileobj=data, mode="r|*") as tar:
        for key, members in groupby(_members(tar), key=lambda member: _key(member.name)):
            cells: dict[str, Any] = {}
            shown: list[tuple[str, bytes | None]] = []
            for member in members:
                ending = member.name[len(key) + 1 :].lower()
                if f".{ending}".endswith(SUFFIXES):
                    shown.append((ending, _content(tar, member) if pictures else None))
                elif ending == "json":
                    cells = {**json_object(f"{path}: {member.name}", _content(tar, member)), **cells}
                elif ending in ("txt", "caption"):
                    cells["caption"] = _content(tar, member).decode("utf-8", "replace")
            for ending, picture in shown:
                number += 1
                name = key if len(shown) == 1 else f"{key}.{ending}"
                yield Row(path, number, {**cells, NAME: name, image: picture}, stamp)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # or the list of all of them grows
        if member.isfile() and not os.path.basename(member.name).startswith("."):
            yield member


def _key(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0])


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


# ------------------------------------------------------------------------------------------------------------ datasets


def _saved(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    import datasets

    address = files.address(files.root)
    try:
        found = datasets.load_from_disk(address)
    except (ValueError, TypeError, KeyError) as error:
        raise TableError(f"{address} cannot be read by the library datasets: {error}") from error
    for split in found.values() if isinstance(found, datasets.DatasetDict) else [found]:
        encoded = _check_column(address, image, split.data.schema)
        skipped, first = min(first, len(split)), max(0, first - len(split))
        wanted = [name for name in dict.fromkeys((image, *columns)) if name in split.column_names]
        if encoded and not pictures:
            wanted.remove(image)
        place = address if split.split is None else f"{address}/{split.split}"
        tables = split.select_columns(wanted).with_format("arrow")  # mapped from the disk
        for start in range(skipped, len(split), SAVED_ROWS):
            for number, cells in enumerate(tables[start : start + SAVED_ROWS].to_pylist(), start=start + 1):
                yield Row(place, number, cells, split._fingerprint if encoded else None)
