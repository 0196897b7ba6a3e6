"""How much of the oracle's words a model writes by itself."""

from pathlib import Path

import pytest

import data_prep.demo
from rge.data.collate import query_item
from rge.data.sources import RecordFile
from rge.diagnose.knowability import content_words, knowability, measure_knowability
from rge.embedder import Embedder


@pytest.mark.parametrize(
    ("oracle", "own", "known", "share"),
    [
        ("A cork; a corkscrew is needed.", "A cork. A corkscrew pulls it.", "", 2 / 3),  # not: needed
        ("A cork; a corkscrew is needed.", "A fish.", "", 0.0),
        ("A CORK", "the cork", "", 1.0),
        ("A cork; a corkscrew is needed.", "A cork.", "Which tool is needed?", 1 / 2),
        ("What is needed?", "anything", "what is needed", None),
        ("", "anything", "", None),
        ("这是钥匙", "钥匙", "", 1 / 2),
        ("हिन्दी भाषा", "हिन्द भाषा", "", 1 / 2),  # not letter by letter
        ("un café", "un cafe\u0301", "un", 1.0),
        ("ශ්\u200dරී ලංකා", "ශ් රී", "", 0.0),  # joined letters are one word
        ("5\ufe0f\u20e3", "5", "", 1.0),
    ],
)
def test_knowability_by_hand(oracle, own, known, share):
    assert knowability(oracle, own, known) == (None if share is None else pytest.approx(share))


def test_content_words_keep_order_and_repeats():
    assert content_words("The Dog, the dog and 2 cats") == ["dog", "dog", "2", "cats"]
    assert content_words(None) == []


def test_stock_phrases_are_told_from_knowledge():
    """One model repeats a phrase that half of each oracle's words are of; another one knows the other half as well."""
    things = ["cork", "egg", "padlock", "kettle"]
    oracle = [f"picture shows {thing} fork{number}" for number, thing in enumerate(things)]
    stock = measure_knowability(oracle, ["picture shows"] * 4, [""] * 4, things)
    knows = measure_knowability(oracle, [f"picture shows {thing}" for thing in things], [""] * 4, things)
    assert stock["knowability"][0] == 0.5
    assert stock["knowability"][1] < 0.5 < stock["knowability"][2]  # four equal values are no certainty
    assert stock["chance"] == 0.5
    assert knows["knowability"][0] == 0.75
    assert knows["chance"] == 0.5
    assert knows["queries"] == 4


def test_queries_of_which_the_oracle_says_nothing_do_not_count():
    found = measure_knowability(["key", "lock"], ["key", "lock"], ["key", ""], ["a", "b"])
    assert (found["queries"], found["knowability"][0]) == (1, 1.0)
    nothing = {"queries": 0, "knowability": None, "chance": None}
    assert measure_knowability(["key"], ["key"], ["key"], ["a"]) == nothing
    assert measure_knowability([], [], [], []) == nothing


def test_the_shipped_checkpoint_writes_what_its_oracle_says():
    """It was trained on these words: asked about its own training questions, it writes much more of them than by chance."""
    folder = Path(data_prep.demo.__file__).parent / "data" / "train"
    records = RecordFile(folder / "relations.jsonl")
    rows = [records[number] for number in range(0, 240, 20)]
    embedder = Embedder.from_pretrained("demo")
    own = embedder.encode([query_item(row) for row in rows], side="query", mode="reasoning").rationales
    found = measure_knowability(
        [row.positives[0].rationale for row in rows],
        own,
        [f"{row.instruction or ''} {row.query.text or ''}" for row in rows],
        [row.group for row in rows],
    )
    assert found["knowability"][1] > found["chance"] + 0.1
