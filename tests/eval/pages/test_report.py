"""The report page, read back with `html.parser` (and, where Chromium is installed, looked at by it)."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from chromium import Chromium
from faults import error_about
from PIL import Image

from eval.pages import charts, evaluations, examples
from eval.pages.evaluations import RANK_COLUMN
from eval.pages.examples import choose_examples
from eval.pages.report import ReportOptions, curves_of, read_training_logs, report
from eval.pages.wording import LONG_QUESTION, number
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.identity.set_fingerprint import set_fingerprint
from rge.stats.intervals import cluster_bootstrap, index_of, interval

METRICS = ("recall@1", "recall@5", "mrr")
NASTY = 'It ends in <emb>; <script>alert("x")</script> & more.'


# --- a small world --------------------------------------------------------------------------------------------------


def picture(color, size=(24, 24), kind="WEBP") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


def color(i: int) -> tuple[int, int, int]:
    return (37 * i % 256, 91 * i % 256, 53 * i % 256)


def write_set(
    folder: Path, num_queries: int = 40, *, question: str = "What opens this?", pictured: bool = True
) -> Path:
    """Query i asks about picture i; candidates c0.. are pictures, ci and c(i+1) are right, c(i+2) is judged wrong."""
    folder.mkdir(parents=True)
    num_candidates = num_queries + 8
    corpus = pd.DataFrame(
        {
            "id": [f"c{i}" for i in range(num_candidates)],
            "image": [picture(color(i)) for i in range(num_candidates)],
            "text": [None if i else "a <b>key</b>" for i in range(num_candidates)],
            "concept": [f"thing_{i}" for i in range(num_candidates)],
        }
    )
    if not pictured:
        corpus = corpus.assign(image=None, text=corpus["concept"])
    images = [[picture(color(100 + i))] for i in range(num_queries)]
    images[0] = []  # a text-only query
    images[1] = [picture("red"), picture("blue")]  # one with two pictures
    images[2] = [picture(color(2))]  # one whose own picture is a candidate
    queries = pd.DataFrame(
        {
            "id": [f"q{i}" for i in range(num_queries)],
            "text": [f"{question} <i>{i}</i>" for i in range(num_queries)],
            "image": images,
            "category": [("functional", "temporal")[i % 2] for i in range(num_queries)],
            "group": [f"g{i // 2}" for i in range(num_queries)],
            "pair": [("seen", "held_out")[i // 2 % 2] for i in range(num_queries)],
            "instruction": [None] * num_queries,
        }
    )
    qrels = [(f"q{i}", f"c{i + j}", 1) for i in range(num_queries) for j in (0, 1)]
    negatives = [(f"q{i}", f"c{i + 2}") for i in range(num_queries)]
    fingerprint = set_fingerprint(queries["id"], corpus["id"], qrels, negatives=negatives)
    corpus.to_parquet(folder / "corpus.parquet")
    queries.to_parquet(folder / "queries.parquet")
    pd.DataFrame(qrels, columns=["query-id", "corpus-id", "score"]).to_parquet(folder / "qrels.parquet")
    pd.DataFrame(negatives, columns=["query-id", "corpus-id"]).to_parquet(folder / "negatives.parquet")
    meta = {"name": "tiny & <set>", "fingerprint": fingerprint, "report_by": ["pair"]}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_evaluation(
    folder: Path, set_dir: Path, *, mode: str = "reasoning", modality: str = "both", hit_every: int = 2
) -> Path:
    """Query i has its first hit at rank 1 where i % hit_every == 0, else at rank 3 (i odd multiples) or 7."""
    folder.mkdir(parents=True)
    queries = pd.read_parquet(set_dir / "queries.parquet")
    corpus = list(pd.read_parquet(set_dir / "corpus.parquet")["id"])
    rows = []
    for i, query in enumerate(queries.itertuples()):
        first = 1 if i % hit_every == 0 else (3, 7)[i // hit_every % 2]
        right, negative = [f"c{i}", f"c{i + 1}"], f"c{i + 2}"
        others = [name for name in corpus if name not in (*right, negative)]
        order = [negative, *others]
        order[first - 1 : first - 1] = right[:1]
        rows.append(
            {
                evaluations.QUERY_COLUMN: query.id,
                "category": query.category,
                "group": query.group,
                "pair": query.pair,
                "num_positives": 2,
                RANK_COLUMN: first,
                "recall@1": 0.5 * (first == 1),
                "recall@5": 0.5 * (first <= 5),
                "mrr": 1 / first,
                "rationale": NASTY if mode == "reasoning" else "",
                "rationale_tokens": 12 if mode == "reasoning" else 0,
                "stop_reason": "prefilled" if mode == "direct" else "forced" if i % 5 == 4 else "emb",
                "generate_ms": 3.0,
                "embed_ms": 1.0,
                evaluations.TOP_COLUMN: order[:10],
            }
        )
    per_query = pd.DataFrame(rows)
    per_query.to_parquet(folder / "per_query.parquet")

    def figures(table):
        means = {name: float(table[name].mean()) for name in METRICS}
        return {name: {"value": v, "low": v * 0.9, "high": v * 1.1} for name, v in means.items()}

    by_category = {name: figures(table) for name, table in per_query.groupby("category")}
    meta = json.loads((set_dir / "meta.json").read_text())
    results = {
        "set": {
            "name": meta["name"],
            "path": str(set_dir),
            "fingerprint": meta["fingerprint"],
            "num_queries": len(queries),
            "num_candidates": len(corpus),
        },
        "profile": "clean",
        "query_mode": mode,
        "query_modality": modality,
        "micro": figures(per_query),
        "macro": {n: {"value": sum(c[n]["value"] for c in by_category.values()) / 2} for n in METRICS},
        "by_category": by_category,
        "by_pair": {name: figures(table) for name, table in per_query.groupby("pair")},
        "ties": {name: {"best": 0.31, "worst": 0.29} for name in METRICS},
        "rationale": {"forced_rate": 0.2, "tokens_mean": 12.0, "tokens_p95": 14.0},
        "random": {"recall@1": 1 / len(corpus), "recall@5": 5 / len(corpus), "mrr": 0.05},
        "checkpoint_hash": "c0ffee" * 6,
        "seed": 0,
        "versions": {"rge": "0.1.0", "torch": "2.9"},
        "command": "rge eval run checkpoint=out/joint",
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A set, four conditions of one checkpoint, one baseline, one training log."""
    made = tmp_path_factory.mktemp("made")
    set_dir, out = write_set(made / "set"), made / "out"
    write_evaluation(out / "reasoning-both", set_dir)
    write_evaluation(out / "direct-both", set_dir, mode="direct", hit_every=8)
    write_evaluation(out / "reasoning-text", set_dir, modality="text", hit_every=10)
    write_evaluation(out / "reasoning-image", set_dir, modality="image", hit_every=5)
    write_evaluation(made / "none" / "direct-both", set_dir, mode="direct", hit_every=3)
    log = made / "cold" / "metrics.jsonl"
    write_log(log, [{"stage": "cold", "step": s, "loss": 4 / s, "loss_lm": 4 / s} for s in range(1, 400)])
    return made


@pytest.fixture
def world(made, tmp_path):
    """A copy of it, which a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for results in tmp_path.rglob("results.json"):
        results.write_text(results.read_text().replace(str(made), str(tmp_path)))
    return tmp_path


def write_log(path: Path, entries: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write_report(dirs: list[Path], out: Path, **options) -> Path:
    return report(ReportOptions(runs=tuple(map(str, dirs)), out=out, **options))


def written(world: Path, **options) -> str:
    options = {
        "log": (str(world / "cold" / "metrics.jsonl"),),
        "examples": 24,
    } | options
    runs = [world / "out", *options.pop("baseline", [f"No <rationale>:{world / 'none'}"])]
    return write_report(runs, world / "report.html", **options).read_text(encoding="utf-8")


# --- reading a page back --------------------------------------------------------------------------------------------

VOID = {"meta", "link", "br", "img", "input", "hr"}
PHRASING = {"p", "h1", "h2", "h3", "summary", "span"}  # a browser would close these before a block
BLOCKS = {
    "p",
    "div",
    "details",
    "ul",
    "ol",
    "dl",
    "table",
    "section",
    "figure",
    "article",
    "blockquote",
    "h2",
    "h3",
}


class Page(HTMLParser):
    """Elements with their attributes and text, and a check that every element is closed."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[dict] = []
        self.stack: list[dict] = []
        self.feed(html)
        assert not self.stack, f"not closed: {self.stack[-1]}"

    def handle_starttag(self, tag, attrs, closed=False):
        node = {"tag": tag, "attrs": dict(attrs), "text": "", "up": self.stack[-1] if self.stack else None}
        outer = [up["tag"] for up in self.stack if up["tag"] in PHRASING]
        assert tag not in BLOCKS or not outer, f"<{tag}> within <{outer[-1]}>"
        self.elements.append(node)
        if tag not in VOID and not closed:
            self.stack.append(node)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs, closed=True)

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack[-1]["tag"] == tag, f"</{tag}> closes {self.stack[-1]}"
        self.stack.pop()

    def handle_data(self, data):
        for node in self.stack:
            node["text"] += data

    def all(self, tag=None, **attrs):
        def fits(node):
            classes = (node["attrs"].get("class") or "").split()
            rest = {k: v for k, v in attrs.items() if k != "cls"}
            return (
                (tag is None or node["tag"] == tag)
                and ("cls" not in attrs or attrs["cls"] in classes)
                and all(node["attrs"].get(k.replace("_", "-")) == v for k, v in rest.items())
            )

        return [node for node in self.elements if fits(node)]

    def inside(self, outer, tag=None, **attrs):
        def within(node):
            while node is not None:
                if node is outer:
                    return True
                node = node["up"]
            return False

        return [node for node in self.all(tag, **attrs) if within(node["up"])]


def shown(value: float, like: float | None = None) -> str:
    digits = 2 if 0 < abs(value if like is None else like) < 0.00995 else 1
    return f"{100 * value:.{digits}f}"


def test_every_value_of_the_tables_is_that_of_results_json(world):
    page = Page(written(world))
    results = {
        "Question only": json.loads((world / "out/reasoning-text/results.json").read_text()),
        "Image only": json.loads((world / "out/reasoning-image/results.json").read_text()),
        "Direct": json.loads((world / "out/direct-both/results.json").read_text()),
        "No <rationale>": json.loads((world / "none/direct-both/results.json").read_text()),
        "Reasoning": json.loads((world / "out/reasoning-both/results.json").read_text()),
    }
    tables = tables_of(page)
    slices = {
        "All queries": ("micro",), "Seen pairs": ("by_pair", "seen"), "Held\u2011out pairs": ("by_pair", "held_out"),
        "Functional": ("by_category", "functional"), "Temporal": ("by_category", "temporal"),
    }  # fmt: skip
    found = tables["Figures"] | tables["recall@1 by category"]
    for (row, column), text in found.items():
        if row == "Random floor":
            # recall of a shuffled ranking is k over the pool, whatever the slice
            assert text == shown(results["Reasoning"]["random"]["recall@1"])
        elif not row.startswith("Gain"):  # see test_gains_are_paired_differences
            assert text == figure_at(results[row], *slices[column], "recall@1")
    assert {(row, column) for row in (*results, "Random floor") for column in slices} <= found.keys()
    for block, heading in (("micro", "Mean over queries"), ("macro", "Mean over categories")):
        found = tables[f"All metrics: {heading}"]
        for metric in METRICS:
            for label in results:
                assert found[metric, label] == figure_at(results[label], block, metric)


def tables_of(page: Page) -> dict[str, dict[tuple[str, str], str]]:
    """Name of a table -> (heading of the row, heading of the column) -> text of the cell."""

    def words(node) -> str:
        (note, *_) = [*page.inside(node, cls="note"), *page.inside(node, cls="n"), {"text": ""}]
        return " ".join(node["text"].removesuffix(note["text"]).split())

    tables = {}
    for table in page.all("table"):
        heads = list(map(words, page.inside(table, "th", scope="col")))[1:]
        cells = tables.setdefault(table["up"]["attrs"]["aria-label"], {})
        for row in page.inside(table, "tr"):
            texts = [" ".join(cell["text"].split()) for cell in page.inside(row, "td")]
            for name in map(words, page.inside(row, "th", scope="row")):
                cells |= {(name, head): text for head, text in zip(heads, texts, strict=True)}
    return tables


def figure_at(results: dict, *path: str) -> str:
    for key in path:
        results = results[key]
    text = shown(results["value"])
    if "low" in results:
        text += f" {shown(results['low'], results['value'])}–{shown(results['high'], results['value'])}"
    return text


def test_rows_stand_in_the_order_of_what_the_model_is_given(world):
    page = Page(written(world))
    main = page.all("table", cls="main-table")[0]
    rows = [node["text"] for node in page.inside(main, "th", scope="row")]
    starts = ("Random floor", "Question only", "Image only", "Direct", "No <rationale>", "Reasoning")
    starts += ("Gain over Direct", "Gain over No <rationale>")
    assert [row[: len(start)] for row, start in zip(rows, starts, strict=True)] == list(starts)
    heads = [" ".join(node["text"].split()) for node in page.inside(main, "th", scope="col")]
    assert heads[1:] == ["All queries n = 40", "Seen pairs n = 20", "Held\u2011out pairs n = 20"]


def test_gains_are_paired_differences(world):
    cells = tables_of(Page(written(world)))["Figures"]
    ours, theirs = (
        pd.read_parquet(world / name / "per_query.parquet").set_index(evaluations.QUERY_COLUMN)
        for name in ("out/reasoning-both", "none/direct-both")
    )
    seen = ours["pair"] == "seen"
    slices = {"All queries": seen | True, "Seen pairs": seen, "Held\u2011out pairs": ~seen}
    for column, rows in slices.items():
        difference = (ours["recall@1"] - theirs["recall@1"])[rows]
        low, high = interval(cluster_bootstrap(difference.to_numpy()[:, None], index_of(ours["group"][rows])))
        text = f"{100 * difference.mean():+.1f} {100 * low[0]:.1f} to {100 * high[0]:.1f}".replace(
            "-", "\u2212"
        )
        assert cells["Gain over No <rationale>", column] == text
    assert {row for row, _ in cells if row.startswith("Gain")} == {
        "Gain over Direct",
        "Gain over No <rationale>",
    }


def test_shortcuts_without_rationale_are_left_to_the_details(world):
    write_evaluation(world / "out/direct-text", world / "set", mode="direct", modality="text", hit_every=20)
    page = Page(written(world))
    assert "Question only, direct" not in page.all("table", cls="main-table")[0]["text"]
    assert "Question only, direct" in page.all("section", id="details")[0]["text"]


def test_opening_sentence_and_ceiling(world):
    page = Page(written(world))
    verdict = " ".join(page.all(cls="verdict")[0]["text"].split())
    assert verdict == (
        "recall@1: 25.0 % with its own rationale, 6.2 % by the same checkpoint without it, "
        "17.5 % for “No <rationale>”, 2.1 % by chance."
    )
    assert (
        "a perfect ranking reaches 50.0" in page.all("figcaption")[0]["text"]
    )  # two right answers, one place


@pytest.mark.slow
def test_examples_show_what_was_ranked_and_mark_what_is_right(world):
    page = Page(written(world))
    cards = page.all("article", cls="card")
    assert len(cards) == 24
    qrels = pd.read_parquet(world / "set/qrels.parquet")
    negatives = pd.read_parquet(world / "set/negatives.parquet")
    right = set(zip(qrels["query-id"], qrels["corpus-id"], strict=True))
    wrong = set(zip(negatives["query-id"], negatives["corpus-id"], strict=True))
    per_query = pd.read_parquet(world / "out/reasoning-both/per_query.parquet").set_index(
        evaluations.QUERY_COLUMN
    )
    seen = set()
    for card in cards:
        query_id = card["attrs"]["data-query"]
        seen.add(query_id)
        ranked = page.inside(card, "li")
        assert [node["attrs"]["data-id"] for node in ranked] == per_query.at[
            query_id, evaluations.TOP_COLUMN
        ][:5].tolist()
        for node in ranked:
            pair = (query_id, node["attrs"]["data-id"])
            classes = node["attrs"]["class"].split()
            assert ("hit" in classes) == ("✓ hit" in node["text"]) == (pair in right)
            assert ("negative" in classes) == ("✗ negative" in node["text"]) == (pair in wrong)
        rank = per_query.at[query_id, RANK_COLUMN]
        assert f"answer at rank {rank}" in page.inside(card, cls="outcome")[0]["text"]
        assert bool(page.inside(card, cls="wanted")) == (rank > 5)
        forced = page.inside(card, cls="forced")
        assert bool(forced) == (per_query.at[query_id, "stop_reason"] == "forced")
        assert not forced or "after 12 tokens" in forced[0]["text"]
        assert NASTY in " ".join(page.inside(card, cls="says")[0]["text"].split())
    assert len(seen) == 24
    ranks = dict(re.findall(r"([A-Z<][\w <>]+?)(\d+)", page.inside(cards[0], "dl")[0]["text"]))
    first = cards[0]["attrs"]["data-query"]
    assert ranks["Reasoning"] == str(per_query.at[first, RANK_COLUMN])
    direct = pd.read_parquet(world / "out/direct-both/per_query.parquet").set_index(evaluations.QUERY_COLUMN)
    assert ranks["Direct"] == str(direct.at[first, RANK_COLUMN])


@pytest.mark.slow
def test_says_in_which_proportion_examples_were_chosen(world):
    page = Page(written(world))
    text = " ".join(page.all("section", id="examples")[0]["text"].split())
    assert "Of all 40 queries, 20 have a right candidate at rank 1, 10 at rank 2 to 5, and 10 below." in text
    assert (
        "The 24 on this page do not have these proportions: 12 are successes (rank 1) and 12 are failures"
        in text
    )
    assert "alternates between values of category and pair" in text
    assert [node["attrs"]["data-outcome"] for node in page.all("article")].count("first") == 12
    text = " ".join(Page(written(world, examples=40)).all("section", id="examples")[0]["text"].split())
    assert "All are on this page: 20 are successes (rank 1) and 20 are failures." in text


@pytest.mark.slow
def test_queries_without_and_with_several_pictures(world):
    page = Page(written(world, examples=40))
    cards = {card["attrs"]["data-query"]: card for card in page.all("article")}
    assert len(page.inside(cards["q0"], cls="query-pics")) == 0
    assert len(page.inside(page.inside(cards["q1"], cls="query-pics")[0], "use")) == 2
    assert len(page.inside(page.inside(cards["q3"], cls="query-pics")[0], "use")) == 1
    assert "the query itself" in cards["q2"]["text"]
    assert "the query itself" not in cards["q3"]["text"]
    labels = [node["attrs"].get("aria-label") for node in page.all("svg", role="img")]
    assert all(labels)
    assert "rank 1: a <b>key</b>" in labels  # a candidate's text is its alternative text, else its name
    assert "rank 1: thing 4" in labels


@pytest.mark.slow
def test_each_picture_is_in_the_file_once_and_every_reference_resolves(world):
    html = written(world)
    page = Page(html)
    data = [node["attrs"]["href"] for node in page.all("image")]
    assert len(data) == len(set(data)) > 24
    symbols = {node["attrs"]["id"] for node in page.all("symbol")}
    uses = [node["attrs"]["href"] for node in page.all("use")]
    assert {use.removeprefix("#") for use in uses} == symbols
    ids = [node["attrs"]["id"] for node in page.elements if "id" in node["attrs"]]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_one_file_without_network_or_local_paths(world):
    html = written(world)
    page = Page(html)
    for node in page.elements:
        for name, value in node["attrs"].items():
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                assert value.startswith(("#", "data:")), (node["tag"], name, value)
            if name == "style":
                assert "url(" not in value
    assert "url(" not in page.all("style")[0]["text"]
    assert "@import" not in page.all("style")[0]["text"]
    assert str(world) not in html
    policy = page.all("meta", http_equiv="Content-Security-Policy")[0]["attrs"]["content"]
    assert policy.startswith("default-src 'none'; img-src data:;")


@pytest.mark.slow
def test_what_the_model_wrote_is_text_not_markup(world):
    html = written(world)
    page = Page(html)
    assert "<script>alert" not in html
    assert len(page.all("script")) == 1
    assert not page.all("emb")
    assert not page.all("i", id=None) or all(
        n["attrs"].get("class") in ("span", "dot") for n in page.all("i")
    )
    assert page.all("title")[0]["text"] == "Retrieval on tiny & <set>"


@pytest.mark.slow
def test_same_input_same_bytes_and_no_leftovers(world):
    first = written(world)
    assert written(world) == first
    assert not list(world.glob(".*.tmp")) + list(world.glob("*.tmp"))


def test_a_failure_leaves_the_old_page(world):
    written(world)
    before = (world / "report.html").read_bytes()
    with pytest.raises(UserError):
        written(world, metric="recall@3")
    assert (world / "report.html").read_bytes() == before


def test_direct_only_report_has_no_rationales(world):
    out = write_report([world / "out/direct-both"], world / "direct.html", examples=4)
    page = Page(out.read_text())
    assert len(page.all("article")) == 4
    assert not page.all("blockquote")
    assert not page.all(cls="ranks")  # nothing to compare with
    assert "without a rationale" in page.all(cls="verdict")[0]["text"]


def test_a_set_without_pairs_has_its_categories_in_the_main_table(world):
    for folder in (world / "out").iterdir():
        results = json.loads((folder / "results.json").read_text())
        del results["by_pair"]
        (folder / "results.json").write_text(json.dumps(results))
    page = Page(write_report([world / "out"], world / "r.html").read_text())
    main = page.all("table", cls="main-table")
    heads = [" ".join(node["text"].split()) for node in page.inside(main[0], "th", scope="col")]
    assert heads[1:] == ["All queries n = 40", "Functional n = 20", "Temporal n = 20"]
    assert len(main) == 1


@pytest.mark.slow
def test_many_categories_have_a_table_with_a_row_each(world):
    for folder in [*(world / "out").iterdir(), world / "none/direct-both"]:
        results = json.loads((folder / "results.json").read_text())
        results["by_task"] = {f"task {i}": results["micro"] for i in range(9)}
        (folder / "results.json").write_text(json.dumps(results))
    page = Page(written(world))
    cells = tables_of(page)["recall@1 by task"]
    assert len([column for _, column in cells if column != "n"]) == 9 * 6  # five evaluations and chance
    rows = [n["text"] for n in page.all("th", scope="row")]
    assert {"Task 0", "Task 8"} <= set(rows)


def test_long_texts_fold_without_losing_a_character(tmp_path):
    question = " ".join(f"word{i}" for i in range(200))
    set_dir = write_set(tmp_path / "set", 4, question=question)
    out = write_evaluation(tmp_path / "out", set_dir)
    page = Page(write_report([out], tmp_path / "r.html").read_text())
    card = page.all("article")[0]
    heading, folded = page.inside(card, "h3")[0]["text"], page.inside(card, "details")[0]["text"]
    i = card["attrs"]["data-query"][1:]
    assert heading.removesuffix("…") + folded.removeprefix("more…") == f"{question} <i>{i}</i>"
    assert len(heading) <= LONG_QUESTION + 1


def test_text_candidates_are_read_not_looked_at(tmp_path):
    set_dir = write_set(tmp_path / "set", 4, pictured=False)
    out = write_evaluation(tmp_path / "out", set_dir)
    page = Page(write_report([out], tmp_path / "r.html").read_text())
    card = page.all("article", data_query="q2")[0]
    assert "texts" in page.inside(card, "ol")[0]["attrs"]["class"]
    words = [" ".join(node["text"].split()) for node in page.inside(card, "li")]
    assert words[:2] == ["thing_2 1 ✓ hit", "thing_4 2 ✗ negative"]


def test_large_pictures_are_scaled_down_and_small_ones_kept(tmp_path):
    gallery = examples.Gallery()
    small = picture("red")
    noise = Image.effect_noise((900, 600), 80).convert("RGB")
    buffer = io.BytesIO()
    noise.save(buffer, "PNG")
    assert gallery.add(small) is gallery.add(small)
    assert gallery.add(buffer.getvalue()).name == "p1"
    kept, scaled = gallery.pictures
    assert base64.b64decode(kept.data.split(",")[1]) == small
    image = Image.open(io.BytesIO(base64.b64decode(scaled.data.split(",")[1])))
    assert (image.format, image.size) == ("WEBP", (360, 240))
    assert (scaled.width, scaled.height) == (360, 240)
    rotated = Image.new("RGB", (30, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    buffer = io.BytesIO()
    rotated.save(buffer, "JPEG", exif=exif)
    gallery.add(buffer.getvalue())
    assert (gallery.pictures[2].width, gallery.pictures[2].height) == (10, 30)


@pytest.mark.slow
def test_what_a_slice_means_is_said_by_the_set_and_by_nobody_else(world):
    assert "never" not in Page(written(world)).all("figcaption")[0]["text"]
    meta = json.loads((world / "set/meta.json").read_text())
    meta["slice_notes"] = {"pair": {"held_out": "trained in <words> only", "seen": "trained"}, "category": {}}
    (world / "set/meta.json").write_text(json.dumps(meta))
    caption = " ".join(Page(written(world)).all("figcaption")[0]["text"].split())
    assert "Seen pairs: trained. Held\u2011out pairs: trained in <words> only." in caption
    meta["slice_notes"] = {"pair": "trained"}
    (world / "set/meta.json").write_text(json.dumps(meta))
    with error_about(UserError, "slice_notes.pair"):
        written(world)


def opening(html: str) -> list[str]:
    hero = Page(html)
    return [
        card["attrs"]["data-query"] for card in hero.inside(hero.all("section", id="figures")[0], "article")
    ]


@pytest.mark.slow
def test_the_page_opens_with_reasons_that_the_set_gives(world):
    """Successes: the reason of that query; failures: of any query, since a wrong one shows what was mistaken."""
    path = world / "out/reasoning-both/per_query.parquet"
    frame = pd.read_parquet(path).set_index(evaluations.QUERY_COLUMN)
    first_found, first_missed = opening(written(world))
    drawn = [card["attrs"]["data-query"] for card in Page(written(world)).all("article")]
    found = [name for name in drawn if frame.at[name, RANK_COLUMN] == 1]
    missed = [name for name in drawn if frame.at[name, RANK_COLUMN] > 1]
    assert (first_found, first_missed) == (
        found[0],
        missed[0],
    )  # a set without reasons: the first of the draw

    frame.at[found[0], "rationale"] = "a reason of another query"
    frame.at[found[3], "rationale"] = "a reason of this query"
    frame.at[missed[5], "rationale"] = "a reason of another query"
    frame.reset_index().to_parquet(path)
    given = [(found[3], "c1", "a reason of this query"), ("q7", "c7", "a reason of another query")]
    given = [row for row in given if row[0] not in (found[0], missed[5])]
    pd.DataFrame(given, columns=["query-id", "corpus-id", "rationale"]).to_parquet(
        world / "set/rationales.parquet"
    )
    html = written(world)
    assert opening(html) == [found[3], missed[5]]
    assert "whose rationale the set also contains" in html


def test_results_of_two_protocols_do_not_share_a_page(world):
    edit(world / "out/direct-both", lambda r: r.update(benchmark="rmir", profile="official"))
    with error_about(UserError, "benchmark"):
        written(world, baseline=())
    for folder in (world / "out").iterdir():
        edit(folder, lambda r: r.update(benchmark="rmir", profile="clean"))
    edit(world / "out/direct-both", lambda r: r.update(profile="official"))
    with error_about(UserError, "profile"):
        written(world, baseline=())


@pytest.mark.slow
def test_warnings_of_results_stand_before_the_figures(world):
    def warn(results):
        results["warnings"] = ["TRAINED ON THE TEST: 3 of 40 <pictures>"]
        results["identity"] = {"machine": {}}

    for folder in [*(world / "out").iterdir(), world / "none/direct-both"]:
        edit(folder, warn)
    edit(world / "out/direct-both", lambda r: r.update(coverage=0.975))
    edit(world / "out/direct-both", lambda r: r["set"].update(limit=40))
    page = Page(written(world))
    said = [node["text"] for node in page.all("p", cls="warn")]
    assert said == [
        "Warning: TRAINED ON THE TEST: 3 of 40 <pictures>",
        "Warning: Direct: the ranking covers 97.5 % of the queries",
        "Warning: Direct: only the first 40 queries were evaluated",
    ]
    places = [page.elements.index(node) for node in page.all("p", cls="warn")]
    assert max(places) < page.elements.index(page.all("table")[0])


@pytest.mark.slow
def test_a_ranking_made_elsewhere_has_no_empty_columns_of_cost(world):
    folder = world / "out/direct-both"
    frame = pd.read_parquet(folder / "per_query.parquet")
    frame = frame.assign(rationale=None, rationale_tokens=None, generate_ms=None, embed_ms=None)
    frame.to_parquet(folder / "per_query.parquet")

    def foreign(results):
        results.update(query_mode=None, query_modality=None, rationale={}, tag="theirs")

    edit(folder, foreign)
    page = Page(write_report([folder], world / "r.html").read_text())
    heads = {node["text"] for node in page.all("th", scope="col")}
    assert "Ties, worst–best" in heads
    assert not heads & {"Forced stops", "Tokens, mean / p95", "Generate, ms per query", "Embed, ms per query"}
    edit(folder, lambda r: r.pop("ties"))
    assert "Cost and ties" not in write_report([folder], world / "r.html").read_text()
    both = Page(written(world))
    assert "Forced stops" in {node["text"] for node in both.all("th", scope="col")}


# --- which examples -------------------------------------------------------------------------------------------------


def table(ranks, categories=None, groups=None) -> pd.DataFrame:
    names = [f"q{i}" for i in range(len(ranks))]
    columns = {
        RANK_COLUMN: ranks,
        "category": categories or ["a"] * len(ranks),
        "group": groups or names,
    }
    return pd.DataFrame(columns, index=names)


def test_half_found_half_missed_in_turn_over_strata():
    per_query = table([1, 9] * 50, ["a", "a", "b", "b", "c", "c", "c", "c", "c", "c"] * 10)
    chosen = choose_examples(per_query, success_rank=1, num=24, strata=["category"])
    assert len(set(chosen)) == 24
    ranks = per_query.loc[chosen, RANK_COLUMN].tolist()
    assert ranks == [1, 9] * 12
    counts = per_query.loc[chosen].groupby([RANK_COLUMN, "category"]).size()
    assert set(counts) == {4}


def test_draw_ignores_the_order_of_rows():
    per_query = table([1, 9, 3, 0] * 25)
    chosen = choose_examples(per_query, success_rank=1, num=10)
    assert choose_examples(per_query.iloc[::-1], success_rank=1, num=10) == chosen


@pytest.mark.parametrize(
    ("ranks", "num", "found"), [([1] * 3 + [9] * 20, 10, 3), ([1] * 20 + [9] * 2, 10, 8)]
)
def test_the_other_half_fills_up(ranks, num, found):
    per_query = table(ranks)
    chosen = choose_examples(per_query, success_rank=1, num=num)
    assert len(chosen) == num
    assert per_query.loc[chosen, RANK_COLUMN].eq(1).sum() == found


def test_few_queries_are_all_shown_and_rank_zero_is_a_miss():
    per_query = table([0, 0, 1])
    assert sorted(choose_examples(per_query, success_rank=5, num=48)) == ["q0", "q1", "q2"]
    assert choose_examples(per_query, success_rank=5, num=1) == ["q2"]


def test_new_pictures_go_first():
    per_query = table([1] * 6, groups=["g0", "g0", "g0", "g1", "g1", "g2"])
    chosen = choose_examples(per_query, success_rank=1, num=3)
    assert set(per_query.loc[chosen, "group"]) == {"g0", "g1", "g2"}


# --- training curves ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_are_drawn_with_axes_stages_and_a_spoken_summary(world):
    joint = write_log(
        world / "joint" / "metrics.jsonl",
        [
            {"stage": "joint", "step": s, "loss": 2.0, "loss_contrastive": 3.0, "forced_rate": 0.25}
            for s in (1, 5, 9)
        ],
    )
    page = Page(written(world, log=(str(world / "cold/metrics.jsonl"), str(joint))))
    drawn = page.all("svg", cls="chart")
    names = [node["attrs"]["aria-label"].split(".")[0] for node in drawn]
    assert names == ["Loss", "Rationale loss (nats per token)", "Contrastive loss (nats)", "Forced stops"]
    assert "25% at step 408" in drawn[3]["attrs"]["aria-label"]  # 399 cold steps, then 9
    texts = [node["text"] for node in page.inside(drawn[0], "text")]
    assert {"step", "cold", "joint", "0.0", "400"} <= set(texts)
    assert "ends at 2" in page.all(cls="reading")[0]["text"]


def test_stages_stand_end_to_end_and_another_run_is_refused(tmp_path):
    cold = write_log(
        tmp_path / "cold/metrics.jsonl", [{"stage": "cold", "step": s, "loss": 1.0} for s in (1, 2)]
    )
    ours = write_log(
        tmp_path / "self/metrics.jsonl", [{"stage": "joint", "step": s, "loss": 2.0} for s in (1, 2)]
    )
    other = write_log(tmp_path / "none/metrics.jsonl", [{"stage": "joint", "step": 1, "loss": 3.0}])
    ours.write_text(ours.read_text() + '{"step": 3, "lo')  # a job is writing
    run = read_training_logs([cold, ours])
    assert run["step"].tolist() == [1, 2, 3, 4]
    assert run["stage"].tolist() == ["cold", "cold", "joint", "joint"]
    assert run["loss"].tolist() == [1.0, 1.0, 2.0, 2.0]
    with error_about(UserError, "none/metrics.jsonl"):
        read_training_logs([ours, other])


@pytest.mark.parametrize("content", ['{"loss": 1}\n', "\n", None])
def test_a_log_without_steps_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "m.jsonl").write_text(content)
    with error_about(UserError, "m.jsonl"):
        read_training_logs([tmp_path / "m.jsonl"])


def test_curves_without_values_are_left_out_and_others_must_be_finite(tmp_path):
    lines = [{"stage": "a", "step": step, "loss": 2.0, "hit_at_1": None} for step in (1, 2)]
    log = write_log(tmp_path / "m.jsonl", lines)
    assert [chart["name"] for chart in curves_of([log])] == ["Loss"]
    write_log(log, [*lines, {"stage": "a", "step": 3, "loss": float("nan")}])
    with error_about(UserError, "m.jsonl", "step 3"):
        curves_of([log])
    log.write_bytes(b"\xff\xfe")
    with error_about(UserError, "m.jsonl"):
        curves_of([log])


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ('{"stage": "a", "step": 2, "loss": "x"}', ("step 2", "loss")),
        ('{"stage": "a", "step": 2, "loss_lm": [1]}', ("step 2", "loss_lm")),
        ('{"stage": "a", "step": "two", "loss": 1}', ("step two", "step")),
        ("[1]", ("JSON",)),
    ],
)
def test_a_log_with_other_values_than_numbers_is_named(tmp_path, line, fields):
    (tmp_path / "m.jsonl").write_text('{"stage": "a", "step": 1, "loss": 1}\n' + line + "\n")
    with error_about(UserError, "m.jsonl", *fields):
        curves_of([tmp_path / "m.jsonl"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1000, "1,000"), (0.25, "0.25"), (12.345, "12.3"), (0.00012, "0.00012"), (-2.5, "-2.5")],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


def test_long_logs_are_thinned_to_means_of_equal_ranges():
    points = pd.DataFrame({"step": range(1000), "value": range(1000), "stage": "a"})
    long = charts.thinned(points)
    assert len(long) == charts.MAX_POINTS
    assert long["value"].mean() == pytest.approx(499.5, abs=0.5)
    assert charts.thinned(points[:9]).equals(points[:9])


# --- bad input ------------------------------------------------------------------------------------------------------


def edit(folder: Path, change) -> None:
    results = json.loads((folder / "results.json").read_text())
    change(results)
    (folder / "results.json").write_text(json.dumps(results))


def test_an_incomplete_evaluation_is_named(world):
    (world / "out/direct-both/results.json").unlink()
    with error_about(UserError, "results.json"):
        written(world)


def test_nothing_to_report_on(world):
    with error_about(UserError, world / "gone"):
        write_report([world / "gone"], world / "r.html")
    with error_about(UserError, "results.json"):
        write_report([world / "set"], world / "r.html")
    with error_about(UserError, "runs"):
        write_report([], world / "r.html")


def test_a_set_whose_place_is_not_recorded_is_asked_for(world, monkeypatch):
    """It was looked for in the working directory."""
    monkeypatch.chdir(world / "set")
    for folder in (world / "out").iterdir():
        edit(folder, lambda r: r["set"].pop("path"))
    with error_about(UserError, "set"):
        written(world)


def test_a_budget_is_reported_where_an_evaluation_was_written_too(world):
    """Its page silently became that of the other evaluation, such as one of bm25."""
    write_evaluation(world / "both", world / "set")
    (world / "both/budget.json").write_text("{}")
    with error_about(UserError, "both/direct/results.json"):  # what a budget's page is made of
        write_report([world / "both"], world / "r.html")


def test_evaluations_of_different_sets_are_refused(world):
    edit(world / "out/direct-both", lambda r: r["set"].update(fingerprint="f" * 64))
    with error_about(UserError, "set.fingerprint"):
        written(world)


def test_evaluations_of_different_queries_are_refused(world):
    path = world / "out/direct-both/per_query.parquet"
    pd.read_parquet(path).iloc[1:].to_parquet(path)
    with error_about(UserError, "q0"):
        written(world)


def test_a_set_that_changed_since_is_refused(world):
    for folder in [*(world / "out").iterdir(), world / "none/direct-both"]:
        edit(folder, lambda r: r["set"].update(fingerprint="f" * 64))
    with error_about(UserError, "set", "set.fingerprint"):
        written(world)


def test_a_moved_set_is_found_where_it_is_said_to_be(world):
    (world / "set").rename(world / "elsewhere")
    with error_about(UserError, "set"):
        written(world)
    assert "<article" in written(world, set=world / "elsewhere")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("micro", "mrr", "low"), float("nan"), "damaged"),
        (("by_pair", "seen", "recall@1", "value"), float("inf"), "damaged"),
        (("ties", "recall@1", "best"), "0.3", "ties.recall@1.best"),
        (("micro", "recall@1"), {}, "micro.recall@1"),
        (("set", "fingerprint"), None, "set.fingerprint"),
    ],
)
def test_figures_that_are_no_numbers_are_named(world, path, value, field):
    def change(results):
        for key in path[:-1]:
            results = results[key]
        results[path[-1]] = value

    edit(world / "out/reasoning-both", change)
    with error_about(UserError, "results.json", field):
        written(world)


def test_a_ranking_without_chance_has_no_floor(world):
    edit(world / "out/reasoning-both", lambda results: results["random"].pop("recall@1"))
    assert "Random floor" not in Page(written(world)).all("table", cls="main-table")[0]["text"]


def test_a_query_mode_of_another_version_is_labelled_by_its_name(world):
    edit(world / "out/direct-both", lambda results: results.update(query_mode="telepathic"))
    assert "telepathic · both" in Page(written(world)).all("table", cls="main-table")[0]["text"]


def test_a_missing_picture_is_named(world):
    path = world / "set/queries.parquet"
    queries = pd.read_parquet(path)
    queries["image"] = [["images/gone.jpg"]] * len(queries)
    queries.to_parquet(path)
    with error_about(UserError, "gone.jpg"):
        written(world)


def test_unknown_metric_names_those_there_are(world):
    with error_about(UserError, "metric"):
        written(world, metric="recall@3")


def test_a_baseline_is_one_evaluation(world):
    with error_about(UserError, world / "out", "several"):
        written(world, baseline=(f"other:{world / 'out'}",))
    with error_about(UserError, "Direct"):
        written(world, baseline=(f"Direct:{world / 'none'}",))
    with error_about(UserError, "mine"):
        written(world, baseline=(f"mine:{world / 'none'}", f"mine:{world / 'out' / 'direct-both'}"))


def test_two_checkpoints_among_the_runs_are_told_apart(world):
    out = write_report([world / "out/direct-both", world / "none/direct-both"], world / "r.html")
    rows = [n["text"] for n in Page(out.read_text()).all("th", scope="row")]
    assert any(row.startswith("Direct · out/direct-both") for row in rows)
    assert any(row.startswith("Direct · none/direct-both") for row in rows)
    edit(world / "none/direct-both", lambda results: results.update(checkpoint_hash="bad"))
    runs = [world / "out/reasoning-both", world / "none/direct-both"]
    page = write_report(runs, world / "r.html", examples=2).read_text(encoding="utf-8")
    assert "other checkpoint, direct" in page
    assert "same checkpoint" not in page
    assert "Gain over Direct" in page


def test_a_row_says_what_sets_its_ranking_apart(world):
    def note_with(**more):
        path = world / "out/reasoning-both"
        edit(path, lambda results: results.update(more))
        return evaluations.read_evaluation(path).note

    assert note_with() == "writes a rationale first"
    assert note_with(embedding_dims=16) == "writes a rationale first, embedding_dims=16"
    assert note_with(budget={"name": "gate-50"}) == "point gate-50 of a budget, embedding_dims=16"
    judged = "point gate-50 of a budget, embedding_dims=16, top 5 reordered by a judge"
    assert note_with(rerank={"of": "eval", "top_n": 5}) == judged
    assert note_with(budget=None, embedding_dims=None) == "top 5 reordered by a judge"


def test_a_reranked_evaluation_is_not_the_embedder_s_own(world):
    edit(
        world / "out/direct-both",
        lambda results: results.update(query_mode="reasoning", rerank={"of": "eval", "top_n": 20}),
    )
    runs = [world / "out/direct-both", world / "out/reasoning-both"]
    page = Page(write_report(runs, world / "r.html", examples=2).read_text(encoding="utf-8"))
    rows = [" ".join(node["text"].split()) for node in page.all("th", scope="row")]
    assert any(row.startswith("Reasoning, reranked top 20 reordered by a judge") for row in rows)
    assert "Reasoning writes a rationale first" in rows
    own = json.loads((world / "out/reasoning-both/results.json").read_text())["micro"]["recall@1"]["value"]
    assert f"{shown(own)}" in page.all("p", cls="verdict")[0]["text"]


# --- command --------------------------------------------------------------------------------------------------------


def test_command(world):
    words = [
        f"runs={world / 'out/reasoning-both'},{world / 'out/direct-both'},none:{world / 'none'}",
        f"out={world / 'sub/page.html'}",
        f"log={world / 'cold/metrics.jsonl'}",
        "examples=6",
    ]
    assert report(parse_options(ReportOptions, words)) == world / "sub/page.html"
    page = Page((world / "sub/page.html").read_text())
    assert len(page.all("article")) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=x"], ("missing", "runs")),
        (["runs=a", "out=x", "logs=y"], ("unknown", "logs", ("log",))),
        (["runs=a", "out=x", "baseline=none:b"], ("unknown", "baseline")),
        (["runs=a", "out=x", "examples=many"], ("type", "examples")),
    ],
)
def test_command_names_what_is_wrong(words, message):
    with error_about(ValueError, message):
        report(parse_options(ReportOptions, words))


# --- looks ----------------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme):
    css = (Path(charts.__file__).parent / "templates/report.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in css.split("@media", 1))
    colors = light if scheme == "light" else light | dark
    pairs = [
        (ink, ground) for ink in ("ink", "muted", "accent", "good", "bad") for ground in ("bg", "surface")
    ]
    pairs += [("accent", "accent-soft"), ("muted", "accent-soft"), ("warn", "warn-soft"), ("ink", "sunken")]
    pairs += [("surface", "good"), ("surface", "bad"), ("surface", "warn"), ("muted", "sunken")]
    for ink, ground in pairs:
        light_, dark_ = sorted((luminance(colors[ink]), luminance(colors[ground])), reverse=True)
        assert (light_ + 0.05) / (dark_ + 0.05) >= 4.5, (ink, ground)


@pytest.mark.slow
def test_in_a_browser(world, tmp_path):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on the path")
    page = world / "report.html"
    written(world, examples=40)
    browser = Chromium(program, tmp_path / "profile")
    try:
        grounds = []
        for width, height, dark in (
            (390, 844, False),
            (390, 844, True),
            (320, 568, False),
            (1280, 900, True),
        ):
            browser.open(page, width, height, dark=dark)
            assert browser.js("document.documentElement.scrollWidth") <= width
            wide = (
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .skip, .defs, pre') && "
                "e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).length"
            )
            assert browser.js(wide) == 0
            grounds.append(browser.js("getComputedStyle(document.body).backgroundColor"))
            assert browser.complaints() == []
            assert {url.split(":")[0] for url in browser.requests()} <= {"file", "data"}
            cut = "[...document.querySelectorAll('.stack')].map(t => t.closest('.scroll')).filter(s => s.scrollWidth > s.clientWidth).length"
            assert browser.js(cut) == 0
            if width >= 390:  # text of charts as it appears
                smallest = (
                    "Math.min(...[...document.querySelectorAll('.chart text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
                    " * t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width))"
                )
                assert browser.js(smallest) >= 10.5
                assert browser.js("document.querySelectorAll('.chart text').length") > 10
            assert sum(url.startswith("file:") for url in browser.requests()) == 1
        assert grounds[0] == grounds[2] != grounds[1] == grounds[3]

        visible = "[...document.querySelectorAll('.cards .card')].filter(c => c.checkVisibility())"
        assert browser.js(f"{visible}.length") == 12
        browser.js("document.querySelector('.more').click()")
        assert browser.js(f"{visible}.length") == 24
        below = browser.js("document.querySelectorAll('.cards .card[data-outcome=below]').length")
        assert below in (9, 10)  # one may stand at the top
        choose = "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change', {{bubbles: true}})) }})"
        browser.js(choose.format("below") + "(document.querySelector('select[name=outcome]'))")
        assert browser.js(f"{visible}.length") == below
        assert browser.js(f"{visible}.every(c => c.dataset.outcome === 'below')")
        browser.js(choose.format("held_out") + "(document.querySelector('select[name=f1]'))")
        assert browser.js(f"{visible}.map(c => c.querySelector('.tags').textContent.trim()).join()").count(
            "held-out"
        ) == (browser.js(f"{visible}.length"))
        assert browser.js("document.querySelector('.more').hidden")
        assert browser.complaints() == []

        browser.open(page, 390, 844, script=False)
        browser.call(
            "Emulation.setScriptExecutionDisabled", value=False
        )  # to look, not to run the page's script
        assert browser.js(f"{visible}.length") == 38  # and the two at the top
        assert browser.js("document.querySelector('.filters').checkVisibility()") is False
    finally:
        browser.close()
