"""One tiny random backbone for the whole suite: Qwen2.5-VL's architecture and processor, made offline in a second."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from PIL import Image

from rge import scratch
from rge.backbone import load_backbone
from rge.embedder import Embedder
from rge.prompts import PromptBuilder

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
TEXTS = [
    "Find the picture that answers the question.",
    "What do you need to open this?",
    "This is a padlock; a locked padlock is opened with a key.",
    "What will this egg turn into over time?",
    "This is an egg; a chick hatches from it.",
]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A backbone directory without `<emb>`, as a plain model from a hub would be."""
    path = tmp_path_factory.mktemp("backbone") / "tiny"
    scratch.build(
        path, TEXTS, seed=0, vocab_size=320, text=TEXT, vision=VISION, min_pixels=28 * 28, max_pixels=84 * 84
    )
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
