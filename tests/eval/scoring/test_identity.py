"""One identity of a result: no stale cache, no pairing of two sets under one fingerprint, and old results are said to be old."""

import importlib
import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_set, write_tables
from faults import error_about
from recorded import settings_of

from eval.__main__ import main
from eval.commands.compare import CompareOptions, compare
from eval.commands.export import ExportOptions, export
from eval.commands.run import RunOptions, run, run_command
from eval.commands.score import ScoreOptions, score
from eval.pages.report import ReportOptions, report
from eval.scoring.identity import differences, identity_of
from eval.scoring.results import Results
from eval.sets.contents import with_content
from eval.sets.retrieval_set import load_set
from rge.checkpoints.export import export as write_checkpoint
from rge.common import registry
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.identity import compare_runs, run_identity
from rge.model.families import FAMILIES


def apart(one, other):
    return differences(Results.model_validate(one), Results.model_validate(other))


def results_of(path):
    return json.loads((path / "results.json").read_text())


def evaluate(data, out, encoder=None, **more):
    words = {"checkpoint": "fake", "set": data, "out": out, "report": False} | more
    run_command(RunOptions(**words), loader(encoder or FakeEncoder()))
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


@pytest.mark.slow
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
    with error_about(UserError, "set.content"):
        compare(CompareOptions(one, two))
    with error_about(UserError, "set.content"):
        report(parse_options(ReportOptions, [f"runs={one},{two}", f"out={tmp_path / 'page.html'}"]))
    # a ranking made elsewhere is of a set too
    run_file = one / "run.trec"
    for path, out in ((data, "mine"), (other, "theirs")):
        score(ScoreOptions(run=run_file, set=path, out=tmp_path / out))
    with error_about(UserError, "set.content"):
        compare(CompareOptions(tmp_path / "mine", tmp_path / "theirs"))


@pytest.mark.slow
def test_an_import_with_another_profile_says_so(data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    changed(other, "queries", "text", ["reworded " + text for text in tables(6, 20)["queries"]["text"]])
    for path, profile in ((data, "vlm2vec"), (other, "rge")):
        meta = json.loads((path / "meta.json").read_text()) | {"instructions": profile}
        (path / "meta.json").write_text(json.dumps(meta))
    one, two = evaluate(data, tmp_path / "one"), evaluate(other, tmp_path / "two")
    with error_about(UserError, "made_with.instructions"):
        compare(CompareOptions(one, two))


def test_the_order_of_rows_is_no_part_of_a_set_s_content(tmp_path):
    made = tables(6, 20)
    one = write_tables(tmp_path / "one", made)
    turned = {name: {key: values[::-1] for key, values in table.items()} for name, table in made.items()}
    other = write_tables(tmp_path / "other", turned)
    assert with_content(load_set(one)).content == with_content(load_set(other)).content


@pytest.mark.slow
def test_a_limit_leaves_the_set_what_it_is(data, tmp_path):
    whole, few = (
        results_of(evaluate(data, tmp_path / str(limit), limit=limit))["set"] for limit in (None, 3)
    )
    assert whole["content"] == few["content"]
    assert (whole["limit"], few["limit"]) == (None, 3)


@pytest.fixture
def edit(monkeypatch):
    """Change the code of files, or versions of packages, for a while."""

    def change(*names):
        known, version = run_identity._hash_of, run_identity._version_now
        patched = pytest.MonkeyPatch()
        edited = tuple(f"/{name}" for name in names)  # a name without a folder may be that of several modules
        patched.setattr(
            run_identity,
            "_hash_of",
            lambda path, *at: "edited" if path.as_posix().endswith(edited) else known(path, *at),
        )
        patched.setattr(
            run_identity, "_version_now", lambda name: "another" if name in names else version(name)
        )
        return patched

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kept", "named"),
    [
        ("rge/model/prompts.py", False, "software.modules.rge.model.prompts"),
        ("rge/small_models/efficientnet.py", False, "software.modules.rge.small_models.efficientnet"),
        ("eval_fakes.py", False, "software.modules.eval_fakes"),  # where the encoder is from
        ("torch", False, "software.packages.torch"),
        ("eval/scoring/measurement.py", True, "software.modules.eval.scoring.measurement"),
        ("threads", True, "machine.threads"),
        ("eval/pages/examples.py", True, None),  # of the page
    ],
)
def test_embeddings_are_kept_until_what_they_depend_on_changes(
    data, tmp_path, edit, capsys, what, kept, named
):
    for module in ("rge.small_models.efficientnet", "rge.model.prompts", "eval.pages.examples"):
        importlib.import_module(module)

    def again(name):
        encoder = FakeEncoder()
        results = results_of(evaluate(data, tmp_path / name, encoder, cache=tmp_path / "cache"))
        return results, not encoder.calls

    first, _ = again("one")
    second, was_kept = again("two")
    assert was_kept
    assert second["identity"] == first["identity"]
    patched = edit(what)
    if what == "threads":
        patched.setattr("torch.get_num_threads", lambda: 77)
    capsys.readouterr()
    third, was_kept = again("three")
    patched.undo()
    assert was_kept == kept
    assert ("are not reused because of changes" in capsys.readouterr().err) == (not kept)
    assert list(apart(first, third)) == ([] if named is None else [named])
    assert (third["identity"]["key"] == first["identity"]["key"]) == (named in (None, "machine.threads"))
    assert again("four")[1]  # the first are still there


EYES = """
from rge.model.families import Family, register_family
from plugin_eyes.pictures import seen


class Eyes(Family):
    def features(self, model, values, grid):
        return super().features(model, seen(values), grid)


register_family("qwen2_5_vl", Eyes())
"""


@pytest.mark.slow
def test_picture_code_of_a_plugin_s_family_is_part_of_what_it_makes(lively, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    write_checkpoint(lively, tmp_path / "checkpoint", settings)
    data = write_set(tmp_path / "set", num_queries=3, num_candidates=6)
    (tmp_path / "plugin_eyes").mkdir()
    (tmp_path / "plugin_eyes/__init__.py").write_text(EYES)
    cache, found = tmp_path / "cache", {}
    for name, code in {
        "one": "values",
        "two": "values * 0.5  # less light",
        "three": "values  # as before",
    }.items():
        (tmp_path / "plugin_eyes/pictures.py").write_text(f"def seen(values):\n    return {code}\n")
        for module in ("plugin_eyes", "plugin_eyes.pictures"):
            sys.modules.pop(module, None)
        FAMILIES._entries.pop("qwen2_5_vl", None)
        registry.load_plugins(["plugin_eyes"])
        options = {
            "checkpoint": tmp_path / "checkpoint",
            "set": data,
            "query_mode": ("direct",),
            "report": False,
        }
        (out,) = run(RunOptions(**options, cache=cache, out=tmp_path / name))
        found[name] = results_of(out) | {"caches": len(list(cache.glob("candidate-*")))}
    one, two, three = found.values()
    assert (one["caches"], two["caches"], three["caches"]) == (1, 2, 2)
    assert one["plugins"]["plugin_eyes"]["gives"] == ["family of models qwen2_5_vl"]
    assert set(apart(one, two)) == {"plugins.plugin_eyes.code"}
    assert one["identity"]["key"] != two["identity"]["key"]
    assert (one["identity"], one["micro"]) == (three["identity"], three["micro"])
    [about] = {
        path.read_text()
        for path in cache.glob("candidate-*/about.json")
        if str(one["plugins"]["plugin_eyes"]["code"]) in path.read_text()
    }
    assert {
        "rge.small_models.efficientnet",
        "rge.model.vision_tower",
        "rge.vectors.fill_cache",
    } <= json.loads(about)["made_with"]["software"]["modules"].keys()
    capsys.readouterr()
    assert compare_runs.main([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert "plugins: plugin_eyes.code " in capsys.readouterr().out


@pytest.mark.slow
def test_embeddings_of_an_older_version_are_not_used(data, tmp_path):
    evaluate(data, tmp_path / "one", cache=tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*/about.json"):
        about = json.loads(path.read_text())
        del about["asked"], about["made_with"]
        path.write_text(json.dumps(about | {"encoder": "another"}))
        path.parent.rename(path.parent.with_name(f"{path.parent.name[:-8]}12345678"))
    encoder = FakeEncoder()
    evaluate(data, tmp_path / "two", encoder, cache=tmp_path / "cache")
    assert encoder.calls


@pytest.mark.slow
def test_a_comparison_says_what_differs(data, tmp_path, capsys):
    one = evaluate(data, tmp_path / "one", query_mode=("direct",))
    two = evaluate(data, tmp_path / "two", FakeEncoder("other", dtype="bfloat16"), query_mode=("reasoning",))
    compare(CompareOptions(one, two, out=tmp_path / "out"))
    said = capsys.readouterr()
    words = [line for line in said.out.splitlines() if line.startswith("a and b differ in embedder: hash ")]
    assert words[0].endswith(
        '; settings: dtype "float32" and "bfloat16", exact true and nothing; asked: query_mode "direct" and "reasoning"'
    )
    assert (
        'differ in settings that are not being compared: settings: dtype "float32" and "bfloat16"' in said.err
    )
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written["differs"]["asked.query_mode"] == ["direct", "reasoning"]
    assert any('dtype "float32"' in warning for warning in written["warnings"])
    compare(CompareOptions(one, one))
    assert "nothing: they are two measurements of the same thing" in capsys.readouterr().out


@pytest.mark.slow
def test_the_key_names_everything(data, tmp_path):
    results = results_of(evaluate(data, tmp_path / "one"))
    assert {key: value for key, value in results["identity"].items() if key != "key"} == identity_of(
        Results.model_validate(results)
    )
    for change in (
        {"checkpoint_hash": "x"}, {"profile": "official"}, {"settings": {"dtype": "bfloat16"}}, {"embedding_dims": 4},
        {"settings": {"generation": {"max_new_tokens": 9}}}, {"settings": {"pixels": {"min": 1, "max": 2}}},
        {"settings": results["settings"] | {"pooling": "mean"}}, {"depth": 10},
    ):  # fmt: skip
        assert apart(results, results | change), change
    assert "machine" in results["identity"]


def test_an_export_carries_identity_and_warnings(data, tmp_path, capsys):
    one = evaluate(data, tmp_path / "one")
    results = results_of(one)
    results["warnings"] = ["TRAINED ON THE TEST: 3 pictures"]
    results["set"]["limit"] = 6
    (one / "results.json").write_text(json.dumps(results))
    file = export(ExportOptions("mteb", one, tmp_path / "out.json"))
    said = capsys.readouterr().err
    assert "WARNING: TRAINED ON THE TEST: 3 pictures" in said
    assert "WARNING: only the first 6 queries were evaluated" in said
    compare(CompareOptions(one, one))
    assert "WARNING: only the first 6 queries were evaluated" in capsys.readouterr().err
    assert json.loads(file.read_text())["dataset_revision"] == results["set"]["content"]


def test_another_run_of_the_same_name_does_not_take_the_place_of_one(data, tmp_path):
    evaluate(data, tmp_path / "one")
    changed(data, "queries", "text", ["other " + text for text in tables(6, 20)["queries"]["text"]])
    with error_about(UserError, "set.content"):
        evaluate(data, tmp_path / "one")


@pytest.mark.slow
def test_an_evaluation_that_finished_meanwhile_is_not_replaced(data, tmp_path):
    class Slow(FakeEncoder):
        def encode(self, items, **asked):
            if not (tmp_path / "one" / "results.json").exists():
                evaluate(data, tmp_path / "one", FakeEncoder())
            return super().encode(items, **asked)

    with error_about(UserError, "set.limit"):
        evaluate(data, tmp_path / "one", Slow(), limit=2)
    assert results_of(tmp_path / "one")["set"]["limit"] is None


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_checkpoint_that_lost_its_rge_json_is_no_other_model(lively, data, tmp_path, capsys):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=6, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    write_checkpoint(lively, tmp_path / "own", settings)
    (tmp_path / "own" / "rge.json").unlink()
    words = ["run", f"set={data}", f"out={tmp_path / 'out'}", "query_mode=direct", "report=false"]
    assert main([*words, f"checkpoint={tmp_path / 'own'}"]) == 2
    assert "has no rge.json, so it is not a checkpoint of rge" in capsys.readouterr().err
    assert main([*words, f"model={tmp_path / 'own'}"]) == 0
    assert any(
        "treated as the released RGE checkpoint" in one for one in results_of(tmp_path / "out")["warnings"]
    )
    assert main([*words, f"model={tmp_path / 'own'}", "adapter=rge-release", "overwrite=true"]) == 0
    results = results_of(tmp_path / "out")
    assert not any("taken for" in one for one in results["warnings"])
    assert results["asked_as_released"] is False
    assert results["settings"]["differs_from_release"]
    assert results["identity"]["embedder"]["release"] is False
