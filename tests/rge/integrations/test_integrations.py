"""The same checkpoint by other libraries' own entry points: equal embeddings, or a refusal."""

import asyncio
import io
import pickle
import re
import threading

import numpy as np
import pytest
import torch
from clips import clip
from faults import error_about
from pdfs import GREEN, RED, page, pdf

from rge.common.errors import UserError
from rge.common.parts import (
    ImagePart,
    PdfPart,
    TextPart,
    VideoPart,
    parts_from_json,
    parts_to_input,
    parts_to_messages,
)
from rge.common.schema import Item
from rge.embedder import Embedder

sentence_transformers = pytest.importorskip("sentence_transformers")

from rge.integrations.sentence_transformers import ReasoningEmbedder, content_from  # noqa: E402


@pytest.fixture
def queries(picture):
    return [
        {"image": picture(60, 40), "text": "What opens this?"},
        "Only words, and more of them than the others have",
        {"image": picture(90, 90, 1)},
        picture(30, 80, 2),
        {"image": [picture(30, 80, 2), picture(40, 40, 3)], "text": "two"},
    ]


TEXTS = ["What opens this?", "Only words, and more of them than the others have", None, None, "two"]


def pictures_of(queries):
    return [
        one.get("image") if isinstance(one, dict) else None if isinstance(one, str) else one
        for one in queries
    ]


@pytest.mark.slow
def test_sentence_transformers_embeds_as_we_do(checkpoint, queries, tmp_path):
    ours = Embedder.from_pretrained(checkpoint)
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    images = pictures_of(queries)
    expected = ours.encode_query(TEXTS, images)
    direct = ours.encode_query(TEXTS, images, mode="direct")
    documents = ours.encode_document(TEXTS, images)
    assert not np.allclose(expected, direct, atol=1e-3)
    for batch_size in (32, 2):
        np.testing.assert_allclose(theirs.encode_query(queries, batch_size=batch_size), expected, atol=1e-6)
        np.testing.assert_allclose(
            theirs.encode_document(queries, batch_size=batch_size), documents, atol=1e-6
        )
    np.testing.assert_allclose(theirs.encode(queries), documents, atol=1e-6)
    np.testing.assert_allclose(theirs.encode_query(queries, mode="direct"), direct, atol=1e-6)
    short = ours.encode_query(TEXTS, images, max_rationale_tokens=1)
    assert not np.allclose(expected, short, atol=1e-3)
    np.testing.assert_allclose(theirs.encode_query(queries, max_rationale_tokens=1), short, atol=1e-6)
    asked = ours.encode_query(TEXTS, images, instruction="name it")
    np.testing.assert_allclose(theirs.encode_query(queries, prompt="name it"), asked, atol=1e-6)
    scores = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(queries))
    np.testing.assert_allclose(scores, expected @ documents.T, atol=1e-5)
    assert theirs.get_embedding_dimension() == 32

    theirs.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(
        str(tmp_path / "saved"), trust_remote_code=True, device="cpu"
    )
    assert torch.equal(
        again.encode_query(queries, convert_to_tensor=True),
        theirs.encode_query(queries, convert_to_tensor=True),
    )


def test_sentence_transformers_never_averages_in_silence(checkpoint):
    """Without its files it would load the text model, average its states, and say nothing."""
    with pytest.raises(ValueError):
        sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")


def test_an_unknown_kind_of_input_is_named(checkpoint):
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    with pytest.raises(ValueError):
        theirs[0].preprocess([{"text": "a", "caption": "b"}])
    with pytest.raises(ValueError):
        theirs.encode_document([np.zeros((40, 40, 3), np.uint8)])
    with pytest.raises(ValueError):
        theirs.encode_query([{"text": "a", "audio": "b.wav"}])


def test_a_chat_is_one_message(checkpoint, picture):
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    image = picture(60, 40)
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "What opens this?"}],
        }
    ]
    with pytest.raises(ValueError):
        theirs.encode_query([[{"role": "system", "content": "Be brief."}, chat[0]]])


def test_pages_and_clips_come_as_in_the_embedder(checkpoint, tmp_path, picture):
    theirs = loaded(checkpoint)
    ours = theirs[0].embedder
    (tmp_path / "m.pdf").write_bytes(pdf([page("kettle", RED), page("anchor", GREEN)]))
    (tmp_path / "a.mp4").write_bytes(clip(range(0, 2000, 40), size=(56, 56)))
    manual, film = str(tmp_path / "m.pdf"), str(tmp_path / "a.mp4")
    chat = [
        {
            "role": "user",
            "content": [{"type": "pdf", "pdf": manual, "pages": [2]}, {"type": "text", "text": "a"}],
        }
    ]
    expected = ours.encode_document(content=[{"pdf": manual, "pages": [2]}, {"text": "a"}])
    np.testing.assert_allclose(theirs.encode_document([chat])[0], expected, atol=1e-6)
    np.testing.assert_allclose(ours.encode_document("a", f"{manual}#page=2"), expected, atol=1e-6)
    found = theirs.encode_document([{"video": film, "text": "a"}])[0]
    np.testing.assert_allclose(
        found, ours.encode_document(content=[{"video": film}, {"text": "a"}]), atol=1e-6
    )

    # Frames as an array, channels last or first: embedded as frames, whichever it is.
    frames = [picture(56, 84, seed) for seed in (1, 2)]
    expected = ours.encode_document(content=[VideoPart(tuple(frames), fps=1.0)])
    array = np.stack([np.asarray(frame) for frame in frames])
    for one in (array, array.transpose(0, 3, 1, 2)):
        shown = {"array": one, "video_metadata": {"fps": 1.0, "total_num_frames": 2}}
        np.testing.assert_allclose(theirs.encode_document([{"video": shown}])[0], expected, atol=1e-6)
    for bad in (np.zeros((2, 4, 4), np.uint8), np.zeros((2, 3, 4, 3), np.uint8), np.zeros((2, 4, 4, 3))):
        with pytest.raises(ValueError):
            theirs[0].preprocess([{"video": bad}])


def test_content_goes_to_other_forms_and_back(tmp_path, picture):
    """A text, a mapping or messages of sentence-transformers, whichever is simplest, and vLLM's messages with addresses."""
    image, other = picture(60, 40), picture(30, 30, 2)
    text, key = TextPart("What opens this?"), TextPart("a key")
    film, pages = VideoPart("a.mp4"), PdfPart("m.pdf", (2, 3), 72)
    forms = [
        ((text,), str),
        ((ImagePart(image),), dict),
        ((ImagePart(image), ImagePart(other), film, text), dict),
        ((VideoPart((image, image)), text), dict),
        ((text, ImagePart(image)), list),
        ((text, key), list),
        ((film, VideoPart("b.mp4")), list),
        ((VideoPart("a.mp4", 1.0, 2.5, num_frames=8), text), list),
        ((VideoPart((image, image), fps=2.0),), list),
        ((pages, key), list),
    ]
    for content, form in forms:
        assert type(parts_to_input(content)) is form
        assert content_from(parts_to_input(content)) == content
        [message] = parts_to_messages(content)
        assert parts_from_json(message["content"], live=True) == content
    url, data = "https://example.org/a.png", b"clip"
    [message] = parts_to_messages((ImagePart(url), key, VideoPart(data, fps=2.0)), urls=True)
    shown, words, clip_part = message["content"]
    assert shown == {"type": "image_url", "image_url": {"url": url}}
    assert words == {"type": "text", "text": "a key"}
    assert clip_part["video_url"]["url"].startswith("data:")
    assert parts_from_json(message["content"], live=True) == (ImagePart(url), key, VideoPart(data, fps=2.0))
    for refused in ((pages,), (VideoPart((image,)),)):
        with pytest.raises(ValueError):
            parts_to_messages(refused, urls=True)


def loaded(checkpoint, **options):
    return sentence_transformers.SentenceTransformer(
        str(checkpoint), trust_remote_code=True, device="cpu", **options
    )


def test_the_order_of_texts_and_pictures_is_kept(checkpoint, picture):
    theirs, image = loaded(checkpoint), picture(60, 40)
    builder = theirs[0].embedder.builder
    parts = [{"type": "text", "text": "Is"}, {"type": "image", "image": image}, {"type": "text", "text": "in"},
             {"type": "image", "image": picture(30, 80, 2)}, {"type": "text", "text": "?"}]  # fmt: skip
    item = Item("x", parts_from_json(parts, live=True), "find it")
    prompt = builder.build(item, "query")
    words = builder.tokenizer.decode(prompt.input_ids)
    image_token = re.escape(builder.processor.image_token)
    assert re.search(rf"find it Is\n.*{image_token}.*\nin\n.*{image_token}.*\n\?\n", words, re.DOTALL), words
    with pytest.warns(UserWarning, match="trained with pictures first"):
        found = theirs.encode_query([[{"role": "user", "content": parts}]])
    ours = theirs[0].embedder.encode([item], side="query", mode="reasoning").embeddings
    np.testing.assert_allclose(found, ours, atol=1e-6)
    turned = [{"type": "text", "text": "What opens this?"}, {"type": "image", "image": image}]
    with pytest.warns(UserWarning, match="trained with pictures first"):
        turned = theirs.encode_query([[{"role": "user", "content": turned}]])
    straight = theirs.encode_query([{"image": image, "text": "What opens this?"}])
    assert not np.allclose(turned, straight, atol=1e-3)


def test_arguments_are_passed_on_or_refused(checkpoint, tmp_path, monkeypatch):
    for options in ({"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}):
        assert next(loaded(checkpoint, model_kwargs=options).parameters()).dtype == torch.bfloat16
    for options, key in (
        ({"model_kwargs": {"device_map": "auto"}}, "model_kwargs"),
        ({"model_kwargs": {"dtype": "int8"}}, ("choice", "dtype")),
        ({"processor_kwargs": {"max_pixels": 9}}, "processor_kwargs"),
        ({"config_kwargs": {"hidden_size": 9}}, "config_kwargs"),
        ({"backend": "onnx"}, "backend"),
    ):
        with error_about(UserError, key):
            loaded(checkpoint, **options)
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **given: asked.update(given, name=name) or str(checkpoint),
    )
    ReasoningEmbedder.load("me/mine", token="t", cache_folder="c", revision="r", local_files_only=True)
    assert asked == {
        "name": "me/mine",
        "token": "t",
        "cache_dir": "c",
        "revision": "r",
        "local_files_only": True,
    }


def test_a_query_has_the_checkpoint_s_instruction_unless_the_prompt_is_empty(checkpoint):
    theirs = loaded(checkpoint)
    ours = theirs[0].embedder
    for given, instruction in (({}, "find it"), ({"prompt": ""}, ""), ({"prompt": "name it"}, "name it")):
        expected = ours.encode_query(["a key"], instruction=instruction)
        np.testing.assert_allclose(theirs.encode_query(["a key"], **given), expected, atol=1e-6)
    np.testing.assert_allclose(
        loaded(checkpoint, prompts={"query": ""}).encode_query(["a key"]),
        ours.encode_query(["a key"], instruction=""),
        atol=1e-6,
    )


def test_the_library_s_trainer_is_told_that_it_cannot_train(checkpoint):
    theirs = loaded(checkpoint)
    features = theirs.preprocess(["a key"])
    with error_about(UserError, "training"):
        theirs.train()(features)
    found = theirs.eval()(theirs.preprocess(["a key"]))["sentence_embedding"]
    np.testing.assert_allclose(found, theirs.encode_document(["a key"]), atol=1e-6)


def test_a_prompt_of_documents_is_refused(checkpoint):
    """Documents are trained without one; it was dropped in silence, as was a task that does not exist."""
    theirs = loaded(checkpoint)
    for embed in (theirs.encode, theirs.encode_document):
        with error_about(UserError, "prompt"):
            embed(["a key"], prompt="find it")
    with error_about(UserError, "prompt"):
        loaded(checkpoint, prompts={"document": "passage: "}).encode_document(["a key"])
    with error_about(UserError, ("choice", "task", ("query", "document"))):
        theirs.encode(["a key"], task="querry")


def test_changed_weights_are_saved_as_they_are(checkpoint, tmp_path):
    theirs = loaded(checkpoint)
    before = theirs.encode_document(["a key"])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.01)
    changed = theirs.encode_document(["a key"])
    assert not np.allclose(before, changed, atol=1e-3)
    theirs.save_pretrained(str(tmp_path / "saved"))
    assert not [path for path in (tmp_path / "saved").iterdir() if path.is_dir()]
    assert np.array_equal(loaded(tmp_path / "saved").encode_document(["a key"]), changed)
    assert np.array_equal(Embedder.from_pretrained(tmp_path / "saved").encode_document(["a key"]), changed)
    with error_about(UserError, "safe_serialization"):
        theirs.save_pretrained(str(tmp_path / "pickled"), safe_serialization=False)


def test_processes_of_sentence_transformers_get_a_copy(checkpoint):
    """`start_multi_process_pool` and `encode(device=[...])` pickle the model."""
    theirs = loaded(checkpoint)
    again = pickle.loads(pickle.dumps(theirs))  # noqa: S301 - our own
    assert again[0].model is again[0].embedder.model
    assert np.array_equal(again.encode_query(["a", "b"]), theirs.encode_query(["a", "b"]))


def test_truncated_embeddings_have_length_one(checkpoint):
    theirs = loaded(checkpoint, truncate_dim=16)
    whole = theirs.encode_query(["a", "b"], truncate_dim=32)
    expected = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(theirs.encode_query(["a", "b"]), expected, atol=1e-6)
    found = theirs.encode_document(["a", "b"], convert_to_tensor=True)
    assert type(found) is torch.Tensor
    np.testing.assert_allclose(found.norm(dim=1), 1, atol=1e-6)


@pytest.mark.slow
def test_langchain_s_stores_find_what_we_find(checkpoint):
    vectorstores = pytest.importorskip("langchain_core.vectorstores")
    from rge.integrations.langchain import ReasoningEmbeddings

    ours, theirs = Embedder.from_pretrained(checkpoint), ReasoningEmbeddings(str(checkpoint), device="cpu")
    question, documents = "What opens this?", ["a key", "a nail", "an egg"]
    np.testing.assert_allclose(
        asyncio.run(theirs.aembed_query(question)), ours.encode_query(question), atol=1e-6
    )
    store = vectorstores.InMemoryVectorStore(ReasoningEmbeddings(ours))
    store.add_texts(documents)
    found = store.similarity_search_with_score(question, k=3)
    scores = ours.similarity(ours.encode_document(documents), ours.encode_query(question))
    assert [one.page_content for one, _ in found] == [documents[row] for row in np.argsort(-scores)]
    np.testing.assert_allclose([score for _, score in found], np.sort(scores)[::-1], atol=1e-6)


@pytest.mark.slow
def test_langchain_embeds_in_threads_as_in_one(checkpoint):
    """Its asynchronous methods run the others in threads."""
    from rge.integrations.langchain import ReasoningEmbeddings

    embeddings = ReasoningEmbeddings(str(checkpoint))
    texts = [" ".join(["egg", "key"] * (1 + row % 5)) for row in range(20)]

    async def all_at_once():
        return await asyncio.gather(*(embeddings.aembed_query(text) for text in texts))

    assert asyncio.run(all_at_once()) == [embeddings.embed_query(text) for text in texts]


def test_llama_index_embeds_as_we_do(checkpoint, picture, tmp_path):
    pytest.importorskip("llama_index.core")
    from rge.integrations.llama_index import ReasoningEmbedding

    ours, theirs = Embedder.from_pretrained(checkpoint), ReasoningEmbedding(str(checkpoint), device="cpu")
    question, documents, path = "What opens this?", ["a key", "a nail"], tmp_path / "a.png"
    picture(60, 40).save(path)
    query = ours.encode_query(question)
    np.testing.assert_allclose(asyncio.run(theirs.aget_query_embedding(question)), query, atol=1e-6)
    np.testing.assert_allclose(
        theirs.get_text_embedding_batch(documents), ours.encode_document(documents), atol=1e-6
    )
    image = ours.encode_document(images=path)
    held = io.BytesIO(path.read_bytes())
    np.testing.assert_allclose(theirs.get_image_embedding(held), image, atol=1e-6)
    np.testing.assert_allclose(theirs.get_image_embedding_batch([str(path)] * 2), [image] * 2, atol=1e-6)
    np.testing.assert_allclose(asyncio.run(theirs.aget_image_embedding(str(path))), image, atol=1e-6)


def test_llama_index_embeds_a_batch_at_once_beside_the_event_loop(checkpoint, picture, tmp_path, monkeypatch):
    pytest.importorskip("llama_index.core")
    from rge.integrations.llama_index import ReasoningEmbedding

    model, calls, loop_thread = (
        ReasoningEmbedding(str(checkpoint), embed_batch_size=3),
        [],
        threading.current_thread(),
    )
    real, path = Embedder.encode_document, tmp_path / "a.png"
    picture(60, 40).save(path)

    def encode_document(self, texts=None, images=None):
        calls.append((threading.current_thread() is loop_thread, texts or len(images)))
        return real(self, texts, images)

    monkeypatch.setattr(Embedder, "encode_document", encode_document)
    asyncio.run(model.aget_text_embedding("a key"))
    found = asyncio.run(model.aget_text_embedding_batch(["a key", "a nail", "a hat"]))
    np.testing.assert_allclose(found, real(model._embedder, ["a key", "a nail", "a hat"]), atol=1e-6)
    asyncio.run(model.aget_image_embedding_batch([str(path)] * 3))
    assert calls == [(False, "a key"), (False, ["a key", "a nail", "a hat"]), (False, 3)]


def test_an_embedder_takes_parts_in_their_order(checkpoint, picture):
    embedder = Embedder.from_pretrained(checkpoint)
    image = picture(60, 40)
    parts = [{"text": "Is"}, {"image": image}, {"text": "it?"}]
    alone = embedder.encode_query(content=parts)
    items = [Item("0", parts_from_json(parts, live=True), embedder.default_instruction)]
    assert np.allclose(alone, embedder.encode(items, side="query", mode="reasoning").embeddings[0], atol=1e-6)
    both = embedder.encode_document(content=[[{"image": image}, {"text": "a key"}], [{"text": "a lock"}]])
    short = embedder.encode_document(["a key", "a lock"], [image, None])
    assert np.allclose(both, short, atol=1e-6)
    clip = [{"video": [picture(56, 56, number) for number in range(4)], "fps": 1.0}]
    assert embedder.encode_document(content=clip).shape == alone.shape
    with pytest.raises(ValueError):
        embedder.encode_query("a key", content=parts)
    with pytest.raises(ValueError):
        embedder.encode_query(content=[{"picture": image}])
