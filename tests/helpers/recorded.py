"""Settings of checkpoints as a training records them, for tests that export models without one."""

from pathlib import Path
from typing import Any

from rge.checkpoints.export import export
from rge.checkpoints.settings import CheckpointSettings, Instructions, RecordedRecipe
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel

RECIPE = {
    "recipe": "tiny", "model": {"path": "base", "dtype": "float32"},
    "loss": {"temperature": 0.05, "adaptive": {"share": 0.0}},
}  # fmt: skip
DECIDES = RECIPE | {"loss": {"temperature": 0.05, "adaptive": {"share": 0.5}}}
"""The recipe of a model that answers some queries directly."""


def settings_of(
    *,
    min_pixels: int = 784,
    max_pixels: int = 7056,
    max_new_tokens: int,
    recipe: dict | None = None,
    **own: Any,
) -> CheckpointSettings:
    """Content of ``rge.json``; `recipe` has more than `RECIPE`."""
    asked = {
        "format": 1, "pixels": {"min": min_pixels, "max": max_pixels}, "recipe": RecordedRecipe(**RECIPE | (recipe or {})),
        "generation": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "stop": "<emb>"}, "trained_on": [],
        "instructions": Instructions(default=None, known=[], by_task={}), "rge_version": "1", "git_commit": None,
    }  # fmt: skip
    return CheckpointSettings.model_validate(asked | own)


def exported(backbone: Path, folder: Path, **own: Any) -> Path:
    """`folder`, with a checkpoint of that backbone; `own`: other settings than these of short prompts and rationales."""
    model = EmbeddingModel(load_backbone(backbone)).eval()
    asked = {
        "emb_id": model.emb_id, "profile": "rge", "max_prompt_tokens": 256, "max_new_tokens": 12, "reasons": "query",
        "stage": "joint", "step": 7, "instructions": {"default": "find it", "known": ["find it", "name it"], "by_task": {}},
    }  # fmt: skip
    export(model, folder, settings_of(**asked | own))
    return folder
