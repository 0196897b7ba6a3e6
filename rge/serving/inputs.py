"""Validate a request's texts, pictures and documents against the limits, and make prompts of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from rge.common.images import (
    WEB,
    Header,
    ImageError,
    decode_data_url,
    load_image,
    names_picture,
    upload_header,
)
from rge.common.parts import Content, ImagePart, Part, PdfPart, VideoPart, refs_of, text_of
from rge.common.schema import Item
from rge.content import pdf, video, visuals
from rge.content.limited import Decoder, here, sampled
from rge.content.media_errors import MediaError
from rge.content.pdf import PdfError
from rge.content.video import VideoError, VideoRule
from rge.embedder import Embedder
from rge.model.prompts import Prompt
from rge.serving.errors import BadInput
from rge.serving.guard import Loan, MemoryBudget
from rge.serving.options import ServeOptions
from rge.serving.public_web import fetch_public

SCALED_BYTES = 8
"""Memory for a pixel of a scaled picture: Pillow's 4 bytes, and the processor's copies."""
_PICTURE_FORMS = {
    "input": '{"input": [{"image": ...}]}',
    "texts": '{"images": [...]} in /embed, and in {"documents": [{"image": ...}]} in /rerank',
    "inputs": '{"images": [...]} of /v2/embed',
    "query": '{"query": {"image": ...}}',
    "documents": '{"documents": [{"image": ...}]}',
}
"""How a picture is sent instead of a text, by the key of the text."""
_DATA = {
    "image": re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE),
    "pdf": re.compile(r"data:application/(?:pdf|octet-stream);base64,", re.ASCII | re.IGNORECASE),
    "video": re.compile(
        r"data:(?:video/[\w.+-]{1,40}|image/gif|application/octet-stream);base64,", re.ASCII | re.IGNORECASE
    ),
}
_SENT = {
    "image": ("a picture", "image/..."),
    "pdf": ("a document", "application/pdf"),
    "video": ("a video", "video/..."),
}
"""What a file is called, and how it is sent."""
_KEYS = {"image": "image_url", "pdf": "file", "video": "video_url"}
"""Keys of files in a request, for messages."""
FRAME_BYTES = 16
"""Memory for a pixel of a frame: FFmpeg's, Pillow's, and the processor's copies."""
PAGE_BYTES = 12
"""Memory for a pixel of a page while it is rendered: PDFium's 3 bytes, and Pillow's 4 twice."""


class Page(NamedTuple):
    """A page that is to be rendered."""

    document: bytes
    number: int


@dataclass(frozen=True)
class Raw:
    """An input as received; pictures, documents and clips are data URLs or addresses."""

    param: str
    content: Content

    @property
    def text(self) -> str | None:
        """Its texts, joined by a newline; None without any."""
        return text_of(self.content)

    @property
    def files(self) -> tuple[str, ...]:
        """Data URLs and addresses of its pictures, documents and clips, in their order."""
        return tuple(str(ref) for part in self.content for ref in refs_of(part))


def check_limits(inputs: Sequence[Raw], instruction: str | None, options: ServeOptions) -> None:
    """Refuse inputs that are empty, too many or too long."""
    if not inputs:
        raise BadInput("input is an empty list", "input")
    if len(inputs) > options.max_inputs:
        message = f"{len(inputs)} inputs, but a request may have at most {options.max_inputs}"
        raise BadInput(message, inputs[0].param.split("[")[0])
    _check_text("instruction", instruction, options)
    # Of a document whose pages are not named, the number is known when it is opened.
    num_pictures = sum(
        len(part.pages or (0,)) if isinstance(part, PdfPart) else len(refs_of(part))
        for raw in inputs
        for part in raw.content
    )
    if num_pictures > options.max_pictures:
        raise BadInput(
            f"{num_pictures} pictures, but a request may have at most {options.max_pictures}", inputs[0].param
        )
    for raw in inputs:
        if not (raw.text or "").strip() and not raw.files:
            raise BadInput(f"{raw.param} is empty", raw.param)
        _check_text(raw.param, raw.text, options)
        if names_picture(raw.text or "", local=False):
            form = _PICTURE_FORMS.get(
                raw.param.split("[")[0], '{"type": "image_url", "image_url": {"url": ...}}'
            )
            raise BadInput(
                f"{raw.param} names a picture, and would be embedded as words: send it as {form}", raw.param
            )


def _check_text(param: str, text: str | None, options: ServeOptions) -> None:
    if text is not None and len(text) > options.max_chars:
        raise BadInput(
            f"{param} has {len(text)} characters, but a text may have at most {options.max_chars}", param
        )


@dataclass
class Allowance:
    """Bytes that may still be fetched from the web for a request: as many as its body may have."""

    options: ServeOptions

    def __post_init__(self) -> None:
        self._left = self.options.max_body_mb << 20

    def take(self, count: int) -> None:
        """Count what has arrived. Raises `ImageError`: it is too much."""
        self._left -= count
        if self._left < 0:
            limit = f"{self.options.max_body_mb} MB (max_body_mb)"
            raise ImageError(f"are larger than {limit} together", "from the web", kind="huge")


async def fetch_files(raw: Raw, allowance: Allowance, loan: Loan) -> list[bytes | str]:
    """Fetch an input's pictures and documents that are web addresses, if that is allowed; data URLs stay.

    Raises:
        BadInput: one cannot be fetched, or `allowance` is used up.
        Refusal: there is no memory for it.
    """
    found = []
    for part in raw.content:
        kind = _kind(part)
        try:
            found += [await _fetched(str(ref), kind, allowance, loan) for ref in refs_of(part)]
        except ImageError as error:
            raise BadInput(str(error), f"{raw.param}.{_KEYS[kind]}") from None
    return found


async def _fetched(address: str, kind: str, allowance: Allowance, loan: Loan) -> bytes | str:
    if _DATA[kind].match(address):
        return address
    what, media = _SENT[kind]
    if not address.startswith(WEB):
        raise ImageError(f"{what} must be sent as data:{media};base64,... with its bytes in base64")
    if not allowance.options.allow_urls:
        raise ImageError(
            f"this server does not fetch {what[2:]}s from the web: send their bytes as data:{media};base64,..."
        )

    def count(num_bytes: int) -> None:
        allowance.take(num_bytes)
        loan.take(num_bytes)

    return await fetch_public(address, count)


def make_prompt(
    embedder: Embedder,
    raw: Raw,
    files: Sequence[bytes | str],
    side: str,
    instruction: str | None,
    options: ServeOptions,
    held: MemoryBudget,
) -> Prompt:
    """The prompt of an input. Made before batching, so that an error (`BadInput`) concerns its own request only.

    Raises:
        Refusal: `held` has no memory for its pictures and pages, which are decoded and scaled one at a time.
    """
    try:
        with held.loan() as loan, Decoder(options.max_decode_s, options.max_decode_mb) as decode:
            content, sources = _shown(raw, embedder.builder.rule, files, options, loan, decode)
            images = _images(embedder, sources, options.max_picture_mp, loan, decode)
            item = Item(raw.param, content, instruction)
            return embedder.prompt(
                item, "candidate" if side == "document" else "query", lambda _: next(images)
            )
    except MediaError as error:
        kind = "pdf" if error.noun == PdfError.noun else "video"
        raise BadInput(str(error), f"{raw.param}.{_KEYS[kind]}") from None
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.{_KEYS['image']}") from None
    except ValueError as error:
        raise BadInput(str(error), raw.param) from None


def _kind(part: Part) -> str:
    """What a part's files are; a clip that is given as frames is pictures."""
    if isinstance(part, VideoPart) and not isinstance(part.video, tuple):
        return "video"
    return "pdf" if isinstance(part, PdfPart) else "image"


def _shown(
    raw: Raw,
    rule: VideoRule,
    files: Sequence[bytes | str],
    options: ServeOptions,
    loan: Loan,
    decode: Decoder,
) -> tuple[Content, list[bytes | str | Page]]:
    """The content with a picture in place of each page and frames in place of a clip, and what is decoded for each picture."""
    given = iter(files)
    content: list[Part] = []
    sources: list[bytes | str | Page] = []
    for part in raw.content:
        if isinstance(part, PdfPart):
            data = _bytes(next(given), loan)
            count = decode(pdf.num_pages, data)
            pages = part.pages or range(1, count + 1)
            if len(sources) + len(pages) > options.max_pictures:
                limit = f"a request may have at most {options.max_pictures} pictures and pages: name pages"
                raise PdfError(f"it has {count:,} pages, but {limit}", f"<{len(data)} bytes>")
            sources += [Page(data, page) for page in pages]
            content += [ImagePart(b"")] * len(pages)
        elif isinstance(part, VideoPart):
            refs = [_bytes(next(given), loan) for _ in refs_of(part)]
            content.append(_frames(part, refs, rule, options, loan, decode))
        else:
            content.append(part)
            sources += [next(given) for _ in refs_of(part)]
    return tuple(content), sources


def _bytes(file: bytes | str, loan: Loan) -> bytes:
    if isinstance(file, bytes):
        return file
    loan.take(len(file) * 3 // 4)
    return decode_data_url(file)


def _frames(
    part: VideoPart,
    refs: Sequence[bytes],
    rule: VideoRule,
    options: ServeOptions,
    loan: Loan,
    decode: Decoder,
) -> VideoPart:
    """A clip as its sampled frames, decoded under the limits."""
    name = f"<{sum(map(len, refs))} bytes>"

    def allow(about: video.Probe, count: int, size: visuals.Size) -> None:
        if about.width * about.height > options.max_picture_mp * 1e6:
            pixels = f"{about.width} x {about.height}"
            raise VideoError(f"it has {pixels} pixels, the limit is {options.max_picture_mp:g} million", name)
        if about.seconds > options.max_video_s:
            raise VideoError(
                f"it is {about.seconds:.0f} s long, the limit is {options.max_video_s:g} s", name
            )
        if count > options.max_pictures:
            raise VideoError(f"{count} frames are asked for, the limit is {options.max_pictures}", name)
        loan.take(FRAME_BYTES * (count * size[0] * size[1] + about.width * about.height))

    if isinstance(part.video, tuple):
        for data in refs:
            _header(data, options.max_picture_mp)
        return sampled(here, tuple(refs), part, rule, allow)
    decode(video.check_upload, refs[0])
    return sampled(decode, refs[0], part, rule, allow)


def _header(data: bytes, max_mp: float) -> Header:
    """A picture's header; `ImageError` if it has more pixels."""
    header = upload_header(data)
    if header.width * header.height > max_mp * 1e6:
        size = f"{header.width} x {header.height}"
        raise ImageError(f"it has {size} pixels, the limit is {max_mp:g} million", f"<{len(data)} bytes>")
    return header


def _images(
    embedder: Embedder, sources: Sequence[bytes | str | Page], max_mp: float, loan: Loan, decode: Decoder
) -> Iterator[Image.Image]:
    """Decode pictures one at a time: memory is taken before, and what is not needed once the picture is scaled is given back."""
    family, processor = embedder.builder.family, embedder.builder.processor.image_processor
    for source in sources:
        if isinstance(source, Page):
            most = min(pdf.MAX_PIXELS, int(max_mp * 1e6))
            [(width, height)] = decode(pdf.page_sizes, source.document, [source.number], max_pixels=most)
            num_bytes = PAGE_BYTES * width * height
            loan.take(num_bytes)
            # Pictures in the page are decoded whole, however small they are shown.
            num_inside = decode(pdf.picture_pixels, source.document, source.number)
            if num_inside > max_mp * 1e6:
                raise PdfError(
                    f"its pictures have {num_inside:,} pixels, the limit is {max_mp:g} million",
                    f"<{len(source.document)} bytes>",
                    source.number,
                )
            yield decode(pdf.render, source.document, source.number, max_pixels=most)
        else:
            data = source if isinstance(source, bytes) else decode_data_url(source)
            width, height, num_bytes = _header(data, max_mp)
            loan.take(num_bytes)
            yield load_image(data)
        scaled_width, scaled_height = family.scaled_size((width, height), processor)
        # The caller has scaled it. Some families leave that to the processor.
        loan.give(num_bytes - min(num_bytes, SCALED_BYTES * scaled_width * scaled_height))
