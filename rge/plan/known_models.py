"""A recipe's model without its weights, on the `meta` device.

The table, known_models.yaml, has the published configs of the models in our recipes, so that ``rge plan`` works offline.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from rge.common.files import checkpoint_folder
from rge.common.options import read_yaml
from rge.model.backbone import BackboneError, read_config, skeleton
from rge.model.config import ModelConfig
from rge.model.hub_model import HubModel

TABLE: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Arguments of the config class, by hub id."""


def outline(model: ModelConfig, init: str | None = None) -> tuple[HubModel, str]:
    """The model of a recipe, or its checkpoint `init`, on `meta`, and where its shapes come from.

    It is whole under every back end, without communication.

    Raises:
        BackboneError: its shapes are unknown, or its family is not supported.
    """
    config, origin = _config(model, init)
    return skeleton(config), origin


def _config(model: ModelConfig, init: str | None) -> tuple[PretrainedConfig, str]:
    if init is not None and ((folder := checkpoint_folder(Path(init))) / "config.json").is_file():
        return read_config(folder), init
    try:
        return read_config(checkpoint_folder(Path(model.path)), model.revision), model.path
    except BackboneError as error:
        if model.path not in TABLE:
            told = f"{error.reason.splitlines()[0]}; without the hub, shapes are known of: {', '.join(TABLE)}"
            raise BackboneError(told, error.file, kind=error.kind).about(*error.faults) from error
    known = dict(TABLE[model.path])
    config = CONFIG_MAPPING[known.pop("model_type")](**known)
    return config, f"{model.path}, from the table in rge/plan/known_models.yaml"
