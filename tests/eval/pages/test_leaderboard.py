"""The page of many models: published beside measured, never mixed up, and every number that of results.json."""

import json
import re
import shutil

import pandas as pd
import pytest
from boards import Text, rows_of
from chromium import Chromium
from eval_fakes import FakeEncoder, loader, picture, write_set

from eval.__main__ import main
from eval.benchmarks.published_tables import published
from eval.benchmarks.releases.mmeb import MmebOptions, import_mmeb
from eval.commands.run import RunOptions, run_command
from eval.pages.boards.comparison import who_wins
from eval.pages.boards.leaderboard import write_leaderboard
from eval.pages.charts import PLOT_WIDTH, scatter
from eval.pages.wording import percent
from rge.common.errors import UserError

NAMES = ("ImageNet-1K", "ImageNet-A", "MSCOCO_t2i")


def evaluate(name, out, wanted, mode=("direct",), **options):
    given = RunOptions(model=name, set=wanted, out=out, query_mode=mode, **{"report": False} | options)
    return run_command(given, loader(FakeEncoder(name, model=name, profile="plain")))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("leaderboard")
    data = write_set(root / "set")
    evaluate("openai/clip", root / "clip", data)
    evaluate("runs/demo/joint/final", root / "ours", data, ("reasoning", "direct"))
    src = root / "mmeb"
    labels = ["cat", "dog", "owl", "fox", "cow"]
    for name in NAMES:
        (src / name).mkdir(parents=True)
        (src / "images").mkdir(exist_ok=True)
        rows = [
            {"qry_text": "<|image_1|>\nWhat is it?", "qry_img_path": f"{name}{n}.png",
             "tgt_text": labels[n % 4 :] + labels[: n % 4], "tgt_img_path": [""] * 5}
            for n in range(6)
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(src / name / "test-00000-of-00001.parquet")
        for n in range(6):
            (src / "images" / f"{name}{n}.png").write_bytes(picture(n + 50 * len(name)))
    import_mmeb(MmebOptions(src=src, out=root / "suite", sets=NAMES))
    evaluate("x/rge", root / "mmeb_eval", root / "suite", benchmark="mmeb", report=True)
    return root


@pytest.mark.slow
def test_measured_rows_carry_the_numbers_of_results_json(world, tmp_path):
    out = write_leaderboard([str(world / "clip"), f"Mine:{world / 'ours'}"], tmp_path / "p.html")
    rows = rows_of(out.read_text(), "measured")
    assert len(rows) == 3
    assert not rows_of(out.read_text(), "published")
    values = []
    for name, directory in (
        ("openai/clip", "clip"),
        ("Mine", "ours/direct-both"),
        ("Mine", "ours/reasoning-both"),
    ):
        results = json.loads((world / directory / "results.json").read_text())
        figure = results["micro"]["recall@1"]
        value, low, high = (figure[key] for key in ("value", "low", "high"))
        wanted = f"{percent(value)} {percent(low, value)}–{percent(high, value)}"
        (row,) = [r for r in rows if r[1].startswith(name) and results["query_mode"] in r[1]]
        assert row[2] == wanted
        assert "measured" in row[1]
        values.append(figure["value"])
    assert [float(row[2].split()[0]) for row in rows] == pytest.approx(
        sorted((100 * v for v in values), reverse=True), abs=0.06
    )


def test_a_set_that_is_not_the_published_one_is_kept_apart(world, tmp_path):
    page = write_leaderboard([str(world / "mmeb_eval")], tmp_path / "p.html", num_examples=0).read_text()
    assert "Not comparable:" in page
    kinds = [kind for kind, _ in Text(page).rows if kind]
    assert kinds[0] == "measured"
    assert kinds.index("apart") == 1
    assert kinds.count("published") == len(published()["mmeb"].rows)
    theirs = rows_of(page, "published")
    assert theirs[0][1].startswith("RGE (Qwen2.5VL-3B) published")
    assert theirs[0][2] == "70.1"
    assert "arXiv:2511.16150, Table 2" in page
    heat = page.split('class="table heatmap"')[1]
    shown = re.findall(r'<li><b class="num">\d+</b> ([^<]+?) <span class="kind">published', heat)
    assert len(shown) > 2
    assert shown == [cells[1].split(" published")[0] for cells in theirs[: len(shown)]]  # the best of them


def test_published_rows_stand_among_measured_ones_where_the_set_is_the_same(world, tmp_path):
    results = json.loads((world / "mmeb_eval" / "results.json").read_text())
    results["set"] |= {"num_members": 36, "num_queries": 36_000}
    results["profile"] = "official"
    copy = tmp_path / "full"
    copy.mkdir()
    (copy / "results.json").write_text(json.dumps(results))
    (copy / "per_query.parquet").write_bytes((world / "mmeb_eval" / "per_query.parquet").read_bytes())
    page = write_leaderboard([str(copy)], tmp_path / "p.html", num_examples=0).read_text()
    assert "Not comparable:" not in page
    order = [
        float(cells[2].split()[0]) for kind, cells in Text(page).rows if kind in ("measured", "published")
    ]
    assert order == sorted(order, reverse=True)
    assert len(order) == 17
    none = write_leaderboard([str(copy)], tmp_path / "p.html", num_examples=0, which="none").read_text()
    assert not rows_of(none, "published")


def test_a_suite_writes_its_page(world):
    page = (world / "mmeb_eval" / "report.html").read_text()
    assert set(re.findall(r'data-f0="([^"]+)"', page)) == set(NAMES)
    found = Text(page)
    assert found.uses <= found.ids
    assert found.uses


def test_examples_say_who_wins(world, tmp_path):
    page = write_leaderboard([str(world / "clip"), str(world / "ours")], tmp_path / "p.html").read_text()
    cards = re.findall(r'data-query="([^"]+)"[^>]* data-outcome="([^"]+)" data-winner="([^"]+)"', page)
    assert len(cards) == 24
    names = {"openai/clip, direct": "clip", "demo/joint, direct": "ours/direct-both", "demo/joint, reasoning": "ours/reasoning-both"}  # fmt: skip
    tables = {
        name: pd.read_parquet(world / path / "per_query.parquet").set_index("query_id")["first_hit_rank"]
        for name, path in names.items()
    }
    for query, rank, winner in cards:
        ranks = {name: table[query] for name, table in tables.items()}
        best = min(ranks.values())
        leaders = [name for name, value in ranks.items() if value == best]
        assert winner == (leaders[0] if len(leaders) == 1 else "tie" if len(leaders) == 3 else "several")
        assert rank == ("first" if best == 1 else "near" if best <= 5 else "below")
    nothing, first = [float("nan")] * 2, [1.0, float("nan")]
    assert who_wins(pd.Series(nothing).to_numpy(), ["a", "b"]) == "none"
    assert who_wins(pd.Series(first).to_numpy(), ["a", "b"]) == "a"


@pytest.mark.slow
def test_one_file_without_network_and_the_same_twice(world, tmp_path):
    runs = [str(world / "clip"), str(world / "ours"), str(world / "mmeb_eval")]
    first = write_leaderboard(runs, tmp_path / "a.html", which="all").read_bytes()
    assert write_leaderboard(runs, tmp_path / "b.html", which="all").read_bytes() == first
    page = first.decode()
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert str(tmp_path.parent) not in page
    for table in published().values():
        assert table.source in page.replace("&#39;", "'").replace("&amp;", "&")


def test_the_number_of_examples_is_the_one_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "eval.pages.report.write_leaderboard", lambda *_, **more: asked.append(more["num_examples"])
    )
    for examples in ([], ["examples=48"]):
        assert main(["report", "runs=a", f"out={tmp_path / 'p.html'}", "page=leaderboard", *examples]) == 0
    assert asked == [24, 48]


@pytest.mark.slow
def test_the_command_chooses_the_page(world, tmp_path, capsys):
    given = f"runs={world / 'clip'},{world / 'mmeb_eval'}"
    assert main(["report", given, f"out={tmp_path / 'p.html'}", "examples=0"]) == 0
    assert 'class="board"' in (tmp_path / "p.html").read_text()
    assert main(["report", f"runs={world / 'ours'}", f"out={tmp_path / 's.html'}", "examples=4"]) == 0
    assert 'class="board"' not in (tmp_path / "s.html").read_text()
    assert main(["report", f"runs=A:{world / 'clip'},B:{world / 'ours'}", f"out={tmp_path / 'l.html'}"]) == 0
    assert 'class="board"' in (tmp_path / "l.html").read_text()
    capsys.readouterr()
    assert main(["report", given, f"out={tmp_path / 'p.html'}", "log=x.jsonl"]) == 2
    assert "log= is for page=set" in capsys.readouterr().err
    assert main(["report", given, f"out={tmp_path / 'p.html'}", "page=leaderbord"]) == 2
    assert "did you mean 'leaderboard'?" in capsys.readouterr().err


def test_what_is_wrong_is_named(world, tmp_path, capsys):
    out = tmp_path / "p.html"
    with pytest.raises(
        UserError,
        match=r"is a second 'openai/clip' \(direct\) on the same set: give labels with runs=LABEL:DIR",
    ):
        write_leaderboard([str(world / "clip"), str(world / "clip")], out)
    assert main(["report", f"runs={world / 'clip'}", f"out={out}", "published=some"]) == 2
    assert "published must be one of auto, all, none" in capsys.readouterr().err
    with pytest.raises(UserError, match="set=DIR is for evaluations of one set, but these are of 2"):
        write_leaderboard([str(world / "clip"), str(world / "mmeb_eval")], out, set_dir=world / "set")
    with pytest.raises(UserError, match="retrieval set .* does not exist; if it was moved"):
        write_leaderboard([str(world / "clip")], out, set_dir=world / "nowhere")
    assert not out.exists()


def places(svg: str) -> list[float]:
    """x of the circles, in the order of the points."""
    return [
        float(x) for x in re.findall(r'aria-roledescription="circle" transform="translate\(([\d.]+),', svg)
    ]


def test_scatter_places_points_and_speaks():
    def point(name, cost, value, low=None, high=None):
        return {"name": name, "number": 1, "cost": cost, "value": value, "low": low, "high": high}

    points = [point("a", 10.0, 0.5, 0.4, 0.6), point("b", 1000.0, 0.25)]
    drawn = scatter(points, name="recall@1", x_label="ms")
    assert "recall@1 over ms: a 50.0 % at 10; b 25.0 % at 1,000" in drawn
    xs = places(drawn)
    assert xs[1] - xs[0] == pytest.approx(PLOT_WIDTH, abs=0.5)  # the ends of a logarithmic axis
    assert len(re.findall(r'<line [^>]*stroke-width="1.5"', drawn)) == 1  # the other has no interval
    assert "<title>a: 50.0 % [40.0, 60.0] at 10</title>" in drawn
    assert "<title>b: 25.0 % at 1,000</title>" in drawn
    linear = scatter([points[0], point("c", 20.0, 0.1), point("d", 0.0, 0.1)], name="y", x_label="ms")
    at = places(linear)
    assert at[1] - at[2] == pytest.approx(2 * (at[0] - at[2]), abs=0.5)
    assert all(0 <= x <= PLOT_WIDTH for x in at)


def test_warnings_stand_at_the_top_and_costs_only_where_there_are_some(world, tmp_path):
    """Two copies of an evaluation: one with a warning, one as a ranking made elsewhere would leave it."""
    warned, foreign = tmp_path / "warned", tmp_path / "foreign"
    for folder in (warned, foreign):
        shutil.copytree(world / "clip", folder)
    results = json.loads((warned / "results.json").read_text())
    (warned / "results.json").write_text(
        json.dumps(results | {"warnings": ["TRAINED ON THE TEST: 3 <pictures>"]})
    )
    frame = pd.read_parquet(foreign / "per_query.parquet")
    frame.assign(rationale_tokens=None, generate_ms=None, embed_ms=None).to_parquet(
        foreign / "per_query.parquet"
    )
    page = write_leaderboard([f"a:{warned}", f"b:{foreign}"], tmp_path / "p.html", num_examples=0).read_text()
    warning = "a, direct: TRAINED ON THE TEST: 3 &lt;pictures&gt;"
    assert page.count(warning) == 1
    assert page.index(warning) < page.index("<nav" if "<nav" in page else '<section class="board"')
    assert len(re.findall(r'data-label="Embed, ms"', page)) == 1
    assert '<b class="num">1</b> a, direct' in page
    alone = write_leaderboard([f"b:{foreign}"], tmp_path / "q.html", num_examples=0).read_text()
    assert "Accuracy against cost" not in alone


@pytest.mark.slow
def test_in_a_browser(world, tmp_path):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on the path")
    runs = [str(world / "clip"), str(world / "ours"), str(world / "mmeb_eval")]
    page = write_leaderboard(runs, tmp_path / "page.html", which="all")
    browser = Chromium(program, tmp_path / "profile")
    visible = "[...document.querySelectorAll('.browser .card')].filter(c => c.checkVisibility())"
    try:
        browser.open(page, 390, 900, script=False)  # everything is there without script, but for the controls
        assert browser.js("[...document.querySelectorAll('.rowfilter, .pair')].every(f => f.hidden)")
        assert browser.js("[...document.querySelectorAll('.boardtable tbody tr')].every(r => !r.hidden)")
        for width, dark in ((390, False), (320, True), (1280, True)):
            browser.open(page, width, 900, dark=dark)
            browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
            assert browser.js("document.documentElement.scrollWidth") <= width
            wide = (
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .skip, .defs, pre') && "
                "e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).length"
            )
            assert browser.js(wide) == 0
            cut = "[...document.querySelectorAll('.stack')].map(t => t.closest('.scroll')).filter(s => s.scrollWidth > s.clientWidth).length"
            if width < 640:
                assert browser.js(cut) == 0
                assert browser.js(
                    "getComputedStyle(document.querySelector('.boardtable td.main'), '::before').content"
                )
            assert browser.complaints() == []
            assert {url.split(":")[0] for url in browser.requests()} <= {"file", "data"}
        assert browser.js(f"{visible}.length") == 24  # twelve on each of the two boards
        rows = "[...document.querySelector('.boardtable').tBodies[0].rows]"
        names = f"{rows}.filter(r => r.checkVisibility()).map(r => r.querySelector('th').textContent)"
        mrr = f"{rows}.map(r => Number(r.cells[4].dataset.sort))"
        assert "mrr" in browser.js("document.querySelector('.boardtable thead tr').cells[4].textContent")
        head = "document.querySelector('.boardtable thead tr').cells[4]"
        browser.js(f"{head}.querySelector('button').click()")
        assert browser.js(f"{head}.getAttribute('aria-sort')") == "descending"
        found = browser.js(mrr)
        assert found == sorted(found, reverse=True)
        browser.js(f"{head}.querySelector('button').click()")
        assert browser.js(mrr) == sorted(found)
        board = "[...document.querySelectorAll('.boardtable')].find(t => t.tHead.textContent.includes('NegRecall'))"
        browser.js(f"window.board = {board}")
        browser.js("window.heads = [...board.tHead.rows[0].cells]")
        browser.js("window.at = heads.findIndex(h => h.textContent.includes('NegRecall'))")
        negatives = "[...board.tBodies[0].rows].map(r => r.cells[at].textContent.trim())"
        browser.js("heads[at].querySelector('button').click()")
        shown = [float(text) for text in browser.js(negatives) if text != "–"]
        assert shown == sorted(shown)  # lower is better: best first
        assert browser.js("heads[at].getAttribute('aria-sort')") == "ascending"
        fill = "(f => {{ f.value = '{}'; f.dispatchEvent(new Event('input', {{bubbles: true}})) }})(document.querySelector('{}'))"
        browser.js(fill.format("JOINT direct", ".rowfilter [name=model]"))
        assert [("joint" in name, "direct" in name) for name in browser.js(names)] == [(True, True)]
        assert browser.js("document.querySelector('.rowfilter output').textContent") == "1 of 3 rows"
        browser.js(fill.format("", ".rowfilter [name=model]"))
        browser.js(fill.format("published", ".rowfilter [name=kind]"))
        assert browser.js(names) == []
        browser.js("document.querySelector('.differs').open = true")
        told = "[...document.querySelectorAll('.differs')[0].querySelectorAll('tbody tr')].filter(r => r.checkVisibility()).map(r => r.cells[0].textContent)"
        assert browser.js(told) == ["embedder.hash", "settings.model"]
        choose_a = "(s => { s.value = '2'; s.dispatchEvent(new Event('change', {bubbles: true})) })(document.querySelector('.differs [name=a]'))"
        browser.js(choose_a)
        assert browser.js(told) == ["asked.query_mode"]
        choose = (
            "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change', {{bubbles: true}})) }})"
            "(document.querySelector('select[name=winner]'))"
        )
        winner = "demo/joint, reasoning"  # the fake embedder gives both direct rows the same ranking
        browser.js(choose.format(winner))
        first = f"{visible}.filter(c => c.closest('section') === document.querySelector('.browser'))"
        assert browser.js(f"{first}.length") > 0
        assert browser.js(f"{first}.every(c => c.dataset.winner === '{winner}')")
        assert browser.js(f"{visible}.length - {first}.length") == 12  # the other board keeps its own filter
    finally:
        browser.close()
