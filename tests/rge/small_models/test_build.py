"""The backbone from nothing: Qwen's own tokenizer, processor and layout, smaller."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.small_models import build as scratch

TEXTS = ["Which key opens this padlock?", "It's 3 o'clock; l'œuf éclot.", "鸡蛋 孵化 🐣"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return scratch.train_tokenizer(TEXTS, 300)


def test_special_tokens_come_in_qwens_order_after_the_learned_ones(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(list(scratch.SPECIAL_TOKENS))
    assert ids == list(range(ids[0], ids[0] + len(scratch.SPECIAL_TOKENS)))
    assert ids[-1] == len(tokenizer) - 1
    assert scratch.SPECIAL_TOKENS[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    # 151643 learned tokens, then these: as on Qwen2.5-VL, <|image_pad|> is the thirteenth.
    assert scratch.SPECIAL_TOKENS.index("<|image_pad|>") == 151655 - 151643
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == (
        "<|im_end|>",
        "<|endoftext|>",
        "left",
    )


@pytest.mark.parametrize("text", [*TEXTS[:3], "never seen: Ω≈ç√ \t\n x", "", " "])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_texts_are_split_as_qwen_splits_them(tokenizer):
    """Digits one by one, contractions and newlines apart, blanks with the word that follows."""
    pieces = [
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 30 eggs.\n\nx")
    ]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == [
        "It", "'s", " ", "3", "0", " eggs", ".\n\n", "x",
    ]  # fmt: skip


def test_the_vocabulary_is_learned_and_repeats(tokenizer):
    assert len(tokenizer("padlock").input_ids) < len("padlock")
    again = scratch.train_tokenizer(TEXTS, 300)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) <= 300 + len(scratch.SPECIAL_TOKENS)


def test_a_backbone_repeats_with_its_seed(tiny_path, tmp_path, sizes):
    options = {"vocab_size": 300, "min_pixels": 784, "max_pixels": 7056, **sizes}
    before = torch.get_rng_state()
    weights = {}
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        scratch.build(tmp_path / name, TEXTS, seed=seed, **options)
        weights[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert weights["one"] == weights["two"] != weights["other"]
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's randomness is touched


@pytest.fixture
def sizes(tiny_path):
    config = AutoModelForImageTextToText.from_pretrained(tiny_path).config
    text, vision = config.text_config, config.vision_config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    seen = (
        "depth",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "patch_size",
        "window_size",
        "fullatt_block_indexes",
    )
    return {
        "text": {name: getattr(text, name) for name in names},
        "vision": {name: getattr(vision, name) for name in seen},
    }


def test_the_layout_is_qwens(tiny_path):
    model = AutoModelForImageTextToText.from_pretrained(tiny_path)
    config, text = model.config, model.config.text_config
    tokenizer = AutoProcessor.from_pretrained(tiny_path).tokenizer
    sections = text.rope_parameters["mrope_section"]
    assert sum(sections) == text.hidden_size // text.num_attention_heads // 2
    assert sections[1] >= sections[0]
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows % 64 == 0
    assert rows > len(tokenizer)  # room for <emb>
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert config.vision_start_token_id == tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert config.vision_config.out_hidden_size == text.hidden_size


def test_the_real_head_dimension_gives_qwens_sections():
    """16, 24, 24 of 64, the published split, for the published head dimension of 128."""
    tokenizer = scratch.train_tokenizer(TEXTS, 300)
    text = {
        "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 8, "num_heads": 2}
    model = scratch.make_model(tokenizer, text, vision)
    assert model.config.text_config.rope_parameters["mrope_section"] == [16, 24, 24]
