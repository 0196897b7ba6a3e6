"""HTTP connections to a provider, and the classes of its errors.

Plain HTTP, for the providers' own clients would be used for nothing but the address and the header of the key: retries,
limits, types and time-outs of theirs are what `rge.calls` does itself, and answers are kept byte for byte.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rge.calls.failures import AccountRejected, EndpointDown, KeyRejected, Lost, NotThere, Rejected
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import OPENAI, PATH, Shown, body, headers
from rge.calls.providers.errors import KEY_CODES, Meaning, codes, error_of, meaning
from rge.calls.providers.headers import seconds
from rge.calls.replies import ReplyError, parse
from rge.calls.request import Request

POOL = 16
"""Connections that one client keeps: it looks through all of them for every call."""
MAYBE_BILLED = (408, 504)
"""A proxy on the way gave up waiting; the model may have answered."""
SHOWN_CHARACTERS = 300
"""Of a server's words in a message."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent back: the body byte for byte, and the headers."""

    body: bytes
    headers: Mapping[str, str]


Send = Callable[[Request, Shown], Awaitable[Answer]]
"""Sends a request and returns the answer; raises `Lost`, `Rejected`, `StopCalls` or `PolicyAnswer`."""


class Connections:
    """Connections to one endpoint, as a context manager: what sends, a client of its own for each `POOL` workers."""

    def __init__(self, model: ModelConfig, num_workers: int, mask: Mask):
        self.model, self.num, self.mask = model, -(-num_workers // POOL), mask
        self.clients: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> list[Send]:
        limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
        certificates = httpx.create_ssl_context()
        for _ in range(self.num):
            # An attempt is limited as a whole, by the caller; limits of its parts would end it under another name.
            self.clients.append(connected(self.model, limits=limits, timeout=None, verify=certificates))
        return [functools.partial(self._send, client) for client in self.clients]

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.aclose()

    async def _send(self, client: httpx.AsyncClient, request: Request, shown: Shown) -> Answer:
        model = self.model
        content = encoded(body(model, request, shown))
        response = await fetch(client, "POST", PATH, model, self.mask, content=content)
        if _is_error(response.content):
            raise failure(response.status_code, response.content, response.headers, model, self.mask)
        return Answer(response.content, response.headers)


def connected(model: ModelConfig, **how: Any) -> httpx.AsyncClient:
    """A client of an endpoint, with its key."""
    key = read_key(model.name, model.key_env) if model.key_env else None
    return httpx.AsyncClient(base_url=model.base_url or OPENAI, headers=headers(key), **how)


def encoded(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value).encode()


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, model: ModelConfig, mask: Mask, **how: Any
) -> httpx.Response:
    """One exchange with a provider.

    Returns:
        A response without an error's status.

    Raises:
        PolicyAnswer: the provider's policy declines.
        Lost: no connection, 429, 5xx.
        Rejected: this request as it stands.
        StopCalls: no request can succeed.
    """
    if "content" in how:
        how["headers"] = {"content-type": "application/json", **how.get("headers", {})}
    try:
        response = await client.request(method, url, **how)
    except httpx.RequestError as error:
        said = f": {error}" if str(error) else f": {type(error).__name__}"
        raise Lost(mask(f"no connection{said}"), billed=not isinstance(error, NOT_SENT)) from None
    if response.is_success:
        return response
    raise failure(response.status_code, response.content, response.headers, model, mask)


def failure(status: int, raw: bytes, given: Mapping[str, str], model: ModelConfig, mask: Mask) -> Exception:
    """What an error's status and body mean."""
    shown = mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
    said, name = f"HTTP {status}: {shown}", model.name
    if 300 <= status < 400:
        # Not followed: the key is for the address that was configured.
        return EndpointDown(
            f"{name}: the address has moved to {mask(str(given.get('location')))}: set base_url"
        )
    try:
        content = parse(raw)
    except ReplyError:
        content = None
    what = meaning(status, content)
    if what is Meaning.POLICY:
        return PolicyAnswer(Answer(raw, given))
    if what is Meaning.ACCOUNT:
        return _account(status, codes(content), said, model)
    if what is Meaning.OVERLOAD:
        wait_s = seconds(given.get("retry-after")) or _retry_delay(content)
        return Lost(said, limited=status == 429, wait_s=wait_s, billed=status in MAYBE_BILLED, raw=raw)
    return Rejected(said, certain=what is Meaning.REQUEST, raw=raw)


def _account(status: int, named: set[str], said: str, model: ModelConfig) -> AccountRejected:
    name = model.name
    if named & KEY_CODES or status == 401:
        where = model.key_env or "none: key_env is not set"
        return KeyRejected(f"{name}: the endpoint rejects the key (from {where}); {said}")
    if status == 404:
        return NotThere(f"{name}: no such model or address; {said}")
    if status == 403:
        return KeyRejected(
            f"{name}: the endpoint rejects the key (from {model.key_env}), or it may not use this model; {said}"
        )
    return AccountRejected(
        f"{name}: the account has no credit or quota left, or may not use this model; {said}. Nothing more is sent; put that "
        "right with the provider and run the same command again"
    )


def _is_error(raw: bytes) -> bool:
    """Whether a body with status 200 is an error all the same, as some gateways send it."""
    try:
        body = json.loads(raw) if b'"error"' in raw[:200] else None
    except ValueError:
        return False
    return isinstance(body, dict) and bool(error_of(body)) and "choices" not in body


@dataclass
class PolicyAnswer(Exception):
    """A status of failure whose body is an answer: the provider's policy declines."""

    answer: Answer


def _retry_delay(content: Any) -> float | None:
    # Gemini's, which has no header for it.
    details = error_of(content).get("details")
    for one in details if isinstance(details, list) else ():
        if isinstance(one, dict) and isinstance(one.get("retryDelay"), str):
            return seconds(one["retryDelay"])
    return None
