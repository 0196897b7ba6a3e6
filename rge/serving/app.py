"""The routes: what a client asks, what it is answered."""

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import rge
from rge.embedder import Embedder
from rge.serving.batches import Batches, Found, Mode, QueueFull, Stopped
from rge.serving.errors import Refusal, answer_of
from rge.serving.guard import Guard, Held
from rge.serving.inputs import (
    Asked,
    BadInput,
    EmbeddingsAsked,
    Preparer,
    Raw,
    SearchAsked,
    Side,
    fetched,
    raw_inputs,
)
from rge.serving.metrics import Metrics
from rge.serving.options import ServeOptions

if TYPE_CHECKING:
    from rge.index.store import Index

THREADS = 4
"""Pictures decoded at once."""


@dataclass(frozen=True)
class _Answered:
    """What the inputs of a request became, in their order."""

    found: list[Found]
    num_prompt_tokens: int
    warnings: list[str]


class Service:
    """A loaded checkpoint, and everything that its routes need.

    Args:
        embedder: the checkpoint.
        options: of the command.
        key: that clients must send; None: none.
        index: to search in; None: there is no /v1/search.

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
        self.prompts = Preparer(embedder, options)
        self.held = Held(options.max_waiting_mb << 20)
        self.batches = Batches(
            self._embed,
            batch_size=options.batch_size,
            wait_s=options.batch_wait_ms / 1000,
            max_queue=options.max_queue,
            on_batch=self._count,
        )
        self.metrics = Metrics(lambda: self.batches.num_waiting, lambda: self.held.now)
        self._threads = ThreadPoolExecutor(THREADS, "rge-prepare")
        routes = self._routes()
        paths = [str(getattr(route, "path", "")) for route in routes.routes]
        self.app = Guard(routes, options, key=key, paths=paths, held=self.held, metrics=self.metrics)

    def start(self) -> None:
        """Embed something once, so that what cannot work fails here and the first client does not wait; then take requests."""
        raw = Raw("start", "a key")
        for mode in ("direct", "reasoning"):
            prompt = self.prompts.prompt(raw, [], "query", None)
            self.embedder.encode_prompts([prompt], mode=mode)
        self.batches.start()

    def drain(self) -> None:
        """Refuse what is new."""
        self.app.is_draining = True

    def stop(self) -> None:
        """Give up what still waits."""
        self.batches.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------------ work

    def _embed(self, prompts: Sequence[Any], mode: Mode) -> Any:
        return self.embedder.encode_prompts(prompts, mode=mode, batch_size=len(prompts))

    def _count(self, mode: Mode, rows: int, seconds: float) -> None:
        self.metrics.batch_rows.labels(mode).observe(rows)
        self.metrics.batch_seconds.labels(mode).observe(seconds)

    async def _answer(self, asked: Asked, side: Side) -> _Answered:
        """Embed the inputs of a request.

        Raises:
            Refusal: something about the request, or about the present load.
        """
        if asked.model is not None and asked.model != self.name:
            raise Refusal(404, f"there is no model {asked.model!r} here, only {self.name!r}", "model_not_found", param="model")  # fmt: skip
        if side == "document" and asked.instruction is not None:
            raise Refusal(400, "a document has no instruction", "invalid_value", param="instruction")
        notes: list[str] = []
        instruction = None
        if side == "query":
            instruction, note = self.embedder.instruction_for(asked.instruction)
            notes += [note] if note else []
        mode: Mode = asked.mode or (self.embedder.query_mode if side == "query" else "direct")
        pixels = 0
        try:
            raws = raw_inputs(asked, self.options)
            with self.batches.reserve(len(raws)) as place:
                pictures = await fetched(raws, self.options)
                loop = asyncio.get_running_loop()
                prompts = []
                for raw, shown in zip(raws, pictures, strict=True):
                    prompt = await loop.run_in_executor(
                        self._threads, self.prompts.prompt, raw, shown, side, instruction
                    )
                    size = 0 if prompt.pixels is None else prompt.pixels.nbytes
                    self.held.take(size)
                    pixels += size
                    prompts.append(prompt)
                    if prompt.num_cut_tokens:
                        notes.append(
                            f"{raw.param}: the last {prompt.num_cut_tokens} tokens of the text were cut to fit the "
                            f"checkpoint's prompts ({self.embedder.builder.max_tokens} tokens)"
                        )
                found = await self.batches.answers(place, prompts, mode)
        except BadInput as bad:
            raise Refusal(400, str(bad), "invalid_value", param=bad.param) from None
        except QueueFull as full:
            raise Refusal(429, "too many inputs are waiting; try again later", "queue_full", retry_after_s=full.retry_after_s) from None  # fmt: skip
        except Stopped:
            raise Refusal(503, "the server is shutting down", "shutting_down", retry_after_s=5) from None
        finally:
            self.held.now -= pixels
        if mode == "reasoning":
            for one in found:
                self.metrics.tokens.observe(one.num_tokens)
                self.metrics.forced.inc(one.stop_reason == "forced")
        return _Answered(found, sum(map(len, prompts)), notes)

    def _usage(self, answered: _Answered) -> dict[str, int]:
        written = sum(one.num_tokens for one in answered.found)
        prompt = answered.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    # ---------------------------------------------------------------------------------------------------------- routes

    async def _embeddings(self, body: EmbeddingsAsked) -> JSONResponse:
        sizes = self.embedder.sizes
        if body.dimensions is not None and body.dimensions not in sizes:
            raise Refusal(
                400, f"dimensions must be one of {', '.join(map(str, sizes))}, got {body.dimensions}", "invalid_value",
                param="dimensions",
            )  # fmt: skip
        answered = await self._answer(body, body.side)
        vectors = self.embedder.cut(np.stack([one.embedding_D for one in answered.found]), body.dimensions)
        data = []
        for row, (one, vector) in enumerate(zip(answered.found, vectors, strict=True)):
            shown = {"object": "embedding", "index": row, "embedding": _written(vector, body.encoding_format)}
            if body.return_rationale:
                shown |= {"rationale": one.rationale, "stop_reason": one.stop_reason}
            data.append(shown)
        return _json(
            {"object": "list", "data": data, "model": self.name, "usage": self._usage(answered)},
            answered.warnings,
        )

    async def _search(self, body: SearchAsked) -> JSONResponse:
        if isinstance(body.input, list):
            raise Refusal(400, "a search has one query: input is a text", "invalid_value", param="input")
        answered = await self._answer(body, "query")
        index = self.index
        assert index is not None
        [one] = answered.found
        query_1D = self.embedder.cut(one.embedding_D[None], index.about["dimensions"])
        loop = asyncio.get_running_loop()
        [hits] = await loop.run_in_executor(self._threads, lambda: index.search(query_1D, body.k))
        # Where a picture lies on this machine is nobody's business; its name in the folder that was indexed is `id`.
        data = [
            {
                "object": "hit", "index": rank, "id": hit.id, "score": hit.score, "text": hit.text, "metadata": hit.metadata,
                "url": hit.image if (hit.image or "").startswith(("http://", "https://")) else None, "gone": hit.gone,
            }
            for rank, hit in enumerate(hits)
        ]  # fmt: skip
        shown: dict[str, Any] = {
            "object": "list",
            "data": data,
            "model": self.name,
            "usage": self._usage(answered),
        }
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

    async def _models(self) -> JSONResponse:
        return JSONResponse(
            {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "rge"}]}
        )

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _routes(self) -> FastAPI:
        # Its pages load scripts from elsewhere; the description alone is at /openapi.json.
        app = FastAPI(title="rge serve", version=rge.__version__, docs_url=None, redoc_url=None)
        app.add_api_route(
            "/v1/embeddings", self._embeddings, methods=["POST"], summary="Embed texts and pictures"
        )
        if self.index is not None:
            app.add_api_route("/v1/search", self._search, methods=["POST"], summary="Search the index")
        app.add_api_route("/v1/models", self._models, methods=["GET"], summary="The model's name")
        app.add_api_route("/health", self._health, methods=["GET"], summary="Whether the model works")
        app.add_api_route("/metrics", self._metrics, methods=["GET"], summary="Figures for Prometheus")
        app.add_exception_handler(Refusal, _refused)
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_exception_handler(HTTPException, _http)
        app.add_exception_handler(Exception, _failed)
        return app


def _written(vector_D: np.ndarray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector_D, dtype="<f4").tobytes()).decode()
    return vector_D.tolist()


def _json(content: dict[str, Any], notes: Sequence[str]) -> JSONResponse:
    return JSONResponse(content | {"warnings": list(notes)} if notes else content)


async def _refused(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return answer_of(refusal)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return answer_of(Refusal(400, f"the body is no JSON: {first['ctx']['error']}", "invalid_json"))
    message = first["msg"].removeprefix("Value error, ")
    if not loc and first["type"] in ("value_error", "string_unicode"):
        return answer_of(Refusal(400, message, first["type"]))
    if not loc:
        return answer_of(
            Refusal(
                400,
                "the body must be a JSON object, sent with Content-Type: application/json",
                "invalid_body",
            )
        )
    param = ".".join(loc)
    return answer_of(Refusal(400, f"{param}: {message}", first["type"], param=param))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return answer_of(Refusal(error.status_code, message, "http_error"))


async def _failed(_: Request, error: Exception) -> Response:
    return answer_of(
        Refusal(500, f"the server failed ({type(error).__name__}); its log says where", "internal_error")
    )
