"""Settings of checkpoints as a training records them, for tests that export models without one."""

from typing import Any

from rge.checkpoints.settings import CheckpointSettings, Instructions, RecordedRecipe

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
