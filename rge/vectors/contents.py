"""Content hashes of items: what their embeddings depend on, without their names."""

import hashlib
import json

from rge.common.images import picture_bytes
from rge.common.schema import Item


def picture_digests(item: Item) -> tuple[str, ...]:
    """SHA-256 of the bytes of each of an item's pictures; an `ImageError` if one cannot be read."""
    return tuple(hashlib.sha256(picture_bytes(ref)).hexdigest() for ref in item.images)


def content_digest(item: Item, pictures: tuple[str, ...] | None = None) -> str:
    """SHA-256 of an item's text, instruction and pictures, without its id.

    ``pictures``: their `picture_digests`; None: read them.
    """
    pictures = picture_digests(item) if pictures is None else pictures
    content = json.dumps([item.text, item.instruction, pictures], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()
