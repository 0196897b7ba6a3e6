"""One text for each picture, page, document or clip, for tables, index rows and command lines.

    photo.jpg    manual.pdf    manual.pdf#page=3    talk.mp4    talk.mp4#t=10,20

What follows the ``#`` is written as in links to PDFs (RFC 8118) and to clips (W3C media fragments): a page from 1, and a span in seconds.
A file whose name has it literally comes first.
"""

import os
import re
from typing import NamedTuple

from rge.common.parts import ImagePart, Part, PdfPart, VideoPart
from rge.content import video

PDF = ".pdf"
_PAGE = re.compile(r"(?s)(.*)#page=(\d{1,7})\Z")
_SPAN = re.compile(r"(?s)(.*)#t=(\d+(?:\.\d+)?)?(?:,(\d+(?:\.\d+)?))?\Z")


class Named(NamedTuple):
    """What a reference names: a file, and a page of a document or a span of a clip."""

    file: str
    page: int | None = None
    start: float | None = None
    end: float | None = None

    @property
    def is_document(self) -> bool:
        """Whether it is a PDF, by its ending."""
        return self.file.lower().endswith(PDF)

    @property
    def is_clip(self) -> bool:
        """Whether it is a video, by its ending."""
        return self.file.lower().endswith(video.SUFFIXES)


def named(ref: str) -> Named:
    """Take a reference apart."""
    if "#" in ref and not os.path.exists(ref):
        if (found := _PAGE.match(ref)) and Named(found[1]).is_document:
            return Named(found[1], page=int(found[2]))
        if (found := _SPAN.match(ref)) and Named(found[1]).is_clip:
            start, end = (None if time is None else float(time) for time in found.groups()[1:])
            return Named(found[1], start=start, end=end)
    return Named(ref)


def part_of(ref: str) -> Part:
    """The part that a reference names; a picture, unless its ending is that of a document or a clip."""
    about = named(ref)
    if about.is_document:
        return PdfPart(about.file, None if about.page is None else (about.page,))
    if about.is_clip:
        return VideoPart(about.file, about.start, about.end)
    return ImagePart(ref)


def page_reference(file: str, page: int) -> str:
    """The reference of a page."""
    return f"{file}#page={page}"
