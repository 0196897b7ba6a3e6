"""Request and response formats of OpenAI, vLLM, Cohere, Jina and TEI.

An unknown option is an error: a misspelt one would otherwise be ignored. Texts are short, except those that `check_limits` checks,
and validation of a list stops at its first error, so no body costs much more than reading it.
"""

import base64
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rge.common.modes import Mode
from rge.serving.inputs import Raw

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
Some = Annotated[list[T], Field(fail_fast=True, min_length=1)]
Name = Annotated[str, Field(max_length=1024)]
Side = Literal["query", "document"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Address(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """OpenAI's clients send it; pictures always have the checkpoint's sizes."""


class _Picture(_Strict):
    type: Literal["image_url"]
    image_url: _Address

    @field_validator("image_url", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


Parts = Many[Annotated[_Text | _Picture, Field(discriminator="type")]]


class _Content(_Strict):
    content: Parts


class Message(_Strict):
    """A message of the user: a text, or parts that are texts and pictures."""

    role: Literal["user"]
    content: str | Parts


class _JinaPart(_Strict):
    text: str | None = None
    image: str | None = None


def _raw(param: str, item: str | Message | _Content | _JinaPart) -> Raw:
    """Pictures are placed before the text, as in training."""
    if isinstance(item, _JinaPart):
        return Raw(param, item.text, () if item.image is None else (item.image,))
    content = item if isinstance(item, str) else item.content
    if isinstance(content, str):
        return Raw(param, content)
    texts = [part.text for part in content if isinstance(part, _Text)]
    pictures = [part.image_url.url for part in content if isinstance(part, _Picture)]
    return Raw(param, "\n".join(texts) or None, tuple(pictures))


def _numbered(name: str, items: Iterable[str | Message | _Content | _JinaPart]) -> list[Raw]:
    return [_raw(f"{name}[{row}]", item) for row, item in enumerate(items)]


class Asked(_Strict):
    """Fields of every request."""

    model: Name | None = None
    mode: Mode | None = None
    instruction: str | None = None


class _OpenAiAsked(Asked):
    input: str | Many[str] | None = None
    messages: Some[Message | Annotated[list[Message], Field(min_length=1, max_length=1)]] | None = None
    user: Name | None = None
    """OpenAI's clients send it."""

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(item, int | list) for item in value):
            raise ValueError("must be texts: ids of another model's tokens mean nothing here")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "_OpenAiAsked":
        if (self.input is None) == (self.messages is None):
            raise ValueError("give input (texts) or messages (texts and pictures), and not both")
        if self.messages is not None and len(self.messages) != 1 and isinstance(self.messages[0], Message):
            raise ValueError("messages: one message of the user, or a list of such conversations")
        return self

    def inputs(self) -> list[Raw]:
        """The texts, the conversation, or a batch of conversations in vLLM's form."""
        if isinstance(self.input, str):
            return [Raw("input", self.input)]
        if self.messages is None:
            return _numbered("input", self.input or [])
        if isinstance(self.messages[0], Message):
            return [_raw("messages", self.messages[0])]
        return _numbered(
            "messages", (item if isinstance(item, Message) else item[0] for item in self.messages)
        )


class EmbeddingsAsked(_OpenAiAsked):
    """Body of ``POST /v1/embeddings``."""

    encoding_format: Literal["float", "base64"] | None = None
    """None: float; LiteLLM sends it."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    side: Side | None = None
    """None: that of the model's name, else a query."""
    return_rationale: bool = False


class SearchAsked(_OpenAiAsked):
    """Body of ``POST /v1/search``."""

    k: Annotated[int, Field(ge=1, le=1000)] = 10
    return_rationale: bool = True
    where: Annotated[str, Field(max_length=1000)] | None = None
    """Condition in SQL on the index's columns."""
    hybrid: bool = False
    """Also search for the text's words, and fuse both rankings."""
    thumbnails: bool = False


# --------------------------------------------------------------------------------------------------------------- Cohere

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereAsked(Asked):
    """Body of ``POST /v2/embed``."""

    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"]
    texts: Some[str] | None = None
    images: Some[str] | None = None
    inputs_: Some[_Content] | None = Field(None, alias="inputs")
    embedding_types: Annotated[Some[EmbeddingType], Field(max_length=6)] = ["float"]
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal["NONE", "END"] = "END"
    priority: int = 0
    return_rationale: bool = False

    @model_validator(mode="after")
    def _one_of_three(self) -> "CohereAsked":
        if [self.texts, self.images, self.inputs_].count(None) != 2:
            raise ValueError("give one of texts, images and inputs")
        return self

    @property
    def side(self) -> Side:
        """Everything but a search query is a document."""
        return "query" if self.input_type == "search_query" else "document"

    def inputs(self) -> list[Raw]:
        """Texts, pictures, or both in parts."""
        if self.texts is not None:
            return _numbered("texts", self.texts)
        if self.images is not None:
            return [Raw(f"images[{row}]", None, (url,)) for row, url in enumerate(self.images)]
        return _numbered("inputs", self.inputs_ or [])


def encode_embeddings(vectors_ND: np.ndarray, kind: EmbeddingType) -> list[Any]:
    """Embeddings in the requested type, as numbers or base64.

    int8 is scaled so that each vector's largest component is 127, which does not change cosines. binary is the signs, packed.

    Raises:
        ValueError: signs of a dimension that is not a multiple of 8.
    """
    if kind == "float":
        return vectors_ND.tolist()
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode() for row in np.ascontiguousarray(vectors_ND, "<f4")]
    if kind in ("int8", "uint8"):
        scaled = np.rint(vectors_ND * (127 / np.abs(vectors_ND).max(axis=1, keepdims=True))).astype(np.int16)
        return (scaled + (128 if kind == "uint8" else 0)).tolist()
    if vectors_ND.shape[1] % 8:
        raise ValueError(f"{kind} needs a dimension that is a multiple of 8, got {vectors_ND.shape[1]}")
    packed = np.packbits(vectors_ND >= 0, axis=1).astype(np.int16)
    return (packed - (128 if kind == "binary" else 0)).tolist()


# --------------------------------------------------------------------------------------------------------------- rerank


Ranked = str | _Content | _JinaPart


class RerankAsked(Asked):
    """Body of ``POST /v1/rerank``, of Jina's, Cohere's or vLLM's form (``documents``) or of TEI's (``texts``)."""

    query: Ranked
    documents: Some[Ranked] | None = None
    texts: Some[str] | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None
    """0, which vLLM's clients send: all."""
    return_documents: bool = True
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool = True
    truncation_direction: Literal["right", "Right"] = "right"
    priority: int = 0
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "RerankAsked":
        if (self.documents is None) == (self.texts is None):
            raise ValueError("give documents, or texts as TEI's clients do")
        return self

    def inputs(self) -> list[Raw]:
        """The documents."""
        if self.texts is not None:
            return _numbered("texts", self.texts)
        return _numbered("documents", self.documents or [])

    def asked(self) -> Raw:
        """The query."""
        return _raw("query", self.query)

    def ranked(self, scores: np.ndarray) -> list[dict[str, Any]]:
        """The documents, best first, in the request's format; ties keep their order."""
        order = np.argsort(-scores, kind="stable").tolist()
        if self.texts is not None:
            return [
                {"index": row, "score": float(scores[row])}
                | ({"text": self.texts[row]} if self.return_text else {})
                for row in order
            ]
        texts = [raw.text for raw in self.inputs()]
        return [
            {"index": row, "relevance_score": float(scores[row])}
            | ({"document": {"text": texts[row]}} if self.return_documents else {})
            for row in order[: self.top_n or None]
        ]
