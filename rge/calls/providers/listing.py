"""What answers of a model depend on beside the request: at two addresses ``default`` may be two models."""

from typing import Any

import httpx

import rge
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import APIS, headers
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
    found: dict[str, Any] = {
        "at": model.base_url or APIS[model.api].address,
        "served": None,
        "rge": rge.__version__,
    }
    if model.api != "openai":
        return found
    key = read_key(model.name, model.key_env) if model.key_env else None
    try:
        response = httpx.get(
            f"{found['at'].rstrip('/')}/models", headers=headers(model.api, key), timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        said = Mask([key] if key else [])(str(error) or type(error).__name__)
        raise UserError(
            f"{model.name} at {found['at']} cannot be asked which model it serves: {said}"
        ) from None
    try:
        entries = response.json()["data"] if response.is_success else []
        entry = next((dict(one) for one in entries if one.get("id") == model.name), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        entry = None
    if entry is not None:
        found["served"] = {name: value for name, value in entry.items() if name not in VARYING}
    return found
