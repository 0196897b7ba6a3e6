"""Pages of PDF documents as pictures, by PDFium.

PDFium is not thread-safe, so one lock guards every call. Documents stay open for the next page, a few at a time. A forked process
opens them again, since it would share the position in the file with its parent.
"""

import atexit
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import pypdfium2
from PIL import Image
from pypdfium2 import raw

from rge.common.files import POINTER_NOTE, is_pointer
from rge.common.images import picture_bytes
from rge.content.media_errors import MediaError, title

DPI = 144
"""Resolution at which pages are rendered unless a part says otherwise: small print stays legible."""
MAX_PIXELS = 1 << 24
"""A page with more pixels than this (an A2 poster at 144 dpi has 15.9 million) is rendered at a lower resolution."""
OPEN_DOCUMENTS = 4
"""Documents that stay open, in each process."""
MAX_DEPTH = 16
"""Forms within forms whose pictures are counted."""
MAX_OBJECTS = 200_000
"""Lines, texts and pictures of one page, where a page from elsewhere is checked."""
POINTS = 72
"""Units of a PDF's coordinates in an inch."""
Source = str | bytes
"""A path, ``library.parquet#row-id``, or the bytes themselves."""
T = TypeVar("T")


class PdfError(MediaError):
    """A document is missing, encrypted, damaged, without pages, or lacks the page that was asked for."""

    noun = "document"


_lock = threading.Lock()
_open: OrderedDict[tuple[str, int, int], pypdfium2.PdfDocument] = OrderedDict()
"""Open documents by path, size and modification time, the one that was used last at the end."""


def _release_in_child() -> None:
    _open.clear()
    _lock.release()


@atexit.register
def _close_all() -> None:
    with _lock:
        while _open:
            _open.popitem()[1].close()


# Nobody is inside PDFium while a process forks, so that the child finds it in order.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_release_in_child)


def num_pages(source: Source) -> int:
    """The number of a document's pages, at least 1. Raises `PdfError`."""
    with _document(source) as document:
        return len(document)


def page_sizes(
    source: Source, pages: Sequence[int] | None = None, dpi: float = DPI, max_pixels: int = MAX_PIXELS
) -> list[tuple[int, int]]:
    """Width and height in pixels of what `render` returns for each page, without reading what is on the pages.

    Args:
        source: the document.
        pages: page numbers from 1; None: all.
        dpi: pixels per inch.
        max_pixels: see `MAX_PIXELS`.

    Raises:
        PdfError: see there.
    """
    with _document(source) as document:
        numbers = range(1, len(document) + 1) if pages is None else pages
        return [
            _size(_of_page(source, document, number, document.get_page_size), dpi, max_pixels)
            for number in numbers
        ]


def render(source: Source, page: int, dpi: float = DPI, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """One page as an RGB picture on white, upright, with its annotations and filled-in forms.

    Args:
        source: the document.
        page: its number, from 1.
        dpi: pixels per inch.
        max_pixels: see `MAX_PIXELS`.

    Raises:
        PdfError: see there.
    """
    with _document(source) as document:
        sheet = _of_page(source, document, page, document.get_page)
        try:
            width, height = _size(sheet.get_size(), dpi, max_pixels)
            bitmap = pypdfium2.PdfBitmap.new_native(
                width, height, format=raw.FPDFBitmap_BGR, rev_byteorder=True
            )
            try:
                bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
                target = (bitmap, sheet, 0, 0, width, height, 0, raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER)
                raw.FPDF_RenderPageBitmap(*target)
                if document.formenv:
                    raw.FPDF_FFLDraw(document.formenv, *target)
                return bitmap.to_pil().copy()
            finally:
                bitmap.close()
        finally:
            sheet.close()


def picture_pixels(source: Source, page: int) -> int:
    """The number of pixels of the pictures in a page, as stored, from their headers. Raises `PdfError`."""
    with _document(source) as document:
        sheet = _of_page(source, document, page, document.get_page)
        try:
            total = 0
            for number, part in enumerate(sheet.get_objects(max_depth=MAX_DEPTH)):
                if number == MAX_OBJECTS:
                    raise PdfError(f"it has more than {MAX_OBJECTS:,} objects", title(source), page)
                if isinstance(part, pypdfium2.PdfImage):
                    total += math.prod(part.get_px_size())
            return total
        finally:
            sheet.close()


def texts(source: Source, pages: Sequence[int] | None = None) -> list[str]:
    """The text of each page as the file stores it, empty for a scan; for searching by words. Raises `PdfError`."""
    found = []
    with _document(source) as document:
        for number in range(1, len(document) + 1) if pages is None else pages:
            sheet = _of_page(source, document, number, document.get_page)
            try:
                page = sheet.get_textpage()
                try:
                    found.append(page.get_text_bounded())
                finally:
                    page.close()
            finally:
                sheet.close()
    return found


class Bookmark(NamedTuple):
    """An entry of a document's outline: its depth from 0, its title, and its page from 1, if it leads to one."""

    level: int
    title: str
    page: int | None


class Outline(NamedTuple):
    """A document's bookmarks in order, and the printed number of each page: its label, else its place."""

    bookmarks: list[Bookmark]
    labels: list[str]


def outline(source: Source) -> Outline:
    """How a document is divided. Raises `PdfError`."""
    with _document(source) as document:
        marks = []
        for mark in document.get_toc():
            target = mark.get_dest()
            index = None if target is None else target.get_index()
            marks.append(Bookmark(mark.level, mark.get_title(), None if index is None else index + 1))
        labels = [document.get_page_label(index) or str(index + 1) for index in range(len(document))]
    return Outline(marks, labels)


def _size(points: tuple[float, float], dpi: float, max_pixels: int) -> tuple[int, int]:
    width, height = (max(1e-3, side) * dpi / POINTS for side in points)
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    if scale == 1.0:
        width, height = math.ceil(width), math.ceil(height)
        scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    # A strip, however thin, keeps one pixel, and its length is cut to the limit.
    return (
        min(max_pixels, max(1, math.floor(width * scale))),
        min(max_pixels, max(1, math.floor(height * scale))),
    )


def _of_page(source: Source, document: pypdfium2.PdfDocument, number: int, get: Callable[[int], T]) -> T:
    if not 1 <= number <= len(document):
        raise PdfError(f"there is no such page: it has {len(document):,}", title(source), number)
    try:
        return get(number - 1)
    except pypdfium2.PdfiumError as error:
        raise PdfError(f"the page is damaged ({error})", title(source), number) from None


@contextmanager
def _document(source: Source) -> Iterator[pypdfium2.PdfDocument]:
    """The open document, which no other thread uses meanwhile."""
    if isinstance(source, bytes) or ".parquet#" in source:
        data = picture_bytes(source)
        with _lock, _opened(data, source) as document:
            yield document
        return
    try:
        stat = os.stat(source)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise PdfError(str(getattr(error, "strerror", None) or error), title(source)) from None
    if not os.path.isfile(source):
        raise PdfError("it is not a file", title(source))
    key = (os.path.abspath(source), stat.st_size, stat.st_mtime_ns)
    with _lock:
        if key not in _open:
            while len(_open) >= OPEN_DOCUMENTS:
                _open.popitem(last=False)[1].close()
            _open[key] = _opened(source, source)
        _open.move_to_end(key)
        yield _open[key]


def _opened(data: Source, source: Source) -> pypdfium2.PdfDocument:
    try:
        document = pypdfium2.PdfDocument(data)
        document.init_forms()
        return document
    except FileNotFoundError:
        raise PdfError("it does not exist", title(source)) from None
    except pypdfium2.PdfiumError as error:
        raise PdfError(_reason(data, error), title(source)) from None


def _reason(data: Source, error: pypdfium2.PdfiumError) -> str:
    """Why a document does not open. PDFium keeps the code of an earlier failure, so it is asked once more."""
    if isinstance(data, str):
        opened = raw.FPDF_LoadDocument(os.fsencode(data) + b"\0", None)
    else:
        opened = raw.FPDF_LoadMemDocument64(data, len(data), None)
    if opened:
        raw.FPDF_CloseDocument(opened)
        return "it has no pages"
    if raw.FPDF_GetLastError() == raw.FPDF_ERR_PASSWORD:
        return "it is encrypted; save a copy without the password, e.g. qpdf --decrypt --password=... IN OUT"
    if isinstance(data, str):
        try:
            with open(data, "rb") as file:
                data = file.read(1024)
        except OSError as failed:
            return str(failed.strerror or failed)
    if is_pointer(data[:64]):
        return POINTER_NOTE
    if b"%PDF-" not in data[:1024]:
        return "it is not a PDF"
    return f"it is damaged ({error}); try qpdf IN OUT, or print it to a new PDF"
