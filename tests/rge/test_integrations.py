"""The same checkpoint by other libraries' own entry points: equal embeddings, or a refusal."""

import numpy as np
import pytest
import torch

from rge.checkpoints.export import export, settings_of
from rge.embedder import Embedder

sentence_transformers = pytest.importorskip("sentence_transformers")


@pytest.fixture
def checkpoint(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=7,
    )  # fmt: skip
    settings["instructions"] = {"default": "find it", "known": ["find it", "name it"], "by_task": {}}
    export(lively, tmp_path / "final", settings)
    return tmp_path / "final"


@pytest.fixture
def queries(picture):
    return [
        {"text": "What opens this?", "image": picture(60, 40)},
        "Only words, and more of them than the others have",
        {"image": picture(90, 90, 1)},
        picture(30, 80, 2),
        {"text": "two", "image": [picture(30, 80, 2), picture(40, 40, 3)]},
    ]


TEXTS = ["What opens this?", "Only words, and more of them than the others have", None, None, "two"]


def pictures_of(queries):
    return [
        one.get("image") if isinstance(one, dict) else None if isinstance(one, str) else one
        for one in queries
    ]


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
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")


def test_an_unknown_kind_of_input_is_named(checkpoint):
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    with pytest.raises(ValueError, match="an input has text and image, got caption too"):
        theirs[0].preprocess([{"text": "a", "caption": "b"}])
    with pytest.raises(ValueError, match="audio"):
        theirs.encode_query([{"text": "a", "audio": "b.wav"}])


def test_a_chat_message_is_its_text_and_pictures(checkpoint, picture):
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), trust_remote_code=True, device="cpu")
    image = picture(60, 40)
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "What opens this?"}],
        }
    ]
    plain = theirs.encode_query([{"text": "What opens this?", "image": image}])
    np.testing.assert_allclose(theirs.encode_query([chat]), plain, atol=1e-6)
    with pytest.raises(ValueError, match="one message of the user"):
        theirs.encode_query([[{"role": "system", "content": "Be brief."}, chat[0]]])
