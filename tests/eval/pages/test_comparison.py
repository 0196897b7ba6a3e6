"""The page of a comparison: who wins which query, in pictures, and by how much in each slice."""

import json
import re
import shutil

import pandas as pd
import pytest
from chromium import Chromium
from eval_fakes import FakeEncoder, loader, write_set
from faults import error_about

from eval.commands.compare import CompareOptions, compare
from eval.commands.run import RunOptions, run
from eval.pages.wording import percent, signed
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("comparison")
    data = write_set(root / "set", num_queries=24)
    options = {"set": data, "report": False, "query_mode": ("reasoning", "direct")}
    run(RunOptions(checkpoint="x", out=root / "a", **options), loader(FakeEncoder()))
    run(
        RunOptions(model="x/b", out=root / "b", **options | {"query_mode": ("direct",)}),
        loader(FakeEncoder("x/b", model="x/b")),
    )
    compare(CompareOptions(root / "a/reasoning-both", root / "b", metric=("mrr", "recall@1"), out=root / "c"))
    return root


def per_query(path):
    return pd.read_parquet(path / "per_query.parquet").set_index("query_id")


@pytest.mark.slow
def test_every_query_is_won_by_the_side_with_the_better_metric(world):
    page = (world / "c/compare.html").read_text()
    cards = re.findall(r'data-query="([^"]+)"[^>]* data-winner="([^"]+)"', page)
    assert len(cards) == 24
    a, b = (per_query(world / path)["mrr"] for path in ("a/reasoning-both", "b"))
    for query, winner in cards:
        assert winner == ("A" if a[query] > b[query] else "B" if b[query] > a[query] else "tie")
    said = page.split("By mrr, of 24 queries ")[1].split(".")[0]
    for name, words in (("A", "won by A"), ("B", "won by B"), ("tie", "ties")):
        num = [winner for _, winner in cards].count(name)
        assert not num or re.search(rf"\b{num} are {words}", said)
    assert page.count("because of q") == 24  # A's rationale of every query; B writes none


@pytest.mark.slow
def test_the_fewest_negatives_win(world, tmp_path):
    sides = (world / "a/reasoning-both", world / "b")
    compare(CompareOptions(*sides, metric=("negative_recall@10",), out=tmp_path))
    page = (tmp_path / "compare.html").read_text()
    winners = dict(re.findall(r'data-query="([^"]+)"[^>]* data-winner="([^"]+)"', page))
    a, b = (per_query(path)["negative_recall@10"].dropna() for path in sides)
    expected = {query: "A" if a[query] < b[query] else "B" for query in a.index if a[query] != b[query]}
    assert expected
    assert expected == {query: winners[query] for query in expected}


def test_slices_have_the_figures_and_intervals_of_the_tests(world):
    page = (world / "c/compare.html").read_text()
    table = page.split("By slice")[1].split("</table>")[0]
    rows = [
        row for row in json.loads((world / "c/compare.json").read_text())["rows"] if row["metric"] == "mrr"
    ]
    assert len(rows) > 5
    for row in rows:
        (line,) = re.findall(rf'<th scope="row">{row["slice"].replace("_", " ")}</th>(.*?)</tr>', table, re.S)
        for words in (
            percent(row["a"]),
            percent(row["b"]),
            signed(row["difference"]),
            f"{signed(row['low'])} to {signed(row['high'])}",
        ):
            assert words in line


@pytest.mark.slow
def test_a_set_that_was_moved_is_named(world, tmp_path):
    a, b = (
        shutil.copytree(world / path, tmp_path / name)
        for name, path in (("a", "a/reasoning-both"), ("b", "b"))
    )
    for folder in (a, b):
        results = json.loads((folder / "results.json").read_text())
        results["set"]["path"] = "gone"
        (folder / "results.json").write_text(json.dumps(results))
    with error_about(UserError, "set", "gone"):
        compare(CompareOptions(a, b, metric=("mrr",), out=tmp_path / "c"))
    compare(CompareOptions(a, b, metric=("mrr",), out=tmp_path / "c", set=world / "set"))
    assert "<article" in (tmp_path / "c/compare.html").read_text()
    compare(CompareOptions(a, b, metric=("mrr",), out=tmp_path / "c", examples=0))
    assert "<article" not in (tmp_path / "c/compare.html").read_text()


@pytest.mark.slow
def test_in_a_browser(world, tmp_path):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on the path")
    browser = Chromium(program, tmp_path / "profile")
    visible = "[...document.querySelectorAll('.cards .card')].filter(c => c.checkVisibility())"
    fill = "(f => {{ f.value = '{}'; f.dispatchEvent(new Event('input', {{bubbles: true}})) }})(document.querySelector('{}'))"
    try:
        for width in (1400, 390):
            browser.open(world / "c/compare.html", width, 900)
            assert browser.js("document.documentElement.scrollWidth") <= width
            assert browser.complaints() == []
            assert browser.js(f"{visible}.length") == 12
        browser.js(fill.format("because of q03", ".filters [name=words]"))
        assert browser.js(f"{visible}.map(c => c.dataset.query)") == ["q03"]
        browser.js(f"{visible}[0].querySelector('.top .pic').dispatchEvent(new MouseEvent('click'))")
        assert browser.js("document.querySelector('dialog').open")
        small, large = (
            f"{one}.getBoundingClientRect().width"
            for one in (f"{visible}[0].querySelector('.top .pic')", "document.querySelector('dialog .pic')")
        )
        assert browser.js(f"{large} > 3 * {small}")
        browser.js("document.querySelector('dialog').click()")
        assert not browser.js("document.querySelector('dialog').open")
    finally:
        browser.close()
