"""A tiny finished checkpoint, for what uses one as an encoder."""

import pytest
from recorded import settings_of

from rge.checkpoints.export import export


@pytest.fixture
def checkpoint(lively, tmp_path):
    """A directory as training leaves it, with random weights."""
    settings = settings_of(
        emb_id=lively.emb_id, profile="plain", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "checkpoint", settings)
    return str(tmp_path / "checkpoint")
