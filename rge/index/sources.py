"""What to embed: pictures (HEIC too), pages of PDFs and texts of a folder, or rows of a table.

Listing opens no picture file. An entry's stamp changes whenever its content may have changed; `load` reads the entry and computes
a digest of the content.
"""

import hashlib
import io
import json
import math
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from PIL import ExifTags, Image

from rge.common.errors import UserError, grouped
from rge.common.files import write_text
from rge.common.images import WEB, ImageError, load_image, open_picture, picture_bytes
from rge.common.parts import ImagePart, Part
from rge.content import pdf
from rge.content.preview import preview
from rge.content.references import PDF, named, page_reference, part_of
from rge.content.video import SUFFIXES as VIDEO_SUFFIXES
from rge.content.video import probe
from rge.index.columns import make_comparable, texts_as_numbers
from rge.index.options import Reading
from rge.tables import stores
from rge.tables.errors import reading
from rge.tables.listing import Exclude, Skipped, files_below, visible_files
from rge.tables.names import resolved
from rge.tables.pictures import SUFFIXES, file_stamp, store_stamp
from rge.tables.rows import (
    AS_FOUND,
    SHEETS,
    TABLES,
    TableFormat,
    is_missing,
    open_parquet,
    picture_cell,
    table_rows,
)
from rge.tables.stores import is_lance, is_stored
from rge.web.client import fetch_picture

MAX_TEXT_BYTES = 1 << 20
"""Largest text file that counts as an item: a prompt has a few thousand tokens."""
TEXT_PAGES = 20
"""Pages whose text is kept of a document that is one item."""
SHOWN = 20
"""Kinds of unreadable items that are printed."""


class SourceError(UserError):
    """A folder or table, the ``file``, cannot be read as pictures and texts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture, text, or both, before it is read."""

    id: str  # a path relative to the folder, or a row's id
    stamp: str  # differs if the content may differ
    text: str | None = None  # caption or text, if it is known without opening a file
    text_file: str | None = None  # file with the text otherwise
    # Path of a picture, a document or a clip, ``library.parquet#row``, ``x.pdf#page=3``, or a web address.
    image: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)  # a row's other columns


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or a table."""

    name: str  # absolute path
    entries: list[Entry]  # in a fixed order
    faults: dict[str, str]  # unusable files or rows: name -> reason
    skipped: Skipped = field(default_factory=Skipped)  # files of a folder that are neither pictures nor texts
    # Folders and files that exist but could not be read, so their present content is unknown.
    unseen: frozenset[str] = frozenset()

    def may_hold(self, name: str) -> bool:
        """Whether an entry that was not listed may still exist."""
        return not self.unseen.isdisjoint(map(str, (PurePosixPath(name), *PurePosixPath(name).parents)))


@dataclass
class Unreadable:
    """Unreadable items of a source, with the reason, by name; more than `max_share` of `total` are a `UserError`."""

    total: int
    max_share: float
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def noted(cls, source: Source, options: Reading) -> Iterator["Unreadable"]:
        """Start with the faults of a source's listing; at the end, whatever ends it, write all to ``unreadable=``."""
        listed = options.unreadable
        if (
            listed is not None
            and not is_stored(source.name)
            and listed.suffix.lower() == ".txt"
            and _is_listed(listed, Path(source.name))
        ):
            raise UserError(
                f"it would be an item of {source.name}: put it elsewhere", listed, key="unreadable"
            )
        found = cls(len(source.entries) + len(source.faults), options.max_unreadable, dict(source.faults))
        try:
            found.check()
            yield found
        finally:
            if listed is not None:
                write_text(listed, "".join(f"{name}\t{why}\n" for name, why in found.faults.items()))

    def add(self, name: str, reason: object) -> None:
        """Record an item."""
        self.faults[name] = " ".join(str(reason).split())

    @property
    def too_many(self) -> bool:
        """Whether there are more than are allowed."""
        # Of a small folder, a single file would already be more than the share.
        most = max(self.max_share * self.total, 1 if self.max_share and self.total > 1 else 0)
        return len(self.faults) > most

    def check(self, *, all_read: bool = False) -> None:
        """Refuse more than are allowed."""
        if self.too_many:
            raise UserError(
                f"{len(self.faults)} of {self.total} items are unreadable{'' if all_read else ' so far'}"
                f", more than {self.max_share:g}:\n{self._listed()}",
                key="max_unreadable",
                kind="all" if all_read else "so far",
            )

    def report(self, what: str = "") -> None:
        """Print their number and the first of them."""
        if self.faults:
            count = f"{len(self.faults)} of {self.total} items are unreadable{what}"
            print(f"{count}:\n{self._listed()}", file=sys.stderr)  # noqa: T201

    def _listed(self) -> str:
        """One line per kind of fault, see `grouped`."""
        lines = grouped((f"{name!r}: {reason}" for name, reason in self.faults.items()), SHOWN)
        more = ["unreadable=FILE lists all"] * (len(lines) < len(self.faults))
        return "\n".join(f"  {line}" for line in [*lines, *more])


@dataclass(frozen=True, slots=True)
class Content:
    """An entry that has been read."""

    text: str | None  # caption, text, or what is written on a page
    data: bytes | None  # encoded picture
    digest: str  # SHA-256 over what is embedded
    part: Part | None = None  # a page, decoded, a whole document or a clip
    thumbnail: bytes | None = None  # WebP
    # From the picture's EXIF: ``taken``, ``year``, ``month``, ``latitude``, ``longitude``.
    facts: dict[str, Any] = field(default_factory=dict)


def read_source(
    path: Path | str,
    *,
    id: str = "id",
    text: str = "text",
    image: str = "image",
    exclude: Sequence[str] = (),
    form: TableFormat = AS_FOUND,
    pages: Literal["each", "together"] = "each",
    videos: bool = False,
) -> Source:
    """List a folder or a table, on this machine or at an address of an object store; `id`, `text` and `image` are a table's columns with names, texts and pictures.

    With `pages` each, a document has one entry per page; `videos` lists the clips of a folder too.

    `exclude` are patterns of what to leave out of a folder, see `Exclude`.

    Raises:
        UserError: such a pattern is not valid.
        SourceError: it is neither, or empty.
        TableError: it cannot be read.
    """
    if is_stored(path) or is_lance(str(path)):
        source, empty = _stored(str(path).rstrip("/"), (id, text, image), exclude, form, videos)
        source = _with_pages(source, pages)
        if not source.entries and not source.faults:
            raise SourceError(empty, path, kind="empty")
        return source
    path = Path(path).expanduser()
    try:
        os.path.abspath(path).encode()
    except UnicodeEncodeError:
        name = _printable(str(path))
        raise SourceError("it is not UTF-8: rename it, or give a link to it", name) from None
    if path.is_dir():
        source = _folder(path, Exclude(exclude), videos)
        empty = _nothing_in(str(path), source)
    elif path.suffix.lower() in TABLES and path.is_file():
        source = _table(str(path), (id, text, image), form)
        empty = "it has no rows"
    elif path.suffix.lower() == PDF and path.is_file():
        file = os.path.abspath(path)
        source = Source(
            file, [_picture(os.path.dirname(file), {path.name: _stamp(path)}, path.name, None)], {}
        )
        empty = ""
    else:
        reason = "it is neither a folder nor a table" if path.exists() else "it does not exist"
        raise SourceError(
            f"{reason}: give a folder, or a file that ends in {', '.join((*TABLES, PDF))}",
            path,
            kind="kind" if path.exists() else "missing",
        )
    source = _with_pages(source, pages)
    if not source.entries and not source.faults:
        raise SourceError(empty, path, kind="empty")
    return source


def _nothing_in(path: str, source: Source) -> str:
    only = f", only {source.skipped}" if source.skipped else ""
    return f"it holds no pictures ({', '.join(SUFFIXES)}), no PDFs and no texts (.txt){only}"


def _stored(
    address: str, columns: tuple[str, str, str], exclude: Sequence[str], form: TableFormat, videos: bool
) -> tuple[Source, str]:
    """What a store, or a Lance table, holds, and what is said if that is nothing."""
    ending = os.path.splitext(address)[1].lower()
    if is_lance(address) or ending in TABLES:
        return _table(address, columns, form), "it has no rows"
    fs, root = stores.open_store(address)
    if not stores.exists(address):
        raise stores.missing(address)
    skipped, files = Skipped(), dict[str, str]()
    if ending == PDF:
        [(name, info)] = stores.listed(address, lambda: iter([(root, fs.info(root))]))
        folder = address.rpartition("/")[0]
        name = os.path.basename(name)
        return Source(address, [_picture(folder, {name: store_stamp(info)}, name, None)], {}), ""
    endings = _endings(videos)
    for path, info in stores.listed(address, lambda: files_below(fs, root, False, Exclude(exclude), skipped)):
        if path.lower().endswith(endings):
            files[path.removeprefix(root).strip("/")] = store_stamp(info)
        else:
            skipped.add(path)
    source = Source(address, _entries(address, files), {}, skipped)
    return source, _nothing_in(address, source)


def source_name(path: str) -> str:
    """What a source is called in an index: its absolute path, or its address."""
    return path.rstrip("/") if is_stored(path) else os.path.abspath(Path(path).expanduser())


def source_of(options: Reading) -> Source:
    """The source that a command's options name; see `read_source`."""
    return read_source(
        options.src,
        id=options.id,
        text=options.text,
        image=options.image,
        exclude=options.exclude,
        form=TableFormat(options.quoting, options.sheet),
        pages=options.pages,
        videos=options.videos,
    )


def load(
    entry: Entry, thumbnail_px: int = 0, captions: bool = True, max_file_pixels: int | None = None
) -> Content:
    """Read an entry, with a thumbnail unless `thumbnail_px` is 0; `captions`: a picture's text is part of its digest.

    `max_file_pixels`: as for `load_image`.

    Raises:
        ImageError: its picture cannot be read.
        SourceError: its text cannot be read.
    """
    text = entry.text if entry.text_file is None else _text(entry.text_file)
    embedded_text = b"\0" + (text or "").encode()
    if entry.image is None:
        if not (text or "").strip():
            raise SourceError("it is empty")
        return Content(text, None, hashlib.sha256(embedded_text).hexdigest())
    about = named(entry.image)
    if about.page is not None:
        return _page(entry.image, text, thumbnail_px, captions)
    if (about.is_document or about.is_clip) and not entry.image.startswith(WEB):
        return _file(entry.image, text, thumbnail_px, captions)
    data = _bytes(entry.image)
    digest = hashlib.sha256(data + embedded_text if captions else data).hexdigest()
    try:
        data, facts = _first_frame(data, max_file_pixels)
        small_copy = thumbnail(data, thumbnail_px, max_file_pixels) if thumbnail_px else None
    except ImageError as error:
        raise ImageError(error.reason, entry.image) from error
    return Content(text, data, digest, None, small_copy, facts)


def _page(ref: str, caption: str | None, thumbnail_px: int, captions: bool) -> Content:
    """A page; its text is the document's caption, else what is written on it."""
    about = named(ref)
    assert about.page is not None
    file = stores.local_copy(about.file)
    picture = pdf.render(file, about.page)
    text = caption or _plain(pdf.texts(file, [about.page])[0])
    digest = hashlib.sha256(f"{picture.size}".encode() + picture.tobytes())
    if captions:
        digest.update(b"\0" + (text or "").encode())
    small_copy = thumbnail(picture, thumbnail_px) if thumbnail_px else None
    return Content(text, None, digest.hexdigest(), ImagePart(picture), small_copy)  # type: ignore[arg-type]


def _file(ref: str, caption: str | None, thumbnail_px: int, captions: bool) -> Content:
    """A whole document or a clip: its text is the caption, else what is written on a document's first pages."""
    about = named(ref)
    if is_stored(ref):
        ref = stores.local_copy(about.file) + ref.removeprefix(about.file)
        about = named(ref)
    text, facts = caption, dict[str, Any]()
    if about.is_clip:
        facts["seconds"] = round(probe(about.file).seconds, 3)
    elif text is None:
        pages = range(1, min(TEXT_PAGES, pdf.num_pages(about.file)) + 1)
        text = _plain("\n".join(pdf.texts(about.file, pages)))
    with open(about.file, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(ref.removeprefix(about.file).encode())
    if captions:
        digest.update(b"\0" + (text or "").encode())
    small_copy = thumbnail(preview(ref), thumbnail_px) if thumbnail_px else None
    return Content(text, None, digest.hexdigest(), part_of(ref), small_copy, facts)


def _bytes(ref: str) -> bytes:
    """Encoded bytes of a picture, wherever it is."""
    if ref.startswith(WEB):
        return fetch_picture(ref)
    table, mark, row = ref.partition(".lance#")
    if mark:
        cell = picture_cell(stores.lance_cell(f"{table}.lance", row, "image"))
        if not isinstance(cell, bytes):
            raise ImageError("its row has no bytes", ref)
        return cell
    if not is_stored(ref):
        return picture_bytes(ref)
    table, mark, row = ref.partition(".parquet#")
    if mark:
        return picture_bytes(f"{stores.local_copy(f'{table}.parquet')}#{row}")
    return stores.read(ref)


def _plain(text: str) -> str | None:
    """A page's text without what cannot be stored or shown: control characters, half characters."""
    kept = "".join(
        one for one in text if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cs", "Co", "Cn")
    )
    return kept.strip() or None


def _first_frame(data: bytes, max_file_pixels: int | None) -> tuple[bytes, dict[str, Any]]:
    """The picture, or an animation's first frame as PNG, and facts from its EXIF."""
    try:
        image = open_picture(data, max_file_pixels=max_file_pixels)
        facts = exif_facts(image)
        if not getattr(image, "is_animated", False) or image.format in ("MPO", "HEIF"):
            return data, facts
    except Exception:  # noqa: BLE001 - `load_image` reports whatever Pillow's readers run into
        return data, {}
    out = io.BytesIO()
    load_image(data, first_frame=True, max_file_pixels=max_file_pixels).save(out, "PNG")
    return out.getvalue(), facts


def exif_facts(image: Image.Image) -> dict[str, Any]:
    """When and where a picture was taken, from its EXIF."""
    exif = image.getexif()
    facts: dict[str, Any] = {}
    original = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
    date = str(original or exif.get(ExifTags.Base.DateTime))
    with suppress(ValueError, TypeError):  # no date, or the zeros of a camera without a clock
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
    angle = degrees + minutes / 60 + seconds / 3600
    if not math.isfinite(angle):
        raise ValueError("no number")
    return round(-angle if is_negative else angle, 6)


def thumbnail(data: bytes | Image.Image, size_px: int, max_file_pixels: int | None = None) -> bytes:
    """Scale a picture down to WebP. Raises `ImageError`: it cannot be decoded."""
    image = load_image(data, near_px=size_px, first_frame=True, max_file_pixels=max_file_pixels)
    image.thumbnail((size_px, size_px), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "WEBP", quality=80)
    return out.getvalue()


def _text(path: str) -> str:
    try:
        data = stores.read(path) if is_stored(path) else None
        if (os.path.getsize(path) if data is None else len(data)) > MAX_TEXT_BYTES:
            raise SourceError(f"it is larger than {MAX_TEXT_BYTES >> 20} MB, too long for one item", path)
        return (Path(path).read_bytes() if data is None else data).decode("utf-8-sig").strip()
    except OSError as error:
        raise SourceError(f"it cannot be read: {error.strerror or error}", path) from None
    except UnicodeDecodeError:
        raise SourceError("it is not UTF-8", path) from None


# -------------------------------------------------------------------------------------------------------------- folder


def _folder(root: Path, exclude: Exclude, videos: bool) -> Source:
    files: dict[str, str] = {}  # stamps by relative name
    faults: dict[str, str] = {}
    unseen: set[str] = set()
    skipped = Skipped()

    def unreadable(error: OSError) -> None:
        name = _relative(error.filename or root, root)
        faults[_printable(name)] = error.strerror or str(error)
        if not isinstance(error, FileNotFoundError):
            unseen.add(name)

    endings = _endings(videos)
    for folder, names in visible_files(root, unreadable, exclude, skipped):
        for path in (os.path.join(folder, name) for name in names):
            if not path.lower().endswith(endings):
                skipped.add(path)
            elif _printable(name := _relative(path, root)) != name:
                faults[_printable(name)] = "its name is not UTF-8"
            else:
                try:
                    files[name] = _stamp(path)
                except OSError as error:
                    unreadable(error)
    if "." in faults:
        raise SourceError(f"it cannot be read: {faults['.']}", root)
    return Source(
        os.path.abspath(root), _entries(os.path.abspath(root), files), faults, skipped, frozenset(unseen)
    )


def _endings(videos: bool) -> tuple[str, ...]:
    return (*SUFFIXES, PDF, ".txt", *(VIDEO_SUFFIXES if videos else ()))


def _stamp(path: str | Path) -> str:
    stat = os.stat(path)
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _with_pages(source: Source, pages: Literal["each", "together"]) -> Source:
    """The source with an entry for each page in place of each document, unless `pages` is together; one that cannot be opened is a fault."""
    entries: list[Entry] = []
    for entry in source.entries:
        about = named(entry.image or "")
        if not about.is_document or (entry.image or "").startswith(WEB):
            entries.append(entry)
            continue
        try:
            count = _num_pages(about.file, entry.stamp)
        except ImageError as error:
            source.faults[entry.id] = str(error)
            continue
        if about.page is not None and about.page > count:
            source.faults[entry.id] = f"document {about.file} has {count:,} pages"
            continue
        if pages == "together" and about.page is None:
            entries.append(replace(entry, metadata=entry.metadata | {"pages": count}))
            continue
        for number in range(1, count + 1) if about.page is None else [about.page]:
            name = entry.id if about.page is not None else page_reference(entry.id, number)
            metadata = entry.metadata | {
                "document": PurePosixPath(entry.id).name,
                "page": number,
                "pages": count,
            }
            ref = page_reference(about.file, number)
            entries.append(replace(entry, id=name, image=ref, metadata=metadata))
    return replace(source, entries=entries)


@lru_cache(maxsize=1 << 16)
def _num_pages(file: str, _stamp: str) -> int:
    """Kept for the next listing of a watched folder."""
    return pdf.num_pages(stores.local_copy(file))


def _entries(root: str, files: dict[str, str]) -> list[Entry]:
    """Pictures with their captions, and other texts; `files` are stamps by relative name."""
    texts = {name for name in files if name.lower().endswith(".txt")}
    captions = {_stem(name): name for name in sorted(texts)}  # the ending may be ".TXT"
    pictures = files.keys() - texts
    described = {*map(composed, pictures), *map(_stem, pictures)}
    entries = [
        _picture(root, files, name, captions.get(composed(name)) or captions.get(_stem(name)))
        for name in pictures
    ]
    entries += [
        Entry(name, files[name], text_file=f"{root}/{name}") for name in texts if _stem(name) not in described
    ]
    return sorted(entries, key=lambda entry: entry.id)


def _picture(root: str, files: dict[str, str], name: str, caption: str | None) -> Entry:
    stamp, text_file = files[name], None
    if caption is not None:
        stamp += f" {files[caption]}"
        text_file = f"{root}/{caption}"
    album = Path(name).parent.as_posix() if "/" in name else Path(root).name
    image = f"{root.rstrip('/')}/{name}"
    # Conditions are typed with letters and accents as one character.
    return Entry(name, stamp, text_file=text_file, image=image, metadata={"album": composed(album)})


def _is_listed(file: Path, root: Path) -> bool:
    """Whether a file would be listed with a folder, by its path as given or by that without links."""
    inside = [
        path.relative_to(folder)
        for path, folder in ((Path(os.path.abspath(file)), root), (file.resolve(), root.resolve()))
        if path.is_relative_to(folder)
    ]
    return any(not any(part.startswith(".") for part in path.parts) for path in inside)


def _relative(path: str | Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _stem(name: str) -> str:
    return composed(os.path.splitext(name)[0])


def composed(text: str) -> str:
    """Letters with their accents as one character: macOS separates the two in file names."""
    return unicodedata.normalize("NFC", text)


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------------------- table


def _table(path: str, column_names: tuple[str, str, str], form: TableFormat) -> Source:
    id_column, text_column, image_column = column_names
    entries: dict[str, Entry] = {}
    faults: dict[str, str] = {}
    ending, times = os.path.splitext(path)[1].lower(), Counter[str]()
    with reading(path):
        rows, columns = _rows(path, form)
        if columns and not {text_column, image_column} & set(columns):
            raise SourceError(
                f"there is neither of them, but {', '.join(map(repr, columns))}: name them, such as text=caption image=file",
                path,
                key=f"{text_column} or {image_column}",
            )
        is_library = (
            ending in (".parquet", stores.LANCE)
            and (id_column, image_column) == ("id", "image")
            and "id" in columns
        )
        for number, row in enumerate(rows, start=1):
            text, image, given = (
                _taken(row, name, ending in SHEETS) for name in (text_column, image_column, id_column)
            )
            if isinstance(image, bytes) and not is_library:
                raise SourceError(
                    "it holds encoded pictures: its columns must be called id and image, as in every picture library; it has "
                    f"{', '.join(map(repr, columns))}",
                    path,
                    key="id, image",
                )
            name = str(number if given is None else _whole(given))
            if id_column not in columns and isinstance(image, str) and not _is_data_url(image):
                times[image] += 1
                name = image if times[image] == 1 else f"{image}#{times[image]}"
            if name in entries or name in faults:
                raise SourceError(f"two rows have this id; ids ({id_column}=) must be unique", path, key=name)
            if fault := _fault(text, image):
                faults[name] = fault
                continue
            try:
                name.encode()
                entries[name] = _entry(name, text, image, row, path)
            except UnicodeEncodeError:
                name = name.encode(errors="backslashreplace").decode()
                faults[name] = "it contains half a character (a lone surrogate)"
    metadata = [entry.metadata for entry in entries.values()]
    if ending in (".csv", ".tsv"):
        texts_as_numbers(metadata)
    make_comparable(metadata)
    return Source(source_name(path), list(entries.values()), faults)


def _rows(path: str, form: TableFormat) -> tuple[Iterable[dict[str, Any]], list[str]]:
    """A table's rows, and the names of its columns."""
    if is_lance(path):
        return stores.lance_rows(path), stores.lance_columns(path)
    fs, place = (None, path)
    if is_stored(path):
        fs, place = stores.open_store(path)
        stores.exists(path)  # an error, and within its time, if it cannot be read
    rows: Iterable[dict[str, Any]] = table_rows(place, form=form, fs=fs)
    if path.lower().endswith(".parquet"):
        with open_parquet(place, fs) as file:
            return rows, file.schema_arrow.names
    rows = list(rows)  # JSON lines may each have other columns
    return rows, list(dict.fromkeys(key for row in rows for key in row))


def _taken(row: dict[str, Any], column: str, is_sheet: bool) -> Any:
    """Take a cell out of a row; None if it is empty. In a sheet, a caption 2024 is a number, and becomes a text again."""
    cell = picture_cell(row.pop(column, None))
    return None if is_missing(cell) else str(cell) if is_sheet else cell


def _whole(given: Any) -> Any:
    """An id; whole floats, into which pandas turns integers beside missing values, are integers again."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _fault(text: Any, image: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        return f"its text must be a string, got {type(text).__name__}"
    if image is not None and not isinstance(image, str | bytes):
        return f"its picture is neither a path nor bytes but {type(image).__name__}"
    if isinstance(image, str) and _is_data_url(image):
        return "its picture is a data URL: store it in a file, or as bytes in a Parquet file with columns id and image"
    if text is None and image is None:
        return "it has neither a text nor a picture"
    return None


def _is_data_url(image: str) -> bool:
    return image[:5].lower() == "data:"


def _entry(name: str, text: str | None, image: str | bytes | None, row: dict[str, Any], path: str) -> Entry:
    text = (text or "").strip() or None
    known = json.dumps([text, row], ensure_ascii=False, default=str, sort_keys=True)
    stamp = hashlib.sha256(known.encode())
    ref: str | None = None
    if isinstance(image, bytes):
        ref = f"{source_name(path)}#{name}"
        stamp.update(image)
    elif image:
        stamp.update(image.encode())
        folder = path.rpartition("/")[0] if is_stored(path) else os.path.dirname(path)
        ref = f"{folder}/{image}" if is_stored(path) and "://" not in image else resolved(image, folder)
        if not ref.startswith(WEB) and not is_stored(ref):
            ref = os.path.abspath(ref)
            library, mark, _ = ref.partition(".parquet#")
            stamp.update(file_stamp(f"{library}.parquet" if mark else ref).encode())
    return Entry(name, stamp.hexdigest(), text=text, image=ref, metadata=row)
