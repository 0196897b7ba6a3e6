"""Request and response formats of OpenAI, vLLM, Voyage, Cohere, Jina and TEI.

An unknown option is an error: a misspelt one would otherwise be ignored. Options of these clients that mean something here are mapped,
those that would change the result are refused, and the rest causes a warning. Texts are short, except those that `check_limits` checks,
and validation of a list stops at its first error, so no body costs much more than reading it.
"""

import base64
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rge.common.modes import Mode
from rge.common.parts import ImagePart, Part, PdfPart, TextPart, VideoPart, content_of
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


def _address(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class _Picture(_Strict):
    type: Literal["image_url"]
    image_url: Annotated[_Address, BeforeValidator(_address)]


class _Data(_Strict):
    file_data: str
    filename: Name | None = None


class _File(_Strict):
    """A PDF, as OpenAI's clients send it, and of which pages."""

    type: Literal["file"]
    file: Annotated[
        _Data, BeforeValidator(lambda value: {"file_data": value} if isinstance(value, str) else value)
    ]
    pages: Annotated[Some[Annotated[int, Field(ge=1)]], Field(max_length=1000)] | None = None


_Seconds = Annotated[float, Field(ge=0, le=1e6)]


class _Video(_Strict):
    """A clip, or its frames as pictures, and which of it is shown."""

    type: Literal["video_url"]
    video_url: Annotated[_Address | Annotated[Some[str], Field(max_length=1000)], BeforeValidator(_address)]
    start: _Seconds | None = None
    end: _Seconds | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    max_frames: Annotated[int, Field(ge=1)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None


_USUAL = {
    "video": "video_url",
    "image": "image_url", "input_image": "image_url", "pdf": "file", "input_file": "file", "input_text": "text",
}  # fmt: skip


def _usual(value: Any) -> Any:
    """A part in the form of OpenAI's and vLLM's chats: ours, which its only key names, and those of other APIs become it."""
    if not isinstance(value, dict):
        return value
    own = [name for name in ("text", "image", "video", "pdf") if name in value]
    kind = value.get("type", own[0] if len(own) == 1 else None)
    if not isinstance(kind, str):
        return value
    usual = _USUAL.get(kind, kind)
    found = {usual if name == kind else name: one for name, one in value.items()}
    if usual == "file" and "file_data" in found:  # OpenAI's responses
        found["file"] = {name: found.pop(name) for name in ("file_data", "filename") if name in found}
    return found | {"type": usual}


Parts = Many[
    Annotated[_Text | _Picture | _Video | _File, Field(discriminator="type"), BeforeValidator(_usual)]
]


class _Content(_Strict):
    content: Parts


class Message(_Strict):
    """A message of the user: a text, or parts that are texts, pictures, clips and documents."""

    role: Literal["user"]
    content: str | Parts


class _JinaPart(_Strict):
    text: str | None = None
    image: str | None = None
    video: str | None = None
    pdf: str | None = None


def _raw(param: str, item: str | Message | _Content | _JinaPart) -> Raw:
    if isinstance(item, _JinaPart):
        kinds: dict[Any, str | None] = {ImagePart: item.image, VideoPart: item.video, PdfPart: item.pdf}
        shown = (kind(ref) for kind, ref in kinds.items() if ref)
        return Raw(param, (*shown, *content_of(item.text)))
    content = item if isinstance(item, str) else item.content
    if isinstance(content, str):
        return Raw(param, content_of(content))
    return Raw(param, tuple(map(_part, content)))


def _part(part: _Text | _Picture | _Video | _File) -> Part:
    if isinstance(part, _Text):
        return TextPart(part.text)
    if isinstance(part, _Picture):
        return ImagePart(part.image_url.url)
    if isinstance(part, _Video):
        clip = part.video_url.url if isinstance(part.video_url, _Address) else tuple(part.video_url)
        return VideoPart(clip, part.start, part.end, part.fps, part.max_frames, part.num_frames)
    return PdfPart(part.file.file_data, None if part.pages is None else tuple(part.pages))


def _numbered(name: str, items: Iterable[str | Message | _Content | _JinaPart]) -> list[Raw]:
    return [_raw(f"{name}[{row}]", item) for row, item in enumerate(items)]


class Asked(_Strict):
    """Fields of every request. Of other servers' options, only values that change nothing are allowed."""

    model: Name | None = None
    mode: Mode | None = None
    max_rationale_tokens: Annotated[int, Field(ge=0)] | None = None
    instruction: str | None = None
    task: Name | None = None
    """A training task, whose prompts and instruction to use."""
    user: Name | None = None
    """OpenAI's clients send it."""
    stream: Literal[False] | None = None
    add_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """-1, as in vLLM: as many as fit."""
    priority: int = 0
    request_id: Name | None = None

    @property
    def training_task(self) -> str | None:
        """The training task, if one is named."""
        return self.task

    def notes(self) -> list[str]:
        """Warnings about options without an effect."""
        given = [name for name in ("priority", "request_id") if getattr(self, name)]
        return [f"{name} has no effect here" for name in given]


class _OpenAiAsked(Asked):
    input: str | Many[str | _JinaPart] | None = None
    messages: Some[Message | Annotated[list[Message], Field(min_length=1, max_length=1)]] | None = None

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
            return [Raw("input", content_of(self.input))]
        if self.messages is None:
            return _numbered("input", self.input or [])
        if isinstance(self.messages[0], Message):
            return [_raw("messages", self.messages[0])]
        return _numbered(
            "messages", (item if isinstance(item, Message) else item[0] for item in self.messages)
        )


_SIDES: dict[str, Side] = {
    "query": "query", "search_query": "query", "retrieval.query": "query",
    "document": "document", "passage": "document", "search_document": "document", "retrieval.passage": "document",
}  # fmt: skip
"""The sides by other clients' names."""
_JINA_SIDES = ("retrieval.query", "retrieval.passage")


class EmbeddingsAsked(_OpenAiAsked):
    """Body of ``POST /v1/embeddings``."""

    encoding_format: Literal["float", "base64"] | None = None
    """None: float; LiteLLM sends it."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    side: Side | None = None
    """None: that of the model's name, else a query."""
    return_rationale: bool = False
    input_type: Literal["query", "document", "search_query", "search_document", "passage"] | None = None
    """The side by Voyage's, Cohere's and NIM's names."""
    task: Name | None = None
    """A training task, or the side by Jina's names: ``retrieval.query``, ``retrieval.passage``."""
    truncation: bool | None = None
    truncate: bool | Literal["NONE", "END"] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    output_dtype: Literal["float"] | None = None
    embedding_type: Literal["float", "base64"] | None = None
    normalized: Literal[True] | None = None
    late_chunking: Literal[False] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "EmbeddingsAsked":
        for keys in (
            ("side", "input_type", "task"), ("dimensions", "output_dimension"), ("encoding_format", "embedding_type"),
        ):  # fmt: skip
            values = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
            if self.training_task is not None:
                values.pop("task", None)
            if len({_SIDES.get(value, value) for value in values.values()}) > 1:
                raise ValueError(f"{' and '.join(values)} contradict each other")
        return self

    @property
    def training_task(self) -> str | None:
        """The training task, if one is named."""
        return None if self.task in _JINA_SIDES else self.task

    @property
    def asked_side(self) -> Side | None:
        """The side by any of its names."""
        name = self.side or self.input_type or (self.task if self.task in _JINA_SIDES else None)
        return None if name is None else _SIDES[name]

    @property
    def may_cut(self) -> bool:
        """Whether a text that is too long is truncated; an error otherwise."""
        return self.truncation is not False and self.truncate not in (False, "NONE")


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
    """Body of ``POST /v2/embed`` and ``/v1/embed``."""

    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"]
    texts: Some[str] | None = None
    images: Some[str] | None = None
    inputs_: Some[_Content] | None = Field(None, alias="inputs")
    embedding_types: Annotated[Some[EmbeddingType], Field(max_length=6)] | None = None
    """None: float; in ``/v1/embed`` without naming the type."""
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal["NONE", "END"] = "END"
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
            return [Raw(f"images[{row}]", content_of(None, [url])) for row, url in enumerate(self.images)]
        return _numbered("inputs", self.inputs_ or [])


def encode_embeddings(vectors_ND: np.ndarray, kind: EmbeddingType) -> list[Any]:
    """Embeddings in the requested type, as arrays of numbers or as base64.

    int8 is scaled so that each vector's largest component is 127, which does not change cosines. binary is the signs, packed.

    Raises:
        ValueError: signs of a dimension that is not a multiple of 8.
    """
    if kind == "float":
        return [*vectors_ND]
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode() for row in np.ascontiguousarray(vectors_ND, "<f4")]
    if kind in ("int8", "uint8"):
        scaled = np.rint(vectors_ND * (127 / np.abs(vectors_ND).max(axis=1, keepdims=True))).astype(np.int16)
        return [*(scaled + (128 if kind == "uint8" else 0))]
    if vectors_ND.shape[1] % 8:
        raise ValueError(f"{kind} needs a dimension that is a multiple of 8, got {vectors_ND.shape[1]}")
    packed = np.packbits(vectors_ND >= 0, axis=1).astype(np.int16)
    return [*(packed - (128 if kind == "binary" else 0))]


# ------------------------------------------------------------------------------------------------------------------ TEI


class TeiAsked(Asked):
    """Body of ``POST /embed``."""

    inputs_: Annotated[str | Some[str], Field(alias="inputs")]
    prompt_name: Literal["query", "document", "passage"] | None = None
    """The side; None: that of the model's name, else a query."""
    normalize: Literal[True] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float"] | None = None

    def inputs(self) -> list[Raw]:
        """The texts."""
        return (
            [Raw("inputs", content_of(self.inputs_))]
            if isinstance(self.inputs_, str)
            else _numbered("inputs", self.inputs_)
        )

    @property
    def side(self) -> Side | None:
        """The side that the prompt's name stands for."""
        return None if self.prompt_name is None else _SIDES[self.prompt_name]


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
    truncation_side: Literal["right"] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_query: Annotated[int, Field(ge=1)] | None = None

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
        return [
            {"index": row, "relevance_score": float(scores[row])}
            | ({"document": self._as_given(row)} if self.return_documents else {})
            for row in order[: self.top_n or None]
        ]

    def _as_given(self, row: int) -> dict[str, Any]:
        """A document as it was sent: clients look for its text, and take null for one."""
        document = (self.documents or [])[row]
        return {"text": document} if isinstance(document, str) else document.model_dump(exclude_unset=True)
