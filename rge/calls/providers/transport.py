"""HTTP connections to a provider, the classes of its errors, and what its headers say.

Plain HTTP, for the providers' own clients would be used for nothing but the address and the header of the key: retries,
limits, types and time-outs of theirs are what `rge.calls` does itself, and answers are kept byte for byte.
"""

import functools
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

import rge
from rge.calls.failures import (
    AccountRejected,
    EndpointDown,
    KeyRejected,
    Lost,
    NotThere,
    Rejected,
    StopCalls,
)
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import OPENAI, PATH, Shown, body, headers
from rge.calls.providers.errors import KEY_CODES, Meaning, codes, error_of, meaning
from rge.calls.replies import ReplyError, as_dict, dicts, parse
from rge.calls.request import Request
from rge.common.errors import UserError

POOL = 16
"""Connections that one client keeps: it looks through all of them for every call."""
MAYBE_BILLED = (408, 504)
"""A proxy on the way gave up waiting; the model may have answered."""
LIST_TIMEOUT_S = 20.0
"""For a server's list of models."""
VARYING = ("created", "permission")
"""Fields of that list which vLLM makes up for every reply."""
SHOWN_CHARACTERS = 300
"""Of a server's words in a message."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent back: the body byte for byte, and the headers."""

    body: bytes
    headers: Mapping[str, str]


Send = Callable[[Request, Shown], Awaitable[Answer]]
"""Sends a request and returns the answer; raises `Lost`, `Rejected` or `StopCalls`."""


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
        content = encoded(body(self.model, request, shown))
        response = await exchange(client, "POST", PATH, self.mask, content=content)
        found = Answer(response.content, response.headers)
        if not response.is_success or _is_error(found.body):
            error = failure(response.status_code, found.body, found.headers, self.model, self.mask)
            if error is not None:
                raise error
        return found


def connected(model: ModelConfig, **how: Any) -> httpx.AsyncClient:
    """A client of an endpoint, with its key."""
    key = read_key(model.name, model.key_env) if model.key_env else None
    return httpx.AsyncClient(base_url=model.base_url or OPENAI, headers=headers(key), **how)


def encoded(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value).encode()


async def exchange(
    client: httpx.AsyncClient, method: str, url: str, mask: Mask, **how: Any
) -> httpx.Response:
    """One exchange with a provider, whatever the status of its response.

    Raises:
        Lost: there is none.
    """
    if "content" in how:
        how["headers"] = {"content-type": "application/json"}
    try:
        return await client.request(method, url, **how)
    except httpx.RequestError as error:
        said = str(error) or type(error).__name__
        raise Lost(mask(f"no connection: {said}"), billed=not isinstance(error, NOT_SENT)) from None


def failure(
    status: int, raw: bytes, given: Mapping[str, str], model: ModelConfig, mask: Mask
) -> Lost | Rejected | StopCalls | None:
    """What an error's status and body mean; None: it is an answer, by which the provider's policy declines."""
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
        return None
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


def _retry_delay(content: Any) -> float | None:
    # Gemini's, which has no header for it.
    delays = [one["retryDelay"] for one in dicts(error_of(content).get("details")) if "retryDelay" in one]
    return seconds(str(delays[0])) if delays else None


def remaining(given: Mapping[str, str], kind: str) -> tuple[int | None, float | None]:
    """What is left of an allowance, and in how many seconds it is whole again; None where headers do not say.

    Args:
        given: headers of an answer, such as ``x-ratelimit-remaining-requests: 0`` and ``x-ratelimit-reset-requests: 6m0s``.
        kind: requests or tokens.
    """
    left = given.get(f"x-ratelimit-remaining-{kind}", "")
    return (int(left) if left.isdigit() else None), seconds(given.get(f"x-ratelimit-reset-{kind}"))


def seconds(text: str | None) -> float | None:
    """Seconds of a header: "1.5", "6m0s", "20ms", or a time (of HTTP or ISO 8601); None where it is none of them."""
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?(ms|h|m|s))+", text):
        units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
        return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text))
    try:
        at = parsedate_to_datetime(text) if "," in text else datetime.fromisoformat(text)
    except ValueError:
        return None
    return max((at - datetime.now(UTC)).total_seconds(), 0.0) if at.tzinfo else None


def served_as(model: ModelConfig) -> dict[str, Any]:
    """Address and name of a model, what the server itself lists under that name, and our version.

    Returns:
        ``served`` is None where the server lists no such model or has no list of models.

    Raises:
        UserError: the server cannot be reached.
    """
    address = model.base_url or OPENAI
    key = read_key(model.name, model.key_env) if model.key_env else None
    try:
        response = httpx.get(f"{address.rstrip('/')}/models", headers=headers(key), timeout=LIST_TIMEOUT_S)
    except httpx.HTTPError as error:
        said = Mask([key] if key else [])(str(error) or type(error).__name__)
        raise UserError(f"{model.name} at {address} cannot be asked which model it serves: {said}") from None
    try:
        entries = dicts(as_dict(response.json()).get("data")) if response.is_success else []
    except ValueError:
        entries = []
    entry = next((one for one in entries if one.get("id") == model.name), None)
    served = entry and {name: value for name, value in entry.items() if name not in VARYING}
    return {"at": address, "served": served, "rge": rge.__version__}
