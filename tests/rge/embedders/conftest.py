"""Tiny random models of the families that adapters load: the real architecture and processor, made offline."""

import pytest
import torch
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

import rge  # noqa: F401  # makes torchvision importable before transformers is
from rge.small_models import build as scratch

TEXTS = [
    "Find the picture that answers the question.",
    "This is a padlock; it is opened with a key.",
    "an egg",
]
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}  # fmt: skip


def lively(model, seed=0):
    """Weights wide enough that states differ; Hugging Face's own are nearly all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and parameter.ndim == 1 else 0.3 * noise)
    return model


def tokenizer(*more):
    made = scratch.train_tokenizer(TEXTS, 300)
    made.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in more], special_tokens=True
    )
    return made


def ids(made):
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: made.convert_tokens_to_ids(token) for key, token in names.items()}


def rows(made):
    return {"vocab_size": -(-(len(made) + 1) // 64) * 64, "pad_token_id": made.pad_token_id}


def qwen2_processor(made):
    given = scratch.make_processor(made, min_pixels=28 * 28, max_pixels=56 * 84, vision={}, text={})
    return Qwen2VLProcessor(
        image_processor=given.image_processor, tokenizer=made, video_processor=given.video_processor,
        chat_template=given.chat_template,
    )  # fmt: skip


def write_qwen2(path, *more):
    made = tokenizer(*more)
    config = Qwen2VLConfig(
        text_config=TEXT | rows(made) | {"model_type": "qwen2_vl_text"},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14},
        tie_word_embeddings=True, **ids(made),
    )  # fmt: skip
    model = lively(Qwen2VLForConditionalGeneration(config))
    with torch.no_grad():  # without a push, no random rationale would end before the cap
        for token in more[:1]:
            model.get_input_embeddings().weight[made.convert_tokens_to_ids(token)] *= 2.5
    model.save_pretrained(path)
    qwen2_processor(made).save_pretrained(path)
    assert AutoConfig.from_pretrained(path).model_type == "qwen2_vl"
    return path


@pytest.fixture(scope="session")
def qwen2_path(tmp_path_factory):
    return write_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def ume_path(tmp_path_factory):
    return write_qwen2(tmp_path_factory.mktemp("models") / "ume", "<gen_emb>", "<disc_emb>")


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen3"
    made = tokenizer()
    config = Qwen3VLConfig(
        text_config=TEXT | rows(made) | {"head_dim": 16},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
            "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True, **ids(made),
    )  # fmt: skip
    lively(Qwen3VLForConditionalGeneration(config)).save_pretrained(path)
    given = scratch.make_processor(made, min_pixels=28 * 28, max_pixels=56 * 84, vision={}, text={})
    Qwen3VLProcessor(
        image_processor=given.image_processor, tokenizer=made, video_processor=given.video_processor,
        chat_template=given.chat_template,
    ).save_pretrained(path)  # fmt: skip
    return path


def ended(made):
    """As CLIP's tokenizer does: an end token, padding on the right."""
    made._tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", made.eos_token_id)]
    )
    made.padding_side = "right"
    return made


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def clip_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "clip"
    made = ended(tokenizer())
    config = CLIPConfig(
        text_config=TOWER | rows(made) | {"max_position_embeddings": 24, "eos_token_id": made.eos_token_id},
        vision_config=TOWER | {"image_size": 28, "patch_size": 14}, projection_dim=16,
    )  # fmt: skip
    lively(CLIPModel(config)).save_pretrained(path)
    made.save_pretrained(path)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="session")
def siglip_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "siglip"
    made = ended(tokenizer())
    config = SiglipConfig(
        text_config=TOWER | rows(made) | {"max_position_embeddings": 24},
        vision_config=TOWER | {"image_size": 28, "patch_size": 14},
    )
    lively(SiglipModel(config)).save_pretrained(path)
    made.save_pretrained(path)
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(path)
    return path
