"""Validate a request's texts and pictures against the limits, and make prompts of them."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from rge.common.images import WEB, ImageError, decode_data_url, load_image
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.prompts import Prompt
from rge.serving.errors import BadInput
from rge.serving.options import ServeOptions
from rge.serving.public_web import fetch_public

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Accepted picture formats. Pillow's readers of the many rare ones have hardly been audited."""
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Raw:
    """An input as received: its text, and data URLs or addresses of its pictures."""

    param: str
    text: str | None
    pictures: tuple[str, ...] = ()


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


def _check_text(param: str, text: str | None, options: ServeOptions) -> None:
    if text is not None and len(text) > options.max_chars:
        raise BadInput(
            f"{param} has {len(text)} characters, but a text may have at most {options.max_chars}", param
        )


async def fetch_pictures(raw: Raw, options: ServeOptions) -> list[bytes | str]:
    """Fetch an input's pictures that are web addresses, if that is allowed; data URLs stay."""
    try:
        return [await _fetched(address, options) for address in raw.pictures]
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.image_url") from None


async def _fetched(address: str, options: ServeOptions) -> bytes | str:
    if _DATA.match(address):
        return address
    if not address.startswith(WEB):
        raise ImageError("a picture must be sent as data:image/...;base64,... with its bytes in base64")
    if not options.allow_urls:
        raise ImageError(
            "this server does not fetch pictures from the web: send their bytes as data:image/...;base64,..."
        )
    return await fetch_public(address, options.max_body_mb << 20)


def make_prompt(
    embedder: Embedder,
    raw: Raw,
    pictures: Sequence[bytes | str],
    side: str,
    instruction: str | None,
    max_mp: float,
) -> Prompt:
    """The prompt of an input. Made before batching, so that an error (`BadInput`) concerns its own request only."""
    try:
        images = [_image(picture, max_mp) for picture in pictures]
        item = Item(raw.param, raw.text, tuple(images), instruction)  # type: ignore[arg-type]
        return embedder.prompt(item, "candidate" if side == "document" else "query", images)
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.image_url") from None
    except ValueError as error:
        raise BadInput(str(error), raw.param) from None


def _image(picture: bytes | str, max_mp: float) -> Image.Image:
    data = picture if isinstance(picture, bytes) else decode_data_url(picture)
    name = f"<{len(data)} bytes>"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as header:
            width, height = header.size
    except UnidentifiedImageError:
        raise ImageError(f"picture {name} cannot be decoded: it is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise anything on damaged files
        raise ImageError(f"picture {name} cannot be decoded: {error}") from None
    if width * height > max_mp * 1e6:
        raise ImageError(f"picture {name} has {width} x {height} pixels, the limit is {max_mp:g} million")
    return load_image(data)
