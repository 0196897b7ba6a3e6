"""`rge eval budget` end to end on a fake encoder: every point against its definition, costs, reuse, page."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from eval_fakes import NUM_QUERIES, FakeEncoder, loader, tables, write_tables
from faults import error_about
from recorded import DECIDES

from eval.__main__ import main, usage
from eval.commands import export as exporting
from eval.commands.budget import DECIDED, FIXED, BudgetOptions, budget, table
from eval.commands.compare import CompareOptions, compare
from eval.pages.wording import number
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.model.backbone import load_backbone, skeleton
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder
from rge.plan.costs import embedding_flops


@pytest.fixture(scope="module")
def set_dir(tmp_path_factory):
    """A pool of pictures with and without a text."""
    made = tables()
    made["corpus"]["text"] = [None if row % 2 else f"key {row}" for row in range(len(made["corpus"]["id"]))]
    return write_tables(tmp_path_factory.mktemp("set"), made, {"report_by": ["pair"]})


@pytest.fixture(scope="module")
def done(set_dir, lively_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "budget"
    encoder = FakeEncoder(recipe=DECIDES)
    encoder.direct_probabilities = lambda items: np.linspace(0, 1, NUM_QUERIES)[: len(list(items))]
    backbone = load_backbone(lively_path)
    encoder.model, encoder.builder = EmbeddingModel(backbone), PromptBuilder(backbone.processor)
    options = BudgetOptions(checkpoint="fake", set=set_dir, out=out, auto=(0.25, 0.5), metric="mrr")
    assert budget(options, loader(encoder)) == out
    return encoder, out, json.loads((out / "budget.json").read_text())


def frame(out, name):
    return pd.read_parquet(out / name / "per_query.parquet").set_index("query_id")


@pytest.mark.slow
def test_every_way_of_asking_is_an_evaluation(done):
    _, out, content = done
    names = [row["name"] for row in content["points"]]
    assert names == ["direct", "reasoning", "cap-1", "cap-2", "cap-4", "auto-0.25", "auto-0.5"]
    for row in content["points"]:
        results = json.loads((out / row["name"] / "results.json").read_text())
        assert results["micro"]["mrr"]["value"] == row["value"]
        assert results["micro"]["mrr"]["value"] == pytest.approx(frame(out, row["name"])["mrr"].mean())
        assert results["budget"]["tokens"] == row["tokens"]
    first = compare(CompareOptions(a=out / "auto-0.5", b=out / "direct", metric=("mrr",))).iloc[0]
    gain = next(row["gain"] for row in content["points"] if row["name"] == "auto-0.5")
    assert (gain["value"], gain["low"], gain["high"]) == pytest.approx(
        (first.difference, first.low, first.high)
    )


@pytest.mark.slow
def test_what_the_model_decides_is_held_against_one_cap_for_all(done):
    """At as many tokens, by a mixture of the two nearest caps; a point that is not above is named on the page, too."""
    _, out, content = done
    rows = {row["name"]: row for row in content["points"]}
    for cap in (1, 2, 4):
        assert frame(out, f"cap-{cap}")["rationale_tokens"].max() == cap
        assert rows[f"cap-{cap}"]["curve"] == rows["direct"]["curve"] == rows["reasoning"]["curve"] == FIXED
    fixed = sorted((row for row in rows.values() if row["curve"] == FIXED), key=lambda row: row["tokens"])
    assert [row["name"] for row in fixed] == ["direct", "cap-1", "cap-2", "cap-4", "reasoning"]
    not_above = []
    for name in ("auto-0.25", "auto-0.5"):
        found = rows[name]
        expected = np.interp(found["tokens"], *([row[key] for row in fixed] for key in ("tokens", "value")))
        assert found["over_caps"]["value"] == pytest.approx(found["value"] - expected)
        assert found["over_caps"]["low"] < found["over_caps"]["value"] < found["over_caps"]["high"]
        not_above += [name] if found["over_caps"]["low"] <= 0 else []
    assert not_above
    of_mode, at_tokens, at_flops = content["notes"]
    assert "auto-0.5" in of_mode
    assert (rows["auto-0.5"]["mode"], rows["auto-0.25"].get("mode")) == ("auto", None)
    assert all(name in at_tokens for name in not_above)
    assert [name for name, row in rows.items() if "over_caps_flops" in row and row["over_caps_flops"]["low"] <= 0] == [
        name for name in rows if name in at_flops
    ]  # fmt: skip
    assert at_tokens.partition(":")[0] in (out / "report.html").read_text()


@pytest.mark.slow
def test_each_point_has_its_flops_and_the_share_of_wrong_kinds(done, set_dir, capsys):
    """FLOPs by rge plan's counter, of the prompts and tokens that there were; a choice is held against caps of as many, too."""
    encoder, out, content = done
    rows = {row["name"]: row for row in content["points"]}
    queries = load_set(set_dir).query_items("both")
    prompts = [encoder.builder.measure(one, "query") for one in queries]
    outline = skeleton(encoder.model.model.config)
    for name, row in rows.items():
        tokens_Q = frame(out, name)["rationale_tokens"].to_numpy()
        flops_Q = embedding_flops(outline, prompts, tokens_Q, writes=name != "direct")
        assert row["gflops"] == pytest.approx(flops_Q.mean() / 1e9)
        assert row["wrong_kind@1"]["value"] == pytest.approx(frame(out, name)["wrong_kind@1"].mean())
    by_cost = sorted((row for row in rows.values() if row["curve"] == FIXED), key=lambda row: row["gflops"])
    assert [row["name"] for row in by_cost] == ["direct", "cap-1", "cap-2", "cap-4", "reasoning"]
    for name in ("auto-0.25", "auto-0.5"):
        caps = ([row[key] for row in by_cost] for key in ("gflops", "value"))
        expected = np.interp(rows[name]["gflops"], *caps)
        assert rows[name]["over_caps_flops"]["value"] == pytest.approx(rows[name]["value"] - expected)
    shown = table(content)
    assert shown["GFLOP"].tolist() == [number(row["gflops"]) for row in content["points"]]
    assert {"wrong_kind@1, %", "over caps by FLOP"} < {*shown.columns}
    page = (out / "report.html").read_text()
    assert "GFLOP per query" in page
    assert all(f'<td data-label="GFLOP">{number(row["gflops"])}</td>' in page for row in rows.values())


@pytest.mark.slow
def test_a_card_and_a_comparison_show_the_curve(done, set_dir, tmp_path, monkeypatch):
    _, out, content = done
    card = tmp_path / "README.md"
    card.write_text("# me/mine\n\n## Training\n\nMuch.\n")
    monkeypatch.setattr(exporting, "_card", lambda path, results: path.read_text())
    for _ in range(2):  # the second takes the place of the first
        exporting.export(exporting.ExportOptions("card", out, card))
    text = card.read_text()
    assert text.count("## Accuracy against tokens") == text.count("## Training") == 1
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        f"| `{row['name']}` | {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}] | {row['tokens']:.1f} | {number(row['gflops'])} | {row['ms']:.1f} |"
        for row in sorted(content["points"], key=lambda row: row["tokens"])
    ]
    other = tmp_path / "other"
    budget(BudgetOptions(checkpoint="fake", set=set_dir, out=other, caps=(0, 3), auto=(), metric="mrr", report=False), loader(FakeEncoder(skill=0.5)))  # fmt: skip
    compare(CompareOptions(a=out, b=other, metric=("mrr",), out=tmp_path / "ab", examples=0))
    page = (tmp_path / "ab" / "compare.html").read_text()
    assert f"A: {FIXED}" in page
    assert '<th scope="row">B: cap-3</th>' in page
    assert '<th scope="row">B: cap-0</th>' not in page
    compare(CompareOptions(a=out / "cap-2", b=other / "direct", metric=("mrr",), out=tmp_path / "c", examples=0))  # fmt: skip
    assert "Accuracy and cost" not in (tmp_path / "c" / "compare.html").read_text()
    metric = json.loads((other / "budget.json").read_text()) | {"metric": "hit@1"}
    (other / "budget.json").write_text(json.dumps(metric))
    with error_about(UserError, "metric"):
        compare(CompareOptions(a=out, b=other, metric=("mrr",), out=tmp_path / "ab", examples=0))


@pytest.mark.slow
def test_thresholds_of_a_checkpoint_that_was_trained_to_decide(set_dir, tmp_path):
    """Below the threshold a query reasons; every share is held against as many queries chosen at random."""
    encoder = FakeEncoder(recipe=DECIDES)
    likely = np.linspace(0, 1, NUM_QUERIES)
    encoder.direct_probabilities = lambda items: likely[: len(list(items))]
    options = BudgetOptions(
        checkpoint="fake", set=set_dir, out=tmp_path, caps=(), auto=(0.3, 0.8), metric="mrr", report=False
    )
    budget(options, loader(encoder))
    rows = {row["name"]: row for row in json.loads((tmp_path / "budget.json").read_text())["points"]}
    assert list(rows) == ["direct", "reasoning", "auto-0.3", "auto-0.5", "auto-0.8"]  # and its own
    assert not any("gflops" in row for row in rows.values())  # its prompts are not ours
    for threshold in (0.3, 0.8):
        name = f"auto-{threshold:g}"
        reasons, found = likely < threshold, frame(tmp_path, name)
        direct, reasoned = (frame(tmp_path, mode) for mode in ("direct", "reasoning"))
        assert (found["mrr"] == np.where(reasons, reasoned["mrr"], direct["mrr"])).all()
        assert (found["rationale_tokens"] == np.where(reasons, reasoned["rationale_tokens"], 0)).all()
        gate = {"direct_above": threshold, "share": pytest.approx(reasons.mean())}
        assert rows[name]["decided"] == gate
        assert rows[name]["curve"] == DECIDED
        share = reasons.mean()
        random = (1 - share) * direct["mrr"].mean() + share * reasoned["mrr"].mean()
        assert rows[name]["at_random"] == pytest.approx(random)
        assert rows[name]["ms"] == pytest.approx((1 - share) * 1.0 + share * 3.0)


@pytest.mark.slow
def test_a_model_that_decides_for_itself_is_held_against_chance_among_rationales_always_written(
    set_dir, tmp_path
):
    more = {"metric": "mrr"}
    out = budget(
        BudgetOptions(checkpoint="fake", set=set_dir, out=tmp_path / "out", **more),
        loader(FakeEncoder(decides=True)),
    )
    rows = {row["name"]: row for row in json.loads((out / "budget.json").read_text())["points"]}
    direct, always, adaptive = (frame(out, name) for name in ("direct", "always", "adaptive"))
    wrote = adaptive["rationale_tokens"] > 0
    assert set(wrote.index[~wrote]) == {name for name in wrote.index if int(name[1:]) % 3 == 0}
    assert (always["rationale_tokens"] > 0).all()
    pd.testing.assert_series_equal(adaptive["mrr"], always["mrr"].where(wrote, direct["mrr"]))
    found, share = rows["adaptive"], wrote.mean()
    assert found["decided"] == {"share": pytest.approx(share)}
    assert found["at_random"] == pytest.approx(
        (1 - share) * direct["mrr"].mean() + share * always["mrr"].mean()
    )
    assert found["over_random"]["low"] < found["over_random"]["value"] < found["over_random"]["high"]
    assert found["curve"] == rows["always"]["curve"] == DECIDED
    assert found["tokens"] < rows["always"]["tokens"]
    page = (out / "report.html").read_text()
    assert '<th scope="row">adaptive</th>' in page
    assert DECIDED in page


def test_page_and_plot_show_every_point(done):
    _, out, content = done
    page, plot = (out / "report.html").read_text(), (out / "budget.svg").read_text()
    assert "Accuracy and cost" in page
    for row in content["points"]:
        assert f'<th scope="row">{row["name"]}</th>' in page
        assert f"<title>{row['name']}: {100 * row['value']:.1f} %" in plot
    assert plot.count("<title>") == 3 * len(content["points"])  # one a point and cost
    assert "generated tokens per query" in page
    assert "milliseconds per query" in page
    numbers = pd.read_csv(out / "budget.csv")
    assert numbers["value"].tolist() == pytest.approx([row["value"] for row in content["points"]])
    assert numbers["gain low"].notna().sum() == len(content["points"]) - 1
    assert all(row["name"] in (out / "budget.tex").read_text() for row in content["points"])
    again = out.parent / "again.html"
    assert main(["report", f"runs={out}", f"out={again}", "metric=mrr"]) == 0
    assert again.read_text() == page  # the page can be made again from the directory


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query_mode": ("direct",)}, ("query_mode",)),
        ({"metric": "recall"}, ("metric",)),
    ],
)
def test_wrong_options_are_named(set_dir, tmp_path, change, named):
    options = {"checkpoint": "fake", "set": set_dir, "out": tmp_path / "out"} | change
    encoder = FakeEncoder()
    with error_about(UserError, *named):
        budget(BudgetOptions(**options), loader(encoder))
    assert not encoder.calls


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("auto=0.5,1.5", r"auto\[1\] must be < 1, got 1.5"),
        ("batch_size=0", "batch_size must be >= 1, got 0"),
    ],
)
def test_numbers_out_of_range_are_named(set_dir, tmp_path, word, message, capsys):
    assert main(["budget", "checkpoint=fake", f"set={set_dir}", f"out={tmp_path / 'out'}", word]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_explains_inherited_options_too():
    shown = usage("budget")
    assert "each threshold is a point of a curve" in " ".join(shown.split())
    assert "Retrieval set directory (docs/own_data.md)" in shown
