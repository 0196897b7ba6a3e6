"""What to embed: pictures (HEIC too) and texts of a folder, or rows of a table.

Listing opens no picture file. Each entry has a stamp that differs as soon as its content may have changed; `load` reads it and
gives a digest of the content.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq
from PIL import ExifTags, Image

from rge.common.errors import UserError
from rge.common.images import WEB, ImageError, fetch_picture, load_image, open_picture, picture_bytes
from rge.tables.pictures import SUFFIXES, file_stamp
from rge.tables.rows import TABLES, reading, table_rows

MAX_TEXT_BYTES = 1 << 20
"""A larger text file is no item: a prompt holds some thousand tokens."""
_NUMBERS = (
    (re.compile(r"-?(0|[1-9]\d{0,17})"), int),
    (re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"), float),
)
"""Cells of CSV that are numbers. With a leading zero they are codes, and stay texts."""


class SourceError(UserError):
    """A folder or table cannot be read as one of pictures and texts; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture, text, or both, before it is read.

    Attributes:
        id: its name in the source: a path relative to the folder, or a row's id.
        stamp: differs where the content may differ.
        text: caption or text, where it is known without opening a file.
        text_file: the file that has it otherwise.
        image: path of a picture, ``library.parquet#row`` or a web address.
        metadata: a row's other columns.
    """

    id: str
    stamp: str
    text: str | None = None
    text_file: str | None = None
    image: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or a table.

    Attributes:
        name: its absolute path.
        entries: in a fixed order.
        faults: what cannot be an item, and why, by name.
        num_skipped: files of a folder that are neither pictures nor texts.
        unseen: folders and files that exist but could not be read, so their present content is unknown.
    """

    name: str
    entries: list[Entry]
    faults: dict[str, str]
    num_skipped: int = 0
    unseen: frozenset[str] = frozenset()

    def may_hold(self, name: str) -> bool:
        """Whether an entry that was not found may still be there."""
        return not self.unseen.isdisjoint(map(str, (PurePosixPath(name), *PurePosixPath(name).parents)))


@dataclass(frozen=True, slots=True)
class Content:
    """An entry that has been read.

    Attributes:
        text: caption or text.
        data: encoded bytes of the picture.
        digest: SHA-256 over what is embedded of it.
        thumbnail: a small copy of the picture, WebP; None where none was asked for.
        facts: from the picture's EXIF: ``taken``, ``year``, ``month``, ``latitude``, ``longitude``.
    """

    text: str | None
    data: bytes | None
    digest: str
    thumbnail: bytes | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def read_source(path: Path, *, id: str = "id", text: str = "text", image: str = "image") -> Source:  # noqa: A002
    """List a folder or a table; `id`, `text` and `image` are a table's columns with names, texts and pictures.

    Raises:
        SourceError: it is neither, or holds nothing that could be an item.
        TableError: it cannot be read.
    """
    path = path.expanduser()
    if path.is_dir():
        found = _folder(path)
        empty = f"{path} holds no pictures ({', '.join(SUFFIXES)}) and no texts (.txt)"
        if found.num_skipped:
            empty += f", only {found.num_skipped} other files"
    elif path.suffix.lower() in TABLES and path.is_file():
        found = _table(path, id, text, image)
        empty = f"{path} has no rows"
    else:
        reason = "is neither a folder nor a table" if path.exists() else "does not exist"
        raise SourceError(f"src={path} {reason}: give a folder, or a file that ends in {', '.join(TABLES)}")
    if not found.entries and not found.faults:
        raise SourceError(empty)
    return found


def load(entry: Entry, thumbnail_px: int = 0, captions: bool = True) -> Content:
    """Read an entry, with a small copy of its picture if `thumbnail_px`; `captions`: its text counts as content.

    Raises:
        ImageError: its picture cannot be read.
        SourceError: its text cannot be read.
    """
    text = entry.text if entry.text_file is None else _text(Path(entry.text_file))
    embedded_text = b"\0" + (text or "").encode()
    if entry.image is None:
        if not (text or "").strip():
            raise SourceError("it is empty")
        return Content(text, None, hashlib.sha256(embedded_text).hexdigest())
    data = fetch_picture(entry.image) if entry.image.startswith(WEB) else picture_bytes(entry.image)
    digest = hashlib.sha256(data + embedded_text if captions else data).hexdigest()
    try:
        data, facts = _first_frame(data)
        small = thumbnail(data, thumbnail_px) if thumbnail_px else None
    except ImageError as error:
        raise ImageError(re.sub(r"<\d+ bytes>", lambda _: str(entry.image), str(error))) from error
    return Content(text, data, digest, small, facts)


def _first_frame(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """A picture of one frame, and its EXIF: of an animation the first frame, as PNG."""
    try:
        image = open_picture(data)
        facts = exif_facts(image)
        if not getattr(image, "is_animated", False) or image.format in ("MPO", "HEIF"):
            return data, facts
    except Exception:  # noqa: BLE001 - whatever Pillow's readers run into, `load_image` says in words
        return data, {}
    written = io.BytesIO()
    load_image(data, first_frame=True).save(written, "PNG")
    return written.getvalue(), facts


def exif_facts(image: Image.Image) -> dict[str, Any]:
    """When and where a picture was taken, from its EXIF."""
    exif = image.getexif()
    facts: dict[str, Any] = {}
    original = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
    date = str(original or exif.get(ExifTags.Base.DateTime))
    with suppress(ValueError, TypeError):  # no date, or zeros, as cameras write without a clock
        taken = datetime.strptime(date.strip("\0 "), "%Y:%m:%d %H:%M:%S")
        facts |= {"taken": taken.isoformat(), "year": taken.year, "month": taken.month}
    place = exif.get_ifd(ExifTags.IFD.GPSInfo)
    with suppress(KeyError, ValueError, TypeError, ZeroDivisionError):
        south, west = place[ExifTags.GPS.GPSLatitudeRef] == "S", place[ExifTags.GPS.GPSLongitudeRef] == "W"
        latitude = _degrees(place[ExifTags.GPS.GPSLatitude], south)
        facts |= {"latitude": latitude, "longitude": _degrees(place[ExifTags.GPS.GPSLongitude], west)}
    return facts


def _degrees(parts: Sequence[Any], is_negative: bool) -> float:
    degrees, minutes, seconds = map(float, parts)
    found = degrees + minutes / 60 + seconds / 3600
    if not math.isfinite(found):
        raise ValueError("no number")
    return round(-found if is_negative else found, 6)


def thumbnail(data: bytes, size_px: int) -> bytes:
    """A small copy of an encoded picture, WebP.

    Raises:
        ImageError: it cannot be decoded.
    """
    small = load_image(data, near_px=size_px, first_frame=True)
    small.thumbnail((size_px, size_px), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    small.save(written, "WEBP", quality=80)
    return written.getvalue()


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise SourceError(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MB, too long for one item")
        return path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SourceError(f"{path} is not UTF-8") from None


# -------------------------------------------------------------------------------------------------------------- folder


class _Walk:
    """The picture and text files below a folder. Links to folders are followed, each folder once; hidden files are left out.

    Attributes:
        files: stamps by name, relative to the folder.
        faults: as of `Source`, as are `unseen` and `num_skipped`.
    """

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.unseen: set[str] = set()
        self.num_skipped = 0
        seen: set[tuple[int, int]] = set()
        for folder, folders, names in os.walk(root, followlinks=True, onerror=self._unreadable):
            here = self._stat(folder)
            if here is None or (here.st_dev, here.st_ino) in seen:
                folders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            folders[:] = _visible(folders)
            for name in _visible(names):
                if name.lower().endswith((*SUFFIXES, ".txt")):
                    self._add(os.path.join(folder, name))
                else:
                    self.num_skipped += 1

    def _add(self, path: str) -> None:
        name = self._name(path)
        if _printable(name) != name:
            self.faults[_printable(name)] = "its name is not UTF-8"
        elif (stat := self._stat(path)) is not None:
            self.files[name] = f"{stat.st_size}:{stat.st_mtime_ns}"

    def _name(self, path: str) -> str:
        return Path(os.path.relpath(path, self.root)).as_posix()

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path)
        except OSError as error:
            self._unreadable(error)
            return None

    def _unreadable(self, error: OSError) -> None:
        name = self._name(error.filename or str(self.root))
        self.faults[_printable(name)] = error.strerror or str(error)
        if not isinstance(error, FileNotFoundError):
            self.unseen.add(name)


def _folder(root: Path) -> Source:
    walk = _Walk(root)
    if "." in walk.faults:
        raise SourceError(f"{root} cannot be read: {walk.faults['.']}")
    texts = {name for name in walk.files if name.lower().endswith(".txt")}
    pictures = walk.files.keys() - texts
    described = pictures | set(map(_stem, pictures))
    entries = [_picture(walk, name) for name in pictures]
    entries += [
        Entry(name, walk.files[name], text_file=str(root / name))
        for name in texts
        if _stem(name) not in described
    ]
    entries.sort(key=lambda entry: entry.id)
    return Source(os.path.abspath(root), entries, walk.faults, walk.num_skipped, frozenset(walk.unseen))


def _picture(walk: _Walk, name: str) -> Entry:
    root, stamp, text_file = walk.root, walk.files[name], None
    caption = next((one for one in (f"{name}.txt", f"{_stem(name)}.txt") if one in walk.files), None)
    if caption is not None:
        stamp += f" {walk.files[caption]}"
        text_file = str(root / caption)
    album = Path(name).parent.as_posix() if "/" in name else Path(os.path.abspath(root)).name
    image = os.path.abspath(root / name)
    return Entry(name, stamp, text_file=text_file, image=image, metadata={"album": album})


def _visible(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------------------- table


def _table(path: Path, id_column: str, text_column: str, image_column: str) -> Source:
    entries: dict[str, Entry] = {}
    faults: dict[str, str] = {}
    with reading(str(path)):
        columns, rows = _rows(path, id_column, image_column)
        if columns and not {text_column, image_column} & set(columns):
            raise SourceError(
                f"{path} has neither a column {text_column!r} nor {image_column!r}; it has "
                f"{', '.join(map(repr, columns))}: name them, such as text=caption image=file"
            )
        for number, row in enumerate(rows, start=1):
            text, image = row.pop(text_column, None), row.pop(image_column, None)
            name = row.pop(id_column, None)
            if name is None:
                is_path = isinstance(image, str) and image and id_column not in columns
                name = image if is_path else number
            name = str(name)
            if name in entries or name in faults:
                raise SourceError(f"{path}: two rows have the id {name!r}; ids ({id_column}=) must be unique")
            if fault := _fault(text, image):
                faults[name] = fault
            else:
                entries[name] = _entry(name, text, image, row, path)
    if path.suffix.lower() in (".csv", ".tsv"):
        _as_numbers([entry.metadata for entry in entries.values()])
    return Source(os.path.abspath(path), list(entries.values()), faults)


def _as_numbers(rows: Sequence[dict[str, Any]]) -> None:
    """Turn columns whose cells are all numbers into numbers."""
    for name in {name for row in rows for name in row}:
        cells = [row[name] for row in rows if row[name] is not None]
        kind = next((kind for form, kind in _NUMBERS if all(map(form.fullmatch, cells))), None)
        if kind is not None:
            for row in rows:
                row[name] = None if row[name] is None else kind(row[name])


def _fault(text: Any, image: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        return f"its text must be a string, got {type(text).__name__}"
    if image is not None and not isinstance(image, str | bytes):
        return f"its picture is neither a path nor bytes but {type(image).__name__}"
    if not (text or "").strip() and not image:
        return "it has neither a text nor a picture"
    return None


def _entry(name: str, text: str | None, image: str | bytes | None, row: dict[str, Any], path: Path) -> Entry:
    text = (text or "").strip() or None
    known = json.dumps([text, row], ensure_ascii=False, default=str, sort_keys=True)
    stamp = hashlib.sha256(known.encode())
    ref: str | None = None
    if isinstance(image, bytes):
        ref = f"{os.path.abspath(path)}#{name}"
        stamp.update(image)
    elif image:
        stamp.update(image.encode())
        ref = image
        if not image.startswith(WEB):
            ref = os.path.abspath(path.parent / image)
            library, mark, _ = ref.partition(".parquet#")
            stamp.update(file_stamp(f"{library}.parquet" if mark else ref).encode())
    return Entry(name, stamp.hexdigest(), text=text, image=ref, metadata=row)


def _rows(path: Path, id_column: str, image_column: str) -> tuple[list[str], Iterable[dict[str, Any]]]:
    """The names of the columns, and the rows."""
    if path.suffix.lower() == ".parquet":
        names = pq.read_schema(path).names
        return names, _parquet(path, names, id_column, image_column)
    rows = list(table_rows(path))
    return list({key: None for row in rows for key in row}), rows  # JSON lines may each have other keys


def _parquet(path: Path, names: list[str], id_column: str, image_column: str) -> Iterator[dict[str, Any]]:
    is_library = (id_column, image_column) == ("id", "image") and "id" in names
    for row in table_rows(path):
        image = row.get(image_column)
        if isinstance(image, dict):  # as the datasets library stores pictures
            row[image_column] = image = image.get("bytes") or image.get("path")
        if isinstance(image, bytes) and not is_library:
            raise SourceError(
                f"{path} holds encoded pictures: its columns must be called id and image, as in every picture library; "
                f"it has {', '.join(map(repr, names))}"
            )
        yield row
