"""Headers and body of a request, for OpenAI's chat completions and compatible endpoints."""

from typing import Any

from rge.calls.model_config import ModelConfig
from rge.calls.pictures import EncodedPictures
from rge.calls.request import Part, Picture, Request

OPENAI = "https://api.openai.com/v1"
PATH = "/chat/completions"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."

Json = dict[str, Any]


def headers(key: str | None) -> dict[str, str]:
    """Headers of every request."""
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
        kind, data = pictures[part]
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
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


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()
