"""The export that other libraries load."""

import pytest
from recorded import settings_of

from rge.checkpoints.export import export
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel


@pytest.fixture(scope="module")
def checkpoint(lively_path, tmp_path_factory):
    model = EmbeddingModel(load_backbone(lively_path)).eval()
    settings = settings_of(
        emb_id=model.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip
    known = {"default": "find it", "known": ["find it", "name it"], "by_task": {}}
    settings = settings.but(instructions=known)
    folder = tmp_path_factory.mktemp("integrations") / "final"
    export(model, folder, settings)
    return folder
