"""MMEB-V2: texts as the released code puts them together, its names for candidates, judgements, metrics; files of its layout."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture
from faults import error_about

from eval.__main__ import main
from eval.benchmarks.registry import protocol_for
from eval.benchmarks.releases.mmeb2 import DOCUMENTS, Mmeb2Options, import_mmeb2
from eval.commands.run import RunOptions, run_command
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.mmeb_prompts import PLACEHOLDER, SETS, plain
from rge.common.options import parse_options

RECORDED = [
    json.loads(line) for line in Path(__file__).with_name("mmeb2_prompts.jsonl").open(encoding="utf-8")
]
"""Rows, and what `data_prepare` and `generate_cand_dataset` of TIGER-AI-Lab/VLM2Vec at 6e1e1d4 made of them for Qwen2-VL."""


@pytest.fixture
def release(tmp_path):
    """A row a set, in the layout of MMEB_Test_Instruct, with pictures as MMEB-V2 has them."""
    src = tmp_path / "src"
    for one in RECORDED:
        (src / one["set"]).mkdir(parents=True)
        row = one["row"] | {"extra": "a column that nobody reads"}
        pd.DataFrame([row]).to_parquet(src / one["set"] / "test-00000-of-00001.parquet")
    (src / "image-tasks").mkdir()
    for number, name in enumerate(("q", "a", "b")):
        (src / "image-tasks" / f"{name}.png").write_bytes(picture(number))
    return src


NAMES = tuple(one["set"] for one in RECORDED)


def worded(released):
    """What the release makes of a row, without the picture's token, which our prompts put first by themselves."""
    return plain(released.replace("<|image_pad|>", PLACEHOLDER))


@pytest.mark.slow
def test_texts_are_put_together_as_released(release, tmp_path):
    import_mmeb2(Mmeb2Options(release, tmp_path / "out", sets=NAMES))
    for one in RECORDED:
        found = load_set(tmp_path / "out" / one["set"])
        (query,) = found.query_items("both")
        assert (query.text or "") == worded(one["query"]), one["set"]
        candidates = list(found.corpus_items())
        texts = sorted(item.text or "" for item in candidates)
        assert texts == sorted(map(worded, one["candidates"])), one["set"]
        shown = [bool(query.pictures), bool(candidates[0].pictures)]
        assert shown == one["pictures"], one["set"]
        assert found.meta["prompts"] == "plain"


@pytest.mark.parametrize("given", [False, True])
def test_pictures_may_be_in_the_folder_that_their_archive_has(release, tmp_path, given):
    """The release's script moves the content of ``MMEB`` up after unpacking; `rge eval fetch` leaves it there."""
    pictures = release / "image-tasks"
    pictures.rename(tmp_path / "MMEB")
    pictures = tmp_path / "elsewhere" if given else pictures
    pictures.mkdir()
    (tmp_path / "MMEB").rename(pictures / "MMEB")
    options = Mmeb2Options(release, tmp_path / "out", sets=("CIRR",), images=pictures if given else None)
    assert import_mmeb2(options) == ["CIRR"]


def test_a_picture_s_second_caption_is_never_seen(release, tmp_path):
    """EDIS knows a candidate by its picture alone, RefCOCO-Matching by picture and caption without quotes."""
    import_mmeb2(Mmeb2Options(release, tmp_path / "out", sets=("EDIS", "RefCOCO-Matching")))
    edis = load_set(tmp_path / "out/EDIS")
    texts = sorted(item.text for item in edis.corpus_items())
    assert texts == [
        f"Represent the given image with related text information: a {what}" for what in ("barn", "mill")
    ]
    assert edis.meta["candidates_never_seen"] == 1
    assert len(load_set(tmp_path / "out/RefCOCO-Matching").corpus_ids) == 2


def documents(src, name, split="test", **more):
    """Two queries, four pages, in the layout of ViDoRe and VisRAG."""
    judged = more.get("judged") or [
        ("1", "p1", 1),
        ("1", "p1", 2),
        ("1", "p2", 1),
        ("2", "p3", 1),
        ("2", "p4", 0),
    ]
    tables = {
        "queries": pd.DataFrame({"query-id": [1, 2], "query": ["what grew", "who won"], "language": ["english", "french"]}),
        "qrels": pd.DataFrame(judged, columns=["query-id", "corpus-id", "score"]).astype({"query-id": int}),
        "corpus": pd.DataFrame({"corpus-id": ["p1", "p2", "p3", "p4"],
                                "image": [{"bytes": picture(n), "path": f"{n}.png"} for n in range(4)]}),
    }  # fmt: skip
    for table, content in tables.items():
        (src / name / table).mkdir(parents=True)
        half = len(content) // 2
        for number, part in enumerate((content[:half], content[half:])):
            part.to_parquet(src / name / table / f"{split}-0000{number}-of-00002.parquet")
    return src


def test_documents_have_the_released_texts_and_judgements(tmp_path):
    src = documents(tmp_path / "src", "VisRAG_ArxivQA", "train")
    import_mmeb2(Mmeb2Options(src, tmp_path / "out", part="visdoc", sets=("VisRAG_ArxivQA",)))
    found = load_set(tmp_path / "out/VisRAG_ArxivQA")
    assert [item.text for item in found.query_items("both")] == [
        "Find a document image that matches the given query: what grew",
        "Find a document image that matches the given query: who won",
    ]
    assert {item.text for item in found.corpus_items()} == {
        "Understand the content of the provided document image."
    }
    judged = [
        dict(zip((found.corpus_ids[row] for row in rows), gains, strict=True))
        for rows, gains in found.positives
    ]
    assert judged == [{"p1": 2, "p2": 1}, {"p3": 1}]  # the higher of two judgements counts, 0 is none
    corpus = next((src / "VisRAG_ArxivQA/corpus").iterdir())
    pages = pd.read_parquet(corpus)
    pages.assign(image=[{"bytes": None, "path": "gone.png"}] * len(pages)).to_parquet(corpus)
    with error_about(UserError, "row 1", "gone.png"):  # no page without its picture
        import_mmeb2(Mmeb2Options(src, tmp_path / "gone", part="visdoc", sets=("VisRAG_ArxivQA",)))
    no_judgement = documents(
        tmp_path / "other", "VisRAG_ArxivQA", "train", judged=[("1", "p1", 1), ("2", "p4", 0)]
    )
    with error_about(UserError, "2"):
        import_mmeb2(Mmeb2Options(no_judgement, tmp_path / "no", part="visdoc", sets=("VisRAG_ArxivQA",)))


def test_each_part_has_its_metric(release, tmp_path):
    src = documents(tmp_path / "docs", "ViDoSeek-page")
    import_mmeb2(Mmeb2Options(src, tmp_path / "out", part="visdoc", sets=("ViDoSeek-page",)))
    wanted = load_set(tmp_path / "out/ViDoSeek-page")
    order = [list(wanted.corpus_ids).index(name) for name in ("p4", "p2", "p1", "p3")]
    scores = np.tile(np.array([4.0, 3, 2, 1], np.float32), (2, 1))
    protocol = protocol_for("mmeb2", "official", wanted)
    scored = protocol.score(wanted, Ranking(np.array([order, order], np.int32), scores, 4))
    main_score = protocol.figures(wanted, scored, seed=0)["main_score"]
    first = (1 / math.log2(3) + 2 / math.log2(4)) / (
        2 + 1 / math.log2(3)
    )  # linear gains, p2 second and p1 third
    assert main_score["metric"] == "ndcg@5"
    assert main_score["value"] == pytest.approx((first + 1 / math.log2(5)) / 2)
    import_mmeb2(Mmeb2Options(release, tmp_path / "images", sets=("ImageNet-1K",)))
    wanted = load_set(tmp_path / "images/ImageNet-1K")
    tied = Ranking(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), 2)
    for profile, value in (("official", 1.0), ("clean", 0.0)):
        protocol = protocol_for("mmeb2", profile, wanted)
        figures = protocol.figures(wanted, protocol.score(wanted, tied), seed=0)
        assert figures["main_score"] == {"metric": "hit@1", "value": value}


def test_what_does_not_fit_is_said(release, tmp_path):
    assert len(SETS) == 36
    assert len(DOCUMENTS) == 24
    with error_about(UserError, "sets", release):
        import_mmeb2(Mmeb2Options(release, tmp_path / "out"))
    with error_about(UserError, "sets", release):
        import_mmeb2(Mmeb2Options(release, tmp_path / "out", part="visdoc"))
    with error_about(UserError, "images"):
        import_mmeb2(Mmeb2Options(release, tmp_path / "out", part="visdoc", images=release))
    with error_about(UserError, ("choice", "pictures")):
        parse_options(Mmeb2Options, [f"src={release}", f"out={tmp_path / 'out'}", "pictures=copy"])
    import_mmeb2(Mmeb2Options(release, tmp_path / "twice", sets=("EDIS",)))
    with error_about(UserError, "twice", "out"):
        import_mmeb2(Mmeb2Options(release, tmp_path / "twice", sets=("EDIS",)))
    import_mmeb2(Mmeb2Options(release, tmp_path / "twice", sets=("CIRR",), overwrite=True))
    (release / "image-tasks/b.png").unlink()
    with error_about(UserError, "b.png", "missing"):
        import_mmeb2(Mmeb2Options(release, tmp_path / "out", sets=("CIRR",)))
    pd.DataFrame([{"qry_text": "", "tgt_text": ["a"]}]).to_parquet(release / "GQA.parquet")
    (release / "GQA").mkdir()
    (release / "GQA.parquet").rename(release / "GQA/test.parquet")
    with error_about(UserError, "qry_inst"):
        import_mmeb2(Mmeb2Options(release, tmp_path / "out", sets=("GQA",)))


@pytest.mark.slow
def test_from_files_to_results(release, tmp_path):
    names = "sets=ImageNet-1K,EDIS"
    assert main(["import", "mmeb2", f"src={release}", f"out={tmp_path / 'out'}", names]) == 0
    given = RunOptions(
        checkpoint=tmp_path, set=tmp_path / "out", out=tmp_path / "eval", benchmark="mmeb2", report=False
    )
    run_command(given, loader(FakeEncoder(profile="plain")))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    assert results["main_score"]["metric"] == "hit@1"
    assert results["main_score"]["value"] == pytest.approx(results["macro"]["hit@1"]["value"])
