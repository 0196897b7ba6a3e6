"""The error of a document or clip that cannot be read."""

from typing import Any

from rge.common.images import ImageError


class MediaError(ImageError):
    """A document or clip is missing, unreadable or unsupported; the message names it and the fix.

    Attributes:
        file: its path, or ``<N bytes>``.
        reason: what is wrong.
        page: number of the page at fault, from 1; None: the whole document, or a clip.
    """

    kind = "file"

    def __init__(self, reason: str, file: str, page: int | None = None):
        where = file if page is None else f"{file}, page {page:,}"
        super().__init__(f"{self.kind} {where}: {reason}")
        self.file, self.reason, self.page = file, reason, page

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.file, self.page)


def title(source: object) -> str:
    """A source's name in messages: its path, or the number of its bytes."""
    return f"<{len(source)} bytes>" if isinstance(source, bytes) else str(source)
