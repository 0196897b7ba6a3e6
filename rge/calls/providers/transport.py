"""Connections to a provider, and how its errors fall into classes.

Plain HTTP, for the providers' own clients would be used for nothing but the address and the header of the key: retries,
limits, types and time-outs of theirs are what `rge.calls` does itself, and answers are kept byte for byte.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rge.calls.failures import BudgetReached, EndpointDown, KeyRejected, Lost, Rejected
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.pace import seconds
from rge.calls.providers.bodies import ADDRESSES, Shown, body, headers, path
from rge.calls.replies import ReplyError, parse, policy_refusal
from rge.calls.request import Request

POOL = 16
"""Connections that one client keeps: it looks through all of them for every call."""
TRANSIENT = (408, 409, 425)
MAYBE_BILLED = (408, 504)
"""Somebody on the way gave up waiting; the model may have answered."""
SHOWN_CHARACTERS = 300
"""Of a server's words in a message."""
ABOUT_INPUT = (
    "image",
    "picture",
    "context length",
    "context_length",
    "maximum context",
    "too long",
    "too large",
)
"""Words of an error that is about what is asked in this one call, and not about how all of them are asked."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent back: the body byte for byte, and the headers."""

    body: bytes
    headers: Mapping[str, str]


Send = Callable[[Request, Shown], Awaitable[Answer]]
"""Sends a request and returns the answer.

Raises:
    Lost, Rejected, StopCalls: see `rge.calls.failures`.
"""


class Connections:
    """Connections to one endpoint, as an asynchronous context manager: what sends, for the workers to share out.

    Args:
        model: the endpoint.
        num_workers: how many will send at once; each `POOL` of them get a client of their own.
        mask: takes keys out of what is shown.
    """

    def __init__(self, model: ModelConfig, num_workers: int, mask: Mask):
        self.model, self.num, self.mask = model, -(-num_workers // POOL), mask
        self.clients: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> list[Send]:
        model = self.model
        key = read_key(model.name, model.key_env) if model.key_env else None
        limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
        certificates = httpx.create_ssl_context()
        for _ in range(self.num):
            self.clients.append(
                httpx.AsyncClient(
                    base_url=model.base_url or ADDRESSES[model.api],
                    headers=headers(model.api, key),
                    limits=limits,
                    # An attempt is limited as a whole, by the caller; limits of its parts would end it under another name.
                    timeout=None,
                    verify=certificates,
                )
            )
        return [functools.partial(self._send, client) for client in self.clients]

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.aclose()

    async def _send(self, client: httpx.AsyncClient, request: Request, shown: Shown) -> Answer:
        model = self.model
        response = await fetch(
            client, "POST", path(model), model, self.mask, content=encoded(body(model, request, shown))
        )
        return Answer(response.content, response.headers)


def encoded(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value).encode()


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, model: ModelConfig, mask: Mask, **how: Any
) -> httpx.Response:
    """One exchange with a provider.

    Args:
        client: of the endpoint.
        method: of HTTP.
        url: a path after the base address, or an address.
        model: for messages.
        mask: takes keys out of them.
        how: further arguments of `httpx.AsyncClient.request`.

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
    """What an error's status and body mean.

    Args:
        status: of HTTP.
        raw: the body.
        given: headers.
        model: for messages.
        mask: takes keys out of them.
    """
    shown = mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
    said, name = f"HTTP {status}: {shown}", model.name
    try:
        content = parse(raw)
    except ReplyError:
        content = None
    if 400 <= status < 500 and policy_refusal(content) is not None:
        return PolicyAnswer(Answer(raw, given))
    # Gemini says of a wrong key that an argument is invalid.
    if status in (401, 403) or (status == 400 and "API_KEY_INVALID" in shown):
        where = model.key_env or "none: key_env is not set"
        return KeyRejected(f"{name}: the endpoint rejects the key (from {where}); {said}")
    if status < 400:
        # Not followed: the key is for the address that was configured.
        return EndpointDown(
            f"{name}: the address has moved to {mask(str(given.get('location')))}: set base_url"
        )
    if status == 404:
        return EndpointDown(f"{name}: no such model or address; {said}")
    if "insufficient_quota" in shown:
        return BudgetReached(f"{name}: the provider's quota is used up; {said}")
    wait_s = seconds(given.get("retry-after")) or _retry_delay(content)
    if status == 429:
        return Lost(said, limited=True, wait_s=wait_s, raw=raw)
    if status in TRANSIENT or status >= 500:
        return Lost(said, wait_s=wait_s, billed=status in MAYBE_BILLED, raw=raw)
    about_input = any(word in shown.lower() for word in ABOUT_INPUT)
    return Rejected(said, about_input=about_input, raw=raw)


class PolicyAnswer(Exception):
    """A status of failure whose body is an answer: the provider's policy declines."""

    def __init__(self, answer: Answer):
        super().__init__("declined by the provider's policy")
        self.answer = answer


def _retry_delay(content: Any) -> float | None:
    # Gemini's, which has no header for it.
    error = content.get("error") if isinstance(content, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for one in details if isinstance(details, list) else ():
        if isinstance(one, dict) and isinstance(one.get("retryDelay"), str):
            return seconds(one["retryDelay"])
    return None
