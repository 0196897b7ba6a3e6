"""Parts of content: texts, pictures, videos and documents in their order, and how records and requests write them.

A part is a mapping with one of the keys ``text``, ``image``, ``video`` and ``pdf``, which names its kind. The short form, pictures and
then a text, is read into the same type (`content_of`).
"""

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any
from urllib.parse import unquote

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rge.common.errors import shortened

ImageRef = str | bytes
"""Encoded picture bytes, a path to a picture file, or ``library.parquet#row-id``."""

PRESENT = "<bytes>"
"""In place of the bytes of a picture that are not needed."""
LONGEST_PATH = 4096
"""Characters of a path on Linux; a longer text is something else."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text; several are joined by a newline."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture: a reference, or a decoded one that never leaves the process."""

    image: ImageRef


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A clip: a file, or its frames as a list of pictures. What is None follows the recipe's rule.

    Of a list of frames, `fps` is the rate at which they were taken.
    """

    video: str | bytes | tuple[ImageRef, ...]
    start: float | None = None  # seconds
    end: float | None = None
    fps: float | None = None  # frames per second to show
    max_frames: int | None = None
    num_frames: int | None = None  # exactly as many, instead of a rate


@dataclass(frozen=True, slots=True)
class PdfPart:
    """Pages of a document, each shown as a picture."""

    pdf: str | bytes
    pages: tuple[int, ...] | None = None  # from 1; None: all
    dpi: int | None = None


Part = TextPart | ImagePart | VideoPart | PdfPart
Content = tuple[Part, ...]
"""What an item shows, in the order of the prompt."""


def content_of(text: str | None, images: Iterable[Any] = ()) -> Content:
    """The short form as content: pictures, then the text."""
    return (*map(ImagePart, images), *([] if text is None else [TextPart(text)]))


def text_of(content: Content) -> str | None:
    """The texts, joined by a newline; None without any."""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    return "\n".join(texts) if texts else None


def pictures_of(content: Content) -> tuple[ImageRef, ...]:
    """References of the pictures."""
    return tuple(part.image for part in content if isinstance(part, ImagePart))


def with_pictures(content: Content, refs: Iterable[Any]) -> Content:
    """The content with other references of its pictures, in their order."""
    given = iter(refs)
    return tuple(ImagePart(next(given)) if isinstance(part, ImagePart) else part for part in content)


def refs_of(part: Part) -> tuple[ImageRef, ...]:
    """Pictures or files that a part names; none for a text."""
    if isinstance(part, TextPart):
        return ()
    shown = (
        part.image if isinstance(part, ImagePart) else part.video if isinstance(part, VideoPart) else part.pdf
    )
    return shown if isinstance(shown, tuple) else (shown,)


def is_short(content: Content) -> bool:
    """Whether the short form shows the same: pictures, then text."""
    num_pictures = len(pictures_of(content))
    return all(isinstance(part, TextPart) for part in content[num_pictures:])


def with_text(content: Content, text: str | None) -> Content:
    """The content with `text` in place of its texts: where the last of them is, or at the end."""
    places = [place for place, part in enumerate(content) if isinstance(part, TextPart)]
    last = places[-1] if places else len(content)
    before = (part for part in content[:last] if not isinstance(part, TextPart))
    return (*before, *content_of(text), *content[last + 1 :])


def with_words(content: Content, before: str, after: str) -> Content:
    """The content with words before its first text and after its last; without a text, both at the end."""
    texts = {place: part.text for place, part in enumerate(content) if isinstance(part, TextPart)}
    if not texts and not before + after:
        return content
    texts = texts or {len(content): ""}
    texts[min(texts)] = before + texts[min(texts)]
    texts[max(texts)] += after
    places = range(max(len(content), max(texts) + 1))
    return tuple(TextPart(texts[place]) if place in texts else content[place] for place in places)


def picture_of(cell: Any) -> ImageRef | None:
    """A picture as data sets and programs store it: encoded bytes, a path or a web address; None for an empty cell.

    Accepts bytes, also as a list of integers; a path, also with backslashes or as a ``file:`` URL; base64 and ``data:`` URLs; a
    mapping with ``bytes``, ``path`` or both, as the library `datasets` stores pictures; and a list of one of these.

    Raises:
        ValueError: it is something else; says what.
    """
    if isinstance(cell, Mapping):
        if not cell.keys() & {"bytes", "path"}:
            names = ", ".join(map(str, cell)) or "none"
            raise ValueError(
                f"a mapping needs the field bytes or path to be a picture; it has {shortened(names)}"
            )
        return picture_of(cell.get("bytes")) or picture_of(cell.get("path"))
    if isinstance(cell, (list, tuple, np.ndarray)):
        return _listed_picture(cell)
    if isinstance(cell, (bytes, bytearray, memoryview)):
        return bytes(cell) or None
    if cell is None or isinstance(cell, (str, os.PathLike)):
        return _named_picture(os.fspath(cell).strip()) if cell else None
    if type(cell).__module__.startswith("PIL."):
        raise ValueError(
            "an open Pillow image: give its path or encoded bytes (of a data set: cast_column(NAME, Image(decode=False)))"
        )
    raise ValueError(f"{type(cell).__name__} is neither a path nor an encoded picture")


def are_bytes(values: Any) -> bool:
    """Whether a list is bytes written as integers: no list of pictures has integers."""
    return bool(values) and type(values[0]) is int


def _listed_picture(cell: Sequence[Any] | np.ndarray) -> ImageRef | None:
    if isinstance(cell, np.ndarray):
        if cell.ndim != 1:
            raise ValueError(f"an array of shape {cell.shape}: give an encoded picture (PNG, JPEG, ...)")
        cell = cell.tolist()
    if are_bytes(cell):
        return _of_integers(cell)
    if len(cell) > 1:
        raise ValueError(f"a list of {len(cell)}, and there is room for one picture")
    return picture_of(cell[0]) if cell else None


def _of_integers(values: Any) -> bytes:
    if len(values) < 16:
        raise ValueError("numbers are neither a path nor an encoded picture")
    try:
        return bytes(values)
    except (ValueError, TypeError):
        if all(type(one) is int and -128 <= one < 128 for one in values):  # as some programs show bytes
            return bytes(one & 255 for one in values)
    raise ValueError("a list of numbers that are not bytes")


def _named_picture(text: str) -> ImageRef | None:
    start = text[:12].lower()
    if start.startswith("data:"):
        return data_url_content(text)
    if (data := _from_base64(text)) is not None:
        return data
    if start.startswith(("b'", 'b"')):
        raise ValueError("the text of Python's bytes: write base64, or the path of a file")
    if len(text) > LONGEST_PATH:
        raise ValueError(f"a text of {len(text):,} characters is neither a path nor a picture in base64")
    if start.startswith("file:"):
        host, slash, path = text[5:].removeprefix("//").partition("/")
        if host not in ("", "localhost"):
            raise ValueError(f"the file is on another machine, {host}: copy it, and give its path")
        return unquote(slash + path)
    if re.match(r"[A-Za-z][\w+.-]+://", text):
        scheme, mark, rest = text.partition("://")
        return scheme.lower() + mark + rest
    if re.match(r"[A-Za-z]:[\\/]", text):
        raise ValueError("a path of a Windows machine: give one relative to the data")
    return text.replace("\\", "/") or None


def data_url_content(address: str) -> bytes:
    """The content of a ``data:`` URL in base64; ValueError: it is of another kind, or damaged."""
    head, comma, text = address.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("only base64 is supported")
    return base64.b64decode(unquote(text) if "%" in text else text, validate=True)


_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*|....ftyp(avif|avis|hei|hev|mif1|msf1)|\0\0\0\x0cjP  |qoif|BM....\0\0\0\0",
    re.DOTALL,
)  # fmt: skip
"""First bytes of JPEG, PNG, GIF, WebP, TIFF, AVIF and HEIC, JPEG 2000, QOI, BMP."""


def _from_base64(text: str) -> bytes | None:
    """A picture in base64, the standard alphabet or that of URLs; None if the text does not begin like one."""
    if len(text) < 32 or not re.fullmatch(r"[A-Za-z0-9+/_-]{24}", text[:24]):
        return None
    letters = str.maketrans("-_", "+/")
    if not _SIGNATURES.match(base64.b64decode(text[:24].translate(letters))):
        return None
    bare = "".join(text.split()).rstrip("=").translate(letters)
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except ValueError as error:
        raise ValueError(f"it begins like a picture in base64, but is damaged: {error}") from None


def _checked(value: object, info: ValidationInfo, kind: str, read: Callable[[Any], Any]) -> Any:
    """A picture or file; the context's ``find`` gives the file that a path means. If it is None, `PRESENT` stands for bytes.

    With ``live`` in the context, a picture may be a web address or decoded.
    """
    context = info.context or {}
    is_live = context.get("live", False)
    if is_live and isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_live and kind == "picture" and type(value).__module__.startswith("PIL."):
        return value
    try:
        found = read(value)
        if found is None:
            raise ValueError(f"there is no {kind} in it")
        if isinstance(found, str) and "://" in found and not (is_live and kind == "picture"):
            raise ValueError(
                f"{shortened(found)} is not on this machine: "
                + (
                    "`rge data download` fetches the pictures of records, and writes records that name the files"
                    if found.startswith(("http://", "https://")) and kind == "picture"
                    else f"copy the {kind}s, and give their paths"
                )
            )
    except ValueError as error:
        raise PydanticCustomError(kind, "{reason}", {"reason": str(error)}) from None
    find = context.get("find")
    if isinstance(found, bytes):
        return PRESENT if find is None and "find" in context else found
    return found if find is None else find(found)


def _picture(value: object, info: ValidationInfo) -> ImageRef:
    return _checked(value, info, "picture", picture_of)


def _file(value: object, info: ValidationInfo) -> str | bytes:
    return _checked(value, info, "file", _file_of)


def _file_of(cell: Any) -> str | bytes | None:
    if isinstance(cell, str) and cell[:5].lower() == "data:":
        return data_url_content(cell)
    return picture_of(cell)


def _video(value: object, info: ValidationInfo) -> str | bytes | tuple[ImageRef, ...]:
    if isinstance(value, (list, tuple, np.ndarray)) and not are_bytes(value):
        if not len(value):
            raise PydanticCustomError("file", "a list of frames is empty")
        return tuple(_picture(frame, info) for frame in value)
    return _file(value, info)


Picture = Annotated[ImageRef, PlainValidator(_picture)]


class _Written(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def part(self) -> Part:
        raise NotImplementedError


class _Text(_Written):
    text: str

    def part(self) -> Part:
        return TextPart(self.text)


class _Image(_Written):
    image: Picture

    def part(self) -> Part:
        return ImagePart(self.image)


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Video(_Written):
    video: Annotated[Any, PlainValidator(_video)]
    start: _Seconds | None = None
    end: _Seconds | None = None
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_frames: Annotated[int, Field(ge=1)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "_Video":
        rate_is_of_the_list = isinstance(self.video, tuple)
        if self.num_frames is not None and (
            self.max_frames is not None or (self.fps is not None and not rate_is_of_the_list)
        ):
            raise ValueError("give num_frames alone, or fps and max_frames")
        if self.end is not None and self.end <= (self.start or 0):
            raise ValueError(f"it ends at {self.end:g} s, which is not after its start")
        return self

    def part(self) -> Part:
        return VideoPart(**dict(self))


class _Pdf(_Written):
    pdf: Annotated[Any, PlainValidator(_file)]
    pages: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    dpi: Annotated[int, Field(ge=10, le=1200)] | None = None

    def part(self) -> Part:
        return PdfPart(self.pdf, None if self.pages is None else tuple(self.pages), self.dpi)


_KINDS = ("text", "image", "video", "pdf")
_ALIASES = {"input_text": "text", "image_url": "image", "input_image": "image", "video_url": "video"}


def _plain_form(value: Any) -> Any:
    """A part by our keys, from those of OpenAI, vLLM and transformers: ``{"type": "image_url", "image_url": {"url": ...}}``."""
    if not isinstance(value, Mapping):
        return value
    found = {name: one for name, one in value.items() if one is not None}
    kind = found.get("type")
    named = _ALIASES.get(kind, kind) if isinstance(kind, str) else None
    if named in _KINDS:
        del found["type"]
        for name in ("url", "path"):  # as transformers' messages have them
            if name in found and named != "text" and named not in found:
                found[named] = found.pop(name)
    for alias, name in _ALIASES.items():
        if alias in found and name not in found:
            given = found.pop(alias)
            found[name] = given["url"] if isinstance(given, Mapping) and "url" in given else given
    return found


def _kind_of(value: Any) -> str | None:
    named = [kind for kind in _KINDS if isinstance(value, Mapping) and kind in value]
    return named[0] if len(named) == 1 else None


_AnyWritten = Annotated[
    Annotated[_Text, Tag("text")]
    | Annotated[_Image, Tag("image")]
    | Annotated[_Video, Tag("video")]
    | Annotated[_Pdf, Tag("pdf")],
    Discriminator(
        _kind_of,
        custom_error_type="part",
        custom_error_message="a part is a mapping with exactly one of the keys text, image, video and pdf",
    ),
    BeforeValidator(_plain_form),
    AfterValidator(lambda written: written.part()),
    PlainSerializer(lambda part: part_to_json(part)),
]

PartField = Annotated[Part, GetPydanticSchema(lambda _, handler: handler.generate_schema(_AnyWritten))]
"""A part as a field of a record: a mapping in, a `Part` out."""

_PARTS: TypeAdapter[list[Part]] = TypeAdapter(list[PartField])


def parts_from_json(values: Any, *, live: bool = False) -> Content:
    """Content from a list of mappings, see the module; paths stay as they are.

    With `live`, pictures may be decoded ones and web addresses. Raises `ValueError`, which names the part.
    """
    try:
        return tuple(_PARTS.validate_python(values, context={"live": live}))
    except ValidationError as error:
        issue = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{place_of(('content', *issue['loc']))}: {issue['msg']}") from None


def place_of(loc: Sequence[int | str]) -> str:
    """Where a fault is, by pydantic's path: ``query.content.1.image``; a part's kind and its key of that name are one."""
    named = [shortened(str(part)) for part in loc]
    return ".".join(name for place, name in enumerate(named) if place == 0 or name != named[place - 1])


def part_to_json(part: Part) -> dict[str, Any]:
    """A part as `parts_from_json` reads it, without what is None."""
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in found.items()
        if value is not None
    }


def parts_to_json(content: Content) -> list[dict[str, Any]]:
    """Content as a list of mappings."""
    return list(map(part_to_json, content))


def parts_to_messages(content: Content, *, urls: bool = False) -> list[dict[str, Any]]:
    """A chat of one message, in the form of transformers and sentence-transformers; `parts_from_json` reads its content.

    `urls`: in that of OpenAI and vLLM, with addresses in place of references, and ``data:`` URLs in place of bytes.

    Raises:
        ValueError: with `urls`, a document or a list of frames, which that form does not have.
    """
    shown = []
    for part in content:
        (kind, value), *more = part_to_json(part).items()
        if urls and kind != "text":
            if kind == "pdf" or isinstance(value, list):
                raise ValueError(
                    f"a {kind} of {type(value).__name__} has no address: give pictures or a file"
                )
            kind = f"{kind}_url"
            if isinstance(value, bytes):
                value = f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
            value = {"url": value}
        shown.append({"type": kind, kind: value, **dict(more)})
    return [{"role": "user", "content": shown}]


def parts_to_input(content: Content) -> str | dict[str, Any] | list[dict[str, Any]]:
    """Content as an input of sentence-transformers: a text, a mapping in the order of its kinds, or else messages."""
    written = list(map(part_to_json, content))
    kinds = [next(iter(one)) for one in written]
    order = [kind for kind in ("image", "video", "text") for _ in range(kinds.count(kind))]
    is_plain = kinds == order and kinds.count("video") <= 1 and kinds.count("text") <= 1
    if not is_plain or any(len(one) > 1 for one in written):
        return parts_to_messages(content)
    if kinds == ["text"]:
        return str(written[0]["text"])
    values = {kind: [one[kind] for one in written if kind in one] for kind in dict.fromkeys(kinds)}
    return {kind: found[0] if len(found) == 1 else found for kind, found in values.items()}
