"""Open pictures by reference and decode them upright (EXIF) as RGB; every failure is a clear `ImageError`."""

import base64
import hashlib
import io
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from rge.common.errors import UserError
from rge.common.files import POINTER_NOTE, is_pointer
from rge.common.parts import ImageRef, data_url_content, picture_of

WEB = ("http://", "https://")
FETCH_S, FETCH_BYTES = 30, 64 << 20
"""Limits of a download from the web."""
LIBRARY_BYTES, BATCH_BYTES = 256 << 20, 4 << 20
"""Row groups of picture libraries that stay in memory, in each process (the last one always does), and what is read of one at once."""
REPLACED_TIMES = 3
"""Attempts at a library that is replaced while it is read."""
SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif",
    ".tiff", ".webp",
)  # fmt: skip
"""Endings of picture files; files that Pillow cannot read are reported, not skipped."""
UNKNOWN_RANGE = ("I", "F")
"""Modes of 32-bit pixels."""
FORMATS = frozenset(
    ("AVIF", "BMP", "CUR", "DDS", "DIB", "GIF", "HEIF", "ICNS", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "PSD", "QOI",
     "SGI", "TGA", "TIFF", "WEBP", "XBM", "XPM")
)  # fmt: skip
"""Formats that are read. Pillow passes PostScript (EPS) to Ghostscript, a program that a picture from elsewhere must not start, and
has no decoder of its own for the rest (WMF, GRIB, ...)."""
MOST_PIXELS, MOST_JPEG_PIXELS = 89_478_485, 250_000_000
"""Largest picture that is decoded, as Pillow's own limit, and largest JPEG, which above the first is decoded at a smaller size."""
JPEGS = ("JPEG", "MPO")
UPLOAD_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats of pictures that clients send. Pillow's readers of the many rare ones have hardly been audited."""


class ImageError(UserError):
    """A picture is missing, unreadable or unsupported; `file` names it, `kind` says which.

    Kinds: animated, damaged, format, huge, library, range (of pixels), row, truncated, unreadable.
    """

    noun = "picture"


@dataclass(frozen=True)
class _Library:
    """One version of a picture library: in which row group each picture is."""

    path: str
    version: tuple[int, int]  # size and modification time
    metadata: pq.FileMetaData
    row_of: dict[str, int]
    ends: np.ndarray  # number of rows up to the end of each row group

    def cell(self, name: str) -> Any:
        """A picture's cell; reads its row group alone. Raises `_Replaced`, or what pyarrow raises."""
        row = self.row_of[name]
        group = int(np.searchsorted(self.ends, row, side="right"))
        first = int(self.ends[group - 1]) if group else 0
        return self._pictures(group)[row - first].as_py()

    def _pictures(self, group: int) -> pa.ChunkedArray:
        key = (self.path, self.version, group)
        with _reading:  # of threads that need the same group, one reads it
            if key not in _groups:
                with open(self.path, "rb") as file:
                    if _version(os.fstat(file.fileno())) != self.version:
                        raise _Replaced
                    _groups[key] = self._read(file, group)
                while len(_groups) > 1 and sum(map(_num_bytes, _groups.values())) > LIBRARY_BYTES:
                    _groups.popitem(last=False)
            _groups.move_to_end(key)
            return _groups[key]

    def _read(self, file: BinaryIO, group: int) -> pa.ChunkedArray:
        """A group's pictures, read a few megabytes at a time: at once, a group would be in memory several times."""
        about = self.metadata.row_group(group)
        rows = max(1, BATCH_BYTES * about.num_rows // max(1, about.total_byte_size))
        parquet = pq.ParquetFile(file, metadata=self.metadata, buffer_size=BATCH_BYTES, pre_buffer=False)
        batches = parquet.iter_batches(rows, row_groups=[group], columns=["image"])
        return pa.chunked_array([batch.column("image") for batch in batches])


class _Replaced(Exception):
    """Another file is there since the library was opened."""


_groups: OrderedDict[tuple[str, tuple[int, int], int], pa.ChunkedArray] = OrderedDict()
"""Row groups in memory, the one that was used last at the end."""
_reading = threading.Lock()


def _renew_lock() -> None:
    """In a child process: a thread of the parent may have held the lock, and is not there to release it."""
    global _reading
    _reading = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _num_bytes(column: pa.ChunkedArray) -> int:
    return column.get_total_buffer_size()


def _version(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=64)
def _latest(_library: str) -> dict[tuple[int, int], _Library]:
    """A library in its latest version; filled by `_library`."""
    return {}


def _library(path: str) -> _Library:
    latest, version = _latest(path), _version(os.stat(path))
    if (known := latest.get(version)) is not None:  # one look: another thread may clear it
        return known
    with open(path, "rb") as opened:
        version = _version(os.fstat(opened.fileno()))
        file = pq.ParquetFile(opened)
        if missing := {"id", "image"} - set(file.schema_arrow.names):
            raise ValueError(f"no column {min(missing)}")
        names = file.read(columns=["id"])["id"].to_pylist()
        metadata = file.metadata
    ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
    found = _Library(path, version, metadata, {str(name): row for row, name in enumerate(names)}, ends)
    latest.clear()
    latest[version] = found
    return found


def _library_cell(path: str, name: str) -> Any:
    """A picture's cell in a library; `ImageError` if there is none."""
    ref = f"{path}#{name}"
    for _ in range(REPLACED_TIMES):
        try:
            library = _library(path)
            if name not in library.row_of:
                raise ImageError(f"its library has no such row, of {len(library.row_of)}", ref, kind="row")
            return library.cell(name)
        except _Replaced:
            continue
        except FileNotFoundError:
            raise ImageError("its library does not exist", ref, kind="library") from None
        except ImageError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise ImageError(
                f"its library is not a Parquet file with columns id and image: {error}", ref, kind="library"
            ) from None
    raise ImageError("its library keeps being replaced: read it once it is complete", ref, kind="library")


def picture_bytes(ref: ImageRef) -> bytes:
    """Encoded bytes of a picture, by the path of a file, ``library.parquet#row-id``, or the bytes themselves."""
    if isinstance(ref, bytes):
        return ref
    path, mark, row = ref.partition(".parquet#")
    if mark:
        cell = _library_cell(path + ".parquet", row)
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(data, bytes):
            with suppress(ValueError):
                data = picture_of(data)
        if not isinstance(data, bytes):
            raise ImageError("its row has no bytes", ref, kind="row")
        return data
    file = Path(ref)
    try:
        # Reading from a pipe or a device might block or never end.
        if not file.exists() or file.is_file() or file.is_dir():
            return file.read_bytes()
        reason = "it is a pipe or a device, not a file"
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = str(getattr(error, "strerror", None) or error)
    raise ImageError(f"it cannot be read: {reason}", ref, kind="unreadable")


def known_bytes(ref: ImageRef, sha256: str) -> bytes:
    """`picture_bytes` of a picture that had this hash when it was first read; `ImageError` also if it has changed since."""
    data = picture_bytes(ref)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ImageError("it has changed since it was first read", _title(ref))
    return data


class PictureIndex:
    """Checks whether pictures exist, by listing each folder or library once.

    One access per folder instead of one per picture: on a network disk, minutes instead of hours.

    Attributes:
        asked: folders and libraries that were consulted; callers may clear it.
    """

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str] | str] = {}
        self.asked: set[str] = set()

    def has(self, path: str) -> bool:
        """Whether there is such a picture or library."""
        return self.fault(path) is None

    def fault(self, ref: str) -> str | None:
        """Why a picture cannot exist, or None."""
        path, mark, row = ref.partition(".parquet#")
        folder, name = (path + ".parquet", row) if mark else os.path.split(ref)
        self.asked.add(folder)
        if folder not in self._listed:
            self._listed[folder] = _rows_of(folder) if mark else _files_in(folder)
        names = self._listed[folder]
        if isinstance(names, str):
            return names
        if name in names:
            return None
        if mark:
            return f"picture {row!r} is not in {folder}"
        return f"picture {ref} does not exist"


def names_picture(text: str, *, local: bool = True) -> bool:
    """Whether a text is nothing but a picture's data URL, its address on the web or, if `local`, an existing picture's reference.

    Embedded as words, it would silently give a useless embedding.
    """
    text = text.strip()
    if text[:11].lower() == "data:image/":
        return True
    address = text.lower()
    if address.startswith(WEB):
        return not re.search(r"\s", address) and re.split("[?#]", address)[0].endswith(SUFFIXES)
    return local and (address.endswith(SUFFIXES) or ".parquet#" in text) and is_there(text)


def is_there(ref: str) -> bool:
    """Whether one picture exists, without listing its whole folder as `PictureIndex` does."""
    path, mark, row = ref.partition(".parquet#")
    if not mark:
        return os.path.isfile(ref)
    names = _rows_of(path + ".parquet")
    return not isinstance(names, str) and row in names


def _rows_of(library: str) -> frozenset[str] | str:
    """Names of a library's rows, or why it has none."""
    try:
        stat = os.stat(library)
        return _rows_of_version(library, stat.st_size, stat.st_mtime_ns)
    except FileNotFoundError:
        return f"picture library {library} does not exist"
    except (OSError, ValueError) as error:  # ValueError: also a path with a zero byte
        return f"picture library {library} is not a Parquet file with columns id and image: {error}"


@lru_cache(maxsize=8)
def _rows_of_version(library: str, _size: int, _time_ns: int) -> frozenset[str]:
    if missing := {"id", "image"} - set(pq.read_schema(library).names):
        raise ValueError(f"no column {min(missing)}")
    return frozenset(map(str, pq.read_table(library, columns=["id"])["id"].to_pylist()))


def _files_in(folder: str) -> frozenset[str] | str:
    try:
        with os.scandir(folder or ".") as entries:
            return frozenset(entry.name for entry in entries if _is_file(entry))
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        return f"picture folder {folder} cannot be read: {getattr(error, 'strerror', None) or error}"


def _is_file(entry: os.DirEntry) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False  # a link to itself


def decode_data_url(address: str) -> bytes:
    """The content of a ``data:`` URL in base64; anything else is an `ImageError`."""
    try:
        return data_url_content(address)
    except ValueError as error:
        raise ImageError(f"it cannot be read: {error}", shortened(address)) from None


def shortened(address: str) -> str:
    """An address for messages."""
    return address[:60] + ("..." if len(address) > 60 else "")


def data_url(picture: bytes | None) -> str | None:
    """A WebP picture as a ``data:`` URL."""
    return None if picture is None else f"data:image/webp;base64,{base64.b64encode(picture).decode()}"


def load_image(
    ref: ImageRef | Image.Image,
    *,
    near_px: int | None = None,
    first_frame: bool = False,
    name: ImageRef | None = None,
    max_file_pixels: int | None = None,
) -> Image.Image:
    """Decode a picture to RGB, with its EXIF rotation applied and transparency on white.

    A JPEG of more than `MOST_PIXELS` is decoded at a half, a quarter or an eighth of its sides.

    Args:
        ref: see `picture_bytes`; or an open Pillow image.
        near_px: for thumbnails: a JPEG may be decoded at a smaller size, but with at least this many pixels per side.
        first_frame: use the first frame of an animation, which is an error otherwise.
        name: of bytes that were read before, for messages.
        max_file_pixels: largest picture, in pixels of the file; None: `MOST_PIXELS`, of a JPEG `MOST_JPEG_PIXELS`.

    Raises:
        ImageError: missing, not an image, truncated, animated, with 32-bit pixels of unknown range, or too large.
    """
    if isinstance(ref, Image.Image):
        title = f"<{ref.width} x {ref.height} picture>"
        with _explained(title):
            return _decoded(ref, title)
    data = io.BytesIO(picture_bytes(ref))
    with _opened(data, name or ref, first_frame, max_file_pixels, near_px) as (image, title):
        image.load()
        _check_pixels(image, title, max_file_pixels)  # the size of an ICO is known only now
        return _decoded(image, title)


class Header(NamedTuple):
    """What the header of a picture says, and the bytes of memory that `load_image` needs for it."""

    width: int
    height: int
    num_bytes: int


def upload_header(data: bytes) -> Header:
    """The header of a client's picture; `ImageError` unless its format is one of `UPLOAD_FORMATS`."""
    name = f"<{len(data)} bytes>"
    with _explained(name):
        image = _of_formats(io.BytesIO(data), UPLOAD_FORMATS)
        if image is None:
            formats = ", ".join(UPLOAD_FORMATS)
            raise ImageError(f"it cannot be decoded: it is none of {formats}", name, kind="format")
        is_plain = image.mode in ("1", "L", "P", "RGB") and "transparency" not in image.info
        # Pillow stores RGB as 4 bytes a pixel, and there are up to two copies, with transparency four. libjpeg buffers a
        # progressive picture, and libwebp two canvases. (Peaks measured by `tests/rge/common/test_images.py`.)
        pixel_bytes = (10 if is_plain else 16) + (8 if image.format == "WEBP" else 0)
        return Header(*image.size, image.width * image.height * pixel_bytes)


def picture_size(ref: ImageRef | Image.Image) -> tuple[int, int]:
    """Width and height of `load_image`'s result, from the picture's header alone; errors as far as that shows them."""
    if isinstance(ref, Image.Image):
        return ref.size
    if isinstance(ref, bytes) or ".parquet#" in ref or not Path(ref).is_file():
        source: BinaryIO = io.BytesIO(picture_bytes(ref))
    else:
        try:
            source = open(ref, "rb")  # closed below
        except OSError as error:
            raise ImageError(
                f"it cannot be read: {error.strerror or error}", ref, kind="unreadable"
            ) from None
    with source, _opened(source, ref) as (image, name):
        if image.mode in UNKNOWN_RANGE:
            _eight_bits(image, name)
        width, height = image.size
        # Pillow swaps the sides of a TIFF itself. `PngImageFile.getexif` would decode the picture.
        exif = Image.Image.getexif(image)
        is_rotated = image.format != "TIFF" and exif.get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return (height, width) if is_rotated else (width, height)


@contextmanager
def _opened(
    source: BinaryIO,
    ref: ImageRef,
    first_frame: bool = False,
    max_file_pixels: int | None = None,
    near_px: int | None = None,
) -> Iterator[tuple[Image.Image, str]]:
    """An open picture that is not decoded yet, and its name for messages; errors inside become an `ImageError`."""
    name = _title(ref)
    with _explained(name):
        image = open_picture(source, name=name, max_file_pixels=max_file_pixels)
        # Counting the frames would decode them all. A phone's MPO (a JPEG followed by previews) and HEIC open as the picture.
        if not first_frame and image.format not in ("MPO", "HEIF") and getattr(image, "is_animated", False):
            raise ImageError("it has several frames: extract the frame that you need", name, kind="animated")
        _reduce(image, near_px)
        yield image, name


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:  # its message contains a memory address
        reason = (
            f"Pillow does not recognise it as a picture of a supported format ({', '.join(sorted(FORMATS))})"
        )
        if find_spec("pillow_heif") is None:
            reason += "; HEIC needs pillow-heif: pip install -e '.[search]'"
        raise ImageError(f"it cannot be decoded: {reason}", name, kind="format") from None
    except Exception as error:  # Pillow's readers raise anything on damaged files
        # Pillow has no type for a file that is cut short, only this word.
        kind = "truncated" if "truncated" in str(error) else "damaged"
        raise ImageError(f"it cannot be decoded: {error}", name, kind=kind) from error


def open_picture(
    data: bytes | BinaryIO, *, name: ImageRef | None = None, max_file_pixels: int | None = None
) -> ImageFile:
    """Open a picture of one of `FORMATS` without decoding it, from encoded bytes or an open file; HEIC needs pillow-heif.

    `name` is for messages, `max_file_pixels` as for `load_image`.

    Raises:
        ImageError: it has more pixels.
        UnidentifiedImageError: its format is none of these. Pillow's readers raise other errors too.
    """
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    image = _of_formats(source, FORMATS)
    if image is None and find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
        image = _of_formats(source, FORMATS)
    if image is None:
        source.seek(0)
        if is_pointer(source.read(64)):
            raise ImageError(POINTER_NOTE, _title(name if name is not None else source))
        raise UnidentifiedImageError("no format of Pillow's fits")
    _check_pixels(image, _title(name if name is not None else source), max_file_pixels)
    return image


def _of_formats(source: BinaryIO, formats: Collection[str]) -> ImageFile | None:
    """`Image.open` without its check for decompression bombs, which warns once per process, and is ours to make."""
    Image.init()
    source.seek(0)
    prefix = source.read(16)
    for name in (name for name in Image.ID if name in formats):
        factory, accept = Image.OPEN[name]
        try:
            if accept is None or accept(prefix) is True:
                source.seek(0)
                return factory(source, "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue  # Pillow's readers say so that it is of another format
    return None


def _title(ref: object) -> str:
    size = (
        len(ref)
        if isinstance(ref, bytes)
        else ref.getbuffer().nbytes
        if isinstance(ref, io.BytesIO)
        else None
    )
    return str(ref) if size is None else f"<{size} bytes>"


def _check_pixels(image: Image.Image, name: str, most: int | None) -> None:
    limit = most or (MOST_JPEG_PIXELS if image.format in JPEGS else MOST_PIXELS)
    if (pixels := image.width * image.height) > limit:
        raise ImageError(
            f"it cannot be decoded: {pixels:,} pixels exceed the limit of {limit:,}, could be a decompression bomb; scale it down",
            name,
            kind="huge",
        )


def _reduce(image: Image.Image, near_px: int | None) -> None:
    """Let a JPEG be decoded at a smaller size, if it is for a thumbnail or has more than `MOST_PIXELS`; others stay as they are."""
    width, height = image.size
    factor = next((n for n in (1, 2, 4) if width * height <= MOST_PIXELS * n**2), 8)
    if image.format in JPEGS and (factor > 1 or near_px is not None):
        sides = (width // factor, height // factor)
        image.draft(None, sides if near_px is None else (min(near_px, sides[0]), min(near_px, sides[1])))


def _decoded(image: Image.Image, name: str) -> Image.Image:
    image = _eight_bits(ImageOps.exif_transpose(image), name)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")  # `exif_transpose` has made a copy


def _eight_bits(image: Image.Image, name: str) -> Image.Image:
    # Pillow's own conversion clips instead of scaling: a 16-bit scan would become white.
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in UNKNOWN_RANGE:
        raise ImageError(
            "it has 32-bit pixels of unknown range: convert it to 8 bits a channel", name, kind="range"
        )
    return image
