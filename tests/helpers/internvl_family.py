"""InternVL as a plugin would bring it: the family, and a tiny random model of it for the tests."""

from typing import Any

from torch import Tensor
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
)
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

from rge.model.families import Tiles, register_family
from rge.model.hub_model import HubModel

TILE = 28
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class InternVL(Tiles):
    """A picture is cut into as many tiles as suit its shape, and shown once more as a whole if there are several."""

    def vision(self, model: HubModel) -> list[HubModel]:
        """InternViT and its projector."""
        return [model.model.vision_tower, model.model.multi_modal_projector]

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """No more tiles than `max_pixels` fill."""
        if max_pixels is not None:
            size = processor.image_processor.size
            processor.image_processor.max_patches = max(max_pixels // (size["height"] * size["width"]), 1)

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """A tile between its two tokens."""
        placeholders = [config.image_token_id] * config.image_seq_length
        return [tokenizer.start_image_token_id, *placeholders, tokenizer.end_image_token_id]

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, D)."""
        return model.model.get_image_features(pixel_values).pooler_output.flatten(0, 1)


register_family("internvl", InternVL())


def tiny(tokenizer, text: dict[str, Any], num_rows: int):
    """Tiles of four placeholders each, up to nine of them and the whole; a Qwen2 below."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "</img>", "<IMG_CONTEXT>"]})
    names = {
        "start_image": "<img>",
        "end_image": "</img>",
        "context_image": "<IMG_CONTEXT>",
        "video": "<|video_pad|>",
    }
    tokenizer._set_model_specific_special_tokens({f"{name}_token": token for name, token in names.items()})
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size={"height": TILE, "width": TILE}, crop_to_patches=True, max_patches=9
        ),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size={"height": TILE, "width": TILE}),
        image_seq_length=4,
        chat_template=CHAT,
    )
    config = InternVLConfig(
        text_config={
            **text,
            "model_type": "qwen2",
            "vocab_size": num_rows,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [TILE, TILE],
            "patch_size": [7, 7],
        },
        image_token_id=processor.image_token_id,
        image_seq_length=4,
        tie_word_embeddings=True,
    )
    return lambda: InternVLForConditionalGeneration(config), processor
