"""Build a small backbone offline: real architecture and processor, own sizes.

The tokenizer is a byte-level BPE with Qwen2's normaliser, pre-tokenizer and special tokens, trained on the records' texts.
Everything is saved as a Hugging Face directory, so that the rest of rge loads it like ``Qwen/Qwen2.5-VL-3B-Instruct``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from rge.checkpoints.settings import Origin
from rge.common.errors import Fault, UserError, did_you_mean
from rge.small_models import efficientnet, smollm2
from rge.small_models.config import Sizes

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""Qwen2.5-VL's special tokens in the order of their ids."""

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to a multiple of this, so that `<emb>` finds a free row as it does on Qwen2.5-VL."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer like Qwen2's, with left padding.

    `vocab_size` includes the 256 bytes, but not the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    # Only now, since Qwen2Tokenizer(vocab=...) would number the special tokens in another order than Qwen's.
    tokenizer.add_special_tokens([AddedToken(it, special=True, normalized=False) for it in SPECIAL_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],  # type: ignore[misc]  # pairs, as the tokenizers library has them
        unk_token=None,  # type: ignore[arg-type]  # as Qwen's has none
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=131_072,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_tokenizer(texts: Iterable[str], vocab_size: int, text: Sizes) -> PreTrainedTokenizerBase:
    """The tokenizer of a backbone: trained on texts, or that of the pretrained text model in ``text``."""
    if not smollm2.is_smollm2(text):
        return train_tokenizer(texts, vocab_size)
    tokenizer = smollm2.tokenizer()
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in known]}
    )
    return tokenizer


def make_processor(
    tokenizer: PreTrainedTokenizerBase,
    *,
    min_pixels: int,
    max_pixels: int,
    vision: Sizes,
    text: Sizes,
) -> Qwen2_5_VLProcessor:
    """Qwen2.5-VL's processor around a tokenizer, with its published chat template (shipped in trl).

    Pictures have `min_pixels` to `max_pixels`, and are cut and normalised for the tower in `vision`.
    """
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_vl.jinja").read_text()
    if smollm2.is_smollm2(text):  # the same form, another greeting
        template = template.replace("You are a helpful assistant.", smollm2.SYSTEM)
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    pictures = {"patch_size": vision.get("patch_size", 14)}
    if efficientnet.is_efficientnet(vision):
        pictures = efficientnet.picture_settings(vision)
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **pictures),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size, patch_size=pictures["patch_size"]),
        chat_template=template,
    )


def make_model(
    tokenizer: PreTrainedTokenizerBase, text: Sizes, vision: Sizes
) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL, float32, with random weights (seed torch before) except for pretrained parts; TowerError without their package.

    `text` has overrides of the text config: sizes, ``tie_word_embeddings``; or ``model_type: smollm2`` alone. `vision` has those of the
    vision config; its ``model_type`` may be a tower of `rge.small_models`.
    """
    ids: Any = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    model: Qwen2_5_VLForConditionalGeneration
    try:
        config = make_config(num_rows(len(tokenizer)), ids, text, vision)
        if isinstance(config, efficientnet.EfficientNetQwenConfig):
            model = efficientnet.EfficientNetQwen(config)
        else:
            model = Qwen2_5_VLForConditionalGeneration(config)
    except UserError:
        raise
    except Exception as error:  # of any type: transformers and the checks of its configs raise many for sizes
        why = f"lack {error}" if isinstance(error, KeyError) else f"make no model: {error}"
        raise UserError(f"the sizes of text and vision {why}").about("text", "vision") from error
    if isinstance(model.model.visual, efficientnet.EfficientNetTower):
        model.model.visual.load_pretrained()
    if smollm2.is_smollm2(text):
        smollm2.load_pretrained(model.model.language_model)
    return model


def origins(text: Sizes, vision: Sizes) -> list[Origin]:
    """Pretrained parts of a backbone; UserError if a package is missing."""
    found = [smollm2.origin()] if smollm2.is_smollm2(text) else []
    return [*found, efficientnet.origin()] if efficientnet.is_efficientnet(vision) else found


def vocabulary(vocab_size: int, text: Sizes) -> int:
    """Number of tokens of `make_tokenizer`, special ones included."""
    if smollm2.is_smollm2(text):
        return smollm2.VOCABULARY + len(set(SPECIAL_TOKENS) - smollm2.SPECIAL_TOKENS)
    return vocab_size + len(SPECIAL_TOKENS)


def num_rows(vocabulary: int) -> int:
    """Embedding rows: one more than tokens, so that adding <emb> never grows the matrix, and padding."""
    return -(-(vocabulary + 1) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def make_config(rows: int, ids: Mapping[str, int], text: Sizes, vision: Sizes) -> Qwen2_5_VLConfig:
    """Config of a Qwen2.5-VL with these sizes and rows in its embedding matrix, see `make_model`; UserError for unknown sizes."""
    text = dict(smollm2.TEXT if smollm2.is_smollm2(text) else text)
    tie = text.pop("tie_word_embeddings", True)
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    # Qwen2.5-VL's split of the rotary half-dimension over time, height and width: 16, 24, 24 of 64.
    quarter, rest = head_dim // 8, head_dim // 2 - head_dim // 8
    sections = [quarter, rest // 2, rest - rest // 2]
    rope_theta = text.pop("rope_theta", 1e6)
    is_photo = efficientnet.is_efficientnet(vision)
    config = (efficientnet.EfficientNetQwenConfig if is_photo else Qwen2_5_VLConfig)(
        text_config={
            "vocab_size": rows,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": rope_theta},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            **text,
        },
        vision_config={"out_hidden_size": text["hidden_size"], **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    _check_keys("text", text, type(config.text_config), smollm2.MODEL_TYPE)
    _check_keys("vision", vision, type(config.vision_config), efficientnet.EfficientNetConfig.model_type)
    if (layers := config.get_text_config().num_hidden_layers) < 1:
        raise UserError(f"it must be >= 1, got {layers}", key="text.num_hidden_layers")
    return config


def _check_keys(part: str, sizes: Sizes, kind: type[Any], pretrained: str) -> None:
    known = kind().to_dict()  # transformers accepts other keys, and ignores them
    for name in sizes:
        if name not in known:
            raise UserError(f"unknown key {part}.{name}{did_you_mean(name, known)}").about(
                Fault("unknown", f"{part}.{name}")
            )
    if (given := sizes.get("model_type", kind.model_type)) != kind.model_type:
        raise UserError.choice(f"{part}.model_type", given, [pretrained])


def build(
    out: Path,
    texts: Iterable[str],
    *,
    seed: int,
    vocab_size: int,
    text: Sizes,
    vision: Sizes,
    min_pixels: int,
    max_pixels: int,
) -> None:
    """Write a backbone (`make_model`), random except for its pretrained parts, and its processor as a Hugging Face directory.

    Its ``config.json``, and that of every checkpoint trained from it, lists the parts' ``origins``. The tokenizer is trained on
    `texts`; `seed` is that of the weights.
    """
    tokenizer = make_tokenizer(texts, vocab_size, text)
    processor = make_processor(
        tokenizer, min_pixels=min_pixels, max_pixels=max_pixels, vision=vision, text=text
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(tokenizer, text, vision)
    if parts := origins(text, vision):
        model.config.origins = [part.content() for part in parts]
    model.save_pretrained(out)
    processor.save_pretrained(out)
