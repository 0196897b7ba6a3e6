"""SmolLM2 as the text model of a built backbone; what needs its weights runs where the packages are installed."""

import copy
import dataclasses
import importlib.util
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from family_models import VISION
from faults import error_about
from recorded import settings_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rge import train
from rge.checkpoints.export import export
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.adapter_files import WEIGHTS, Base
from rge.model.adapters import add_adapters
from rge.model.backbone import add_tokens, load_backbone, name_tokens, skeleton
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel, normalise
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import generate
from rge.small_models import build, efficientnet, smollm2
from rge.small_models.__main__ import read_options

TEXT = {"model_type": "smollm2"}
NEEDED = "gguf", smollm2.PACKAGE, efficientnet.NETWORK, efficientnet.WEIGHTS
INSTALLED = all(importlib.util.find_spec(name) for name in NEEDED)
needs_weights = pytest.mark.skipif(not INSTALLED, reason=smollm2.INSTALL)
QUESTION = "What is used together with a hammer? Answer in 12 words, or 345."
FACTS = [
    "A hammer drives nails into wood.",
    "Nails are driven into planks with a hammer.",
    "A padlock is opened with its key.",
    "You turn a key to open a lock.",
    "Bread is cut with a bread knife.",
    "A knife slices a loaf of bread.",
    "Rain falls from dark clouds.",
    "An umbrella keeps the rain off.",
    "A hen sits on her eggs until they hatch.",
    "A chick comes out of an egg.",
    "A train runs on rails from station to station.",
    "Passengers wait at the station for a train.",
]


def test_other_sizes_are_refused():
    with error_about(UserError, "text.hidden_size"):
        smollm2.is_smollm2(TEXT | {"hidden_size": 64})
    assert not smollm2.is_smollm2({"hidden_size": 64})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with error_about(UserError, "package"):
        smollm2.folder()


def test_another_file_is_refused_with_both_hashes(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with error_about(UserError, tmp_path / smollm2.FILE, "missing"):
        smollm2.folder()
    (tmp_path / smollm2.FILE).write_bytes(b"GGUF")
    with error_about(UserError, tmp_path / smollm2.FILE, "other"):
        smollm2.folder()


def test_its_size_is_known_without_the_package():
    rows = build.num_rows(build.vocabulary(0, TEXT))
    ids = dict.fromkeys(build.SPECIAL_TOKENS, 0)
    model = skeleton(build.make_config(rows, ids, TEXT, VISION))
    words = model.get_input_embeddings()
    assert (
        words.num_embeddings == 49_216
    )  # 49,152 of SmolLM2, eleven of Qwen's special tokens, <emb>, padding
    layers = sum(weight.numel() for weight in model.model.language_model.layers.parameters())
    biases = 30 * (576 + 2 * 192)  # Qwen2.5-VL's, which Llama has not
    words_and_norm = 49_152 * 576 + 576
    assert layers - biases + words_and_norm == 134_515_008  # what SmolLM2-135M has


def test_a_token_given_to_one_tokenizer_is_not_in_the_next(monkeypatch):
    """The pre-flight names ``<emb>``; a backbone that had it already would be given no row for it."""
    read_once = build.train_tokenizer(FACTS, 300)
    monkeypatch.setattr(smollm2, "_tokenizer", lambda: read_once)
    first = build.make_tokenizer([], 0, TEXT)
    name_tokens(first, ["<emb>", "<extra>"])
    assert "<emb>" in first.get_vocab()
    assert not {"<emb>", "<extra>"} & build.make_tokenizer([], 0, TEXT).get_vocab().keys()


@pytest.fixture(scope="module")
def theirs():
    """The package's model as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2.folder(), gguf_file=smollm2.FILE, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    """The recipe's backbone before naming."""
    out = tmp_path_factory.mktemp("smol") / "base"
    sizes = read_options(["recipe=smol"])
    with pytest.MonkeyPatch.context() as patch:
        # Undoing the quantization takes longer than all of these tests.
        patch.setattr(smollm2.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: theirs)
        build.build(
            out, [], seed=0, vocab_size=sizes.vocab_size, text=sizes.text, vision=sizes.vision,
            min_pixels=sizes.min_pixels, max_pixels=sizes.max_pixels,
        )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def embedder(folder):
    return EmbeddingModel(load_backbone(folder, dtype="float32", add_emb=True)).eval()


@pytest.fixture(scope="module")
def prompts(embedder):
    builder = PromptBuilder(embedder.processor)
    return [
        builder.build(Item(str(number), content_of(text)), "query")
        for number, text in enumerate([QUESTION, *FACTS])
    ]


@needs_weights
@pytest.mark.slow
def test_it_is_the_package_s_model(embedder, prompts, theirs):
    """Template, token ids, states, logits, and what is written: as transformers' Llama has them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder(), gguf_file=smollm2.FILE)
    talk = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert embedder.processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == text
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert torch.equal(embedder.processor.tokenizer(text, return_tensors="pt").input_ids, ids)
    with torch.no_grad():
        mine = embedder.model(input_ids=ids, output_hidden_states=True)
        stock = theirs(ids, output_hidden_states=True)
    torch.testing.assert_close(mine.hidden_states[-1], stock.hidden_states[-1], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(mine.logits[..., :49_152], stock.logits, atol=1e-4, rtol=1e-5)
    assert mine.logits[0, -1].argmax() < 49_152  # no row that was added is likelier than a real token


@needs_weights
@pytest.mark.slow
def test_greedy_rationales_are_words(embedder, prompts, theirs):
    """What the backbone writes before any training: its source's own words, again and in any batch."""
    found = [one.ids for one in generate(embedder, prompts[:6], max_new_tokens=10, batch_size=8)]
    for prompt, ids in zip(prompts[:2], found[:2], strict=True):
        own = theirs.generate(prompt.input_ids[None], do_sample=False, max_new_tokens=10, pad_token_id=0)
        assert list(ids) == own[0, len(prompt) :].tolist()[: len(ids)]
    (again,) = generate(embedder, prompts[:1], max_new_tokens=10, batch_size=1)
    assert again.ids == found[0]
    words = re.findall(r"[^\s]+", " ".join(embedder.processor.tokenizer.decode(ids) for ids in found))
    assert len(words) > 4 * len(found)
    assert sum(bool(re.fullmatch(r"[A-Za-z'’-]+[.,:;!?]?", word)) for word in words) > 0.8 * len(words)


@needs_weights
@pytest.mark.slow
def test_states_are_equal_across_padding_and_batch_at_real_norms(embedder, prompts, picture):
    prompts, emb = [*prompts[:6], *pictured(embedder, picture)], embedder.emb_id
    branches = [
        [Branch([*prompt.input_ids[3 : 3 + row].tolist(), emb], read_state=True)]
        for row, prompt in enumerate(prompts)
    ]
    states = together(embedder, prompts, branches)
    alone = torch.cat(
        [together(embedder, [one], [branch]) for one, branch in zip(prompts, branches, strict=True)]
    )
    assert (states - alone).norm(dim=1).max() < 1e-5  # of 1
    assert (together(embedder, prompts[::-1], branches[::-1]).flip(0) - alone).norm(dim=1).max() < 1e-5


def pictured(embedder, picture):
    """Two prompts that a picture stands before."""
    builder = PromptBuilder(embedder.processor)
    return [
        builder.build(Item(fact, content_of(fact, [picture(128, 128, number)])), "query")
        for number, fact in enumerate(FACTS[:2])
    ]


def together(embedder, prompts, branches):
    with torch.no_grad():
        return embedder(embedder.pack(prompts, branches))[0].state_ND


@needs_weights
@pytest.mark.slow
def test_bfloat16_ranks_texts_nearly_as_float32_does(folder, embedder, prompts):
    """Each fact among all by its state at ``<emb>``, itself left out.

    How far bfloat16 moves a state is the CPU's: cosines above 0.9998 where it has instructions for it, 0.998 where not, for
    transformers' own pass too. Untrained states are near one another, so what is chosen instead must be nearly as near.
    """
    branches = [[Branch([embedder.emb_id], read_state=True)]] * len(FACTS)
    half = EmbeddingModel(load_backbone(folder, dtype="bfloat16", add_emb=True)).eval()
    states, stock = [], []
    for model in (embedder, half):
        states.append(normalise(together(model, prompts[1:], branches)))
        ids = [torch.cat([prompt.input_ids, torch.tensor([model.emb_id])]) for prompt in prompts[1:]]
        with torch.no_grad():
            passes = [model.model(input_ids=one[None], output_hidden_states=True) for one in ids]
        stock.append(normalise(torch.cat([one.hidden_states[-1][:, -1] for one in passes])))
    moved, moved_by_stock = (1 - (whole * half).sum(dim=1).min() for whole, half in (states, stock))
    assert moved < 0.005
    assert moved < 1.5 * moved_by_stock
    near, near_in_half = (each @ each.T for each in states)
    spread = near.max() - near.min()
    best, chosen = (each.fill_diagonal_(-1).argmax(dim=1, keepdim=True) for each in (near, near_in_half))
    assert (near.gather(1, best) - near.gather(1, chosen)).max() < 0.1 * spread


@needs_weights
@pytest.mark.slow
def test_emb_and_special_tokens_of_a_real_tokenizer(folder, embedder):
    tokenizer, model = embedder.processor.tokenizer, embedder.model
    assert embedder.emb_id == 49_163 < model.get_input_embeddings().num_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    assert tokenizer("<emb>", add_special_tokens=False).input_ids == [embedder.emb_id]
    rows = model.get_input_embeddings().weight
    assert torch.equal(rows[embedder.emb_id], rows[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert {tokenizer.convert_tokens_to_ids(token) for token in build.SPECIAL_TOKENS} <= set(range(49_163))
    assert tokenizer.decode(tokenizer(FACTS[0]).input_ids) == FACTS[0]


@needs_weights
@pytest.mark.slow
def test_heads_stay_tied_where_the_matrix_grows(folder, tmp_path):
    """64 further tokens do not fit into the rows that are free; training moves one matrix, and a checkpoint has one."""
    backbone = load_backbone(folder, dtype="float32", add_emb=True)
    model, tokenizer = backbone.model, backbone.processor.tokenizer
    add_tokens(model, tokenizer, [f"<extra_{number}>" for number in range(64)], tokenizer.eos_token_id)
    words = model.get_input_embeddings()
    assert words.num_embeddings >= 49_163 + 65
    assert model.get_output_embeddings().weight is words.weight
    model.model.language_model.layers = model.model.language_model.layers[:1]
    ids = torch.tensor([[5, 6, backbone.emb_id]])
    model(input_ids=ids).logits[0, -1, backbone.emb_id].backward()
    with torch.no_grad():
        words.weight -= 0.1 * words.weight.grad
    assert words.weight.grad[backbone.emb_id].norm() > 0
    model.config.text_config.num_hidden_layers = 1
    model.config.text_config.layer_types = model.config.text_config.layer_types[:1]
    model.save_pretrained(tmp_path)
    backbone.processor.save_pretrained(tmp_path)
    again = load_backbone(tmp_path).model
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert torch.equal(again.get_input_embeddings().weight, words.weight)


@needs_weights
@pytest.mark.slow
def test_adapters_with_the_merger_and_their_real_base_are_the_model(folder, prompts, picture, tmp_path):
    trained = EmbeddingModel(load_backbone(folder, dtype="float32", add_emb=True)).eval()
    lora = LoraConfig(rank=2, alpha=4.0, targets=["q_proj", "down_proj"], modules_to_save=["merger"])
    add_adapters(trained.model, lora, trained.emb_id)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    settings = settings_of(
        emb_id=trained.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip
    base = dataclasses.replace(Base.of(str(folder), None, trained.rows_of_base), path="elsewhere/backbone")
    export(trained, tmp_path / "adapters", settings.but(base=base.as_recorded_in(tmp_path / "adapters")))
    size = sum(path.stat().st_size for path in (tmp_path / "adapters").glob("*.safetensors"))
    assert size < 7e6
    again = Embedder.from_pretrained(tmp_path / "adapters", base=folder)
    prompts = [prompts[0], *pictured(trained, picture)]
    branches = [[Branch([trained.emb_id], read_state=True)]] * 3
    states, expected = (together(one, prompts, branches) for one in (again.model, trained))
    assert (states - expected).norm(dim=1).max() < 1e-4


@needs_weights
@pytest.mark.slow
def test_training_goes_on_bit_for_bit(embedder, tmp_path):
    """Four steps, and two from the state after the second, on the first two layers."""
    config = copy.deepcopy(embedder.model.config)
    config.text_config.num_hidden_layers = 2
    config.text_config.layer_types = config.text_config.layer_types[:2]
    shallow = type(embedder.model)(config)
    shallow.load_state_dict(embedder.model.state_dict(), strict=False)
    shallow.save_pretrained(tmp_path / "base")
    embedder.processor.save_pretrained(tmp_path / "base")
    lines = [
        json.dumps(
            {
                "id": f"r{number}", "group": str(number), "source": "s", "split": "train", "query": {"text": QUESTION},
                "positives": [{"id": f"t{number}", "text": fact, "rationale": fact}],
            }
        )
        + "\n"
        for number, fact in enumerate(FACTS)
    ]  # fmt: skip
    (tmp_path / "records.jsonl").write_text("".join(lines))
    stage = {"batch_size": 2, "lr": 1e-2, "sources": [{"path": str(tmp_path / "records.jsonl")}]}
    recipe = {
        "model": {
            "path": str(tmp_path / "base"),
            "dtype": "float32",
            "min_pixels": 16_384,
            "max_pixels": 16_384,
        }
        | {"lora": {"rank": 2, "modules_to_save": ["merger"]}},
        "data": {"profile": "plain", "num_workers": 0},
        "cold_start": {**stage, "steps": 4},
        "joint": stage,
        "train": {"save_every": 2, "keep_last": 2},
        "export": {"adapters_only": True},
    }
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(recipe))
    words = [f"recipe={tmp_path / 'short.yaml'}", "stage=cold_start"]
    train.main([*words, f"out={tmp_path / 'once'}"])
    shutil.copytree(tmp_path / "once", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/cold_start/final")
    shutil.rmtree(tmp_path / "again/cold_start/state/step_00000004")
    train.main([*words, f"out={tmp_path / 'again'}"])
    once, again = (load_file(tmp_path / run / "cold_start/final" / WEIGHTS) for run in ("once", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(again[name], weight) for name, weight in once.items())
    assert sum(weight.abs().sum() > 0 for name, weight in once.items() if "lora_B" in name) == 14
