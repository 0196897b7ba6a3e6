"""Content hashes of items: what their embeddings depend on, without their names."""

import hashlib
import json
from pathlib import Path
from typing import Any

from rge.common.images import picture_bytes
from rge.common.parts import ImagePart, Part, PdfPart, TextPart, is_short, part_to_json, refs_of
from rge.common.schema import Item


def picture_digests(item: Item) -> tuple[str, ...]:
    """SHA-256 of the bytes of each of an item's pictures; an `ImageError` if one cannot be read."""
    return tuple(hashlib.sha256(picture_bytes(ref)).hexdigest() for ref in item.pictures)


def content_digest(item: Item, pictures: tuple[str, ...] | None = None) -> str:
    """SHA-256 of an item's instruction and of all its parts in order, without its id.

    ``pictures``: their `picture_digests`; None: read them.
    """
    pictures = picture_digests(item) if pictures is None else pictures
    order = [] if is_short(item.content) else [list(map(_told, item.content))]
    content = json.dumps([item.text, item.instruction, pictures, *order], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


def _told(part: Part) -> Any:
    """A text, None for a picture, which is hashed separately, and of a file the hash of its bytes and what is shown of it."""
    if isinstance(part, (TextPart, ImagePart)):
        return getattr(part, "text", None)
    read = _bytes_of if isinstance(part, PdfPart) or not isinstance(part.video, tuple) else picture_bytes
    files = [hashlib.sha256(read(ref)).hexdigest() for ref in refs_of(part)]
    return {name: value for name, value in part_to_json(part).items() if name not in ("pdf", "video")} | {
        "pdf" if isinstance(part, PdfPart) else "video": files
    }


def _bytes_of(ref: str | bytes) -> bytes:
    return ref if isinstance(ref, bytes) else Path(ref).read_bytes()
