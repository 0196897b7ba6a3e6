"""Validate a request's texts and pictures against the limits, and make prompts of them."""

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from rge.common.images import WEB, ImageError, load_image
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.prompts import Prompt
from rge.serving.options import ServeOptions
from rge.serving.public_web import fetch_public

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Of pictures. Pillow knows dozens more, with readers of rare formats that have hardly been audited."""
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)


class BadInput(ValueError):
    """An input that cannot be embedded; the message says which and why; `param` is the request's key at fault."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Raw:
    """An input as received: its text, and data URLs or addresses of its pictures."""

    param: str
    text: str | None
    pictures: tuple[str, ...] = ()


def check_limits(inputs: Sequence[Raw], instruction: str | None, options: ServeOptions) -> None:
    """Refuse inputs that are empty, too many, too long or invalid Unicode.

    Raises:
        BadInput: which input, and why.
    """
    most = options.max_inputs
    if not inputs:
        raise BadInput("input is an empty list", "input")
    if len(inputs) > most:
        raise BadInput(
            f"{len(inputs)} inputs, but a request may have at most {most}", inputs[0].param.split("[")[0]
        )
    _check_text("instruction", instruction, options)
    num_pictures = sum(len(one.pictures) for one in inputs)
    if num_pictures > options.max_pictures:
        raise BadInput(
            f"{num_pictures} pictures, but a request may have at most {options.max_pictures}", inputs[0].param
        )
    for one in inputs:
        if not (one.text or "").strip() and not one.pictures:
            raise BadInput(f"{one.param} is empty", one.param)
        _check_text(one.param, one.text, options)


def _check_text(param: str, text: str | None, options: ServeOptions) -> None:
    text = text or ""
    if len(text) > options.max_chars:
        raise BadInput(
            f"{param} has {len(text)} characters, but a text may have at most {options.max_chars}", param
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{param} contains half a character (a lone surrogate)", param) from None


async def fetch_pictures(raw: Raw, options: ServeOptions) -> list[bytes | str]:
    """An input's pictures: bytes of those that were fetched, data URLs as they are.

    Raises:
        BadInput: an address where none is allowed, or one that gives no picture.
    """
    found: list[bytes | str] = []
    param = f"{raw.param}.image_url"
    for address in raw.pictures:
        if _DATA.match(address):
            found.append(address)
        elif not address.startswith(WEB):
            raise BadInput(
                "a picture must be sent as data:image/...;base64,... with its bytes in base64", param
            )
        elif not options.allow_urls:
            raise BadInput(
                "this server does not fetch pictures from the web: send their bytes as data:image/...;base64,...",
                param,
            )
        else:
            try:
                found.append(await fetch_public(address, options.max_body_mb << 20))
            except ImageError as error:
                raise BadInput(str(error), param) from None
    return found


def make_prompt(
    embedder: Embedder,
    raw: Raw,
    pictures: Sequence[bytes | str],
    side: str,
    instruction: str | None,
    max_mp: float,
) -> Prompt:
    """The prompt of an input; run in threads beside the model's, so that an error shows in its own request.

    Raises:
        BadInput: a picture that cannot be decoded or has too many pixels, or a prompt that cannot be made.
    """
    try:
        images = [_image(one, max_mp) for one in pictures]
        item = Item(raw.param, raw.text, tuple(images), instruction)  # type: ignore[arg-type]
        return embedder.prompt(item, "candidate" if side == "document" else "query", images)
    except ImageError as error:
        raise BadInput(str(error), f"{raw.param}.image_url") from None
    except ValueError as error:
        raise BadInput(str(error), raw.param) from None


def _image(picture: bytes | str, max_mp: float) -> Image.Image:
    data = picture if isinstance(picture, bytes) else _decoded(picture)
    name = f"<{len(data)} bytes>"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as header:
            width, height = header.size
    except UnidentifiedImageError:
        raise ImageError(f"picture {name} cannot be decoded: it is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - on damaged files Pillow's readers raise whatever they run into
        raise ImageError(f"picture {name} cannot be decoded: {error}") from None
    if width * height > max_mp * 1e6:
        raise ImageError(f"picture {name} has {width} x {height} pixels, the limit is {max_mp:g} million")
    return load_image(data)


def _decoded(address: str) -> bytes:
    try:
        return base64.b64decode(address.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"data URL {address[:40]}... cannot be read: {error}") from None
