"""`rge eval budget` end to end on a fake encoder: every point against its definition, costs, reuse, page."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from eval_fakes import NUM_QUERIES, FakeEncoder, loader, write_set
from faults import error_about
from recorded import DECIDES

from eval.__main__ import main, usage
from eval.commands import export as exporting
from eval.commands.budget import DECIDED, FIXED, BudgetOptions, budget
from eval.commands.compare import CompareOptions, compare
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def set_dir(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def done(set_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "budget"
    encoder = FakeEncoder(recipe=DECIDES)
    encoder.direct_probabilities = lambda items: np.linspace(0, 1, NUM_QUERIES)[: len(list(items))]
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
    assert len(content["notes"]) == 1
    assert all(name in content["notes"][0] for name in not_above)
    assert content["notes"][0].partition(":")[0] in (out / "report.html").read_text()


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
        f"| `{row['name']}` | {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}] | {row['tokens']:.1f} | {row['ms']:.1f} |"
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
    with error_about(UserError, "hit@1"):
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
    assert list(rows) == ["direct", "reasoning", "auto-0.3", "auto-0.8"]
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
    assert plot.count("<title>") == 2 * len(content["points"])  # one a point and cost
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
        ({"query_mode": ("direct",)}, ("query_mode=",)),
        ({"metric": "recall"}, ("recall@1", "recall")),
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
