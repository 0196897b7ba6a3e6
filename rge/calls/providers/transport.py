"""HTTP connections to a provider: request bodies, and the list of models.

Plain HTTP rather than the providers' clients: `rge.calls` has its own retries, rate limits and time-outs, and stores responses
byte for byte.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

import rge
from rge.calls.failures import AttemptFailed
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.pictures import EncodedPictures
from rge.calls.providers.errors import failure
from rge.calls.replies import (
    NotAChat,
    ReplyError,
    as_dict,
    dict_items,
    is_failure,
    parse,
    read_replies,
    valid_unicode,
)
from rge.calls.request import Part, Picture, Request
from rge.common.errors import UserError

OPENAI = "https://api.openai.com/v1"
PATH = "/chat/completions"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."
LIST_TIMEOUT_S = 20.0
"""Time-out for the list of models."""
VARYING = ("created", "permission")
"""Fields of that list that vLLM regenerates for every request."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)

Json = dict[str, Any]


class Connection:
    """An HTTP client of one model's endpoint, with its key."""

    def __init__(self, model: ModelConfig, mask: Mask):
        self.model, self.mask = model, mask
        limits = httpx.Limits(max_connections=model.concurrency, max_keepalive_connections=model.concurrency)
        # No time-outs of its own: `send` limits each request as a whole.
        self.client = httpx.AsyncClient(
            base_url=model.base_url or OPENAI, headers=_headers(model), limits=limits, timeout=None
        )

    async def chat(self, request: Request, pictures: EncodedPictures) -> bytes:
        """Send a request and return its answer, which may be a refusal; raises `AttemptFailed`, `Rejection` or `StopCalls`."""
        model = self.model
        response = await self.send("POST", PATH, model.timeout_s, json=body(model, request, pictures))
        return self.answer(response.status_code, response.content, response.headers)

    async def send(self, method: str, path: str, limit_s: float, **options: Any) -> httpx.Response:
        """Send any request and return the response, whatever its status; raises `AttemptFailed`: none within ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.client.request(method, path, **options)
        except TimeoutError:
            raise AttemptFailed(f"no answer within {limit_s:g} s", billed=True) from None
        except httpx.RequestError as lost:
            message = self.mask(str(lost) or type(lost).__name__)
            raise AttemptFailed(f"no connection: {message}", billed=not isinstance(lost, NOT_SENT)) from None

    def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> bytes:
        """The content of a response if it answers a request; raises as `chat` does."""
        if not 200 <= status < 300 or is_failure(parse(content)):
            error = failure(status, content, headers, self.model, self.mask)
            if error is not None:
                raise error
        try:
            read_replies(content)
        except NotAChat as error:
            message = f"the endpoint's response is not a chat completion: {error}"
            raise AttemptFailed(message, billed=True) from None
        except ReplyError:
            pass  # an empty answer, for example: it may have been billed
        return content


def _headers(model: ModelConfig) -> dict[str, str]:
    key = model.key()
    return {"user-agent": "rge"} | ({} if key is None else {"authorization": f"Bearer {key}"})


def body(model: ModelConfig, request: Request, pictures: EncodedPictures) -> Json:
    """The JSON body of a request."""
    parts = [_part(part, pictures) for part in request.parts]
    schema = None
    if model.structured and request.fields is not None:
        parts.append(_part(BY_SCHEMA, pictures))
        form = {"name": "answer", "strict": True, "schema": json_schema(request.fields)}
        schema = {"type": "json_schema", "json_schema": form}
    system = [{"role": "system", "content": valid_unicode(request.system)}] if request.system else []
    optional = {
        "temperature": request.temperature if model.send_temperature else None,
        "seed": request.sample if model.send_seed else None,
        "n": request.n if request.n > 1 else None,
        "reasoning_effort": model.reasoning_effort,
        "response_format": schema,
    }
    return {
        "model": model.name,
        "messages": [*system, {"role": "user", "content": parts}],
        model.token_limit: request.max_tokens,
        **{name: value for name, value in optional.items() if value is not None},
        **model.extra_body,
    }


def _part(part: Part, pictures: EncodedPictures) -> Json:
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": pictures[part]}}
    return {"type": "text", "text": valid_unicode(part)}


def json_schema(fields: tuple[tuple[str, Any], ...]) -> Json:
    """The JSON schema of an answer."""
    properties: Json = {}
    for name, inside in fields:
        if inside is None:
            properties[name] = {"type": "string"}
        elif all(isinstance(word, str) for word in inside):
            properties[name] = {"type": "string", "enum": list(inside)}
        else:
            properties[name] = json_schema(inside)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def served_model(model: ModelConfig) -> dict[str, Any]:
    """Describe a served model: its address, its entry in the server's list of models (``served``, or None), our version.

    Raises:
        UserError: the server cannot be reached.
    """
    address = model.base_url or OPENAI
    try:
        response = httpx.get(f"{address.rstrip('/')}/models", headers=_headers(model), timeout=LIST_TIMEOUT_S)
    except httpx.HTTPError as error:
        message = Mask([model.key()])(str(error) or type(error).__name__)
        raise UserError(f"{model.name}: cannot list the models at {address}: {message}") from None
    return {"at": address, "served": _listed(response, model.name), "rge": rge.__version__}


def _listed(response: httpx.Response, name: str) -> dict[str, Any] | None:
    try:
        entries = dict_items(as_dict(response.json()).get("data")) if response.is_success else []
    except ValueError:
        return None
    entry = next((entry for entry in entries if entry.get("id") == name), None)
    return entry and {key: value for key, value in entry.items() if key not in VARYING}
