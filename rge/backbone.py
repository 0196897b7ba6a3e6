"""Load a vision-language model and its processor, and hide what differs between families.

Everything that knows a model class or a family's conventions is here: loading, the ``<emb>`` row, positions of a
prompt, picture features. The rest of rge sees token ids, positions and hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import logging as transformers_logging

from rge.prompts import EMB_TOKEN, Prompt

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""`model_type` of the supported families: Qwen's vision-language models with multimodal rotary positions."""

PIXELS_PER_PATCH = 4
"""A placeholder stands for 2 x 2 patches; the smallest picture is one placeholder."""


class BackboneError(ValueError):
    """A backbone cannot be used; the message says which and why."""


@dataclass
class Backbone:
    """A model with its processor.

    Attributes:
        model: the Hugging Face model, ``...ForConditionalGeneration``.
        processor: its processor; the tokenizer knows ``<emb>``.
        emb_id: id of ``<emb>``.
        suppressed_ids: ids that a rationale never contains: every special token but ``<emb>``, and the padding rows
            of the embedding matrix, which no token has.
    """

    model: nn.Module
    processor: object
    emb_id: int
    suppressed_ids: list[int]


def load_backbone(
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    add_emb: bool = False,
) -> Backbone:
    """Load a model and its processor from a hub id or a directory.

    Args:
        path: hub id or directory.
        revision: commit or tag on the hub.
        dtype: weights' dtype.
        attn_implementation: attention kernel.
        min_pixels: smallest picture; None keeps the processor's.
        max_pixels: largest picture; None keeps the processor's.
        add_emb: add ``<emb>`` where it is missing (training from a plain model). Without it, its absence is an error.

    Raises:
        BackboneError: nothing to load there, an unsupported family, or no ``<emb>``.
    """
    transformers_logging.disable_progress_bar()  # ours are the bars to watch
    if not Path(path).exists() and (str(path).startswith((".", "/", "~")) or str(path).count("/") != 1):
        raise BackboneError(f"no model can be loaded from {path}: there is no such directory")
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise BackboneError(f"no model can be loaded from {path}: {error}") from error
    if config.model_type not in FAMILIES:
        raise BackboneError(f"{path} is a {config.model_type}; supported families: {', '.join(FAMILIES)}")
    try:
        processor = AutoProcessor.from_pretrained(path, revision=revision)
        model, report = AutoModelForImageTextToText.from_pretrained(
            path,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BackboneError(f"{path} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers fills them with random numbers and a warning.
        raise BackboneError(
            f"{path} lacks {len(missing)} weights, e.g. {missing[0]}: the checkpoint is incomplete"
        )
    size = processor.image_processor.size
    processor.image_processor.size = {
        "shortest_edge": min_pixels or size["shortest_edge"],
        "longest_edge": max_pixels or size["longest_edge"],
    }
    tokenizer = processor.tokenizer
    if add_emb:
        emb_id = add_emb_token(model, tokenizer)
    elif EMB_TOKEN in tokenizer.get_vocab():
        emb_id = tokenizer.convert_tokens_to_ids(EMB_TOKEN)
    else:
        raise BackboneError(
            f"{path} has no {EMB_TOKEN} token, so it is not a reasoning-guided embedder; train one from it with rge/train.py"
        )
    num_rows = model.get_input_embeddings().weight.shape[0]
    special = set(tokenizer.all_special_ids) | set(range(len(tokenizer), num_rows))
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Backbone(model, processor, emb_id, sorted(special - {emb_id}))


def add_emb_token(model: nn.Module, tokenizer) -> int:
    """Give ``<emb>`` an id and a row to start from; a model that has it already is left alone.

    The token takes the first free id (151665 on Qwen2.5-VL). Its row starts as a copy of ``<|im_end|>``'s, a token
    the model already writes where an answer is complete, in the input and, if untied, in the output matrix. The
    matrix is never shrunk to the tokenizer's length: Qwen's has padding rows, and it grows only when they are used up.

    Returns:
        The id of ``<emb>``.
    """
    if EMB_TOKEN in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids(EMB_TOKEN)
    tokenizer.add_tokens([AddedToken(EMB_TOKEN, special=True, normalized=False)], special_tokens=True)
    emb_id = tokenizer.convert_tokens_to_ids(EMB_TOKEN)
    if emb_id >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(emb_id + 1, pad_to_multiple_of=64, mean_resizing=False)
    source = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[emb_id] = module.weight[source]
    return emb_id


def text_model(model: nn.Module) -> nn.Module:
    """The part that maps ids or input embeddings to last-layer states (after the final norm)."""
    return model.model


def prompt_positions(model: nn.Module, prompts: Sequence[Prompt]) -> list[Tensor]:
    """Rotary positions of each prompt's tokens on the time, height and width axes.

    Returns:
        One (3, T) int64 tensor a prompt.
    """
    positions = []
    for prompt in prompts:
        position_31T, _ = model.model.get_rope_index(
            prompt.input_ids[None], prompt.type_ids[None], image_grid_thw=prompt.image_grid
        )
        positions.append(position_31T[:, 0])
    return positions


def picture_features(model: nn.Module, pixel_values: Tensor, image_grid: Tensor) -> Tensor:
    """Run the vision tower.

    Args:
        model: the backbone's model.
        pixel_values: (P, patch dimension) patches of all pictures.
        image_grid: (number of pictures, 3).

    Returns:
        (placeholders, hidden size): one feature a placeholder token, in order.
    """
    return torch.cat(model.model.get_image_features(pixel_values, image_grid, return_dict=True).pooler_output)


def hidden_states(model: nn.Module, *, features: Tensor | None, **inputs) -> Tensor:
    """Last-layer states (B, T, hidden size); `features` replaces the picture placeholders' embeddings."""
    if features is not None:
        # A tuple of one: the model concatenates a list of per-picture tensors.
        inputs["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=(features,))}
    return text_model(model)(**inputs).last_hidden_state


def empty_picture(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The smallest picture there is, all zero: pixel values and grid of one placeholder.

    A batch without pictures gets it behind a mask, so that every rank runs the vision tower in every step. Otherwise
    DDP waits for gradients that never come and ZeRO-2 averages different parameters with one another.
    """
    vision = model.config.vision_config
    patch = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
    dimension = patch * vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size
    return torch.zeros(merge * merge, dimension), torch.tensor([[1, merge, merge]])
