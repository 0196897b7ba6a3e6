"""MR²-Bench, whose files could not be seen: two guesses at them, several pictures, and errors that say what does not fit."""

import io
import json

import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture
from PIL import Image

from eval.__main__ import main
from eval.benchmarks.mr2bench.importer import Mr2benchOptions, import_mr2bench
from eval.commands.run import RunOptions, run
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError


@pytest.fixture
def release(tmp_path):
    """Answers in a column and pictures as paths; answers in qrels and pictures as bytes, as the hub lays tables out."""
    src = tmp_path / "src"
    (src / "images").mkdir(parents=True)
    for number in range(4):
        (src / "images" / f"{number}.png").write_bytes(picture(number))
    (src / "biology").mkdir()
    lines = [
        {
            "qid": "q 1",
            "query": "which cell",
            "images": ["images/0.png", "images/1.png"],
            "pos_ids": ["d1", "d2"],
        },
        {"qid": "q2", "query": "which leaf", "images": [], "pos_ids": ["d3"]},
    ]
    (src / "biology/queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pool = [
        {"did": "d1", "content": "a text", "images": ["images/2.png", "images/3.png"]},
        {"did": "d2", "content": "", "images": ["images/2.png"]},
        {"did": "d3", "content": "no picture", "images": []},
    ]
    (src / "biology/corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pool))
    tables = {
        "query": pd.DataFrame(
            {"id": ["1"], "text": ["what is next"], "image": [{"bytes": picture(7), "path": None}]}
        ),
        "corpus": pd.DataFrame(
            {"id": ["a", "b"], "image": [{"bytes": picture(n), "path": None} for n in (8, 9)]}
        ),
        "qrels": pd.DataFrame({"query-id": ["1", "1"], "corpus-id": ["b", "a"], "score": [2, 0]}),
    }
    for name, content in tables.items():
        (src / "puzzle" / name).mkdir(parents=True)
        content.to_parquet(src / "puzzle" / name / "test-00000-of-00001.parquet")
    return src


def test_both_layouts_are_read(release, tmp_path):
    assert import_mr2bench(Mr2benchOptions(release, tmp_path / "out", counts=False)) == ["biology", "puzzle"]
    found = load_set(tmp_path / "out/biology")
    first, second = found.query_items("both")
    assert (first.id, len(first.images), second.images) == ("q%201", 2, ())
    documents = {item.id: item for item in found.corpus_items()}
    assert Image.open(io.BytesIO(documents["d1"].images[0])).size == (4, 8)  # one below the other
    assert documents["d2"].text is None
    assert found.meta["documents_with_several_pictures"] == 1
    judged = [{found.corpus_ids[row] for row in rows} for rows, _ in found.positives]
    assert judged == [{"d1", "d2"}, {"d3"}]
    puzzle = load_set(tmp_path / "out/puzzle")
    ((rows, gains),) = puzzle.positives
    assert ([puzzle.corpus_ids[row] for row in rows], list(gains)) == (["b"], [2])


def test_what_does_not_fit_is_said(release, tmp_path):
    def imported(**options):
        import_mr2bench(Mr2benchOptions(release, tmp_path / "out", **{"counts": False} | options))

    with pytest.raises(
        UserError, match="has 2 sub-tasks with 3 queries, the published benchmark 12 with 1309"
    ):
        imported(counts=True)
    file = release / "biology/queries.jsonl"
    lines = file.read_text()
    file.write_text(lines.replace("pos_ids", "right_ones"))
    with pytest.raises(UserError, match="unknown columns right_ones.*field_map=right_ones=FIELD"):
        imported(tasks=("biology",))
    imported(tasks=("biology",), field_map=("right_ones=positives",))
    file.write_text(lines.replace('["d3"]', "[]"))
    with pytest.raises(UserError, match="row 1: query 'q2' has no right answer"):
        imported(tasks=("biology",), overwrite=True)
    file.write_text(lines.replace("images/1.png", "images/no.png"))
    with pytest.raises(UserError, match="picture 'images/no.png' is in none of"):
        imported(tasks=("biology",), overwrite=True)
    file.write_text(lines.replace('["d3"]', '["d9"]'))
    with pytest.raises(UserError, match="d9"):
        imported(tasks=("biology",), overwrite=True)


def test_from_files_to_results(release, tmp_path):
    assert main(["import", "mr2bench", f"src={release}", f"out={tmp_path / 'out'}", "counts=false"]) == 0
    given = RunOptions(
        checkpoint=tmp_path, set=tmp_path / "out", out=tmp_path / "eval", benchmark="mr2bench", report=False
    )  # fmt: skip
    run(given, loader(FakeEncoder()))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    members = [results["by_category"][name]["ndcg@10"]["value"] for name in ("biology", "puzzle")]
    assert [one["metric"] for one in results["headline"]] == ["ndcg@10", "recall@1"]
    assert results["headline"][0]["value"] == pytest.approx(sum(members) / 2)
