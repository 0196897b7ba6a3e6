"""One identity of a result: no stale cache, no pairing of two sets under one fingerprint, and old results are said to be old."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_set, write_tables

from eval.__main__ import main
from eval.commands.compare import CompareOptions, compare
from eval.commands.export import ExportOptions, export
from eval.commands.report import ReportOptions, report
from eval.commands.run import RunOptions, run
from eval.commands.score import ScoreOptions, score
from eval.embedding import identity
from eval.embedding.identity import code_hash, differences, identity_of
from eval.sets.retrieval_set import load_set, with_content
from rge.common.errors import UserError
from rge.common.options import parse_options


def results_of(path):
    return json.loads((path / "results.json").read_text())


def evaluate(data, out, encoder=None, **more):
    words = {"checkpoint": "fake", "set": data, "out": out, "report": False} | more
    run(RunOptions(**words), loader(encoder or FakeEncoder()))
    return out


def changed(path, table, column, value):
    """A copy of a set with one column replaced and everything else, ids and fingerprint too, as it was."""
    file = path / f"{table}.parquet"
    rows = pq.read_table(file)
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, column, pa.array(value, rows.schema.field(column).type)), file)


@pytest.fixture
def data(tmp_path):
    return write_set(tmp_path / "set", num_queries=6, num_candidates=20)


@pytest.mark.parametrize("what", ["text", "instruction", "query picture", "candidate picture", "group"])
def test_the_same_ids_under_other_texts_or_pictures_are_another_set(data, tmp_path, what):
    one = evaluate(data, tmp_path / "one")
    other = shutil.copytree(data, tmp_path / "other")
    made = tables(6, 20)
    if what == "candidate picture":
        changed(other, "corpus", "image", [picture(500), *made["corpus"]["image"][1:]])
    elif what == "query picture":
        changed(other, "queries", "image", [[picture(501)], *made["queries"]["image"][1:]])
    else:
        changed(other, "queries", what, ["another", *made["queries"][what][1:]])
    two = evaluate(other, tmp_path / "two")
    a, b = results_of(one), results_of(two)
    assert a["set"]["fingerprint"] == b["set"]["fingerprint"]
    assert a["identity"]["key"] != b["identity"]["key"]
    with pytest.raises(UserError, match="ids and judgements are the same, but texts or pictures are not"):
        compare(CompareOptions(one, two))
    with pytest.raises(UserError, match="different retrieval sets .*texts or pictures"):
        report(
            parse_options(ReportOptions, [f"runs={one},{two}", f"out={tmp_path / 'page.html'}", "page=set"])
        )
    # a ranking made elsewhere is of a set too
    run_file = one / "run.trec"
    for path, out in ((data, "mine"), (other, "theirs")):
        score(ScoreOptions(run=run_file, set=path, out=tmp_path / out))
    with pytest.raises(UserError, match="texts or pictures"):
        compare(CompareOptions(tmp_path / "mine", tmp_path / "theirs"))


def test_an_import_with_another_profile_says_so(data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    changed(other, "queries", "text", ["reworded " + text for text in tables(6, 20)["queries"]["text"]])
    for path, profile in ((data, "vlm2vec"), (other, "rge")):
        meta = json.loads((path / "meta.json").read_text()) | {"instructions": profile}
        (path / "meta.json").write_text(json.dumps(meta))
    one, two = evaluate(data, tmp_path / "one"), evaluate(other, tmp_path / "two")
    with pytest.raises(UserError, match="imported with set.made_with.instructions: 'vlm2vec' and 'rge'"):
        compare(CompareOptions(one, two))


def test_the_order_of_rows_is_no_part_of_a_set_s_content(tmp_path):
    made = tables(6, 20)
    one = write_tables(tmp_path / "one", made)
    turned = {name: {key: values[::-1] for key, values in table.items()} for name, table in made.items()}
    other = write_tables(tmp_path / "other", turned)
    assert with_content(load_set(one)).content == with_content(load_set(other)).content


def test_a_limit_leaves_the_set_what_it_is(data, tmp_path):
    whole, few = (
        results_of(evaluate(data, tmp_path / str(limit), limit=limit))["set"] for limit in (None, 3)
    )
    assert whole["content"] == few["content"]
    assert (whole["limit"], few["limit"]) == (None, 3)


@pytest.mark.parametrize("what", ["code", "version"])
def test_another_code_or_library_reads_no_old_cache(data, tmp_path, monkeypatch, what):
    evaluate(data, tmp_path / "one", cache=tmp_path / "cache")
    again = FakeEncoder()
    evaluate(data, tmp_path / "two", again, cache=tmp_path / "cache")
    assert again.calls == []
    if what == "code":
        monkeypatch.setattr("eval.embedding.identity.code_hash", lambda module: "another")
    else:
        known = identity.versions(identity.NUMERIC)
        monkeypatch.setattr("eval.embedding.identity.versions", lambda names: known | {"torch": "1.0"})
    after = FakeEncoder()
    evaluate(data, tmp_path / "three", after, cache=tmp_path / "cache")
    assert after.calls


def test_the_code_s_hash_follows_what_the_encoder_imports(monkeypatch):
    read = identity._source
    seen = []
    monkeypatch.setattr(identity, "_source", lambda name: seen.append(name) or read(name))
    before = code_hash.__wrapped__("eval.models.qwen")
    assert {
        "rge.embedder",
        "rge.model.backbone",
        "rge.model.prompts",
        "rge.rollout.generate",
        "rge.common.images",
    } <= set(seen)
    assert {"eval.models.qwen", "eval.models.common"} <= set(seen)
    assert not [name for name in seen if name.startswith(("rge.train", "rge.step", "eval.pages"))]

    def edited(change):
        def source(name):
            text = read(name)
            return change(text) if name == "rge.model.prompts" and text is not None else text

        monkeypatch.setattr(identity, "_source", source)
        return code_hash.__wrapped__("eval.models.qwen")

    assert edited(lambda text: text + "\n# a remark\n") == before
    assert edited(lambda text: text + "\nMORE = 1\n") != before


def test_a_comparison_says_what_differs(data, tmp_path, capsys):
    one = evaluate(data, tmp_path / "one", query_mode=("direct",))
    two = evaluate(data, tmp_path / "two", FakeEncoder("other", dtype="bfloat16"), query_mode=("reasoning",))
    compare(CompareOptions(one, two, out=tmp_path / "out"))
    said = capsys.readouterr()
    assert "a and b differ in embedder.hash, asked.query_mode, numbers.dtype" in said.out
    assert (
        "also differ in settings that are not being compared: numbers.dtype (float32 and bfloat16)"
        in said.err
    )
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written["differs"]["asked.query_mode"] == ["direct", "reasoning"]
    assert "numbers.dtype" in written["warnings"][0]
    compare(CompareOptions(one, one))
    assert "nothing: they are two measurements of the same thing" in capsys.readouterr().out


def test_the_key_names_everything(data, tmp_path):
    results = results_of(evaluate(data, tmp_path / "one"))
    assert {key: value for key, value in results["identity"].items() if key != "key"} == identity_of(results)
    for change in (
        {"checkpoint_hash": "x"}, {"profile": "official"}, {"dtype": "bfloat16"}, {"code": "x"},
        {"decoding": {"max_new_tokens": 9}}, {"settings": {"pixels": {"min": 1, "max": 2}}}, {"embedding_dims": 4},
        {"settings": results["settings"] | {"pooling": "mean"}}, {"versions": results["versions"] | {"torch": "1"}},
    ):  # fmt: skip
        assert differences(results, results | change), change


def test_old_results_are_read_with_a_warning(data, tmp_path, capsys):
    one, two = evaluate(data, tmp_path / "one"), evaluate(data, tmp_path / "two", FakeEncoder("other"))
    results = results_of(one)
    for key in ("identity", "code"):
        del results[key]
    del results["set"]["content"]
    (one / "results.json").write_text(json.dumps(results))
    compare(CompareOptions(one, two))
    assert f"WARNING: {one} was written before results had an identity" in capsys.readouterr().err
    evaluate(data, one)  # and the same evaluation may take its place
    assert results_of(one)["identity"]


def test_an_export_carries_identity_and_warnings(data, tmp_path, capsys):
    one = evaluate(data, tmp_path / "one")
    results = results_of(one)
    results["warnings"] = ["TRAINED ON THE TEST: 3 pictures"]
    (one / "results.json").write_text(json.dumps(results))
    file = export(ExportOptions("mteb", one, tmp_path / "out.json"))
    assert "WARNING: TRAINED ON THE TEST: 3 pictures" in capsys.readouterr().err
    assert json.loads(file.read_text())["dataset_revision"] == results["set"]["content"]


def test_another_run_of_the_same_name_does_not_take_the_place_of_one(data, tmp_path):
    evaluate(data, tmp_path / "one")
    changed(data, "queries", "text", ["other " + text for text in tables(6, 20)["queries"]["text"]])
    with pytest.raises(UserError, match="already holds an evaluation with set.content"):
        evaluate(data, tmp_path / "one")


def test_warnings_stand_at_the_top_of_the_page_of_a_run(data, tmp_path):
    train = tmp_path / "train.jsonl"
    record = {
        "id": "1",
        "query": {"text": "question 0", "images": ["shown.png"]},
        "positives": [{"id": "p", "image": "shown.png"}],
    }
    (tmp_path / "shown.png").write_bytes(tables(6, 20)["queries"]["image"][0][0])
    train.write_text(json.dumps(record) + "\n")
    out = evaluate(data, tmp_path / "one", train=(str(train),), report=True)
    warnings = results_of(out)["warnings"]
    assert any("TRAINED ON THE TEST" in one for one in warnings)
    page = (out / "report.html").read_text()
    assert page.index("TRAINED ON THE TEST") < page.index('<section id="figures"')


def test_a_checkpoint_that_lost_its_rge_json_is_no_other_model(lively, data, tmp_path, capsys):
    from rge.checkpoints.export import export as write_checkpoint
    from rge.checkpoints.export import settings_of

    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=1,
    )  # fmt: skip
    write_checkpoint(lively, tmp_path / "own", settings)
    (tmp_path / "own" / "rge.json").unlink()
    words = ["run", f"set={data}", f"out={tmp_path / 'out'}", "query_mode=direct", "report=false"]
    assert main([*words, f"checkpoint={tmp_path / 'own'}"]) == 2
    assert "has no rge.json, which says how it is asked" in capsys.readouterr().err
    assert main([*words, f"model={tmp_path / 'own'}"]) == 0
    assert any(
        "taken for the released RGE checkpoint" in one for one in results_of(tmp_path / "out")["warnings"]
    )
    assert main([*words, f"model={tmp_path / 'own'}", "adapter=rge-release", "overwrite=true"]) == 0
    results = results_of(tmp_path / "out")
    assert not any("taken for" in one for one in results["warnings"])
    assert results["asked_as_released"] is False
    assert results["settings"]["differs_from_release"]
    assert results["identity"]["embedder"]["release"] is False
