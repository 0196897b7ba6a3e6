"""`rge serve`: what clients get, what they are refused, and that the server outlives all of it."""

import asyncio
import base64
import contextlib
import gzip
import http.server
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import cohere
import forked
import hostile
import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
from asgi_correlation_id import CorrelationIdFilter, correlation_id
from clips import clip
from faults import error_about
from paths import ROOT
from pdfs import BLUE, GREEN, PASSWORD_NEEDED, RED, pdf
from pdfs import page as pdf_page
from PIL import Image
from recorded import exported
from served import running

from rge.common.errors import UserError
from rge.common.images import ImageError, load_image
from rge.common.parts import ImagePart, TextPart, VideoPart
from rge.common.schema import Item
from rge.content.pdf import render
from rge.embedder import Embedder
from rge.index.rows import Row
from rge.index.store import Index, writing
from rge.serving import public_web
from rge.serving.__main__ import main
from rge.serving.app import Service
from rge.serving.batches import Batches
from rge.serving.bodies import Bodies, num_values
from rge.serving.errors import Refusal
from rge.serving.guard import MemoryBudget
from rge.serving.inputs import Allowance, make_prompt
from rge.serving.options import ServeOptions
from rge.serving.process import load

LIMITS = {
    "max_body_mb": 1,
    "max_inputs": 40,
    "max_queue": 200,
    "max_chars": 2000,
    "max_pictures": 2,
    "max_picture_mp": 1.0,
}


@pytest.fixture(scope="module")
def checkpoint(lively_path, tmp_path_factory):
    return exported(lively_path, tmp_path_factory.mktemp("serving") / "a model", dimensions=[8, 16])


@pytest.fixture(scope="module")
def embedder(checkpoint):
    return Embedder.from_pretrained(checkpoint)


def service_of(embedder, key=None, index=None, **options):
    service = Service(embedder, ServeOptions(checkpoint="mine", **(LIMITS | options)), key=key, index=index)
    service.start()
    return service


@pytest.fixture(scope="module")
def service(checkpoint):
    return service_of(Embedder.from_pretrained(checkpoint))


@pytest.fixture(scope="module")
def url(service):
    with running(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def ask(url):
    def post(path="/v1/embeddings", **body):
        return httpx.post(url + path, json=body, timeout=60)

    return post


def shown(image, form="PNG"):
    data = io.BytesIO()
    image.save(data, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def message(text, *pictures):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}]


def vectors(answer):
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], dtype=np.float32)


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose((ours * theirs).sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


TEXTS = ["What opens this?", "a key", "Only words, and more of them than the others have", "egg"]


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.slow
def test_the_openai_client_gets_our_embeddings(client, embedder):
    expected, rationales = embedder.encode_query(TEXTS, return_rationales=True)
    found = client.embeddings.create(model="mine", input=TEXTS, extra_body={"return_rationale": True})
    assert_same(np.array([one.embedding for one in found.data]), expected)
    assert [one.rationale for one in found.data] == rationales
    assert len({*rationales}) > 1
    assert [one.index for one in found.data] == [0, 1, 2, 3]
    assert found.model == "mine"
    assert found.usage.prompt_tokens > len(TEXTS)
    plain = client.embeddings.create(model="mine", input=TEXTS[0], encoding_format="float")
    assert_same(np.array(plain.data[0].embedding), expected[0])
    assert not hasattr(plain.data[0], "rationale")
    none = client.embeddings.create(model="mine", input=TEXTS[0], encoding_format=None)  # as LiteLLM
    assert none.data[0].embedding == plain.data[0].embedding
    assert [one.id for one in client.models.list()] == ["mine", "mine-query", "mine-document"]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"mode": "direct"}, lambda embedder: embedder.encode_query(TEXTS, mode="direct")),
        ({"max_rationale_tokens": 2}, lambda embedder: embedder.encode_query(TEXTS, max_rationale_tokens=2)),
        ({"max_rationale_tokens": 0}, lambda embedder: embedder.encode_query(TEXTS, mode="direct")),
        ({"side": "document"}, lambda embedder: embedder.encode_document(TEXTS)),
        ({"side": "document", "mode": "reasoning"}, lambda embedder: embedder.encode_document(TEXTS, mode="reasoning")),
        ({"instruction": "name it"}, lambda embedder: embedder.encode_query(TEXTS, instruction="name it")),
        ({"instruction": ""}, lambda embedder: embedder.encode_query(TEXTS, instruction="")),
        ({"dimensions": 8}, lambda embedder: embedder.encode_query(TEXTS, dimensions=8)),
    ],
)  # fmt: skip
def test_every_way_of_asking_is_that_of_the_embedder(ask, embedder, extra, expected):
    answer = ask(input=TEXTS, **extra)
    assert answer.status_code == 200
    assert "warnings" not in answer.json()
    assert_same(vectors(answer), expected(embedder))
    if "dimensions" not in extra:
        assert not np.allclose(vectors(answer), embedder.encode_query(TEXTS), atol=1e-3)


def test_pictures_come_in_messages(ask, embedder, picture):
    images = [picture(60, 40), picture(30, 80, 1)]
    for text in ("What opens this?", None):
        answer = ask(messages=message(text, *map(shown, images)), return_rationale=True)
        expected, rationale = embedder.encode_query([text], [images], return_rationales=True)
        assert_same(vectors(answer), expected)
        assert answer.json()["data"][0]["rationale"] == rationale[0]
        assert answer.json()["data"][0]["stop_reason"] in ("emb", "forced")
    for text, pictures in (("a key", ()), (None, images[:1]), ("two keys", images)):
        answer = ask(messages=message(text, *map(shown, pictures)), side="document")
        assert_same(vectors(answer), embedder.encode_document([text], [list(pictures)]))
    plain = ask(messages=[{"role": "user", "content": "a key"}])
    assert_same(vectors(plain), embedder.encode_query(["a key"]))


@pytest.mark.slow
def of_pdf(document: bytes) -> str:
    return "data:application/pdf;base64," + base64.b64encode(document).decode()


MANUAL = pdf([pdf_page("kettle", RED), pdf_page("anchor", GREEN), pdf_page("padlock", BLUE)])


def test_documents_come_as_parts_in_every_form_and_order(ask, embedder, picture):
    pages = [render(MANUAL, number) for number in (2, 3)]
    before, after = {"type": "text", "text": "Look:"}, {"type": "text", "text": "what is it?"}
    for document in (
        {"type": "file", "file": {"file_data": of_pdf(MANUAL), "filename": "m.pdf"}, "pages": [2, 3]},
        {"type": "input_file", "file_data": of_pdf(MANUAL), "pages": [2, 3]},
        {"pdf": of_pdf(MANUAL), "pages": [2, 3]},
    ):
        answer = ask(messages=[{"role": "user", "content": [before, document, after]}], side="document")
        content = (TextPart("Look:"), *map(ImagePart, pages), TextPart("what is it?"))
        expected = embedder.encode([Item("x", content)], side="candidate", mode="direct").embeddings
        assert_same(vectors(answer), expected)
    short = pdf([pdf_page("kettle", RED)])
    answer = ask(input=[{"pdf": of_pdf(short), "text": "a"}], side="document")
    assert_same(vectors(answer), embedder.encode_document(["a"], [[render(short, 1)]]))
    image, words = (
        {"type": "input_image", "image_url": shown(picture(60, 40))},
        {"type": "input_text", "text": "a"},
    )
    answer = ask(messages=[{"role": "user", "content": [image, words]}], side="document")
    assert_same(vectors(answer), embedder.encode_document(["a"], [[picture(60, 40)]]))


FILM = clip(range(0, 2000, 40), size=(56, 56))


@pytest.mark.slow
def test_a_file_that_cannot_be_decoded_ends_alone(embedder, monkeypatch):
    """It is refused within its limits of time and memory, and others are answered meanwhile and afterwards."""
    short = pdf([pdf_page("kettle", RED)])
    body = {"input": [{"pdf": of_pdf(short), "text": "a"}], "side": "document"}
    service = service_of(embedder, max_decode_s=5, max_decode_mb=256)
    with running(service) as address, ThreadPoolExecutor() as pool:

        def post(sent):
            return httpx.post(f"{address}/v1/embeddings", json=sent, timeout=60)

        text = {"input": ["a key"], "side": "document"}
        assert post(text).status_code == 200
        for taker in (hostile.sleep, hostile.fill):
            monkeypatch.setattr("rge.content.pdf.num_pages", taker)
            waiting = pool.submit(post, body)
            assert post(text).status_code == 200
            meanwhile = not waiting.done()
            answer = waiting.result()
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].file")
            assert taker.__name__ in answer.json()["error"]["message"]
            assert meanwhile or taker is hostile.fill
        monkeypatch.undo()
        expected = embedder.encode_document(content=[[{"pdf": short}, {"text": "a"}]])
        assert_same(vectors(post(body)), expected)


def of_film(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def test_clips_come_as_parts_and_are_what_the_embedder_says(ask, embedder, picture):
    for part, ours in (
        ({"type": "video_url", "video_url": {"url": of_film(FILM)}}, {"video": FILM}),
        ({"video": of_film(FILM), "start": 0.5, "end": 1.5, "fps": 2.0}, {"video": FILM, "start": 0.5, "end": 1.5, "fps": 2.0}),
        ({"video": of_film(FILM), "num_frames": 2}, {"video": FILM, "num_frames": 2}),
    ):  # fmt: skip
        answer = ask(
            messages=[{"role": "user", "content": [part, {"text": "a"}]}], side="document", mode="direct"
        )
        assert answer.status_code == 200, answer.text
        assert_same(vectors(answer), embedder.encode_document(content=[[ours, {"text": "a"}]]))
    answer = ask(input=[{"video": of_film(FILM)}], side="document")
    assert_same(vectors(answer), embedder.encode_document(content=[[{"video": FILM}]]))
    frames = [picture(56, 56, seed) for seed in (1, 2)]
    answer = ask(
        messages=[{"role": "user", "content": [{"video": [*map(shown, frames)], "fps": 1.0}]}],
        side="document",
    )
    assert_same(vectors(answer), embedder.encode_document(content=[[VideoPart(tuple(frames), fps=1.0)]]))


def test_an_embedding_does_not_depend_on_what_comes_in_beside_it(url, service, embedder, picture):
    """64 clients at once, of both modes, many lengths and caps: micro-batches of whatever is there."""
    bodies = []
    for number in range(64):
        text = " ".join(["egg", "key", "lock", "padlock"][: 1 + number % 4] * (1 + number % 7))
        pictures = [shown(picture(30 + number, 90 - number, number))] if number % 3 == 0 else []
        bodies.append({"messages": message(text, *pictures), "mode": ["reasoning", "direct"][number % 2]})
        if number % 3:
            bodies[-1]["max_rationale_tokens"] = number % 5
    sizes = []
    service.batches.on_batch = lambda mode, rows, seconds: sizes.append(rows)

    async def all_at_once():
        async with httpx.AsyncClient(timeout=60) as http:
            return await asyncio.gather(*(http.post(f"{url}/v1/embeddings", json=body) for body in bodies))

    for answer, body in zip(asyncio.run(all_at_once()), bodies, strict=True):
        content = body["messages"][0]["content"]
        image = Image.open(io.BytesIO(base64.b64decode(content[0]["image_url"]["url"].split(",")[1]))) if len(content) > 1 else None  # fmt: skip
        expected = embedder.encode_query(content[-1]["text"], image, mode=body["mode"], max_rationale_tokens=body.get("max_rationale_tokens"))  # fmt: skip
        assert answer.status_code == 200
        assert_same(vectors(answer)[0], expected)
    assert sum(sizes) == 64
    assert max(sizes) > 4


def test_what_is_not_as_in_training_is_said(ask, embedder):
    answer = ask(input="a key", instruction="Sing about it.")
    assert "not trained with the instruction 'Sing about it.'" in answer.json()["warnings"][0]
    with pytest.warns(UserWarning, match="Sing about it"):
        assert_same(vectors(answer)[0], embedder.encode_query("a key", instruction="Sing about it."))
    answer = ask(input="a key " * 300)
    assert "tokens of the text were cut" in answer.json()["warnings"][0]


def test_limits_of_prompts_and_pictures_reach_the_embedder(checkpoint):
    limits = {"max_prompt_tokens": 99, "min_pixels": 784, "max_pixels": 1568}
    service = load(ServeOptions(checkpoint=str(checkpoint), **limits))
    service.stop()
    settings = service.embedder.settings
    assert (settings.max_prompt_tokens, settings.pixels.content()) == (99, {"min": 784, "max": 1568})
    assert service.embedder.builder.max_tokens == 99
    with error_about(UserError, "max_prompt_tokens"):
        load(ServeOptions(checkpoint=str(checkpoint), max_prompt_tokens=3))


@pytest.mark.slow
def test_an_index_is_searched_with_the_rationale_beside_the_hits(embedder, checkpoint, tmp_path, picture):
    pytest.importorskip("lancedb")
    index = Index.create(
        tmp_path / "gallery", checkpoint="mine", checkpoint_hash=embedder.checkpoint_hash, dimensions=16
    )
    documents = embedder.encode_document(TEXTS, dimensions=16)
    index.declare([{"colour": 1}])
    with writing(tmp_path / "gallery"):
        index.put([
            Row("/secret/place", text, "s", "d", vector, text, image, {"colour": row}, b"RIFF")
            for row, (text, vector, image) in enumerate(
                zip(TEXTS, documents, ["/secret/place/a.png", "https://example.com/b.png", None, None], strict=True)
            )
        ])  # fmt: skip
    index.refresh(ann_from=1000)
    options = {"checkpoint": str(checkpoint), "index": str(tmp_path / "gallery"), "port": 0}
    service = load(ServeOptions(**options))
    with running(service) as url:
        answer = httpx.post(f"{url}/v1/search", json={"input": "What opens this?", "k": 3}, timeout=60)
        query, rationale = embedder.encode_query("What opens this?", dimensions=16, return_rationales=True)
        scores = documents @ query
        best = np.argsort(-scores)[:3]
        hits = answer.json()["data"]
        assert [hit["id"] for hit in hits] == [TEXTS[row] for row in best]
        np.testing.assert_allclose([hit["score"] for hit in hits], scores[best], atol=1e-5)
        assert answer.json()["rationale"] == rationale
        assert [hit["metadata"]["colour"] for hit in hits] == best.tolist()
        assert "/secret" not in answer.text
        image = picture(60, 40)
        asked = {"messages": message("a", shown(image)), "mode": "direct", "k": 9, "return_rationale": False}
        answer = httpx.post(f"{url}/v1/search", json=asked, timeout=60)
        scores = documents @ embedder.encode_query("a", image, mode="direct", dimensions=16)
        np.testing.assert_allclose(
            [hit["score"] for hit in answer.json()["data"]], np.sort(scores)[::-1], atol=1e-5
        )
        assert "https://example.com/b.png" in [hit["url"] for hit in answer.json()["data"]]
        assert "rationale" not in answer.json()
        asked = {"input": TEXTS[3], "where": "colour >= 2", "hybrid": True, "thumbnails": True}
        hits = httpx.post(f"{url}/v1/search", json=asked, timeout=60).json()["data"]
        assert sorted(hit["metadata"]["colour"] for hit in hits) == list(range(2, len(TEXTS)))
        assert hits[0]["id"] == TEXTS[3]
        assert (hits[0]["thumbnail"], hits[0]["source"]) == ("data:image/webp;base64,UklGRg==", "place")
        for body, said in (
            ({"input": "a", "where": "nothing > 1"}, "No field named nothing"),
            ({"input": "a", "where": "image LIKE '/secret%'"}, "No field named image"),
            ({"input": "a", "where": "x" * 1001}, "at most 1000 characters"),
            ({"input": ["a"]}, "one query"),
            ({"input": "a", "k": 0}, "k"),
            ({"input": "a", "side": "query"}, "side"),
        ):
            wrong = httpx.post(f"{url}/v1/search", json=body)
            assert wrong.status_code == 400
            assert said in wrong.json()["error"]["message"]
            assert str(tmp_path) not in wrong.text
        for data in (tmp_path / "gallery").rglob("data/*.lance"):
            data.unlink()
        for condition in ({}, {"where": "colour > 1"}):  # a broken index is not the client's mistake
            broken = httpx.post(f"{url}/v1/search", json={"input": "a", **condition})
            assert (broken.status_code, broken.json()["error"]["param"]) == (500, None)
    Index.create(tmp_path / "other", checkpoint="theirs", checkpoint_hash="f" * 64, dimensions=32)
    with error_about(UserError, tmp_path / "other", "checkpoint"):
        load(ServeOptions(**(options | {"index": str(tmp_path / "other")})))


@pytest.mark.slow
def test_a_request_names_a_task_of_training(checkpoint, tmp_path):
    """Its wording, instruction and length, for queries and documents, in every form and in searches."""
    pytest.importorskip("lancedb")
    folder = shutil.copytree(checkpoint, tmp_path / "of tasks")
    settings = json.loads((folder / "rge.json").read_text())
    settings["instructions"]["by_task"] = {"naming": "name it", "rest": None}
    settings["tasks"] = {"naming": {"profile": "plain", "max_prompt_tokens": 100}}
    (folder / "rge.json").write_text(json.dumps(settings))
    embedder = Embedder.from_pretrained(folder)
    made = {"checkpoint_hash": embedder.checkpoint_hash, "dimensions": embedder.size, "task": "naming"}
    index = Index.create(tmp_path / "gallery", checkpoint="mine", **made)
    documents = embedder.encode_document(TEXTS, task="naming")
    with writing(tmp_path / "gallery"):
        index.put([
            Row("/place", text, "s", "d", vector, text, None, {}, None)
            for text, vector in zip(TEXTS, documents, strict=True)
        ])  # fmt: skip
    index.refresh(ann_from=1000)
    options = {"checkpoint": str(folder), "index": str(tmp_path / "gallery"), "port": 0}
    with running(load(ServeOptions(**options))) as url:

        def post(path="/v1/embeddings", **body):
            return httpx.post(url + path, json=body, timeout=60)

        for task in ("naming", "rest", None):
            queries = embedder.encode_query(TEXTS, task=task)
            assert_same(vectors(post(input=TEXTS, task=task)), queries)
            found = vectors(post(input=TEXTS, task=task, side="document"))
            assert_same(found, embedder.encode_document(TEXTS, task=task))
            tei = post("/embed", inputs=TEXTS, task=task)
            assert_same(np.array(tei.json()), queries)
            ranked = post("/v1/rerank", query="egg", documents=TEXTS, task=task).json()["results"]
            scores = embedder.encode_document(TEXTS, task=task) @ embedder.encode_query("egg", task=task)
            found = [hit["relevance_score"] for hit in ranked]
            np.testing.assert_allclose(found, np.sort(scores)[::-1], atol=1e-5)
        # A long text is cut at the task's length.
        assert post(input="a key " * 60, task="rest").json().get("warnings") is None
        assert post(input="a key " * 60, task="naming").json()["warnings"]
        # A search has the index's task.
        scores = documents @ embedder.encode_query("egg", task="naming")
        for task in ({}, {"task": "naming"}):
            hits = post("/v1/search", input="egg", k=3, **task).json()["data"]
            np.testing.assert_allclose([hit["score"] for hit in hits], np.sort(scores)[::-1][:3], atol=1e-5)
        for path, body in (
            ("/v1/search", {"input": "egg", "task": "rest"}),
            ("/v1/search", {"input": "egg", "task": "other"}),
            ("/v1/embeddings", {"input": "egg", "task": "other"}),
            ("/v2/embed", {"texts": ["egg"], "input_type": "search_query", "task": "other"}),
            ("/v1/rerank", {"query": "egg", "documents": ["a"], "task": "other"}),
        ):
            wrong = post(path, **body)
            error = wrong.json().get("error", {})
            assert (wrong.status_code, error.get("param", "task")) == (400, "task")
            assert "naming" in wrong.text
            assert str(tmp_path) not in wrong.text


def test_a_batch_of_conversations_as_vllm_takes_it(client, embedder, picture):
    images = [picture(60, 40), picture(30, 80, 1)]
    found = client.post(
        "/embeddings", cast_to=openai.types.CreateEmbeddingResponse,
        body={"messages": [message("What opens this?", shown(images[0])), message("egg"), message(None, shown(images[1]))]},
    )  # fmt: skip
    expected = embedder.encode_query(["What opens this?", "egg", None], [images[0], None, images[1]])
    assert_same(np.array([one.embedding for one in found.data]), expected)


def test_a_model_s_name_chooses_the_side(ask, client, embedder):
    """For clients that cannot send `side`, which would embed documents as queries unnoticed."""
    for name, encode in (("mine-query", embedder.encode_query), ("mine-document", embedder.encode_document)):
        for extra in ({}, {"side": name[5:]}, {"side": None}):
            assert_same(vectors(ask(model=name, input=TEXTS, **extra)), encode(TEXTS))
        assert client.models.retrieve(name).id == name
    assert [one["id"] for one in client.models.list().to_dict()["data"]] == [
        "mine",
        "mine-query",
        "mine-document",
    ]
    query, document = (
        "model 'mine-query' is for the query side",
        "model 'mine-document' is for the document side",
    )
    for path, body, said in (
        ("/v1/embeddings", {"model": "mine-query", "input": "a", "side": "document"}, query),
        ("/v1/embeddings", {"model": "mine-document", "input": "a", "side": "query"}, document),
        ("/v2/embed", {"model": "mine-query", "texts": ["a"], "input_type": "search_document"}, query),
        ("/v1/rerank", {"model": "mine-query", "query": "a", "documents": ["b"]}, query),
        ("/v1/rerank", {"model": "mine-document", "query": "a", "documents": ["b"]}, document),
    ):
        answer = ask(path, **body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert "use 'mine'" in answer.json()["error"]["message"]
    assert ask(model="mine-left", input="a").status_code == 404


def test_the_model_is_found_by_its_name(client, embedder):
    assert client.models.retrieve("mine").owned_by == "rge"
    with error_about(openai.NotFoundError, "yours", "mine"):
        client.models.retrieve("yours")
    with running(service_of(embedder, name="runs/demo/joint/final")) as url:
        assert httpx.get(f"{url}/v1/models/runs/demo/joint/final").json()["id"] == "runs/demo/joint/final"


@pytest.fixture(scope="module")
def cohere_client(url):
    return cohere.ClientV2(api_key="none", base_url=url, timeout=60)


@pytest.mark.slow
def test_the_cohere_client_gets_our_embeddings(cohere_client, embedder, picture):
    image = picture(60, 40)
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    asked = {"model": "mine", "embedding_types": kinds}
    found = cohere_client.embed(texts=TEXTS, input_type="search_query", **asked)
    expected = embedder.encode_query(TEXTS)
    ours = np.array(found.embeddings.float_)
    assert_same(ours, expected)
    assert found.texts == TEXTS
    assert found.meta.billed_units.input_tokens > len(TEXTS)
    coarse = np.array(found.embeddings.int8, float)
    assert (np.abs(coarse).max(axis=1) == 127).all()
    assert ((coarse / np.linalg.norm(coarse, axis=1, keepdims=True) * ours).sum(axis=1) > 0.999).all()
    assert np.array_equal(np.array(found.embeddings.uint8), coarse + 128)
    signs = np.unpackbits(np.array(found.embeddings.ubinary, np.uint8), axis=1)
    assert np.array_equal(signs, ours >= 0)
    assert np.array_equal(np.array(found.embeddings.binary) + 128, np.array(found.embeddings.ubinary))
    assert_same(np.frombuffer(base64.b64decode(found.embeddings.base64[0]), "<f4"), expected[0])

    documents = cohere_client.embed(texts=TEXTS, input_type="search_document", output_dimension=8, **asked)
    assert_same(np.array(documents.embeddings.float_), embedder.encode_document(TEXTS, dimensions=8))
    shown_ = cohere_client.embed(images=[shown(image)], input_type="image", **asked)
    assert_same(np.array(shown_.embeddings.float_), embedder.encode_document(images=[image]))
    both = [
        {
            "content": [
                {"type": "text", "text": "a key"},
                {"type": "image_url", "image_url": {"url": shown(image)}},
            ]
        }
    ]
    mixed = cohere_client.embed(inputs=both, input_type="search_document", **asked)
    in_order = Item("x", (TextPart("a key"), ImagePart(image)))
    assert_same(
        np.array(mixed.embeddings.float_),
        embedder.encode([in_order], side="candidate", mode="direct").embeddings,
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"texts": ["a"]}, "input_type"),
        ({"texts": ["a"], "input_type": "song"}, "input_type"),
        ({"texts": ["a"], "images": ["b"], "input_type": "search_query"}, "give one of texts, images and inputs"),
        ({"texts": [], "input_type": "search_query"}, "texts: List should have at least 1 item"),
        ({"texts": ["a" * 2001], "input_type": "search_query"}, r"texts\[0\] has 2001 characters"),
        ({"texts": ["a"], "input_type": "search_query", "output_dimension": 9}, "output_dimension must be one of 8, 16, 32"),
        ({"texts": ["a"], "input_type": "search_query", "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a key " * 300], "input_type": "search_query", "truncate": "NONE"}, "tokens too long"),
        ({"texts": ["a"], "input_type": "search_query", "truncate": "START"}, "truncate"),
        ({"texts": ["a"], "input_type": "search_query", "max_tokens": 5}, "always truncated to 256 tokens, got 5"),
        ({"texts": ["a"], "input_type": "search_document", "instruction": "b"}, "instruction"),
        ({"images": ["/etc/passwd"], "input_type": "image"}, "a picture must be sent as data:"),
    ],
)  # fmt: skip
def test_wrong_requests_of_cohere_s_form(ask, asked, said):
    answer = ask("/v2/embed", **asked)
    assert answer.status_code == 400
    assert re.search(said, answer.json()["error"]["message"])


def test_the_cohere_client_reranks(cohere_client, embedder):
    scores = embedder.encode_document(TEXTS) @ embedder.encode_query("What opens this?")
    order = np.argsort(-scores).tolist()
    found = cohere_client.rerank(model="mine", query="What opens this?", documents=TEXTS, top_n=3)
    assert [one.index for one in found.results] == order[:3]
    np.testing.assert_allclose([one.relevance_score for one in found.results], scores[order[:3]], atol=1e-5)
    older = cohere.Client(api_key="none", base_url=cohere_client._client_wrapper.get_base_url(), timeout=60)
    found = older.rerank(model="mine", query="What opens this?", documents=[{"text": text} for text in TEXTS])
    assert [one.index for one in found.results] == order


@pytest.mark.slow
def test_cohere_s_first_client_gets_our_embeddings(cohere_client, embedder, picture):
    """`cohere.Client`, which LangChain's class uses too: floats without a type, or by types."""
    client = cohere.Client(api_key="none", base_url=cohere_client._client_wrapper.get_base_url(), timeout=60)
    asked = {"model": "mine", "truncate": "END"}
    plain = client.embed(texts=TEXTS, input_type="search_query", **asked)
    assert plain.response_type == "embeddings_floats"
    assert_same(np.array(plain.embeddings), embedder.encode_query(TEXTS))
    typed = client.embed(texts=TEXTS, input_type="search_document", embedding_types=["float"], **asked)
    assert typed.texts == TEXTS
    assert_same(np.array(typed.embeddings.float_), embedder.encode_document(TEXTS))
    seen = client.embed(images=[shown(picture(60, 40))], input_type="image", model="mine")
    assert_same(np.array(seen.embeddings), embedder.encode_document(images=[picture(60, 40)]))


def test_the_hub_s_client_gets_our_embeddings_as_from_tei(url, embedder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for path in ("/embed", ""):
        client = huggingface_hub.InferenceClient(model=url + path, token="none", provider="hf-inference")
        assert_same(client.feature_extraction("a key"), embedder.encode_query(["a key"]))
        for name, encode in (("query", embedder.encode_query), ("document", embedder.encode_document)):
            found = client.feature_extraction(TEXTS, prompt_name=name, normalize=True, truncate=True)
            assert_same(found, encode(TEXTS))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": "a", "normalize": False}, "normalize"),
        ({"inputs": "a", "prompt_name": "song"}, "prompt_name"),
        ({"inputs": [[1, 2]]}, "inputs"),
        ({"inputs": "a key " * 300, "truncate": False}, "tokens too long"),
    ],
)
def test_wrong_requests_of_tei_s_form(ask, body, said):
    answer = ask("/embed", **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("extra", "side", "warned"),
    [
        # Voyage's client sends all of these.
        ({"input_type": "document", "truncation": True, "output_dtype": None, "output_dimension": None}, "document", 0),
        ({"input_type": "query", "truncation": True, "output_dtype": "float", "output_dimension": None}, "query", 0),
        ({"input_type": None, "truncation": True, "output_dtype": None, "output_dimension": None}, "query", 0),
        ({"task": "retrieval.passage", "normalized": True, "embedding_type": "float", "late_chunking": False}, "document", 0),
        ({"task": "retrieval.query", "truncate": True}, "query", 0),
        ({"input_type": "passage", "truncate": "END"}, "document", 0),
        ({"truncate_prompt_tokens": -1, "add_special_tokens": True, "priority": 0, "stream": False}, "query", 0),
        ({"truncate_prompt_tokens": 256, "user": "me", "priority": 3}, "query", 1),
        ({"input_type": "search_document", "side": "document", "model": "mine-document"}, "document", 0),
    ],
)  # fmt: skip
def test_clients_own_fields_are_mapped(ask, embedder, extra, side, warned):
    answer = ask(input=TEXTS, **extra)
    assert_same(vectors(answer), getattr(embedder, f"encode_{side}")(TEXTS))
    assert len(answer.json().get("warnings", [])) == warned


def test_voyage_s_client_gets_base64(ask, embedder):
    asked = {"input_type": "document", "truncation": True, "output_dimension": 8, "encoding_format": "base64"}
    answer = ask(input=TEXTS, model="mine", output_dtype=None, **asked).json()
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    assert_same(np.stack(found), embedder.encode_document(TEXTS, dimensions=8))
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stream": True}, "stream"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"truncate_prompt_tokens": 5}, None),
        ({"task": "text-matching"}, "task"),
        ({"input_type": "song"}, "input_type"),
        ({"input_type": "document", "side": "query"}, None),
        ({"task": "retrieval.query", "model": "mine-document"}, "model"),
        ({"dimensions": 8, "output_dimension": 16}, None),
        ({"output_dtype": "int8"}, "output_dtype"),
        ({"normalized": False}, "normalized"),
        ({"input": "a key " * 300, "truncation": False}, "input"),
        ({"input": "a key " * 300, "truncate": "NONE"}, "input"),
    ],
)
def test_clients_fields_that_would_change_the_result_are_refused(ask, extra, param):
    answer = ask(**({"input": "a"} | extra))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "{data}"}, "input"),
        ("/v1/embeddings", {"input": ["a", " {data}\n"]}, "input[1]"),
        ("/v1/embeddings", {"input": "https://example.com/key.PNG?size=9"}, "input"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "{data}"}]}, "messages"),
        ("/v2/embed", {"texts": ["a", "{data}"], "input_type": "search_document"}, "texts[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "{data}"]}, "documents[1]"),
        ("/v1/rerank", {"query": "{data}", "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "texts": ["http://example.com/a.jpg"]}, "texts[0]"),
        ("/embed", {"inputs": "{data}"}, "inputs"),
    ],
)
def test_a_picture_in_place_of_a_text_is_not_embedded_as_words(ask, picture, path, body, param):
    data = shown(picture(20, 20))
    answer = ask(path, **json.loads(json.dumps(body).replace("{data}", data)))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_texts_about_pictures_and_files_of_the_server_are_texts(ask, embedder):
    texts = ["What is at https://example.com/a.png", "https://example.com/a.html", "data:image"]
    answer = ask(input=[*texts, str(ROOT / "docs" / "gallery.png")])
    assert_same(vectors(answer)[:3], embedder.encode_query(texts))


def test_pictures_and_texts_come_as_jina_s_objects(ask, embedder, picture):
    images = [picture(60, 40), picture(30, 80, 1)]
    inputs = [{"image": shown(images[0])}, {"text": "a key"}, "egg", {"text": "", "image": shown(images[1])}]
    expected = embedder.encode_document([None, "a key", "egg", None], [images[0], None, None, images[1]])
    assert_same(vectors(ask(input=inputs, task="retrieval.passage")), expected)


def test_documents_come_back_as_they_were_sent(ask, picture):
    """LiteLLM reads a document's text, and made the text "None" of null."""
    asked = ["a key", {"text": "a nail"}, {"image": shown(picture(20, 20))}]
    body = {"query": "a", "documents": asked, "return_documents": True, "truncation_side": "right"}
    for path in ("/rerank", "/v1/rerank/"):
        found = {one["index"]: one["document"] for one in ask(path, model="mine", **body).json()["results"]}
        assert [found[row] for row in range(3)] == [{"text": "a key"}, *asked[1:]]


def test_a_watchdog_may_ask_for_the_head_alone_and_with_a_slash(url, ask):
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/health/").json()["status"] == "ok"
    assert ask("/v1/embeddings/", input="a").status_code == 200


def test_a_gzip_body_is_read_within_the_limits(url, service, embedder):
    def post(content, encoding="gzip"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        return httpx.post(f"{url}/v1/embeddings", content=content, headers=headers, timeout=60)

    packed = gzip.compress(json.dumps({"input": "a key"}).encode())
    assert_same(vectors(post(packed))[0], embedder.encode_query("a key"))
    assert_same(vectors(post(b'{"input": "a key"}', "identity"))[0], embedder.encode_query("a key"))
    for content, encoding, status in (
        (gzip.compress(b'{"input": "' + b"a" * (40 << 20)), "gzip", 413),
        (packed[:-9], "gzip", 400),
        (b"not gzip", "gzip", 400),
        (packed, "br", 415),
    ):
        assert post(content, encoding).status_code == status
    until(lambda: service.held.now == 0)


@pytest.mark.slow
def test_documents_are_ranked_in_every_form(ask, embedder, picture):
    """Jina's with pictures, vLLM's with parts, TEI's with texts."""
    images = [picture(60, 40), picture(30, 80, 1)]
    expected = embedder.encode_document([None, None, "a key"], [*images, None]) @ embedder.encode_query(
        "a", images[0]
    )
    order = np.argsort(-expected).tolist()
    parts = [{"image": shown(images[0])}, {"content": message(None, shown(images[1]))[0]["content"]}, "a key"]
    answer = ask(
        "/v1/rerank", query={"text": "a", "image": shown(images[0])}, documents=parts, top_n=0
    ).json()
    assert [one["index"] for one in answer["results"]] == order
    np.testing.assert_allclose(
        [one["relevance_score"] for one in answer["results"]], expected[order], atol=1e-5
    )
    assert answer["results"][order.index(2)]["document"] == {"text": "a key"}
    assert answer["usage"]["total_tokens"] > 0
    bare = ask("/v2/rerank", query="a", documents=["b"], return_documents=False).json()
    assert set(bare["results"][0]) == {"index", "relevance_score"}

    scores = embedder.encode_document(TEXTS) @ embedder.encode_query("a key")
    found = ask(
        "/rerank", query="a key", texts=TEXTS, return_text=True, raw_scores=False, truncate=True
    ).json()
    assert [one["text"] for one in found] == [TEXTS[row] for row in np.argsort(-scores)]
    np.testing.assert_allclose([one["score"] for one in found], np.sort(scores)[::-1], atol=1e-5)
    for body, said in (
        ({"query": "a", "documents": ["b"], "texts": ["b"]}, "give documents, or texts"),
        ({"query": "a" * 2001, "documents": ["b"]}, "query has 2001 characters"),
        ({"query": "a", "documents": ["b" * 2001]}, r"documents\[0\] has 2001 characters"),
        ({"query": "", "documents": ["b"]}, "query is empty"),
        ({"query": "a", "documents": []}, "documents: List should have at least 1 item"),
        ({"query": "a", "texts": []}, "texts: List should have at least 1 item"),
        ({"query": "a", "documents": [{}]}, r"documents\[0\] is empty"),
        ({"query": "a", "texts": ["b " * 400], "truncate": False}, "tokens too long"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, "tokens, got 3"),
    ):
        wrong = ask("/v1/rerank", **body)
        assert wrong.status_code == 400
        assert re.search(said, wrong.json()["error"]["message"])


# ------------------------------------------------------------------------------------------------------------ refusals


def bomb(width=20_000, height=20_000):
    """A PNG of a few hundred bytes whose head promises 400 million pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def truncated():
    whole = base64.b64decode(shown(Image.effect_noise((64, 64), 50)).split(",")[1])
    return f"data:image/png;base64,{base64.b64encode(whole[: len(whole) // 2]).decode()}"


def postscript():
    return (
        "data:image/png;base64,"
        + base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()
    )


def scan(width: int, height: int) -> bytes:
    """A page with a flat picture of this size."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PDF")
    return file.getvalue()


WRONG = {
    "nothing": ({}, "give input"),
    "both": ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "not both"),
    "empty": ({"input": ""}, "input is empty"),
    "blank among others": ({"input": ["a", " \n"]}, r"input\[1\] is empty"),
    "empty list": ({"input": []}, "empty list"),
    "tokens": ({"input": [1, 2]}, "must be texts"),
    "lists of tokens": ({"input": [[1, 2]]}, "must be texts"),
    "number": ({"input": 7}, "input"),
    "null among texts": ({"input": ["a", None]}, "input"),
    "too many": ({"input": ["a"] * 41}, "41 inputs, but a request may have at most 40"),
    "too long": ({"input": "a" * 2001}, "2001 characters"),
    "mode": ({"input": "a", "mode": "deep"}, "mode"),
    "side": ({"input": "a", "side": "left"}, "side"),
    "a cap that is none": ({"input": "a", "max_rationale_tokens": -1}, "max_rationale_tokens"),
    "a cap above the model's": ({"input": "a", "max_rationale_tokens": 4097}, "max_rationale_tokens must be 0 to"),
    "misspelt": ({"input": "a", "dimension": 8}, "dimension: Extra inputs are not permitted"),
    "dimensions": ({"input": "a", "dimensions": 9}, "dimensions must be one of 8, 16, 32, got 9"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions"),
    "text for a number": ({"input": "a", "dimensions": "8"}, "dimensions"),
    "encoding": ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    "a document's instruction": ({"input": "a", "side": "document", "instruction": "b"}, "a document has no instruction"),
    "conversation": ({"messages": [{"role": "user", "content": "a"}] * 2}, "messages"),
    "system": ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    "no content": ({"messages": message(None)}, "messages is empty"),
    "unknown part": ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "x"}]}]}, "messages"),
    "bomb": ({"messages": message("a", bomb())}, "could be decompression bomb|20000 x 20000 pixels"),
    "large": ({"messages": message("a", bomb(1001, 1000))}, "1001 x 1000 pixels, the limit is 1 million"),
    "truncated": ({"messages": message("a", truncated())}, "cannot be decoded"),
    "no picture": ({"messages": message("a", "data:image/png;base64,aGVsbG8=")}, "none of JPEG"),
    "a rare format": ({"messages": message("a", postscript())}, "none of JPEG"),
    "bad base64": ({"messages": message("a", "data:image/png;base64,@@@")}, "base64"),
    "not base64": ({"messages": message("a", "data:image/png,abc")}, "base64"),
    "a web address": ({"messages": message("a", "https://example.com/a.png")}, "does not fetch pictures from the web"),
    "a path": ({"messages": message("a", "/etc/passwd")}, "a picture must be sent as data:"),
    "a file's address": ({"messages": message("a", "file:///etc/passwd")}, "a picture must be sent as data:"),
    "a video's address": ({"messages": [{"role": "user", "content": [{"video": "https://example.com/a.mp4"}]}]}, "does not fetch videos from the web"),
    "a video's path": ({"messages": [{"role": "user", "content": [{"video": "/etc/passwd"}]}]}, "a video must be sent as data:"),
    "no video": ({"messages": [{"role": "user", "content": [{"video": of_film(b"hello")}]}]}, "is no container"),
    "a playlist": ({"messages": [{"role": "user", "content": [{"video": of_film(b"#EXTM3U\nhttp://127.0.0.1/a.ts\n")}]}]}, "is no container"),
    "a rare container": ({"messages": [{"role": "user", "content": [{"video": of_film(clip(range(0, 400, 40), "asf", "mpeg4"))}]}]}, "is no container"),
    "a long video": ({"messages": [{"role": "user", "content": [{"video": of_film(clip(range(0, 700_000, 10_000), size=(16, 16)))}]}]}, "the limit is 600 s"),
    "many frames": ({"messages": [{"role": "user", "content": [{"video": of_film(FILM), "num_frames": 4}]}]}, "4 frames are asked for, the limit is 2"),
    "a span that is not there": ({"messages": [{"role": "user", "content": [{"video": of_film(FILM), "start": 9.0}]}]}, "there is no frame"),
    "many frames as pictures": ({"messages": [{"role": "user", "content": [{"video": ["data:image/png;base64,aGVsbG8="] * 3}]}]}, "3 pictures, but a request may have at most 2"),
    "a document's address": ({"messages": [{"role": "user", "content": [{"pdf": "https://example.com/a.pdf"}]}]}, "does not fetch documents from the web"),
    "a document's path": ({"messages": [{"role": "user", "content": [{"pdf": "/etc/passwd"}]}]}, "a document must be sent as data:"),
    "no document": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(b"hello")}]}]}, "it is not a PDF"),
    "an encrypted document": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(pdf([pdf_page()], PASSWORD_NEEDED))}]}]}, "encrypted"),
    "a picture as a document": ({"messages": [{"role": "user", "content": [{"pdf": "data:image/png;base64,aGVsbG8="}]}]}, "a document must be sent as data:"),
    "three pages": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(MANUAL)}]}]}, "3 pages, but a request may have at most 2"),
    "three named pages": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(MANUAL), "pages": [1, 1, 1]}]}]}, "3 pictures, but a request may have at most 2"),
    "a missing page": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(MANUAL), "pages": [9]}]}]}, "there is no such page"),
    "page 0": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(MANUAL), "pages": [0]}]}]}, "messages"),
    "a large picture in a page": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(scan(1001, 1000))}]}]}, "1,001,000 pixels, the limit is 1 million"),
    "two kinds in a part": ({"messages": [{"role": "user", "content": [{"pdf": of_pdf(MANUAL), "image": "x"}]}]}, "messages"),
    "a long instruction": ({"input": "a", "instruction": "b" * 2001}, "instruction has 2001 characters"),
    "a long message": ({"messages": message("a" * 2001)}, "messages has 2001 characters"),
    "a long message among others": ({"messages": [message("a"), message("a" * 2001)]}, r"messages\[1\] has 2001 characters"),
    "a long name": ({"input": "a", "model": "m" * 2000}, "model: String should have at most 1024"),
    "a long user": ({"input": "a", "user": "m" * 2000}, "user: String should have at most 1024"),
    "an empty conversation": ({"messages": [[]]}, "messages"),
    "no conversation": ({"messages": []}, "messages"),
    "a conversation of two": ({"messages": [[*message("a"), *message("b")]]}, "messages"),
    "too many conversations": ({"messages": [message("a")] * 41}, "41 inputs, but a request may have at most 40"),
    "too many pictures in all": ({"messages": [message("a", "data:image/png;base64,aGVsbG8=")] * 3}, "3 pictures, but a request may have at most 2"),
    "three pictures": ({"messages": message("a", *["data:image/png;base64,aGVsbG8="] * 3)}, "3 pictures, but a request may have at most 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_told_what_is_wrong(ask, name):
    body, said = WRONG[name]
    answer = ask(**body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    with pytest.raises(AssertionError, match=said):  # match= searches
        raise AssertionError(error["message"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"input": ', "not valid JSON"),
        (b"", "body"),
        (b"[1]", "body must be a JSON object"),
        (b'"a"', "body must be a JSON object"),
        (b"\xff\xfe{}", "body"),
        (b'{"input": "\\ud800"}', "half a character"),
        (b'{"input": "a", "instruction": "\\ud800"}', "half a character"),
        (b'{"input": "a", "dimensions": NaN}', "dimensions"),
        (b'{"input": NaN}', "input"),
        (b'{"input": "a", "mode": "\\udfff"}', "mode"),
        (b'{"input": "a", "\\udfff": 1}', "unicode"),
        (b"[" * 100_000, "body"),
        (b'{"input": ' + b"[" * 100_000, "body"),
        (b'{"input": "a", "dimensions": ' + b"9" * 5000 + b"}", "body|dimensions"),
    ],
)
def test_bodies_that_are_no_request(url, body, said):
    answer = httpx.post(
        f"{url}/v1/embeddings", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(answer.json()["error"]["message"])
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


def test_a_list_of_wrong_entries_costs_no_more_than_its_first(url):
    """A message for each would make an answer of megabytes."""
    began = time.process_time()
    for key, entry in (("input", "0.5"), ("messages", "{}"), ("messages", "[0]")):
        body = f'{{"{key}": [{",".join([entry] * 1000)}]}}'.encode()
        answer = httpx.post(
            f"{url}/v1/embeddings", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert key in answer.json()["error"]["message"]
    assert time.process_time() - began < 5


async def longest_stall(work):
    """How long the event loop did not turn while it did this, and what came of it."""
    gaps, last, task = [], time.monotonic(), asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    return max(gaps), task.result()


def beside_the_loop(service, path, body, **headers):
    """The answer to a body, while which the event loop must turn; a busy machine may delay it a little."""

    async def post():
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            headers.setdefault("content-type", "application/json")
            answer = http.post(path, content=body, headers=headers, timeout=120)
            return await longest_stall(answer)

    stalled_s, answer = asyncio.run(post())
    assert stalled_s < 1.0, "it stopped the server for all"
    return answer


@pytest.mark.slow
def test_no_body_stops_the_event_loop(embedder):
    """15 MB of 4 million inputs took 12 s, in which nobody else was served."""
    service = service_of(embedder, max_body_mb=16, max_inputs=2048, max_queue=4096)
    many = 4_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for body in (
        b'{"input":[' + b'"a",' * (many - 1) + b'"a"]}',
        b'{"input":' + b"[" + b"[]," * many + b"[]]}",
        b'{"messages":[' + b"{}," * many + b"{}]}",
        b'{"input":["' + rb"\\\"" * 1_000_000 + b'",' + b"7," * many + b"7]}",
    ):
        answer = beside_the_loop(service, "/v1/embeddings", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    # Marks within strings are none, and as many inputs as there may be are no values too many.
    texts = ['a "[{,\\' * 200] * 2000 + ["\U0001f511"]
    assert num_values(json.dumps({"input": texts}).encode()) == len(texts) + 1
    turns = [message("a" * 1000, "data:image/png;base64,aGVsbG8=")] * 2048
    answer = beside_the_loop(service, "/v1/embeddings", json.dumps({"messages": turns}).encode())
    assert "pictures, but a request may have at most" in answer.json()["error"]["message"]
    assert service.held.now == 0
    service.stop()


@pytest.mark.slow
def test_a_large_answer_does_not_stop_the_event_loop():
    bodies = Bodies(2048)
    rows = np.random.default_rng(0).normal(size=(2048, 1024)).astype(np.float32)
    content = {"data": [{"embedding": row} for row in rows]}
    stalled_s, answer = asyncio.run(longest_stall(bodies.answer(content, rows.size * 22)))
    found = json.loads(answer.body)["data"]
    assert np.array_equal(np.array([one["embedding"] for one in found], np.float32), rows)
    assert stalled_s < 0.5
    bodies.stop()


def test_slow_searches_do_not_keep_others_waiting(embedder):
    """Eight searches held the threads that decode pictures, also after their clients had left."""

    class Slow:
        about = {"dimensions": embedder.size, "task": None}
        ended, started = threading.Event(), []

        def search(self, *_, **__):
            self.started.append(1)
            self.ended.wait(30)
            return [[]]

    service = service_of(embedder, index=Slow())
    with running(service) as url:

        def search(_):
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/search", json={"input": "a"}, timeout=httpx.Timeout(30, read=1.0))

        threads, _ = in_threads(8, search)
        until(lambda: len(Slow.started) == 4)
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=20).status_code == 200
        for thread in threads:
            thread.join(30)
        until(lambda: "rge_preparing_inputs 0.0" in httpx.get(f"{url}/metrics").text)
        Slow.ended.set()
        time.sleep(0.1)
        assert len(Slow.started) == 4, "who left while waiting is not searched for"


def test_a_form_is_told_to_be_json(url):
    """A browser sends forms from any page to any address without asking; JSON it does not."""
    answer = httpx.post(f"{url}/v1/embeddings", data={"input": "a"})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_unknown_models_and_paths_have_openai_s_errors(client, url):
    with error_about(openai.NotFoundError, "other", "mine") as told:
        client.embeddings.create(model="other", input="a")
    assert told.value.code == "model_not_found"
    assert httpx.get(f"{url}/v2").json()["error"]["message"] == "GET /v2: Not Found"
    assert httpx.get(f"{url}/v1/embeddings").status_code == 405
    assert httpx.post(f"{url}/v1/search", json={"input": "a"}).status_code == 404  # no index


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_refused_and_not_kept(url, service, announced):
    """With its length in the head, and in chunks without one. The client reads the answer: it is not just cut off."""
    sent = 0

    def body():
        nonlocal sent
        yield b'{"input": "'
        for _ in range(100):
            sent += 1
            yield b"a" * (1 << 20)
        yield b'"}'

    headers = {"content-type": "application/json"} | (
        {"content-length": str((100 << 20) + 13)} if announced else {}
    )
    answer = httpx.post(f"{url}/v1/embeddings", content=body(), headers=headers, timeout=60)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the body is larger than 1 MB (max_body_mb)"
    assert sent == 100
    assert service.held.now == 0


def test_a_key_is_asked_for(embedder):
    with running(service_of(embedder, key="a secret of some length")) as url:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic a secret of some length"},
        ):
            answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a secret of some length", max_retries=0)
        assert len(client.embeddings.create(model="mine", input="a").data[0].embedding) == 32
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_a_page_of_another_name_is_refused(url, embedder):
    """DNS rebinding: a page's own name is made to point at this machine, and its scripts may read the answers."""
    for host, status in (
        ("evil.example", 400), ("evil.example:8000", 400), ("", 400), ("localhost", 200), ("localhost" + ":9", 200), ("127.0.0.1", 200),
        ("[::1]:8000", 200), ("10.1.2.3:80", 200), ("127.0.0.1.evil.example", 400),
    ):  # fmt: skip
        answer = httpx.get(f"{url}/health", headers={"host": host})
        assert answer.status_code == status, host
    assert "allowed_hosts=[127.0.0.1.evil.example]" in answer.json()["error"]["message"]
    with running(service_of(embedder, allowed_hosts=["*.example.com"])) as other:
        assert httpx.get(f"{other}/health", headers={"host": "a.example.com"}).status_code == 200
        assert httpx.get(f"{other}/health", headers={"host": "localhost"}).status_code == 400
    with running(service_of(embedder, key="a secret of some length")) as other:
        assert httpx.get(f"{other}/health", headers={"host": "anything.example"}).status_code == 200


def test_browsers_are_let_in_by_origin(url, embedder):
    preflight = {"origin": "https://shop.example", "access-control-request-method": "POST"}
    assert (
        "access-control-allow-origin" not in httpx.options(f"{url}/v1/embeddings", headers=preflight).headers
    )
    options = {"cors_origins": ["https://shop.example"], "key": "a secret of some length"}
    with running(service_of(embedder, **options)) as other:
        allowed = httpx.options(f"{other}/v1/embeddings", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://shop.example"
        refused = httpx.options(
            f"{other}/v1/embeddings", headers=preflight | {"origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in refused.headers


def test_a_request_has_an_id(url):
    for given in ("7f-abc_9", "00-4bf92f3577b34da6-01"):
        assert httpx.get(f"{url}/health", headers={"x-request-id": given}).headers["x-request-id"] == given
    for given in ({}, {"x-request-id": "a b"}, {"x-request-id": "a" * 200}):
        made = httpx.get(f"{url}/health", headers=given).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
    answer = httpx.post(f"{url}/v1/embeddings", json={}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")


# ---------------------------------------------------------------------------------------------------------------- load


class Gate:
    """Lets the model begin when the test says so."""

    def __init__(self, service):
        self.inner, self.open, self.batches = service.batches.embed, threading.Event(), []
        service.batches.embed = self

    def __call__(self, prompts, mode, caps):
        self.batches.append(len(prompts))
        assert self.open.wait(30)
        return self.inner(prompts, mode, caps)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def in_threads(count, work):
    found = []
    threads = [
        threading.Thread(target=lambda row=row: found.append(work(row)), daemon=True) for row in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads, found


@pytest.mark.slow
def test_a_full_queue_is_said_with_when_to_come_back(embedder):
    service = service_of(embedder, max_queue=4, max_inputs=4, batch_size=1)
    gate = Gate(service)
    with running(service) as url:

        def ask(_):
            return httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60)

        threads, found = in_threads(1, ask)
        until(lambda: gate.batches)  # the first is with the model, so that the others fill the queue
        more, others = in_threads(4, ask)
        until(lambda: service.batches.num_waiting == 4)
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "rge_waiting_inputs 4.0" in httpx.get(f"{url}/metrics").text
        gate.open.set()
        for thread in threads + more:
            thread.join(30)
        assert [one.status_code for one in found + others] == [200] * 5
        counted = httpx.get(f"{url}/metrics").text
        assert 'rge_requests_total{code="200",path="/v1/embeddings"} 5.0' in counted
        assert 'rge_requests_total{code="429",path="/v1/embeddings"} 1.0' in counted
        assert 'rge_batch_inputs_count{mode="reasoning"} 5.0' in counted
        assert "rge_rationale_tokens_count 5.0" in counted


def test_who_went_away_is_not_embedded(embedder):
    service = service_of(embedder, batch_size=1)
    gate = Gate(service)
    with running(service) as url:
        threads, _ = in_threads(
            1, lambda row: httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60)
        )
        until(lambda: gate.batches)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/embeddings", json={"input": ["b"] * 10}, timeout=httpx.Timeout(10, read=0.3)
            )
        until(lambda: service.batches.num_waiting == 0)
        gate.open.set()
        threads[0].join(30)
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "c"}, timeout=60).status_code == 200
        assert gate.batches == [1, 1]
        assert 'rge_requests_total{code="499",path="/v1/embeddings"} 1.0' in httpx.get(f"{url}/metrics").text
        until(lambda: service.held.now == 0)


def test_time_is_up(embedder):
    service = service_of(embedder, timeout_s=0.5)
    gate = Gate(service)
    with running(service) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60)
        assert answer.status_code == 504
        assert "timeout_s=0.5" in answer.json()["error"]["message"]
        gate.open.set()

        def slowly():
            yield b'{"input":'
            time.sleep(1.5)
            yield b'"a"}'

        late = httpx.post(
            f"{url}/v1/embeddings", content=slowly(), headers={"content-type": "application/json"}
        )
        assert late.status_code == 408
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 200


def test_what_is_held_is_bounded(embedder):
    service = service_of(embedder, max_waiting_mb=1)
    with running(service) as url:
        service.held.take(1 << 20)
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        service.held.give(1 << 20)
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 200
        until(lambda: service.held.now == 0)


def test_pictures_are_decoded_one_at_a_time_and_their_memory_is_taken_before(embedder, monkeypatch):
    """A flat picture of 50 megapixels has some 50 kB, so a body may hold gigabytes of them."""
    service = service_of(embedder, max_pictures=12, max_waiting_mb=32)
    decoded, taken = [], []

    def load(data):
        assert not [one for one in decoded if one() is not None], "another picture has its full size"
        taken.append(service.held.now)
        decoded.append(weakref.ref(image := load_image(data)))
        return image

    monkeypatch.setattr("rge.serving.inputs.load_image", load)
    pictures = [Image.new("RGB", (1000, 900), (row, 0, 0)) for row in range(12)]
    asked = {"messages": message("a", *map(shown, pictures))}
    with running(service) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=60)
        assert_same(vectors(answer)[0], embedder.encode_query("a", pictures))
        assert len(taken) == 12
        assert all(10 * 900_000 < one < 12 * 900_000 for one in taken)
        until(lambda: service.held.now == 0)
        service.held.take(25 << 20)  # others', for now
        answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=60)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        service.held.give(25 << 20)
        assert len(taken) == 12, "nothing was decoded"
        until(lambda: service.held.now == 0)
    with running(service_of(embedder, max_waiting_mb=8)) as url:
        asked = {"messages": message("a", shown(pictures[0]))}
        answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=60)
        assert answer.status_code == 413, "trying again would not help"
        assert "9 MB of memory are needed, but max_waiting_mb=8" in answer.json()["error"]["message"]
        assert len(taken) == 12


def test_a_request_that_needs_more_memory_than_there_may_be_is_not_told_to_try_again():
    held = MemoryBudget(10)
    held.take(5)
    with held.loan() as loan:
        loan.take(5)
        with pytest.raises(Refusal) as refused:
            loan.take(5)  # there is room once the others have finished
        assert (refused.value.status, refused.value.retry_after_s) == (503, 2)
        with pytest.raises(Refusal) as refused:
            loan.take(6)
        assert (refused.value.status, refused.value.retry_after_s) == (413, None)
        assert (held.now, loan.now) == (10, 5)
    assert held.now == 5


def test_a_model_that_cannot_answer_any_more_makes_the_server_unhealthy(embedder):
    """After a sticky error of CUDA every call fails, and whoever watches the server should start it anew."""
    service = service_of(embedder)
    inner = service.batches.embed

    def fails(prompts, mode, caps):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def nothing(prompts, mode, caps):
        found = inner(prompts, mode, caps)
        found.embeddings[:] = np.nan
        return found

    with running(service) as url:

        def health():
            answer = httpx.get(f"{url}/health")
            return answer.status_code, answer.json()["status"], answer.json().get("reason")

        for embed in (fails, nothing):
            service.batches.embed = embed
            for count in range(1, 4):
                assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 500
                if count < 3:
                    assert health() == (200, "ok", None)
            assert health() == (503, "failing", "the model has failed 3 times in a row")
            service.batches.embed = inner
            assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 200
            assert health() == (200, "ok", None)
        service.batches.embed = fails  # a batch is tried again input by input
        assert httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}).status_code == 500
        until(lambda: service.batches.num_failures == 2)
        assert health()[0] == 200


def test_inputs_that_the_model_fails_on_do_not_make_the_server_unhealthy(embedder):
    """Clients send an input that needs too much memory several times; nobody else may ask before a watchdog acts."""
    service = service_of(embedder)
    inner, modes, seen = service.batches.embed, [], set()

    def fails_on_long(prompts, mode, caps):
        seen.add(service.batches.num_failures)
        modes.append(mode)
        if len(prompts[0]) > 60:
            raise MemoryError("out of memory")
        return inner(prompts, mode, caps)

    service.batches.embed = fails_on_long
    with running(service) as url:
        for side in ("query", "document"):
            for _ in range(4):
                asked = {"input": "word " * 60, "side": side}
                assert httpx.post(f"{url}/v1/embeddings", json=asked).status_code == 500
                assert httpx.get(f"{url}/health").status_code == 200
    assert seen == {0, 1, 2}
    assert modes == [*["reasoning"] * 5, *["direct"] * 5], (
        "tried in the mode that failed: vLLM writes the rationales alone"
    )


def test_a_batch_that_does_not_end_makes_the_server_unhealthy(embedder):
    service = service_of(embedder, timeout_s=0.4)
    gate = Gate(service)
    with running(service) as url:
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 504
        until(lambda: service.batches.running_s > 0.4)
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 503
        assert answer.json()["reason"] == "a batch has been running for more than timeout_s=0.4"
        gate.open.set()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_who_has_no_key_learns_no_path_of_the_server(embedder):
    """/health needs no key."""
    for name, shown_name in (
        ("/home/me/runs/joint/final", "joint/final"),
        ("/final", "final"),
        ("me/mine", "me/mine"),
    ):
        with running(service_of(embedder, key="a secret of some length", name=name)) as url:
            answer = httpx.get(f"{url}/health")
            assert answer.json()["model"] == shown_name
            for path in ("/health", "/metrics", "/openapi.json"):
                assert "/home/me" not in httpx.get(f"{url}{path}").text


@pytest.mark.slow
def test_one_input_that_the_model_fails_on_fails_alone(embedder):
    """Out of memory, a bug, a state that is not finite: the batch is tried row by row, and the thread lives."""
    service = service_of(embedder)
    inner = service.batches.embed

    def fails(prompts, mode, caps):
        if any(prompt.id == "input[1]" for prompt in prompts):
            raise RuntimeError("too long for this kernel")
        found = inner(prompts, mode, caps)
        for row, prompt in enumerate(prompts):
            if prompt.id == "input[2]":
                found.embeddings[row] = np.nan
        return found

    service.batches.embed = fails
    with running(service) as url:

        def post(texts):
            return httpx.post(f"{url}/v1/embeddings", json={"input": texts}, timeout=60)

        threads, found = in_threads(6, lambda row: post(["a"] * (1 + row % 3)))
        for thread in threads:
            thread.join(30)
        assert sorted(one.status_code for one in found) == [200, 200, 500, 500, 500, 500]
        failed = next(one for one in found if one.status_code == 500)
        assert failed.json()["error"]["type"] == "server_error"
        assert "too long for this kernel" not in failed.text
        # Uvicorn closes the connection after such an error: a client that is not told sends its next request into it.
        assert failed.headers["connection"] == "close"
        assert post(["a"]).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_a_lone_client_does_not_wait_for_others(embedder):
    service = service_of(embedder, batch_wait_ms=4000)
    with running(service) as url:

        def post(row=0):
            began = time.monotonic()
            assert (
                httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=60).status_code == 200
            )
            return time.monotonic() - began

        assert all(post() < 3.5 for _ in range(3))
        gate = Gate(service)
        threads, _ = in_threads(1, post)
        until(lambda: gate.batches == [2])
        threads += in_threads(2, post)[0]
        until(lambda: len(service.batches._waiting) == 4)
        gate.open.set()
        for thread in threads:
            thread.join(30)
        assert gate.batches == [2, 4]
        assert post() > 3.5  # others were there a moment ago
        assert post() < 3.5


def test_a_request_that_is_given_up_ends_between_two_of_its_inputs(embedder, monkeypatch):
    service = service_of(embedder)
    prepared = []

    def slowly(*given):
        prepared.append(given)
        time.sleep(0.1)
        return make_prompt(*given)

    monkeypatch.setattr("rge.serving.app.make_prompt", slowly)
    with running(service) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/embeddings", json={"input": ["b"] * 40}, timeout=httpx.Timeout(10, read=0.3)
            )
        until(lambda: service.num_preparing == 0)
        count = len(prepared)
        assert "rge_preparing_inputs 0.0" in httpx.get(f"{url}/metrics").text
        time.sleep(0.3)
        assert len(prepared) == count < 40
        assert service.batches.num_waiting == 0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"batch_size": 3}, [[50, 9, 48], [500], [51, 50, 8], [7, 6]]),
        ({"batch_size": 9, "batch_tokens": 101}, [[50, 48], [9], [500], [51], [50, 8], [7, 6]]),
    ],
)
def test_a_batch_takes_the_oldest_and_those_nearest_to_it_in_length(limit, expected):
    class Sized:
        pixels = None

        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

    batches = Batches(lambda prompts, mode, caps: None, wait_s=0, max_queue=9, **limit)

    async def fill():
        with batches.reserve(4), batches.reserve(5):
            with pytest.raises(Refusal), batches.reserve(1):
                pytest.fail("there is room for ten")
        waits = [
            asyncio.ensure_future(batches.answers([Sized(size) for size in sizes], mode))
            for sizes, mode in (((50, 9, 500, 48), "reasoning"), ((51, 50, 8, 7, 6), "direct"))
        ]
        await asyncio.sleep(0)
        return waits, [batches._next() for _ in range(len(expected) + 1)]

    waits, found = asyncio.run(fill())
    assert [[len(row.prompt) for row in batch] for batch in found] == [*expected, []]
    assert all(len({row.mode for row in batch}) == 1 for batch in found[:-1])


def test_a_batch_that_fails_is_not_logged_as_the_request_that_woke_the_queue(caplog):
    """It may hold inputs of others, and that request may have been answered long ago."""

    def fails(prompts, mode, caps):
        raise RuntimeError("out of memory")

    async def ask():
        correlation_id.set("who-asked")
        batches = Batches(fails, batch_size=3, wait_s=0, max_queue=9)
        with pytest.raises(RuntimeError):
            await batches.answers(["a", "b"], "direct")
        batches.stop()

    caplog.handler.addFilter(CorrelationIdFilter(default_value="-"))
    asyncio.run(ask())
    assert [record.correlation_id for record in caplog.records if "retrying" in record.message] == ["-"]


# ----------------------------------------------------------------------------------------------------------------- web


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("192.168.0.1", False),
        ("172.16.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False),
        ("::127.0.0.1", False), ("ff02::1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert public_web.is_public(address) is public


@pytest.fixture
def web(picture):
    """A server of pictures, that redirects and lies."""
    data = base64.b64decode(shown(picture(60, 40)).split(",")[1])
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.headers["host"], self.path))
            if self.path.startswith("/to?"):
                self.send_response(302)
                self.send_header("Location", unquote(self.path[4:], "latin-1"))  # raw, as many send it
                self.end_headers()
                return
            self.send_response(200 if self.path != "/missing.png" else 404)
            self.end_headers()
            padded = {"/a.png": data, "/padded.png": data + bytes(600_000)}
            self.wfile.write(padded.get(self.path, b"x" * (3 << 20)))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked, data
    server.shutdown()
    server.server_close()


def test_private_addresses_are_never_reached(web):
    address, asked, _ = web
    port = address.rsplit(":", 1)[1]
    for host in (
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "[::1]",
        "[::ffff:127.0.0.1]",
    ):
        with error_about(ImageError, host.strip("[]"), "private"):
            asyncio.run(public_web.fetch_public(f"http://{host}:{port}/a.png", lambda count: None))
    assert asked == []


def test_redirects_and_names_are_checked_for_each_connection(web, monkeypatch):
    """127.0.0.1 counts as public here, and any other address of this machine does not."""
    address, asked, data = web
    port = address.rsplit(":", 1)[1]
    monkeypatch.setattr(public_web, "is_public", lambda one: one == "127.0.0.1")

    def fetch(where):
        return asyncio.run(
            public_web.fetch_public(where, Allowance(ServeOptions(checkpoint="", max_body_mb=1)).take)
        )

    assert fetch(f"{address}/a.png") == data
    assert fetch(f"{address}/to?/a.png") == data
    assert fetch(f"{address}/to?{address}/to?/a.png") == data
    asked.clear()
    for spelled in ("/schlüssel a.png", "/to?/schlüssel a.png"):
        with error_about(ImageError, "from the web", "huge"):
            fetch(f"{address}{spelled}")
    assert asked[0][1] == asked[-1][1] == "/schl%C3%BCssel%20a.png"
    for refused, kind in (
        (f"{address}/to?http://127.0.0.2:{port}/a.png", "private"),
        (f"{address}/to?file:///etc/passwd", "scheme"),
        (f"{address}/to?/to?/to?/to?/to?/to?/a.png", "redirects"),
        (f"{address}/missing.png", "status"),
        (f"{address}/large.png", "huge"),
        ("http://", "network"),
        ("http://nowhere.invalid/a.png", "network"),
        ("http://schlüssel.invalid/a.png", "network"),
        ("http://127.0.0.1:99999/a.png", "network"),
    ):
        with error_about(ImageError, kind):
            fetch(refused)
    # The name's address is looked up once, checked, and that one is connected to.
    lookups = []

    async def lookup(self, host, wanted, **_):
        lookups.append(host)
        first = "127.0.0.1" if len(lookups) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (first, wanted))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lookup)
    asked.clear()
    assert fetch(f"http://rebinding.example:{port}/a.png") == data
    assert lookups == ["rebinding.example"]
    assert asked == [(f"rebinding.example:{port}", "/a.png")]


def test_fetched_pictures_count_as_memory_and_as_part_of_the_request(embedder, web, monkeypatch):
    """Otherwise a small body would make the server fetch, and keep, gigabytes."""
    address, _, data = web
    monkeypatch.setattr(public_web, "is_public", lambda one: True)
    service = service_of(embedder, allow_urls=True, max_waiting_mb=2)
    held = []
    monkeypatch.setattr(
        "rge.serving.app.make_prompt", lambda *given: (held.append(service.held.now), make_prompt(*given))[1]
    )
    with running(service) as url:

        def post(*messages, path="/v1/embeddings", **body):
            body = body or {"messages": list(messages)}
            answer = httpx.post(url + path, json=body, timeout=60)
            until(lambda: service.held.now == 0)
            return answer.status_code, answer.text

        padded = f"{address}/padded.png"  # 600 kB
        assert post(message("a", padded))[0] == 200
        assert held[-1] > 600_000
        too_much = "are larger than 1 MB (max_body_mb) together"
        for answer in (
            post(message("a", padded, padded)),
            post(message("a", padded), message("b", padded)),
            post(path="/v1/rerank", query={"image": padded}, documents=[{"image": padded}]),
        ):
            assert answer[0] == 400
            assert too_much in answer[1]
        service.held.take(1_500_000)
        answer = httpx.post(f"{url}/v1/embeddings", json={"messages": message("a", padded)}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        until(lambda: service.held.now == 1_500_000)


def test_a_picture_is_fetched_where_that_is_allowed(embedder, web, picture, monkeypatch):
    address, _, _ = web
    with running(service_of(embedder, allow_urls=True)) as url:

        def post(where):
            return httpx.post(f"{url}/v1/embeddings", json={"messages": message("a", where)}, timeout=60)

        answer = post(f"{address}/a.png")
        assert answer.status_code == 400
        assert "is not on the public internet" in answer.json()["error"]["message"]
        monkeypatch.setattr(public_web, "is_public", lambda one: True)
        assert_same(vectors(post(f"{address}/a.png"))[0], embedder.encode_query("a", picture(60, 40)))


def test_the_description_names_the_keys(url):
    about = httpx.get(f"{url}/openapi.json").json()
    keys = json.dumps(about["components"]["schemas"]["EmbeddingsAsked"])
    assert all(name in keys for name in ("return_rationale", "instruction", "dimensions", "side", "mode"))


# ------------------------------------------------------------------------------------------------------------- process


@contextlib.contextmanager
def process(checkpoint, *words, before=""):
    """`rge serve` as a stranger starts it; yields the process, its address, and a function that reads on."""
    command = f'{before} exec "$0" -m rge serve "$@"'
    if not any(word.startswith("access_log") for word in words):
        words = ("access_log=false", *words)  # its pipe is not read, and a full one would stop the server
    arguments = [sys.executable, f"checkpoint={checkpoint}", "port=0", *words]
    started = subprocess.Popen(
        ["bash", "-c", command, *arguments], cwd=checkpoint.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        end = threading.Timer(180, started.kill)
        end.start()
        line = started.stdout.readline()
        end.cancel()
        found = re.search(r"http://127\.0\.0\.1:(\d+) ", line)
        assert found, line + started.stderr.read()
        yield started, int(found[1])
    finally:
        started.kill()
        started.communicate(timeout=20)


@contextlib.contextmanager
def serving(checkpoint, *words):
    """The same without the imports, as a `forked.Program`."""
    words = ("-m", "rge", "serve", f"checkpoint={checkpoint}", "port=0", *words)
    with forked.Program(*words, cwd=checkpoint.parent) as program:
        yield program, int(program.printed(r"http://127\.0\.0\.1:(\d+) ")[1])


async def one_request(port, body):
    """Status and body over a connection of its own, with as little work for this side as can be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


async def many(port, bodies):
    """All at once, as far as this process may open connections."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    at_once = asyncio.Semaphore(min(limit - 50, len(bodies)))

    async def one(body):
        async with at_once:
            return await one_request(port, body)

    return await asyncio.gather(*map(one, bodies))


@pytest.mark.slow(10)
def test_a_thousand_clients_at_once_and_nothing_lost_with_1024_files(checkpoint, embedder):
    """Then a second server on its port, and SIGTERM while it works: what is under way is answered, what is new refused."""
    texts = [f"What opens number {number % 25}?" for number in range(1000)]
    modes = ["direct" if row % 10 else "reasoning" for row in range(1000)]
    bodies = [
        json.dumps({"input": text, "mode": mode}).encode() for text, mode in zip(texts, modes, strict=True)
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with process(checkpoint, before="ulimit -n 1024;") as (started, port):
        answers = asyncio.run(many(port, bodies))
        assert [status for status, _ in answers] == [200] * 1000
        for row in range(0, 1000, 37):
            expected = embedder.encode_query(texts[row], mode=modes[row])
            assert_same(np.array(answers[row][1]["data"][0]["embedding"], np.float32), expected)

        second = forked.run("-m", "rge", "serve", f"checkpoint={checkpoint}", f"port={port}")
        assert second.returncode == 2
        assert f"127.0.0.1:{port}: it cannot be listened on: Address already in use" in second.stderr
        assert "Traceback" not in second.stderr

        async def end():
            waiting = [asyncio.ensure_future(one_request(port, body)) for body in bodies[:200]]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            started.send_signal(signal.SIGTERM)
            refused = 0
            while not refused:
                try:
                    status, _ = await one_request(port, bodies[0])
                    refused = status == 503
                except OSError:
                    refused = 1
            return await asyncio.gather(*waiting)

        assert [status for status, _ in asyncio.run(end())] == [200] * 200
        assert started.wait(30) == 0
        assert "Traceback" not in started.stderr.read()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_the_access_log_has_the_requests_id_and_goes_to_stderr(checkpoint):
    with serving(checkpoint, "access_log=true") as (started, port):
        httpx.get(f"http://127.0.0.1:{port}/health", headers={"x-request-id": "who-asked"})
        started.send(signal.SIGTERM)
        done = started.finished()
    assert done.returncode == 0
    assert "access" not in done.stdout
    assert re.search(r'INFO \[who-asked\] 127\.0\.0\.1:\d+ - "GET /health HTTP/1\.1" 200', done.stderr)


@pytest.mark.slow
def test_what_is_not_done_in_time_is_given_up_and_a_second_signal_ends_at_once(checkpoint):
    body = json.dumps({"input": ["a key"] * 200}).encode()

    async def end(port, started, *signals):
        waiting = [asyncio.ensure_future(one_request(port, body)) for _ in range(8)]
        await asyncio.sleep(1)
        for number in signals:
            started.send(number)
            await asyncio.sleep(0.3)
        return await asyncio.gather(*waiting, return_exceptions=True)

    slow = ("batch_size=1", "max_new_tokens=12", "batch_wait_ms=0")
    with serving(checkpoint, *slow, "drain_s=0.5") as (started, port):
        found = asyncio.run(end(port, started, signal.SIGTERM))
        assert {status for status, _ in found} <= {200, 503}
        refused = [content for status, content in found if status == 503]
        assert refused[0]["error"]["code"] == "shutting_down"
        done = started.finished()
    assert done.returncode == 1
    assert re.search("requests given up after drain_s=0.5: [1-9]", done.stdout)
    with serving(checkpoint, *slow, "drain_s=100") as (started, port):
        began = time.monotonic()
        asyncio.run(end(port, started, signal.SIGINT, signal.SIGINT))
        assert started.finished().returncode == 130
        assert time.monotonic() - began < 10


def test_requests_whose_batch_is_running_are_given_up_too(embedder, monkeypatch):
    service, busy, free = service_of(embedder, batch_size=1), threading.Event(), threading.Event()

    def embed(*_):
        busy.set()
        free.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr(service.batches, "embed", embed)
    transport = httpx.ASGITransport(app=service.app)

    async def ask():
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asked = [asyncio.ensure_future(http.post("/v1/embeddings", json={"input": "a"})) for _ in "ab"]
            await asyncio.to_thread(busy.wait)
            service.guard.is_draining = True
            assert service.guard.give_up() == 2
            return await asyncio.wait_for(asyncio.gather(*asked), 60)

    answers = asyncio.run(ask())
    service.stop()
    free.set()
    assert [answer.status_code for answer in answers] == [503, 503]
    assert {answer.json()["error"]["code"] for answer in answers} == {"shutting_down"}


def test_an_answer_that_is_being_sent_is_not_cut_off(embedder):
    service, sent = service_of(embedder), []
    reading, rest = asyncio.Event(), asyncio.Event()

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.start":
            reading.set()
            await rest.wait()

    async def slow_client():
        scope = {"type": "http", "method": "GET", "path": "/health", "headers": [(b"host", b"localhost")]}
        received = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            return received.pop() if received else await asyncio.Event().wait()

        asked = asyncio.ensure_future(service.app(scope | {"query_string": b""}, receive, send))
        await asyncio.wait_for(reading.wait(), 60)
        assert service.guard.give_up() == 0
        await asyncio.sleep(0.01)
        rest.set()
        await asyncio.wait_for(asked, 60)

    asyncio.run(slow_client())
    service.stop()
    assert sent[0]["status"] == 200
    assert not sent[-1].get("more_body")
    assert b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["checkpoint=nowhere"], "nowhere"),
        (["checkpoint=x", "host=nowhere.invalid"], "nowhere.invalid"),
        (["checkpoint=x", "host=192.0.2.1"], "192.0.2.1:8000"),
        (["checkpoint=x", "key_env=RGE_NO_SUCH_KEY"], "RGE_NO_SUCH_KEY"),
        (["checkpoint=x", "index=nowhere"], "missing"),  # before the model is loaded
        (["checkpoint=x", "engine=vllm", "exact=true"], "exact"),
        (["checkpoint=x", "max_queue=3"], "max_inputs"),
        (["checkpoint=x", "allowed_hosts=[example.com:80]"], "allowed_hosts[0]"),
        (["checkpoint=x", "cors_origins=[https://a.com/]"], "cors_origins[0]"),
    ],
)
def test_a_server_that_cannot_start_says_why(words, field, monkeypatch):
    with error_about(UserError, field):
        main([*words, *([] if any("host" in word for word in words) else ["port=0"])])
