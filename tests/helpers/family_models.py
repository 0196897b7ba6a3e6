"""A tiny random model and processor of every family, and what stock transformers wants to be given for each."""

from importlib.util import find_spec
from pathlib import Path

import gemma3_family
import internvl_family
import pytest
import torch
import trl
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from rge.model.families import FAMILIES, normalised, patch_grid
from rge.objective import Objective
from rge.rollout.writer import Rollout
from rge.small_models import build as scratch
from rge.small_models import efficientnet
from rge.step.training_step import TrainingStep

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
SCRATCH = {
    "qwen2_5_vl": VISION,
    "qwen2_5_vl_efficientnet": {"model_type": "efficientnet_lite0", "spatial_merge_size": 1},
}
"""Towers of the families that `rge.small_models.build` makes."""

TEXTS = [
    "Find the picture that answers the question.",
    "What do you need to open this?",
    "This is a padlock; a locked padlock is opened with a key.",
    "What will this egg turn into over time?",
    "This is an egg; a chick hatches from it.",
]
PLUGINS = {"internvl": internvl_family.tiny, "gemma3": gemma3_family.tiny}
"""Families that are none of ours: each is registered by its module, as a user's plugin would be."""

TILE = 40
MIN_PIXELS, MAX_PIXELS = 28 * 28, 84 * 84
LIVELY_SEED = {"qwen2_5_vl": 0, "gemma3": 0, "qwen2_5_vl_efficientnet": 6}
"""Seeds, 1 for the rest, with which a model writes rationales of many lengths; see `enliven` of shared.py."""

PHOTOS = efficientnet.EfficientNetQwenConfig.model_type
HAS_TOWER = bool(find_spec(efficientnet.NETWORK) and find_spec(efficientnet.WEIGHTS))
needs_tower = pytest.mark.skipif(
    not HAS_TOWER, reason="the vision tower of recipes/photos.yaml is not installed (extra photos)"
)
INSTALLED = [name for name in sorted(FAMILIES) if name != PHOTOS or HAS_TOWER]

every_family = pytest.mark.parametrize(
    "lively_path",
    [pytest.param(name, marks=needs_tower if name == PHOTOS else ()) for name in sorted(FAMILIES)],
    indirect=True,
)
"""Runs a test that uses `lively`, `lively64` or `lively_path` once for each family instead of with Qwen2.5-VL."""


def template(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def build(family: str, out: Path, seed: int = 0, head_size: int = 16) -> None:
    """Write a randomly initialised model of a family and its processor.

    Args:
        family: a `model_type`.
        out: directory to write.
        seed: of the weights.
        head_size: of each of the two heads; vLLM's CPU kernels start at 32.
    """
    text = {**TEXT, "hidden_size": 2 * head_size}
    if family in SCRATCH:
        scratch.build(
            out,
            TEXTS,
            seed=seed,
            vocab_size=320,
            text=text,
            vision=SCRATCH[family],
            min_pixels=MIN_PIXELS,
            max_pixels=MAX_PIXELS,
        )
        return
    tokenizer = scratch.train_tokenizer(TEXTS, 320)
    if family in PLUGINS:
        model, processor = PLUGINS[family](tokenizer, text, 384)
    else:
        model, processor = globals()[f"_{family}"](tokenizer, text)
    torch.manual_seed(seed)
    model().save_pretrained(out)
    processor.save_pretrained(out)


def _qwen_config(tokenizer, text: dict, rope: dict) -> dict:
    id_of = tokenizer.convert_tokens_to_ids
    return {
        "text_config": {
            **text,
            "vocab_size": _rows(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **rope},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "tie_word_embeddings": True,
    }


def _qwen2_vl(tokenizer, text):
    eighth = text["hidden_size"] // 32
    config = Qwen2VLConfig(
        **_qwen_config(tokenizer, text, {"mrope_section": [2 * eighth, 3 * eighth, 3 * eighth]}),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": text["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
        },
    )
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=template("qwen2_5_vl"),
    )
    return lambda: Qwen2VLForConditionalGeneration(config), processor


def _qwen3_vl(tokenizer, text):
    """With DeepStack into two of three text layers, and interleaved rotary axes."""
    eighth = text["hidden_size"] // 32
    sections = [4 * eighth, 2 * eighth, 2 * eighth]
    config = _qwen_config(tokenizer, text, {"mrope_section": sections, "mrope_interleaved": True})
    # What is added after the last layer is read by nobody; with three, both additions matter.
    config["text_config"] |= {"head_dim": text["hidden_size"] // 2, "num_hidden_layers": 3}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=16),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(image_mean=OPENAI_CLIP_MEAN, image_std=OPENAI_CLIP_STD),
        chat_template=template("qwen3_vl"),
    )
    return lambda: Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config, vision_config=vision)), processor


def _idefics3(tokenizer, text):
    """Tiles of 40 x 40 pixels and four tokens; a picture is at most two tiles wide and high."""
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<fake_token_around_image>",
                "<image>",
                "<end_of_utterance>",
                "<global-img>",
                *places,
            ],
            "eos_token": "<end_of_utterance>",
        }
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=template("smolvlm"),
    )
    config = Idefics3Config(
        text_config={
            **text,
            "model_type": "llama",
            "vocab_size": _rows(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 10,
        },
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=True,
    )
    return lambda: Idefics3ForConditionalGeneration(config), processor


def _rows(tokenizer) -> int:
    return -(-(len(tokenizer) + 1) // 64) * 64


def train(embedder, batch, rationales, steps, lr, micro_batch_size=3, look=lambda: None) -> list[float]:
    """Losses of some AdamW steps on one batch; `look` is called while there are gradients."""
    optimizer = torch.optim.AdamW([p for p in embedder.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        report = TrainingStep(embedder, embedder, Objective(0.5, 0.5, 0.1), micro_batch_size)(
            batch, Rollout(rationales)
        )
        look()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(report["loss"])
    return losses


def stock_inputs(embedder, prompts, input_ids, attention_mask) -> dict:
    """Inputs of an ordinary forward or `generate` for padded rows, pictures included."""
    model, image_processor = embedder.model, embedder.processor.image_processor
    kind = model.config.model_type
    found = {"input_ids": input_ids, "attention_mask": attention_mask}
    values = [
        None if prompt.pixels is None else normalised(image_processor, prompt.pixels, prompt.image_grid)
        for prompt in prompts
    ]
    seen = [value for value in values if value is not None]
    if kind == "gemma3":
        found["token_type_ids"] = (input_ids == model.config.image_token_id).long()
    if kind in PLUGINS:
        if seen:
            found["pixel_values"] = torch.cat(seen).to(model.dtype)
        return found
    if kind == "idefics3":
        if seen:
            # Rows of as many tiles as the longest has; what is missing is zero, and dropped by the model.
            most = max(map(len, seen))
            found["pixel_values"] = torch.zeros(len(prompts), most, *seen[0].shape[1:], dtype=model.dtype)
            for row, value in enumerate(values):
                if value is not None:
                    found["pixel_values"][row, : len(value)] = value
        return found
    if seen:
        found["mm_token_type_ids"] = (input_ids == model.config.image_token_id).long()
        found["mm_token_type_ids"] += 2 * (input_ids == model.config.video_token_id)
        grids = torch.cat([prompt.image_grid for prompt in prompts if prompt.image_grid is not None])
        patches = patch_grid(image_processor, grids)
        parts = torch.cat(seen).split(patches.prod(dim=1).tolist())
        is_clip = grids[:, 0] > 1
        for names, of_kind in (
            (("pixel_values", "image_grid_thw"), ~is_clip),
            (("pixel_values_videos", "video_grid_thw"), is_clip),
        ):
            if of_kind.any():
                found[names[0]] = torch.cat([parts[place] for place in of_kind.nonzero().flatten().tolist()])
                found[names[1]] = patches[of_kind]
        if kind == "qwen2_5_vl" and is_clip.any():
            interval_G = torch.cat(
                [
                    torch.zeros(len(prompt.image_grid)) if prompt.interval_G is None else prompt.interval_G
                    for prompt in prompts
                    if prompt.image_grid is not None
                ]
            )
            found["second_per_grid_ts"] = interval_G[is_clip] / model.config.vision_config.tokens_per_second
    return found


def counted_positions(model, attention_mask):
    """Positions of rows without pictures: from each row's first token, whatever the padding."""
    counted = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return counted if model.config.model_type in {"idefics3", *PLUGINS} else counted.expand(3, -1, -1)
