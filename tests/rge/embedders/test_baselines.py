"""Baselines that people compare with: endpoints, code of repositories, query prompts, joined features of CLIP."""

import json
from zlib import crc32

import numpy as np
import pytest
import torch
from eval_fakes import picture, write_set
from faults import error_about
from pdfs import GREEN, RED, page, pdf
from transformers import AutoModel, CLIPImageProcessor, MetaClip2Config, MetaClip2Model

from eval.__main__ import main
from rge.calls.local_server import Answer, LocalServer
from rge.common.errors import UserError
from rge.common.parts import PdfPart, TextPart, VideoPart, content_of
from rge.common.schema import Item
from rge.embedders.common import Prompted
from rge.embedders.registry import Facts, adapters, facts_of, load_model
from rge.embedders.sentence import Sentences

from .conftest import TOWER, ended, lively, rows, tokenizer

TEXT, SHOWN = (
    Item("1", content_of("egg"), instruction="Find it."),
    Item("2", content_of("a key", (picture(1),))),
)
ITEMS = [TEXT, SHOWN, Item("3", content_of(None, (picture(2),))), Item("4", content_of("the padlock"))]


def unit(vector):
    return vector / np.linalg.norm(vector)


def embed(encoder, *items, side="query"):
    return encoder.encode(items, side=side, mode="direct", batch_size=4).embeddings


class Served:
    """An embeddings endpoint whose vectors tell what it was sent; ``change`` edits its entries."""

    def __init__(self):
        self.bodies, self.statuses, self.change, self.salt = [], [], lambda entries: entries, 0.0

    async def __call__(self, path, body):
        assert path.endswith("/embeddings")
        self.bodies.append(body)
        if self.statuses:
            return Answer(
                {"error": {"message": "later"}}, self.statuses.pop(), headers={"retry-after": "0.01"}
            )
        if "input" in body:
            vectors = [[1.0, len(text), 0.0] for text in body["input"]]
        else:
            parts = body["messages"][0]["content"]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            vectors = [
                [2.0, len("".join(texts)), len(parts) - len(texts) + self.salt * crc32(str(parts).encode())]
            ]
        entries = [{"index": row, "embedding": vector} for row, vector in enumerate(vectors)]
        return Answer({"data": self.change(entries[::-1])})


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr("rge.embedders.endpoint.backoff", lambda *_: 0.0)
    handler = Served()
    with LocalServer(handler) as server:
        handler.url = server.url
        yield handler


def test_an_endpoint_embeds_texts_in_lists_and_pictures_as_messages(served):
    served.statuses = [429, 503]
    encoder = load_model("some-model", endpoint=served.url)
    found = embed(encoder, *ITEMS)
    expected = [[1, 3, 0], [2, 5, 1], [2, 0, 1], [1, 11, 0]]
    np.testing.assert_allclose(found, [unit(np.array(one)) for one in expected], rtol=1e-6)
    bodies = served.bodies[-3:]
    assert sorted(map(len, (body.get("input", []) for body in bodies))) == [0, 0, 2]
    assert {body["model"] for body in bodies} == {"some-model"}
    urls = [
        part["image_url"]["url"]
        for body in bodies
        for message in body.get("messages", [])
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert [url.partition(",")[0] for url in urls] == ["data:image/png;base64"] * 2
    assert encoder.checkpoint_hash != load_model("other", endpoint=served.url).checkpoint_hash


def test_an_endpoint_is_sent_parts_in_their_order_and_pages_as_pictures(served):
    source = pdf([page("kettle", RED), page("anchor", GREEN)])
    content = (TextPart("before"), PdfPart(source, (2,)), TextPart("after"))
    embed(load_model("some-model", endpoint=served.url), Item("x", content))
    [message] = served.bodies[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text"]
    assert [part.get("text") for part in message["content"]] == ["before", None, "after"]
    with pytest.raises(UserError):
        embed(load_model("some-model", endpoint=served.url), Item("x", (VideoPart("x.mp4"),)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entries: entries[:1], "1 embeddings for 2"),
        (lambda entries: [entries[0], entries[0]], "2 embeddings for 2"),
        (lambda entries: [{**one, "embedding": [float("nan"), 1.0]} for one in entries], "not finite"),
        (lambda entries: [{**one, "embedding": "AAAA"} for one in entries], "2 of 2"),
        (
            lambda entries: [{**one, "embedding": [1.0] * (2 + one["index"])} for one in entries],
            r"\[2, 3\] components",
        ),
    ],
)
def test_an_endpoint_that_answers_something_else_is_an_error(served, change, why):
    served.change = change
    encoder = load_model("some-model", endpoint=served.url)
    with pytest.raises(UserError, match=why):
        embed(encoder, TEXT, ITEMS[3])


def test_options_that_an_endpoint_cannot_follow_are_refused(served, tmp_path):
    with error_about(UserError, "trust_code"):
        load_model("m", endpoint=served.url, dtype="float16", trust_code=True)
    served.statuses = [401]
    with error_about(UserError, 401):
        embed(load_model("m", endpoint=served.url), TEXT)
    assert main(["run", "model=m", "endpoint_key_env=KEY", "set=x", f"out={tmp_path}"]) != 0


@pytest.mark.slow
def test_a_set_is_measured_through_an_endpoint_with_a_query_prompt(served, tmp_path):
    served.salt = 2.0**-30  # so that vectors of pictures differ
    data = write_set(tmp_path / "set", num_queries=3, num_candidates=6)
    out = tmp_path / "out"
    words = ["model=some-model", f"endpoint={served.url}", f"set={data}", f"out={out}", "report=false"]
    assert not main(["run", *words, "query_mode=direct", "query_prompt=Instruct: find it. Query: {text}!"])
    results = json.loads((out / "results.json").read_text())
    assert results["model"]["adapter"] == "endpoint"
    assert results["settings"]["query_prompt"] == "Instruct: find it. Query: {text}!"
    texts = [
        part["text"]
        for body in served.bodies
        for part in body.get("messages", [{"content": []}])[0]["content"]
        if part["type"] == "text"
    ]
    texts += [text for body in served.bodies for text in body.get("input", [])]
    asked = [text for text in texts if text.startswith("Instruct: find it. Query: ") and text.endswith("!")]
    assert len(asked) == 3


def test_a_query_prompt_words_queries_of_any_embedder_and_nothing_else(clip_path, tmp_path):
    encoder = load_model(clip_path)
    prompted = Prompted(encoder, "{instruction}: ").with_(exact=True)
    expected = embed(encoder, Item("1", content_of("Find it.: egg")))
    np.testing.assert_allclose(embed(prompted, TEXT), expected, atol=1e-6)
    np.testing.assert_array_equal(
        embed(prompted, TEXT, side="candidate"), embed(encoder, TEXT, side="candidate")
    )
    assert "query_prompt" not in encoder.settings.content()
    with error_about(UserError, "instruction"):
        embed(prompted, SHOWN)

    class Library:
        max_seq_length, prompts, asked = 16, {"query": "query: "}, []

        def supports(self, kind):
            return kind == "text"

        def eval(self):
            return self

        def encode_query(self, inputs, prompt=None, **_):
            self.asked.append((list(inputs), prompt))
            return torch.ones(len(inputs), 2)

    (tmp_path / "w.safetensors").write_bytes(b"1")
    library = Library()
    sentences = Sentences(Facts(tmp_path, "s", None, "", frozenset(), frozenset()), library, "float32")
    embed(sentences, TEXT)
    embed(Prompted(sentences, "Q: "), TEXT)
    assert library.asked == [(["egg"], None), (["Q: egg"], "")]


CODE = """
import pathlib, torch
from transformers import PretrainedConfig, PreTrainedModel
pathlib.Path({marker!r}).touch()
class Config(PretrainedConfig):
    model_type = "made_up"
class Model(PreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.w = torch.nn.Parameter(torch.ones(2))
        self.post_init()
    def _init_weights(self, module):
        pass
"""
GME = """
    def get_fused_embeddings(self, texts=None, images=None, is_query=True, instruction=None, **_):
        rows = texts or images
        return torch.tensor([[1.0 + is_query, len(t or ""), i is not None, len(instruction or "")]
            for t, i in zip(texts or [None] * len(rows), images or [None] * len(rows))])
"""
JINA = """
    def encode_text(self, texts, task=None):
        return torch.tensor([[1.0, len(t), task == "retrieval.query"] for t in texts]).numpy()
    def encode_image(self, images):
        return torch.tensor([[5.0, 0.0, i.size[0]] for i in images]).numpy()
"""
BGE = """
    def set_processor(self, path):
        self.path = path
    def data_process(self, images=None, text=None, q_or_c=None, task_instruction=None):
        from PIL import Image
        assert self.path and all(Image.open(one).size for one in images or [])
        return {"lengths": [len(t) for t in text or [""] * len(images)], "first": q_or_c == "query"}
    def forward(self, lengths, first, output_hidden_states):
        return torch.tensor([[[9.0, 9.0], [1.0 + first, n]] for n in lengths])
"""
NOMIC = """
    def forward(self, pixel_values):
        return (torch.stack([pixel_values.mean((2, 3)), -pixel_values.mean((2, 3))], 1),)
"""
NONE = """
    def forward(self, input_ids, pixel_values):
        pass
"""


def repository(path, methods):
    path.mkdir()
    marker = path / "was_run"
    auto_map = {"AutoConfig": "modeling_made_up.Config", "AutoModel": "modeling_made_up.Model"}
    config = {"model_type": "made_up", "auto_map": auto_map, "architectures": ["Model"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_made_up.py").write_text(CODE.format(marker=str(marker)) + methods)
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, path / "model.safetensors", {"format": "pt"})
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28).save_pretrained(path)
    return path, marker


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(
    ("methods", "query", "candidate"),
    [
        (GME, [[2, 3, 0, 8], [2, 5, 1, 0], [2, 0, 1, 0]], [[1, 3, 0, 0], [1, 5, 1, 0], [1, 0, 1, 0]]),
        (JINA, [[1, 3, 1], [6, 5, 1 + 4], [5, 0, 4]], [[1, 3, 0], [6, 5, 4], [5, 0, 4]]),
        (BGE, [[2, 3], [2, 5], [2, 0]], [[1, 3], [1, 5], [1, 0]]),
    ],
    ids=["gme", "jina", "bge"],
)
def test_the_code_of_a_repository_runs_only_if_it_is_trusted(tmp_path, methods, query, candidate):
    path, marker = repository(tmp_path / "repo", methods)
    assert next(one.name for one in adapters() if one.matches(facts_of(path))) == "own-code"
    with error_about(UserError, "trust_code"):
        load_model(path)
    assert not marker.exists()
    encoder = load_model(path, trust_code=True)
    assert marker.exists()
    assert encoder.settings.code == ["modeling_made_up.Config", "modeling_made_up.Model"]
    for side, rows_ in (("query", query), ("candidate", candidate)):
        found = embed(encoder, *ITEMS[:3], side=side)
        np.testing.assert_allclose(found, [unit(np.array(row)) for row in rows_], rtol=1e-5)
    with error_about(UserError, "query '5'"):
        embed(encoder, Item("5", content_of(None, (picture(1), picture(2)))))


def test_a_repository_for_pictures_alone_and_one_without_a_known_method(tmp_path):
    encoder = load_model(repository(tmp_path / "vision", NOMIC)[0], trust_code=True)
    assert embed(encoder, ITEMS[2]).shape == (1, 3)
    with error_about(UserError, "query_modality"):
        embed(encoder, TEXT)
    with error_about(UserError, "interface"):
        load_model(repository(tmp_path / "none", NONE)[0], trust_code=True)


def test_code_of_sentence_transformers_modules_needs_trust_too(tmp_path, clip_path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "custom_st.Transformer", "path": ""}]))
    with error_about(UserError, tmp_path, "trust_code"):
        load_model(tmp_path)
    with error_about(UserError, "trust_code", ("choice", "adapter", ("own-code",))):
        load_model(clip_path, trust_code=True)


@pytest.fixture(scope="module")
def meta_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("meta")
    made = ended(tokenizer())
    config = MetaClip2Config(
        text_config=TOWER | rows(made) | {"max_position_embeddings": 24, "eos_token_id": made.eos_token_id},
        vision_config=TOWER | {"image_size": 28, "patch_size": 14}, projection_dim=16,
    )  # fmt: skip
    lively(MetaClip2Model(config)).save_pretrained(path)
    made.save_pretrained(path)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(
        path
    )
    return path


def test_meta_clip_2_joins_features_by_weight_or_along_the_arc(meta_path):
    text, picture_, both = Item("1", content_of("a key")), Item("2", content_of(None, SHOWN.pictures)), SHOWN
    text_D, picture_D, sum_D = embed(load_model(meta_path), text, picture_, both)
    assert not np.allclose(sum_D, unit(0.8 * text_D + 0.2 * picture_D), atol=1e-3)
    found = {
        (combine, share): embed(
            load_model(meta_path, combine=combine, text_weight=share), text, picture_, both
        )
        for combine, share in (("weighted", 0.8), ("slerp", 0.8), ("slerp", 0.0), ("slerp", 1.0))
    }
    for rows_ in found.values():
        np.testing.assert_allclose(rows_[:2], [text_D, picture_D], atol=1e-5)
    np.testing.assert_allclose(found["weighted", 0.8][2], unit(0.8 * text_D + 0.2 * picture_D), atol=1e-5)
    angle = np.arccos(text_D @ picture_D)
    assert np.arccos(found["slerp", 0.8][2] @ text_D) == pytest.approx(0.2 * angle, abs=1e-3)
    assert np.arccos(found["slerp", 0.8][2] @ picture_D) == pytest.approx(0.8 * angle, abs=1e-3)
    np.testing.assert_allclose(found["slerp", 0.0][2], picture_D, atol=1e-5)
    np.testing.assert_allclose(found["slerp", 1.0][2], text_D, atol=1e-5)
    assert AutoModel.from_pretrained(meta_path).config.model_type == "metaclip_2"
    with error_about(UserError, "text_weight"):
        load_model(meta_path, combine="slerp")
