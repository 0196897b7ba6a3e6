"""The records that data preparation, training and evaluation exchange.

A training record is one line of JSON. It names its images relative to its file, as a picture file (``images/2370463.jpg``) or a
row of a Parquet picture library (``pictures.parquet#noto/1F512``).
"""

import base64
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rge.common.errors import UserError, shortened

ImageRef = str | bytes
"""Encoded picture bytes, a path to a picture file, or ``library.parquet#row-id``."""

PRESENT = "<bytes>"
"""In place of the bytes of a picture that are not needed."""
LONGEST_PATH = 4096
"""Characters of a path on Linux; a longer text is something else."""

Text = Annotated[str, Field(min_length=1)]


def _as_text(value: object) -> object:
    """An integer as text; numpy's too, and whole floats, into which pandas turns integers beside missing values."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    return str(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else value


Name = Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]


def safe_id(name: str) -> str:
    """An id without white space, which would break a TREC run; a blank becomes ``%20``."""
    return re.sub(r"\s", lambda match: f"%{ord(match[0]):02X}", name)


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


def _picture(value: object, info: ValidationInfo) -> ImageRef:
    """Read a picture; the context's ``find`` gives the file that a path means. If it is None, `PRESENT` stands for bytes."""
    try:
        found = picture_of(value)
        if found is None:
            raise ValueError("there is no picture in it")
        if isinstance(found, str) and "://" in found:
            raise ValueError(
                f"{shortened(found)} is not on this machine: "
                + (
                    "`rge data download` fetches the pictures of records, and writes records that name the files"
                    if found.startswith(("http://", "https://"))
                    else "copy the pictures, and give their paths"
                )
            )
    except ValueError as error:
        raise PydanticCustomError("picture", "{reason}", {"reason": str(error)}) from None
    context = info.context or {}
    find = context.get("find")
    if isinstance(found, bytes):
        return PRESENT if find is None and "find" in context else found
    return found if find is None else find(found)


Picture = Annotated[ImageRef, PlainValidator(_picture)]


class _Model(BaseModel):
    # Unknown fields are an error: a misspelt "negative" must not silently train without negatives.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(_Model):
    """A candidate named by a training record: a picture, a text, or both.

    ``identity`` (default: ``id``) is shared by targets that are equally right, such as two drawings of one key; in-batch masking
    compares identities.
    """

    id: Name
    image: Picture | None = None
    text: Text | None = None
    identity: Name | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Target":
        if self.image is None and not (self.text or "").strip():
            raise ValueError("a target needs an image, a text, or both")
        return self


class Positive(Target):
    """A target that answers the query, with the oracle rationale of this query-target pair."""

    rationale: Text | None = None


class QueryPart(_Model):
    """The query of a training record: text, pictures, or both.

    ``paraphrases`` are other wordings of the text; training draws one of all wordings in each step.
    """

    text: str | None = None
    images: list[Picture] = []
    paraphrases: list[Text] = []

    @model_validator(mode="after")
    def _has_content(self) -> "QueryPart":
        if not (self.text or "").strip() and not self.images:
            raise ValueError("a query needs a text, images, or both")
        if self.paraphrases and not (self.text or "").strip():
            raise ValueError("paraphrases are other wordings of the text, which is missing")
        return self

    @property
    def wordings(self) -> tuple[str | None, ...]:
        """The text, then its paraphrases."""
        return self.text, *self.paraphrases


class Record(_Model):
    """One training record.

    ``negatives`` are judged and therefore never masked as false negatives. ``wording`` is ``included`` if the texts already contain
    the words that a prompt profile would add, as MMEB's do; such records need a profile that adds none.
    """

    id: Name
    group: Name
    source: Name
    split: Name
    category: Annotated[str, BeforeValidator(_as_text)] = ""
    instruction: str | None = None
    query: QueryPart
    positives: list[Positive] = Field(min_length=1)
    negatives: list[Target] = []
    wording: Literal["profile", "included"] = "profile"


@dataclass(frozen=True, slots=True)
class Item:
    """Anything that can be embedded: a query or candidate of a benchmark or a training record."""

    id: str  # for error messages and results
    text: str | None = None
    images: tuple[ImageRef, ...] = ()  # in the order of the prompt
    instruction: str | None = None  # put before a query's text
    # If a text comes before a picture: the pieces of text, with None for each picture. Empty: all pictures, then the text, as in
    # training.
    parts: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedder's results for N items, in their order."""

    embeddings: np.ndarray  # (N, D) float32, unit norm
    rationales: list[str]  # without ``<emb>``; empty in direct mode
    num_rationale_tokens: np.ndarray  # (N,) int64, without ``<emb>``
    # ``emb`` (written by the model), ``forced`` (appended at the cap) or ``prefilled`` (direct mode)
    stop_reasons: list[str]
    generate_ms: np.ndarray  # (N,) float64, wall time of generation: a batch's time divided by its rows
    embed_ms: np.ndarray  # (N,) float64, wall time of everything else, likewise


def check_finite(vectors_ND: np.ndarray, of: str) -> np.ndarray:
    """The vectors as they are. Raises `UserError` if some are not finite; ``of`` names the model that gave them."""
    bad = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
    if len(bad):
        raise UserError(
            f"{of} gives vectors that are not finite, {len(bad):,} of {len(vectors_ND):,}, first for item {bad[0]}: it is damaged, or "
            "its precision is too low (float16 overflows; bfloat16 and float32 do not)"
        )
    return vectors_ND
