"""The routes of the server."""

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import rge
from rge.common.errors import UserError, not_one_of
from rge.common.images import data_url
from rge.common.modes import Mode
from rge.common.parts import content_of
from rge.common.schema import Encoded, Item
from rge.embedder import Embedder
from rge.index.store import ConditionError, Index
from rge.model.prompts import Prompt
from rge.serving.batches import MAX_FAILURES, Batches, Result
from rge.serving.bodies import Bodies, JsonRoute
from rge.serving.errors import BadInput, Refusal, error_response
from rge.serving.guard import Guard, MemoryBudget, Metrics, guarded
from rge.serving.inputs import Allowance, Raw, check_limits, fetch_files, make_prompt
from rge.serving.options import ServeOptions
from rge.serving.protocols import (
    Asked,
    CohereAsked,
    EmbeddingsAsked,
    EmbeddingType,
    RerankAsked,
    SearchAsked,
    Side,
    TeiAsked,
    encode_embeddings,
)

THREADS = 4
"""Pictures decoded at once, and searches beside them."""
FLOAT_CHARS, THUMBNAIL_CHARS = 22, 16 << 10
"""About the length of a number and of a thumbnail in an answer."""


@dataclass(frozen=True)
class _Answered:
    """The results for the inputs of a request, in order."""

    results: list[Result]
    num_prompt_tokens: int
    warnings: list[str]

    @property
    def embeddings(self) -> np.ndarray:
        return np.stack([result.embedding_D for result in self.results])

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = self.num_prompt_tokens, sum(result.num_tokens for result in self.results)
        total = prompt + completion
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


class Service:
    """A loaded checkpoint behind routes, with an API key (None: open to all) and an index (None: no search).

    Attributes:
        app: the ASGI application; call `start` first.
        guard: ends requests before a shutdown.
    """

    def __init__(
        self,
        embedder: Embedder,
        options: ServeOptions,
        *,
        key: str | None = None,
        index: Index | None = None,
    ):
        self.embedder, self.options, self.index = embedder, options, index
        # Now, while the files are those that were loaded, and because reading them would block the event loop.
        self._checkpoint_hash = embedder.checkpoint_hash
        self.name = options.name or options.checkpoint
        self._side_of: dict[str, Side | None] = {
            self.name: None, f"{self.name}-query": "query", f"{self.name}-document": "document",
        }  # fmt: skip
        self.held = MemoryBudget(options.max_waiting_mb << 20)
        # Made now: the first request of a task would wait for its processor.
        self._of_task = {None: embedder} | {task: embedder.for_task(task) for task in embedder.tasks}
        self.batches = Batches(
            self._embed,
            batch_size=options.batch_size,
            batch_tokens=options.batch_tokens,
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
        self._searches = ThreadPoolExecutor(THREADS, "rge-search")  # their own, since one may take long
        self.bodies = Bodies(options.max_inputs)
        routes = self._routes()
        paths = [str(getattr(route, "path", "")) for route in routes.routes]
        self.guard = Guard(routes, options, key=key, paths=paths, held=self.held, metrics=self.metrics)
        self.app = guarded(self.guard, options, key)

    def start(self) -> None:
        """Warm up, so that a broken set-up fails at startup and the first client does not wait; a `UserError` for some limits."""
        prompt = self.embedder.prompt(Item("start", content_of("a key")), "query")
        for mode in ("direct", "reasoning"):
            self.embedder.encode_prompts([prompt], mode=mode)
        self.batches.known_good = prompt

    def stop(self) -> None:
        """End the threads; inputs that still wait are dropped."""
        self.batches.stop()
        for threads in (self._threads, self._searches):
            threads.shutdown(wait=False, cancel_futures=True)
        self.bodies.stop()

    # ------------------------------------------------------------------------------------------------------------ work

    def _embed(self, prompts: Sequence[Prompt], mode: Mode, caps: Sequence[int | None]) -> Encoded:
        most = self.embedder.settings.generation.max_new_tokens
        asked = None if all(cap is None for cap in caps) else [most if cap is None else cap for cap in caps]
        return self.embedder.encode_prompts(
            prompts, mode=mode, batch_size=len(prompts), max_rationale_tokens=asked
        )

    def _count(self, mode: Mode, rows: int, seconds: float) -> None:
        self.metrics.batch_rows.labels(mode).observe(rows)
        self.metrics.batch_seconds.labels(mode).observe(seconds)

    async def _answer(
        self,
        asked: Asked,
        inputs: Sequence[Raw],
        side: Side | None,
        *,
        may_cut: bool = True,
        max_tokens: int | None = None,
        allowance: Allowance | None = None,
    ) -> _Answered:
        """Embed the inputs of a request. A text that is too long is truncated, or an error unless `may_cut`."""
        embedder = self._with_task(asked.training_task)
        longest = embedder.builder.max_tokens
        side = self._side(asked.model, side)
        for limit in (max_tokens, asked.truncate_prompt_tokens):
            if limit is not None and -1 < limit < longest:
                raise BadInput(f"inputs are always truncated to {longest} tokens, got {limit}")
        if side == "document" and asked.instruction is not None:
            raise BadInput("a document has no instruction", "instruction")
        mode = self._mode(asked, side)
        notes = asked.notes()
        instruction = None
        allowance = allowance or Allowance(self.options)
        with self.held.loan() as loan:
            check_limits(inputs, asked.instruction, self.options)
            # Wide characters take more memory than they had bytes in the body, which is counted.
            loan.take(sum(sys.getsizeof(raw.text) - len(raw.text) for raw in inputs if raw.text))
            if side == "query":
                instruction, note = embedder.instruction_for(asked.instruction)
                notes += [note] if note else []
            with self.batches.reserve(len(inputs)):
                prompts = []
                for raw in inputs:
                    prompt = await self._prepare(embedder, raw, side, instruction, allowance)
                    loan.take(0 if prompt.pixels is None else prompt.pixels.nbytes)
                    prompts.append(prompt)
                    notes += _cut_notes(raw, prompt.num_cut_tokens, longest, may_cut)
            results = await self.batches.answers(prompts, mode, asked.max_rationale_tokens)
        if mode != "direct":
            for result in results:
                self.metrics.tokens.observe(result.num_tokens)
                self.metrics.forced.inc(result.stop_reason == "forced")
        return _Answered(results, sum(map(len, prompts)), notes)

    def _side(self, name: str | None, side: Side | None) -> Side:
        """The side of a request with this model's name and this side; clients that cannot send one choose it by the name."""
        name = self.name if name is None else name
        if name not in self._side_of:
            names = ", ".join(map(repr, self._side_of))
            raise Refusal(
                404, f"there is no model {name!r} here, only {names}", "model_not_found", param="model"
            )
        named = self._side_of[name]
        if None not in (named, side) and named != side:
            message = f"model {name!r} is for the {named} side, and this request for the {side} side: use {self.name!r}"
            raise BadInput(message, "model")
        return named or side or "query"

    def _mode(self, asked: Asked, side: Side) -> Mode:
        mode: Mode = asked.mode or (self.embedder.query_mode if side == "query" else "direct")
        try:
            self.embedder.settings.check_mode(mode)
        except UserError as error:
            raise BadInput(str(error), "mode") from None
        try:
            self.embedder.settings.check_cap(asked.max_rationale_tokens)
        except UserError as error:
            raise BadInput(str(error), "max_rationale_tokens") from None
        writes = asked.max_rationale_tokens != 0 or mode == "direct"
        return mode if writes else "direct"  # so that it need not wait for those that write

    def _with_task(self, task: str | None) -> Embedder:
        """The embedder with a training task's prompts."""
        if task not in self._of_task:
            raise BadInput(not_one_of("task", task, self.embedder.tasks or ["null"]), "task")
        return self._of_task[task]

    async def _prepare(
        self, embedder: Embedder, raw: Raw, side: Side, instruction: str | None, allowance: Allowance
    ) -> Prompt:
        """The prompt of one input. A cancelled request ends between two of its inputs."""
        with self.held.loan() as loan:
            files = await fetch_files(raw, allowance, loan)
            self.num_preparing += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._prompt, embedder, raw, files, side, instruction
                )
            finally:
                self.num_preparing -= 1

    def _prompt(
        self,
        embedder: Embedder,
        raw: Raw,
        files: Sequence[bytes | str],
        side: Side,
        instruction: str | None,
    ) -> Prompt:
        return make_prompt(embedder, raw, files, side, instruction, self.options, self.held)

    def _check_dimensions(self, dimensions: int | None, param: str) -> None:
        sizes = self.embedder.sizes
        if dimensions is not None and dimensions not in sizes:
            raise BadInput(f"{param} must be one of {', '.join(map(str, sizes))}, got {dimensions}", param)

    # ---------------------------------------------------------------------------------------------------------- routes

    async def _embeddings(self, body: EmbeddingsAsked) -> Response:
        dimensions = body.dimensions or body.output_dimension
        self._check_dimensions(dimensions, "dimensions")
        answered = await self._answer(body, body.inputs(), body.asked_side, may_cut=body.may_cut)
        vectors_ND = self.embedder.cut(answered.embeddings, dimensions)
        vectors = encode_embeddings(vectors_ND, body.encoding_format or body.embedding_type or "float")
        data = []
        for row, (result, vector) in enumerate(zip(answered.results, vectors, strict=True)):
            entry = {"object": "embedding", "index": row, "embedding": vector}
            if body.return_rationale:
                entry |= {"rationale": result.rationale, "stop_reason": result.stop_reason}
            data.append(entry)
        content = {"object": "list", "data": data, "model": self.name, "usage": answered.usage}
        return await self._answered(content, answered.warnings, vectors_ND.size * FLOAT_CHARS)

    async def _cohere_v1(self, body: CohereAsked) -> Response:
        return await self._cohere(body, version=1)

    async def _cohere_v2(self, body: CohereAsked) -> Response:
        return await self._cohere(body, version=2)

    async def _cohere(self, body: CohereAsked, version: int) -> Response:
        self._check_dimensions(body.output_dimension, "output_dimension")
        answered = await self._answer(
            body, body.inputs(), body.side, may_cut=body.truncate == "END", max_tokens=body.max_tokens
        )
        vectors = self.embedder.cut(answered.embeddings, body.output_dimension)
        try:
            kinds: Sequence[EmbeddingType] = body.embedding_types or ("float",)
            embeddings: Any = {kind: encode_embeddings(vectors, kind) for kind in kinds}
        except ValueError as error:
            raise BadInput(str(error), "embedding_types") from None
        meta: dict[str, Any] = {
            "api_version": {"version": str(version)},
            "billed_units": {"input_tokens": answered.num_prompt_tokens},
        }
        if answered.warnings:
            meta["warnings"] = answered.warnings
        response_type = "embeddings_by_type"
        if version == 1 and body.embedding_types is None:
            response_type, embeddings = "embeddings_floats", embeddings["float"]
        content = {"id": uuid.uuid4().hex, "embeddings": embeddings, "meta": meta}
        content |= {"response_type": response_type, "texts": body.texts or []}
        if body.return_rationale:
            content["rationales"] = [result.rationale for result in answered.results]
        size = vectors.size * FLOAT_CHARS * len(kinds) + sum(map(len, body.texts or ()))
        return await self._answered(content, (), size)

    async def _tei(self, body: TeiAsked) -> Response:
        self._check_dimensions(body.dimensions, "dimensions")
        answered = await self._answer(body, body.inputs(), body.side, may_cut=body.truncate is not False)
        vectors_ND = self.embedder.cut(answered.embeddings, body.dimensions)
        return await self.bodies.answer([*vectors_ND], vectors_ND.size * FLOAT_CHARS)

    async def _rerank(self, body: RerankAsked) -> Response:
        """Rank documents by their cosine to the query after its rationale."""
        self._side(body.model, "document")  # before the query is embedded
        options: dict[str, Any] = {"may_cut": body.truncate, "allowance": Allowance(self.options)}
        asked = [body.asked()]
        query = await self._answer(body, asked, "query", max_tokens=body.max_tokens_per_query, **options)
        plain = Asked(model=body.model, task=body.task)  # documents are embedded as in training
        inputs = body.inputs()
        documents = await self._answer(
            plain, inputs, "document", max_tokens=body.max_tokens_per_doc, **options
        )
        ranked = body.ranked(documents.embeddings @ query.embeddings[0])
        size = sum(len(raw.text or "") + sum(map(len, raw.files)) for raw in inputs)
        if body.texts is not None:
            return await self.bodies.answer(ranked, size)
        usage = {key: query.usage[key] + documents.usage[key] for key in query.usage}
        content = {
            "id": uuid.uuid4().hex, "object": "list", "model": self.name, "results": ranked, "usage": usage,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }  # fmt: skip
        return await self._answered(content, query.warnings + documents.warnings, size)

    async def _search(self, body: SearchAsked) -> Response:
        inputs = body.inputs()
        if len(inputs) != 1 or isinstance(body.input, list):
            raise BadInput("a search has one query: a text, or one message", "input")
        index = self.index
        assert index is not None
        task = index.about["task"]
        if body.task not in (None, task):
            raise BadInput(not_one_of("task", body.task, [task or "null"]) + ", as of the index", "task")
        answered = await self._answer(body.model_copy(update={"task": task}), inputs, "query")
        query_1D = self.embedder.cut(answered.embeddings, index.about["dimensions"])
        search = partial(
            index.search,
            query_1D,
            body.k,
            where=body.where,
            words=[inputs[0].text or ""] if body.hybrid else None,
            thumbnails=body.thumbnails,
        )
        try:
            [hits] = await asyncio.get_running_loop().run_in_executor(self._searches, search)
        except ConditionError as error:
            raise BadInput(str(error), "where") from None
        data = [
            {"object": "hit", "index": rank}
            | hit.as_json()
            | ({"thumbnail": data_url(hit.thumbnail)} if body.thumbnails else {})
            for rank, hit in enumerate(hits)
        ]
        content = {"object": "list", "data": data, "model": self.name, "usage": answered.usage}
        if body.return_rationale:
            [result] = answered.results
            content |= {"rationale": result.rationale, "stop_reason": result.stop_reason}
        return await self._answered(content, answered.warnings, THUMBNAIL_CHARS * len(data) * body.thumbnails)

    async def _answered(self, content: dict[str, Any], notes: Sequence[str], size: int) -> Response:
        return await self.bodies.answer(content | {"warnings": list(notes)} if notes else content, size)

    def _fault(self) -> str | None:
        """Why the model probably cannot answer any more, as after a sticky error of CUDA; None: it can."""
        if self.batches.num_failures >= MAX_FAILURES:
            return f"the model has failed {self.batches.num_failures} times in a row"
        if self.batches.running_s > self.options.timeout_s:
            return f"a batch has been running for more than timeout_s={self.options.timeout_s:g}"
        return None

    async def _health(self) -> JSONResponse:
        fault, name = self._fault(), Path(self.name)
        content = {
            "status": "ok" if fault is None else "failing",
            **({} if fault is None else {"reason": fault}),
            # Needs no key, so no absolute path is shown.
            "model": "/".join(name.parts[1:][-2:]) if name.is_absolute() else self.name,
            "checkpoint_hash": self._checkpoint_hash,
            "engine": self.options.engine,
            "device": str(self.embedder.model.device),
            "dimensions": self.embedder.sizes,
            "waiting_inputs": self.batches.num_waiting,
            "rge_version": rge.__version__,
        }
        return JSONResponse(content, 200 if fault is None else 503)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self._one_model(name) for name in self._side_of]}

    async def _one_model(self, name: str) -> dict[str, Any]:
        self._side(name, None)
        return {"id": name, "object": "model", "created": self._began, "owned_by": "rge"}

    async def _metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _routes(self) -> FastAPI:
        # Without FastAPI's pages, which load scripts from elsewhere; the schema is at /openapi.json.
        app = FastAPI(
            title="rge serve",
            version=rge.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # `Guard` drops them
            exception_handlers={
                Refusal: _refused, RequestValidationError: _invalid, HTTPException: _http, Exception: _failed,
            },
        )  # fmt: skip
        app.state.bodies, app.router.route_class = self.bodies, JsonRoute
        routes: list[tuple[str, str, Callable[..., Any], str]] = [
            ("POST", "/v1/embeddings", self._embeddings, "Embed texts and pictures, as OpenAI and vLLM"),
            ("POST", "/v2/embed", self._cohere_v2, "Embed texts and pictures, as Cohere"),
            ("POST", "/v1/embed", self._cohere_v1, "Embed texts and pictures, as Cohere's first API"),
            ("POST", "/embed", self._tei, "Embed texts, as TEI"),
            ("POST", "/", self._tei, "Embed texts, as TEI"),
            ("POST", "/v1/rerank", self._rerank, "Rank documents"),
            ("POST", "/v2/rerank", self._rerank, "Rank documents"),
            ("POST", "/rerank", self._rerank, "Rank documents"),
            ("GET", "/v1/models", self._models, "The model's names"),
            ("GET", "/v1/models/{name:path}", self._one_model, "The model, by its name"),
            ("GET", "/health", self._health, "Whether the server answers"),
            ("GET", "/metrics", self._metrics, "Figures for Prometheus"),
        ]
        if self.index is not None:
            routes.append(("POST", "/v1/search", self._search, "Search the index"))
        for method, path, route, summary in routes:
            app.add_api_route(path, route, methods=[method], summary=summary)
        app.add_api_route("/health", self._health, methods=["HEAD"], include_in_schema=False)
        return app


def _cut_notes(raw: Raw, num_cut: int, longest: int, may_cut: bool) -> list[str]:
    """The warning about a truncated text, if any."""
    if num_cut and not may_cut:
        raise BadInput(f"{raw.param} is {num_cut} tokens too long (limit: {longest})", raw.param)
    note = f"{raw.param}: the last {num_cut} tokens of the text were cut to fit the checkpoint's prompts ({longest} tokens)"
    return [note] if num_cut else []


async def _refused(_: Request, refusal: Refusal) -> Response:
    return error_response(refusal)


async def _invalid(_: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")
    message, code = first["msg"].removeprefix("Value error, "), first["type"]
    if param:
        refusal = Refusal(400, f"{param}: {message}", code, param=param)
    elif code in ("value_error", "string_unicode"):
        refusal = Refusal(400, message, code)
    else:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        refusal = Refusal(400, message, "invalid_body")
    return error_response(refusal)


async def _http(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(Refusal(error.status_code, message, "http_error"))


async def _failed(_: Request, error: Exception) -> Response:
    refusal = Refusal(
        500, f"the server failed ({type(error).__name__}); its log says where", "internal_error"
    )
    return error_response(refusal, close=True)  # as uvicorn does after it has logged the error
