"""Gemma3 as a plugin would bring it: the family, and a tiny random model of it for the tests."""

from typing import Any

from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from rge.model.families import Tiles, register_family
from rge.model.hub_model import HubModel

SIDE = 40
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>model\n"
)


class Gemma3(Tiles):
    """Pictures of one size, whose tokens see one another; layers of two kinds, each with its own rotary embedding."""

    whole_pictures = True

    def vision(self, model: HubModel) -> list[HubModel]:
        """SigLIP and its projector."""
        return [model.model.vision_tower, model.model.multi_modal_projector]

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """Every picture has the size that the tower was made for."""

    def num_tiles(self, config: Any, num_pixels: int) -> int:
        """The whole picture."""
        return 1

    def picture_mark(self, processor: Any) -> str:
        """Between empty lines."""
        tokenizer = processor.tokenizer
        return f"\n\n{tokenizer.boi_token}{tokenizer.image_token}{tokenizer.eoi_token}\n\n"

    def placeholder_id(self, processor: Any) -> int:
        """The processor's own is the token in front of a picture."""
        return processor.tokenizer.image_token_id

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """Between its two tokens."""
        placeholders = [config.image_token_id] * config.mm_tokens_per_image
        return [tokenizer.boi_token_id, *placeholders, tokenizer.eoi_token_id]

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, D)."""
        values = pixel_values.to(model.model.vision_tower.dtype)
        return model.model.get_image_features(values).pooler_output.flatten(0, 1)

    def plain_inputs(self, model: Any, *given: Any) -> dict[str, Tensor]:
        """With where pictures are."""
        inputs = super().plain_inputs(model, *given)
        return inputs | {"token_type_ids": (inputs["input_ids"] == model.config.image_token_id).long()}


register_family("gemma3", Gemma3())


def tiny(tokenizer, text: dict[str, Any], num_rows: int):
    """Four placeholders a picture; of three layers, two see eleven tokens only."""
    tokens = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    tokenizer._set_model_specific_special_tokens(tokens)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=CHAT,
    )
    head_size = text["hidden_size"] // text["num_attention_heads"]
    config = Gemma3Config(
        text_config={
            **text,
            "vocab_size": num_rows,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": head_size,
            "query_pre_attn_scalar": head_size,
            "sliding_window": 11,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 10,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        tie_word_embeddings=True,
    )
    return lambda: Gemma3ForConditionalGeneration(config), processor
