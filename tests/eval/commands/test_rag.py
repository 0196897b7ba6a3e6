"""Answers with documents, on a stand-in of MM-BRIGHT's Table 7: what is shown, how it is scored, and what stays open."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from eval_fakes import tables, write_tables

from eval.benchmarks.suite import write_suite
from eval.commands.compare import CompareOptions, compare
from eval.commands.rag import RagOptions, rag
from eval.commands.score import ScoreOptions, score
from eval.judging.answers import agreement, score_of
from eval.pages.report import ReportOptions, report
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.wire.replies import BadValue, Refused, Reply, Truncated
from rge.common.errors import UserError

NUM = 8


@pytest.fixture
def content():
    """Query n has the answer "fact n"; its right documents say so, all others mislead. Query 7 has no reference."""
    found = tables(num_queries=NUM, num_candidates=20)
    right = dict(zip(found["qrels"]["corpus-id"], found["qrels"]["query-id"], strict=True))
    found["corpus"]["text"] = [
        f"It is fact {int(right[name][1:])}." if name in right else "It is nonsense."
        for name in found["corpus"]["id"]
    ]
    found["corpus"]["image"] = [None] * 20
    found["queries"]["answers"] = [f"fact {n}" for n in range(NUM - 1)] + [None]
    return found


class Models:
    """A generator that repeats its documents, and judges that compare texts; `down` questions get no answer."""

    def __init__(self):
        self.asked, self.down, self.refused, self.silent = [], set(), set(), set()
        self.strict, self.nonsense = False, set()

    async def __call__(self, path, body):
        text = json.dumps(body["messages"])
        self.asked.append((body["model"], text))
        number = int(re.search(r"question (\d+)", text)[1])
        if (body["model"], number) in self.down:
            return Answer({"error": {"message": "overloaded"}}, 500)
        if body["model"] == "generator":
            if number in self.refused:
                return Answer({"error": {"code": "content_filter", "message": "the content filter"}}, 400)
            shown = re.findall(r"It is (fact \d+|nonsense)", text)
            return chat("I think " + ", ".join(shown or ["something"]))
        if number in self.nonsense:
            return chat("SCORE: excellent")
        covered = f"think fact {number}" in text or f", fact {number}" in text
        value = 80 if covered else (0 if self.strict or body["model"] == "second" else 20)
        return chat(f"REASON:\nI compared, SCORE 10 came to mind\nSCORE: {value}")


@pytest.fixture
def models():
    found = Models()
    with LocalServer(found) as server:
        found.config = lambda name: ModelConfig(name, server.url, max_retries=0, send_seed=False)
        yield found


@pytest.fixture
def bad_ranking(content, tmp_path):
    """Only misleading documents."""
    data = write_tables(tmp_path / "set", content)
    wrong = [
        n
        for n, text in zip(content["corpus"]["id"], content["corpus"]["text"], strict=True)
        if "nons" in text
    ]
    lines = [f"q{n:02d} Q0 {name} {r} {9 - r} x\n" for n in range(NUM) for r, name in enumerate(wrong[:7], 1)]
    (tmp_path / "run.trec").write_text("".join(lines))
    return score(ScoreOptions(run=tmp_path / "run.trec", set=data, out=tmp_path / "bad"))


def results_of(path):
    return json.loads((path / "results.json").read_text())


@pytest.mark.slow
def test_rows_are_evaluations_that_compare_pairs(content, models, bad_ranking, tmp_path):
    options = RagOptions(
        set=tmp_path / "set", out=tmp_path / "rag", generator=models.config("generator"),
        judge=models.config("judge"), second_judge=models.config("second"), of=(f"bad:{bad_ranking}",),
    )  # fmt: skip
    models.refused = {2}
    none, oracle, bad = rag(options)
    assert [path.name for path in (none, oracle, bad)] == ["none", "oracle", "bad"]
    frame = pd.read_parquet(oracle / "per_query.parquet").set_index("query_id")
    expected = [0.8, 0.8, 0.0, 0.8, 0.8, 0.8, 0.8, np.nan]  # refused: 0; without a reference: left out
    np.testing.assert_allclose(frame["answer_score"], expected)
    assert frame["rationale"].iloc[0].startswith("I think fact 0")
    value = results_of(none)["micro"]["answer_score"]["value"]
    assert value == pytest.approx(6 * 0.2 / 7)
    found = results_of(bad)
    assert found["micro"]["answer_score"]["value"] == pytest.approx(value)
    assert found["rag"]["counts"] == {
        "no reference answer, left out": 1,
        "no answer (refusal), scored 0": 1,
    }
    assert found["rag"]["agreement"]["bias"]["value"] == pytest.approx(-6 * 0.2 / 7)
    shown = [text for model, text in models.asked if model == "generator" and "question 0" in text]
    assert sorted(text.count("Document ") for text in shown) == [0, 1, 5]  # none, oracle, the first five
    rows = compare(CompareOptions(a=oracle, b=none, metric=("answer_score",)))
    assert rows.iloc[0]["difference"] == pytest.approx(6 * 0.6 / 7)
    num = len(models.asked)
    rag(options)
    assert len(models.asked) == num  # all is stored
    with pytest.raises(UserError):
        rag(RagOptions(**{**vars(options), "top_n": 2}))  # another row must not replace this one


@pytest.mark.slow
def test_unanswered_calls_leave_a_row_open_and_nonsense_is_left_out(content, models, tmp_path):
    data = write_tables(tmp_path / "set", content)
    options = RagOptions(
        set=data,
        out=tmp_path / "rag",
        generator=models.config("generator"),
        judge=models.config("judge"),
        rows=("none",),
    )
    models.nonsense = {1}
    for down in ({("generator", 3)}, {("judge", 4)}):
        models.down = down
        with pytest.raises(UserError) as caught:
            rag(options)
        assert caught.value.exit_code == 2
        assert not (tmp_path / "rag" / "none" / "results.json").exists()
    models.down, before = set(), len(models.asked)
    (done,) = rag(options)
    assert len(models.asked) == before + 1
    assert results_of(done)["rag"]["counts"] == {
        "no reference answer, left out": 1,
        "no score by judge (bad value), left out": 1,
    }
    models.nonsense = set(range(NUM))
    with pytest.raises(UserError):
        rag(RagOptions(**{**vars(options), "out": tmp_path / "other"}))


def test_a_set_without_answers_is_refused(models, tmp_path):
    data = write_tables(tmp_path / "set", tables(num_queries=2, num_candidates=8))
    with pytest.raises(UserError):
        rag(RagOptions(data, tmp_path / "rag", models.config("generator"), models.config("judge")))
    assert models.asked == []


def test_a_score_stands_behind_its_reason():
    def read(text, stop="stop"):
        return score_of(Reply(text, stop))

    assert read("REASON: SCORE 10 would be too little\n**SCORE:** 70%") == 0.7
    assert read("SCORE:\n100") == 1.0
    for text in ("no", "SCORE: 65", "SCORE: 110", "SCORE: -10", "SCORE: high"):
        with pytest.raises(BadValue):
            read(text)
    with pytest.raises(Truncated):
        read("REASON: because", "length")
    with pytest.raises(Refused):
        read("", "refusal")


def test_agreement_is_quadratic_kappa():
    """By hand: mean squared difference 0.01, by chance 0.01 + 0.09 + ... of the four marks."""
    a, b = [0.0, 0.2, 0.4, 1.0], [0.1, 0.2, 0.4, 0.9]
    frame = pd.DataFrame({"answer_score": [*a, np.nan], "answer_score_2": [*b, 0.3], "group": list("wxyzz")})
    found = agreement(frame, seed=0)
    chance = np.mean([(x - y) ** 2 for x in a for y in b])
    assert found["num"] == 4
    assert found["kappa"]["value"] == pytest.approx(1 - 0.005 / chance)
    assert found["bias"]["value"] == pytest.approx(0.0)
    assert agreement(frame.drop(columns="answer_score_2"), seed=0) is None


@pytest.mark.slow
def test_a_suite_of_domains_and_the_page_of_a_member(content, models, tmp_path):
    for name in ("biology", "law"):
        write_tables(tmp_path / "suite" / name, content, {"benchmark": "mmbright", "task": 2})
    write_suite(
        tmp_path / "suite",
        name="two",
        benchmark="mmbright",
        column="domain",
        members={"biology": {}, "law": {}},
    )
    none, oracle = rag(
        RagOptions(
            set=tmp_path / "suite", out=tmp_path / "rag", generator=models.config("generator"),
            judge=models.config("judge"), second_judge=models.config("second"),
        )
    )  # fmt: skip
    found = results_of(oracle)
    assert found["macro"]["answer_score"]["value"] == pytest.approx(0.8)
    assert found["rag"]["counts"] == {"no reference answer, left out": 2}
    assert found["rag"]["agreement"]["num"] == 14
    rows = compare(CompareOptions(a=oracle, b=none, metric=("answer_score",)))
    assert rows.iloc[0]["difference"] == pytest.approx(0.6)
    runs = tuple(str(path / "members" / "law") for path in (none, oracle))
    page = report(ReportOptions(runs=runs, out=tmp_path / "page.html", metric="answer_score"))
    assert "answer_score" in page.read_text()
