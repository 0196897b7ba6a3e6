"""`rge eval budget` end to end on a fake encoder: every point against its definition, costs, reuse, page."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from eval_fakes import NUM_QUERIES, FakeEncoder, loader, tables, write_set, write_tables

from eval.__main__ import main, usage
from eval.commands.budget import DECIDED, GATED, BudgetOptions, budget
from eval.commands.compare import CompareOptions, compare
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def set_dir(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def done(set_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "budget"
    encoder = FakeEncoder()
    options = BudgetOptions(
        checkpoint="fake", set=set_dir, out=out, k=3, gate=(0.25, 0.5), margin=(0.05,), metric="mrr",
    )  # fmt: skip
    assert budget(options, loader(encoder)) == out
    return encoder, out, json.loads((out / "budget.json").read_text())


def frame(out, name):
    return pd.read_parquet(out / name / "per_query.parquet").set_index("query_id")


@pytest.mark.slow
def test_every_way_of_asking_is_an_evaluation(done):
    _, out, content = done
    names = [row["name"] for row in content["points"]]
    assert names == [
        "direct", "reasoning", "mean-1", "max-1", "mean-2", "max-2", "mean-3", "max-3", "gate-25", "gate-50",
        "gate-below-0.05",
    ]  # fmt: skip
    for row in content["points"]:
        results = json.loads((out / row["name"] / "results.json").read_text())
        assert results["micro"]["mrr"]["value"] == row["value"]
        assert results["micro"]["mrr"]["value"] == pytest.approx(frame(out, row["name"])["mrr"].mean())
        assert results["budget"]["tokens"] == row["tokens"]
    first = compare(CompareOptions(a=out / "mean-3", b=out / "direct", metric=("mrr",))).iloc[0]
    gain = next(row["gain"] for row in content["points"] if row["name"] == "mean-3")
    assert (gain["value"], gain["low"], gain["high"]) == pytest.approx(
        (first.difference, first.low, first.high)
    )


def test_one_draw_is_the_same_either_way_and_more_cost_more(done):
    _, out, content = done
    of = {row["name"]: row for row in content["points"]}
    pd.testing.assert_series_equal(frame(out, "mean-1")["mrr"], frame(out, "max-1")["mrr"])
    assert not frame(out, "mean-3")["mrr"].equals(frame(out, "max-3")["mrr"])
    for name in ("mean", "max"):
        tokens = [of[f"{name}-{k}"]["tokens"] for k in (1, 2, 3)]
        assert tokens == pytest.approx([tokens[0], 2 * tokens[0], 3 * tokens[0]])
        assert of[f"{name}-2"]["ms"] == pytest.approx(2 * of[f"{name}-1"]["ms"])
    assert of["direct"]["tokens"] == 0


def test_a_gate_takes_the_uncertain_queries(done):
    _, out, content = done
    row = next(row for row in content["points"] if row["name"] == "gate-25")
    direct, reasoned, gate = (frame(out, name) for name in ("direct", "reasoning", "gate-25"))
    margins = direct["top10_scores"].map(lambda scores: scores[0] - scores[1])
    through = margins < row["gate"]["margin_below"]
    assert through.sum() == NUM_QUERIES / 4
    assert margins[through].max() < margins[~through].min()
    pd.testing.assert_series_equal(gate["mrr"], reasoned["mrr"].where(through, direct["mrr"]))
    assert (gate["rationale_tokens"] == reasoned["rationale_tokens"].where(through, 0)).all()
    assert row["at_random"] == pytest.approx(0.75 * direct["mrr"].mean() + 0.25 * reasoned["mrr"].mean())
    assert row["ms"] == pytest.approx(1.0 + 0.25 * 3.0)  # direct for all, the rationale for a quarter
    assert row["curve"] == GATED
    fixed = next(row for row in content["points"] if row["name"] == "gate-below-0.05")
    assert fixed["gate"]["share"] == pytest.approx((margins < 0.05).mean())


def test_a_gate_is_held_against_chance(done):
    _, out, content = done
    row = next(row for row in content["points"] if row["name"] == "gate-50")
    assert row["over_random"]["value"] == pytest.approx(row["value"] - row["at_random"])
    assert row["over_random"]["low"] < row["over_random"]["value"] < row["over_random"]["high"]
    assert "over_random" not in next(row for row in content["points"] if row["name"] == "mean-1")


@pytest.mark.slow
def test_thresholds_of_a_checkpoint_that_was_trained_to_decide(set_dir, tmp_path):
    """Below the threshold a query reasons; every share is held against as many queries chosen at random."""
    encoder = FakeEncoder(recipe={"loss": {"adaptive": {"share": 0.5}}})
    likely = np.linspace(0, 1, NUM_QUERIES)
    encoder.direct_probabilities = lambda items: likely[: len(list(items))]
    options = BudgetOptions(
        checkpoint="fake", set=set_dir, out=tmp_path, k=0, auto=(0.3, 0.8), metric="mrr", report=False
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
        gate = {"decided_by": "the model", "direct_above": threshold, "share": pytest.approx(reasons.mean())}
        assert rows[name]["gate"] == gate
        assert rows[name]["curve"] == DECIDED
        share = reasons.mean()
        random = (1 - share) * direct["mrr"].mean() + share * reasoned["mrr"].mean()
        assert rows[name]["at_random"] == pytest.approx(random)
        assert rows[name]["ms"] == pytest.approx((1 - share) * 1.0 + share * 3.0)


@pytest.mark.slow
def test_another_temperature_in_the_same_place_is_refused_before_anything_is_sampled(set_dir, tmp_path):
    options = {"checkpoint": "fake", "set": set_dir, "out": tmp_path, "k": 1, "report": False}
    budget(BudgetOptions(**options), loader(FakeEncoder()))
    encoder = FakeEncoder()
    with pytest.raises(UserError, match=r"budget.draw_temperature = 0.7, this one has 1.0"):
        budget(BudgetOptions(**options, draw_temperature=1.0), loader(encoder))
    assert not encoder.calls


@pytest.mark.slow
def test_a_model_that_decides_for_itself_is_held_against_chance_among_rationales_always_written(
    set_dir, tmp_path
):
    more = {"k": 0, "gate": (0.5,), "metric": "mrr"}
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
    assert found["gate"] == {"decided_by": "the model", "share": pytest.approx(share)}
    assert found["at_random"] == pytest.approx(
        (1 - share) * direct["mrr"].mean() + share * always["mrr"].mean()
    )
    assert found["over_random"]["low"] < found["over_random"]["value"] < found["over_random"]["high"]
    assert found["curve"] == rows["always"]["curve"] == DECIDED
    assert found["tokens"] < rows["always"]["tokens"]
    page = (out / "report.html").read_text()
    assert '<th scope="row">adaptive</th>' in page
    assert DECIDED in page


@pytest.mark.slow
def test_queries_with_a_single_candidate_gain_nothing_from_a_rationale(tmp_path):
    """Their margin is the largest there is; close shares and thresholds are points of their own."""
    content = tables(8, 60, negatives=False)
    right = content["qrels"]
    rest = [
        ("q01", name)
        for name in content["corpus"]["id"]
        if ("q01", name) not in set(zip(*list(right.values())[:2], strict=True))
    ]
    pairs = [*zip(right["query-id"], right["corpus-id"], strict=True), *rest]
    content["candidates"] = {
        "query-id": [pair[0] for pair in pairs],
        "corpus-id": [pair[1] for pair in pairs],
    }
    encoder = FakeEncoder(recipe={"loss": {"adaptive": {"share": 0.5}}})
    encoder.direct_probabilities = lambda items: np.linspace(0, 1, 8)
    options = BudgetOptions(
        checkpoint="fake", set=write_tables(tmp_path / "set", content), out=tmp_path / "out", k=0, gate=(0.5, 0.9),
        auto=(0.9999999, 0.99999999), metric="mrr", report=False,
    )  # fmt: skip
    rows = json.loads((budget(options, loader(encoder)) / "budget.json").read_text())["points"]
    assert [row["name"] for row in rows[2:]] == ["gate-50", "gate-90", "auto-0.9999999", "auto-0.99999999"]
    sizes = pd.Series(content["candidates"]["query-id"]).value_counts()
    assert rows[2]["gate"]["share"] == 0.5
    assert rows[3]["gate"] == {"margin_below": 2.0, "share": (sizes > 1).mean()}


@pytest.mark.slow
def test_a_larger_k_draws_only_what_is_new(done, set_dir, tmp_path):
    encoder, _, _ = done
    assert len(encoder.seen) == (2 + 3) * NUM_QUERIES + 60
    cache = tmp_path / "cache"
    options = {"checkpoint": "fake", "set": set_dir, "cache": cache, "gate": (0.5,), "fuse": ("mean",)}
    budget(BudgetOptions(**options, out=tmp_path / "a", k=1, report=False), loader(FakeEncoder()))
    again = FakeEncoder()
    budget(BudgetOptions(**options, out=tmp_path / "b", k=2, report=False), loader(again))
    assert len(again.seen) == NUM_QUERIES
    a, b = (frame(tmp_path / name, "mean-1")["mrr"] for name in ("a", "b"))
    np.testing.assert_array_equal(a, b)


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
    ("change", "message"),
    [
        ({"fuse": ("median",)}, "fuse must be one of mean, max, got 'median'"),
        ({"query_mode": ("direct",)}, "leave out query_mode="),
        ({"metric": "recall"}, "metric must be one of recall@1, .*, got 'recall'"),
    ],
)
def test_wrong_options_are_named(set_dir, tmp_path, change, message):
    options = {"checkpoint": "fake", "set": set_dir, "out": tmp_path / "out", "k": 1} | change
    encoder = FakeEncoder()
    with pytest.raises(UserError, match=message):
        budget(BudgetOptions(**options), loader(encoder))
    assert not encoder.calls


def test_a_temperature_of_the_single_rationale_is_refused(set_dir, tmp_path):
    options = BudgetOptions(checkpoint="fake", set=set_dir, out=tmp_path / "out", temperature=0.5)
    with pytest.raises(UserError, match="temperature= would sample the single rationale too"):
        budget(options, loader(FakeEncoder(), temperature=0.5))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("k=-1", "k must be >= 0, got -1"),
        ("draw_temperature=0", "draw_temperature must be > 0, got 0"),
        ("gate=0.5,1.5", r"gate\[1\] must be < 1, got 1.5"),
    ],
)
def test_numbers_out_of_range_are_named(set_dir, tmp_path, word, message, capsys):
    assert main(["budget", "checkpoint=fake", f"set={set_dir}", f"out={tmp_path / 'out'}", word]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_explains_inherited_options_too():
    shown = usage("budget")
    assert "k=8" in shown
    assert "Rationales sampled per query" in shown
    assert "Retrieval set directory (docs/own_data.md)" in shown
