"""Bodies of requests and answers. Large ones are read and written beside the event loop, which they would stop for all clients."""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from rge.serving.errors import Refusal

SMALL = 64 << 10
"""Bytes that the event loop reads or writes itself, since a thread would take longer."""
VALUES_PER_INPUT, OTHER_VALUES = 32, 1024
"""Values of JSON that a request may have; a message with a text and a picture has some 20."""
_BLOCK = 1 << 18


class Bodies:
    """Reads and writes JSON, in threads if it is large; `stop` ends them.

    A body with more values than `max_inputs` inputs need is refused by their number, before any becomes an object.
    """

    def __init__(self, max_inputs: int):
        self._max_inputs, self._max_values = max_inputs, VALUES_PER_INPUT * max_inputs + OTHER_VALUES
        self._threads = ThreadPoolExecutor(2, "rge-json")

    async def read(self, body: bytes) -> Any:
        """The content of a body; `Refusal`: it is no JSON, or has too many values."""
        if len(body) <= SMALL:
            return self._parsed(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._parsed, body)

    async def answer(self, content: Any, size: int) -> Response:
        """An answer of about `size` bytes. Arrays are written row by row: their numbers as objects would take ten times the memory."""
        if size <= SMALL:
            return _response(content)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _response, content)

    def stop(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _parsed(self, body: bytes) -> Any:
        if len(body) > self._max_values and (count := num_values(body)) > self._max_values:
            message = (
                f"the body has more than {count:,} values, and a request with max_inputs={self._max_inputs} at most "
                f"{self._max_values:,}: send fewer inputs, as texts, not as ids of tokens"
            )
            raise Refusal(400, message, "too_many_values")
        try:
            return json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or str(error)
            raise Refusal(400, f"the body is not valid JSON: {reason}", "invalid_json") from None


def num_values(body: bytes) -> int:
    """About the number of values of a JSON text, without making objects: commas and opening brackets outside of its strings."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(
            rb"\"", b""
        )  # now each quotation mark begins or ends a string
    codes, inside, count = np.frombuffer(body, np.uint8), np.uint8(0), 0
    for start in range(0, len(codes), _BLOCK):
        block = codes[start : start + _BLOCK]
        in_string = np.bitwise_xor.accumulate((block == ord('"')).view(np.uint8)) ^ inside
        inside = in_string[-1]
        marks = (block == ord(",")) | (block == ord("[")) | (block == ord("{"))
        count += int(np.count_nonzero(marks & (in_string == 0)))
    return count


def _response(content: Any) -> Response:
    # In the function, other threads get their turn; the encoder itself gives them none.
    options: Any = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    text = json.dumps(content, default=lambda array: array.tolist(), **options)
    return Response(text.encode(), media_type="application/json")


class JsonRoute(APIRoute):
    """A route whose requests' JSON is read by the application's `Bodies`, ``app.state.bodies``."""

    def get_route_handler(self) -> Any:
        """See FastAPI."""
        handle = super().get_route_handler()

        async def read_beside(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_beside


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        self._body = b""  # its values need as much memory again
        return await self.app.state.bodies.read(body)


async def plain_body(data: bytes | bytearray, headers: Mapping[str, str], limit: int) -> bytes | None:
    """The content of a compressed body, inflated beside the event loop; None: it is not compressed.

    Raises:
        Refusal: an unknown or damaged encoding, or more than `limit` bytes.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding != "gzip":
        raise Refusal(415, f"Content-Encoding {encoding!r}: send gzip, or no encoding", "unknown_encoding")
    content = await asyncio.to_thread(_inflated, data, limit)
    if len(content) > limit:
        raise Refusal(
            413, f"the inflated body is larger than {limit >> 20} MB (max_body_mb)", "body_too_large"
        )
    return content


def _inflated(data: bytes | bytearray, limit: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(400, f"the body is not valid gzip: {error}", "invalid_gzip") from None
