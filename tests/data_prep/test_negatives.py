"""`rge data negatives`: mined lists, a judge, resuming, other margins, pools, and the page."""

import json

import forked
import numpy as np
import pytest
from eval_fakes import FakeEncoder, picture, tables, write_tables
from paths import ROOT

from data_prep.__main__ import main
from data_prep.negatives import main as command
from rge.common.errors import UserError
from rge.data.sources import RecordFile
from rge.embedders.registry import ModelOptions
from rge.judging.scorer import SCORERS, Score, Scorer

CALLS = []


class Parity(Scorer):
    """Calls candidates with an even number right; refuses number 7."""

    local, name = False, {"judge": "parity"}

    def score(self, pairs):
        CALLS.extend((query.id, candidate.id) for query, candidate in pairs)
        numbers = [int(candidate.id.lstrip("tc")) for _, candidate in pairs]
        return [
            Score(None, "refusal") if n == 7 else Score(0.9 if n % 2 == 0 else 0.1 + n / 1000)
            for n in numbers
        ]


@pytest.fixture
def encoder(monkeypatch):
    made = FakeEncoder()
    monkeypatch.setattr(ModelOptions, "loader", lambda self: lambda: made)
    if "parity" not in SCORERS:
        SCORERS.add("parity", lambda judge: Parity())
    CALLS.clear()
    return made


@pytest.fixture
def records(tmp_path):
    """Thirty records, each with a picture as its answer; two share an answer's identity, one has a negative."""
    rows = []
    for number in range(30):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        positive = {"id": f"t{number}", "image": f"{number}.png"}
        if number in (3, 4):
            positive["identity"] = "same"
        rows.append({"id": f"r{number}", "query": {"text": f"question {number}"}, "positives": [positive]})
    rows[0]["negatives"] = [{"id": "t9", "image": "9.png"}]
    rows[1]["query"]["images"] = ["0.png"]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(records, out, *more):
    main(["negatives", "model=fake", f"records={records}", f"out={out}", "query_mode=direct", *more])
    return {record.id: record for record in RecordFile(out)}, json.loads(
        out.with_name(f"{out.name}.report.json").read_text()
    )


def loop(encoder, records, num, share=None):
    """The same by hand: every candidate of every query."""
    rows = list(RecordFile(records))
    embed = lambda item, side: encoder.encode([item], side=side, mode="direct").embeddings[0].astype(float)  # noqa: E731
    from rge.data.collate import query_item, target_item

    vector = {row.positives[0].id: embed(target_item(row.positives[0]), "candidate") for row in rows}
    found = {}
    for row in rows:
        q, right = embed(query_item(row), "query"), row.positives[0]
        score = {name: np.float32(q @ v) for name, v in vector.items()}
        wrong = [name for name in vector if name != right.id and {name, right.id} != {"t3", "t4"}]
        wrong = [name for name in wrong if name not in {one.id for one in row.negatives}]
        if share is not None:
            limit = score[right.id] - share * abs(score[right.id])
            wrong = [name for name in wrong if score[name] <= limit]
        found[row.id] = sorted(wrong, key=lambda name: (-score[name], name))[:num]
    return found


def test_negatives_are_the_nearest_wrong_ones_within_the_margin(encoder, records, tmp_path):
    found, report = run(records, tmp_path / "deep" / "out.jsonl", "num=4")
    wanted = loop(encoder, records, 4, 0.05)
    own = {
        name: [one.id for one in record.negatives if one.id != "t9" or name != "r0"]
        for name, record in found.items()
    }
    assert own == wanted
    assert [one.id for one in found["r0"].negatives][0] == "t9", "a record keeps its own negatives"
    assert all(one.score is not None for r in found.values() for one in (*r.positives, *r.negatives))
    assert all(r.positives[0].score > n.score for r in found.values() for n in r.negatives[r.id == "r0" :])
    assert report["negatives"] == sum(map(len, wanted.values()))
    assert report["dropped"]["same_identity"] == 2
    assert report["dropped"]["relative_margin"] > 0
    line = json.loads((tmp_path / "deep" / "out.jsonl").read_text().splitlines()[3])
    assert line["negatives"][0]["image"].startswith("../")
    page = (tmp_path / "deep" / "out.jsonl.report.html").read_text()
    assert page.count("<section>") == 24
    assert "data:image/webp" in page


def test_other_margins_encode_nothing_and_a_killed_run_continues(encoder, records, tmp_path, monkeypatch):
    whole, _ = run(records, tmp_path / "whole.jsonl", "num=3", "relative_margin=null")
    asked, encode = list(encoder.calls), encoder.encode
    encoder.calls.clear()

    def dies(items, **options):
        if options["side"] == "query" and len(encoder.calls) > 2:
            raise KeyboardInterrupt
        return encode(items, **options)

    monkeypatch.setattr(encoder, "encode", dies)
    with pytest.raises(KeyboardInterrupt):
        run(records, tmp_path / "out.jsonl", "num=3", "relative_margin=null", "batch_size=1")
    assert not (tmp_path / "out.jsonl").exists()
    done = sum(count for *_, count in encoder.calls)
    monkeypatch.setattr(encoder, "encode", encode)
    encoder.calls.clear()
    again, _ = run(records, tmp_path / "out.jsonl", "num=3", "relative_margin=null", "batch_size=1")
    assert again == whole
    assert sum(count for *_, count in encoder.calls) + done == sum(count for *_, count in asked)
    encoder.calls.clear()
    other, _ = run(records, tmp_path / "out.jsonl", "num=3", "max_score=0")
    assert encoder.calls == []
    assert all(one.score <= 0 for record in other.values() for one in record.negatives if record.id != "r0")


def test_a_judge_leaves_out_what_it_calls_right_and_its_scores_are_written(encoder, records, tmp_path):
    found, report = run(
        records, tmp_path / "out.jsonl", "num=3", "relative_margin=null", "judge=any", "ask=parity"
    )
    for record in found.values():
        mined = [one.id for one in record.negatives if (record.id, one.id) != ("r0", "t9")]
        assert all(int(name[1:]) % 2 and name != "t7" for name in mined)
        assert len(mined) == 3
        assert all(one.score == pytest.approx(0.1 + int(one.id[1:]) / 1000) for one in record.negatives)
    assert [found[f"r{n}"].positives[0].score for n in (2, 5, 7)] == [0.9, pytest.approx(0.105), None]
    assert report["judge"]["called_right"] > 0
    assert report["judge"]["without_score"].keys() == {"refusal"}
    assert report["judge"]["positives_called_right_share"] == 0.5
    assert len(CALLS) == len(set(CALLS)), "no pair is judged twice"
    CALLS.clear()
    again, _ = run(
        records, tmp_path / "out.jsonl", "num=3", "relative_margin=null", "judge=any", "ask=parity"
    )
    assert again == found
    assert CALLS == []
    assert "called right by the judge" in (tmp_path / "out.jsonl.report.html").read_text()


def test_a_judge_alone_scores_the_targets_that_are_there(encoder, records, tmp_path):
    found, report = run(records, tmp_path / "out.jsonl", "num=0", "judge=any", "ask=parity")
    assert [one.id for one in found["r0"].negatives] == ["t9"]
    assert found["r0"].negatives[0].score == pytest.approx(0.109)
    assert report["negatives"] == 0


@pytest.mark.parametrize("form", ["set", "table", "folder", "records"])
def test_pools(encoder, records, tmp_path, form):
    pool = write_tables(tmp_path / "pool", tables(num_queries=2, num_candidates=20))
    if form == "table":
        pool = pool / "corpus.parquet"
    elif form == "folder":
        pool = tmp_path / "pictures"
        pool.mkdir()
        for number in range(100, 112):
            (pool / f"c{number}.png").write_bytes(picture(number))
    elif form == "records":
        pool = tmp_path / "pool.jsonl"
        row = {"id": "p", "query": {"text": "q"}, "positives": [{"id": "c1", "text": "one"}]}
        pool.write_text(
            json.dumps(row | {"negatives": [{"id": f"c{n}", "text": f"text {n}"} for n in range(2, 9)]})
        )
    found, _ = run(records, tmp_path / "out.jsonl", "num=2", "relative_margin=null", f"pool={pool}")
    for number, record in enumerate(found.values()):
        mined = record.negatives[number == 0 :]
        assert len(mined) == 2
        assert all(one.id.startswith("c") for one in mined)
    again = RecordFile(tmp_path / "out.jsonl")
    from rge.common.images import load_image

    assert all(load_image(one.image) for record in again for one in record.negatives if one.image)


def test_a_folder_of_records_is_mined_file_by_file(encoder, records, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    lines = records.read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:15]), ("b", lines[15:])):
        (folder / f"{name}.jsonl").write_text("".join(part).replace(': "', ': "').replace('.png"', '.png"'))
    for png in tmp_path.glob("*.png"):
        (folder / png.name).write_bytes(png.read_bytes())
    main(
        [
            "negatives",
            "model=fake",
            f"records={folder}",
            f"out={tmp_path / 'out'}",
            "query_mode=direct",
            "num=2",
            "relative_margin=null",
        ]
    )
    of_b = list(RecordFile(tmp_path / "out" / "b.jsonl"))
    assert len(of_b) == 15
    assert all(int(one.id[1:]) >= 15 for record in of_b for one in record.negatives)


@pytest.mark.parametrize(
    "words",
    [
        ["num=5", "range=[1,3]"],
        ["num=0"],
        ["judge=x", "judge_endpoint.name=y", "judge_endpoint.base_url=http://z/v1"],
    ],
)
def test_contradictions_are_refused_before_anything_is_read(encoder, tmp_path, words):
    with pytest.raises(UserError):
        main(
            [
                "negatives",
                "model=fake",
                f"records={tmp_path / 'none.jsonl'}",
                f"out={tmp_path / 'o.jsonl'}",
                *words,
            ]
        )
    assert list(tmp_path.iterdir()) == []
    assert command


@pytest.mark.slow(8)
def test_two_processes_mine_the_same_after_rationales(records, checkpoint, tmp_path):
    """With a real checkpoint, whose queries write a rationale, and itself as a judge that is asked yes or no."""
    words = [
        "-m", "data_prep", "negatives", f"checkpoint={checkpoint}", f"records={records}", "num=3", "relative_margin=null",
        f"judge={checkpoint}", "max_judged=0.4999",
    ]  # fmt: skip
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for run, out in ((forked.run, outs[0]), (forked.run_pair, outs[1])):
        done = run(*words, f"out={out}", PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
    assert outs[0].read_text() == outs[1].read_text()
    report = json.loads(outs[0].with_name("one.jsonl.report.json").read_text())
    assert report["query_mode"] == "reasoning"
    assert report["judge"]["candidates"] > 0
