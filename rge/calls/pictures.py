"""Prepare pictures for a request: strip metadata, rotate upright, scale down, encode.

A 12-megapixel photograph takes a second to decode and encode, which would block the event loop and time out other calls. So
this runs in threads; Pillow releases the GIL.
"""

import asyncio
import base64
import io
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from rge.calls.request import Picture, Request
from rge.common.images import load_image, picture_bytes
from rge.common.picture_metadata import without_metadata
from rge.common.schema import ImageRef

EncodedPictures = Mapping[Picture, tuple[str, str]]
"""Media type and base64 of each picture of a request."""
SENDABLE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every server reads; others are converted to JPEG."""
JPEG_QUALITY = 90
CACHE_BYTES = 64 * 2**20
"""Size of the LRU cache of encoded pictures: one picture may be judged a hundred times."""
MAX_THREADS = 8


def prepare_picture(ref: ImageRef, max_side_px: int) -> tuple[str, bytes]:
    """Media type and bytes: the file without metadata if servers can read it, else a JPEG. Raises `ImageError`: unreadable."""
    if (unchanged := _unchanged(picture_bytes(ref), max_side_px)) is not None:
        return unchanged
    image = load_image(ref)
    image.thumbnail((max_side_px, max_side_px), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY)
    return "image/jpeg", out.getvalue()


def _unchanged(data: bytes, max_side_px: int) -> tuple[str, bytes] | None:
    # None: it must be re-encoded, which is slow, or `load_image` refuses it.
    try:
        with Image.open(io.BytesIO(data)) as header:
            kind, mode, longest = header.format, header.mode, max(header.size)
            plain = header.getexif().get(0x0112, 1) in (0, 1) and not getattr(header, "is_animated", False)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # decoding reports the error
    if kind not in SENDABLE or mode not in ("RGB", "RGBA", "L", "P") or longest > max_side_px or not plain:
        return None
    return SENDABLE[kind], without_metadata(data)


class Pictures:
    """Encodes pictures in threads, with an LRU cache; a context manager."""

    def __init__(self) -> None:
        self._cache: OrderedDict[Picture, asyncio.Task[tuple[str, str]]] = OrderedDict()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="pictures")

    def __enter__(self) -> "Pictures":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of(self, request: Request) -> EncodedPictures:
        """The encoded pictures of a request. Raises `ImageError`: a picture cannot be read or decoded."""
        return {part: await self.encode(part) for part in request.parts if isinstance(part, Picture)}

    async def encode(self, picture: Picture) -> tuple[str, str]:
        """Media type and base64 of a picture; raises as `of` does."""
        task = self._cache.get(picture)
        if task is None:
            task = self._cache[picture] = asyncio.create_task(self._prepare(picture))
        self._cache.move_to_end(picture)
        # Shielded: one of several waiting calls may be cancelled.
        result = await asyncio.shield(task)
        while self._num_bytes > CACHE_BYTES and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            if not self._cache[oldest].done():
                break
            evicted = self._cache.pop(oldest)
            self._num_bytes -= len(evicted.result()[1]) if evicted.exception() is None else 0
        return result

    async def _prepare(self, picture: Picture) -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        media_type, data = await loop.run_in_executor(
            self._threads, prepare_picture, picture.ref, picture.max_side_px
        )
        text = base64.b64encode(data).decode()
        self._num_bytes += len(text)
        return media_type, text
