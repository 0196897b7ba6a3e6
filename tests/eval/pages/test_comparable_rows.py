"""What takes a place on a board: only rows that are comparable, and every row says what sets it apart."""

import json
import re
import shutil

import pandas as pd
import pytest
from boards import Text, rows_of
from eval_fakes import FakeEncoder, loader, write_set

from eval.commands.run import RunOptions, run
from eval.pages.boards.leaderboard import write_leaderboard
from eval.pages.boards.rows import Row, heat_map, measured_row, numbered
from eval.pages.evaluations import Evaluation, Figure


@pytest.fixture
def made(tmp_path):
    """One evaluation, whose results.json a test rewrites into another benchmark's."""
    data = write_set(tmp_path / "set", num_queries=6, num_candidates=20)
    run(
        RunOptions(model="x/one", set=data, out=tmp_path / "one", query_mode=("direct",), report=False),
        loader(FakeEncoder("x/one", model="x/one")),
    )

    def make(name, **change):
        folder = shutil.copytree(tmp_path / "one", tmp_path / name)
        results = json.loads((folder / "results.json").read_text())
        wanted = change.pop("set", {})
        results |= {"model": {"name": f"x/{name}"}} | change
        results["set"] |= wanted
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return make


def page_of(tmp_path, *runs):
    out = write_leaderboard([str(one) for one in runs], tmp_path / "page.html", num_examples=0)
    return out.read_text()


PINPOINT = {
    "benchmark": "pinpoint",
    "set": {"name": "PinPoint", "num_queries": 7635, "num_candidates": 109600},
}


def pinpoint(made, name, profile, **more):
    micro = {
        "map_capped@10": {"value": 0.5, "low": 0.4, "high": 0.6},
        "precision@10": {"value": 0.2, "low": 0.1, "high": 0.3},
    }
    given = json.loads(json.dumps(PINPOINT)) | {"profile": profile, "micro": micro}
    given["set"] |= more.pop("set", {})
    if profile == "official":
        given["official"] = {"mAP@10": 0.500004, "precision@10": 0.27}
    return made(name, **given, **more)


def places(page):
    return [
        (kind, cells[0], cells[1]) for kind, cells in Text(page).rows if kind in ("measured", "published")
    ]


@pytest.mark.slow
def test_rows_of_another_release_take_no_place(made, tmp_path):
    page = page_of(tmp_path, pinpoint(made, "theirs", "official"))
    rows = places(page)
    numbered = [(kind, who) for kind, place, who in rows if place.strip()]
    assert [place.strip() for _, place, _ in rows if place.strip()] == [str(n) for n in range(1, 13)]
    assert numbered[0][0] == "measured"
    assert [
        who.split(" published")[0]
        for kind, _, who in rows
        if kind == "published" and "another release" in who
    ][:1]
    assert all(not place.strip() for _, place, who in rows if "another release" in who)
    kinds = [kind for kind, _ in Text(page).rows if kind]
    assert kinds.index("apart") == 12  # below everything that has a place


@pytest.mark.slow
def test_the_clean_profile_takes_no_place_among_published_rows(made, tmp_path):
    page = page_of(tmp_path, pinpoint(made, "theirs", "clean"))
    assert "the rows here have the clean protocol, the published ones the official protocol" in page
    assert [place.strip() for kind, place, _ in places(page) if kind == "published"] == [""] * 18
    (row,) = rows_of(page, "measured")
    assert "clean protocol" in row[1]


@pytest.mark.slow
def test_profiles_have_boards_of_their_own(made, tmp_path):
    page = page_of(tmp_path, pinpoint(made, "a", "clean"), pinpoint(made, "b", "official"))
    assert page.count('class="board"') == 2
    assert "109,600 candidates, official protocol" in page


@pytest.mark.slow
def test_official_rows_keep_their_intervals(made, tmp_path):
    (row,) = rows_of(page_of(tmp_path, pinpoint(made, "a", "official")), "measured")
    assert row[2] == "50.0 40.0–60.0"
    assert row[-1] == "27.0"  # the released figure is another one, and has no interval of ours


@pytest.mark.slow
def test_rmir_means_the_same_in_both_profiles(made, tmp_path):
    wanted = {"name": "RMIR", "num_queries": 1634, "num_candidates": 35803}
    page = page_of(tmp_path, made("a", benchmark="rmir", profile="clean", set=wanted))
    assert "Not comparable:" not in page
    assert sum(bool(place.strip()) for _, place, _ in places(page)) == len(places(page))
    cut = page_of(tmp_path, made("b", benchmark="rmir", profile="clean", set=wanted | {"limit": 10}))
    assert "the set measured here is not the published one" in cut


@pytest.mark.slow
def test_all_members_with_a_few_queries_each_take_no_place_among_published_rows(made, tmp_path):
    wanted = {"name": "MMEB", "num_members": 36, "num_queries": 108}
    macro = {"macro": {"hit@1": {"value": 0.99, "low": 0.9, "high": 1.0}}}
    page = page_of(tmp_path, made("a", benchmark="mmeb", profile="official", set=wanted, **macro))
    assert "not the published one: it has 108 of 36,000 queries" in page
    assert all(not place.strip() for kind, place, _ in places(page) if kind == "published")
    wanted["num_queries"] = 36_000
    page = page_of(tmp_path, made("b", benchmark="mmeb", profile="official", set=wanted, **macro))
    assert all(place.strip() for _, place, _ in places(page))


@pytest.mark.slow
def test_another_import_takes_no_place_among_published_rows(made, tmp_path):
    wanted = {"name": "MM-BRIGHT, task 2", "num_members": 29, "num_queries": 1218}
    wanted["made_with"] = {"image_policy": "all", "task": 2}
    macro = {"macro": {"ndcg@10": {"value": 0.2, "low": 0.1, "high": 0.3}}}
    page = page_of(tmp_path, made("a", benchmark="mmbright", profile="official", set=wanted, **macro))
    assert "imported with image_policy=all, the published rows have image_policy=first" in page
    (row,) = rows_of(page, "measured")
    assert "image_policy=all" in row[1]
    wanted["made_with"] = {"image_policy": "first", "task": 2}
    page = page_of(tmp_path, made("b", benchmark="mmbright", profile="official", set=wanted, **macro))
    assert "Not comparable:" not in page


@pytest.mark.slow
def test_sets_of_one_fingerprint_and_other_contents_are_two_boards(made, tmp_path):
    page = page_of(tmp_path, made("a"), made("b", set={"content": "f" * 64}), made("c", set={"limit": 3}))
    assert page.count('class="board"') == 3


@pytest.mark.slow
def test_warnings_stand_on_the_row_and_a_row_trained_on_the_test_takes_no_place(made, tmp_path):
    warning = "TRAINED ON THE TEST: 3 of its pictures"
    page = page_of(tmp_path, made("honest"), made("other", warnings=[warning]))
    found = {
        cells[1].split()[0]: (cells[0].strip(), cells[1])
        for kind, cells in Text(page).rows
        if kind == "measured"
    }
    assert found["x/honest"][0] == "1"
    assert found["x/other"][0] == ""
    assert warning in found["x/other"][1]
    assert warning not in found["x/honest"][1]
    assert re.search(r'<p class="warn"[^>]*><b>[^<]*</b>x/other, direct: TRAINED ON THE TEST', page)


@pytest.mark.slow
def test_a_result_without_a_recorded_content_joins_the_board_without_a_place(made, tmp_path):
    old = made("old")
    results = json.loads((old / "results.json").read_text())
    del results["set"]["content"], results["identity"]
    (old / "results.json").write_text(json.dumps(results))
    page = page_of(tmp_path, made("new"), old)
    assert page.count('class="board"') == 1
    found = {
        cells[1].split()[0]: (cells[0].strip(), cells[1])
        for kind, cells in Text(page).rows
        if kind == "measured"
    }
    assert found["x/new"][0] == "1"
    assert found["x/old"][0] == ""
    assert "the set&#39;s texts and pictures were not recorded: unranked" in page
    assert "was written by an older version, which recorded less" in page


@pytest.mark.slow
def test_a_ranking_made_elsewhere_has_no_row_of_empty_costs(made, tmp_path):
    folder = made("foreign", query_mode=None, tag="theirs")
    import pandas as pd

    table = pd.read_parquet(folder / "per_query.parquet")
    for name in ("rationale_tokens", "generate_ms", "embed_ms"):
        table[name] = None
    table.to_parquet(folder / "per_query.parquet")
    results = json.loads((folder / "results.json").read_text()) | {"rationale": {"forced_rate": None}}
    (folder / "results.json").write_text(json.dumps(results))
    assert "Accuracy against cost" not in page_of(tmp_path, folder)
    both = page_of(tmp_path, folder, made("ours"))
    assert "Accuracy against cost" in both
    assert both.index("x/foreign") < both.index("x/ours")
    assert '<th scope="row">2 x/ours' in both  # numbered as on the heat map


@pytest.mark.slow
def test_the_rows_of_a_board_are_also_a_csv_and_a_latex_table(made, tmp_path):
    page_of(tmp_path, pinpoint(made, "ours", "official"))
    rows = pd.read_csv(tmp_path / "page.csv")
    ours = rows[rows["model"] == "x/ours"].iloc[0]
    assert (ours["mAP@10"], ours["mAP@10 low"], ours["mAP@10 high"]) == (0.500004, 0.4, 0.6)
    assert not ours["published"]
    assert rows["published"].sum() == len(rows) - 1
    assert rows["place"].dropna().tolist() == list(range(1, len(rows["place"].dropna()) + 1))
    line = next(line for line in (tmp_path / "page.tex").read_text().splitlines() if "x/ours" in line)
    assert "50.00 [40.00, 60.00]" in line
    page_of(tmp_path, pinpoint(made, "official", "official"), pinpoint(made, "clean", "clean"))
    assert {path.name for path in tmp_path.glob("page-board*")} == {
        f"page-board{number}.{ending}" for number in (0, 1) for ending in ("csv", "tex")
    }


def test_equal_figures_share_a_place_and_a_row_without_one_has_none():
    figures = {"a": 0.5, "b": 0.7, "c": 0.5, "d": None, "e": 0.1}
    rows = [Row(name, "", [None if x is None else Figure(x)], False, {}) for name, x in figures.items()]
    places = {row.label: row.place for row in numbered(rows, 0, "recall@1")}
    assert places == {"b": 1, "a": 2, "c": 2, "e": 4, "d": None}


def test_the_lowest_figure_of_a_metric_wins_if_lower_is_better():
    rows = [
        Row(name, "", [None if x is None else Figure(x)], False, {})
        for name, x in zip("abc", (0.5, None, 0.1), strict=True)
    ]
    assert [(row.label, row.place) for row in numbered(rows, 0, "negative_recall@10")] == [
        ("c", 1),
        ("a", 2),
        ("b", None),
    ]


def test_the_heat_map_has_a_line_for_each_column_that_has_a_value(tmp_path):
    """An empty cell of a spreadsheet is called "none" in every column."""

    def block(**values):
        return {name: {"mrr": {"value": value, "low": None, "high": None}} for name, value in values.items()}

    results = {
        "set": {}, "by_season": block(winter=0.1, none=0.2), "by_place": block(indoors=0.3, none=0.4),
        "by_same": block(none=0.5),
    }  # fmt: skip
    run = Evaluation(tmp_path, "mine", "", 0, False, results, pd.DataFrame())
    heat = heat_map([measured_row(run, [], "mrr", False)], [])
    shown = {line: cells[0][0].value for line, cells in heat["lines"]}
    assert shown == {"winter": 0.1, "none": 0.2, "indoors": 0.3, "place none": 0.4}
