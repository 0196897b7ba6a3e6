"""The records that data preparation, training and evaluation exchange.

A training record is one line of JSON. It names its images relative to its file, as a picture file (``images/2370463.jpg``) or a
row of a Parquet picture library (``pictures.parquet#noto/1F512``).
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rge.common.errors import UserError
from rge.common.parts import (
    Content,
    ImageRef,
    PartField,
    Picture,
    TextPart,
    content_of,
    pictures_of,
    text_of,
    with_text,
)

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


class _Model(BaseModel):
    # Unknown fields are an error: a misspelt "negative" must not silently train without negatives.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Shown(_Model):
    @property
    def parts(self) -> Content:
        """What it shows, whichever way it is written."""
        raise NotImplementedError

    @property
    def pictures(self) -> tuple[ImageRef, ...]:
        """References of its pictures."""
        return pictures_of(self.parts)

    @property
    def words(self) -> str | None:
        """Its texts, joined by a newline; None without any."""
        return text_of(self.parts)

    @property
    def shows_something(self) -> bool:
        """Whether any part is more than a blank text."""
        return any(not isinstance(part, TextPart) or part.text.strip() for part in self.parts)


class Target(_Shown):
    """A candidate named by a training record: a picture, a text, or both; or any parts in their order, as ``content``.

    ``identity`` (default: ``id``) is shared by targets that are equally right, such as two drawings of one key; in-batch masking
    compares identities. ``score`` is how well it answers the record's query, according to a judge (docs/data_prep.md); only the
    losses ``kl`` and ``margin_mse`` read it.
    """

    id: Name
    image: Picture | None = None
    text: Text | None = None
    content: list[PartField] = []
    identity: Name | None = None
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Target":
        if self.content and (self.image is not None or self.text is not None):
            raise ValueError("give content alone: image and text are its short form")
        if not self.shows_something:
            raise ValueError("a target needs an image, a text, or both")
        return self

    @property
    def parts(self) -> Content:
        """What it shows, whichever way it is written."""
        if self.content:
            return tuple(self.content)
        return content_of(self.text, [] if self.image is None else [self.image])


class Positive(Target):
    """A target that answers the query, with the oracle rationale of this query-target pair."""

    rationale: Text | None = None


class QueryPart(_Shown):
    """The query of a training record: text, pictures, or both; or any parts in their order, as ``content``.

    ``paraphrases`` are other wordings of the text; training draws one of all wordings in each step.
    """

    text: str | None = None
    images: list[Picture] = []
    content: list[PartField] = []
    paraphrases: list[Text] = []

    @model_validator(mode="after")
    def _has_content(self) -> "QueryPart":
        if self.content and (self.images or self.text is not None):
            raise ValueError("give content alone: images and text are its short form")
        if not self.shows_something:
            raise ValueError("a query needs a text, images, or both")
        if self.paraphrases and not (self.words or "").strip():
            raise ValueError("paraphrases are other wordings of the text, which is missing")
        if self.paraphrases and sum(isinstance(part, TextPart) for part in self.parts) > 1:
            raise ValueError("paraphrases are other wordings of one text, and the content has several")
        return self

    @property
    def parts(self) -> Content:
        """What it shows, whichever way it is written."""
        return tuple(self.content) or content_of(self.text, self.images)

    @property
    def wordings(self) -> tuple[Content, ...]:
        """What it shows, then the same with each of the paraphrases."""
        return self.parts, *(with_text(self.parts, text) for text in self.paraphrases)


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
    content: Content = ()
    instruction: str | None = None  # put before a query's text

    @property
    def text(self) -> str | None:
        """Its texts, joined by a newline; None without any."""
        return text_of(self.content)

    @property
    def pictures(self) -> tuple[ImageRef, ...]:
        """References of its pictures."""
        return pictures_of(self.content)

    @property
    def is_visual(self) -> bool:
        """Whether it shows anything but text."""
        return not all(isinstance(part, TextPart) for part in self.content)


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
            f"it gives vectors that are not finite, {len(bad):,} of {len(vectors_ND):,}, this one first: it is damaged, or its precision "
            "is too low (float16 overflows; bfloat16 and float32 do not)",
            of,
            f"item {bad[0]}",
            kind="finite",
        )
    return vectors_ND
