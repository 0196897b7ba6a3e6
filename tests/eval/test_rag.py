"""Answers with retrieved documents and their marks: rows, judges, what is kept, and servers that answer badly."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from eval_fakes import tables, write_tables
from forked import Program

from eval.benchmarks.suite import write_suite
from eval.commands.compare import CompareOptions, compare
from eval.commands.rag import RagOptions, rag
from eval.commands.score import ScoreOptions, score
from eval.judging.answers import answer_parts, mark_of
from eval.judging.writers import Asked, LocalWriter
from eval.pages.boards.answers import known_as
from eval.scoring.agreement import agreement
from eval.sets.retrieval_set import load_set, reference_answers
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.replies import BadValue, Reply, Truncated
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.schema import Item

NUM = 12


def content():
    """Documents of words; the reference answer of a query is the word of one of its right documents."""
    found = tables(num_queries=NUM, num_candidates=30)
    found["corpus"]["image"] = [None] * 30
    found["corpus"]["text"] = [f"wörd{name}" for name in found["corpus"]["id"]]
    pairs = zip(found["qrels"]["query-id"], found["qrels"]["corpus-id"], strict=True)
    first = dict(sorted(pairs, reverse=True))  # the smallest id of each query
    found["answers"] = {"query-id": list(first), "answer": [f"wörd{name}" for name in first.values()]}
    return found


@pytest.fixture
def data(tmp_path):
    return write_tables(tmp_path / "a set", content())


def ranked(data, out, places=(0, 3)):
    """An evaluation whose first right document stands at one of these places, in turn."""
    wanted = load_set(data)
    lines = []
    for query, name in enumerate(wanted.query_ids):
        right = wanted.positives[query][0].tolist()
        rows = [row for row in range(30) if row not in right]
        rows.insert(places[query % len(places)], int(right[0]))
        lines += [f"{name} Q0 {wanted.corpus_ids[row]} {n} {100 - n} x" for n, row in enumerate(rows, 1)]
    (data.parent / f"{out.name}.trec").write_text("\n".join(lines) + "\n", encoding="utf-8")
    score(ScoreOptions(run=data.parent / f"{out.name}.trec", set=data, out=out))
    return out


def shown(body):
    """All texts of a request's last message."""
    said = body["messages"][-1]["content"]
    return said if isinstance(said, str) else "\n".join(part.get("text", "") for part in said)


class Models:
    """Answers with the documents it saw; judges mark 90 where the reference is in the answer, else 20, the second 10 less."""

    def __init__(self):
        self.asked = Counter()
        self.texts = []

    async def __call__(self, path, body):
        text = shown(body)
        self.asked[body["model"], json.dumps(body["messages"])] += 1
        self.texts.append((body["model"], text))
        if body["model"] == "writer":
            return chat("I read: " + " ".join(re.findall(r"Document \d+:\n(\S+)", text)), model="writer")
        answer = text.split("STUDENT ANSWER START ---\n")[1].split("\n--- STUDENT ANSWER END")[0]
        reference = text.split("REFERENCE ANSWER START ---\n")[1].split("\n--- REFERENCE ANSWER END")[0]
        mark = (90 if reference in answer else 20) - 10 * (body["model"] == "second")
        return chat(f"REASON:\nIt is so.\n**SCORE:** {mark}")


def options(data, out, server, **change):
    def model(name):
        return ModelConfig(name=name, base_url=server.url, backoff_s=0.01, max_retries=1, reasks=1)

    judges = change.pop("judges", ("first", "second"))
    models = {name: model(name) for name in ("writer", *judges)}
    for key in [key for key in change if key in models]:
        models[key] = ModelConfig(**vars(models[key]) | change.pop(key))
    return RagOptions(set=data, out=out, answerer="writer", judges=judges, models=models, **change)


def test_rows_judges_and_what_is_asked_again(data, tmp_path):
    run = ranked(data, tmp_path / "found")
    models = Models()
    with LocalServer(models) as server:
        out = rag(options(data, tmp_path / "out", server, of=(str(run),), top_n=2))
        asked = sum(models.asked.values())
        assert set(models.asked.values()) == {1}
        assert rag(options(data, tmp_path / "out", server, of=(str(run),), top_n=2)) == out
        assert sum(models.asked.values()) == asked  # everything is kept
        assert asked == 3 * 3 * NUM
        deeper = options(data, tmp_path / "out", server, of=(str(run),), top_n=4)
        with pytest.raises(UserError, match="top_n = 2, this one has 4"):
            rag(deeper)
    values = {}
    for row in ("closed_book", "oracle", "found"):
        results = json.loads((out / row / "results.json").read_text())
        values[row] = results["micro"]["answer_score"]["value"]
        assert results["micro"]["answer_score"] == results["micro"]["answer_score.first"]
        assert results["headline"][0]["metric"] == "answer_score"
        assert results["rag"]["judges"] == {
            name: {"model": name, "max_side_px": 1024} for name in ("first", "second")
        }
        assert results["identity"]["answers"]["row"] == row
    assert values == pytest.approx(
        {"closed_book": 0.2, "oracle": 0.9, "found": 0.55}
    )  # half have it in the top 2
    frame = pd.read_parquet(out / "found" / "per_query.parquet").set_index("query_id")
    assert frame["answer_score"].tolist() == pytest.approx([0.9, 0.2] * (NUM // 2))
    assert [len(one) for one in frame["top10"]] == [2] * NUM
    assert frame["first_hit_rank"].isna().tolist() == [False, True] * (NUM // 2)
    assert frame["rationale"].str.startswith("I read: wörd").all()
    # what the judge is shown: no document, and no more than the question
    assert all("Document" not in text for name, text in models.texts if name != "writer")
    assert all("STUDENT ANSWER START" not in text for name, text in models.texts if name == "writer")

    found = json.loads((out / "rag.json").read_text())
    assert [(one["row"], one["over"]) for one in found["differences"] if one["slice"] == "macro"][::3] == [
        ("oracle", "closed_book"),
        ("found", "closed_book"),
        ("found", "oracle"),
    ]
    gain = next(one for one in found["differences"] if one["row"] == "found" and one["over"] == "oracle")
    assert (gain["difference"], gain["num_queries"]) == (pytest.approx(-0.35), NUM)
    (agreed,) = found["agreement"]
    assert agreed["bias"]["value"] == pytest.approx(0.1)
    assert (agreed["num"], agreed["close"], agreed["same_order"]) == (3 * NUM, 1.0, True)
    assert 0.8 < agreed["kappa"]["value"] < 1
    assert {one["endpoint"]: one["calls"] for one in found["spent"]}[f"writer at {server.url}"] >= 2 * NUM
    pairs = compare(CompareOptions(a=out / "oracle", b=out / "found", metric=("answer_score",)))
    assert pairs[0].difference == pytest.approx(0.35)

    page = (out / "report.html").read_text()
    assert page.count('class="board"') == 1
    assert "Do the judges agree?" in page
    assert "answers marked by first" in page
    assert "why, says second" in page
    assert "reference: " in page


def test_a_suite_has_macro_means_and_the_published_row_stands_apart(tmp_path):
    suite = tmp_path / "suite"
    for name, more in (("biology", 0), ("law", 6)):
        inner = content()
        for table, columns in inner.items():
            if table == "queries":
                columns["category"] = [name] * NUM
        if more:  # another size, or macro would be micro
            keep = inner["queries"]["id"][:more]
            inner["queries"] = {key: values[:more] for key, values in inner["queries"].items()}
            for table in ("qrels", "negatives", "answers"):
                rows = [n for n, one in enumerate(inner[table]["query-id"]) if one in keep]
                inner[table] = {key: [values[n] for n in rows] for key, values in inner[table].items()}
        write_tables(suite / name, inner, {"benchmark": "mmbright", "task": 2})
    members: dict = {name: {} for name in ("biology", "law")}
    write_suite(suite, name="MM-BRIGHT task 2", benchmark="mmbright", column="domain", members=members)
    with LocalServer(Models()) as server:
        out = rag(options(suite, tmp_path / "out", server, judges=("first",), limit=8))
    results = json.loads((out / "oracle" / "results.json").read_text())
    assert results["macro"]["answer_score"]["value"] == pytest.approx(0.9)
    assert results["headline"][0]["average"] == "macro"
    assert results["set"]["num_queries"] == 8 + 6
    assert (results["rag"]["num_unanswered"], results["rag"]["num_documents"]) == (
        0,
        sum(
            json.loads((out / "members" / one / "oracle" / "results.json").read_text())["rag"][
                "num_documents"
            ]
            for one in members
        ),
    )
    found = json.loads((out / "rag.json").read_text())
    assert (found["average"], found["agreement"]) == ("macro", [])
    page = (out / "report.html").read_text()
    assert "Table 7" in page
    assert "published rows are of answerer=Llama-3.2-90B-VL" in page
    assert "67.2" in page


def test_a_killed_run_asks_for_the_rest(data, tmp_path):
    models = Models()
    answered = models.__call__

    async def slowly(path, body):
        time.sleep(0.02)
        return await answered(path, body)

    with LocalServer(slowly) as server:
        words = [f"set={data}", f"out={tmp_path / 'out'}", "answerer=writer", "judges=first", "rows=oracle"]
        for name in ("writer", "first"):
            words += [
                f"models.{name}.name={name}",
                f"models.{name}.base_url={server.url}",
                f"models.{name}.concurrency=2",
            ]
        with Program("-m", "eval", "rag", *words) as program:
            program.wait_until(lambda: server.num_answered >= 5)
            program.kill()
        before = sum(models.asked.values())
        assert before < 2 * NUM
        assert not (tmp_path / "out" / "oracle" / "results.json").exists()
        with Program("-m", "eval", "rag", *words) as program:
            done = program.finished()
        assert done.returncode == 0, done.stderr
    again = [times for times in models.asked.values() if times > 1]
    assert len(again) <= 2  # what was under way
    assert sum(models.asked.values()) <= 2 * NUM + 2
    assert (
        json.loads((tmp_path / "out" / "oracle" / "results.json").read_text())["micro"]["answer_score"][
            "value"
        ]
        == 0.9
    )


def test_answers_that_are_none_have_nothing_and_are_said(data, tmp_path):
    models = Models()

    async def badly(path, body):
        text = shown(body)
        number = re.search(r"question (\d+)", text)[1]
        if body["model"] == "writer":
            if number == "0":
                return Answer({"choices": []})
            if number == "1":
                return Answer(
                    {"error": {"message": "the prompt is too long", "code": "context_length_exceeded"}},
                    status=400,
                )
            if number == "2":
                return Answer({"error": {"message": "x", "code": "content_filter"}}, status=400)
            if number == "3":
                return chat("cut", stop="length")
        elif number == "4" and not models.asked["first", "once"]:
            models.asked["first", "once"] += 1
            return chat("REASON: good")  # asked for again
        elif number == "5" and models.asked["first", "page"] == 0:
            models.asked["first", "page"] += 1
            return Answer("<html>busy</html>", content_type="text/html")
        return await models(path, body)

    with LocalServer(badly) as server:
        out = rag(options(data, tmp_path / "out", server, judges=("first",), rows=("oracle",)))
    frame = pd.read_parquet(out / "oracle" / "per_query.parquet")
    assert frame["answer_score"].tolist()[:6] == pytest.approx([0, 0, 0, 0.2, 0.9, 0.9])
    assert frame["stop_reason"].tolist()[:4] == ["empty", "rejected request", "refusal", "length"]
    about = json.loads((out / "oracle" / "results.json").read_text())
    assert (about["rag"]["num_unanswered"], about["rag"]["num_cut"]) == (3, 1)
    assert any(one.startswith("3 of 12 questions got no answer") for one in about["warnings"])
    assert "3 of 12 questions got no answer" in (out / "report.html").read_text().split("<main>")[0]
    assert models.asked["first", "once"] == models.asked["first", "page"] == 1


@pytest.mark.parametrize(
    ("said", "match"),
    [("SCORE: 150", "gave no readable mark for 12 of 12 answers"), ("I like it.", "'I like it.'")],
)
def test_a_judge_without_marks_ends_the_run(data, tmp_path, said, match):
    async def judge(path, body):
        return chat("fine" if body["model"] == "writer" else said)

    with LocalServer(judge) as server, pytest.raises(UserError, match=match):
        rag(options(data, tmp_path / "out", server, judges=("first",), rows=("oracle",)))
    assert not (tmp_path / "out" / "oracle").exists()


def test_a_budget_ends_it_and_a_larger_one_goes_on(data, tmp_path):
    models = Models()
    price = {"input_price": 1.0, "output_price": 1000.0, "concurrency": 1}
    with LocalServer(models) as server:
        change = {"judges": ("first",), "rows": ("oracle",), "answer_tokens": 30}
        with pytest.raises(UserError, match="of the budget 0.1 is spent"):
            rag(options(data, tmp_path / "out", server, writer=price | {"budget": 0.1}, **change))
        first = sum(models.asked.values())
        assert 0 < first < NUM
        rag(options(data, tmp_path / "out", server, writer=price | {"budget": 10.0}, **change))
    assert sum(models.asked.values()) == 2 * NUM
    spent = json.loads((tmp_path / "out" / "rag.json").read_text())["spent"]
    assert next(one for one in spent if one["endpoint"].startswith("writer"))["cost"] == pytest.approx(
        NUM * 0.0201
    )


def test_a_dead_endpoint_is_said_and_nothing_is_written(data, tmp_path):
    async def dead(path, body):
        return Answer({"error": {"message": "no"}}, status=500)

    with (
        LocalServer(dead) as server,
        pytest.raises(UserError, match=r"12 of 12 calls to writer were lost|in a row failed"),
    ):
        rag(options(data, tmp_path / "out", server, judges=("first",), rows=("oracle",)))


def test_what_cannot_be_is_refused(data, tmp_path):
    models = {"writer": ModelConfig(name="w", base_url="http://127.0.0.1:9/v1")}
    plain = {
        "set": data,
        "out": tmp_path / "out",
        "answerer": "writer",
        "judges": ("writer",),
        "models": models,
    }

    def refused(match, **change):
        with pytest.raises(UserError, match=match):
            rag(RagOptions(**plain | change))

    refused("neither a directory nor one of models", judges=("nobody",))
    refused("models.more is neither answerer= nor among judges=", models=models | {"more": models["writer"]})
    refused("there is no row", rows=())
    refused("top_n must be at least 1", top_n=0)
    run = ranked(data, tmp_path / "found")
    refused("'found' names another row", of=(str(run), str(run)))
    refused("'oracle' names another row", of=(f"oracle:{run}",))
    other = write_tables(tmp_path / "other", content(), {"name": "other"})
    (other / "answers.parquet").unlink()
    refused("has no reference answers", set=other)
    short = content()
    short["corpus"]["text"][0] = "changed"
    refused("is an evaluation of another set", set=write_tables(tmp_path / "short", short), of=(str(run),))


def test_reference_answers_are_checked(tmp_path):
    for answers, match in (
        ({"query-id": ["q00", "q00"], "answer": ["a", "b"]}, "answered twice"),
        ({"query-id": ["nobody"], "answer": ["a"]}, "not in queries.parquet"),
        ({"query-id": ["q00"]}, "column 'answer' is missing"),
    ):
        wanted = load_set(write_tables(tmp_path / "set", content() | {"answers": answers}))
        with pytest.raises(UserError, match=match):
            reference_answers(wanted)
    write_tables(
        tmp_path / "set", content() | {"answers": {"query-id": ["q03", "q01"], "answer": ["b", "  "]}}
    )
    assert reference_answers(load_set(tmp_path / "set")) == {"q03": "b"}


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("REASON:\nx\nSCORE:\n60", 0.6), ("SCORE: 70/100", 0.7), ("**SCORE:** 85%", 0.85), ("Score: 0", 0.0),
        ("SCORE: 10 at first. SCORE:\n\n40.5", 0.405), ("SCORE: 60\nThis score is fair.", 0.6),
    ],
)  # fmt: skip
def test_marks(text, mark):
    assert mark_of(Reply(text, "stop", 1, 1)) == pytest.approx(mark)


@pytest.mark.parametrize(
    "text",
    ["", "60", "SCORE: high", "SCORE: 101", "SCORE: -5", "SCORE: 7/10", "The score you give, e.g., 60"],
)
def test_no_marks(text):
    with pytest.raises(BadValue):
        mark_of(Reply(text, "stop", 1, 1))


def test_a_judge_that_was_cut_off_is_given_more_room():
    with pytest.raises(Truncated):
        mark_of(Reply("REASON: at length", "length", 1, 1))


def test_prompts():
    documents = [Item("a", text="first " * 10), Item("b", text="second")]
    parts = answer_parts(Item("q", text="why?", instruction="Find it."), documents, 5)
    assert parts[:3] == ["Document 1:\nfirst", "Document 2:\nsecon", "Question:\nwhy?"]
    assert "documents" in parts[-1]
    closed = answer_parts(Item("q", text="why?"), [])
    assert closed[0] == "Question:\nwhy?"
    assert "document" not in closed[-1]


def test_a_model_that_runs_here_has_a_short_name_on_the_page():
    assert known_as("0f" * 32) == "0f0f0f0f0f0f"
    assert known_as("Llama-3.2-90B-VL") == "Llama-3.2-90B-VL"


def test_agreement_is_cohens_kappa_with_quadratic_weights():
    from sklearn.metrics import cohen_kappa_score

    rng = np.random.default_rng(0)
    a = rng.integers(0, 11, 200)
    b = np.clip(a + rng.integers(-3, 3, 200), 0, 10)
    found = agreement(a / 10, b / 10, np.arange(200) // 2, seed=0)
    expected = cohen_kappa_score(a, b, weights="quadratic", labels=range(11))
    assert found["kappa"]["value"] == pytest.approx(expected, abs=1e-12)
    assert found["kappa"]["low"] < expected < found["kappa"]["high"]
    assert found["bias"]["value"] == pytest.approx((a - b).mean() / 10)
    assert found["close"] == pytest.approx((np.abs(a - b) <= 1).mean())
    noise = agreement(a / 10, rng.permutation(a) / 10, np.arange(200), seed=0)
    assert noise["kappa"]["low"] < 0 < noise["kappa"]["high"]
    with_gaps = np.where(np.arange(200) < 150, a / 10, np.nan)
    assert agreement(with_gaps, b / 10, np.arange(200), seed=0)["num"] == 150
    assert agreement(np.full(9, 0.5), np.full(9, 0.5), np.arange(9), seed=0)["kappa"] is None
    assert agreement(np.full(2, np.nan), np.ones(2), [0, 1], seed=0)["num"] == 0


def test_a_model_here_writes_once(lively_path, tmp_path, monkeypatch):
    store = AnswerStore(tmp_path / "written.sqlite")
    from eval_fakes import picture as drawn

    from eval.judging.endpoint import picture

    prompts = [
        Asked(("What is it?", picture(drawn(1)), "Say."), "You see."),
        Asked(("Why?",)),
        Asked(("Why?",)),
    ]
    writer = LocalWriter(str(lively_path), store, device="cpu")
    first = writer.write(prompts, max_tokens=5, title="x")
    assert [one.stop for one in first] != ["empty"] * 3
    assert all((one.tokens or 0) <= 5 for one in first)
    assert first[1] == first[2]
    again = LocalWriter(str(lively_path), store, device="cpu")
    monkeypatch.setattr(again, "_backbone", lambda: pytest.fail("loaded for nothing"))
    assert again.write(prompts, max_tokens=5, title="x") == first
    with pytest.raises(pytest.fail.Exception):
        again.write(prompts[:1], max_tokens=6, title="x")
    assert re.fullmatch("[0-9a-f]{64}", writer.name["model"])
    assert Path(store.path).is_file()
