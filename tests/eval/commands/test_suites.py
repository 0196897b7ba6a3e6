"""`budget`, `rerank` and `bm25` on a suite: every member by itself, then the mean of all, with one model for all."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, tables, write_tables
from faults import error_about
from recorded import DECIDES

from eval.benchmarks.suite import write_suite
from eval.commands.bm25 import Bm25Options, bm25, rank
from eval.commands.budget import BudgetOptions, budget
from eval.commands.compare import CompareOptions, compare
from eval.commands.rerank import RerankOptions, rerank_command
from eval.commands.run import RunOptions, run_command
from eval.commands.score import ScoreOptions, score
from eval.pages.report import ReportOptions, report
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.judging.scorer import SCORERS, Score, Scorer

SIZES = {"north": (8, 30), "south": (12, 24)}


class Judge(Scorer):
    """Prefers high ids; counts how often one is loaded."""

    name = {"judge": "fake"}
    loaded = 0

    def __init__(self, judge):
        super().__init__()
        Judge.loaded += 1

    def score(self, pairs):
        return [Score(int(candidate.id[1:]) / 100) for _, candidate in pairs]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Two members of different sizes, with texts for BM25."""
    path = tmp_path_factory.mktemp("suite")
    for number, (name, (queries, candidates)) in enumerate(SIZES.items()):
        content = tables(queries, candidates)
        content["corpus"]["text"] = [f"{name} word{int(one[1:])}" for one in content["corpus"]["id"]]
        content["queries"]["text"] = [f"what is word{(7 * n + number) % candidates}" for n in range(queries)]
        # south says nothing of pairs, as a domain without grades
        write_tables(path / name, content, {"name": name, "report_by": ["pair"] if name == "north" else []})
    members = {name: {"half": name.upper()} for name in SIZES}
    write_suite(path, name="compass", benchmark="generic", column="side", members=members)
    return path


def results_of(path):
    return json.loads((path / "results.json").read_text())


def mean_of_members(path, metric):
    return pd.read_parquet(path / "per_query.parquet").groupby("category")[metric].mean().mean()


@pytest.fixture(scope="module")
def curves(suite, tmp_path_factory):
    out = tmp_path_factory.mktemp("budget") / "out"
    loads, encoder = [], FakeEncoder(recipe=DECIDES)
    encoder.direct_probabilities = lambda items: np.resize([0.4, 0.6], len(list(items)))

    def load():
        loads.append(encoder)
        return encoder

    options = BudgetOptions(checkpoint="fake", set=suite, out=out, auto=(0.5,), metric="mrr")
    assert budget(options, load) == out
    assert len(loads) == 1
    return out, json.loads((out / "budget.json").read_text())


@pytest.mark.slow
def test_every_way_of_asking_is_a_mean_over_members(curves):
    out, content = curves
    names = [row["name"] for row in content["points"]]
    assert names == ["direct", "reasoning", "cap-1", "cap-2", "cap-4", "auto-0.5"]
    assert (content["set"]["name"], content["num_members"], content["num_queries"]) == ("compass", 2, 20)
    for row in content["points"]:
        assert row["value"] == pytest.approx(mean_of_members(out / row["name"], "mrr"))
        results = results_of(out / row["name"])
        assert results["macro"]["mrr"]["value"] == row["value"]
        assert results["budget"]["tokens"] == row["tokens"]
        tokens = pd.read_parquet(out / row["name"] / "per_query.parquet").groupby("category")[
            "rationale_tokens"
        ]
        assert row["tokens"] == pytest.approx(tokens.mean().mean())
        assert set(results["by_half"]) == {"NORTH", "SOUTH"}


def test_gains_are_paired_within_members_and_chance_takes_the_share_of_each(curves):
    out, content = curves
    of = {row["name"]: row for row in content["points"]}
    assert of["direct"]["gain"] is None
    gain = of["auto-0.5"]["gain"]
    assert gain["value"] == pytest.approx(of["auto-0.5"]["value"] - of["direct"]["value"])
    assert gain["low"] < gain["value"] < gain["high"]
    rows = list(compare(CompareOptions(a=out / "auto-0.5", b=out / "direct", metric=("mrr",))).itertuples())
    of_slice = {row.slice: row for row in rows}
    macro = of_slice["macro"]
    assert (gain["value"], gain["low"], gain["high"]) == pytest.approx(
        (macro.difference, macro.low, macro.high)
    )
    assert of_slice["pair seen"].num_queries + of_slice["pair held_out"].num_queries == SIZES["north"][0]
    gate = pd.read_parquet(out / "auto-0.5" / "per_query.parquet")
    share = (gate["rationale_tokens"] > 0).groupby(gate["category"]).mean()
    assert share.tolist() == [0.5, 0.5]
    assert of["auto-0.5"]["decided"]["shares"] == dict.fromkeys(SIZES, 0.5)
    assert of["auto-0.5"]["at_random"] == pytest.approx(
        (of["direct"]["value"] + of["reasoning"]["value"]) / 2
    )


@pytest.mark.slow
def test_compare_says_of_a_suite_what_its_results_say(tmp_path):
    """Members of 8 and 40 queries in one half: a mean over queries would be the large member's."""
    sizes = {"north": 8, "south": 40, "west": 12}
    for name, queries in sizes.items():
        write_tables(tmp_path / "suite" / name, tables(queries, 60), {"name": name, "report_by": ["pair"]})
    members = {name: {"half": "B" if name == "west" else "A"} for name in sizes}
    write_suite(tmp_path / "suite", name="compass", benchmark="generic", column="side", members=members)
    dirs = run_command(
        RunOptions(
            checkpoint="fake", set=tmp_path / "suite", out=tmp_path / "out", report=False,
            query_mode=("reasoning", "direct"),
        ),
        loader(FakeEncoder()),
    )  # fmt: skip
    a, b = (results_of(path) for path in dirs)
    rows = list(compare(CompareOptions(*dirs, metric=("mrr", "recall@10"))).itertuples())
    kinds = {"all queries": ("micro",), "macro": ("macro",)}
    kinds |= {f"half {half}": ("by_half", half) for half in "AB"}
    kinds |= {f"pair {pair}": ("by_pair", pair) for pair in ("seen", "held_out")}
    kinds |= {f"category {name}": ("by_category", name) for name in sizes}
    assert {row.slice for row in rows} == set(kinds)
    for row in rows:
        for results, ours in ((a, row.a), (b, row.b)):
            figures = results
            for key in kinds[row.slice]:
                figures = figures[key]
            assert ours == pytest.approx(figures[row.metric]["value"], abs=1e-12), row.slice
        assert row.difference == pytest.approx(row.a - row.b, abs=1e-12)
    half = next(row for row in rows if (row.slice, row.metric) == ("half A", "mrr"))
    pooled = [pd.read_parquet(path / "per_query.parquet").query("half == 'A'")["mrr"].mean() for path in dirs]
    assert abs(half.difference - (pooled[0] - pooled[1])) > 1e-3


def test_a_page_shows_no_value_of_a_column_that_a_member_lacks(tmp_path):
    for name, columns in (("north", ["pair"]), ("south", [])):
        content = tables(6, 12)
        if not columns:
            content["queries"].pop("pair")
        write_tables(tmp_path / "suite" / name, content, {"name": name, "report_by": columns})
    write_suite(
        tmp_path / "suite",
        name="compass",
        benchmark="generic",
        column="side",
        members={"north": {}, "south": {}},
    )
    dirs = run_command(
        RunOptions(
            checkpoint="fake", set=tmp_path / "suite", out=tmp_path / "out", report=False,
            query_mode=("reasoning", "direct"),
        ),
        loader(FakeEncoder()),
    )  # fmt: skip
    compare(CompareOptions(*dirs, metric=("mrr",), out=tmp_path / "compared"))
    page = (tmp_path / "compared" / "compare.html").read_text()
    assert "held-out pair" in page
    assert "nan" not in re.findall(r'<option value="([^"]*)"', page)
    assert "nan pair" not in page


def test_members_may_be_folders_in_folders(tmp_path):
    for name in ("far/north", "far/south"):
        write_tables(tmp_path / "suite" / name, tables(4, 60))
    members = dict.fromkeys(("far/north", "far/south"), {})
    write_suite(tmp_path / "suite", name="poles", benchmark="generic", column="side", members=members)
    options = RunOptions(checkpoint="fake", set=tmp_path / "suite", out=tmp_path / "out")
    (out,) = run_command(options, loader(FakeEncoder()))
    assert set(results_of(out)["by_category"]) == set(members)
    page = tmp_path / "page.html"
    with error_about(UserError, out, "suite"):
        report(ReportOptions(runs=(str(out),), out=page))
    assert not page.exists()


@pytest.mark.parametrize("benchmark", ["mrmr", "mmeb2"])
def test_a_suite_of_a_benchmark_can_be_measured_without_its_protocol(tmp_path, benchmark):
    about = {"benchmark": benchmark, "task": "knowledge", "part": "image"}
    for name in SIZES:
        write_tables(tmp_path / "suite" / name, tables(4, 60), about)
    write_suite(
        tmp_path / "suite", name="x", benchmark=benchmark, column="task", members=dict.fromkeys(SIZES, {})
    )
    options = RunOptions(checkpoint="fake", set=tmp_path / "suite", out=tmp_path / "out")
    (out,) = run_command(options, loader(FakeEncoder()))
    results = results_of(out)
    assert results["benchmark"] == "generic"
    assert [one["metric"] for one in results["headline"]] == ["recall@1", "recall@10", "mrr", "ndcg@10"]


def test_another_evaluation_in_out_is_reported_before_members_are_measured(suite, tmp_path):
    alone = FakeEncoder()
    run_command(
        RunOptions(checkpoint="fake", set=suite / "north", out=tmp_path / "alone", report=False),
        loader(alone),
    )
    encoder = FakeEncoder()
    with error_about(UserError, "alone", "out"):
        run_command(
            RunOptions(checkpoint="fake", set=suite, out=tmp_path / "alone", report=False), loader(encoder)
        )
    assert not encoder.calls
    write_suite(tmp_path, name="half", benchmark="generic", column="side", members={"south": {}})
    (tmp_path / "south").symlink_to(suite / "south")
    half = RunOptions(checkpoint="fake", set=tmp_path, out=tmp_path / "half", report=False)
    run_command(half, loader(encoder))
    with error_about(UserError, "half", "out"):
        run_command(replace(half, set=suite), loader(encoder))
    assert [mode for _, mode, _ in encoder.calls] == ["direct", "reasoning"]


def test_members_with_other_prompts_are_reported_before_the_rest_is_measured(tmp_path):
    names = ("east", "north", "south")
    for name in names:
        meta = {"name": name, "report_by": []} | ({"prompts": "plain"} if name == "north" else {})
        write_tables(tmp_path / name, tables(8, 30), meta)
    write_suite(
        tmp_path, name="compass", benchmark="generic", column="side", members={name: {} for name in names}
    )

    class Worded(FakeEncoder):
        def reword(self, profile):
            self.settings = self.settings.but(profile=profile)

    options = RunOptions(checkpoint="fake", set=tmp_path, out=tmp_path / "out", report=False)
    with error_about(UserError, "settings.profile"):
        run_command(options, loader(Worded()))
    assert not (tmp_path / "out/members/south").exists()


@pytest.mark.slow
def test_a_judge_reorders_every_member(suite, tmp_path, monkeypatch):
    options = RunOptions(
        checkpoint="fake", set=suite, out=tmp_path / "run", query_mode=("reasoning", "direct"), report=False
    )
    before, _ = run_command(options, loader(FakeEncoder()))
    monkeypatch.setitem(SCORERS._entries, "fake", Judge)
    Judge.loaded = 0
    judged = rerank_command(RerankOptions(of=before, out=tmp_path / "judged", judge="x", ask="fake", top_n=4))
    assert Judge.loaded == 1
    old, new = (pd.read_parquet(path / "per_query.parquet") for path in (before, judged))
    for first, second in zip(old["top10"], new["top10"], strict=True):
        assert list(second[:4]) == sorted(first[:4], reverse=True)
        assert list(second[4:]) == list(first[4:])
    results = results_of(judged)
    assert results["rerank"]["num_pairs"] == 4 * 20
    assert (results["rerank"]["of"], results["query_mode"]) == (str(before), "reasoning")
    assert results["macro"]["mrr"]["value"] == pytest.approx(mean_of_members(judged, "mrr"))
    assert results["set"]["fingerprint"] == results_of(before)["set"]["fingerprint"]
    with error_about(UserError, "set", suite / "north"):
        rerank_command(RerankOptions(of=before, out=tmp_path / "x", judge="x", set=suite / "north"))
    (tmp_path / "run" / "members" / "south" / "reasoning-both").rename(tmp_path / "elsewhere")
    with error_about(UserError, "south/reasoning-both", "missing"):
        rerank_command(RerankOptions(of=before, out=tmp_path / "x", judge="x"))
    content = results_of(before)
    del content["member_dirs"]
    (before / "results.json").write_text(json.dumps(content))
    with error_about(UserError, before, "old"):
        rerank_command(RerankOptions(of=before, out=tmp_path / "x", judge="x"))


def test_a_reranked_suite_says_that_its_ranking_was_made_by_other_software(suite, tmp_path, monkeypatch):
    options = RunOptions(
        checkpoint="fake", set=suite, out=tmp_path / "run", query_mode=("direct",), report=False
    )
    (before,) = run_command(options, loader(FakeEncoder()))
    for name in SIZES:
        results = results_of(path := before / "members" / name)
        results["identity"]["software"]["packages"]["numpy"] = "0.1"
        (path / "results.json").write_text(json.dumps(results))
    monkeypatch.setitem(SCORERS._entries, "fake", Judge)
    judged = rerank_command(RerankOptions(of=before, out=tmp_path / "judged", judge="x", ask="fake", top_n=2))
    of_member = results_of(judged / "members/north")["identity"]["asked"]["ranked_with"]
    assert list(of_member.values()) == ["0.1"]
    assert results_of(judged)["identity"]["asked"]["ranked_with"] == of_member


@pytest.mark.slow
def test_bm25_ranks_every_member(suite, tmp_path, capsys):
    pytest.importorskip("bm25s")
    out = bm25(Bm25Options(set=suite, out=tmp_path / "out"))
    assert "compass: bm25" in capsys.readouterr().out
    results = results_of(out)
    assert (results["model"]["name"], results["tag"]) == ("bm25", "bm25-lucene")
    for name in SIZES:
        alone = bm25(Bm25Options(set=suite / name, out=tmp_path / name))
        assert results["by_category"][name] == results_of(alone)["micro"]
    value = [results["by_category"][name]["recall@1"]["value"] for name in SIZES]
    assert results["macro"]["recall@1"]["value"] == pytest.approx(np.mean(value))
    table = pd.read_parquet(out / "per_query.parquet").set_index("query_id")
    assert table.at["south/q01", "top10"].tolist() == ["c008"]  # the only text with word8
    for key, value in (("k1", 1.2), ("b", 0.75), ("stopwords", "null")):
        with error_about(UserError, f"settings.{key}"):
            bm25(Bm25Options(set=suite, out=tmp_path / "out", **{key: value}))
    assert bm25(Bm25Options(set=suite, out=tmp_path / "out")) == out

    other = bm25(Bm25Options(set=suite, out=tmp_path / "other", k1=2.0, b=1.0))
    runs = {"a": out, "b": other}
    for name, ranked in runs.items():
        score(ScoreOptions(set=suite, out=tmp_path / name, run=ranked))
    keys = {results_of(tmp_path / name)["identity"]["key"] for name in runs}
    assert len(keys) == len(runs)  # they are different rankings


def test_bm25_ranks_only_texts_that_share_a_word(tmp_path):
    pytest.importorskip("bm25s")
    content = tables(num_queries=3, num_candidates=5)
    content["queries"]["text"], content["queries"]["image"] = ["key", "a key", "keyhole"], [None] * 3
    content["corpus"]["text"], content["corpus"]["image"] = ["key", "door", "hat", "shoe", "lock"], [None] * 5
    data = write_tables(tmp_path / "set", content)
    found = rank(load_set(data), Bm25Options(set=data, out=tmp_path), 1000)
    assert (found.rows_QW >= 0).sum(axis=1).tolist() == [1, 1, 0]


@pytest.mark.parametrize(("stopwords", "found"), [("en", False), ("null", True)])
def test_bm25_leaves_out_the_stopwords_of_a_language(tmp_path, stopwords, found):
    pytest.importorskip("bm25s")
    content = tables(num_queries=3, num_candidates=5)
    content["queries"]["text"], content["queries"]["image"] = ["the"] * 3, [None] * 3
    content["corpus"]["text"], content["corpus"]["image"] = ["the thing"] * 5, [None] * 5
    data = write_tables(tmp_path / "set", content)
    wanted, options = load_set(data), Bm25Options(set=data, out=tmp_path, stopwords=stopwords)
    assert (rank(wanted, options, 1000).rows_QW >= 0).any() == found
    with error_about(UserError, "stopwords"):
        rank(wanted, replace(options, stopwords="xx"), 1000)
    content["corpus"]["text"] = list("abcde")
    with error_about(UserError, tmp_path / "letters"):
        rank(load_set(write_tables(tmp_path / "letters", content)), options, 1000)
