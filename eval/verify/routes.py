"""The routes from an item to its embedding: this package's own, other libraries' and servers'.

A route embeds a `View`: the queries or candidates of a sample, in one mode. It answers None for a view that it does not have.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from eval.verify.plain import Departure, PlainModel
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.modes import Mode
from rge.common.parts import (
    Content,
    ImageRef,
    VideoPart,
    parts_to_messages,
    pictures_of,
    with_pictures,
    with_words,
)
from rge.common.schema import Encoded, Item
from rge.content.visuals import as_pictures
from rge.embedder import Embedder
from rge.inference import Side
from rge.model.backbone import load_plain
from rge.model.prompts import wording
from rge.web.client import make_client

BATCHES = (4, 32)
"""Batch sizes that are compared with single rows."""
TIMEOUT_S = 120.0
"""For one answer of a server."""
ALWAYS = ("batches", "reversed", "transformers", "bf16")
"""Routes that need nothing but this package."""


class RouteError(UserError):
    """A route, whose name is ``key``, cannot be used."""


@dataclass(frozen=True)
class View:
    """What is embedded: N items of one side, in one mode."""

    side: Side
    mode: Mode
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """For tables."""
        return "candidates" if self.side == "candidate" else f"queries, {self.mode}"


@dataclass(frozen=True)
class Found:
    """A route's results: embeddings (N, D) float32 and, if it shows them, N rationales."""

    embeddings: np.ndarray
    rationales: Sequence[str] | None = None


@dataclass(frozen=True)
class Route:
    """A way from items to embeddings. Of one in low precision only the direction of embeddings is compared."""

    name: str
    embed: Callable[[View], Found | None]
    low_precision: bool = False
    weights: str | None = None  # hash of the checkpoint's files, if the route tells it


def own_routes(embedder: Any, names: Sequence[str]) -> Iterator[Route]:
    """Batches and another order, by the embedder itself; of any embedder that `rge eval run` loads."""
    if "batches" in names:
        for size in BATCHES:
            yield Route(f"batches of {size}", partial(_found, embedder, batch_size=size))
    if "reversed" in names:
        yield Route("in the opposite order", lambda view: _found(embedder, view, BATCHES[-1], step=-1))


def routes_of(embedder: Embedder, plain: PlainModel, names: Sequence[str]) -> Iterator[Route]:
    """The routes of a checkpoint of rge, one at a time, so that one model is in memory beside the reference's.

    Raises:
        RouteError: one that was named is not installed, or does not exist for this checkpoint.
    """
    makers: dict[str, Callable[[Embedder, PlainModel], Iterator[Route]]] = {
        "batches": lambda embedder, _: own_routes(embedder, ["batches"]),
        "reversed": lambda embedder, _: own_routes(embedder, ["reversed"]),
        "transformers": _transformers,
        "flash": _flash,
        "bf16": _bfloat16,
        "adapters": _adapters,
        "st": _sentence_transformers,
        "vllm": _vllm,
    }
    for name in names:
        kind, _, address = name.partition(":")
        if kind == "server" and address:
            yield Server(address, embedder).route()
        elif name in makers:
            yield from makers[name](embedder, plain)
        else:
            raise RouteError(f"it is no route; there are {', '.join(makers)} and server:URL", key=name)


def default_routes(embedder: Embedder) -> list[str]:
    """All routes that are installed and apply to a checkpoint; servers have to be named."""
    names = list(ALWAYS)
    if find_spec("sentence_transformers"):
        names.append("st")
    if embedder.base is not None:
        names.append("adapters")
    return names


def _need(route: str, package: str) -> None:
    if find_spec(package) is None:
        raise RouteError(f"it needs the package {package}, which is not installed", key=route)


def _found(embedder: Any, view: View, batch_size: int, step: int = 1) -> Found:
    encoded: Encoded = embedder.encode(
        view.items[::step], side=view.side, mode=view.mode, batch_size=batch_size
    )
    return Found(encoded.embeddings[::step], encoded.rationales[::step])


def written_ids(embedder: Embedder, rationales: Sequence[str]) -> list[list[int]]:
    """Token ids of rationales, as a model that is given them as text would read them."""
    return [embedder.builder.tokenizer(text, add_special_tokens=False).input_ids for text in rationales]


def _plain(plain: PlainModel, view: View, *, how: Departure) -> Found | None:
    """Only without a rationale: plain transformers embeds what is there."""
    if view.mode != "direct":
        return None
    return Found(plain.embed(view.items, view.side, [[]] * len(view.items), how))


def _transformers(_: Embedder, plain: PlainModel) -> Iterator[Route]:
    for attention in ("sdpa", "eager"):
        for padding in ("right", "left"):
            how = Departure(attention=attention, padding=padding)
            name = f"transformers, {attention}, padded {padding}"
            yield Route(name, partial(_plain, plain, how=how))


def _flash(_: Embedder, plain: PlainModel) -> Iterator[Route]:
    _need("flash", "flash_attn")
    how = Departure(attention="flash_attention_2", dtype=torch.bfloat16)
    yield Route("transformers, flash attention", partial(_plain, plain, how=how), low_precision=True)


def _bfloat16(embedder: Embedder, _: PlainModel) -> Iterator[Route]:
    other = Embedder.from_pretrained(
        embedder.checkpoint, base=embedder.base, device=str(embedder.model.device), dtype="bfloat16"
    )
    yield Route("bfloat16", lambda view: _found(other, view, BATCHES[-1]), low_precision=True)


def _vllm(embedder: Embedder, _: PlainModel) -> Iterator[Route]:
    _need("vllm", "vllm")
    engine = Embedder.from_pretrained(embedder.checkpoint, engine="vllm")
    yield Route(
        "vLLM's rationales",
        lambda view: _found(engine, view, BATCHES[-1]) if view.mode == "reasoning" else None,
        low_precision=engine.settings.dtype != "float32",
    )


def _adapters(embedder: Embedder, _: PlainModel) -> Iterator[Route]:
    if embedder.base is None:
        raise RouteError(
            "the checkpoint holds whole weights; there are no adapters to compare", key="adapters"
        )
    model = load_plain(embedder.checkpoint, embedder.base, merged=False)
    other = PlainModel(embedder, model.to(embedder.model.device))
    yield Route("adapters, not merged", partial(_plain, other, how=Departure()))


def _sentence_transformers(embedder: Embedder, _: PlainModel) -> Iterator[Route]:
    _need("st", "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    options = {"dtype": "float32"} | ({} if embedder.base is None else {"base": str(embedder.base)})
    device = str(embedder.model.device)
    model = SentenceTransformer(
        str(embedder.checkpoint), trust_remote_code=True, device=device, model_kwargs=options
    )

    def embed(view: View) -> Found:
        # One call for each item, since the library's prompt is that of all inputs.
        vectors = np.empty((len(view.items), embedder.size), np.float32)
        for row, item in enumerate(view.items):
            content = parts_to_messages(item.content)
            if view.side == "query":
                found = model.encode_query([content], prompt=item.instruction or "", mode=view.mode)
            else:
                found = model.encode_document([content])
            vectors[row] = np.asarray(found)[0]
        return Found(vectors)

    yield Route("sentence-transformers", embed)


def _as_png(ref: ImageRef) -> str:
    """A picture as a data URL, decoded and upright, so that a server cannot decode it differently."""
    file = io.BytesIO()
    load_image(ref).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _as_message(content: Content) -> list[dict[str, Any]]:
    """Content as servers of OpenAI's and vLLM's messages take it: pages as pictures, and files by what they hold."""
    shown = as_pictures(content, clips=False)
    files = (
        replace(part, video=Path(part.video).read_bytes())
        if isinstance(part, VideoPart) and isinstance(part.video, str)
        else part
        for part in with_pictures(shown, map(_as_png, pictures_of(shown)))
    )
    return parts_to_messages(tuple(files), urls=True)


class Server:
    """`rge serve`, or any server of OpenAI's or vLLM's ``/v1/embeddings`` with messages."""

    def __init__(self, address: str, embedder: Embedder):
        self.address = address.rstrip("/").removesuffix("/v1")
        self.name = f"server:{address}"
        self.embedder = embedder
        import httpx

        self.client = make_client(httpx.Client, timeout=TIMEOUT_S)
        models = self._answer("GET", "/v1/models").get("data") or []
        if not models:
            raise RouteError("/v1/models lists no model", key=self.name)
        self.model = str(models[0]["id"])
        self.is_ours = models[0].get("owned_by") == "rge"

    def route(self) -> Route:
        """The route through it; a server of ours tells the hash of its weights."""
        weights = str(self._answer("GET", "/health").get("checkpoint_hash")) if self.is_ours else None
        return Route(self.name, self.embed, weights=weights)

    def embed(self, view: View) -> Found | None:
        """Item by item; a server that is not ours embeds what it is sent, and writes no rationales."""
        if not self.is_ours and view.mode != "direct":
            return None
        answers = [self._embedding(item, view) for item in view.items]
        vectors = np.array([answer["embedding"] for answer in answers], np.float32)
        rationales = [answer.get("rationale") or "" for answer in answers] if self.is_ours else None
        return Found(vectors, rationales)

    def _embedding(self, item: Item, view: View) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        content = item.content
        if self.is_ours:
            side: Literal["query", "document"] = "query" if view.side == "query" else "document"
            body |= {"side": side, "mode": view.mode, "return_rationale": True}
            if view.side == "query":
                body["instruction"] = item.instruction or ""
        else:  # it words nothing
            content = with_words(content, *wording(item, view.side, self.embedder.builder.profile))
        try:
            body["messages"] = _as_message(content)
        except ValueError as error:  # frames, which have no address
            raise RouteError(f"item {item.id!r}: {error}", key=self.name) from None
        data = self._answer("POST", "/v1/embeddings", body).get("data") or []
        if len(data) != 1 or not isinstance(data[0].get("embedding"), list):
            raise RouteError(f"it answered {len(data)} embeddings for one item", key=self.name)
        answer: dict[str, Any] = data[0]
        return answer

    def _answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx

        try:
            answer = self.client.request(method, self.address + path, json=body)
            answer.raise_for_status()
            content = answer.json()
        except httpx.HTTPStatusError as error:
            said = error.response.text[:200]
            raise RouteError(f"{path} answered {error.response.status_code}: {said}", key=self.name) from None
        except (httpx.HTTPError, ValueError) as error:
            raise RouteError(f"{path} cannot be used: {error}", key=self.name) from None
        if not isinstance(content, dict):
            raise RouteError(f"{path} answered no JSON object", key=self.name)
        return content
