"""What is asked of a model, and the key under which its answer is kept."""

import base64
import hashlib
import io
import json
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

from rge.common.images import load_image, picture_bytes
from rge.common.schema import ImageRef

SENDABLE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every server reads; a picture of another format, or too large, is sent as JPEG."""
JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture inside a prompt.

    Attributes:
        ref: where it is; read when it is sent, and not at all where the answer is already kept.
        sha256: of its encoded bytes: what the key of the answer holds instead of a path.
        max_side_px: longer sides are scaled down to this before sending.
    """

    ref: ImageRef
    sha256: str
    max_side_px: int = 1024


Part = str | Picture


@dataclass(frozen=True, slots=True)
class Request:
    """One call.

    Attributes:
        model: name the server knows the model by.
        parts: the user's message, texts and pictures in the order they are read.
        system: instructions in front of it, or None.
        temperature: sampling temperature.
        max_tokens: cap on the answer.
        sample: number of the draw. Two judges that are the same model ask the same thing; this keeps their answers
            apart, and is sent as the ``seed``.
    """

    model: str
    parts: tuple[Part, ...]
    system: str | None = None
    temperature: float = 0.0
    max_tokens: int = 1024
    sample: int = 0

    def key(self) -> str:
        """sha256 over model, texts, picture contents and settings; no path, address or secret is part of it."""
        body = {
            "model": self.model,
            "system": self.system,
            "parts": [
                {"sha256": part.sha256, "max_side_px": part.max_side_px}
                if isinstance(part, Picture)
                else part
                for part in self.parts
            ],
            "settings": [self.temperature, self.max_tokens, self.sample],
        }
        return hashlib.sha256(json.dumps(body, ensure_ascii=False, sort_keys=True).encode()).hexdigest()

    def num_characters(self) -> int:
        """Length of its texts."""
        return len(self.system or "") + sum(len(part) for part in self.parts if isinstance(part, str))

    def num_pictures(self) -> int:
        """How many pictures it shows."""
        return sum(isinstance(part, Picture) for part in self.parts)


def sendable(picture: Picture) -> tuple[str, bytes]:
    """Media type and bytes of a picture as it is sent.

    Returns:
        The file as it is where every server can read it, else a JPEG of it.

    Raises:
        ImageError: it cannot be read or decoded.
    """
    data = picture_bytes(picture.ref)
    with Image.open(io.BytesIO(data)) as header:
        kind, mode, longest = header.format, header.mode, max(header.size)
    if kind in SENDABLE and mode in ("RGB", "RGBA", "L", "P") and longest <= picture.max_side_px:
        return SENDABLE[kind], data
    image = load_image(picture.ref)
    image.thumbnail((picture.max_side_px, picture.max_side_px), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY)
    return "image/jpeg", out.getvalue()


@lru_cache(maxsize=256)
def encoded(picture: Picture) -> tuple[str, str]:
    """Media type and base64 of a picture; the last few are kept, for one picture is judged a hundred times."""
    media_type, data = sendable(picture)
    return media_type, base64.b64encode(data).decode()
