"""What a prompt shows of each part: pictures, pages, and frames with their times; or only their sizes.

Files are opened when their part's turn comes. Sizes come from headers, and equal those of what is shown.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from rge.common.images import load_image, picture_size
from rge.common.parts import Content, ImagePart, ImageRef, Part, PdfPart, TextPart, VideoPart
from rge.content import pdf, video
from rge.content.config import VideoConfig

V = TypeVar("V")

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


def frames(part: VideoPart, rule: video.VideoRule) -> Iterator[tuple[Image.Image, float]]:
    """The frames of a clip, one after the other, and when each is shown; errors as of `shown`."""
    return video.frames(part.video, *asked(part, rule))


def as_pictures(content: Content, *, clips: bool = True) -> Content:
    """Content with encoded pictures in place of pages and, unless clips stay, of their frames; errors as of `shown`."""
    rule = video.VideoRule(**vars(VideoConfig()), multiple=1)
    found: list[Part] = []
    for part in content:
        if isinstance(part, TextPart | ImagePart) or not (clips or isinstance(part, PdfPart)):
            found.append(part)
            continue
        for visual in shown(part, rule):
            for picture in visual.frames if isinstance(visual, Clip) else [visual]:
                file = io.BytesIO()
                picture.save(file, "PNG", compress_level=1)
                found.append(ImagePart(file.getvalue()))
    return tuple(found)


def pieces(content: Content, shown: Callable[[Part], Iterable[V]]) -> list[str | V]:
    """Content in order, blank texts left out and adjacent ones joined; `shown` gives what a part shows."""
    found: list[str | V] = []
    for part in content:
        if not isinstance(part, TextPart):
            found.extend(shown(part))
        elif text := part.text.strip():
            if found and isinstance(found[-1], str):
                text = f"{found.pop()}\n{text}"
            found.append(text)
    return found


def surrounded(shown: Sequence[str | V], before: str, after: str) -> list[str | V]:
    """Pieces with words before their first text, and after all of them; without a text, both are at the end."""
    found = [*shown]
    first = next((place for place, piece in enumerate(found) if isinstance(piece, str)), None)
    if first is None:
        return [*found, (before + after).lstrip("\n")]
    found[first] = f"{before}{found[first]}"
    if isinstance(last := found[-1], str):
        found[-1] = last + after
    else:
        found.append(after.lstrip("\n"))
    return found


def sizes(
    part: Part, rule: video.VideoRule, size_of: Callable[[ImageRef], Size] = picture_size
) -> Iterator[Size | ClipSize]:
    """The sizes of `shown`, without decoding; errors as far as headers show them. A clip that is turned upright has its sides swapped."""
    if isinstance(part, ImagePart):
        yield size_of(part.image)
    elif isinstance(part, PdfPart):
        yield from pdf.page_sizes(part.pdf, part.pages, part.dpi or pdf.DPI)
    elif isinstance(part, VideoPart):
        given = asked(part, rule)
        seconds = video.times(part.video, *given)
        yield ClipSize(given[0].frame_size(video.header_size(part.video), len(seconds)), tuple(seconds))


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
