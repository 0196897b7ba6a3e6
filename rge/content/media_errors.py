"""The error of a document or clip that cannot be read."""

from rge.common.images import ImageError


class MediaError(ImageError):
    """A document or clip is missing, unreadable or unsupported; `place` is the page at fault, from 1."""

    noun, numbered = "file", ", page {:,}"


def title(source: object) -> str:
    """A source's name in messages: its path, or the number of its bytes."""
    return f"<{len(source)} bytes>" if isinstance(source, bytes) else str(source)
