"""The explorer's routes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT
from rge.common.images import decode_data_url
from rge.common.parts import ImagePart, Part, PdfPart, VideoPart
from rge.content.limited import Decoder
from rge.content.preview import upload_preview
from rge.explore.explorer import Explorer, Picture, Query, StoppedError
from rge.index.sources import thumbnail
from rge.serving.address import is_local
from rge.web.client import fetch_picture

MAX_BYTES = 32 << 20
"""Maximum size of a body: a photo has about 5 MB, and a third more in base64."""
SHOWN_PX, LARGE_PX = 384, 1600
STRIP = 60
"""Pictures of an index that are offered at the start."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(explorer: Explorer, host: str) -> FastAPI:
    """The page's server.

    If only this machine can reach `host`, requests must name it, which protects from DNS rebinding.
    """
    app = FastAPI(openapi_url=None)
    if is_local(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", host])

    @app.middleware("http")
    async def headers(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(ValueError)
    async def invalid(_: Request, error: ValueError) -> Response:
        return JSONResponse({"error": _message(error)}, status_code=400)

    @app.get("/api/about")
    def about() -> dict[str, Any]:
        index = explorer.index
        strip = [
            {"source": source, "id": name} for source, name, has_picture in index.sample(STRIP) if has_picture
        ]
        return {
            "checkpoint": index.about["checkpoint"].rsplit("/", 1)[-1].replace("demo_checkpoint", "demo"),
            "items": len(index),
            "instruction": explorer.embedder.default_instruction,
            "query_mode": explorer.embedder.query_mode,
            "knows_icons_only": explorer.embedder.checkpoint == DEMO_CHECKPOINT,
            "columns": list(index.columns),
            "examples": [
                {"question": one.question, "picture": {"example": at}}
                for at, one in enumerate(explorer.examples)
            ],
            "pictures": [] if explorer.examples else strip,
        }

    @app.get("/api/picture")
    def picture(
        source: str | None = None, id: str | None = None, example: int | None = None, large: bool = False
    ) -> Response:
        asked = Picture(source=source, id=id, example=example)
        try:
            shown = thumbnail(_picture(explorer, asked), LARGE_PX if large else SHOWN_PX)
        except UserError as error:
            return JSONResponse({"error": _message(error)}, status_code=404)
        return Response(shown, media_type="image/webp")

    @app.post("/api/preview")
    async def preview(request: Request) -> Response:
        """The first pages or some frames of an upload, as one picture."""
        asked = Picture.model_validate_json(await _body(request))
        shown = await asyncio.to_thread(_upload_preview, asked.data or "")
        return Response(shown, media_type="image/webp")

    @app.post("/api/other")
    async def other(request: Request) -> Response:
        asked = Query.model_validate_json(await _body(request))
        return JSONResponse(await asyncio.to_thread(explorer.another, asked.question))

    @app.post("/api/ask")
    async def ask(request: Request) -> Response:
        asked = Query.model_validate_json(await _body(request))
        part = None if asked.picture is None else await asyncio.to_thread(_part, explorer, asked.picture)
        return StreamingResponse(_answers(explorer, asked, part), media_type="application/x-ndjson")

    app.mount("/", StaticFiles(packages=[("rge.explore", "page")], html=True))
    return app


async def _answers(explorer: Explorer, asked: Query, part: Part | None) -> AsyncIterator[str]:
    """Results of a query as lines of JSON, as they become known. When the client disconnects, the model stops writing."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
    stopped = False

    def tell(news: dict[str, Any]) -> None:
        if stopped:
            raise StoppedError("the client has disconnected")
        loop.call_soon_threadsafe(queue.put_nowait, news)

    def work() -> None:
        try:
            explorer.ask(asked, part, tell)
        except StoppedError:
            return
        except ValueError as error:
            loop.call_soon_threadsafe(queue.put_nowait, {"error": _message(error)})
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    working = loop.run_in_executor(None, work)
    try:
        while (news := await queue.get()) is not None:
            yield json.dumps(news, ensure_ascii=False) + "\n"
        await working
    finally:
        stopped = True


def _part(explorer: Explorer, asked: Picture) -> Part:
    """What a query shows."""
    if asked.data is not None:
        if _CLIP.match(asked.data):
            return VideoPart(asked.data)
        if _DOCUMENT.match(asked.data):
            return PdfPart(asked.data)
        if not asked.data.startswith("data:"):  # `fetch_picture` would fetch an address
            raise UserError("the picture cannot be read: a data URL in base64 is needed")
        return ImagePart(fetch_picture(asked.data))
    if asked.source is not None and asked.id is not None:
        return explorer.part(asked.source, asked.id)
    return ImagePart(_picture(explorer, asked))


_CLIP, _DOCUMENT = re.compile(r"data:video/"), re.compile(r"data:application/pdf[;,]")


def _upload_preview(address: str) -> bytes:
    is_clip = bool(_CLIP.match(address))
    if not is_clip and not _DOCUMENT.match(address):
        raise UserError("only documents and videos need a preview")
    with Decoder() as decode:
        return thumbnail(decode(upload_preview, decode_data_url(address), is_clip), SHOWN_PX)


def _picture(explorer: Explorer, asked: Picture) -> bytes:
    if asked.example is not None:
        if asked.example >= len(explorer.examples):
            raise UserError(f"there is no example {asked.example}")
        return explorer.examples[asked.example].picture
    if asked.source is None or asked.id is None:
        raise UserError("a picture is named by source and id, by example, or given as data")
    return explorer.picture(asked.source, asked.id)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise UserError(f"the file is larger than {MAX_BYTES >> 20} MB")
    return bytes(body)


def _message(error: ValueError) -> str:
    """The message for the page; for an invalid request, it names the fields."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return str(error)
