"""A request's address, headers and body, as OpenAI's chat completions and compatible endpoints take them."""

from collections.abc import Mapping
from typing import Any

from rge.calls.model_config import ModelConfig
from rge.calls.request import Part, Picture, Request

Shown = Mapping[Picture, tuple[str, str]]
"""Media type and base64 of each picture of a request."""

OPENAI = "https://api.openai.com/v1"
PATH = "/chat/completions"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."

Json = dict[str, Any]


def headers(key: str | None) -> dict[str, str]:
    """What every call carries."""
    return {"user-agent": "rge"} | ({} if key is None else {"authorization": f"Bearer {key}"})


def body(model: ModelConfig, request: Request, shown: Shown) -> Json:
    """The JSON of a request."""
    parts = [_part(part, shown) for part in request.parts]
    schema = None
    if model.structured and request.fields is not None:
        parts.append(_part(BY_SCHEMA, shown))
        form = {"name": "answer", "strict": True, "schema": json_schema(request.fields)}
        schema = {"type": "json_schema", "json_schema": form}
    system = [{"role": "system", "content": whole(request.system)}] if request.system else []
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


def _part(part: Part, shown: Shown) -> Json:
    if isinstance(part, Picture):
        kind, data = shown[part]
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    return {"type": "text", "text": whole(part)}


def json_schema(fields: tuple[tuple[str, Any], ...]) -> Json:
    """The JSON schema of an answer."""
    properties: Json = {}
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
