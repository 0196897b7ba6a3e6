"""Identify the model behind a name and address, by the server's own list of models."""

from typing import Any

import httpx

import rge
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import OPENAI, headers
from rge.common.errors import UserError

TIMEOUT_S = 20.0
VARYING = ("created", "permission")
"""Fields that vLLM makes up for every reply."""


def served_as(model: ModelConfig) -> dict[str, Any]:
    """Address and name of a model, what the server itself lists under that name, and our version.

    Returns:
        ``served`` is None where the server lists no such model or has no list of models.

    Raises:
        UserError: the server cannot be reached.
    """
    address = model.base_url or OPENAI
    return {"at": address, "served": _listed(model, address), "rge": rge.__version__}


def _listed(model: ModelConfig, address: str) -> dict[str, Any] | None:
    key = read_key(model.name, model.key_env) if model.key_env else None
    try:
        url = f"{address.rstrip('/')}/models"
        response = httpx.get(url, headers=headers(key), timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        said = Mask([key] if key else [])(str(error) or type(error).__name__)
        raise UserError(f"{model.name} at {address} cannot be asked which model it serves: {said}") from None
    try:
        entries = response.json()["data"] if response.is_success else []
        entry = next(dict(one) for one in entries if one.get("id") == model.name)
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {name: value for name, value in entry.items() if name not in VARYING}
