"""The export that other libraries load."""

import pytest

from rge.checkpoints.export import export, settings_of
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel


@pytest.fixture(scope="module")
def checkpoint(lively_path, tmp_path_factory):
    model = EmbeddingModel(load_backbone(lively_path)).eval()
    settings = settings_of(
        emb_id=model.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=7,
    )  # fmt: skip
    settings["instructions"] = {"default": "find it", "known": ["find it", "name it"], "by_task": {}}
    folder = tmp_path_factory.mktemp("integrations") / "final"
    export(model, folder, settings)
    return folder
