"""What clients send, checked: texts and pictures of a request, as items that can be embedded."""

import base64
import binascii
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rge.common.images import ImageError, load_image
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.prompts import Prompt
from rge.serving.options import ServeOptions
from rge.serving.public_web import fetch_public

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Of pictures. Pillow knows dozens more, readers of rare formats among them that nobody has looked at for years."""
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)

Side = Literal["query", "document"]


class _Strict(BaseModel):
    # A misspelt option would else be left out in silence.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Address(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Taken since clients send it; pictures always have the checkpoint's sizes."""


class _Picture(_Strict):
    type: Literal["image_url"]
    image_url: _Address

    @field_validator("image_url", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class Message(_Strict):
    """The one message of the user: a text, or parts that are texts and pictures."""

    role: Literal["user"]
    content: str | list[Annotated[_Text | _Picture, Field(discriminator="type")]]


class Asked(_Strict):
    """What every request for embeddings has: the input, and how it is asked."""

    input: str | list[str] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1)] | None = None
    model: str | None = None
    user: str | None = None
    """Taken since OpenAI's clients send it."""
    mode: Literal["reasoning", "direct"] | None = None
    instruction: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(one, int | list) for one in value):
            raise ValueError("must be texts: ids of another model's tokens mean nothing here")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> "Asked":
        if (self.input is None) == (self.messages is None):
            raise ValueError("give input (texts) or messages (texts and pictures), and not both")
        return self


class EmbeddingsAsked(Asked):
    """Body of ``POST /v1/embeddings``."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    side: Side = "query"
    return_rationale: bool = False


class SearchAsked(Asked):
    """Body of ``POST /v1/search``."""

    k: Annotated[int, Field(ge=1, le=1000)] = 10
    return_rationale: bool = True


class BadInput(ValueError):
    """An input that cannot be embedded; the message says which and why.

    Attributes:
        param: key of the request that is meant.
    """

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Raw:
    """An input as it came: its text, and its pictures' data URLs or addresses."""

    param: str
    text: str | None
    pictures: tuple[str, ...] = ()


def raw_inputs(asked: Asked, options: ServeOptions) -> list[Raw]:
    """The inputs of a request, within the limits.

    Raises:
        BadInput: none, an empty one, too many, too long, or no Unicode.
    """
    if asked.messages is not None:
        found = [_from_message(asked.messages[0])]
    else:
        texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
        names = ["input"] if isinstance(asked.input, str) else [f"input[{row}]" for row in range(len(texts))]
        found = [Raw(name, text) for name, text in zip(names, texts, strict=True)]
        if not found:
            raise BadInput("input is an empty list", "input")
        if len(found) > options.max_inputs:
            raise BadInput(f"{len(found)} inputs, and a request may have {options.max_inputs}", "input")
    for param, text in [*((one.param, one.text) for one in found), ("instruction", asked.instruction)]:
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise BadInput(f"{param} holds half a character (a lone surrogate)", param) from None
    for one in found:
        if not (one.text or "").strip() and not one.pictures:
            raise BadInput(f"{one.param} is empty", one.param)
        if len(one.text or "") > options.max_chars:
            raise BadInput(
                f"{one.param} has {len(one.text or '')} characters, and an input may have {options.max_chars}",
                one.param,
            )
        if len(one.pictures) > options.max_pictures:
            raise BadInput(
                f"{len(one.pictures)} pictures, and a request may have {options.max_pictures}", one.param
            )
    return found


def _from_message(message: Message) -> Raw:
    if isinstance(message.content, str):
        return Raw("messages", message.content)
    texts = [part.text for part in message.content if isinstance(part, _Text)]
    pictures = [part.image_url.url for part in message.content if isinstance(part, _Picture)]
    return Raw("messages", "\n".join(texts) or None, tuple(pictures))


async def fetched(raws: Sequence[Raw], options: ServeOptions) -> list[list[bytes | str]]:
    """Every input's pictures: bytes of those that were fetched, data URLs as they are.

    Raises:
        BadInput: an address where none is allowed, or nothing to be had there.
    """
    found: list[list[bytes | str]] = []
    for raw in raws:
        row: list[bytes | str] = []
        for address in raw.pictures:
            if _DATA.match(address):
                row.append(address)
            elif not address.startswith(("http://", "https://")):
                raise BadInput(
                    "a picture comes as data:image/...;base64,... with its bytes in base64",
                    f"{raw.param}.image_url",
                )
            elif not options.allow_urls:
                raise BadInput(
                    "this server fetches no pictures from the web: send their bytes as data:image/...;base64,...",
                    f"{raw.param}.image_url",
                )
            else:
                try:
                    row.append(await fetch_public(address, options.max_body_mb << 20))
                except ImageError as error:
                    raise BadInput(str(error), f"{raw.param}.image_url") from None
        found.append(row)
    return found


class Preparer:
    """Makes prompts of inputs, in threads beside the model's; what is wrong with an input shows here, in its own request.

    Args:
        embedder: the checkpoint.
        options: with the limits.
    """

    def __init__(self, embedder: Embedder, options: ServeOptions):
        self._builder, self._options = embedder.builder, options
        self._one = threading.Lock()

    def prompt(
        self, raw: Raw, pictures: Sequence[bytes | str], side: Side, instruction: str | None
    ) -> Prompt:
        """The prompt of an input.

        Raises:
            BadInput: a picture that cannot be decoded or has too many pixels, or a prompt that cannot be made.
        """
        try:
            images = [self._image(one) for one in pictures]
            item = Item(raw.param, raw.text, tuple(images), instruction)  # type: ignore[arg-type]
            # Decoding above runs beside that of other requests; tokenizers are not to be used by two threads at once.
            with self._one:
                return self._builder.build(item, "candidate" if side == "document" else "query", images)
        except ImageError as error:
            raise BadInput(str(error), f"{raw.param}.image_url") from None
        except ValueError as error:
            raise BadInput(str(error), raw.param) from None

    def _image(self, picture: bytes | str) -> Image.Image:
        data = picture if isinstance(picture, bytes) else _decoded(picture)
        name = f"<{len(data)} bytes>"
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as header:
                width, height = header.size
        except UnidentifiedImageError:
            raise ImageError(
                f"picture {name} cannot be decoded: it is none of {', '.join(FORMATS)}"
            ) from None
        except Exception as error:  # noqa: BLE001 - on damaged files Pillow's readers raise whatever they run into
            raise ImageError(f"picture {name} cannot be decoded: {error}") from None
        if width * height > self._options.max_picture_mp * 1e6:
            raise ImageError(
                f"picture {name} has {width} x {height} pixels, and one may have {self._options.max_picture_mp:g} million"
            )
        return load_image(data)


def _decoded(address: str) -> bytes:
    try:
        return base64.b64decode(address.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"data URL {address[:40]}... cannot be read: {error}") from None
