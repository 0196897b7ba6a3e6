"""One item, one vector: whichever way it takes to the model, in whatever form, with parts empty, null or missing."""

import asyncio
import base64
import io
import itertools
import json

import httpx
import numpy as np
import pytest
from clips import clip
from PIL import Image

from rge.embedder import Embedder

SIDES = ("query", "document")
TEXTS = ["a key", None, "What opens this?", None, "two keys"]
COUNTS = [0, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def embedder(checkpoint):
    return Embedder.from_pretrained(checkpoint, device="cpu")


@pytest.fixture
def images(picture):
    return [[picture(60, 40, row), picture(30, 80, row + 9)][:count] for row, count in enumerate(COUNTS)]


@pytest.fixture
def expected(embedder, images):
    found = {side: getattr(embedder, f"encode_{side}")(TEXTS, images) for side in SIDES}
    for vectors in found.values():
        cosines = vectors @ vectors.T
        assert (cosines[~np.eye(len(TEXTS), dtype=bool)] < 1 - 1e-4).all(), (
            "items that are alike prove nothing"
        )
    return found


def assert_same(found, expected, rows=None):
    np.testing.assert_allclose(np.asarray(found), expected if rows is None else expected[rows], atol=1e-6)


def empty_or(value, *empties):
    """The forms of a part: itself, or each way to say that there is none; "missing" leaves out its key."""
    return [value] if value else [*empties, "missing"]


def png(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def data_url(image):
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def test_the_embedder_itself(embedder, images, expected, tmp_path):
    for side in SIDES:
        encode = getattr(embedder, f"encode_{side}")
        assert_same(encode([text or "" for text in TEXTS], [row or None for row in images]), expected[side])
        for row, (text, pictures) in enumerate(zip(TEXTS, images, strict=True)):
            for place, image in enumerate(pictures):
                image.save(tmp_path / f"{place}.png")
            paths = [tmp_path / f"{place}.png" for place in range(len(pictures))]
            for form in (
                pictures,
                [*map(str, paths)],
                paths,
                [*map(png, pictures)],
                [*map(data_url, pictures)],
            ):
                assert_same(encode([text], [form]), expected[side], [row])


@pytest.mark.slow
def test_sentence_transformers(checkpoint, images, expected):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    rows, inputs = [], []
    for row, (text, pictures) in enumerate(zip(TEXTS, images, strict=True)):
        forms = [pictures, pictures[0]] if len(pictures) == 1 else [pictures]
        for words, shown in itertools.product(
            empty_or(text, "", " \n", None), [one for form in forms for one in empty_or(form, [], None)]
        ):
            parts = [("text", words), ("image", shown)]
            for ordered in (parts, parts[::-1]):
                inputs.append(
                    {key: value for key, value in ordered if not isinstance(value, str) or value != "missing"}
                )
                rows.append(row)
        content = [{"type": "image", "image": image} for image in pictures]
        for words in empty_or(text, ""):
            told = [] if words == "missing" else [{"type": "text", "text": words}]
            inputs.append([{"role": "user", "content": [*content, *told]}])
            rows.append(row)
    assert_same(model.encode_query(inputs), expected["query"], rows)
    assert_same(model.encode_document(inputs), expected["document"], rows)


def test_langchain(checkpoint, embedder, images, expected):
    pytest.importorskip("langchain_core")
    from rge.integrations.langchain import ReasoningEmbeddings

    model = ReasoningEmbeddings(embedder)
    assert_same(model.embed_documents([TEXTS[0]]), expected["document"], [0])
    assert_same(model.embed_image(uris=[images[1][0]]), expected["document"], [1])
    for row, (text, pictures) in enumerate(zip(TEXTS, images, strict=True)):
        assert_same(model.embed_query(text or "", pictures), expected["query"], row)


def test_llama_index(checkpoint, images, expected, tmp_path):
    pytest.importorskip("llama_index.core")
    from rge.integrations.llama_index import ReasoningEmbedding

    model = ReasoningEmbedding(str(checkpoint), device="cpu")
    images[1][0].save(tmp_path / "a.png")
    assert_same(model.get_query_embedding(TEXTS[0]), expected["query"], 0)
    assert_same(model.get_text_embedding(TEXTS[0]), expected["document"], 0)
    assert_same(model.get_image_embedding(str(tmp_path / "a.png")), expected["document"], 1)


def test_mteb(checkpoint, images, expected):
    mteb = pytest.importorskip("mteb")
    from mteb.models import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType

    from rge.integrations.mteb import register

    class Batches(list):
        """What MTEB's loader yields, and the columns that its wrapper looks at."""

        dataset = type("Dataset", (), {"features": {"text": None, "image": None}})

    register(checkpoint, "me/one")
    options = {"trust_remote_code": True, "device": "cpu"}
    wrapped = SentenceTransformerEncoderWrapper(str(checkpoint), **options)
    wrapped.mteb_model_meta.modalities = ["image", "text"]
    texts, pictures = [text or "" for text in TEXTS], [row or None for row in images]
    columns = {"text": texts, "image": pictures, "query": texts}
    about = {
        "task_metadata": mteb.get_task("CIRRIT2IRetrieval").metadata,
        "hf_split": "test",
        "hf_subset": "default",
    }
    about["task_metadata"] = about["task_metadata"].model_copy(update={"prompt": None})
    for model in (mteb.get_model("me/one", device="cpu"), wrapped):
        for batch in (columns, dict(reversed(columns.items()))):
            for side in SIDES:
                found = model.encode(Batches([batch]), prompt_type=PromptType[side], **about)
                assert_same(found, expected[side])


def test_mteb_s_clips(checkpoint, embedder, images, tmp_path):
    """Clips as MTEB's loader has them, without torchcodec; decoders, frames and missing ones in a batch."""
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset, Features, Value, Video
    from mteb._create_dataloaders import create_dataloader
    from mteb.types import PromptType

    from rge.integrations.mteb import register

    film = tmp_path / "a.mp4"
    film.write_bytes(clip(range(0, 2000, 40), size=(56, 56)))
    meta = register(checkpoint, "me/clips")
    assert "video" in meta.modalities
    model = mteb.get_model("me/clips", device="cpu")
    metadata = mteb.get_task("CIRRIT2IRetrieval").metadata
    metadata = metadata.model_copy(
        update={"prompt": None, "category": "vt2vt", "modalities": ["text", "video"]}
    )
    features = Features({"id": Value("string"), "text": Value("string"), "video": Video()})
    rows = {
        "id": ["1", "2"],
        "text": ["a key", "two"],
        "video": [str(film), {"bytes": film.read_bytes(), "path": None}],
    }
    about = {"task_metadata": metadata, "hf_split": "test", "hf_subset": "default"}
    for side in SIDES:
        kind = PromptType[side]
        loader = create_dataloader(
            Dataset.from_dict(rows, features=features), task_metadata=metadata, prompt_type=kind, batch_size=2
        )
        encode = getattr(embedder, f"encode_{side}")
        expected = [encode(content=[{"video": str(film)}, {"text": text}]) for text in rows["text"]]
        assert_same(model.encode(loader, prompt_type=kind, **about), np.stack(expected))
        decoder = type("VideoDecoder", (), {"_hf_encoded": {"path": str(film), "bytes": None}})()
        frames = [image[0] for image in images[3:5]]
        frames = np.stack([np.asarray(image.resize((56, 84))) for image in frames])
        batch = {"text": ["a key", "", "two"], "video": [decoder, frames.transpose(0, 3, 1, 2), None]}
        shown = [Image.fromarray(frame) for frame in frames]
        expected = [expected[0], encode(content=[{"video": shown}]), encode("two")]
        batch |= {"query": batch["text"]}
        assert_same(model.encode([batch], prompt_type=kind, **about), np.stack(expected))


def test_the_server(embedder, images, expected):
    pytest.importorskip("fastapi")
    from rge.serving.app import Service
    from rge.serving.options import ServeOptions

    service = Service(embedder, ServeOptions(checkpoint="mine"))
    service.start()

    async def post(path, body):
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def check(side, path, body, rows):
        found = await post(path, body)
        if path == "/v1/embeddings":
            vectors = [one["embedding"] for one in found["data"]]
        else:
            vectors = found["embeddings"]["float"] if isinstance(found, dict) else found
        assert_same(vectors, expected[side], rows)

    def parts(words, row):
        shown = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images[row]]
        told = [] if words in ("missing", None) else [{"type": "text", "text": words}]
        return [*shown, *told]

    async def every():
        for side, kind in zip(SIDES, ("search_query", "search_document"), strict=True):
            for row, text in enumerate(TEXTS):
                for words in empty_or(text, ""):
                    content = parts(words, row)
                    turn = [{"role": "user", "content": content}]
                    await check(side, "/v1/embeddings", {"messages": turn, "side": side}, [row])
                    cohere = {"inputs": [{"content": content}], "input_type": kind}
                    await check(side, "/v2/embed", cohere, [row])
                if len(images[row]) == 1:
                    for words in empty_or(text, "", None):
                        one = {"image": data_url(images[row][0])} | (
                            {} if words == "missing" else {"text": words}
                        )
                        await check(side, "/v1/embeddings", {"input": [one], "input_type": side}, [row])
            await check(side, "/v1/embeddings", {"input": TEXTS[0], "model": f"mine-{side}"}, [0])
            for path in ("/v1/embed", "/v2/embed"):
                typed = {"input_type": kind, "embedding_types": ["float"]}
                await check(side, path, {"texts": [TEXTS[0]], **typed}, [0])
                await check(side, path, {"images": [data_url(images[1][0])], **typed}, [1])
            await check(side, "/embed", {"inputs": [TEXTS[0]], "prompt_name": side}, [0])

    try:
        asyncio.run(every())
    finally:
        service.stop()


@pytest.mark.slow
def test_an_index_and_a_table(checkpoint, images, expected, tmp_path, monkeypatch):
    pytest.importorskip("lancedb")
    import pyarrow.parquet as pq

    from rge.index.__main__ import main as index
    from rge.index.embed import main as embed
    from rge.index.store import Index

    monkeypatch.chdir(tmp_path)
    rows, lines = [], []
    for row in (0, 1, 2):  # a row has at most one picture
        for place, image in enumerate(images[row]):
            image.save(f"{row}_{place}.png")
        for words in empty_or(TEXTS[row], "", " ", None):
            line = {
                "id": f"{row}-{len(lines)}",
                "text": words,
                "image": f"{row}_0.png" if images[row] else None,
            }
            lines.append({key: value for key, value in line.items() if value != "missing"})
            rows.append(row)
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert index(["items.jsonl", "out=gallery", f"checkpoint={checkpoint}", "captions=embed"]) == 0
    stored = Index.open("gallery")
    [source] = stored.sources()
    digests = {name: known[1] for name, known in stored.known(source).items()}
    kept = stored.vectors_of([*digests.values()])
    assert_same([kept[digests[line["id"]]] for line in lines], expected["document"], rows)
    for side in SIDES:
        assert embed(["items.jsonl", f"out={side}.parquet", f"checkpoint={checkpoint}", f"side={side}"]) == 0
        table = pq.read_table(f"{side}.parquet").to_pydict()
        found = dict(zip(table["id"], table["vector"], strict=True))
        assert_same([found[line["id"]] for line in lines], expected[side], rows)
