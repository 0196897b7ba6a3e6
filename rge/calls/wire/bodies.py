"""OpenAI's chat completions: addresses, headers and bodies of requests, and the list of models."""

from typing import Any

import httpx

import rge
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.request import Part, Picture, Request
from rge.calls.wire.pictures import EncodedPictures
from rge.calls.wire.replies import as_dict, dict_items, valid_unicode
from rge.common.errors import UserError
from rge.web.client import make_client

PATH = "/chat/completions"
BY_SCHEMA = "Answer by a JSON object; its fields are named like the tags."
LIST_TIMEOUT_S = 20.0
"""Time-out for the list of models."""
VARYING = ("created", "permission")
"""Fields of that list that vLLM regenerates for every request."""

Json = dict[str, Any]


def headers(model: ModelConfig) -> dict[str, str]:
    """The headers of every request, with the key."""
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
    try:
        with make_client(httpx.Client, headers=headers(model), timeout=LIST_TIMEOUT_S) as client:
            response = client.get(f"{model.address}/models")
    except httpx.HTTPError as error:
        message = Mask([model.key()])(str(error) or type(error).__name__)
        raise UserError(f"cannot list the models at {model.address}: {message}", key=model.name) from None
    return {"at": model.address, "served": _listed(response, model.name), "rge": rge.__version__}


def _listed(response: httpx.Response, name: str) -> dict[str, Any] | None:
    try:
        entries = dict_items(as_dict(response.json()).get("data")) if response.is_success else []
    except ValueError:
        return None
    entry = next((entry for entry in entries if entry.get("id") == name), None)
    return entry and {key: value for key, value in entry.items() if key not in VARYING}
