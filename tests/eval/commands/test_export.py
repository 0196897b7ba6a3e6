"""Formats that others read, from one small evaluation."""

import json
import logging
from dataclasses import replace

import pandas as pd
import pytest
import yaml
from eval_fakes import FakeEncoder, loader, write_set
from faults import error_about
from huggingface_hub import ModelCard

from eval.__main__ import main
from eval.commands.export import ExportOptions, export, with_evaluation
from eval.commands.run import RunOptions, run
from eval.commands.score import ScoreOptions, score
from eval.pages.evaluations import note_of, read_evaluation
from eval.scoring.results import Results
from rge.checkpoints.export import checkpoint_hash
from rge.common.errors import UserError
from rge.common.mmeb_prompts import SETS


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    run(
        RunOptions(checkpoint="x", set=write_set(root / "set"), out=root / "e", report=False),
        loader(FakeEncoder()),
    )
    return root / "e"


@pytest.mark.slow
def test_pinpoint_and_top50(done, tmp_path):
    assert main(["export", "format=pinpoint", f"eval={done}", f"out={tmp_path / 'p.json'}"]) == 0
    export(ExportOptions("top50", done, tmp_path / "t.json"))
    items, top = (json.loads((tmp_path / name).read_text()) for name in ("p.json", "t.json"))
    assert {query: one["retrieved_items"][:50] for query, one in items.items()} == top
    assert {len(one["retrieved_items"]) for one in items.values()} == {
        60
    }  # evaluate.py reads all that is listed
    assert len(top) == 24
    assert {len(names) for names in top.values()} == {50}
    assert all(len(set(names)) == 50 for names in top.values())  # CIRCO refuses repeated ids
    first = [
        line.split()[2] for line in (done / "run.trec").read_text().splitlines() if line.startswith("q00 ")
    ]
    assert top["q00"] == first[:50]


def test_mteb(done, tmp_path):
    export(ExportOptions("mteb", done, tmp_path / "m.json", model="me"))
    content = json.loads((tmp_path / "m.json").read_text())
    results = json.loads((done / "results.json").read_text())
    (scores,) = content["scores"]["test"]
    assert scores["ndcg_at_10"] == scores["main_score"] == round(results["micro"]["ndcg@10"]["value"], 5)
    assert {"recall_at_20", "map_at_10", "mrr", "hf_subset"} <= set(scores)
    assert (content["task_name"], content["model_name"]) == ("fake", "me")
    with error_about(UserError, "main"):
        export(ExportOptions("mteb", done, tmp_path / "m.json", main="ndcg@11"))
    (tmp_path / "results.json").write_text(json.dumps(results | {"suite": "domain"}))
    with error_about(UserError, tmp_path, "suite"):
        export(ExportOptions("mteb", tmp_path, tmp_path / "s.json"))


def test_tables_for_papers_and_for_programs(done, tmp_path):
    for name in ("csv", "latex"):
        assert main(["export", f"format={name}", f"eval={done}", f"out={tmp_path / name}"]) == 0
    results = json.loads((done / "results.json").read_text())
    table = pd.read_csv(tmp_path / "csv").set_index(["slice", "metric"])
    for label, block in (("all queries", results["micro"]), ("pair seen", results["by_pair"]["seen"])):
        for metric, figure in block.items():
            assert table.loc[(label, metric)].to_dict() == pytest.approx(figure, abs=1e-15)
    text = (tmp_path / "latex").read_text()
    figure = results["by_pair"]["held_out"]["mrr"]
    shown = f"{100 * figure['value']:.2f} [{100 * figure['low']:.2f}, {100 * figure['high']:.2f}]"
    assert "recall@1 & recall@10 & mrr & ndcg@10 \\\\" in text
    (line,) = [line for line in text.splitlines() if line.startswith("pair held\\_out &")]
    assert shown in line


def test_a_latex_table_has_no_empty_column_for_a_metric_that_was_not_measured(done, tmp_path):
    with error_about(UserError, ("choice", "metric")):
        export(ExportOptions("latex", done, tmp_path / "t.tex", metric=("recal@1",)))
    assert not (tmp_path / "t.tex").exists()


def test_mmeb_needs_all_sets(done, tmp_path):
    with error_about(UserError, done, "benchmark"):
        export(ExportOptions("mmeb", done, tmp_path / "x.json"))
    results = json.loads((done / "results.json").read_text()) | {"benchmark": "mmeb", "suite": "set"}
    results["set"] |= {"num_members": 36, "num_queries": 108}
    results["by_category"] = {name: {"hit@1": {"value": 0.5, "low": 0.4, "high": 0.6}} for name in SETS}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with error_about(UserError, tmp_path, "subset"):
        export(ExportOptions("mmeb", tmp_path, tmp_path / "x.json"))
    assert not (tmp_path / "x.json").exists()
    results["set"]["num_queries"] = 36_000
    (tmp_path / "results.json").write_text(json.dumps(results))
    export(ExportOptions("mmeb", tmp_path, tmp_path / "x.json", model="me"))
    content = json.loads((tmp_path / "x.json").read_text())
    assert len(content["metrics"]["image"]) == 36
    assert content["metrics"]["image"]["GQA"] == {"hit@1": 0.5}
    assert content["metadata"]["model_name"] == "me"


def test_the_card_of_the_checkpoint_that_was_evaluated(done, tmp_path):
    """As the hub reads it; again and again, and beside other evaluations."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "rge.json").write_text("{}")
    card = folder / "README.md"
    with error_about(UserError, "README.md"):
        export(ExportOptions("card", done, card))
    card.write_text("---\nlicense: mit\n---\n\n# me/mine\n\n## Use\n\nSo.\n")
    with error_about(UserError, card):
        export(ExportOptions("card", done, card))
    results = json.loads((done / "results.json").read_text())
    results |= {"checkpoint_hash": checkpoint_hash(folder), "warnings": ["TRAINED ON THE TEST"]}
    for number, mode in enumerate(("direct", "reasoning", "reasoning")):
        results["query_mode"] = mode
        results["micro"]["recall@1"]["value"] = 0.1 * number
        (tmp_path / "results.json").write_text(json.dumps(results))
        export(ExportOptions("card", tmp_path, card))
    text = card.read_text()
    read = ModelCard(text).data
    assert read.license == "mit"
    assert read.model_name == "me/mine"
    assert len(read.eval_results) == 8
    assert {
        one.dataset_config: one.metric_value for one in read.eval_results if one.metric_name == "recall@1"
    } == {
        "direct, both": 0.0,
        "reasoning, both": 0.2,
    }
    assert text.count("| fake | reasoning, both | recall@1 | 0.2000 [") == text.count("## Evaluation") == 1
    assert text.count("TRAINED ON THE TEST") == 2
    assert text.count("| set | asked |") == 1
    assert "## Use\n\nSo.\n" in text
    assert checkpoint_hash(folder) == results["checkpoint_hash"]  # a card is no part of what was evaluated


def test_model_index_entries_of_others_stay_as_they_are(done):
    """Two sets of one type, an entry without figures, one with a field of its own, and another model's."""
    results = json.loads((done / "results.json").read_text())
    task = {"type": "image-text-retrieval"}
    others = [
        {"task": task, "dataset": {"type": "x", "name": name}, "metrics": [{"type": "mrr", "value": value}]}
        for name, value in (("one", 0.1), ("other", 0.2))
    ]
    others += [{"task": task, "dataset": {"type": "y", "name": "fake"}}, {"note": None, "metrics": []}]
    known = [{"name": "mine", "results": others}, {"name": "theirs", "results": []}]
    card = "---\n" + yaml.safe_dump({"tags": ["a", "a"], "model-index": known}) + "---\n# me/mine\n"
    for _ in range(2):
        card = with_evaluation(card, Results.model_validate(results))
    front = yaml.safe_load(card.split("---\n")[1])
    first, second = front["model-index"]
    assert (first["name"], first["results"][:-1], second) == ("mine", others, known[1])
    assert first["results"][-1]["dataset"] == {"name": "fake", "type": "fake", "config": "reasoning, both"}
    assert front["tags"] == ["a", "a"]


def test_a_card_whose_front_matter_cannot_be_used(done, caplog, monkeypatch):
    results = json.loads((done / "results.json").read_text())
    for front, key in (
        ("a: [", "front matter"),
        ("- a", "front matter"),
        ("model-index: {name: a}", "model-index"),
        ("model-index: [{name: a, results: [b]}]", "model-index"),
    ):
        with error_about(UserError, key):
            with_evaluation(f"---\n{front}\n---\n# me/mine\n", Results.model_validate(results))
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    assert with_evaluation("# me/mine\n", Results.model_validate(results)).startswith(
        "---\nmodel-index:\n- name: me/mine\n"
    )
    assert not caplog.records


def test_a_card_tells_a_part_from_the_whole(done):
    results = json.loads((done / "results.json").read_text())
    part = results | {"set": results["set"] | {"limit": 6}}
    macro = {
        "suite": "domain",
        "headline": [{"metric": "mrr", "average": "macro", **results["macro"]["mrr"]}],
    }
    card = "# me/mine\n"
    for one in (results, part, results | macro | {"set": results["set"] | {"num_members": 3}}):
        card = with_evaluation(card, Results.model_validate(one))
    rows = [line.split(" | ")[1] for line in card.splitlines() if line.startswith("| fake |")]
    assert list(dict.fromkeys(rows)) == [
        "reasoning, both", "reasoning, both, first 6 queries", "reasoning, both, mean of 3 members",
    ]  # fmt: skip
    assert "* fake, reasoning, both, first 6 queries: only the first 6 queries were evaluated" in card


def test_a_card_does_not_pass_off_a_reranked_or_fused_ranking_as_the_checkpoints_own(done):
    results = json.loads((done / "results.json").read_text())
    more = {
        "budget": {"name": "mean-8"}, "rewrite": {"kind": "caption"}, "embedding_dims": 16,
        "candidate_mode": "reasoning", "rerank": {"of": "eval", "top_n": 5},
    }  # fmt: skip
    card = "# me/mine\n"
    for one in (results, *(results | {key: value} for key, value in more.items()), results | more):
        card = with_evaluation(card, Results.model_validate(one))
    rows = [line.split(" | ")[1] for line in card.splitlines() if line.startswith("| fake |")]
    ways = ["mean-8", "rewrite=caption", "embedding_dims=16", "candidate_mode=reasoning", "top 5 reranked"]
    assert list(dict.fromkeys(rows)) == [
        f"reasoning, both{words}" for words in ("", *(f", {way}" for way in ways), ", " + ", ".join(ways))
    ]
    assert note_of(
        replace(read_evaluation(done), results=Results.model_validate(results | more))
    ) == ", ".join(ways)  # on a board, too
    base = with_evaluation("# me/mine\n", Results.model_validate(results | {"budget": {"name": "reasoning"}}))
    assert base == with_evaluation("# me/mine\n", Results.model_validate(results))


def test_a_partial_run_is_not_exported(done, tmp_path):
    for name in ("run.trec", "results.json"):
        (tmp_path / name).write_bytes((done / name).read_bytes())
    lines = [line for line in (tmp_path / "run.trec").read_text().splitlines() if not line.startswith("q00 ")]
    (tmp_path / "run.trec").write_text("\n".join(lines) + "\n")
    with error_about(UserError, tmp_path / "run.trec"):
        export(ExportOptions("pinpoint", tmp_path, tmp_path / "p.json"))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"set": null, "micro": {}}', '{"set": "s"}', "{", '{"a": NaN}']
)
def test_other_json_is_not_taken_for_results(done, tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with error_about(UserError, "results.json"):
        export(ExportOptions("csv", tmp_path, tmp_path / "table.csv"))
    asked = {"run": done / "run.trec", "set": done.parent / "set", "out": tmp_path}
    with error_about(UserError, "results.json"):
        score(ScoreOptions(**asked))
    assert (tmp_path / "results.json").read_text() == content
    score(ScoreOptions(**asked, overwrite=True))
    export(ExportOptions("csv", tmp_path, tmp_path / "table.csv"))
