"""Paired comparison: antisymmetry, refusals, and figures that can be worked out otherwise."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from eval_fakes import FakeEncoder, loader, tables, write_set, write_tables
from faults import error_about

from eval.__main__ import main
from eval.commands import compare as compare_module
from eval.commands.compare import CompareOptions
from eval.commands.run import RunOptions, run, run_command
from eval.scoring.stats import holm
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    data = write_set(root / "set", num_queries=40)
    options = {"checkpoint": "fake", "set": data, "report": False}
    run(RunOptions(**options, out=root / "a", query_mode=("reasoning", "direct")), loader(FakeEncoder()))
    run(RunOptions(**options, out=root / "few", limit=10), loader(FakeEncoder()))
    other = write_set(root / "other", num_queries=12)
    run(RunOptions(**options | {"set": other}, out=root / "b"), loader(FakeEncoder()))
    return root


def compare(options):
    return list(compare_module.compare(options).itertuples(index=False))


def paired_tests(*args, **more):
    return list(compare_module.paired_tests(*args, **more).itertuples(index=False))


def by_key(rows):
    return {(row.slice, row.metric): row for row in rows}


def num_dots(out):
    svg = ET.parse(out / "compare.svg")
    return len(
        [
            mark
            for mark in svg.iter()
            if mark.get("aria-roledescription") == "circle" or "circle" in mark.get("class", "")
        ]
    )


@pytest.mark.slow
def test_rows_and_their_figures(dirs):
    rows = compare(
        CompareOptions(dirs / "a/reasoning-both", dirs / "a/direct-both", metric=("mrr", "recall@10"))
    )
    found = by_key(rows)
    assert list(dict.fromkeys(row.slice for row in rows)) == [
        "all queries", "macro", "category causal", "category functional", "category temporal",
        "pair held_out", "pair seen",
    ]  # fmt: skip
    a, b = (pd.read_parquet(dirs / f"a/{mode}-both/per_query.parquet") for mode in ("reasoning", "direct"))
    difference = (a["mrr"] - b["mrr"]).to_numpy()
    row = found["all queries", "mrr"]
    assert (row.a, row.b) == (pytest.approx(a["mrr"].mean()), pytest.approx(b["mrr"].mean()))
    assert row.difference == pytest.approx(difference.mean())
    assert row.effect == pytest.approx(difference.mean() / difference.std(ddof=1))
    assert row.low < row.difference < row.high
    assert row.num_queries == 40
    assert row.p_holm is None
    chosen = (a["category"] == "causal").to_numpy()
    assert found["category causal", "mrr"].difference == pytest.approx(difference[chosen].mean())
    macro = np.mean(
        [difference[(a["category"] == c).to_numpy()].mean() for c in ("causal", "functional", "temporal")]
    )
    assert found["macro", "mrr"].difference == pytest.approx(macro)
    for metric in ("mrr", "recall@10"):
        for family in ("category", "pair"):
            own = [row for row in rows if row.metric == metric and row.slice.startswith(family)]
            np.testing.assert_allclose([row.p_holm for row in own], holm([row.p for row in own]))


def test_p_agrees_with_scipy_where_groups_are_single_queries():
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 60))
    frame = pd.DataFrame({"mrr": a, "group": [f"g{n}" for n in range(60)], "category": "x"})
    row = paired_tests(frame, frame.assign(mrr=b), ["mrr"], [], seed=0)[0]
    theirs = scipy.stats.permutation_test(
        (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=9999, rng=np.random.default_rng(1),
    )  # fmt: skip
    assert row.p == pytest.approx(theirs.pvalue, abs=0.02)
    deviation = (a - b).std(ddof=0) / np.sqrt(60)
    assert row.minimum_detectable == pytest.approx(2.8016 * deviation, rel=0.03)


def test_swapping_the_sides_swaps_every_sign(dirs):
    forward = compare(CompareOptions(dirs / "a/reasoning-both", dirs / "a/direct-both", metric=("all",)))
    backward = by_key(
        compare(CompareOptions(dirs / "a/direct-both", dirs / "a/reasoning-both", metric=("all",)))
    )
    assert {row.metric for row in forward} >= {"recall@50", "negative_recall@10", "delta_map_capped@10"}
    for row in forward:
        other = backward[row.slice, row.metric]
        assert (other.a, other.b, other.p, other.p_holm) == (row.b, row.a, row.p, row.p_holm)
        assert other.difference == pytest.approx(-row.difference, abs=1e-12)
        assert other.low == pytest.approx(-row.high, abs=1e-9)
        assert other.high == pytest.approx(-row.low, abs=1e-9)
        assert other.minimum_detectable == pytest.approx(row.minimum_detectable)
        if row.effect is not None:
            assert other.effect == pytest.approx(-row.effect)


def test_an_evaluation_equals_itself_and_nothing_is_known_of_its_spread(dirs, capsys):
    for row in compare(CompareOptions(dirs / "a/direct-both", dirs / "a/direct-both")):
        assert (row.difference, row.p, row.minimum_detectable) == (0, 1, None)
        assert row.low == -row.high
        assert row.effect == 0 or row.slice == "macro"
        if row.slice == "all queries":
            assert row.high == pytest.approx(1 - 0.025 ** (1 / 20))  # 20 groups
    assert re.search(r"\+0.00 \[-16.84, \+16.84\] 1.0000 +\+0.00 +–\n", capsys.readouterr().out)


@pytest.mark.slow
def test_one_group_says_nothing_of_others(tmp_path, capsys):
    content = tables(6, 60)
    content["queries"]["group"] = ["one"] * 6
    data = write_tables(tmp_path / "set", content, {"report_by": ["pair"]})
    options = RunOptions(
        checkpoint="fake", set=data, out=tmp_path / "out", query_mode=("reasoning", "direct")
    )
    dirs = run_command(options, loader(FakeEncoder()))
    for block in ("micro", "macro"):
        figures = json.loads((dirs[0] / "results.json").read_text())[block]
        assert {(one["low"], one["high"]) for one in figures.values()} == {(None, None)}
    printed = capsys.readouterr().out
    assert re.search(r"all queries +\d+.\d\d – ", printed)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<span class="interval">–</span>' in page
    assert "None" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    rows = compare(CompareOptions(*dirs, metric=("mrr",), out=tmp_path / "compared"))
    assert {(row.low, row.high, row.minimum_detectable) for row in rows} == {(None, None, None)}
    assert rows[0].difference != 0
    written = json.loads((tmp_path / "compared" / "compare.json").read_text())["rows"]
    assert written[0]["low"] is None
    assert re.search(r"mrr .* – 1.0000 .* –\n", capsys.readouterr().out)
    assert num_dots(tmp_path / "compared") == len(rows)


def test_files_and_table(dirs, tmp_path, capsys):
    words = [
        f"a={dirs}/a/reasoning-both",
        f"b={dirs}/a/direct-both",
        "metric=recall@10,mrr",
        f"out={tmp_path}",
    ]
    assert main(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert "differences are a - b" in printed
    assert re.search(r"all queries\s+40\s+recall@10", printed)
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["a"]["query_mode"] == "reasoning"
    assert content["statistics"]["adjusted"] == "Holm"
    assert {row["metric"] for row in content["rows"]} == {"recall@10", "mrr"}
    assert num_dots(tmp_path) == 7


def test_queries_that_one_side_does_not_define_are_left_out_of_both():
    frame = pd.DataFrame({"m": [1.0, 0.5, np.nan, 0.0], "group": list("abcd"), "category": "x"})
    row = paired_tests(frame, frame.assign(m=[0.0, np.nan, 1.0, 0.0]), ["m"], [], seed=0)[0]
    assert (row.num_queries, row.a, row.b) == (2, 0.5, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "change", "fields"),
    [
        ("a/direct-both", "b", {}, ("b", "set.fingerprint")),
        ("a/direct-both", "few", {}, ("few", "q10")),
        ("a", "b", {}, ("a", "several")),
        ("set", "b", {}, ("set/results.json", "missing")),
        ("b", "b", {"metric": ("recall@3",)}, (("choice", "metric"),)),
    ],
)
def test_what_cannot_be_compared_is_named(dirs, a, b, change, fields):
    with error_about(UserError, *fields):
        compare(CompareOptions(dirs / a, dirs / b, **change))


def test_profiles_must_agree(dirs, tmp_path):
    for name in ("results.json", "per_query.parquet"):
        (tmp_path / name).write_bytes((dirs / "b" / name).read_bytes())
    results = json.loads((tmp_path / "results.json").read_text()) | {"profile": "official"}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with error_about(UserError, "profile"):
        compare(CompareOptions(dirs / "b", tmp_path))
    (tmp_path / "results.json").write_text("{")
    with error_about(UserError, "results.json"):
        compare(CompareOptions(dirs / "b", tmp_path))


def test_queries_are_paired_by_id_not_by_place(dirs, tmp_path):
    one, other = dirs / "a/reasoning-both", dirs / "a/direct-both"
    (tmp_path / "results.json").write_bytes((other / "results.json").read_bytes())
    pd.read_parquet(other / "per_query.parquet").sample(frac=1, random_state=0).to_parquet(
        tmp_path / "per_query.parquet"
    )
    assert compare(CompareOptions(one, tmp_path)) == compare(CompareOptions(one, other))
