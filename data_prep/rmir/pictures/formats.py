"""What a picture library may be, read from its beginning to its end: nothing of it is in memory but the rows at hand.

A folder of pictures, a table (CSV, TSV, JSON lines), Parquet files, WebDataset tars, or what `datasets` saved; on this
machine or at any address that fsspec knows (``s3://``, ``gs://``, ``hf://``, ``memory://`` ...).
"""

import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import groupby, islice
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.index.sources import PICTURES, SourceError, json_object, text_rows

SUFFIXES = tuple(sorted(PICTURES))
TABLES, TARS = (".csv", ".tsv", ".jsonl"), (".tar", ".tar.gz", ".tgz")
SAVED = ("state.json", "dataset_dict.json")
"""One of these is in a folder that `datasets.Dataset.save_to_disk` wrote."""
BUFFER_BYTES = 1 << 20
"""Of a Parquet file are read at once: a row group of 2 GB is never whole in memory."""
BATCH_BYTES, MOST_ROWS, SAVED_ROWS = 8 << 20, 1024, 32
"""Rows of Parquet decoded at once: about so many bytes of pictures; and rows of what `datasets` saved."""


class LibraryError(UserError):
    """The library cannot be listed; the message names file, row and mend."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a library.

    Attributes:
        shard: file that it stands in.
        number: from 1, within the shard.
        cells: by column; a picture is bytes, a path or address, or a dict with one of them.
    """

    shard: str
    number: int
    cells: dict[str, Any]


@dataclass(frozen=True)
class Files:
    """The files of a library.

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
        """Of a file, for whoever does not know `fs`."""
        return path if self.is_local else self.fs.unstrip_protocol(path)


def find(path: str | None) -> Files:
    """What a library is, by its files.

    Args:
        path: a folder, a file, or a pattern such as ``shards/*.parquet``; or the address of one.

    Raises:
        LibraryError: it does not exist, needs a package that is not installed, or is of no kind that can be read.
    """
    if not path:
        raise LibraryError(
            "library.path is not given: a folder, a table, Parquet files, tars, or their address"
        )
    fs, place = _file_system(path)
    is_local = "://" not in path
    place = path if is_local else place  # as it was written, so that references stay short
    try:
        if fs.isdir(place):
            return _in_folder(path, fs, place.rstrip("/") or "/", is_local)
        is_pattern = not fs.isfile(place) and any(mark in place for mark in "*?[")
        files = sorted(fs.glob(place)) if is_pattern else [place] if fs.isfile(place) else []
        if is_pattern and is_local and not os.path.isabs(place):
            files = [os.path.relpath(file) for file in files]
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        raise LibraryError(f"library.path {path} cannot be read: {_reason(error)}") from error
    if not files:
        raise LibraryError(f"library.path {path} does not exist")
    return Files(fs, _kind_of(path, files), os.path.dirname(files[0]), tuple(files), is_local)


def _file_system(path: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise LibraryError(f"library.path {path}: {error}") from None
    except ValueError as error:
        raise LibraryError(f"library.path {path}: {error}") from None


def _in_folder(path: str, fs: Any, root: str, is_local: bool) -> Files:
    if any(fs.isfile(f"{root}/{name}") for name in SAVED):
        return Files(fs, "saved", root, (), is_local)
    if next(_pictures(fs, root, is_local), None) is not None:
        return Files(fs, "folder", root, (), is_local)
    for ending in (".parquet", *TARS):
        if files := sorted(file for file in fs.find(root) if file.lower().endswith(ending)):
            if is_local:
                files = [os.path.join(root, os.path.relpath(file, root)) for file in files]
            return Files(fs, _kind_of(path, files), root, tuple(files), is_local)
    raise LibraryError(
        f"library.path {path} holds no picture ({', '.join(SUFFIXES)}), no Parquet file and no tar, and `datasets` did not "
        "save it"
    )


def _kind_of(path: str, files: Sequence[str]) -> str:
    kinds = set()
    for file in files:
        name = file.lower()
        kinds.add(
            "parquet"
            if name.endswith(".parquet")
            else "tar"
            if name.endswith(TARS)
            else "table"
            if name.endswith(TABLES)
            else ""
        )
    if len(kinds) == 1 and kinds != {""} and (len(files) == 1 or kinds != {"table"}):
        return kinds.pop()
    raise LibraryError(
        f"library.path {path} must be a folder, one .csv, .tsv or .jsonl, or one or more .parquet or .tar"
    )


def rows(
    files: Files, image: str, columns: Sequence[str], *, first: int = 0, pictures: bool = True
) -> Iterator[Row]:
    """The rows of a library, in an order that is always the same.

    Args:
        files: of `find`.
        image: column with pictures.
        columns: further ones that are wanted; those that are not there are passed over.
        first: rows before this one are passed over.
        pictures: read encoded pictures; without, such a cell is None.

    Raises:
        LibraryError: a file cannot be read.
    """
    read = {"folder": _folder, "table": _table, "parquet": _parquet, "tar": _tars, "saved": _saved}[
        files.kind
    ]
    try:
        yield from read(files, image, columns, first, pictures)
    except SourceError as error:
        raise LibraryError(str(error)) from None
    except (OSError, pa.ArrowException, tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        where = getattr(error, "filename", None) or files.address(files.root)
        raise LibraryError(f"{where} cannot be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


# -------------------------------------------------------------------------------------------------------------- folder


def _pictures(fs: Any, root: str, is_local: bool) -> Iterator[str]:
    """Picture files below a folder, by name; those of one folder follow one another."""
    if not is_local:
        yield from sorted(
            (file for file in fs.find(root) if file.lower().endswith(SUFFIXES)), key=os.path.split
        )
        return
    # A folder at a time: a million paths need not be held.
    with os.scandir(root) as entries:
        names = sorted((entry.is_dir(follow_symlinks=False), entry.name) for entry in entries)
    for is_folder, name in names:
        if is_folder:
            yield from _pictures(fs, os.path.join(root, name), True)
        elif name.lower().endswith(SUFFIXES):
            yield os.path.join(root, name)


def _folder(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    number = 0
    for folder, group in groupby(_pictures(files.fs, files.root, files.is_local), key=os.path.dirname):
        # `a.jpg` beside `a.png`: both keep their ending, so that neither's id depends on which comes first.
        some = list(group)
        stems = Counter(os.path.splitext(file)[0] for file in some)
        for file in some:
            number += 1
            if number > first:
                stem = os.path.splitext(file)[0]
                name = os.path.relpath(file if stems[stem] > 1 else stem, files.root).replace(os.sep, "/")
                yield Row(folder, number, {"": name, image: files.address(file)})


# -------------------------------------------------------------------------------------------------------------- tables


def _table(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    (path,) = files.paths
    with files.fs.open(path, "rb") as data:
        lines = TextIOWrapper(data, encoding="utf-8-sig", newline="")
        for number, cells in enumerate(text_rows(files.address(path), lines), start=1):
            if number > first:
                yield Row(path, number, cells)


def _parquet(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    for path in files.paths:
        with files.fs.open(path, "rb") as data:
            file = pq.ParquetFile(data, pre_buffer=False, buffer_size=BUFFER_BYTES)
            names = file.schema_arrow.names
            if image not in names:
                raise LibraryError(
                    f"{path}: no column {image} (there are: {', '.join(names)}); see library.image_column"
                )
            encoded = not _is_text(file.schema_arrow.field(image).type)
            wanted = [name for name in dict.fromkeys((image, *columns)) if name in names]
            if encoded and not pictures:
                wanted.remove(image)
            place = 0
            groups: list[int] = []
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if first >= size and not groups:
                    first, place = first - size, place + size
                else:
                    groups.append(group)
            for batch in file.iter_batches(_rows_at_once(file), row_groups=groups, columns=wanted):
                skip = min(first, len(batch))
                first, place = first - skip, place + skip
                for cells in batch.slice(skip).to_pylist():
                    place += 1
                    yield Row(path, place, cells)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _rows_at_once(file: pq.ParquetFile) -> int:
    groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    average = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
    return int(max(1, min(MOST_ROWS, BATCH_BYTES / max(1.0, average))))


# ---------------------------------------------------------------------------------------------------------- WebDataset


def _tars(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    rows = (row for path in files.paths for row in _tar(files, path, image, pictures))
    yield from islice(rows, first, None)


def _tar(files: Files, path: str, image: str, pictures: bool) -> Iterator[Row]:
    """A sample is the files of one name that follow one another; its picture, its text and the values of its JSON."""
    number = 0
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
                yield Row(path, number, {**cells, "": name, image: picture})


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # or the list of all of them grows
        if member.isfile() and not os.path.basename(member.name).startswith("."):
            yield member


def _key(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0])


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: IO[bytes] | None = tar.extractfile(member)
    assert file is not None
    return file.read()


# ------------------------------------------------------------------------------------------------------------ datasets


def _saved(files: Files, image: str, columns: Sequence[str], first: int, pictures: bool) -> Iterator[Row]:
    import datasets

    address = files.address(files.root)
    try:
        found = datasets.load_from_disk(address)
    except (ValueError, TypeError, KeyError) as error:
        raise LibraryError(f"{address} cannot be read by the library datasets: {error}") from error
    for split in found.values() if isinstance(found, datasets.DatasetDict) else [found]:
        if image not in split.column_names:
            raise LibraryError(
                f"{address}: no column {image} (there are: {', '.join(split.column_names)}); see library.image_column"
            )
        skip, first = min(first, len(split)), max(0, first - len(split))
        encoded = not _is_text(split.data.schema.field(image).type)
        wanted = [name for name in dict.fromkeys((image, *columns)) if name in split.column_names]
        if encoded and not pictures:
            wanted.remove(image)
        tables = split.select_columns(wanted).with_format("arrow")  # mapped from the disk
        for start in range(skip, len(split), SAVED_ROWS):
            for number, cells in enumerate(tables[start : start + SAVED_ROWS].to_pylist(), start=start + 1):
                yield Row(address if split.split is None else f"{address}/{split.split}", number, cells)
