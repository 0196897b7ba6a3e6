"""HTTP connections to a provider, its errors and its rate-limit headers.

Plain HTTP rather than the providers' clients: `rge.calls` has its own retries, rate limits and time-outs, and stores responses
byte for byte.
"""

import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

import rge
from rge.calls.failures import (
    AccountRejected,
    AttemptFailed,
    EndpointDown,
    KeyRejected,
    NotFound,
    Rejected,
    StopCalls,
)
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import OPENAI, PATH, EncodedPictures, body, headers
from rge.calls.providers.errors import KEY_CODES, Meaning, classify, codes, error_of
from rge.calls.replies import ReplyError, as_dict, dict_items, is_failure, parse
from rge.calls.request import Request
from rge.common.errors import UserError

POOL = 16
"""Connections per client: httpx scans the whole pool for every call."""
MAYBE_BILLED = (200, 408, 504)
"""Statuses of failures that the model may have written to: it was broken off, or a proxy timed out."""
LIST_TIMEOUT_S = 20.0
"""Time-out for the list of models."""
VARYING = ("created", "permission")
"""Fields of that list that vLLM regenerates for every request."""
SHOWN_CHARACTERS = 300
"""Of a response body quoted in a message."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


Send = Callable[[Request, EncodedPictures], Awaitable[httpx.Response]]
"""Sends a request and returns the response; raises `AttemptFailed`, `Rejected` or `StopCalls`."""


@asynccontextmanager
async def connections(model: ModelConfig, num_workers: int, mask: Mask) -> AsyncIterator[list[Send]]:
    """Connections to one endpoint: a client, and so a function that sends, per `POOL` workers."""
    limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
    # No time-outs here: the caller limits each attempt as a whole.
    options = {"limits": limits, "timeout": None, "verify": httpx.create_ssl_context()}
    clients = [make_client(model, **options) for _ in range(-(-num_workers // POOL))]
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
        yield [functools.partial(_send, client, model, mask) for client in clients]


async def _send(
    client: httpx.AsyncClient, model: ModelConfig, mask: Mask, request: Request, pictures: EncodedPictures
) -> httpx.Response:
    response = await exchange(client, "POST", PATH, mask, content=to_json(body(model, request, pictures)))
    if not response.is_success or _is_failure(response.content):
        error = failure(response.status_code, response.content, response.headers, model, mask)
        if error is not None:
            raise error
    return response


def make_client(model: ModelConfig, **options: Any) -> httpx.AsyncClient:
    """Create a client of an endpoint, with its key."""
    key = read_key(model.name, model.key_env) if model.key_env else None
    return httpx.AsyncClient(base_url=model.base_url or OPENAI, headers=headers(key), **options)


def to_json(value: Any) -> bytes:
    """Serialise a request body."""
    return json.dumps(value).encode()


async def exchange(
    client: httpx.AsyncClient, method: str, url: str, mask: Mask, **options: Any
) -> httpx.Response:
    """Send a request and return the response, whatever its status.

    Raises:
        AttemptFailed: no response.
    """
    if "content" in options:
        options["headers"] = {"content-type": "application/json"}
    try:
        return await client.request(method, url, **options)
    except httpx.RequestError as error:
        message = str(error) or type(error).__name__
        raise AttemptFailed(
            mask(f"no connection: {message}"), billed=not isinstance(error, NOT_SENT)
        ) from None


def failure(
    status: int, raw: bytes, response_headers: Mapping[str, str], model: ModelConfig, mask: Mask
) -> AttemptFailed | Rejected | StopCalls | None:
    """The exception for an error response; None: a policy refusal, which counts as an answer."""
    excerpt = mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
    message = f"HTTP {status}: {excerpt}"
    if 300 <= status < 400:
        # Redirects are not followed, so that the key goes only to the configured address.
        return EndpointDown(
            f"{model.name}: the address has moved to {mask(str(response_headers.get('location')))}: set base_url"
        )
    try:
        content = parse(raw)
    except ReplyError:
        content = None
    meaning = classify(status, content)
    if meaning is Meaning.POLICY:
        return None
    if meaning is Meaning.ACCOUNT:
        return _account_error(status, codes(content), message, model)
    if meaning is Meaning.OVERLOAD:
        wait_s = parse_seconds(response_headers.get("retry-after")) or _retry_delay(content)
        return AttemptFailed(
            message, limited=status == 429, wait_s=wait_s, billed=status in MAYBE_BILLED, raw=raw
        )
    return Rejected(message, certain=meaning is Meaning.REQUEST, raw=raw)


def _account_error(status: int, error_codes: set[str], message: str, model: ModelConfig) -> AccountRejected:
    name = model.name
    if error_codes & KEY_CODES or status == 401:
        source = model.key_env or "none: key_env is not set"
        return KeyRejected(f"{name}: the endpoint rejects the key (from {source}); {message}")
    if status == 404:
        return NotFound(f"{name}: no such model or address; {message}")
    if status == 403:
        return KeyRejected(
            f"{name}: the endpoint rejects the key (from {model.key_env}), or the key has no access to this model; {message}"
        )
    return AccountRejected(
        f"{name}: the account has no credit or quota left, or no access to this model; {message}. Calls stop here: fix this with "
        "the provider and run the same command again"
    )


def _is_failure(raw: bytes) -> bool:
    try:
        return is_failure(json.loads(raw))
    except (ValueError, RecursionError):
        return False  # not a chat completion, which the caller finds out


def _retry_delay(content: Any) -> float | None:
    # Gemini reports it in the body instead of a header.
    details = dict_items(error_of(content).get("details"))
    delays = [detail["retryDelay"] for detail in details if "retryDelay" in detail]
    return parse_seconds(str(delays[0])) if delays else None


def remaining_quota(
    response_headers: Mapping[str, str], kind: Literal["requests", "tokens"]
) -> tuple[int | None, float | None]:
    """Remaining quota, and seconds until it resets; None if not reported.

    Read from headers such as ``x-ratelimit-remaining-requests: 0`` and ``x-ratelimit-reset-requests: 6m0s``.
    """
    remaining = response_headers.get(f"x-ratelimit-remaining-{kind}", "")
    reset_s = parse_seconds(response_headers.get(f"x-ratelimit-reset-{kind}"))
    return (int(remaining) if remaining.isdigit() else None), reset_s


def parse_seconds(text: str | None) -> float | None:
    """Parse a header into seconds: "1.5", "6m0s", "20ms", an HTTP date or an ISO 8601 time; None if invalid."""
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


def served_model(model: ModelConfig) -> dict[str, Any]:
    """Describe a served model: its address, its entry in the server's list of models (``served``, or None), our version.

    Raises:
        UserError: the server cannot be reached.
    """
    address = model.base_url or OPENAI
    key = read_key(model.name, model.key_env) if model.key_env else None
    try:
        response = httpx.get(f"{address.rstrip('/')}/models", headers=headers(key), timeout=LIST_TIMEOUT_S)
    except httpx.HTTPError as error:
        message = Mask([key] if key else [])(str(error) or type(error).__name__)
        raise UserError(f"{model.name}: cannot list the models at {address}: {message}") from None
    return {"at": address, "served": _listed(response, model.name), "rge": rge.__version__}


def _listed(response: httpx.Response, name: str) -> dict[str, Any] | None:
    try:
        entries = dict_items(as_dict(response.json()).get("data")) if response.is_success else []
    except ValueError:
        return None
    entry = next((entry for entry in entries if entry.get("id") == name), None)
    return entry and {key: value for key, value in entry.items() if key not in VARYING}
