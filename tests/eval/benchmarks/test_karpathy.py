"""Flickr30K and COCO: both directions, the split, and the table that they are compared with."""

import json

import pytest
from eval_fakes import FakeEncoder, loader, picture

from eval.__main__ import main
from eval.benchmarks.published_tables import beside, published
from eval.commands.run import RunOptions, run_command
from eval.scoring.output_files import read_results
from eval.sets.retrieval_set import load_set


@pytest.fixture
def release(tmp_path):
    src = tmp_path / "src"
    for name, folder in (("flickr30k", None), ("coco", "val2014")):
        images = []
        for number in range(4):
            file = f"{name}_{number}.png"
            path = src / "images" / (folder or "") / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number))
            raw = [{"sentid": 2 * number + k, "raw": f"picture {number}, caption {k} "} for k in (0, 1)]
            split = "train" if number == 3 else "test"
            images.append({"filename": file, "imgid": number, "split": split, "sentences": raw})
            if folder:
                images[-1]["filepath"] = folder
        (src / f"dataset_{name}.json").write_text(json.dumps({"images": images}))
    return src


def test_both_directions_of_both_sets_and_their_published_rows(release, tmp_path):
    out = tmp_path / "sets"
    assert not main(["import", "karpathy", f"src={release}", f"out={out}"])
    texts, pictures = load_set(out / "coco_t2i"), load_set(out / "flickr30k_i2t")
    assert (len(texts.queries), len(texts.corpus_ids)) == (6, 3)
    assert (len(pictures.queries), len(pictures.corpus_ids)) == (3, 6)
    assert [len(rows) for rows, _ in pictures.positives] == [2, 2, 2]
    assert texts.queries[0].text == "picture 0, caption 0"
    assert len(set(texts.columns["group"])) == 3
    assert {query.instruction for query in texts.queries} != {query.instruction for query in pictures.queries}
    options = RunOptions(
        checkpoint="fake",
        set=out,
        out=tmp_path / "run",
        benchmark="karpathy",
        report=False,
        query_mode=("direct",),
    )
    (done,) = run_command(options, load=loader(FakeEncoder()))
    results = read_results(done)
    for column in published()["karpathy"].columns:
        assert results.look_up(column.path) is not None
    assert "4 sets" not in beside({"mine": results})
    assert "NOT COMPARABLE" in beside({"mine": results})


def test_a_file_that_is_something_else_is_named(release, tmp_path, capsys):
    (release / "dataset_coco.json").write_text('{"images": [{"split": "test"}]}')
    assert main(["import", "karpathy", f"src={release}", f"out={tmp_path / 'x'}", "sets=coco"]) == 2
    assert "dataset_coco.json" in capsys.readouterr().err
    (release / "dataset_coco.json").unlink()
    assert main(["import", "karpathy", f"src={release}", f"out={tmp_path / 'x'}"]) == 2
