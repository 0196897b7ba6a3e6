"""The providers' own clients, their retries switched off, and how their errors fall into classes."""

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from rge.calls.failures import BudgetReached, EndpointDown, KeyRejected, Lost, Rejected
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.pace import seconds
from rge.calls.replies import ReplyError, parse, policy_refusal
from rge.calls.request import Picture, Request
from rge.common.errors import UserError

POOL = 16
"""Connections that one client of the provider's library keeps: it looks through all of them for every call."""
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent back: the body byte for byte, and the headers."""

    body: bytes
    headers: Mapping[str, str]


Shown = Mapping[Picture, tuple[str, str]]
"""Media type and base64 of each picture of a request."""
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
        self.clients: list[Any] = []

    async def __aenter__(self) -> list[Send]:
        key = read_key(self.model.name, self.model.key_env) if self.model.key_env else "none"
        # An attempt is limited as a whole, by the caller; limits of its parts would end it under another name.
        common: dict[str, Any] = {"api_key": key, "max_retries": 0, "timeout": None}
        if self.model.base_url is not None:
            common["base_url"] = self.model.base_url
        self.library, client, send = openai, openai.AsyncOpenAI, self._openai
        if self.model.api == "anthropic":
            try:
                import anthropic
            except ImportError:
                raise UserError(
                    f"{self.model.name}: api=anthropic needs its client: pip install -e '.[claude]'"
                ) from None
            self.library, client, send = anthropic, anthropic.AsyncAnthropic, self._anthropic
        # The clients bring a copy of httpx of their own, of the same shape.
        limits: Any = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
        certificates = httpx.create_ssl_context()
        for _ in range(self.num):
            connections = self.library.DefaultAsyncHttpxClient(
                limits=limits, timeout=None, verify=certificates
            )
            self.clients.append(client(**common, http_client=connections))
        return [functools.partial(send, client) for client in self.clients]

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()

    async def _openai(self, client: Any, request: Request, shown: Shown) -> Answer:
        content: list[dict[str, Any]] = []
        for part in request.parts:
            if isinstance(part, Picture):
                media_type, data = shown[part]
                url = f"data:{media_type};base64,{data}"
                content.append({"type": "image_url", "image_url": {"url": url}})
            else:
                content.append({"type": "text", "text": _whole(part)})
        structured = self.model.structured and request.fields is not None
        if structured:
            content.append(
                {"type": "text", "text": "Answer by a JSON object; its fields are named like the tags."}
            )
        messages = [{"role": "system", "content": _whole(request.system)}] if request.system else []
        model = self.model
        # Past the client's conversion to its own types, which takes a fifth of a call's time to change nothing here.
        body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": content}]}
        body[model.token_limit] = request.max_tokens
        if model.send_temperature:
            body["temperature"] = request.temperature
        if model.send_seed:
            body["seed"] = request.sample
        if request.n > 1:
            body["n"] = request.n
        if model.reasoning_effort is not None:
            body["reasoning_effort"] = model.reasoning_effort
        if request.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
        if structured:
            schema = {"name": "answer", "strict": True, "schema": json_schema(request.fields or ())}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        create = client.chat.completions.with_raw_response.create
        return await self._sent(create, model=model.name, messages=[], extra_body=body | model.extra_body)

    async def _anthropic(self, client: Any, request: Request, shown: Shown) -> Answer:
        content: list[dict[str, Any]] = []
        for number, part in enumerate(request.parts, start=1):
            if isinstance(part, Picture):
                media_type, data = shown[part]
                source = {"type": "base64", "media_type": media_type, "data": data}
                content.append({"type": "image", "source": source})
            else:
                content.append({"type": "text", "text": _whole(part)})
            if number == request.shared_parts:
                # OpenAI's and vLLM's caches find equal beginnings by themselves; Anthropic's wants to be told.
                content[-1]["cache_control"] = {"type": "ephemeral"}
        settings: dict[str, Any] = {"system": _whole(request.system)} if request.system else {}
        # The client no longer names it, for some models refuse it; those that the paper used take it.
        body = {"temperature": request.temperature} if self.model.send_temperature else {}
        return await self._sent(
            client.messages.with_raw_response.create,
            model=self.model.name,
            messages=[{"role": "user", "content": content}],
            max_tokens=request.max_tokens,
            extra_body=body | self.model.extra_body,
            **settings,
        )

    async def _sent(self, create: Callable[..., Awaitable[Any]], **arguments: Any) -> Answer:
        library = self.library
        try:
            response = (await create(**arguments)).http_response
            return Answer(await response.aread(), response.headers)
        except library.APIConnectionError as error:
            cause = error.__cause__
            # By name: the clients bring an HTTP library each, and not the same one.
            sent = cause is not None and not type(cause).__name__.startswith("Connect")
            raise Lost(f"no connection{f': {cause}' if cause else ''}", billed=sent) from None
        except library.APIStatusError as error:
            raise self._status(error) from None

    def _status(self, error: Any) -> Exception:
        status, raw = error.status_code, error.response.content
        body = self.mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
        said, name = f"HTTP {status}: {body}", self.model.name
        try:
            content = parse(raw)
        except ReplyError:
            content = None
        if 400 <= status < 500 and policy_refusal(content) is not None:
            return PolicyAnswer(Answer(raw, error.response.headers))
        if status in (401, 403):
            where = self.model.key_env or "none: key_env is not set"
            return KeyRejected(f"{name}: the endpoint rejects the key (from {where}); {said}")
        if status == 404:
            return EndpointDown(f"{name}: no such model or address; {said}")
        if "insufficient_quota" in body:
            return BudgetReached(f"{name}: the provider's quota is used up; {said}")
        wait_s = seconds(error.response.headers.get("retry-after"))
        if status == 429:
            return Lost(said, limited=True, wait_s=wait_s, raw=raw)
        if status in TRANSIENT or status >= 500:
            return Lost(said, wait_s=wait_s, billed=status in MAYBE_BILLED, raw=raw)
        about_input = any(word in body.lower() for word in ABOUT_INPUT)
        return Rejected(said, about_input=about_input, raw=raw)


class PolicyAnswer(Exception):
    """A status of failure whose body is an answer: the provider's policy declines."""

    def __init__(self, answer: Answer):
        super().__init__("declined by the provider's policy")
        self.answer = answer


def json_schema(fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The JSON schema of an answer.

    Args:
        fields: see `rge.calls.request.Request`.
    """
    properties: dict[str, Any] = {}
    for name, inside in fields:
        if inside is None:
            properties[name] = {"type": "string"}
        elif all(isinstance(one, str) for one in inside):
            properties[name] = {"type": "string", "enum": list(inside)}
        else:
            properties[name] = json_schema(inside)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _whole(text: str) -> str:
    # Half characters (lone surrogates) can be sent by nobody.
    return text.encode("utf-8", "replace").decode()
