"""MRMR: both spellings of its judgements, mixed modalities, disciplines, main scores, ties; files of the hub's layout."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture
from faults import error_about

from eval.__main__ import main
from eval.benchmarks.registry import protocol_for
from eval.benchmarks.releases.mrmr import DISCIPLINES, INSTRUCTIONS, MrmrOptions, import_mrmr
from eval.commands.run import RunOptions, run_command
from eval.scoring.output_files import set_facts
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.parts import TextPart

CATEGORIES = {"knowledge": ("Art_Theory", "Biology"), "theorem": ("Energy_and_Power", "Marketing")}


def cell(number):
    return None if number is None else {"bytes": picture(number), "path": None}


def write(src, task, *, queries=None, judged=None):
    """Three queries (one without judgements, one of text alone), four documents of all modalities, as the hub has them."""
    mark = "_" if task in ("knowledge", "theorem") else "-"
    queries = queries or [
        {"id": f"{task} 1", "modality": "image,text", "text": "what <image 1> and <image 2>", "image": cell(1),
         "image 1": cell(2), "image 2": cell(3)},
        {"id": "2", "modality": "text", "text": "which", "image": None, "image 1": None, "image 2": None},
        {"id": "3", "modality": "image", "text": None, "image": cell(4), "image 1": None, "image 2": None},
    ]  # fmt: skip
    if task in CATEGORIES:
        queries = [row | {"category": CATEGORIES[task][n % 2]} for n, row in enumerate(queries)]
    corpus = [
        {"id": "a", "modality": "text", "text": "a text", "image": None, "vision": cell(90)},
        {"id": "b", "modality": "image", "text": None, "image": cell(5), "vision": cell(91)},
        {"id": "c", "modality": "image,text", "text": "both", "image": cell(6), "vision": cell(92)},
        {"id": "d", "modality": "text", "text": "none", "image": None, "vision": cell(93)},
    ]
    judged = judged or [(f"{task} 1", "c", 1), (f"{task} 1", "a", 0), ("2", "a", 1), ("2", "b", 1)]
    tables = {
        "query": pd.DataFrame(queries),
        "corpus": pd.DataFrame(corpus),
        "qrels": pd.DataFrame(judged, columns=[f"query{mark}id", f"corpus{mark}id", "score"]),
    }
    for name, content in tables.items():
        (src / task / name).mkdir(parents=True)
        for number, part in enumerate((content[:2], content[2:])):
            part.to_parquet(src / task / name / f"test-0000{number}-of-00002.parquet")


@pytest.fixture
def release(tmp_path):
    for task in INSTRUCTIONS:
        write(tmp_path / "src", task)
    return tmp_path / "src"


def test_items_show_what_their_modality_says(release, tmp_path):
    assert import_mrmr(MrmrOptions(release, tmp_path / "out")) == list(INSTRUCTIONS)
    for task in INSTRUCTIONS:
        found = load_set(tmp_path / "out" / task)
        queries = found.query_items("both")
        assert [(item.id, item.text, len(item.pictures)) for item in queries] == [
            (f"{task}%201", "what <image 1> and <image 2>", 1),
            ("2", "which", 0),
        ]
        assert {item.instruction for item in queries} == {INSTRUCTIONS[task]}
        assert queries[0].pictures == (picture(1),)  # not `vision`, and not the numbered ones
        documents = {item.id: (item.text, item.pictures) for item in found.corpus_items()}
        assert documents["a"] == ("a text", ())
        assert documents["b"] == (None, (picture(5),))
        assert documents["c"] == ("both", (picture(6),))
        judged = [{found.corpus_ids[row] for row in rows} for rows, _ in found.positives]
        assert judged == [{"c"}, {"a", "b"}]
        assert found.meta["queries_without_judgements"] == 1
    disciplines = list(load_set(tmp_path / "out/knowledge").columns["discipline"])
    assert disciplines == ["Art", "Science"]
    assert list(load_set(tmp_path / "out/traffic").columns["discipline"]) == ["traffic", "traffic"]
    assert len(DISCIPLINES) == 29


def test_pictures_stand_where_the_text_names_them(tmp_path):
    queries = [
        {"id": "1", "modality": "image,text", "text": "what <image 2> is, and <image 1>? <image 2> <image 7>",
         "image": cell(1), "image 1": cell(2), "image 2": cell(3), "image 3": cell(4)},
        {"id": "2", "modality": "text", "text": "which", "image": None, "image 1": None, "image 2": None, "image 3": None},
        {"id": "3", "modality": "image", "text": None, "image": cell(4), "image 1": None, "image 2": None, "image 3": None},
    ]  # fmt: skip
    write(tmp_path / "src", "design", queries=queries, judged=[(name, "c", 1) for name in "123"])
    import_mrmr(MrmrOptions(tmp_path / "src", tmp_path / "out", tasks=("design",), query_images="in_place"))
    first, second, third = load_set(tmp_path / "out" / "design").queries
    shown = [
        part.text if isinstance(part, TextPart) else Path(part.image).read_bytes() for part in first.content
    ]
    assert shown == [picture(4), "what", picture(3), "is, and", picture(2), "?", "<image 7>"]
    assert (second.text, second.pictures) == ("which", ())
    assert third.pictures == (picture(4),)


def test_numbered_pictures_on_request(release, tmp_path):
    import_mrmr(MrmrOptions(release, tmp_path / "out", tasks=("design",), query_images="numbered"))
    found = load_set(tmp_path / "out/design")
    first, second = found.query_items("both")
    assert first.pictures == (picture(2), picture(3))
    assert second.pictures == ()
    # named where two sets with the same ids differ, and in the rows of a board
    assert set_facts(found).made_with == {"query_images": "numbered", "task": "design"}


def test_main_scores_and_ties(release, tmp_path):
    import_mrmr(MrmrOptions(release, tmp_path / "out", tasks=("negation", "theorem")))
    for task, metric in (("negation", "recall@1"), ("theorem", "ndcg@10")):
        wanted = load_set(tmp_path / "out" / task)
        tied = Ranking(np.tile(np.arange(4, dtype=np.int32), (2, 1)), np.ones((2, 4), np.float32), 4)
        value = {}
        for profile in ("clean", "official"):
            protocol = protocol_for("mrmr", profile, wanted)
            score = protocol.figures(wanted, protocol.score(wanted, protocol.ordered(wanted, tied)), seed=0)[
                "main_score"
            ]
            assert score["metric"] == metric
            value[profile] = score["value"]
        # order a b c d by id; trec_eval's is d c b a: query 1 wants c, query 2 a and b
        gain = {rank: 1 / np.log2(rank + 1) for rank in (1, 2, 3, 4)}
        best = gain[1] + gain[2]
        expected = {
            "recall@1": (0.25, 0.0),
            "ndcg@10": ((gain[3] + 1) / 2, (gain[2] + (gain[3] + gain[4]) / best) / 2),
        }[metric]
        assert value["clean"] == pytest.approx(expected[0])
        assert value["official"] == round(expected[1], 5)


def test_what_does_not_fit_is_said(tmp_path):
    with error_about(UserError, "theorem/qrels"):
        import_mrmr(MrmrOptions(tmp_path, tmp_path / "out", tasks=("theorem",)))
    write(tmp_path / "lost", "design", judged=[("9", "a", 1)])
    with error_about(UserError, "9", "design/qrels"):
        import_mrmr(MrmrOptions(tmp_path / "lost", tmp_path / "out", tasks=("design",)))
    write(
        tmp_path / "empty",
        "design",
        queries=[{"id": "2", "modality": "image,text", "text": "x", "image": None}],
    )
    with error_about(UserError, "row 1", "image"):
        import_mrmr(MrmrOptions(tmp_path / "empty", tmp_path / "out", tasks=("design",)))
    write(
        tmp_path / "other", "design", queries=[{"id": "2", "modality": "video", "text": "x", "image": None}]
    )
    with error_about(UserError, "row 1", "modality"):
        import_mrmr(MrmrOptions(tmp_path / "other", tmp_path / "out", tasks=("design",)))
    (tmp_path / "none/traffic/qrels").mkdir(parents=True)
    with error_about(UserError, "traffic/qrels", "test"):
        import_mrmr(MrmrOptions(tmp_path / "none", tmp_path / "out", tasks=("traffic",)))


@pytest.mark.slow
def test_from_files_to_results(release, tmp_path):
    assert main(["import", "mrmr", f"src={release}", f"out={tmp_path / 'out'}"]) == 0
    given = RunOptions(
        checkpoint=tmp_path, set=tmp_path / "out", out=tmp_path / "eval", benchmark="mrmr", profile="official", report=False
    )  # fmt: skip
    run_command(given, loader(FakeEncoder()))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    assert set(results["main_scores"]) == set(INSTRUCTIONS)
    assert results["main_scores"]["negation"]["metric"] == "recall@1"
    assert {"Art", "Science", "traffic"} <= set(results["by_discipline"])
