"""One tiny random backbone for the whole suite: Qwen2.5-VL's architecture and processor, made offline in a second."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from PIL import Image

import rge  # noqa: F401 - makes torchvision importable before transformers is

sys.path.insert(0, str(Path(__file__).parent))  # family_models, in pytest's importlib mode

from family_models import LIVELY_SEED, TEXT, TEXTS, VISION, build

from rge import scratch
from rge.backbone import load_backbone
from rge.embedder import Embedder
from rge.prompts import PromptBuilder


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A backbone directory without `<emb>`, as a plain model from a hub would be."""
    path = tmp_path_factory.mktemp("backbone") / "tiny"
    build("qwen2_5_vl", path)
    return path


@pytest.fixture
def embedder(tiny_path):
    """A fresh float32 embedder; tests may change it."""
    return Embedder(load_backbone(tiny_path, add_emb=True)).eval()


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
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)


@pytest.fixture(scope="session", name="enliven")
def enliven_fixture():
    """`enliven`, for tests: modules cannot import from here."""
    return enliven


@pytest.fixture(scope="session")
def lively_path(request, tmp_path_factory):
    """A backbone directory with `<emb>`, whose states and tokens vary; see `enliven`, and `every_family`."""
    path = tmp_path_factory.mktemp("backbone") / "lively"
    family = getattr(request, "param", "qwen2_5_vl")
    build(family, path)
    backbone = load_backbone(path, add_emb=True)
    enliven(backbone.model, LIVELY_SEED.get(family, 1))
    with torch.no_grad():
        # `<emb>` is one token of hundreds: without a push, random rationales would all reach the cap.
        backbone.model.get_input_embeddings().weight[backbone.emb_id] *= 2.0
    backbone.model.save_pretrained(path)
    backbone.processor.save_pretrained(path)
    return path


@pytest.fixture
def lively(lively_path):
    """A fresh float32 embedder whose states and tokens vary."""
    return Embedder(load_backbone(lively_path)).eval()


@pytest.fixture
def untied(tmp_path):
    """The same, with an output matrix of its own."""
    text = {**TEXT, "tie_word_embeddings": False}
    scratch.build(
        tmp_path, TEXTS, seed=0, vocab_size=320, text=text, vision=VISION, min_pixels=784, max_pixels=7056
    )
    backbone = load_backbone(tmp_path, add_emb=True)
    enliven(backbone.model)
    return Embedder(backbone).eval()


@pytest.fixture
def lively64(lively_path):
    """The same in float64."""
    return Embedder(load_backbone(lively_path, dtype="float64")).eval()
