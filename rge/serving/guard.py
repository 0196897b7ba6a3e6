"""What stands before every route: key, body, memory, time, and clients that go away."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from rge.serving.errors import Refusal, answer_of
from rge.serving.metrics import Metrics
from rge.serving.options import ServeOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER_BYTES, LINGER_S = 256 << 20, 5.0
"""What is still read of a body that is refused: a client that is cut off while it sends never reads why."""


class Held:
    """Bytes held for requests under way, of which there are so many at most."""

    def __init__(self, most: int):
        self.most, self.now = most, 0

    def take(self, count: int) -> None:
        """Hold more; who takes gives back by lowering `now`.

        Raises:
            Refusal: that would be too many.
        """
        if self.now + count > self.most:
            raise Refusal(
                503,
                "the server holds as much for other requests as it may; try again",
                "overloaded",
                retry_after_s=2,
            )
        self.now += count


class Guard:
    """An ASGI application around another one, which gets whole bodies and is cancelled where nobody waits any longer.

    Args:
        app: what answers.
        options: with the limits.
        key: that requests below /v1 must carry; None: none.
        paths: those that are counted by name.
        held: bytes held for requests.
        metrics: count requests.

    Attributes:
        is_draining: whether new requests are refused.
    """

    def __init__(
        self,
        app: App,
        options: ServeOptions,
        *,
        key: str | None,
        paths: Sequence[str],
        held: Held,
        metrics: Metrics,
    ):
        self._app, self._options, self._paths = app, options, frozenset(paths)
        self._key = None if key is None else _digest(key.encode())
        self._held, self._metrics = held, metrics
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        began, code = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            refusal = await self._pass(scope, receive, watched, lambda: code > 0)
            if refusal is not None:
                await answer_of(refusal, close=self.is_draining)(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(code or 499)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - began)

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, has_begun: Callable[[], bool]
    ) -> Refusal | None:
        """Let a request through; what is to be answered instead, if anything."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        body, parts = bytearray(), _Parts(receive)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                try:
                    self._admit(scope, headers)
                    async for part in parts:
                        if len(body) + len(part) > self._options.max_body_mb << 20:
                            raise self._too_large()
                        self._held.take(len(part))
                        body += part
                except Refusal as refusal:
                    if (
                        headers.get(b"expect", b"").lower() != b"100-continue"
                    ):  # else nothing is sent before we ask
                        await _linger(parts)
                    return refusal
                await self._run(scope, bytes(body), receive, send)
        except _Gone:
            pass
        except TimeoutError:
            if has_begun():
                raise
            shown = f"timeout_s={self._options.timeout_s:g}"
            if parts.is_over:
                return Refusal(504, f"no answer within {shown}", "timeout", retry_after_s=1)
            return Refusal(408, f"the body did not arrive within {shown}", "timeout")
        finally:
            self._held.now -= len(body)
        return None

    def _admit(self, scope: Scope, headers: MutableMapping[bytes, bytes]) -> None:
        if self.is_draining:
            raise Refusal(503, "the server is shutting down", "shutting_down", retry_after_s=5)
        if self._key is not None and scope["path"].startswith("/v1"):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            # Of equal length and compared to the end, so that the time taken says nothing of the key.
            if not hmac.compare_digest(_digest(given.strip()), self._key) or kind.lower() != b"bearer":
                raise Refusal(
                    401, "no key, or a wrong one: send Authorization: Bearer KEY", "invalid_api_key"
                )
        said = headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > self._options.max_body_mb << 20:
            raise self._too_large()

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"the body is larger than {self._options.max_body_mb} MB (max_body_mb)", "body_too_large"
        )

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        is_read = False

        async def whole() -> Message:
            nonlocal is_read
            if is_read:  # whoever asks again wants to know when the client goes
                await asyncio.Future()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        work = asyncio.ensure_future(self._app(scope, whole, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                raise _Gone
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class _Gone(Exception):
    """The client went away."""


class _Parts:
    """The parts of a body, as they come.

    Attributes:
        is_over: whether the last one is there.
    """

    def __init__(self, receive: Receive):
        self._receive, self.is_over = receive, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self.is_over:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            self.is_over = not message.get("more_body")
            yield message.get("body", b"")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _linger(parts: _Parts) -> None:
    """Read on for a while, and throw it away."""
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_S):
            async for part in parts:
                left -= len(part)
                if left < 0:
                    return
    except TimeoutError:
        pass


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
