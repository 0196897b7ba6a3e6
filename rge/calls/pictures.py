"""Prepare pictures for a request: metadata removed, upright, scaled down.

A photograph of twelve megapixels takes a second to decode and encode. In the event loop that would block all calls, and
some would time out through no fault of the endpoint; threads do it, since Pillow decodes and scales without the GIL.
"""

import asyncio
import base64
import io
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from rge.calls.request import Picture
from rge.common.images import load_image, picture_bytes
from rge.common.picture_metadata import without_metadata
from rge.common.schema import ImageRef

SENDABLE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every server reads; a picture of another format, or too large, is sent as JPEG."""
JPEG_QUALITY = 90
KEPT_BYTES = 64 * 2**20
"""Of encoded pictures that are kept, the last used ones: one picture is judged a hundred times."""
MAX_THREADS = 8


def sendable(ref: ImageRef, max_side_px: int) -> tuple[str, bytes]:
    """Media type and bytes of a picture as it is sent: pixels and nothing else.

    Returns:
        The file without its metadata where every server can read it, else a JPEG of it.

    Raises:
        ImageError: it cannot be read or decoded.
    """
    data = picture_bytes(ref)
    return _as_it_is(data, max_side_px) or _encoded(ref, max_side_px)


def _as_it_is(data: bytes, max_side_px: int) -> tuple[str, bytes] | None:
    # None where its pixels must be touched, which takes long.
    try:
        with Image.open(io.BytesIO(data)) as header:
            kind, mode, longest = header.format, header.mode, max(header.size)
            upright = header.getexif().get(0x0112, 1) in (0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # decoding it says what is wrong
    if kind not in SENDABLE or mode not in ("RGB", "RGBA", "L", "P") or longest > max_side_px or not upright:
        return None
    return SENDABLE[kind], without_metadata(data)


def _encoded(ref: ImageRef, max_side_px: int) -> tuple[str, bytes]:
    image = load_image(ref)
    image.thumbnail((max_side_px, max_side_px), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY)
    return "image/jpeg", out.getvalue()


def encoded(data: bytes) -> str:
    """Base64."""
    return base64.b64encode(data).decode()


class Pictures:
    """Prepares pictures beside the calls, as a context manager; keeps the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Picture, asyncio.Task[tuple[str, str]]] = OrderedDict()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="pictures")

    def __enter__(self) -> "Pictures":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, picture: Picture) -> tuple[str, str]:
        """Media type and base64 of a picture.

        Raises:
            ImageError: it cannot be read or decoded.
        """
        task = self._kept.get(picture)
        if task is None:
            task = self._kept[picture] = asyncio.create_task(self._prepare(picture))
        self._kept.move_to_end(picture)
        # Shielded: one of several calls that wait for it may be cancelled.
        found = await asyncio.shield(task)
        while self._num_bytes > KEPT_BYTES and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            if not self._kept[oldest].done():
                break
            gone = self._kept.pop(oldest)
            self._num_bytes -= len(gone.result()[1]) if gone.exception() is None else 0
        return found

    async def _prepare(self, picture: Picture) -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        media_type, data = await loop.run_in_executor(
            self._threads, sendable, picture.ref, picture.max_side_px
        )
        coded = encoded(data)
        self._num_bytes += len(coded)
        return media_type, coded
