"""What training saw of the test, and the warnings that figures carry."""

import base64
import gzip
import json
import unicodedata
from pathlib import Path

import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_set, write_tables
from faults import error_about
from recorded import RECIPE

from eval.__main__ import main
from eval.benchmarks.published_tables import TRAINED
from eval.benchmarks.suite import write_suite
from eval.commands import audit as audit_module
from eval.commands.audit import COUNTED, AuditOptions, audit_command, audit_run, audit_training, recorded
from eval.commands.run import RunOptions, run, run_command
from eval.sets.retrieval_set import load_set
from rge.checkpoints.settings import Settings
from rge.common.errors import UserError
from rge.data.config import RecordsConfig
from rge.data.sources import RecordError


@pytest.fixture
def set_dir(tmp_path):
    return write_set(tmp_path / "set")


def train_file(path, *, image, text, target, target_id="t-1"):
    path.parent.mkdir(exist_ok=True)
    for name, data in (("q.png", image), ("t.png", target)):
        (path.parent / name).write_bytes(data)
    record = {
        "id": "r",
        "group": "g",
        "source": "x",
        "split": "train",
        "query": {"text": text, "images": ["q.png"]},
        "positives": [{"id": target_id, "image": "t.png"}],
    }
    path.write_text(json.dumps(record) + "\n")
    return path


def shared(audit):
    return {key: audit.content[key]["shared"] for key in COUNTED}


def test_nothing_in_common(set_dir, tmp_path):
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(7777), text="x", target=picture(8888))
    audit = audit_training(load_set(set_dir), [RecordsConfig(path=str(path))])
    assert set(shared(audit).values()) == {0}
    assert audit.warnings == []
    assert audit.content["num_records"] == 1
    assert audit.content["query_images"]["of"] == 24


def test_shared_pictures_and_pairs(set_dir, tmp_path):
    wanted = load_set(set_dir)
    right = wanted.corpus_ids[wanted.positives[0][0][0]]
    # question 0 and its answer, word for word; the picture belongs to questions 0 and 1
    path = train_file(
        tmp_path / "train" / "a.jsonl",
        image=picture(1000),
        text="Question  0",
        target=picture(int(right[1:])),
    )
    audit = audit_training(wanted, [RecordsConfig(path=str(path))])
    found = shared(audit)
    assert (found["query_images"], found["query_pairs"]) == (2, 1)
    assert found["positive_images"] == 1
    assert found["answer_pairs"] >= 1
    assert all(line.startswith(TRAINED) for line in audit.warnings)
    assert len(audit.warnings) == 4
    record = json.loads(path.read_text().splitlines()[0])
    record["query"] |= {"text": "other words", "paraphrases": ["and others", "question  0"]}
    path.write_text(json.dumps(record) + "\n")
    assert (
        shared(audit_training(wanted, [RecordsConfig(path=str(path))]))["query_pairs"] == 1
    )  # training may ask in either


@pytest.mark.parametrize(("prefix", "num"), [("picture-", 1), ("", 0)])
def test_a_reencoded_picture_is_known_by_its_id_if_that_is_long_enough(tmp_path, prefix, num):
    content = tables()
    content["corpus"]["id"] = [prefix + name for name in content["corpus"]["id"]]
    for table in ("qrels", "negatives"):
        content[table]["corpus-id"] = [prefix + name for name in content[table]["corpus-id"]]
    wanted = load_set(write_tables(tmp_path / "set", content))
    right = wanted.corpus_ids[wanted.positives[0][0][0]]
    path = train_file(
        tmp_path / "train" / "a.jsonl", image=picture(5), text="x", target=picture(9999), target_id=right
    )
    assert shared(audit_training(wanted, [RecordsConfig(path=str(path))]))["positive_images"] == num


@pytest.mark.slow
def test_a_run_warns_in_results_and_on_stderr(set_dir, tmp_path, capsys):
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(1000), text="x", target=picture(1))
    encoder = FakeEncoder(trained_on=[{"stage": "joint", "sources": [{"path": str(path)}]}], reasons="none")
    given = RunOptions(
        checkpoint="x", set=set_dir, out=tmp_path / "o", report=False, query_mode=("reasoning", "direct")
    )
    outs = run(given, loader(encoder))
    reasoning, direct = (json.loads((out / "results.json").read_text()) for out in outs)
    assert any(
        line.startswith("query_mode=reasoning, but according to rge.json") for line in reasoning["warnings"]
    )
    assert not any(line.startswith("query_mode") for line in direct["warnings"])
    assert any("2 of 24 query pictures are in the training records" in line for line in direct["warnings"])
    assert direct["audit"]["train"] == [str(path)]
    err = capsys.readouterr().err
    assert "WARNING: query_mode=reasoning, but" in err
    assert f"WARNING: {TRAINED}: 2 of 24" in err


def test_a_file_that_training_read_is_audited(set_dir, tmp_path):
    """With a byte order mark; broken lines, which training left out, are a warning."""
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(1000), text="x", target=picture(9999))
    records = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + records)
    stages = [{"stage": "joint", "sources": [{"path": str(path)}]}]
    settings, wanted = known(trained_on=stages), load_set(set_dir)
    assert shared(audit_run(wanted, ("auto",), settings))["query_images"] == 2
    path.write_bytes(b'{"id": "caf\xe9"}\n{cut\n{"query": {"images": 5}, "positives": ["p"]}\n' + records)
    audit = audit_run(wanted, ("auto",), settings)
    assert shared(audit)["query_images"] == 2
    assert audit.content["num_records"] == 1
    assert "3 of 4 rows are no training records" in audit.warnings[-1]


def known(**settings):
    return Settings.model_validate({"profile": "plain", "generation": {"max_new_tokens": 1}, **settings})


def test_files_of_all_stages_are_audited_and_no_others(set_dir, tmp_path):
    """The recipe of a later stage also names sources of a stage that it did not run."""
    read = train_file(tmp_path / "a.jsonl", image=picture(1000), text="x", target=picture(9999))
    unread = train_file(tmp_path / "b.jsonl", image=picture(1001), text="x", target=picture(9999))
    recipe = RECIPE | {"cold_start": {"sources": [{"path": str(unread)}]}}
    stages = [{"stage": "cold_start", "sources": [{"path": str(read)}]}, {"stage": "joint", "sources": []}]
    wanted = load_set(set_dir)
    audit = audit_run(wanted, ("auto",), known(recipe=recipe, trained_on=stages))
    assert audit is not None
    assert audit.content["train"] == [str(read)]
    assert audit_run(wanted, ("auto",), known(recipe=RECIPE)) is None


def test_no_training_files_no_audit(set_dir, tmp_path):
    (out,) = run(
        RunOptions(checkpoint="x", set=set_dir, out=tmp_path / "o", report=False), loader(FakeEncoder())
    )
    results = json.loads((out / "results.json").read_text())
    assert results["audit"] is None
    assert results["warnings"] == []


FORMS = ["a.csv", "a.jsonl.gz", "a.parquet", "folder", "mapped"]


@pytest.mark.parametrize("form", FORMS)
def test_tables_compressed_files_and_data_sets_are_searched(set_dir, tmp_path, form):
    """As their recipe names them, with its columns, and a stream on this machine."""
    row = json.loads(
        train_file(tmp_path / "a.jsonl", image=picture(1000), text="x", target=picture(9999)).read_text()
    )
    cells = {"query.text": "x", "query.images": "q.png", "positives.image": "t.png", "positives.id": "t-1"}
    source = {"path": str(tmp_path / form)}
    if form == "a.csv":
        pd.DataFrame([cells]).to_csv(tmp_path / form, index=False)
    elif form == "a.jsonl.gz":
        (tmp_path / form).write_bytes(gzip.compress(json.dumps(row).encode()))
    elif form == "a.parquet":
        pd.DataFrame([{"query": row["query"], "positives": row["positives"]}]).to_parquet(tmp_path / form)
    else:
        (tmp_path / form).mkdir()
        photo = {"bytes": picture(1000), "path": None}
        pd.DataFrame([{"asked": "x", "photo": photo, "answer": "y"}]).to_parquet(
            tmp_path / form / "0.parquet"
        )
        columns = {"query.text": "asked", "query.images": "photo", "positives.text": "answer"}
        source = {"dataset": str(tmp_path / form), "columns": columns, "streaming": form == "mapped"}
    wanted = load_set(set_dir)
    audit = audit_run(
        wanted, ("auto",), known(trained_on=[{"stage": "joint", "sources": [source | {"weight": 2}]}])
    )
    assert shared(audit)["query_images"] == 2
    assert audit.content["num_records"] == 1
    if "path" in source:
        assert shared(audit_run(wanted, (source["path"],), known()))["query_images"] == 2


def test_what_stayed_elsewhere_is_one_warning(set_dir, tmp_path):
    path = train_file(tmp_path / "a.jsonl", image=picture(1000), text="x", target=picture(9999))
    sources = [{"path": str(path)}, {"path": "gone.jsonl"}, {"dataset": "no/where", "streaming": True}]
    audit = audit_run(load_set(set_dir), ("auto",), known(trained_on=[{"stage": "rl", "sources": sources}]))
    assert shared(audit)["query_images"] == 2
    assert audit.content["not_searched"].keys() == {"gone.jsonl", "no/where[train]"}
    assert sum("could not be searched" in line for line in audit.warnings) == 1


def test_sources_of_a_checkpoint():
    stages = known(trained_on=[{"stage": "joint", "sources": [{"path": "a", "weight": 2}]}]).trained_on
    assert [*recorded(stages)] == [RecordsConfig(path="a")]


def test_the_command(set_dir, tmp_path, capsys):
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(1000), text="x", target=picture(9999))
    assert main(["audit", f"set={set_dir}", f"train={path}"]) == 0
    assert TRAINED in capsys.readouterr().out
    path.write_text("{broken\n")
    with error_about(UserError, path, 1):
        audit_training(load_set(set_dir), [RecordsConfig(path=str(path))])
    assert main(["audit", f"set={set_dir}", "train=gone.jsonl"]) == 2
    assert "gone.jsonl: " in capsys.readouterr().err


@pytest.mark.parametrize("form", ["base64", "data URL", "bytes and path", "percent codes"])
def test_pictures_are_seen_in_every_form_that_training_reads(set_dir, tmp_path, form):
    """And records with nothing but query and positives."""
    encoded = base64.b64encode(picture(1000)).decode()
    cell = {
        "base64": encoded, "data URL": f"data:image/png;base64,{encoded}", "bytes and path": {"bytes": encoded, "path": "x.png"},
        "percent codes": "a%20b.png",
    }[form]  # fmt: skip
    (tmp_path / "a b.png").write_bytes(picture(1000))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"query": {"text": "x", "images": cell}, "positives": [{"text": "y"}]}) + "\n")
    stages = [{"stage": "joint", "sources": [{"path": str(path)}]}]
    assert shared(audit_run(load_set(set_dir), ("auto",), known(trained_on=stages)))["query_images"] == 2


@pytest.mark.parametrize("positives", ["a", ["a", "b"], None, {"id": "a"}])
def test_files_of_another_shape_are_no_clean_bill(set_dir, tmp_path, positives):
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"query": {"text": "x", "images": ["q.png"]}, "positives": positives}) + "\n")
    with pytest.raises(RecordError):
        audit_training(load_set(set_dir), [RecordsConfig(path=str(path))])


def test_texts_are_the_same_in_either_composition_of_accents(tmp_path):
    content = tables()
    content["queries"]["text"][0] = "Où est le café ?"
    wanted = load_set(write_tables(tmp_path / "set", content))
    decomposed = unicodedata.normalize("NFD", "où est le café ?")
    path = train_file(
        tmp_path / "train" / "a.jsonl", image=picture(1000), text=decomposed, target=picture(8888)
    )
    assert shared(audit_training(wanted, [RecordsConfig(path=str(path))]))["query_pairs"] == 1


def test_a_suite_is_audited_member_by_member(tmp_path, capsys):
    suite = tmp_path / "suite"
    for name, number in (("one", 3), ("two", 4)):
        write_set(suite / name, num_queries=number, num_candidates=9)
    write_suite(suite, name="both", benchmark="generic", column="set", members={"one": {}, "two": {}})
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(1001), text="x", target=picture(8888))
    assert main(["audit", f"set={suite}", f"train={path}"]) == 0  # picture 1001 is that of queries 2 and 3
    out = capsys.readouterr().out
    assert f"one: {TRAINED}: 1 of 3 query pictures are in the training records" in out
    assert f"two: {TRAINED}: 2 of 4 query pictures are in the training records" in out


@pytest.mark.slow
def test_members_of_a_suite_are_looked_for_in_training_pictures_that_are_read_once(tmp_path, monkeypatch):
    members = {name: {} for name in ("north", "south", "west")}
    for name in members:
        write_set(tmp_path / "suite" / name)
    write_suite(tmp_path / "suite", name="compass", benchmark="generic", column="side", members=members)
    path = train_file(tmp_path / "train" / "a.jsonl", image=picture(1000), text="x", target=picture(2000))
    reads = []
    read = audit_module.picture_bytes
    monkeypatch.setattr(audit_module, "picture_bytes", lambda ref: reads.append(ref) or read(ref))
    found = audit_command(AuditOptions(set=tmp_path / "suite", train=(str(path),)))
    assert {name: one.content["query_images"]["shared"] for name, one in found.items()} == dict.fromkeys(
        members, 2
    )
    assert [Path(ref).name for ref in reads if isinstance(ref, str)] == ["q.png", "t.png"]
    options = RunOptions(
        checkpoint="x", set=tmp_path / "suite", out=tmp_path / "out", train=(str(path),), report=False
    )
    reads.clear()
    run_command(options, loader(FakeEncoder()))
    assert not [ref for ref in reads if isinstance(ref, str)]  # the same files as before
    path.write_text(path.read_text() + "\n")
    audit_command(AuditOptions(set=tmp_path / "suite", train=(str(path),)))
    assert len([ref for ref in reads if isinstance(ref, str)]) == 2
