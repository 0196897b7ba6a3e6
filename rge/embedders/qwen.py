"""Qwen's vision-language models as last-token embedders: plain ones, and VLM2Vec.

Plain Qwen2-VL, Qwen2.5-VL and Qwen3-VL use their chat template, and the state at its last token (the end of the assistant
header) is the embedding. No embedding prompt is published for them, so we use RGE's. VLM2Vec
(github.com/TIGER-AI-Lab/VLM2Vec) was trained without a chat template: one placeholder per picture, a newline, the text. Its
code detects pictures by a start token that this prompt lacks, so its tokens have plain consecutive positions.

Shape suffixes: B = rows, T = tokens, D = hidden size.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.common.errors import UserError
from rge.common.prompt_profiles import PROFILES, Profile
from rge.common.schema import Item
from rge.content.visuals import ClipSize
from rge.embedders.common import VLM2VEC, DirectEncoder, check_family, direct, loading, whole
from rge.embedders.registry import Facts
from rge.model.adapter_files import PREFIX, merge_saved
from rge.model.families import normalised
from rge.model.prompts import Layout, Prompt, PromptBuilder

MAX_PROMPT_TOKENS = 8192


class RawBuilder(PromptBuilder):
    """VLM2Vec's prompts: no chat template, no tokens around pictures."""

    def _render(self, layout: Layout) -> str:
        rendered = ""
        for previous, piece in zip(("", *layout), layout, strict=False):
            assert not isinstance(piece, ClipSize), "`readable` refuses clips"
            is_new_line = bool(rendered) and (piece is None) != (previous is None)
            rendered += "\n" * is_new_line + (self.processor.image_token if piece is None else piece)
        return rendered


PROMPTING: dict[str, tuple[type[PromptBuilder], Profile, bool]] = {
    "qwen-vl": (PromptBuilder, PROFILES["rge"], False),
    "vlm2vec": (RawBuilder, VLM2VEC, True),
}
"""Adapter -> prompt builder, wording, and whether picture tokens have consecutive instead of multimodal positions."""


class LastToken(DirectEncoder[Prompt]):
    """Embeds with the state at a prompt's last token; prompts follow `PROMPTING`."""

    counts_tokens = True

    def __init__(self, facts: Facts, adapter: str, device: str, dtype: str):
        model, processor = load_qwen(facts, adapter, dtype)
        builder, wording, self.flat = PROMPTING[adapter]
        size = processor.image_processor.size
        settings = {
            "pooling": "last token",
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "pixels": {"min": size["shortest_edge"], "max": size["longest_edge"]},
        }
        super().__init__(facts, adapter, wording, dtype, settings)
        self.model: Any = model.to(device).eval()  # Any: the library's types do not declare the inner model
        self.builder = builder(processor, wording, MAX_PROMPT_TOKENS, emb_token=None)
        self.pad_id = processor.tokenizer.pad_token_id

    def reword(self, profile: str) -> None:
        """Use a prompt profile, for prompts too."""
        super().reword(profile)
        self.builder = copy.copy(self.builder)
        self.builder.profile = self.wording

    def prepare(self, item: Item, side: str) -> tuple[int, Prompt]:
        """The prompt and its length."""
        prompt = self.builder.build(item, side)
        return len(prompt), prompt

    def embed(self, batch: Sequence[Prompt]) -> Tensor:
        """States (B, D); right padding does not affect them under causal attention."""
        device = self.model.get_input_embeddings().weight.device
        lengths = torch.tensor([len(prompt) for prompt in batch])
        ids_BT = _padded([prompt.input_ids for prompt in batch], self.pad_id)
        mask_BT = torch.arange(ids_BT.shape[1])[None] < lengths[:, None]
        inputs: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask_BT.long()}
        inputs["mm_token_type_ids"] = _padded([prompt.type_ids for prompt in batch], 0)
        with_pictures = [prompt for prompt in batch if prompt.pixels is not None]
        if with_pictures:
            pixels = torch.cat([prompt.pixels for prompt in with_pictures])  # type: ignore[misc]
            image_processor = self.builder.processor.image_processor
            inputs["pixel_values"] = normalised(image_processor, pixels.to(device)).to(self.model.dtype)
            inputs["image_grid_thw"] = torch.cat([prompt.image_grid for prompt in with_pictures])  # type: ignore[misc]
        if self.flat:
            inputs["position_ids"] = torch.arange(ids_BT.shape[1]).expand(3, *ids_BT.shape)
        inputs = {key: value.to(device) for key, value in inputs.items()}
        hidden_BTD = self.model.model(**inputs, use_cache=False).last_hidden_state
        return hidden_BTD[torch.arange(len(batch), device=device), (lengths - 1).to(device)]


@direct
def load_plain(facts: Facts, device: str, dtype: str) -> LastToken:
    """A plain Qwen model with its chat template and RGE's prompts."""
    return LastToken(facts, "qwen-vl", device, dtype)


@direct
def load_vlm2vec(facts: Facts, device: str, dtype: str) -> LastToken:
    """VLM2Vec on Qwen2-VL or Qwen2.5-VL: a full model, or a LoRA that names its base."""
    return LastToken(facts, "vlm2vec", device, dtype)


def load_qwen(facts: Facts, adapter: str, dtype: str) -> tuple[Any, Any]:
    """Load a Qwen model and its processor; a LoRA is merged into its base."""
    check_family(facts, adapter, ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"))
    is_lora = "config.json" not in facts.files
    base = facts.base if is_lora else facts
    if base is None:
        raise UserError("it does not name the LoRA's base model", f"{facts.path}/adapter_config.json")
    with loading(facts):
        has_processor = {"preprocessor_config.json", "processor_config.json"} & facts.files
        complete = has_processor and "tokenizer_config.json" in facts.files
        processor = AutoProcessor.from_pretrained(facts.path if complete else base.path)
        model = whole(base, AutoModelForImageTextToText.from_pretrained, dtype)
    return (merge_saved(model, facts.path, _name_now) if is_lora else model), processor


def _name_now(name: str) -> str:
    """A LoRA weight's current name; transformers before 4.52 used different module names."""
    name = re.sub(rf"^{re.escape(PREFIX)}visual\.", f"{PREFIX}model.visual.", name)
    return re.sub(
        rf"^{re.escape(PREFIX)}model\.(layers|norm|embed_tokens)\b", rf"{PREFIX}model.language_model.\1", name
    )


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
