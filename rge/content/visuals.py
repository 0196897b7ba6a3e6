"""What a prompt shows of each part: pictures, pages, and frames with their times; or only their sizes.

Files are opened when their part's turn comes. Sizes come from headers, and equal those of what is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from PIL import Image

from rge.common.images import load_image, picture_size
from rge.common.parts import ImagePart, ImageRef, Part, PdfPart, VideoPart
from rge.content import pdf, video

Size = tuple[int, int]
"""Width and height in pixels."""


class Clip(NamedTuple):
    """Frames of one size, and when each is shown, in seconds from the clip's start."""

    frames: Sequence[Image.Image]
    seconds: Sequence[float]

    @property
    def size(self) -> "ClipSize":
        """Its frames' size and times."""
        return ClipSize(self.frames[0].size, tuple(self.seconds))


class ClipSize(NamedTuple):
    """Size of a clip's frames, and when each is shown."""

    size: Size
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class FittedRule(video.VideoRule):
    """A rule whose frames get sizes that a model reads, so that they are scaled once."""

    fit: Callable[[Size, int], Size] | None = None  # from a frame's size and the most pixels that it may have

    def frame_size(self, size: Size, count: int) -> Size:
        """See `rge.content.video.VideoRule.frame_size`."""
        assert self.fit is not None
        return self.fit(size, max(1, min(self.max_pixels, self.total_pixels // count)))


def shown(
    part: Part, rule: video.VideoRule, load: Callable[[ImageRef], Image.Image] = load_image
) -> Iterator[Image.Image | Clip]:
    """The pictures and clips of a part that is no text, one after the other; `load` decodes a picture.

    Raises:
        ImageError: a picture, document or clip cannot be read.
    """
    if isinstance(part, ImagePart):
        yield load(part.image)
    elif isinstance(part, PdfPart):
        for page in _pages(part):
            yield pdf.render(part.pdf, page, part.dpi or pdf.DPI)
    elif isinstance(part, VideoPart):
        yield Clip(*video.sample(part.video, *asked(part, rule)))


def sizes(
    part: Part, rule: video.VideoRule, size_of: Callable[[ImageRef], Size] = picture_size
) -> Iterator[Size | ClipSize]:
    """The sizes of `shown`, without decoding; errors as far as headers show them."""
    if isinstance(part, ImagePart):
        yield size_of(part.image)
    elif isinstance(part, PdfPart):
        yield from pdf.page_sizes(part.pdf, part.pages, part.dpi or pdf.DPI)
    elif isinstance(part, VideoPart):
        given = asked(part, rule)
        seconds = video.times(part.video, *given)
        found = video.probe(part.video, part.fps)
        yield ClipSize(given[0].frame_size((found.width, found.height), len(seconds)), tuple(seconds))


def _pages(part: PdfPart) -> Sequence[int]:
    return part.pages or range(1, pdf.num_pages(part.pdf) + 1)


def asked(
    part: VideoPart, rule: video.VideoRule
) -> tuple[video.VideoRule, float | None, float | None, float | None]:
    """Arguments of `rge.content.video`: what the part says precedes the rule."""
    is_list = isinstance(part.video, tuple)
    own: dict[str, Any] = {
        "max_frames": part.max_frames,
        "num_frames": part.num_frames,
        "fps": None if is_list else part.fps,
    }
    rule = replace(rule, **{name: value for name, value in own.items() if value is not None})
    if part.num_frames is not None and part.max_frames is None:
        rule = replace(rule, max_frames=max(rule.max_frames, part.num_frames))
    return rule, part.start, part.end, part.fps if is_list else None
