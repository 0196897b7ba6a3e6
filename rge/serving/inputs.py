"""Validate a request's texts and pictures against the limits, and make prompts of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from rge.common.images import WEB, ImageError, decode_data_url, load_image, names_picture, upload_header
from rge.common.parts import Content, pictures_of, text_of
from rge.common.schema import Item
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
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Raw:
    """An input as received; pictures are data URLs or addresses."""

    param: str
    content: Content

    @property
    def text(self) -> str | None:
        """Its texts, joined by a newline; None without any."""
        return text_of(self.content)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Data URLs and addresses of its pictures."""
        return tuple(map(str, pictures_of(self.content)))


def check_limits(inputs: Sequence[Raw], instruction: str | None, options: ServeOptions) -> None:
    """Refuse inputs that are empty, too many or too long."""
    if not inputs:
        raise BadInput("input is an empty list", "input")
    if len(inputs) > options.max_inputs:
        message = f"{len(inputs)} inputs, but a request may have at most {options.max_inputs}"
        raise BadInput(message, inputs[0].param.split("[")[0])
    _check_text("instruction", instruction, options)
    num_pictures = sum(len(raw.pictures) for raw in inputs)
    if num_pictures > options.max_pictures:
        raise BadInput(
            f"{num_pictures} pictures, but a request may have at most {options.max_pictures}", inputs[0].param
        )
    for raw in inputs:
        if not (raw.text or "").strip() and not raw.pictures:
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
            raise ImageError(f"the request's pictures from the web are larger than {limit} together")


async def fetch_pictures(raw: Raw, allowance: Allowance, loan: Loan) -> list[bytes | str]:
    """Fetch an input's pictures that are web addresses, if that is allowed; data URLs stay.

    Raises:
        BadInput: a picture cannot be fetched, or `allowance` is used up.
        Refusal: there is no memory for it.
    """
    try:
        return [await _fetched(address, allowance, loan) for address in raw.pictures]
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.image_url") from None


async def _fetched(address: str, allowance: Allowance, loan: Loan) -> bytes | str:
    if _DATA.match(address):
        return address
    if not address.startswith(WEB):
        raise ImageError("a picture must be sent as data:image/...;base64,... with its bytes in base64")
    if not allowance.options.allow_urls:
        raise ImageError(
            "this server does not fetch pictures from the web: send their bytes as data:image/...;base64,..."
        )

    def count(num_bytes: int) -> None:
        allowance.take(num_bytes)
        loan.take(num_bytes)

    return await fetch_public(address, count)


def make_prompt(
    embedder: Embedder,
    raw: Raw,
    pictures: Sequence[bytes | str],
    side: str,
    instruction: str | None,
    max_mp: float,
    held: MemoryBudget,
) -> Prompt:
    """The prompt of an input. Made before batching, so that an error (`BadInput`) concerns its own request only.

    Raises:
        Refusal: `held` has no memory for its pictures, which are decoded and scaled one at a time.
    """
    try:
        with held.loan() as loan:
            images = _images(embedder, pictures, max_mp, loan)
            item = Item(raw.param, raw.content, instruction)
            return embedder.prompt(
                item, "candidate" if side == "document" else "query", lambda _: next(images)
            )
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.image_url") from None
    except ValueError as error:
        raise BadInput(str(error), raw.param) from None


def _images(
    embedder: Embedder, pictures: Sequence[bytes | str], max_mp: float, loan: Loan
) -> Iterator[Image.Image]:
    """Decode pictures one at a time: memory is taken before, and what is not needed once the picture is scaled is given back."""
    family, processor = embedder.builder.family, embedder.builder.processor.image_processor
    for picture in pictures:
        data = picture if isinstance(picture, bytes) else decode_data_url(picture)
        width, height, num_bytes = upload_header(data)
        if width * height > max_mp * 1e6:
            raise ImageError(
                f"picture <{len(data)} bytes> has {width} x {height} pixels, the limit is {max_mp:g} million"
            )
        scaled_width, scaled_height = family.scaled_size((width, height), processor)
        loan.take(num_bytes)
        yield load_image(data)
        # The caller has scaled it. Some families leave that to the processor.
        loan.give(num_bytes - min(num_bytes, SCALED_BYTES * scaled_width * scaled_height))
