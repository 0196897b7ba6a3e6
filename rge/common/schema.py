"""The records that data preparation, training and evaluation exchange.

A training record is one JSON object a line; its images are named relative to the file it stands in, either as a
picture file (``images/2370463.jpg``) or as a row of a Parquet picture library (``pictures.parquet#noto/1F512``).
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

ImageRef = str | bytes
"""Encoded picture bytes, a path to a picture file, or ``library.parquet#row-id``."""

Text = Annotated[str, Field(min_length=1)]


def safe_id(name: str) -> str:
    """An id without white space, which would break a TREC run; ``%20`` stands for a blank."""
    return re.sub(r"\s", lambda found: f"%{ord(found[0]):02X}", name)


def _bytes_too(value: object, check: ValidatorFunctionWrapHandler) -> ImageRef:
    found: ImageRef = value if isinstance(value, bytes) and value else check(value)
    return found


Picture = Annotated[
    ImageRef,
    GetPydanticSchema(
        lambda _, schema: schema.generate_schema(
            Annotated[Text, WrapValidator(_bytes_too), PlainSerializer(lambda ref: ref)]
        )
    ),
]
"""A reference in a file; from a data set, encoded bytes too. Not a union, whose messages would name both."""


class _Model(BaseModel):
    # Unknown fields are an error: a misspelt "negative" must not silently train without negatives.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(_Model):
    """A candidate named by a training record: a picture, a text, or both.

    ``id`` names the object. ``identity`` names what it stands for where several objects are equally right (two
    drawings of one key); in-batch masking compares identities. It defaults to ``id``.
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

    ``negatives`` are judged and therefore never masked as false negatives. ``wording`` is ``included`` where the texts
    already hold the words that a prompt profile would put around them, as MMEB's do; the trainer takes such records only
    with a profile that adds none.
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
    """Anything that can be embedded: the query or the candidate of a benchmark or of a training record.

    Attributes:
        id: name used in error messages and results.
        text: the user's text, or None.
        images: zero or more pictures, in the order in which the prompt shows them.
        instruction: task instruction, put before a query's text; None where there is none.
        parts: the text in pieces, with None in place of each picture, where a text comes before a picture. Empty: all
            pictures, then the text, which is the order that models are trained with.
    """

    id: str
    text: str | None = None
    images: tuple[ImageRef, ...] = ()
    instruction: str | None = None
    parts: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an embedder returns for N items, rows in the order of the items.

    Attributes:
        embeddings: (N, D) float32, unit norm.
        rationales: N texts without ``<emb>``; empty strings in direct mode.
        num_rationale_tokens: (N,) int64, without ``<emb>``.
        stop_reasons: per row ``emb`` (the model wrote ``<emb>`` itself), ``forced`` (the cap was reached and
            ``<emb>`` was appended) or ``prefilled`` (direct mode).
        generate_ms: (N,) float64, wall time of generation: a batch's time divided by its rows.
        embed_ms: (N,) float64, wall time of everything else, divided likewise.
    """

    embeddings: np.ndarray
    rationales: list[str]
    num_rationale_tokens: np.ndarray
    stop_reasons: list[str]
    generate_ms: np.ndarray
    embed_ms: np.ndarray
