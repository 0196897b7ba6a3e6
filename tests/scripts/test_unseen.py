"""scripts/unseen.py: the demo's test questions with photographs in place of drawings, or in other words."""

import csv
import importlib
import io
import json
import re

import pandas as pd
import pytest
from paths import ROOT
from PIL import Image

from data_prep.demo.build import write_paraphrased
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError


@pytest.fixture
def unseen(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("unseen")


@pytest.fixture
def stamps(unseen, tmp_path):
    """Made-up cut-outs under the names of the listed ones, as the package lays them out."""
    folder = tmp_path / "un packed"
    with unseen.LIST.open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows, delimiter="\t"):
            file = folder / unseen.INSIDE / row["stamp"]
            file.parent.mkdir(parents=True, exist_ok=True)
            cut = Image.new("RGBA", (60, 30), (0, 0, 0, 0))
            cut.paste((200, 30, 30, 255), (10, 10, 50, 20))
            cut.save(file)
    return folder


def test_what_is_listed_is_asked_about(unseen, stamps):
    found = unseen.find(stamps)
    assert unseen.find(stamps / unseen.INSIDE) == found
    asked = set(pd.read_parquet(unseen.TEST / "queries.parquet")["group"])
    concepts = pd.read_csv(ROOT / "data_prep" / "demo" / "concepts.tsv", sep="\t")["concept"]
    assert set(found) <= set(concepts)
    assert len(set(found) & asked) > 40
    next(iter(found.values()))[0].unlink()
    with pytest.raises(UserError, match="1 of the photographs in photos.tsv are not in .*un packed"):
        unseen.find(stamps)


def test_a_cut_out_stands_in_a_white_square(unseen, stamps):
    path = unseen.find(stamps)["apple"][0]
    with Image.open(io.BytesIO(unseen.square(path))) as picture:
        assert picture.size == (44, 44)  # 40 wide, and the margin
        assert picture.mode == "RGB"
        assert picture.getpixel((22, 22)) == (200, 30, 30)
        assert picture.getpixel((22, 5)) == picture.getpixel((0, 22)) == (255, 255, 255)


def test_both_sets_ask_the_same_and_differ_in_the_pictures(unseen, stamps, tmp_path):
    sets = {kind: tmp_path / kind for kind in unseen.PICTURES}
    found = {name: paths for name, paths in unseen.find(stamps).items() if name in ("apple", "owl")}
    unseen.write(sets, found)
    drawings, photographs = (load_set(folder) for folder in sets.values())
    assert drawings.fingerprint == photographs.fingerprint  # ids and judgements
    ids = [query.id for query in photographs.queries]
    questions = pd.read_parquet(unseen.TEST / "queries.parquet")
    questions = questions[questions["id"].str.endswith(".0")]["group"].value_counts()
    assert len(ids) == sum(questions[name] * len(paths) for name, paths in found.items())
    assert len(found["apple"]) > 1
    pictures = [pd.read_parquet(folder / "queries.parquet")["image"] for folder in sets.values()]
    assert all(list(one) != list(other) for one, other in zip(*pictures, strict=True))


def test_the_table_has_intervals_and_paired_differences(unseen, tmp_path):
    oracles = pd.read_parquet(unseen.TEST / "rationales.parquet").drop_duplicates("query-id").head(40)
    frames = {}
    for name, right in (("good", 30), ("bad", 10)):
        folder = tmp_path / name
        folder.mkdir()
        texts = list(oracles["rationale"][:right]) + ["This is a thing; it is not."] * (40 - right)
        pd.DataFrame(
            {
                "query_id": [f"{it}.0" for it in oracles["query-id"]],
                "group": [it.split(".")[1] for it in oracles["query-id"]],
                "rationale": texts,
                "hit@1": [1.0] * right + [0.0] * (40 - right),
            }
        ).to_parquet(folder / "per_query.parquet")
        for kind in unseen.PICTURES:
            frames[name, kind] = unseen.values(folder)
    shown = unseen.table(("good", "bad"), unseen.PICTURES, frames).splitlines()
    assert shown[0].startswith("40 questions about ")
    assert "75.0 [" in shown[2]
    assert shown[4].startswith("good, photographs, difference")
    assert " 0.0 [" in shown[4]
    assert "25.0 [" in shown[5]
    assert shown[-1].startswith("first - bad, photographs")
    assert "50.0 [" in shown[-1]


@pytest.mark.slow
def test_rewordings_are_new_and_one_has_a_word_that_training_never_showed(unseen, tmp_path):
    write_paraphrased(tmp_path)
    asked_in, known, seen = set(), set(), re.compile(r"[a-z']+")
    for name in ("relations", "text", "naming"):
        for row in (tmp_path / "train" / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(row)
            texts = [record["query"]["text"], *record["query"].get("paraphrases", ())]
            asked_in.update(texts)
            texts += [record["instruction"], *(right["rationale"] for right in record["positives"])]
            known.update(seen.findall(" ".join(texts).lower()))
    asked = pd.read_parquet(unseen.TEST / "queries.parquet")
    for kind in unseen.COLUMNS:
        words = unseen.rewordings(kind)
        assert set(words) == set(asked["id"].str.partition(".")[0])
        assert asked_in.isdisjoint(words.values())
        in_known_words = {set(seen.findall(text.lower())) <= known for text in words.values()}
        assert in_known_words == {kind == "in known words"}


@pytest.mark.slow
def test_reworded_questions_show_the_same_pictures(unseen, tmp_path):
    sets = {kind: tmp_path / kind for kind in unseen.WORDS}
    unseen.write(sets, None)
    assert len({load_set(folder).fingerprint for folder in sets.values()}) == 1
    rows = [pd.read_parquet(folder / "queries.parquet") for folder in sets.values()]
    assert len(rows[0]) == 608
    assert list(rows[0]["image"].map(str)) == list(rows[1]["image"].map(str))
    assert all(rows[0]["text"] != rows[1]["text"])
    assert rows[1].set_index("id").loc["tool.padlock.0.0", "text"] == "Which implement suits this?"
