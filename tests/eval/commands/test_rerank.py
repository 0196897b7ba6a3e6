"""Reranking: descriptions and their likelihood, stable ties, what is kept, records that teach a judge."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_fakes import FakeEncoder, loader, tables, write_set, write_tables
from faults import error_about
from stock import nll_of, stock_forward

from eval.commands.bm25 import Bm25Options, bm25
from eval.commands.rerank import RerankOptions, reorder, rerank, rerank_command
from eval.commands.run import RunOptions, run
from eval.judging import records as judge_records
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import load_set
from rge.calls.store import AnswerStore, value_key
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.data.sources import RecordFile
from rge.identity import run_identity
from rge.judging import description
from rge.judging.description import DescriptionJudge
from rge.judging.scorer import SCORERS, Judge, Score, Scorer
from rge.rollout.generate import generate

RANKING = Ranking(
    np.array([[4, 2, 0, 1, 3], [1, 0, 2, -1, -1]], np.int32),
    np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.4, 0.3, 0.2, -np.inf, -np.inf]], np.float32),
    4,
)


class Fixed(Scorer):
    """Scores by candidate id; remembers what it was asked."""

    first = "candidate"

    def __init__(self, scores, name="fixed"):
        super().__init__()
        self.scores, self.asked = scores, []
        self.name = {"judge": name}

    def prepare(self, queries, rationales, answers):
        return [Item(q.id, content_of(rationales.get(q.id) or q.text)) for q in queries]

    def score(self, pairs):
        self.asked += [(query.id, candidate.id) for query, candidate in pairs]
        return [Score(self.scores.get(candidate.id, 0.5)) for _, candidate in pairs]


@pytest.fixture
def judged_by(monkeypatch):
    """Makes every judge that a command loads this one."""

    def use(scorer):
        monkeypatch.setattr(SCORERS, "_entries", {**SCORERS._entries, "yes_no": lambda judge: scorer})

    list(SCORERS)  # the built-in ones
    return use


@pytest.fixture
def wanted(tmp_path):
    return load_set(write_set(tmp_path / "set", num_queries=2, num_candidates=8))


def test_new_scores_come_first_and_equal_ones_keep_their_order():
    found = reorder(RANKING, np.array([[0.1, 0.7, 0.7], [0.2, 0.2, 0.2]]))
    assert found.rows_QW.tolist() == [[2, 0, 4, 1, 3], [1, 0, 2, -1, -1]]
    assert (np.diff(found.score_QW[0]) <= 0).all()
    assert found.score_QW[0, :3].tolist() == [0.7, 0.7, 0.1]
    assert (found.score_QW[0, 3:] < -1).all()
    np.testing.assert_allclose(np.diff(found.score_QW[0, 3:]), -0.1, atol=1e-6)
    assert found.depth == 4


def test_what_is_scored_once_is_not_asked_again(wanted, tmp_path):
    judge = Fixed({"c001": 0.9, "c004": 0.1})
    answers = AnswerStore(tmp_path / "judge.sqlite")
    ranking = Ranking(
        np.array([[4, 2, 1, 0], [3, 2, 4, 1]], np.int32), np.tile(np.float32([4, 3, 2, 1]) / 8, (2, 1)), 4
    )
    first = rerank(wanted, wanted.queries, ranking, judge, answers, top_n=2, chunk=3)
    assert sorted(judge.asked) == [("q00", "c002"), ("q00", "c004"), ("q01", "c002"), ("q01", "c003")]
    assert first.ranking.rows_QW.tolist() == [[2, 4, 1, 0], [3, 2, 4, 1]]
    assert first.num_pairs == 4
    assert (first.ms_Q > 0).all()
    judge.asked.clear()
    deeper = rerank(wanted, wanted.queries, ranking, judge, answers, top_n=4, chunk=3)
    assert sorted(judge.asked) == [("q00", "c000"), ("q00", "c001"), ("q01", "c001"), ("q01", "c004")]
    assert deeper.ranking.rows_QW.tolist() == [[1, 2, 0, 4], [1, 3, 2, 4]]
    judge.asked.clear()
    answers.close()
    again = rerank(
        wanted, wanted.queries, ranking, judge, AnswerStore(tmp_path / "judge.sqlite"), top_n=4, chunk=3
    )
    assert judge.asked == []
    np.testing.assert_array_equal(again.ranking.rows_QW, deeper.ranking.rows_QW)
    rerank(
        wanted,
        wanted.queries,
        ranking,
        Fixed({}, "another"),
        answers=AnswerStore(tmp_path / "judge.sqlite"),
        top_n=1,
        chunk=3,
    )


class Linked:
    """A `ProcessGroup` whose processes are threads of this one."""

    def __init__(self, rank, barrier, box):
        self.rank, self.size, self.is_first = rank, len(box), rank == 0
        self._barrier, self._box = barrier, box

    def gather(self, value):
        self._box[self.rank] = value
        self._barrier.wait()
        found = list(self._box)
        self._barrier.wait()
        return found

    def once(self, make):
        return self.gather(make() if self.is_first else None)[0]


def test_several_processes_share_the_pairs_and_the_first_keeps_the_scores(tmp_path, monkeypatch):
    wanted = load_set(write_set(tmp_path / "set", num_queries=3, num_candidates=8))
    rows = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    ranking = Ranking(rows, -rows.astype(np.float32) / 8, 8)
    scores = {f"c{n:03d}": (5 * n % 8) / 10 for n in range(8)}
    alone = rerank(
        wanted, wanted.queries, ranking, Fixed(scores), AnswerStore(tmp_path / "one.sqlite"), top_n=5, chunk=4
    )
    assert alone.num_pairs == 15

    answers = AnswerStore(tmp_path / "three.sqlite")
    before = Fixed(scores)
    rerank(
        wanted, wanted.queries, ranking, before, answers, top_n=1, chunk=4
    )  # three pairs have a score already
    barrier, box = threading.Barrier(3, timeout=60), [None] * 3
    judges = [Fixed(scores) for _ in range(3)]
    bars = []

    class Bar:
        def __init__(self, *, total, initial, disable, **_):
            self.count, self.total = initial, total
            bars.extend([] if disable else [self])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, num):
            self.count += num

    def work(rank):
        kept = answers if rank == 0 else AnswerStore(None)
        process_group = Linked(rank, barrier, box)
        return rerank(
            wanted,
            wanted.queries,
            ranking,
            judges[rank],
            kept,
            top_n=5,
            chunk=2,
            process_group=process_group,
        )

    monkeypatch.setattr("rge.judging.pairs.progress_bar", Bar)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    for one in found:
        np.testing.assert_array_equal(one.ranking.rows_QW, alone.ranking.rows_QW)
        np.testing.assert_array_equal(one.ranking.score_QW, alone.ranking.score_QW)
    asked = [pair for judge in judges for pair in judge.asked]
    assert len(asked) == len(set(asked)) == 12
    assert not set(asked) & set(before.asked)
    assert [len(judge.asked) for judge in judges] == [4, 4, 4]  # two rounds of two pairs each
    assert [(bar.count, bar.total) for bar in bars] == [(15, 15)]  # one bar, which counts for all
    again = Fixed(scores)
    rerank(wanted, wanted.queries, ranking, again, answers, top_n=5, chunk=4)
    assert again.asked == []


def test_scores_of_a_local_judge_are_kept_under_its_code_and_versions(wanted, tmp_path, monkeypatch):
    ranking = Ranking(np.arange(8, dtype=np.int32)[None].repeat(2, axis=0), np.zeros((2, 8), np.float32), 8)
    known = run_identity._version_now
    store = AnswerStore(tmp_path / "judge.sqlite")

    def asked() -> int:
        judge = Fixed({})
        rerank(wanted, wanted.queries, ranking, judge, store, top_n=2, chunk=4)
        return len(judge.asked)

    assert (asked(), asked()) == (4, 0)
    with monkeypatch.context() as patched:
        patched.setattr(
            run_identity, "_version_now", lambda name: "another" if name == "numpy" else known(name)
        )
        assert asked() == 4
    assert asked() == 0  # the first is still there
    monkeypatch.setattr(
        run_identity, "_hash_of", lambda path, *_: "edited" if path.name == "description.py" else path.name
    )
    assert asked() == 4
    store.close()


@pytest.mark.slow
def test_the_command_reranks_a_finished_evaluation(tmp_path, judged_by):
    content = tables()
    data = write_tables(tmp_path / "set", content)
    asked = RunOptions(
        checkpoint="fake", set=data, out=tmp_path / "eval", report=False, by=("pair",), metrics=("recall@7",)
    )
    (done,) = run(asked, loader(FakeEncoder()))
    right = set(zip(content["qrels"]["query-id"], content["qrels"]["corpus-id"], strict=True))

    class Knows(Fixed):
        def score(self, pairs):
            return [Score(0.9 if (query.id, candidate.id) in right else 0.1) for query, candidate in pairs]

    judged_by(Knows({}))
    options = {"of": done, "out": tmp_path / "judged", "judge": "x"}
    rerank_command(RerankOptions(**options, top_n=60))
    before, after = (json.loads((path / "results.json").read_text()) for path in (done, tmp_path / "judged"))
    assert after["micro"]["hit@1"]["value"] == 1.0 > before["micro"]["hit@1"]["value"]
    assert after["micro"].keys() == before["micro"].keys()
    assert after["by_pair"].keys() == before["by_pair"].keys()
    assert after["rerank"]["top_n"] == 60
    assert after["rerank"]["num_pairs"] == 24 * 60
    assert after["query_mode"] == "reasoning"
    told = Knows({})
    prepare = told.prepare
    told.prepare = lambda *given: told.asked.extend(prepare(*given)) or prepare(*given)
    judged_by(told)
    rerank_command(RerankOptions(of=tmp_path / "judged", out=tmp_path / "again", judge="x", top_n=2))
    assert [text.text for text in told.asked] == [f"because of {text.id}" for text in told.asked]
    judged_by(Knows({}))
    with error_about(UserError, "rerank.top_n"):
        rerank_command(RerankOptions(**options, top_n=5))
    other = Knows({})
    other.name = other.name | {"judge": "another"}
    judged_by(other)
    with error_about(UserError, "rerank.judge"):
        rerank_command(RerankOptions(**options, top_n=60))
    rerank_command(RerankOptions(**options, top_n=1, overwrite=True))
    assert json.loads((tmp_path / "judged" / "results.json").read_text())["micro"] == before["micro"]
    content["qrels"]["score"][0] = 9
    write_tables(tmp_path / "set", content)
    with error_about(UserError, "set", "set.fingerprint"):
        rerank_command(RerankOptions(**options, overwrite=True))
    data.rename(tmp_path / "elsewhere")
    with error_about(UserError, "set"):
        rerank_command(RerankOptions(**options, overwrite=True))


def test_answers_are_kept_and_a_file_that_is_none_is_refused(tmp_path):
    keys = [value_key("a", number) for number in range(1200)]
    answers = AnswerStore(tmp_path / "x" / "a.sqlite")
    answers.put_values({key: [number, None] for number, key in enumerate(keys)})
    answers.close()
    assert AnswerStore(tmp_path / "x" / "a.sqlite").get_values([*keys, "none"]) == {
        key: [n, None] for n, key in enumerate(keys)
    }
    assert value_key("a", "b") != value_key("ab", "")
    (tmp_path / "text").write_text("no database at all, but long enough to be taken for a header " * 20)
    with error_about(UserError, tmp_path / "text"):
        AnswerStore(tmp_path / "text")


def test_a_mix_adds_to_the_ranking_and_any_scores_stay_above_the_rest():
    found = reorder(RANKING, np.array([[-40.0, -10.0, -20.0], [-5.0, -9.0, -1.0]]), 0.02)
    assert found.rows_QW.tolist() == [[2, 0, 4, 1, 3], [1, 2, 0, -1, -1]]  # .1, .6, .3 and .3, .12, .18
    np.testing.assert_allclose(found.score_QW[0, :3], [0.6, 0.3, 0.1], atol=1e-6)
    alone = reorder(RANKING, np.array([[-40.0, -10.0], [-5.0, -9.0]]))
    assert alone.rows_QW.tolist() == [[2, 4, 0, 1, 3], [1, 0, 2, -1, -1]]
    assert (np.diff(alone.score_QW[0]) < 0).all()  # what was not scored lies below -40
    assert reorder(RANKING, np.array([[-1.0, -np.inf], [0.0, 0.0]]), 0.5).rows_QW[0, 0] == 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mix", [None, 0.0, 0.5, -0.5])
def test_queries_without_candidates_stay_empty(mix):
    """Some, or all; nothing is computed of what is not there."""
    rows, old = (
        np.array([[3, -1, -1], [-1, -1, -1]]),
        np.array([[0.5, -np.inf, -np.inf], [-np.inf] * 3], np.float32),
    )
    new = np.array([[2.0, -np.inf], [-np.inf, -np.inf]])
    for part in (slice(None), slice(1, None)):
        found = reorder(Ranking(rows[part], old[part], 3), new[part], mix)
        assert (found.rows_QW == rows[part]).all()
        assert (np.isfinite(found.score_QW) == (rows[part] >= 0)).all()
    assert found.score_QW.tolist() == [[-np.inf] * 3]


def test_a_likelihood_is_that_of_a_plain_forward(lively_path, wanted):
    judge = DescriptionJudge(Judge(str(lively_path), batch_size=2))
    candidates = list(wanted.corpus_items())[:2]
    texts = [
        Item("a", content_of("because of a key")),
        Item("b", content_of("it is so")),
        Item("c", content_of("a")),
    ]
    pairs = [(text, candidate) for candidate in candidates for text in texts]
    found = [score.value for score in judge.score(pairs)]
    embedder, tokenizer = judge.model.embedder, judge.model.builder.processor.tokenizer
    for (text, candidate), value in zip(pairs, found, strict=True):
        prompt = judge.model.builder.build(
            Item("x", content_of(description.QUESTION, candidate.pictures)), "query"
        )
        ids = tokenizer(text.text, add_special_tokens=False).input_ids
        with torch.no_grad():
            _, logits, _ = stock_forward(embedder, [prompt], [ids], "right")
        logits[..., embedder.suppressed_ids] = -torch.inf
        expected, count = nll_of(logits, [0], [prompt], [ids])
        assert count == len(ids)
        assert value == pytest.approx(-float(expected), abs=1e-3)


def test_a_judge_of_the_hub_is_known_by_its_files(lively_path, tmp_path, monkeypatch):
    folder = shutil.copytree(lively_path, tmp_path / "judge")
    (folder / "rge.json").write_text(json.dumps({"pixels": {"min": 28 * 28, "max": 56 * 56}}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    judge, same = (DescriptionJudge(Judge(name, batch_size=2)) for name in ("owner/name", str(folder)))
    assert judge.name == same.name
    sizes = [one.model.builder.processor.image_processor.size for one in (judge, same)]
    assert sizes[0] == sizes[1]
    assert sizes[0]["longest_edge"] == 56 * 56


def test_a_judge_describes_the_answer_once_and_keeps_it(lively_path, tmp_path, monkeypatch):
    judge = DescriptionJudge(Judge(str(lively_path), batch_size=2))
    answers = AnswerStore(tmp_path / "judge.sqlite")
    texts = [
        Item("a", content_of("it is a lock")),
        Item("b", content_of("it is a door")),
        Item("c", content_of("it is a lock")),
    ]
    first = judge.describe([texts[0]], answers)[0].text
    prompt = judge.model.builder.build(
        Item("a", content_of(f"it is a lock\n{description.ANSWER_SHOWS}")), "query"
    )
    (plain,) = generate(
        judge.model.embedder, [prompt], max_new_tokens=description.DESCRIPTION_TOKENS, batch_size=1
    )
    assert not plain.forced
    assert first == judge.model.builder.processor.tokenizer.decode(plain.ids).strip() != ""

    asked = []
    monkeypatch.setattr(
        "rge.rollout.generate.generate",
        lambda embedder, prompts, **_: asked.append(len(prompts)) or [replace(plain, ids=())] * len(prompts),
    )
    found = judge.describe(texts, answers)
    assert asked == [1]  # one of three was kept, and one is equal to it
    assert [(one.id, one.text) for one in found] == [("a", first), ("b", "it is a door"), ("c", first)]
    with pytest.raises(UserError, match="query .d. has neither a rationale nor a text"):
        judge.describe([Item("d", content_of(None, (b"x",)))], answers)
    monkeypatch.setattr(
        "rge.rollout.generate.generate",
        lambda embedder, prompts, **_: [replace(plain, forced=True)] * len(prompts),
    )
    with error_about(UserError, "untrained"):
        judge.describe([Item("e", content_of("it is a hat"))], answers)


@pytest.mark.slow
def test_the_command_asks_for_what_the_answer_shows(tmp_path, judged_by):
    data = write_tables(tmp_path / "set", tables())
    (done,) = run(
        RunOptions(checkpoint="fake", set=data, out=tmp_path / "eval", report=False), loader(FakeEncoder())
    )
    asked = []

    class Describes(Fixed):
        def prepare(self, queries, rationales, answers):
            assert isinstance(answers, AnswerStore)
            texts = super().prepare(queries, rationales, answers)
            return [Item(one.id, content_of(one.text.replace("because of", "a picture of"))) for one in texts]

        def score(self, pairs):
            asked.extend(pairs)
            return [Score(-float(int(candidate.id[1:]))) for _, candidate in pairs]

    judged_by(Describes({}))
    options = {"of": done, "judge": "x", "top_n": 3, "out": tmp_path / "out"}
    rerank_command(RerankOptions(**options, mix=0.05))
    assert {(query.id, query.text, query.pictures) for query, _ in asked} == {
        (f"q{n:02d}", f"a picture of q{n:02d}", ()) for n in range(24)
    }
    rerank_command(RerankOptions(**options | {"out": tmp_path / "alone"}))
    rerank_command(RerankOptions(**options | {"out": tmp_path / "nothing"}, mix=0.0))
    before, found, alone, nothing = (
        json.loads((path / "results.json").read_text())
        for path in (done, tmp_path / "out", tmp_path / "alone", tmp_path / "nothing")
    )
    assert found["rerank"]["mix"] == 0.05
    assert found["rerank"]["before"]["recall@10"] == before["micro"]["recall@10"]
    assert nothing["micro"] == before["micro"] != alone["micro"]
    assert nothing["identity"]["key"] != alone["identity"]["key"]
    with error_about(UserError, "rerank.mix"):
        rerank_command(RerankOptions(**options))


def test_a_reranked_evaluation_is_not_replaced_by_its_first_ranking_unasked(tmp_path, judged_by):
    data = write_tables(tmp_path / "set", tables())
    options = {"checkpoint": "fake", "set": data, "cache": tmp_path / "cache", "report": False}
    (done,) = run(RunOptions(**options, out=tmp_path / "eval"), loader(FakeEncoder()))
    judged_by(Fixed({}))
    rerank_command(RerankOptions(of=done, judge="x", top_n=3, out=tmp_path / "judged"))
    before = (tmp_path / "judged" / "results.json").read_bytes()
    with error_about(UserError, "rerank.of"):
        run(RunOptions(**options, out=tmp_path / "judged"), loader(FakeEncoder()))
    assert (tmp_path / "judged" / "results.json").read_bytes() == before
    rerank_command(RerankOptions(of=done, judge="x", top_n=3, out=tmp_path / "judged"))


@pytest.mark.slow
def test_the_judge_sees_no_text_that_the_embedder_did_not(tmp_path, judged_by):
    asked = {
        "checkpoint": "fake", "set": write_set(tmp_path / "set"), "report": False,
        "query_mode": ("direct", "reasoning"), "query_modality": ("image",),
    }  # fmt: skip
    seen = []

    class Sees(Fixed):
        def prepare(self, *given):
            texts = super().prepare(*given)
            seen.append({one.text for one in texts})
            return texts

    judged_by(Sees({}))
    for number, done in enumerate(run(RunOptions(**asked, out=tmp_path / "eval"), loader(FakeEncoder()))):
        rerank_command(RerankOptions(of=done, judge="x", top_n=1, out=tmp_path / f"{number}"))
    assert seen == [{f"because of q{n:02d}" for n in range(24)}, {None}]


@pytest.mark.slow
def test_a_query_that_counted_0_is_not_left_out_after_reranking(tmp_path, judged_by):
    """BM25 ranks nothing for a query whose words occur nowhere; the official profile skips queries without a ranking."""
    content = tables(negatives=False)
    content["corpus"]["text"] = [f"question {name[1:].lstrip('0')}" for name in content["corpus"]["id"]]
    content["queries"]["text"][3] = "zzz"
    data = write_tables(tmp_path / "set", content, {"benchmark": "mmbright"})
    done = bm25(Bm25Options(set=data, out=tmp_path / "bm25", benchmark="mmbright", profile="official"))
    judged_by(Fixed({}))
    rerank_command(RerankOptions(of=done, judge="x", mix=0.0, out=tmp_path / "judged"))
    before, after = (json.loads((path / "results.json").read_text()) for path in (done, tmp_path / "judged"))
    assert after["coverage"] == before["coverage"] == 1.0
    assert after["micro"] == before["micro"]


@pytest.mark.slow
def test_records_that_teach_to_describe(tmp_path):
    folder = Path("data_prep/demo/data/train").resolve()
    options = judge_records.JudgeRecordsOptions(
        src=(folder / "relations.jsonl",),
        descriptions=(folder / "naming.jsonl",),
        out=tmp_path / "a place" / "out.jsonl",
    )
    made = RecordFile(judge_records.write_records(options), need_rationale=True)
    records = [made[number] for number in range(len(made))]
    pictures = [one for one in records if one.query.images]
    names = RecordFile(folder / "naming.jsonl")
    named = {names[n].group: names[n].positives[0].rationale for n in range(len(names))}
    assert {one.query.text for one in pictures} == {description.QUESTION}
    assert len({one.query.images[0] for one in pictures}) == len(pictures) > 1000
    assert all(one.positives[0].rationale == named[one.group] for one in pictures)
    texts = {one.query.text: one.positives[0].rationale for one in records if not one.query.images}
    door = "This is a door; it is unlocked with a key.\n" + description.ANSWER_SHOWS
    assert texts[door] == "This is a key."
    other = replace(options, descriptions=(folder / "relations.jsonl",), src=(folder / "naming.jsonl",))
    assert len(RecordFile(judge_records.write_records(other))) > 0
    some = tmp_path / "some.jsonl"
    row = json.loads((folder / "text.jsonl").read_text().splitlines()[0])
    row["positives"][0] |= {"identity": "nobody", "image": None, "text": "words"}
    some.write_text(json.dumps(row))
    with error_about(UserError, "descriptions"):
        judge_records.write_records(replace(options, src=(some,)))
