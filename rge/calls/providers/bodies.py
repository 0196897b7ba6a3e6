"""A request's URL and body for each provider."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rge.calls.model_config import ModelConfig
from rge.calls.request import Picture, Request

Shown = Mapping[Picture, tuple[str, str]]
"""Media type and base64 of each picture of a request."""

ANTHROPIC_VERSION = "2023-06-01"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."

Json = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """What differs between the APIs, but for the shape of a request."""

    address: str  # of the provider itself
    path: str  # of a single request, after the base address
    key: tuple[str, str]  # header of the key, and what stands before it
    headers: Mapping[str, str]  # of every call
    text: Callable[[str], Json]
    picture: Callable[[str, str], Json]  # of its media type and base64


APIS = {
    "openai": Api(
        "https://api.openai.com/v1",
        "/chat/completions",
        ("authorization", "Bearer "),
        {},
        lambda text: {"type": "text", "text": text},
        lambda kind, data: {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
    ),
    "anthropic": Api(
        "https://api.anthropic.com",
        "/v1/messages",
        ("x-api-key", ""),
        {"anthropic-version": ANTHROPIC_VERSION},
        lambda text: {"type": "text", "text": text},
        lambda kind, data: {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}},
    ),
    "gemini": Api(
        "https://generativelanguage.googleapis.com",
        "/v1beta/models/{name}:generateContent",
        ("x-goog-api-key", ""),
        {},
        lambda text: {"text": text},
        lambda kind, data: {"inlineData": {"mimeType": kind, "data": data}},
    ),
}


def headers(api: str, key: str | None) -> dict[str, str]:
    """What every call of an API carries."""
    name, before = APIS[api].key
    return {"user-agent": "rge", **APIS[api].headers} | ({} if key is None else {name: f"{before}{key}"})


def path(model: ModelConfig) -> str:
    """Where a single request goes, after the base address."""
    return APIS[model.api].path.format(name=quote(model.name, safe=""))


def body(model: ModelConfig, request: Request, shown: Shown) -> Json:
    """The JSON of a request."""
    api = APIS[model.api]
    parts = [
        api.picture(*shown[part]) if isinstance(part, Picture) else api.text(whole(part))
        for part in request.parts
    ]
    schema = None
    if model.structured and request.fields is not None:
        parts.append(api.text(BY_SCHEMA))
        schema = json_schema(request.fields)
    shape = {"openai": _openai, "anthropic": _anthropic, "gemini": _gemini}[model.api]
    return shape(model, request, parts, schema) | model.extra_body


def _openai(model: ModelConfig, request: Request, parts: list[Json], schema: Json | None) -> Json:
    system = [{"role": "system", "content": whole(request.system)}] if request.system else []
    form = {"name": "answer", "strict": True, "schema": schema}
    return {
        "model": model.name,
        "messages": [*system, {"role": "user", "content": parts}],
        model.token_limit: request.max_tokens,
    } | _given(
        temperature=request.temperature if model.send_temperature else None,
        seed=request.sample if model.send_seed else None,
        n=request.n if request.n > 1 else None,
        reasoning_effort=model.reasoning_effort,
        logprobs=bool(request.top_logprobs) or None,
        top_logprobs=request.top_logprobs or None,
        response_format={"type": "json_schema", "json_schema": form} if schema else None,
    )


def _anthropic(model: ModelConfig, request: Request, parts: list[Json], schema: Json | None) -> Json:
    if request.shared_parts:
        # OpenAI's, Gemini's and vLLM's caches find equal beginnings on their own; Anthropic's wants to be told.
        parts[request.shared_parts - 1]["cache_control"] = {"type": "ephemeral"}
    form = {"type": "json_schema", "schema": schema} if schema else None
    return {
        "model": model.name,
        "max_tokens": request.max_tokens,
        "messages": [{"role": "user", "content": parts}],
    } | _given(
        system=whole(request.system) if request.system else None,
        temperature=request.temperature if model.send_temperature else None,
        output_config=_given(effort=model.reasoning_effort, format=form) or None,
    )


def _gemini(model: ModelConfig, request: Request, parts: list[Json], schema: Json | None) -> Json:
    effort = model.reasoning_effort
    how = {"maxOutputTokens": request.max_tokens} | _given(
        temperature=request.temperature if model.send_temperature else None,
        seed=request.sample if model.send_seed else None,
        candidateCount=request.n if request.n > 1 else None,
        thinkingConfig={"thinkingLevel": effort} if effort is not None else None,
        responseMimeType="application/json" if schema else None,
        responseJsonSchema=schema,
    )
    system = {"parts": [{"text": whole(request.system)}]} if request.system else None
    return {"contents": [{"role": "user", "parts": parts}], "generationConfig": how} | _given(
        systemInstruction=system
    )


def _given(**fields: Any) -> Json:
    """The fields that are sent: None stands for one that is not."""
    return {name: value for name, value in fields.items() if value is not None}


def json_schema(fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The JSON schema of an answer."""
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


def whole(text: str) -> str:
    """A text that can be sent: half characters (lone surrogates) cannot."""
    return text.encode("utf-8", "replace").decode()
