"""The routes of the server."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import rge
from rge.common.errors import UserError
from rge.common.images import WEB, data_url
from rge.common.modes import SILENT
from rge.embedder import Embedder
from rge.serving.batches import Batches, Found, Mode, QueueFull, Stopped
from rge.serving.errors import Refusal, error_response
from rge.serving.guard import Guard, MemoryBudget, guarded
from rge.serving.inputs import BadInput, Raw, check_limits, fetch_pictures, make_prompt
from rge.serving.metrics import Metrics
from rge.serving.options import ServeOptions
from rge.serving.protocols import (
    Asked,
    CohereAsked,
    EmbeddingsAsked,
    RerankAsked,
    SearchAsked,
    Side,
    encode_embeddings,
)

if TYPE_CHECKING:
    from rge.index.store import Hit, Index

THREADS = 4
"""Pictures decoded at once."""


@dataclass(frozen=True)
class _Answered:
    """The results for the inputs of a request, in order."""

    found: list[Found]
    num_prompt_tokens: int
    warnings: list[str]

    @property
    def embeddings(self) -> np.ndarray:
        return np.stack([one.embedding_D for one in self.found])

    @property
    def usage(self) -> dict[str, int]:
        written = sum(one.num_tokens for one in self.found)
        return {
            "prompt_tokens": self.num_prompt_tokens, "completion_tokens": written,
            "total_tokens": self.num_prompt_tokens + written,
        }  # fmt: skip


class Service:
    """A loaded checkpoint, and everything that its routes need: the key (None: none) and the index (None: no search).

    Attributes:
        app: the ASGI application; `start` before it is called.
    """

    def __init__(
        self,
        embedder: Embedder,
        options: ServeOptions,
        *,
        key: str | None = None,
        index: "Index | None" = None,
    ):
        self.embedder, self.options, self.index = embedder, options, index
        self.name = options.name or options.checkpoint
        self.held = MemoryBudget(options.max_waiting_mb << 20)
        self.batches = Batches(
            self._embed,
            batch_size=options.batch_size,
            wait_s=options.batch_wait_ms / 1000,
            max_queue=options.max_queue,
            on_batch=self._count,
        )
        self.num_preparing = 0
        self.metrics = Metrics(
            waiting=lambda: self.batches.num_waiting,
            preparing=lambda: self.num_preparing,
            held=lambda: self.held.now,
        )
        self._began = int(time.time())
        self._threads = ThreadPoolExecutor(THREADS, "rge-prepare")
        routes = self._routes()
        paths = [str(getattr(route, "path", "")) for route in routes.routes]
        self._guard = Guard(routes, options, key=key, paths=paths, held=self.held, metrics=self.metrics)
        self.app = guarded(self._guard, options, key)

    def start(self) -> None:
        """Embed something once, so that a broken set-up fails at startup and the first client does not wait; then accept requests."""
        raw = Raw("start", "a key")
        prompt = make_prompt(self.embedder, raw, [], "query", None, self.options.max_picture_mp)
        for mode in ("direct", "reasoning"):
            self.embedder.encode_prompts([prompt], mode=mode)
        self.batches.start()

    def drain(self) -> None:
        """Refuse new requests."""
        self._guard.is_draining = True

    def stop(self) -> None:
        """Answer all waiting requests with 503."""
        self.batches.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------------ work

    def _embed(self, prompts: Sequence[Any], mode: Mode) -> Any:
        return self.embedder.encode_prompts(prompts, mode=mode, batch_size=len(prompts))

    def _count(self, mode: Mode, rows: int, seconds: float) -> None:
        self.metrics.batch_rows.labels(mode).observe(rows)
        self.metrics.batch_seconds.labels(mode).observe(seconds)

    async def _answer(
        self,
        asked: Asked,
        inputs: Sequence[Raw],
        side: Side,
        *,
        may_cut: bool = True,
        max_tokens: int | None = None,
    ) -> _Answered:
        """Embed the inputs of a request; a text that is too long is cut, or an error unless `may_cut`.

        Raises:
            Refusal: something about the request, or about the present load.
        """
        longest = self.embedder.builder.max_tokens
        self._check_model(asked.model)
        if max_tokens is not None and max_tokens < longest:
            raise _invalid_value(f"inputs are cut to {longest} tokens and no fewer, got {max_tokens}")
        mode = self._mode(asked, side)
        notes: list[str] = []
        instruction, pixels = None, 0
        try:
            with _refusals():
                check_limits(inputs, asked.instruction, self.options)
                if side == "query":
                    instruction, note = self.embedder.instruction_for(asked.instruction)
                    notes += [note] if note else []
                with self.batches.reserve(len(inputs)) as place:
                    prompts = []
                    for raw in inputs:
                        prompt = await self._prepare(raw, side, instruction)
                        size = 0 if prompt.pixels is None else prompt.pixels.nbytes
                        self.held.take(size)
                        pixels += size
                        prompts.append(prompt)
                        notes += _cut_notes(raw, prompt.num_cut_tokens, longest, may_cut)
                    found = await self.batches.answers(place, prompts, mode)
        finally:
            self.held.now -= pixels
        if mode not in SILENT:
            for one in found:
                self.metrics.tokens.observe(one.num_tokens)
                self.metrics.forced.inc(one.stop_reason == "forced")
        return _Answered(found, sum(map(len, prompts)), notes)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise Refusal(
                404, f"there is no model {name!r} here, only {self.name!r}", "model_not_found", param="model"
            )

    def _mode(self, asked: Asked, side: Side) -> Mode:
        mode: Mode = asked.mode or (self.embedder.query_mode if side == "query" else "direct")
        try:
            self.embedder.settings.check_mode(mode)
        except UserError as wrong:
            raise _invalid_value(str(wrong), "mode") from None
        return mode

    async def _prepare(self, raw: Raw, side: Side, instruction: str | None) -> Any:
        """The prompt of one input. A request that is cancelled ends between two of its inputs."""
        pictures = await fetch_pictures(raw, self.options)
        self.num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads,
                make_prompt,
                self.embedder,
                raw,
                pictures,
                side,
                instruction,
                self.options.max_picture_mp,
            )
        finally:
            self.num_preparing -= 1

    def _check_dimensions(self, dimensions: int | None, param: str) -> None:
        sizes = self.embedder.sizes
        if dimensions is not None and dimensions not in sizes:
            raise _invalid_value(
                f"{param} must be one of {', '.join(map(str, sizes))}, got {dimensions}", param
            )

    # ---------------------------------------------------------------------------------------------------------- routes

    async def _embeddings(self, body: EmbeddingsAsked) -> JSONResponse:
        self._check_dimensions(body.dimensions, "dimensions")
        if body.side == "document" and body.instruction is not None:
            raise _invalid_value("a document has no instruction", "instruction")
        answered = await self._answer(body, body.inputs(), body.side)
        vectors = encode_embeddings(
            self.embedder.cut(answered.embeddings, body.dimensions), body.encoding_format
        )
        data = []
        for row, (one, vector) in enumerate(zip(answered.found, vectors, strict=True)):
            shown = {"object": "embedding", "index": row, "embedding": vector}
            if body.return_rationale:
                shown |= {"rationale": one.rationale, "stop_reason": one.stop_reason}
            data.append(shown)
        return _json(
            {"object": "list", "data": data, "model": self.name, "usage": answered.usage}, answered.warnings
        )

    async def _cohere(self, body: CohereAsked) -> JSONResponse:
        self._check_dimensions(body.output_dimension, "output_dimension")
        if body.side == "document" and body.instruction is not None:
            raise _invalid_value("only input_type=search_query has an instruction", "instruction")
        answered = await self._answer(
            body, body.inputs(), body.side, may_cut=body.truncate == "END", max_tokens=body.max_tokens
        )
        vectors = self.embedder.cut(answered.embeddings, body.output_dimension)
        try:
            embeddings = {kind: encode_embeddings(vectors, kind) for kind in body.embedding_types}
        except ValueError as error:
            raise _invalid_value(str(error), "embedding_types") from None
        meta: dict[str, Any] = {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": answered.num_prompt_tokens},
        }
        if answered.warnings:
            meta["warnings"] = answered.warnings
        shown = {"id": _id(), "embeddings": embeddings, "meta": meta, "response_type": "embeddings_by_type"}
        if body.texts is not None:
            shown["texts"] = body.texts
        if body.return_rationale:
            shown["rationales"] = [one.rationale for one in answered.found]
        return JSONResponse(shown)

    async def _rerank(self, body: RerankAsked) -> JSONResponse:
        """Rank by the cosine between the query, after its rationale, and each document."""
        options: dict[str, Any] = {"may_cut": body.truncate, "max_tokens": body.max_tokens_per_doc}
        query = await self._answer(body, [body.asked()], "query", **options)
        plain = Asked(model=body.model)  # documents are embedded as in training
        documents = await self._answer(plain, body.inputs(), "document", **options)
        ranked = body.ranked(documents.embeddings @ query.embeddings[0])
        if body.texts is not None:
            return JSONResponse(ranked)
        usage = {key: query.usage[key] + documents.usage[key] for key in query.usage}
        shown = {
            "id": _id(), "object": "list", "model": self.name, "results": ranked, "usage": usage,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }  # fmt: skip
        return _json(shown, query.warnings + documents.warnings)

    async def _search(self, body: SearchAsked) -> JSONResponse:
        inputs = body.inputs()
        if len(inputs) != 1 or isinstance(body.input, list):
            raise _invalid_value("a search has one query: a text, or one message", "input")
        answered = await self._answer(body, inputs, "query")
        index = self.index
        assert index is not None
        [one] = answered.found
        query_1D = self.embedder.cut(one.embedding_D[None], index.about["dimensions"])
        words = [inputs[0].text or ""] if body.hybrid else None

        def find() -> "list[Hit]":
            return index.search(query_1D, body.k, where=body.where, words=words, thumbnails=body.thumbnails)[
                0
            ]

        try:
            hits = await asyncio.get_running_loop().run_in_executor(self._threads, find)
        except UserError as error:
            if body.where is None:
                raise
            raise _invalid_value(str(error).replace(index.uri, "the index"), "where") from None
        # Paths of this machine are not shown; a picture's name in the folder that was indexed is `id`.
        data = [
            {
                "object": "hit", "index": rank, "id": hit.id, "score": hit.score, "text": hit.text, "metadata": hit.metadata,
                "url": hit.image if (hit.image or "").startswith(WEB) else None, "gone": hit.gone,
                "source": Path(hit.source).name,
                **({"thumbnail": data_url(hit.thumbnail)} if body.thumbnails else {}),
            }
            for rank, hit in enumerate(hits)
        ]  # fmt: skip
        shown = {"object": "list", "data": data, "model": self.name, "usage": answered.usage}
        if body.return_rationale:
            shown |= {"rationale": one.rationale, "stop_reason": one.stop_reason}
        return _json(shown, answered.warnings)

    async def _health(self) -> JSONResponse:
        about = {
            "status": "ok" if self.batches.is_alive else "the model's thread has ended",
            "model": self.name,
            "checkpoint_hash": self.embedder.checkpoint_hash,
            "engine": self.options.engine,
            "device": str(self.embedder.model.device),
            "dimensions": self.embedder.sizes,
            "waiting_inputs": self.batches.num_waiting,
            "rge_version": rge.__version__,
        }
        return JSONResponse(about, 200 if self.batches.is_alive else 503)

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._began, "owned_by": "rge"}

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def _one_model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model()

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _routes(self) -> FastAPI:
        # Its pages load scripts from elsewhere; the description alone is at /openapi.json.
        app = FastAPI(title="rge serve", version=rge.__version__, docs_url=None, redoc_url=None)
        asked: list[tuple[str, Callable[..., Any], str]] = [
            ("/v1/embeddings", self._embeddings, "Embed texts and pictures, as OpenAI and vLLM"),
            ("/v2/embed", self._cohere, "Embed texts and pictures, as Cohere"),
            *((path, self._rerank, "Rank documents") for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        ]
        if self.index is not None:
            asked.append(("/v1/search", self._search, "Search the index"))
        for path, route, summary in asked:
            app.add_api_route(path, route, methods=["POST"], summary=summary)
        for path, route, summary in (
            ("/v1/models", self._models, "The model's name"),
            ("/v1/models/{name:path}", self._one_model, "The model, by its name"),
            ("/health", self._health, "Whether the model works"),
            ("/metrics", self._metrics, "Figures for Prometheus"),
        ):
            app.add_api_route(path, route, methods=["GET"], summary=summary)
        app.add_exception_handler(Refusal, _refused)
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_exception_handler(HTTPException, _http)
        app.add_exception_handler(Exception, _failed)
        return app


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the errors of an input into a `Refusal`."""
    try:
        yield
    except BadInput as bad:
        raise _invalid_value(str(bad), bad.param) from None
    except QueueFull as full:
        busy = "too many inputs are waiting; try again later"
        raise Refusal(429, busy, "queue_full", retry_after_s=full.retry_after_s) from None
    except Stopped:
        raise Refusal(503, "the server is shutting down", "shutting_down", retry_after_s=5) from None


def _invalid_value(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, message, "invalid_value", param=param)


def _cut_notes(raw: Raw, num_cut: int, longest: int, may_cut: bool) -> list[str]:
    """The warning about a truncated text, if any."""
    if num_cut and not may_cut:
        raise BadInput(f"{raw.param} is {num_cut} tokens too long (limit: {longest})", raw.param)
    cut = f"{raw.param}: the last {num_cut} tokens of the text were cut to fit the checkpoint's prompts ({longest} tokens)"
    return [cut] if num_cut else []


def _id() -> str:
    return uuid.uuid4().hex


def _json(content: dict[str, Any], notes: Sequence[str]) -> JSONResponse:
    return JSONResponse(content | {"warnings": list(notes)} if notes else content)


async def _refused(_: Request, refusal: Exception) -> Response:
    return error_response(cast(Refusal, refusal))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return error_response(
            Refusal(400, f"the body is not valid JSON: {first['ctx']['error']}", "invalid_json")
        )
    message = first["msg"].removeprefix("Value error, ")
    if not loc and first["type"] in ("value_error", "string_unicode"):
        return error_response(Refusal(400, message, first["type"]))
    if not loc:
        said = "the body must be a JSON object, sent with Content-Type: application/json"
        return error_response(Refusal(400, said, "invalid_body"))
    param = ".".join(loc)
    return error_response(Refusal(400, f"{param}: {message}", first["type"], param=param))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(Refusal(error.status_code, message, "http_error"))


async def _failed(_: Request, error: Exception) -> Response:
    return error_response(
        Refusal(500, f"the server failed ({type(error).__name__}); its log says where", "internal_error")
    )
