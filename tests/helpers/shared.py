"""One tiny random backbone for the whole suite: Qwen2.5-VL's architecture and processor, made offline in a second."""

import copy
import functools
from pathlib import Path

import lean  # noqa: F401 - for its effect
import numpy as np
import pytest
import torch
from family_models import LIVELY_SEED, TEXT, TEXTS, VISION, build
from PIL import Image
from safetensors.torch import load_file, save_file

from rge.common import registry
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder
from rge.small_models import build as scratch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_plugins_of_other_tests(monkeypatch):
    """A test's plugins are gone with its folder; processes that another test starts must not import them."""
    monkeypatch.setattr(registry, "_plugins", {})


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A backbone directory without `<emb>`, as a plain model from a hub would be."""
    path = tmp_path_factory.mktemp("backbone") / "tiny"
    build("qwen2_5_vl", path)
    return path


@pytest.fixture(scope="session")
def backbone_of():
    """`load_backbone` for directories that stay as they are: each is read once, and every call gets a copy of its own."""
    read = functools.cache(load_backbone)
    return lambda path, **settings: copy.deepcopy(read(path, **settings))


@pytest.fixture
def embedder(tiny_path, backbone_of):
    """A fresh float32 embedder; tests may change it."""
    return EmbeddingModel(backbone_of(tiny_path, add_emb=True)).eval()


@pytest.fixture
def builder(embedder):
    return PromptBuilder(embedder.processor)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random pixels; reproducible."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(name="picture")
def picture_fixture():
    """`picture`, for tests: modules cannot import from here."""
    return picture


def enliven(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw weights so wide that the model writes varied tokens and `<emb>` at different lengths.

    With Hugging Face's own initialisation all states are nearly equal, and a test on them proves little.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Of a thousand inputs that much would drown everything else.
            wide = parameter.dim() == 2 and parameter.shape[1] > 1000
            parameter.copy_(1 + 0.2 * noise if "norm" in name else (0.02 if wide else 0.3) * noise)


@pytest.fixture(scope="session", name="enliven")
def enliven_fixture():
    """`enliven`, for tests: modules cannot import from here."""
    return enliven


@pytest.fixture(scope="session")
def lively_paths(tmp_path_factory):
    """The directory of `lively_path` for a family, made when it is first asked for."""

    @functools.cache
    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp("backbone") / "lively"
        build(family, path)
        backbone = load_backbone(path, add_emb=True)
        enliven(backbone.model, LIVELY_SEED.get(family, 1))
        with torch.no_grad():
            # `<emb>` is one token of hundreds: without a push, random rationales would all reach the cap.
            backbone.model.get_input_embeddings().weight[backbone.emb_id] *= 2.0
        backbone.model.save_pretrained(path)
        backbone.processor.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def lively_path(request, lively_paths):
    """A backbone directory with `<emb>`, whose states and tokens vary; see `enliven`, and `every_family`."""
    return lively_paths(getattr(request, "param", "qwen2_5_vl"))


@pytest.fixture
def lively(lively_path, backbone_of):
    """A fresh float32 embedder whose states and tokens vary."""
    return EmbeddingModel(backbone_of(lively_path)).eval()


@pytest.fixture(scope="session")
def untied_backbone(tmp_path_factory):
    """The backbone of `untied`; not to be changed."""
    path = tmp_path_factory.mktemp("backbone") / "untied"
    text = {**TEXT, "tie_word_embeddings": False}
    scratch.build(
        path, TEXTS, seed=0, vocab_size=320, text=text, vision=VISION, min_pixels=784, max_pixels=7056
    )
    backbone = load_backbone(path, add_emb=True)
    enliven(backbone.model)
    return backbone


@pytest.fixture(scope="session")
def headless_path(untied_backbone, tmp_path_factory):
    """A model with ``tie_word_embeddings: false`` and no ``lm_head``, as Qwen3-VL-Embedding is published."""
    path = tmp_path_factory.mktemp("backbone") / "headless"
    untied_backbone.model.save_pretrained(path)
    untied_backbone.processor.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def untied(untied_backbone):
    """A fresh float32 embedder with an output matrix of its own."""
    return EmbeddingModel(copy.deepcopy(untied_backbone)).eval()


@pytest.fixture
def lively64(lively_path, backbone_of):
    """The lively one in float64."""
    return EmbeddingModel(backbone_of(lively_path, dtype="float64")).eval()
