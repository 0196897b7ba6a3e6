"""Middleware: hosts, API key, size, memory, time limits, disconnected clients, metrics."""

import asyncio
import hmac
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

from asgi_correlation_id import CorrelationIdMiddleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rge.serving.bodies import plain_body
from rge.serving.errors import Refusal, Stopped, error_response
from rge.serving.options import ServeOptions

OPEN = frozenset(("/health", "/metrics", "/openapi.json"))
"""Paths that need no key."""
LINGER_BYTES, LINGER_S = 256 << 20, 5.0
"""How much of a refused body is still read, since a client that is cut off while sending never sees the error."""

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (0, 4, 8, 16, 32, 64, 128, 256, 512)


def guarded(guard: "Guard", options: ServeOptions, key: str | None) -> ASGIApp:
    """The guarded application in other libraries' middleware."""
    app: ASGIApp = guard
    if options.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=options.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["X-Request-ID"],
        )  # fmt: skip
    hosts = list(options.allowed_hosts)
    if not hosts:
        # A web page whose name resolves to this machine (DNS rebinding) has no key.
        hosts = ["*"] if key is not None else ["localhost", options.host]
    return CorrelationIdMiddleware(TrustedHosts(app, hosts), validator=is_request_id)


def is_request_id(text: str) -> bool:
    """Whether a client's X-Request-ID may be written into a log."""
    return len(text) <= 128 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()


class TrustedHosts:
    """ASGI middleware: requests for the server's names, or IP addresses: in DNS rebinding, a browser sends the page's host name."""

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        self._app, self._names = app, [name.lower() for name in names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        app, host = self._app, ""
        with suppress(ValueError):
            host = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname or ""
        if not self._is_trusted(host):
            message = f"requests for the host {host!r} are refused"
            message += f": start the server with allowed_hosts=[{host}]" if host else ""
            app = error_response(Refusal(400, message, "unknown_host"))
        await app(scope, receive, send)

    def _is_trusted(self, host: str) -> bool:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return any(host == name or name[0] == "*" and host.endswith(name[1:]) for name in self._names)
        return True


class Metrics:
    """The metrics of one server, in Prometheus' text format."""

    def __init__(
        self, *, waiting: Callable[[], float], preparing: Callable[[], float], held: Callable[[], float]
    ):
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("rge_requests", "Requests by path and status; 499: the client disconnected", ["path", "code"])  # fmt: skip
        self.seconds = histogram("rge_request_seconds", "From a request's head to its answer", ["path"], buckets=SECONDS)  # fmt: skip
        self.batch_rows = histogram("rge_batch_inputs", "Inputs of a batch", ["mode"], buckets=ROWS)
        self.batch_seconds = histogram("rge_batch_seconds", "The model's time for a batch", ["mode"], buckets=SECONDS)  # fmt: skip
        self.tokens = histogram("rge_rationale_tokens", "Tokens of a rationale", buckets=TOKENS)
        self.forced = counter("rge_rationales_forced", "Rationales that reached the cap")
        for name, about, value in (
            ("rge_waiting_inputs", "Inputs waiting for the model", waiting),
            ("rge_preparing_inputs", "Inputs being decoded and tokenised, or waiting for it", preparing),
            ("rge_held_bytes", "Bodies and pictures of requests in progress", held),
        ):
            Gauge(name, about, registry=self.registry).set_function(value)


class MemoryBudget:
    """Memory budget for requests in progress, in bytes; used by the event loop and the threads that decode pictures."""

    def __init__(self, limit: int):
        self.limit, self.now = limit, 0
        self._lock = threading.Lock()

    def take(self, count: int, *, has: int = 0) -> None:
        """Take memory from the budget, until `give`, for work that has taken `has` bytes before.

        Raises:
            Refusal: the budget is used up (503), or too small for this work alone (413).
        """
        if has + count > self.limit:
            message = f"{(has + count) / (1 << 20):.0f} MB of memory are needed, but max_waiting_mb={self.limit >> 20}"
            raise Refusal(413, f"{message}; send fewer or smaller pictures", "too_large")
        with self._lock:
            if self.now + count > self.limit:
                message = "the server is at its memory limit (max_waiting_mb); try again"
                raise Refusal(503, message, "overloaded", retry_after_s=2)
            self.now += count

    def give(self, count: int) -> None:
        """Return memory to the budget."""
        with self._lock:
            self.now -= count

    @contextmanager
    def loan(self) -> Iterator["Loan"]:
        """What is taken through it, and not given back, is returned at its end."""
        loan = Loan(self)
        try:
            yield loan
        finally:
            loan.give(loan.now)


class Loan:
    """Part of a `MemoryBudget` that one piece of work has taken; made by `MemoryBudget.loan`."""

    def __init__(self, budget: MemoryBudget):
        self._budget, self.now = budget, 0

    def take(self, count: int) -> None:
        """See `MemoryBudget.take`."""
        self._budget.take(count, has=self.now)
        self.now += count

    def give(self, count: int) -> None:
        """Return a part early."""
        self._budget.give(count)
        self.now -= count


class Guard:
    """ASGI middleware: the application gets whole bodies, and is cancelled when its client disconnects."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        *,
        key: str | None,
        paths: Sequence[str],
        held: MemoryBudget,
        metrics: Metrics,
    ):
        self._app, self._options, self._paths = app, options, frozenset(paths)
        self._key = None if key is None else key.encode()
        self._held, self._metrics = held, metrics
        self._limits: set[asyncio.Timeout] = set()
        self.is_draining = self.has_given_up = False
        """Whether new requests are refused, and whether those in progress are."""

    def give_up(self) -> int:
        """Answer all requests without an answer with 503, also those whose batch is running; returns their number."""
        self.has_given_up = True
        open_limits = [limit for limit in self._limits if not limit.expired()]
        for limit in open_limits:
            limit.reschedule(0)
        return len(open_limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return
        scope = dict(scope) | {
            "path": scope["path"].rstrip("/") or "/"
        }  # many clients do not follow redirects
        began, code = time.monotonic(), 0

        async def send_noting_code(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                self._limits.discard(time_limit)  # sent whole, whatever `give_up` ends
            await send(message)

        body = _Body(receive)
        try:
            async with asyncio.timeout(self._options.timeout_s) as time_limit:
                self._limits.add(time_limit)
                try:
                    with self._held.loan() as loan:
                        await self._admit(scope, Headers(scope=scope), body, loan)
                        await self._run(scope, body, receive, send_noting_code)
                finally:
                    self._limits.discard(time_limit)
        except _Gone:
            pass
        except Refusal as refusal:
            await error_response(refusal, close=self.is_draining)(scope, receive, send_noting_code)
        except TimeoutError:
            if code:
                raise
            limit = f"timeout_s={self._options.timeout_s:g}"
            late = Refusal(408, f"the body did not arrive within {limit}", "timeout")
            if self.has_given_up:
                late = Stopped()
            elif body.is_complete:
                late = Refusal(504, f"no answer within {limit}", "timeout", retry_after_s=1)
            await error_response(late)(scope, receive, send_noting_code)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(code or 499)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - began)

    async def _admit(self, scope: Scope, headers: Mapping[str, str], body: "_Body", loan: Loan) -> None:
        """Read and inflate the body, unless the request is refused."""
        limit = self._options.max_body_mb << 20
        too_large = Refusal(413, f"the body is larger than {limit >> 20} MB (max_body_mb)", "body_too_large")
        content_length = headers.get("content-length", "")
        try:
            if self.is_draining:
                raise Stopped
            if scope["path"] not in OPEN and not self._has_key(headers):
                message = "no key, or a wrong one: send Authorization: Bearer KEY"
                raise Refusal(401, message, "invalid_api_key")
            if content_length.isdigit() and int(content_length) > limit:
                raise too_large
            while not body.is_complete:
                part = await body.part()
                if len(body.data) + len(part) > limit:
                    raise too_large
                loan.take(len(part))
                body.data += part
            if (content := await plain_body(body.data, headers, limit)) is not None:
                loan.take(len(content))
                loan.give(len(body.data))
                body.data = content
        except Refusal:
            # With this header the client sends nothing before we reply.
            if headers.get("expect", "").lower() != "100-continue":
                await _discard(body)
            raise

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        if self._key is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)

    async def _run(self, scope: Scope, body: "_Body", receive: Receive, send: Send) -> None:
        is_read = False

        async def receive_body() -> Message:
            nonlocal is_read
            if is_read:  # a second call waits until the client disconnects
                await asyncio.Future()
            is_read = True
            content, body.data = bytes(body.data), b""  # the application drops it once it is read
            return {"type": "http.request", "body": content, "more_body": False}

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        application = asyncio.ensure_future(self._app(scope, receive_body, send))
        tasks = application, asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not application.done():
                raise _Gone
            application.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Gone(Exception):
    """The client disconnected."""


class _Body:
    """A request's body as it arrives."""

    def __init__(self, receive: Receive):
        self._receive, self.is_complete = receive, False
        self.data: bytes | bytearray = bytearray()

    async def part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        self.is_complete = not message.get("more_body")
        return message.get("body", b"")


async def _discard(body: _Body) -> None:
    remaining = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while not body.is_complete and remaining > 0:
                remaining -= len(await body.part())
