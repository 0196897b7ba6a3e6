"""What there is to embed: the pictures and texts of a folder, or the rows of a table.

Listing opens no picture file. Each entry has a stamp that differs as soon as its content may have changed; whoever has to be
sure reads it (`load`) and compares digests.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import ExifTags, Image

from rge.common.errors import UserError
from rge.common.images import ImageError, fetch_picture, load_image, open_picture, picture_bytes
from rge.tables.pictures import PICTURES
from rge.tables.rows import TABLES, TableError, table_rows

MOST_TEXT_BYTES = 1 << 20
"""A text file above this is no item: a prompt holds some thousand tokens."""


class SourceError(UserError):
    """A folder or table cannot be read as one of pictures and texts; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture, text, or both, before it is read.

    Attributes:
        id: its name in the source: a path relative to the folder, or a row's id.
        stamp: differs where the content may differ.
        text: caption or text, where it is known without opening a file.
        text_file: where it stands otherwise.
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
        passed_over: files of a folder that are neither pictures nor texts.
        unseen: folders and files of it that are there and that the system did not show: nobody knows what they hold now.
    """

    name: str
    entries: list[Entry]
    faults: dict[str, str]
    passed_over: int = 0
    unseen: frozenset[str] = frozenset()

    def may_hold(self, name: str) -> bool:
        """Whether an entry that was not found may be there all the same."""
        return bool(self.unseen) and any(
            str(place) in self.unseen for place in (PurePosixPath(name), *PurePosixPath(name).parents)
        )


@dataclass(frozen=True, slots=True)
class Content:
    """An entry that has been read.

    Attributes:
        text: caption or text.
        data: encoded bytes of the picture.
        digest: SHA-256 over what is embedded of it.
        thumbnail: a small copy of the picture, WebP; None where none was asked for.
        facts: what the picture's EXIF says: ``taken``, ``year``, ``month``, ``latitude``, ``longitude``.
    """

    text: str | None
    data: bytes | None
    digest: str
    thumbnail: bytes | None
    facts: dict[str, Any] = field(default_factory=dict)


def read_source(path: Path, *, id: str = "id", text: str = "text", image: str = "image") -> Source:  # noqa: A002
    """List a folder or a table.

    Args:
        path: of the folder or the table.
        id: column of a table that names its rows.
        text: column with texts.
        image: column with pictures.

    Raises:
        SourceError: it is neither, cannot be read, or holds nothing that could be an item.
    """
    path = path.expanduser()
    if path.is_dir():
        found = _folder(path)
        empty = f"{path} holds no pictures ({', '.join(sorted(PICTURES))}) and no texts (.txt)"
        if found.passed_over:
            empty += f", only {found.passed_over} other files"
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
    """Read an entry.

    Args:
        entry: of a source.
        thumbnail_px: longer side of the small copy; 0 for none.
        captions: a picture is embedded together with its text.

    Raises:
        ImageError: its picture cannot be read.
        SourceError: its text cannot be read.
    """
    text = entry.text if entry.text_file is None else _text(Path(entry.text_file))
    data = None
    if entry.image is not None:
        is_remote = entry.image.startswith(("http://", "https://"))
        data = fetch_picture(entry.image) if is_remote else picture_bytes(entry.image)
    elif not (text or "").strip():
        raise SourceError("it is empty")
    digest = hashlib.sha256(data or b"")
    if data is None or captions:
        digest.update(b"\0" + (text or "").encode())
    small: bytes | None = None
    facts: dict[str, Any] = {}
    if data is not None:
        try:
            data, facts = _first_frame(data)
            small = thumbnail(data, thumbnail_px) if thumbnail_px else None
        except ImageError as error:
            raise ImageError(re.sub(r"<\d+ bytes>", lambda _: str(entry.image), str(error))) from error
    return Content(text, data, digest.hexdigest(), small, facts)


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
    """When and where a picture was taken, as far as its EXIF says so."""
    exif = image.getexif()
    facts: dict[str, Any] = {}
    said = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal) or exif.get(
        ExifTags.Base.DateTime
    )
    with suppress(ValueError, TypeError):  # no date, or zeros, as cameras write without a clock
        taken = datetime.strptime(str(said).strip("\0 "), "%Y:%m:%d %H:%M:%S")
        facts |= {"taken": taken.isoformat(), "year": taken.year, "month": taken.month}
    place = exif.get_ifd(ExifTags.IFD.GPSInfo)
    with suppress(KeyError, ValueError, TypeError, ZeroDivisionError):
        facts |= {
            "latitude": _degrees(place[ExifTags.GPS.GPSLatitude], place[ExifTags.GPS.GPSLatitudeRef] == "S"),
            "longitude": _degrees(
                place[ExifTags.GPS.GPSLongitude], place[ExifTags.GPS.GPSLongitudeRef] == "W"
            ),
        }
    return facts


def _degrees(parts: Sequence[Any], is_negative: bool) -> float:
    degrees, minutes, seconds = map(float, parts)
    found = degrees + minutes / 60 + seconds / 3600
    if not math.isfinite(found):
        raise ValueError("no number")
    return round(-found if is_negative else found, 6)


def thumbnail(data: bytes, size_px: int) -> bytes:
    """A small copy of an encoded picture, WebP.

    Args:
        data: the picture.
        size_px: longer side of the copy at most.

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
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise SourceError(f"{path} is larger than {MOST_TEXT_BYTES >> 20} MB, too long for one item")
        return path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SourceError(f"{path} is not UTF-8") from None


# -------------------------------------------------------------------------------------------------------------- folder


def _folder(root: Path) -> Source:
    """Every picture and text below a folder. Links to folders are followed, each folder once."""
    found: dict[str, os.stat_result] = {}
    faults: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    unseen: set[str] = set()
    passed_over = 0

    def unreadable(error: OSError) -> None:
        name = Path(os.path.relpath(error.filename or root, root)).as_posix()
        faults[_printable(name)] = error.strerror or str(error)
        if not isinstance(error, FileNotFoundError):
            unseen.add(name)

    for folder, folders, names in os.walk(root, followlinks=True, onerror=unreadable):
        try:
            here = os.stat(folder)
        except OSError as error:
            unreadable(error)
            folders.clear()
            continue
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            ending = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                continue
            if ending not in PICTURES and ending != ".txt":
                passed_over += 1
                continue
            path = os.path.join(folder, name)
            relative = Path(os.path.relpath(path, root)).as_posix()
            try:
                relative.encode()
                found[relative] = os.stat(path)
            except UnicodeEncodeError:
                faults[_printable(relative)] = "its name is not UTF-8"
            except OSError as error:
                unreadable(error)
    if "." in faults:
        raise SourceError(f"{root} cannot be read: {faults['.']}")
    captions = {name for name in found if name.lower().endswith(".txt")}
    entries = []
    for name, stat in found.items():
        if name in captions:
            continue
        beside = [one for one in (f"{name}.txt", f"{os.path.splitext(name)[0]}.txt") if one in found]
        stamp = _stamp(stat) + (f" {_stamp(found[beside[0]])}" if beside else "")
        text_file = str(root / beside[0]) if beside else None
        album = Path(name).parent.as_posix() if "/" in name else Path(os.path.abspath(root)).name
        entries.append(
            Entry(
                name,
                stamp,
                text_file=text_file,
                image=os.path.abspath(root / name),
                metadata={"album": album},
            )
        )
    taken = {_stem(entry.id) for entry in entries} | {entry.id for entry in entries}
    for name in sorted(captions):
        if _stem(name) not in taken:
            entries.append(Entry(name, _stamp(found[name]), text_file=str(root / name)))
    entries.sort(key=lambda entry: entry.id)
    return Source(os.path.abspath(root), entries, faults, passed_over, frozenset(unseen))


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _stamp(stat: os.stat_result) -> str:
    # The first number changes with what is read of a file, so that indices made before read it again.
    return f"2:{stat.st_size}:{stat.st_mtime_ns}"


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------------------- table


def _table(path: Path, id_column: str, text_column: str, image_column: str) -> Source:
    folder = Path(os.path.abspath(path)).parent
    entries: dict[str, Entry] = {}
    faults: dict[str, str] = {}
    try:
        rows = _rows(path, id_column, image_column)
        columns = next(rows)
        if not columns:
            return Source(os.path.abspath(path), [], {})
        known = [name for name in (text_column, image_column) if name in columns]
        if not known:
            raise SourceError(
                f"{path} has neither a column {text_column!r} nor {image_column!r}; it has {', '.join(map(repr, columns))}: "
                "name them, such as text=caption image=file"
            )
        for number, row in enumerate(rows, start=1):
            text, image = row.pop(text_column, None), row.pop(image_column, None)
            name = row.pop(id_column, None)
            if name is None:
                name = image if isinstance(image, str) and image and id_column not in columns else str(number)
            name = str(name)
            if name in entries or name in faults:
                raise SourceError(f"{path}: two rows are named {name!r}; names ({id_column}=) must differ")
            fault = _fault(text, image)
            if fault:
                faults[name] = fault
                continue
            entries[name] = _entry(name, text, image, row, path, folder)
    except TableError as error:
        raise SourceError(str(error)) from None
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if path.suffix.lower() in (".csv", ".tsv"):
        _as_numbers([entry.metadata for entry in entries.values()])
    return Source(os.path.abspath(path), list(entries.values()), faults)


def _as_numbers(rows: Sequence[dict[str, Any]]) -> None:
    """Columns of CSV whose cells are all numbers, as numbers. With a zero in front they are codes, and stay texts."""
    for name in {name for row in rows for name in row}:
        cells = [row[name] for row in rows if row.get(name) is not None]
        for form, kind in ((r"-?(0|[1-9]\d{0,17})", int), (r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", float)):
            if all(re.fullmatch(form, cell) for cell in cells):
                for row in rows:
                    row[name] = None if row.get(name) is None else kind(row[name])
                break


def _fault(text: Any, image: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        return f"its text is no text but {type(text).__name__}"
    if image is not None and not isinstance(image, str | bytes):
        return f"its picture is neither a path nor bytes but {type(image).__name__}"
    if not (text or "").strip() and not image:
        return "it has neither a text nor a picture"
    return None


def _entry(name: str, text: str | None, image: Any, row: dict[str, Any], path: Path, folder: Path) -> Entry:
    text = (text or "").strip() or None
    stamp = hashlib.sha256(
        json.dumps([2, text, row], ensure_ascii=False, default=str, sort_keys=True).encode()
    )
    ref: str | None = None
    if isinstance(image, bytes):
        ref = f"{os.path.abspath(path)}#{name}"
        stamp.update(image)
    elif image and image.startswith(("http://", "https://")):
        ref = image
        stamp.update(image.encode())
    elif image:
        ref = os.path.abspath(folder / image)
        stamp.update(image.encode())
        try:
            # A row of a library changes with the library's file.
            stamp.update(
                _stamp(
                    os.stat(ref.partition(".parquet#")[0] + ".parquet" if ".parquet#" in ref else ref)
                ).encode()
            )
        except (OSError, ValueError):
            stamp.update(b"gone")  # found unreadable when it is opened
    return Entry(name, stamp.hexdigest(), text=text, image=ref, metadata=row)


def _rows(path: Path, id_column: str, image_column: str) -> Iterator[Any]:
    """The names of the columns, then each row as a mapping."""
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path, id_column, image_column)
        return
    held = list(table_rows(path))
    yield list(dict.fromkeys(key for row in held for key in row))  # JSON lines may each have other keys
    yield from held


def _parquet(path: Path, id_column: str, image_column: str) -> Iterator[Any]:
    names = pq.read_schema(path).names
    yield names
    named = (id_column, image_column) == ("id", "image") and "id" in names
    for row in table_rows(path):
        image = row.get(image_column)
        if isinstance(image, dict):  # as the datasets library stores pictures
            row[image_column] = image.get("bytes") or image.get("path")
        if isinstance(row.get(image_column), bytes) and not named:
            raise SourceError(
                f"{path} holds encoded pictures: its columns must be called id and image, as in every picture "
                f"library here; it has {', '.join(map(repr, names))}"
            )
        yield row
