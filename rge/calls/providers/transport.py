"""HTTP connections to a provider, its rate-limit headers and its list of models.

Plain HTTP rather than the providers' clients: `rge.calls` has its own retries, rate limits and time-outs, and stores responses
byte for byte.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import httpx

import rge
from rge.calls.failures import AttemptFailed
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.pictures import EncodedPictures
from rge.calls.providers.bodies import OPENAI, PATH, body, headers
from rge.calls.providers.errors import failure, parse_seconds
from rge.calls.replies import NotAChat, ReplyError, as_dict, dict_items, is_failure, read_replies
from rge.calls.request import Request
from rge.common.errors import UserError

POOL = 16
"""Connections per client: httpx scans the whole pool for every call."""
LIST_TIMEOUT_S = 20.0
"""Time-out for the list of models."""
VARYING = ("created", "permission")
"""Fields of that list that vLLM regenerates for every request."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class Connection:
    """An HTTP client of one model's endpoint, with its key; ``options`` are those of `httpx.AsyncClient`."""

    def __init__(self, model: ModelConfig, mask: Mask, **options: Any):
        self.model, self.mask = model, mask
        address, known = model.base_url or OPENAI, headers(_key(model))
        self.client = httpx.AsyncClient(base_url=address, headers=known, **options)

    async def chat(self, request: Request, pictures: EncodedPictures) -> httpx.Response:
        """Send a request; the response is an answer, if only an empty one or a policy refusal.

        Raises:
            AttemptFailed, Rejection, StopCalls: it is not.
        """
        response = await self.exchange("POST", PATH, content=to_json(body(self.model, request, pictures)))
        if not response.is_success or _is_failure(response.content):
            error = failure(response.status_code, response.content, response.headers, self.model, self.mask)
            if error is not None:
                raise error
        check_chat(response.content)
        return response

    async def exchange(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Send any request and return the response, whatever its status.

        Raises:
            AttemptFailed: no response.
        """
        if "content" in options:
            options["headers"] = {"content-type": "application/json"}
        try:
            return await self.client.request(method, url, **options)
        except httpx.RequestError as error:
            message = self.mask(str(error) or type(error).__name__)
            raise AttemptFailed(f"no connection: {message}", billed=not isinstance(error, NOT_SENT)) from None


def connections(model: ModelConfig, mask: Mask) -> list[Connection]:
    """One connection per `POOL` concurrent calls."""
    limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
    # No time-outs here: the caller limits each attempt as a whole.
    options = {"limits": limits, "timeout": None, "verify": httpx.create_ssl_context()}
    return [Connection(model, mask, **options) for _ in range(-(-model.concurrency // POOL))]


def check_chat(raw: bytes) -> None:
    """Raise `AttemptFailed` if a body is not a chat completion. An empty answer is one: it may have been billed."""
    try:
        read_replies(raw)
    except NotAChat as error:
        message = f"the endpoint's response is not a chat completion: {error}"
        raise AttemptFailed(message, billed=True) from None
    except ReplyError:
        pass


def to_json(value: Any) -> bytes:
    """Serialise a request body."""
    return json.dumps(value).encode()


def _key(model: ModelConfig) -> str | None:
    return read_key(model.name, model.key_env) if model.key_env else None


def _is_failure(raw: bytes) -> bool:
    try:
        return is_failure(json.loads(raw))
    except (ValueError, RecursionError):
        return False  # not a chat completion, which the caller finds out


def remaining_quota(
    response_headers: Mapping[str, str], kind: Literal["requests", "tokens"]
) -> tuple[int | None, float | None]:
    """Remaining quota, and seconds until it resets; None if not reported.

    Read from headers such as ``x-ratelimit-remaining-requests: 0`` and ``x-ratelimit-reset-requests: 6m0s``.
    """
    remaining = response_headers.get(f"x-ratelimit-remaining-{kind}", "")
    reset_s = parse_seconds(response_headers.get(f"x-ratelimit-reset-{kind}"))
    return (int(remaining) if remaining.isdigit() else None), reset_s


def served_model(model: ModelConfig) -> dict[str, Any]:
    """Describe a served model: its address, its entry in the server's list of models (``served``, or None), our version.

    Raises:
        UserError: the server cannot be reached.
    """
    address = model.base_url or OPENAI
    key = _key(model)
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
