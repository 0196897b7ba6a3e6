"""What people are shown of any part: one picture, with the first pages or some frames side by side."""

import io
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw

from rge.common.images import load_image, picture_bytes
from rge.common.parts import ImagePart, Part, PdfPart, VideoPart
from rge.content import pdf, video
from rge.content.references import named, part_of

SHOWN = 4
"""Most pages, or frames, of one preview."""
GAP_PX = 4
EDGE = (190, 190, 190)
MAX_PX = 2000
"""Longer side of a preview that is sent as a file."""


def shown(part: Part, most: int = SHOWN) -> list[Image.Image]:
    """A part as pictures: the picture, up to `most` pages or frames, nothing for a text. Raises `ImageError`."""
    if isinstance(part, ImagePart):
        return [load_image(part.image, first_frame=True)]
    if isinstance(part, PdfPart):
        pages = part.pages or range(1, pdf.num_pages(part.pdf) + 1)
        return [pdf.render(part.pdf, page) for page in pages[:most]]
    if isinstance(part, VideoPart):
        rule = video.VideoRule(num_frames=min(most, part.num_frames or most), multiple=1)
        return video.sample(part.video, rule, part.start, part.end, part.fps).images
    return []


def preview(ref: str) -> Image.Image:
    """A picture of what a reference names, see `rge.content.references`. Raises `ImageError`."""
    return sheet(shown(part_of(ref)))


def preview_bytes(ref: str) -> bytes:
    """A picture's own bytes, or a `preview` as PNG. Raises `ImageError`."""
    about = named(ref)
    if not about.is_clip and not about.is_document:
        return picture_bytes(ref)
    return _png(preview(ref))


def upload_preview(data: bytes, is_clip: bool) -> bytes:
    """A document's first pages, or a clip's frames, as PNG; for the process of `rge.content.limited`. Raises `MediaError`."""
    if is_clip:
        video.check_upload(data)
    return _png(sheet(shown(VideoPart(data) if is_clip else PdfPart(data))))


def _png(picture: Image.Image) -> bytes:
    picture.thumbnail((MAX_PX, MAX_PX), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()


def sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures in rows, in cells of the first one's shape; one alone as it is."""
    if len(pictures) == 1:
        return pictures[0]
    width, height = pictures[0].size
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    whole = Image.new(
        "RGB", (columns * (width + GAP_PX) - GAP_PX, rows * (height + GAP_PX) - GAP_PX), "white"
    )
    frame = ImageDraw.Draw(whole)
    for place, picture in enumerate(pictures):
        if picture.size != (width, height):
            picture = picture.copy()
            picture.thumbnail((width, height), Image.Resampling.BICUBIC)
        row, column = divmod(place, columns)
        left, top = column * (width + GAP_PX), row * (height + GAP_PX)
        whole.paste(picture, (left, top))
        right, bottom = left + picture.width - 1, top + picture.height - 1
        # White pages would run into one another.
        frame.rectangle((left, top, right, bottom), outline=EDGE, width=math.ceil(width / 100))
    return whole
