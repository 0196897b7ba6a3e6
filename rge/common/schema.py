"""The records that data preparation, training and evaluation exchange.

A training record is one line of JSON. It names its images relative to its file, as a picture file (``images/2370463.jpg``) or a
row of a Parquet picture library (``pictures.parquet#noto/1F512``).
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticKnownError

ImageRef = str | bytes
"""Encoded picture bytes, a path to a picture file, or ``library.parquet#row-id``."""

Text = Annotated[str, Field(min_length=1)]


def safe_id(name: str) -> str:
    """An id without white space, which would break a TREC run; a blank becomes ``%20``."""
    return re.sub(r"\s", lambda match: f"%{ord(match[0]):02X}", name)


def _picture(value: object, info: ValidationInfo) -> ImageRef:
    """Check a reference, and join it to the folder of the context, if there is one."""
    # The errors are those of `Text`, since the fingerprint of a data set contains its problems.
    if not isinstance(value, str) and not (isinstance(value, bytes) and value):
        raise PydanticKnownError("string_type")
    if not value:
        raise PydanticKnownError("string_too_short", {"min_length": 1})
    folder = (info.context or {}).get("folder")
    return value if folder is None or isinstance(value, bytes) else str(folder / value)


Picture = Annotated[ImageRef, PlainValidator(_picture)]


class _Model(BaseModel):
    # Unknown fields are an error: a misspelt "negative" must not silently train without negatives.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(_Model):
    """A candidate named by a training record: a picture, a text, or both.

    ``identity`` (default: ``id``) is shared by targets that are equally right, such as two drawings of one key; in-batch masking
    compares identities.
    """

    id: Text
    image: Picture | None = None
    text: Text | None = None
    identity: Text | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Target":
        if self.image is None and not (self.text or "").strip():
            raise ValueError("a target needs an image, a text, or both")
        return self


class Positive(Target):
    """A target that answers the query, with the oracle rationale of this query-target pair."""

    rationale: Text | None = None


class QueryPart(_Model):
    """The query of a training record: text, pictures, or both."""

    text: str | None = None
    images: list[Picture] = []

    @model_validator(mode="after")
    def _has_content(self) -> "QueryPart":
        if not (self.text or "").strip() and not self.images:
            raise ValueError("a query needs a text, images, or both")
        return self


class Record(_Model):
    """One training record.

    ``negatives`` are judged and therefore never masked as false negatives. ``wording`` is ``included`` if the texts already contain
    the words that a prompt profile would add, as MMEB's do; such records need a profile that adds none.
    """

    id: Text
    group: Text
    source: Text
    split: Text
    category: str = ""
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
