"""What is published: tables that the library datasets reads, a card, the hub, and sets that share no picture."""

import json
from contextlib import closing

import datasets
import pyarrow.parquet as pq
import pytest
from faults import error_about
from huggingface_hub import DatasetCard
from small_runs import NO, YES, config_of, made, one_family

from data_prep.__main__ import main
from data_prep.rmir import oracle, stages
from data_prep.rmir.main import run_stages
from data_prep.rmir.results import report
from data_prep.rmir.run import STAGES, Run
from rge.calls.local_server import LocalServer
from rge.common.errors import UserError
from rge.common.images import PictureIndex, picture_bytes
from rge.data.config import RecordsConfig
from rge.data.readers import open_records
from rge.data.sources import RecordFile

TABLES = {"train", "pictures", "corpus", "queries", "qrels", "negatives"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A test query about `in` with the answer a; a training query about d with the answers b and e, and a as a negative."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    votes = {"q1": {"a": YES, "b": NO, "c": NO}, "q2": {"b": YES, "e": YES, "a": NO, "c": NO}}
    run = made(tmp_path, votes=votes, inputs={"q2": "d"})
    run.config.split.tsr_threshold = 0.992
    stages.keep(run)
    stages.pool(run)
    yield run
    run.close()


def test_every_table_of_a_set_with_both_parts_loads(run, tmp_path):
    found = stages.split(run)
    assert (found["test"], found["train"]) == (1, 1)
    folder = run.out / "dataset"
    assert set(datasets.get_dataset_config_names(str(folder))) == TABLES
    assert {one["config_name"] for one in DatasetCard.load(folder / "README.md").data.configs} == TABLES
    for table in TABLES:
        part = "train" if table in ("train", "pictures") else "test"
        read = datasets.load_dataset(str(folder), table, split=part)
        file = folder / (f"test/{table}.parquet" if part == "test" else f"{table}.parquet")
        assert len(read) == pq.read_metadata(file).num_rows > 0
        read.save_to_disk(str(tmp_path / "saved" / table))
        assert datasets.load_from_disk(str(tmp_path / "saved" / table)).features == read.features
    [query] = datasets.load_dataset(str(folder), "queries", split="test")
    assert query["image"][0].size == (40, 40)
    [record] = datasets.load_from_disk(str(tmp_path / "saved/train"))
    assert [one["image"].size for one in record["positives"]] == [(40, 40)] * 2


def test_the_published_records_are_those_of_the_file(run):
    stages.split(run)
    folder = run.out / "dataset"
    of_file = RecordFile(folder / "train.jsonl")[0]
    of_table = open_records(RecordsConfig(dataset=str(folder), subset="train"), pictures=PictureIndex())[0]
    assert of_table.model_dump(exclude={"query", "positives", "negatives"}) == of_file.model_dump(
        exclude={"query", "positives", "negatives"}
    )
    assert of_table.query.text == of_file.query.text
    for mine, theirs in (
        (of_table.query.images, of_file.query.images),
        *(
            ([one.image for one in getattr(of_table, side)], [one.image for one in getattr(of_file, side)])
            for side in ("positives", "negatives")
        ),
    ):
        assert mine == [picture_bytes(path) for path in theirs]
    for side in ("positives", "negatives"):
        mine, theirs = getattr(of_table, side), getattr(of_file, side)
        assert [one.model_dump(exclude={"image"}) for one in mine] == [
            one.model_dump(exclude={"image"}) for one in theirs
        ]


@pytest.mark.parametrize("disjoint", ["inputs", "all"])
def test_disjoint_sets_share_no_picture_in_whatever_role(run, disjoint):
    """The pool is a, b and e: training shows b and e, and has the test answer a as a negative."""
    run.config.split.disjoint = disjoint
    found = run.run("split", stages.split)["counts"]
    [record] = [json.loads(line) for line in (run.out / "dataset/train.jsonl").read_text().splitlines()]
    corpus = set(pq.read_table(run.out / "dataset/test/corpus.parquet")["id"].to_pylist())
    positives, negatives = (
        {target["id"] for target in record.get(side, ())} for side in ("positives", "negatives")
    )
    if disjoint == "inputs":
        assert (corpus, positives, negatives) == ({"a", "b", "e"}, {"b", "e"}, {"a", "c"})
        return
    assert (corpus, positives, negatives) == ({"a"}, {"b", "e"}, {"c"})
    assert found["left_out_of_the_pool"] == 2
    assert not {"in", *corpus} & {record["group"], *positives, *negatives}
    report.write_card_into(run.out / "dataset", {"stages": {"split": run.done("split")}}, {}, {})
    assert "2 pictures of the pool that occur in training" in (run.out / "dataset/README.md").read_text()


def test_a_querys_own_picture_is_not_ranked_in_the_test_set_either(tmp_path):
    """`d` is an answer of q1, and what q2 is about."""
    with closing(made(tmp_path, votes={"q1": {"d": YES}, "q2": {"b": YES}}, inputs={"q2": "d"})) as run:
        stages.keep(run)
        stages.pool(run)
        assert stages.split(run)["test_excluded"] == 1
        excluded = pq.read_table(run.out / "dataset/test/excluded.parquet").to_pylist()
        assert excluded == [{"query-id": "q2", "corpus-id": "d"}]
        run.config.retrieve.exclude_input = False
        assert stages.split(run)["test_excluded"] == 0


def test_the_card_does_not_speak_of_settings_that_its_set_was_not_made_with(run):
    """As after stage=retrieve with another setting: the set is still the earlier one."""
    stages.split(run)
    before = (run.out / "dataset/README.md").read_text()
    run.config.judge.temperature = 0.123
    report.write(run)
    assert (run.out / "dataset/README.md").read_text() == before


def verdicts(path, **said):
    rows = {name: {"verdict": verdict, "comment": ""} for name, verdict in said.items()}
    path.write_text(json.dumps({"by": path.stem, "verdicts": rows}))
    return path


def sets_of(out):
    """Right answers and negatives of each query, in training and test."""
    right, wrong = {}, {}
    for line in (out / "dataset/train.jsonl").read_text().splitlines():
        record = json.loads(line)
        right[record["id"]] = {target["id"] for target in record["positives"]}
        wrong[record["id"]] = {target["id"] for target in record.get("negatives", ())}
    test = out / "dataset/test"
    for found, name in ((right, "qrels"), (wrong, "negatives")):
        if (test / f"{name}.parquet").is_file():
            for row in pq.read_table(test / f"{name}.parquet").to_pylist():
                found.setdefault(row["query-id"], set()).add(row["corpus-id"])
    return right, wrong


@pytest.mark.slow
def test_what_two_people_say_against_the_panel_is_done_and_can_be_taken_back(tmp_path, capsys):
    """All stages on the oracle, which is gone by then: nothing is asked for a review."""
    one_family(tmp_path / "library.csv")
    out = tmp_path / "out"
    with LocalServer(oracle.Oracle(transient=0, malformed=0, bad_queries=0)) as server:
        config = config_of(out, tmp_path / "library.csv", server.url)
        config.generate.max_inputs = 12
        with closing(Run(config, progress=False)) as run:
            run_stages(run, STAGES)
            report.write(run)
            answers = run.store.num_replies()
            decided = run.rows("keep", "decided")
            doubted = {row["id"] for row in run.rows("keep", "doubted")}
    before = sets_of(out)
    kept, rejected = (
        [row for row in decided if row["state"] == state and row["candidate_id"] not in doubted]
        for state in ("kept", "rejected")
    )
    shared = kept[0]["query_id"]
    extra = next(row["candidate_id"] for row in rejected if row["query_id"] == shared)
    other = next(row for row in kept if row["query_id"] != shared)
    wrong, right = f"{shared} -> {kept[0]['candidate_id']}", f"{shared} -> {extra}"
    differ = f"{other['query_id']} -> {other['candidate_id']}"
    ada = verdicts(tmp_path / "ada.json", **{wrong: "reject", right: "accept", differ: "reject"})
    bo = verdicts(tmp_path / "bo.json", **{wrong: "reject", right: "accept", differ: "accept"})
    with error_about(UserError, "apply"):
        main(["review", f"run={out}", f"apply={ada}"])
    main(["review", f"run={out}", f"apply={ada},{bo}"])
    said = "agreed on 2 of 3 triplets: 1 answers removed, 1 added; 1 left as the panel decided"
    assert said in capsys.readouterr().out
    after = sets_of(out)
    assert after[0][shared] == before[0][shared] - {kept[0]["candidate_id"]} | {extra}
    assert other["candidate_id"] in after[0][other["query_id"]]
    assert extra not in after[1].get(shared, ())
    card_text = (out / "dataset/README.md").read_text()
    assert (
        "at least 2 people agreed on 2 of 3 sampled triplets. 1 answers that the panel had accepted were"
        in card_text
    )
    found = json.loads((out / "agreement.json").read_text())
    assert found["rows"]["panel accepted"]["of"] == 4, "the panel is still what people are compared with"
    with closing(Run(config, read_only=True)) as run:
        assert run.store.num_replies() == answers
    same = verdicts(tmp_path / "cy.json", **{differ: "accept"})
    main(["review", f"run={out}", f"apply={same}", "agree=1"])
    assert sets_of(out) == before
    with (out / "settings.yaml").open("a") as settings:
        settings.write("batches: {wait_s: 3}\n")
    with error_about(UserError, out / "settings.yaml", "version"):
        main(["review", f"run={out}", f"apply={same}", "agree=1"])
    for words in ([], [f"out={tmp_path / 'a.html'}", f"apply={ada}"]):
        with error_about(UserError, "out", "apply"):
            main(["review", f"run={out}", *words])
