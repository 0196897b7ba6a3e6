"""A recipe's model without its weights, on the `meta` device.

The table, known_models.yaml, has the published configs of the models in our recipes, so that ``rge plan`` works offline.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from rge.common.errors import UserError
from rge.common.files import checkpoint_folder
from rge.common.options import read_yaml
from rge.model.backbone import BackboneError, read_config, skeleton
from rge.model.config import ModelConfig
from rge.model.hub_model import HubModel
from rge.scratch import build as scratch

TABLE: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Arguments of the config class, by hub id."""


def outline(model: ModelConfig, init: str | None = None) -> tuple[HubModel, str]:
    """The model of a recipe, or its checkpoint `init`, on `meta`, and where its shapes come from.

    It is whole under every back end, without communication.

    Raises:
        BackboneError: its shapes are unknown, `model.scratch` makes no model, or its family is not supported.
    """
    try:
        config, origin = _config(model, init)
        return skeleton(config), origin
    except UserError:
        raise
    except Exception as error:  # of any type: transformers and the checks of its configs raise many for sizes
        if model.scratch is None or init is not None:
            raise
        why = f"lacks {error}" if isinstance(error, KeyError) else f"makes no model: {error}"
        raise BackboneError(f"model.scratch {why}") from error


def _config(model: ModelConfig, init: str | None) -> tuple[Any, str]:
    if init is not None and ((folder := checkpoint_folder(Path(init))) / "config.json").is_file():
        return read_config(folder), init
    if model.scratch is not None:
        rows = scratch.num_rows(scratch.vocabulary(model.scratch.vocab_size, model.scratch.text))
        ids = dict.fromkeys(scratch.SPECIAL_TOKENS, 0)
        return scratch.make_config(rows, ids, model.scratch.text, model.scratch.vision), "model.scratch"
    path = str(model.path)
    try:
        return read_config(path, model.revision), path
    except BackboneError as error:
        if path not in TABLE:
            problem = str(error).splitlines()[0]
            raise BackboneError(
                f"{problem}; without the hub, shapes are known of: {', '.join(TABLE)}"
            ) from error
    known = dict(TABLE[path])
    config = CONFIG_MAPPING[known.pop("model_type")](**known)
    return config, f"{path}, from the table in rge/plan/known_models.yaml"
