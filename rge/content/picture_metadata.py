"""Strip EXIF, comments and profiles (place, time, device, author) from encoded pictures.

JPEG, PNG and WebP are rebuilt from only the parts that a decoder needs for the pixels, which therefore stay bit for bit the same.
"""

import io
import re
import struct
from contextlib import suppress
from typing import Any

from PIL import ExifTags, Image

from rge.common.images import ImageError, load_image, open_picture

JPEG_QUALITY = 95
"""Of JPEGs that are re-encoded because they must be rotated."""
_PNG_HEAD, _PNG_PARTS = b"\x89PNG\r\n\x1a\n", (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"gAMA", b"sBIT")
_WEBP_PARTS = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH")
# In coded JPEG data a marker is FF and neither 00 (a literal FF), nor D0 to D7 (restart), nor FF (fill).
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def without_metadata(data: bytes) -> bytes:
    """The same picture without metadata, rotated upright as its EXIF says.

    Returns:
        A JPEG, PNG or WebP with equal pixels; equal bytes if there was nothing to remove. A rotated JPEG is re-encoded with
        `JPEG_QUALITY`. Other formats become PNG.

    Raises:
        ImageError: it cannot be decoded.
    """
    try:
        with open_picture(data) as image:
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            is_rotated = image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(f"it cannot be decoded: {error}", f"<{len(data)} bytes>") from None
    rebuild = {"JPEG": _jpeg, "PNG": _png, "WEBP": _webp}.get(kind)
    if rebuild is not None and not is_rotated:
        with suppress(ValueError, struct.error, IndexError):  # a damaged container that can be decoded
            return rebuild(data)
    out = io.BytesIO()
    settings: dict[str, dict[str, Any]] = {"JPEG": {"quality": JPEG_QUALITY}, "WEBP": {"lossless": True}}
    load_image(data).save(out, "PNG" if rebuild is None else kind, **settings.get(kind, {}))
    return out.getvalue()


def _jpeg(data: bytes) -> bytes:
    # Keeps tables, frames and scans, the JFIF header (density, not thumbnail) and Adobe's APP14 (colour coding). Drops what
    # follows the end: phones append further pictures with their own EXIF.
    out, at = [data[:2]], 2
    while True:
        if data[at] != 0xFF:
            raise ValueError("no marker")
        kind = data[at + 1]
        if kind == 0xFF:
            at += 1
            continue
        if kind == 0xD9:
            return b"".join([*out, b"\xff\xd9"])
        (size,) = struct.unpack_from(">H", data, at + 2)
        part, at = data[at : at + 2 + size], at + 2 + size
        if kind == 0xE0 and part[4:9] == b"JFIF\0":
            out.append(b"\xff\xe0\x00\x10" + part[4:16] + b"\0\0")
        elif kind == 0xEE or not (0xE0 <= kind <= 0xEF or kind == 0xFE):
            out.append(part)
        if kind == 0xDA:
            marker = _MARKER.search(data, at)
            if marker is None:
                raise ValueError("no end")
            out.append(data[at : marker.start()])
            at = marker.start()


def _png(data: bytes) -> bytes:
    out, at = [_PNG_HEAD], len(_PNG_HEAD)
    while True:
        (size,) = struct.unpack_from(">I", data, at)
        kind, part = data[at + 4 : at + 8], data[at : at + 12 + size]
        if len(part) < 12 + size:
            raise ValueError("cut short")
        if kind in _PNG_PARTS:
            out.append(part)
        elif kind[:1].isupper():
            raise ValueError("an unknown critical chunk")
        at += 12 + size
        if kind == b"IEND":
            return b"".join(out)


def _webp(data: bytes) -> bytes:
    out, at = [], 12
    (end,) = struct.unpack_from("<I", data, 4)
    while at < min(8 + end, len(data)):
        (size,) = struct.unpack_from("<I", data, at + 4)
        kind, part = data[at : at + 4], data[at : at + 8 + size + size % 2]
        if kind == b"VP8X":
            # Keep only the alpha flag: profile, EXIF, XMP and animation are removed.
            part = part[:8] + bytes([part[8] & 0x10]) + part[9:]
        if kind in _WEBP_PARTS:
            out.append(part)
        at += len(part) or 1
    if not any(part.startswith((b"VP8 ", b"VP8L")) for part in out):
        raise ValueError("an animation, of one frame")
    body = b"WEBP" + b"".join(out)
    return b"RIFF" + struct.pack("<I", len(body)) + body
