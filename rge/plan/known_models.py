"""A recipe's model without its weights: architecture on the `meta` device, from the hub, a directory or a table.

The table has the published configs of the models in our recipes, so that ``rge plan`` works offline.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from rge.common.files import checkpoint_folder
from rge.config import ModelConfig
from rge.model.backbone import BackboneError, skeleton
from rge.model.families import FAMILIES
from rge.model.hub_model import HubModel
from rge.scratch import build as scratch


def _text(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int, rows: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": rows, **more,
    }  # fmt: skip


def _qwen25(text: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": text["hidden_size"],
    }  # fmt: skip
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": vision,
    }


TABLE: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen25(_text(2048, 11008, 36, 16, 2, 151936), tied=True),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen25(_text(3584, 18944, 28, 28, 4, 152064), tied=False),
    "Qwen/Qwen2-VL-2B-Instruct": {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "text_config": _text(1536, 8960, 28, 12, 2, 151936),
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14, "hidden_size": 1536,
        },
    },
    "Qwen/Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": _text(2048, 6144, 28, 16, 8, 151936, head_dim=128),
        "vision_config": {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
            "out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "HuggingFaceTB/SmolVLM-Instruct": {
        "model_type": "idefics3",
        "tie_word_embeddings": False,
        "scale_factor": 3,
        "text_config": _text(2048, 8192, 24, 32, 32, 49155, model_type="llama", pad_token_id=2),
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 384, "patch_size": 14,
        },
    },
}  # fmt: skip
"""Arguments of the config class, by hub id."""


def outline(model: ModelConfig, init: str | None = None) -> tuple[HubModel, str]:
    """The model of a recipe, or its checkpoint `init`, on `meta`, and where its shapes come from.

    It is whole under every back end, without communication.

    Raises:
        BackboneError: its shapes are unknown, or its family is not supported.
    """
    families = list(FAMILIES)  # first, since loading the families registers configs that transformers lacks
    config, origin = _config(model, init)
    if config.model_type not in families:
        raise BackboneError(f"{origin} is a {config.model_type}; supported families: {', '.join(families)}")
    return skeleton(config), origin


def _config(model: ModelConfig, init: str | None) -> tuple[Any, str]:
    if init is not None and ((folder := checkpoint_folder(Path(init))) / "config.json").is_file():
        return AutoConfig.from_pretrained(folder), init
    if model.scratch is not None:
        rows = scratch.num_rows(scratch.vocabulary(model.scratch.vocab_size, model.scratch.text))
        ids = dict.fromkeys(scratch.SPECIAL_TOKENS, 0)
        return scratch.make_config(rows, ids, model.scratch.text, model.scratch.vision), "model.scratch"
    path = str(model.path)
    try:
        return AutoConfig.from_pretrained(path, revision=model.revision), path
    except (OSError, ValueError) as error:
        if path not in TABLE:
            raise BackboneError(
                f"the shapes of {path} are not known: {str(error).splitlines()[0]}. Give model.path a folder with its "
                f"config.json; without the hub there are: {', '.join(TABLE)}"
            ) from error
    known = dict(TABLE[path])
    return CONFIG_MAPPING[known.pop("model_type")](
        **known
    ), f"{path}, from the table in rge/plan/known_models.py"
