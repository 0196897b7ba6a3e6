"""scripts/reworded.py: the demo's records with paraphrases, and its test questions in other words."""

import importlib
import json
import re

import pandas as pd
import pytest
from paths import ROOT

from eval.sets.retrieval_set import load_set

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The script, and the folder that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        script, out = importlib.import_module("reworded"), tmp_path_factory.mktemp("reworded")
        script.main([f"out={out}"])
        yield script, out


def test_rewordings_are_new_and_one_has_a_word_that_training_never_showed(written):
    script, out = written
    asked_in, known, seen = set(), set(), re.compile(r"[a-z']+")
    shipped = ROOT / "data_prep" / "demo" / "data" / "train" / "naming.jsonl"
    for path in (out / "train" / "relations.jsonl", out / "train" / "text.jsonl", shipped):
        for row in path.read_text().splitlines():
            record = json.loads(row)
            texts = [record["query"]["text"], *record["query"].get("paraphrases", ())]
            asked_in.update(texts)
            texts += [record["instruction"], *(right["rationale"] for right in record["positives"])]
            known.update(seen.findall(" ".join(texts).lower()))
    asked = pd.read_parquet(script.OUT / "test" / "queries.parquet")
    for kind in script.COLUMNS:
        words = script.rewordings(kind)
        assert set(words) == set(asked["id"].str.partition(".")[0])
        assert asked_in.isdisjoint(words.values())
        in_known_words = {set(seen.findall(text.lower())) <= known for text in words.values()}
        assert in_known_words == {kind == "in known words"}


def test_reworded_questions_show_the_same_pictures(written):
    _, out = written
    load_set(out / "test")
    rows = pd.read_parquet(out / "test" / "queries.parquet")
    kinds = [of_kind.reset_index(drop=True) for _, of_kind in rows.groupby("category")]
    assert {len(of_kind) for of_kind in kinds} == {608}
    assert len({tuple(of_kind["image"].map(str)) for of_kind in kinds}) == 1
    texts = pd.concat([of_kind["text"] for of_kind in kinds], axis=1)
    assert all(texts.nunique(axis=1) == 3)
    assert rows.set_index("id").loc["tool.padlock.0.reworded", "text"] == "Which implement suits this?"
