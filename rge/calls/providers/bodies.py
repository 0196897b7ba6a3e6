"""A request as each provider takes it, and where it goes."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rge.calls.model_config import ModelConfig
from rge.calls.request import Picture, Request

Shown = Mapping[Picture, tuple[str, str]]
"""Media type and base64 of each picture of a request."""

ADDRESSES = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
"""Of the providers themselves."""
ANTHROPIC_VERSION = "2023-06-01"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."


def headers(api: str, key: str | None) -> dict[str, str]:
    """What every call of an API carries."""
    found = {"user-agent": "rge"}
    if api == "anthropic":
        found["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None:
        name, value = {
            "anthropic": ("x-api-key", key),
            "gemini": ("x-goog-api-key", key),
        }.get(api, ("authorization", f"Bearer {key}"))
        found[name] = value
    return found


def path(model: ModelConfig) -> str:
    """Where a single request goes, after the base address."""
    if model.api == "gemini":
        return f"/v1beta/models/{quote(model.name, safe='')}:generateContent"
    return "/v1/messages" if model.api == "anthropic" else "/chat/completions"


def body(model: ModelConfig, request: Request, shown: Shown) -> dict[str, Any]:
    """The JSON of a request."""
    made = {"anthropic": _anthropic, "gemini": _gemini}.get(model.api, _openai)(model, request, shown)
    return made | model.extra_body


def messages(request: Request, shown: Shown, structured: bool) -> list[dict[str, Any]]:
    """A request as OpenAI's chat messages."""
    content: list[dict[str, Any]] = []
    for part in request.parts:
        if isinstance(part, Picture):
            media_type, data = shown[part]
            url = f"data:{media_type};base64,{data}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        else:
            content.append({"type": "text", "text": whole(part)})
    if structured:
        content.append({"type": "text", "text": BY_SCHEMA})
    system = [{"role": "system", "content": whole(request.system)}] if request.system else []
    return [*system, {"role": "user", "content": content}]


def _openai(model: ModelConfig, request: Request, shown: Shown) -> dict[str, Any]:
    structured = model.structured and request.fields is not None
    made: dict[str, Any] = {"model": model.name, "messages": messages(request, shown, structured)}
    made[model.token_limit] = request.max_tokens
    if model.send_temperature:
        made["temperature"] = request.temperature
    if model.send_seed:
        made["seed"] = request.sample
    if request.n > 1:
        made["n"] = request.n
    if model.reasoning_effort is not None:
        made["reasoning_effort"] = model.reasoning_effort
    if request.top_logprobs:
        made |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if structured:
        schema = {"name": "answer", "strict": True, "schema": json_schema(request.fields or ())}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


def _anthropic(model: ModelConfig, request: Request, shown: Shown) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for number, part in enumerate(request.parts, start=1):
        if isinstance(part, Picture):
            media_type, data = shown[part]
            source = {"type": "base64", "media_type": media_type, "data": data}
            content.append({"type": "image", "source": source})
        else:
            content.append({"type": "text", "text": whole(part)})
        if number == request.shared_parts:
            # OpenAI's, Gemini's and vLLM's caches find equal beginnings by themselves; Anthropic's wants to be told.
            content[-1]["cache_control"] = {"type": "ephemeral"}
    how: dict[str, Any] = {}
    if model.reasoning_effort is not None:
        how["effort"] = model.reasoning_effort
    if model.structured and request.fields is not None:
        content.append({"type": "text", "text": BY_SCHEMA})
        how["format"] = {"type": "json_schema", "schema": json_schema(request.fields)}
    made: dict[str, Any] = {
        "model": model.name,
        "max_tokens": request.max_tokens,
        "messages": [{"role": "user", "content": content}],
    }
    if request.system:
        made["system"] = whole(request.system)
    if model.send_temperature:
        made["temperature"] = request.temperature
    if how:
        made["output_config"] = how
    return made


def _gemini(model: ModelConfig, request: Request, shown: Shown) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in request.parts:
        if isinstance(part, Picture):
            media_type, data = shown[part]
            parts.append({"inlineData": {"mimeType": media_type, "data": data}})
        else:
            parts.append({"text": whole(part)})
    how: dict[str, Any] = {"maxOutputTokens": request.max_tokens}
    if model.send_temperature:
        how["temperature"] = request.temperature
    if model.send_seed:
        how["seed"] = request.sample
    if request.n > 1:
        how["candidateCount"] = request.n
    if model.reasoning_effort is not None:
        how["thinkingConfig"] = {"thinkingLevel": model.reasoning_effort}
    if model.structured and request.fields is not None:
        parts.append({"text": BY_SCHEMA})
        how |= {"responseMimeType": "application/json", "responseJsonSchema": json_schema(request.fields)}
    made: dict[str, Any] = {"contents": [{"role": "user", "parts": parts}], "generationConfig": how}
    if request.system:
        made["systemInstruction"] = {"parts": [{"text": whole(request.system)}]}
    return made


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
