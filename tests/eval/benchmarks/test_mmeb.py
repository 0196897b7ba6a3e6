"""MMEB: 36 sets, per-query candidates, ties, instruction profiles, averages; end to end as a suite."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture
from faults import error_about

from eval.__main__ import main
from eval.benchmarks.published_tables import published
from eval.benchmarks.registry import protocol_for
from eval.benchmarks.releases.mmeb import MmebOptions, import_mmeb
from eval.commands.run import RunOptions, run_command
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.mmeb_prompts import RGE_CANDIDATE, RGE_PREFIX, RGE_QUERY, RGE_VALUES, SETS, reword

NUM_ROWS = 6


def rows_of(name):
    """Classification: image to text; retrieval: text to image; the right candidate first, one of them twice."""
    if SETS[name]["meta_task"] == "retrieval":
        return [
            {
                "qry_text": f"Find me an everyday image that matches the given caption: number {n}",
                "qry_img_path": "",
                "tgt_text": ["<|image_1|>\nRepresent the given image"] * 4,
                "tgt_img_path": [f"{name}/{(n + k) % NUM_ROWS}.png" for k in range(4)],
            }
            for n in range(NUM_ROWS)
        ]
    labels = ["cat", "dog", "owl", "fox", "cat"]
    return [
        {
            "qry_text": "<|image_1|>\nRepresent the given image for classification",
            "qry_img_path": f"{name}/{n}.png",
            "tgt_text": labels[n % 4 :] + labels[: n % 4],
            "tgt_img_path": [""] * 5,
        }
        for n in range(NUM_ROWS)
    ]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    src = tmp_path_factory.mktemp("mmeb")
    for name in ("ImageNet-1K", "ImageNet-A", "MSCOCO_t2i"):
        (src / name).mkdir()
        (src / "images" / name).mkdir(parents=True)
        pd.DataFrame(rows_of(name)).to_parquet(src / name / "test-00000-of-00001.parquet")
        for n in range(NUM_ROWS):
            (src / "images" / name / f"{n}.png").write_bytes(picture(n + 50 * len(name)))
    return src


NAMES = ("ImageNet-1K", "ImageNet-A", "MSCOCO_t2i")


@pytest.fixture(scope="module")
def suite(release):
    out = release / "out"
    import_mmeb(MmebOptions(src=release, out=out, sets=NAMES))
    return out


def test_the_36_sets():
    assert len(SETS) == 36
    tasks = [about["meta_task"] for about in SETS.values()]
    assert [tasks.count(t) for t in ("classification", "VQA", "retrieval", "grounding")] == [10, 10, 12, 4]
    assert [about["distribution"] for about in SETS.values()].count("IND") == 20
    assert SETS["FashionIQ"] == {"meta_task": "retrieval", "distribution": "OOD"}
    assert SETS["MSCOCO"] == {"meta_task": "grounding", "distribution": "IND"}


def test_published_overalls_are_means_of_sets():
    """Table 2 of RGE: over 10, 10, 12 and 4 sets, and over 20 and 16, but for the rows that the page names."""
    off = {}
    for row in published()["mmeb"].rows:
        model, values = row.model, row.values
        cls, vqa, ret, vg, ind, ood, overall = (100 * value for value in values)
        value = {"classification": cls, "VQA": vqa, "retrieval": ret, "grounding": vg}
        tasks = np.mean([value[about["meta_task"]] for about in SETS.values()])
        halves = np.mean([ind if about["distribution"] == "IND" else ood for about in SETS.values()])
        if max(abs(tasks - overall), abs(halves - overall)) > 0.1:
            off[model] = (round(tasks, 1), round(halves, 1), overall)
        if model.startswith("RGE"):
            assert round(tasks, 1) == round(halves, 1) == round(overall, 1) == 70.1
    assert {name: tuple(map(float, row)) for name, row in off.items()} == {
        "SigLIP": (30.7, 34.8, pytest.approx(34.8)),
        "VLM2Vec (Qwen2-VL-2B)": (60.1, 60.0, pytest.approx(59.3)),
        "UniME (Phi-3.5-V-4.2B)": (61.3, 61.3, pytest.approx(64.2)),
    }


def test_candidates_of_each_query(suite):
    wanted = load_set(suite / "ImageNet-1K")
    assert len(wanted.corpus_ids) == 4  # cat is listed twice
    assert [len(rows) for rows in wanted.candidates] == [4] * NUM_ROWS
    text = {item.id: item.text for item in wanted.corpus_items()}
    right = [text[wanted.corpus_ids[rows[0]]] for rows, _ in wanted.positives]
    assert right == ["cat", "dog", "owl", "fox", "cat", "dog"]
    # the answer stands nowhere in particular
    places = {
        int(np.searchsorted(c, r[0])) for c, (r, _) in zip(wanted.candidates, wanted.positives, strict=True)
    }
    assert len(places) == 4
    assert wanted.queries[0].text == "Represent the given image for classification"
    assert wanted.meta["prompts"] == "plain"
    images = load_set(suite / "MSCOCO_t2i")
    item = next(iter(images.corpus_items()))
    assert (item.text, len(item.pictures)) == ("Represent the given image", 1)
    assert images.queries[0].pictures == ()


def test_instruction_profiles(release, tmp_path):
    import_mmeb(
        MmebOptions(src=release, out=tmp_path / "o", sets=("ImageNet-1K", "MSCOCO_t2i"), instructions="rge")
    )
    wanted = load_set(tmp_path / "o" / "ImageNet-1K")
    assert (
        wanted.queries[0].text
        == "Identify the category of the main object in the given image for classification"
    )
    texts = {item.text for item in wanted.corpus_items()}
    assert "Summarize the following object category in one word: cat" in texts
    wanted = load_set(tmp_path / "o" / "MSCOCO_t2i")
    assert next(iter(wanted.corpus_items())).text == "Summarize the given image in one word"
    assert wanted.queries[3].text == (
        "Describe and represent the following descriptive caption for everyday image retrieval: number 3"
    )


def test_every_set_has_rges_wording():
    assert set(RGE_QUERY) == set(SETS)
    assert set(RGE_PREFIX) | set(RGE_CANDIDATE) | set(RGE_VALUES) == set(SETS)
    assert reword("HatefulMemes", "Yes", "candidate").endswith("Yes, it contains hateful speech.")
    assert reword("DocVQA", "12", "candidate") == "Summarize the following answer in one word: 12"
    text = "Represent the given image with the following question: who?"
    assert reword("GQA", text, "query") == "Answer a question based on the given image: who?"


def test_ties_count_against_the_model_and_officially_for_it(suite):
    """A model that gives every candidate the same score."""
    wanted = load_set(suite / "ImageNet-1K")
    rows = np.stack(wanted.candidates)
    ranking = Ranking(rows, np.ones(rows.shape, np.float32), 1000)
    value = {}
    for profile in ("clean", "official"):
        found = protocol_for("mmeb", profile).score(wanted, ranking)
        value[profile] = found.value_QM[:, found.names.index("hit@1")].mean()
    assert value == {"clean": 0.0, "official": 1.0}


@pytest.mark.slow
def test_a_suite_end_to_end(suite, tmp_path, capsys):
    given = RunOptions(
        checkpoint="x", set=suite, out=tmp_path / "e", benchmark="mmeb", query_mode=("direct",), prompts=None
    )
    (out,) = run_command(given, loader(FakeEncoder(profile="plain")))
    results = json.loads((out / "results.json").read_text())
    table = pd.read_parquet(out / "per_query.parquet")
    assert len(table) == 3 * NUM_ROWS
    assert table["query_id"].is_unique
    per_set = table.groupby("category")["hit@1"].mean()
    assert results["macro"]["hit@1"]["value"] == pytest.approx(per_set.mean())
    assert results["headline"][0] == {"metric": "hit@1", "average": "macro"} | results["macro"]["hit@1"]
    assert results["by_distribution"]["IND"]["hit@1"]["value"] == pytest.approx(
        per_set[["ImageNet-1K", "MSCOCO_t2i"]].mean()
    )
    assert set(results["by_meta_task"]) == {"classification", "retrieval"}
    assert results["by_category"]["ImageNet-A"]["hit@1"]["value"] == per_set["ImageNet-A"]
    assert (
        results["macro"]["hit@1"]["low"]
        <= results["macro"]["hit@1"]["value"]
        <= results["macro"]["hit@1"]["high"]
    )
    assert results["profile"] == "clean"
    assert "mean of 3 members" in capsys.readouterr().out
    # the joint output can be paired with itself, and its runs scored again
    assert main(["compare", f"a={out}", f"b={out}", "metric=hit@1"]) == 0
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in NAMES:
        (out / "members" / name / "run.trec").rename(runs / f"{name}.trec")
    words = [f"run={runs}", f"set={suite}", f"out={tmp_path / 's'}", "benchmark=mmeb"]
    assert main(["score", *words]) == 0
    again = json.loads((tmp_path / "s" / "results.json").read_text())
    assert again["macro"]["hit@1"]["value"] == results["macro"]["hit@1"]["value"]
    (runs / "ImageNet-A.trec").unlink()
    assert main(["score", *words, "overwrite=true"]) == 2
    assert "a suite needs a run file for each of its members" in capsys.readouterr().err


def test_refusals(release, tmp_path):
    with error_about(UserError, "sets", release):
        import_mmeb(MmebOptions(src=release, out=tmp_path / "o"))
    with error_about(UserError, "ImageNet-1K"):
        import_mmeb(MmebOptions(src=release, out=tmp_path / "o", sets=("ImageNet_1K",)))
    src = tmp_path / "src"
    src.mkdir()
    row = rows_of("ImageNet-1K")[0]
    for change, key in (
        ({"tgt_text": [], "tgt_img_path": []}, "tgt_text"),
        ({"tgt_text": ["a", "b"], "tgt_img_path": ["x"]}, "tgt_img_path"),
        ({"tgt_text": ["a", ""], "tgt_img_path": ["", ""]}, "candidate 1"),
        ({"qry_inst": "Represent it."}, "qry_inst"),
        ({"qry_text": 7}, "qry_text"),
        ({"tgt_text": [7, 8], "tgt_img_path": []}, "tgt_text"),
        ({"qry_img_path": "no.png"}, "no.png"),
    ):
        (src / "SUN397.jsonl").write_text(json.dumps(row | change) + "\n")
        with error_about(UserError, "SUN397.jsonl", "row 1", key):
            import_mmeb(MmebOptions(src=src, out=tmp_path / "o", sets=("SUN397",)))


def test_a_failed_import_says_what_it_leaves_behind(release, tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    for name, change in (("ImageNet-1K", {}), ("SUN397", {"tgt_text": [], "tgt_img_path": []})):
        row = rows_of("ImageNet-1K")[0] | {"qry_img_path": ""} | change
        (src / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    options = MmebOptions(src=src, out=tmp_path / "o", sets=("ImageNet-1K", "SUN397"))
    with error_about(UserError, "SUN397.jsonl", "tgt_text"):
        import_mmeb(options)
    (src / "SUN397.jsonl").write_text(
        json.dumps(row | rows_of("ImageNet-1K")[0] | {"qry_img_path": ""}) + "\n"
    )
    with error_about(UserError, "ImageNet-1K"):
        import_mmeb(options)
    assert import_mmeb(replace(options, overwrite=True)) == ["ImageNet-1K", "SUN397"]
