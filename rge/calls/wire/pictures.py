"""Prepare pictures for a request to a model API: without metadata, scaled down, encoded.

A 12-megapixel photograph takes a second to decode and encode, which would block the event loop and time out other calls. So
this runs in threads; Pillow releases the GIL.
"""

import asyncio
import base64
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from rge.calls.request import Picture, Request
from rge.common.images import known_bytes, load_image, open_picture
from rge.content.picture_metadata import without_metadata

EncodedPictures = Mapping[Picture, str]
"""Each picture of a request as a ``data:`` URL."""
SENDABLE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every server reads; others are converted to JPEG."""
JPEG_QUALITY = 90
MAX_KEPT = 64
"""Encoded pictures that are kept: one picture may be judged a hundred times in a row."""
MAX_THREADS = 8


class Pictures:
    """Encodes pictures in threads, and keeps the latest."""

    def __init__(self) -> None:
        self._kept: dict[Picture, asyncio.Future[str]] = {}
        # Not the event loop's, which look up host names: a call's time limit includes that.
        self._threads = ThreadPoolExecutor(MAX_THREADS, "pictures")

    async def of(self, request: Request) -> EncodedPictures:
        """The encoded pictures of a request. Raises `ImageError`: a picture cannot be read or decoded, or has changed."""
        return {part: await self.encode(part) for part in request.parts if isinstance(part, Picture)}

    async def encode(self, picture: Picture) -> str:
        """The ``data:`` URL of a picture; raises as `of` does."""
        if (encoded := self._kept.pop(picture, None)) is None:
            encoded = asyncio.get_running_loop().run_in_executor(self._threads, data_url, picture)
        self._kept[picture] = encoded  # as the latest
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return await encoded


def data_url(picture: Picture) -> str:
    """A picture as a ``data:`` URL: the file without metadata if servers can read it, else a JPEG.

    Raises `ImageError`: it is unreadable, or no longer has the hash under which the answer is stored.
    """
    media_type, data = "image/jpeg", known_bytes(picture.ref, picture.sha256)
    if (kind := _sendable(data, picture.max_side_px)) is not None:
        media_type, data = SENDABLE[kind], without_metadata(data)
    else:
        image = load_image(data, name=picture.ref)
        image.thumbnail((picture.max_side_px, picture.max_side_px), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=JPEG_QUALITY)
        data = out.getvalue()
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _sendable(data: bytes, max_side_px: int) -> str | None:
    """The format of a picture that can be sent as it is; None: it must be re-encoded, which is slow, or `load_image` refuses it."""
    try:
        with open_picture(data) as header:
            kind, mode, longest = header.format, header.mode, max(header.size)
            plain = header.getexif().get(0x0112, 1) in (0, 1) and not getattr(header, "is_animated", False)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # decoding reports the error
    known = kind in SENDABLE and mode in ("RGB", "RGBA", "L", "P")
    return kind if known and longest <= max_side_px and plain else None
