"""Reranking: the judge's probability, stable ties, what is kept, and both kinds of judges."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_fakes import FakeEncoder, loader, tables, write_set, write_tables
from stock import nll_of, stock_forward

from eval.commands.rerank import RerankOptions, reorder, rerank, rerank_command
from eval.commands.run import RunOptions, run
from eval.embedding.identity import differences
from eval.judging import description
from eval.judging.description import DescriptionJudge
from eval.judging.endpoint import Endpoint
from eval.judging.judges import LocalJudge, RemoteJudge, as_item, load_judge
from eval.judging.yes_no import next_token_logits, word_id
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import load_set
from rge.calls.local_server import Answer, LocalServer
from rge.calls.store import AnswerStore, key_of
from rge.common.errors import UserError
from rge.common.schema import Item
from rge.data.sources import RecordFile
from rge.identity import run_identity
from rge.model.families import normalised
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import generate

RANKING = Ranking(
    np.array([[4, 2, 0, 1, 3], [1, 0, 2, -1, -1]], np.int32),
    np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.4, 0.3, 0.2, -np.inf, -np.inf]], np.float32),
    4,
)


class Fixed:
    """Scores by candidate id; remembers what it was asked."""

    def __init__(self, scores, words=("yes", "no")):
        self.scores, self.asked = scores, []
        self.name = {"judge": "fixed", "words": list(words)}

    def score(self, pairs):
        self.asked += [(query.id, candidate.id) for query, candidate in pairs]
        return [self.scores.get(candidate.id, 0.5) for _, candidate in pairs]


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
    first = rerank(wanted, ranking, judge, answers, top_n=2, chunk=3)
    assert sorted(judge.asked) == [("q00", "c002"), ("q00", "c004"), ("q01", "c002"), ("q01", "c003")]
    assert first.ranking.rows_QW.tolist() == [[2, 4, 1, 0], [3, 2, 4, 1]]
    assert (first.num_pairs, first.num_unanswered) == (4, 0)
    assert (first.ms_Q > 0).all()
    judge.asked.clear()
    deeper = rerank(wanted, ranking, judge, answers, top_n=4, chunk=3)
    assert sorted(judge.asked) == [("q00", "c000"), ("q00", "c001"), ("q01", "c001"), ("q01", "c004")]
    assert deeper.ranking.rows_QW.tolist() == [[1, 2, 0, 4], [1, 3, 2, 4]]
    judge.asked.clear()
    answers.close()
    again = rerank(wanted, ranking, judge, AnswerStore(tmp_path / "judge.sqlite"), top_n=4, chunk=3)
    assert judge.asked == []
    np.testing.assert_array_equal(again.ranking.rows_QW, deeper.ranking.rows_QW)
    rerank(
        wanted,
        ranking,
        Fixed({}, ("ja", "nein")),
        answers=AnswerStore(tmp_path / "judge.sqlite"),
        top_n=1,
        chunk=3,
    )


class Linked:
    """A `Team` whose processes are threads of this one."""

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


def test_several_processes_share_the_pairs_and_the_first_keeps_the_scores(tmp_path):
    wanted = load_set(write_set(tmp_path / "set", num_queries=3, num_candidates=8))
    rows = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    ranking = Ranking(rows, -rows.astype(np.float32) / 8, 8)
    scores = {f"c{n:03d}": (5 * n % 8) / 10 for n in range(8)}
    alone = rerank(wanted, ranking, Fixed(scores), AnswerStore(tmp_path / "one.sqlite"), top_n=5, chunk=4)
    assert alone.num_pairs == 15

    answers = AnswerStore(tmp_path / "three.sqlite")
    before = Fixed(scores)
    rerank(wanted, ranking, before, answers, top_n=1, chunk=4)  # three pairs have a score already
    barrier, box = threading.Barrier(3, timeout=60), [None] * 3
    judges = [Fixed(scores) for _ in range(3)]
    bars = []

    class Bar:
        def __init__(self, *, total, initial, **_):
            self.count, self.total = initial, total
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, num):
            self.count += num

    def work(rank):
        kept = answers if rank == 0 else None
        team = Linked(rank, barrier, box)
        return rerank(wanted, ranking, judges[rank], kept, top_n=5, chunk=2, progress=Bar, team=team)

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
    rerank(wanted, ranking, again, answers, top_n=5, chunk=4)
    assert again.asked == []


def test_pairs_without_an_answer_go_last_or_stop_the_run(wanted, tmp_path):
    rows = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    ranking = Ranking(rows, -rows.astype(np.float32) / 8, 8)
    with pytest.raises(
        UserError, match="2 of 16 pairs were answered with neither yes nor no: name the words"
    ):
        rerank(wanted, ranking, Fixed({"c003": None}), AnswerStore(tmp_path / "a.sqlite"), top_n=8, chunk=99)
    from eval.commands import rerank as module

    assert module.MAX_UNANSWERED == 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_UNANSWERED", 0.5)
        found = rerank(
            wanted, ranking, Fixed({"c003": None}), AnswerStore(tmp_path / "a.sqlite"), top_n=8, chunk=99
        )
    assert found.ranking.rows_QW[0].tolist() == [0, 1, 2, 4, 5, 6, 7, 3]
    assert found.num_unanswered == 2


def test_a_pair_is_one_prompt_with_all_pictures_and_a_whole_question():
    query = Item("q", "What opens it?", ("a.png", "b.png"), "Find it.")
    item = as_item(query, Item("c", None, ("c.png",)), "yes", "no")
    assert item.images == ("a.png", "b.png", "c.png")
    assert item.text == (
        "Does the candidate answer the query? Answer with yes or no only.\n"
        "Pictures in this order: 2 of the query, then 1 of the candidate.\n"
        "Query: Find it. What opens it?\nCandidate: the picture."
    )
    text_only = as_item(Item("q", "a?"), Item("c", "b"), "yes", "no")
    assert text_only.text.splitlines()[1:] == ["Query: a?", "Candidate: b"]


def test_logits_are_those_of_a_plain_forward_whatever_the_batch(lively, picture):
    builder = PromptBuilder(lively.processor)
    prompts = [
        builder.build(
            Item(f"i{n}", "what opens this " * (n + 1)), "query", [picture(40 + 9 * n, 84, n)] * (n % 3)
        )
        for n in range(6)
    ]
    ids = [5, 40, 7]
    found = next_token_logits(lively, prompts, ids, batch_size=4)
    np.testing.assert_allclose(found, next_token_logits(lively, prompts, ids, batch_size=1), atol=1e-4)
    for prompt, row in zip(prompts, found, strict=True):
        pictures = {} if prompt.pixels is None else {
            "pixel_values": normalised(lively.processor.image_processor, prompt.pixels),
            "image_grid_thw": prompt.image_grid,
        }  # fmt: skip
        with torch.no_grad():
            logits = lively.model(
                input_ids=prompt.input_ids[None], mm_token_type_ids=prompt.type_ids[None], **pictures
            ).logits[0, -1, ids]
        np.testing.assert_allclose(row, logits.numpy(), atol=1e-4)


def test_a_local_judge_says_the_sigmoid_of_two_logits(lively_path, wanted):
    judge = LocalJudge(str(lively_path), yes="a", no="e", batch_size=2)
    pairs = [(wanted.queries[0], item) for item in wanted.corpus_items()]
    scores = judge.score(pairs)
    ids = [word_id(judge._embedder, word) for word in ("a", "e")]
    prompts = [judge._builder.build(as_item(*pair, "a", "e"), "query") for pair in pairs]
    logits = next_token_logits(judge._embedder, prompts, ids, batch_size=1)
    expected = torch.sigmoid(torch.from_numpy(logits[:, 0] - logits[:, 1]).double())
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
    assert len(set(scores)) == len(scores)
    with pytest.raises(UserError, match=r"'yes' is \d tokens \(.*\) and not one: choose another word"):
        LocalJudge(str(lively_path), yes="yes", no="no", batch_size=2)


def reply(*top, said="Yes"):
    listed = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in top]
    content = [{"token": said, "logprob": -0.1, "bytes": None, "top_logprobs": listed}]
    message = {"role": "assistant", "content": said}
    choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": content}}
    return Answer({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def test_an_endpoint_is_asked_for_log_probabilities(wanted):
    asked = []

    async def answer(path, body):
        asked.append(body)
        return reply((" Yes", 0.3), ("yes", 0.3), ("No", 0.2), ("maybe", 0.1))

    with LocalServer(answer) as server:
        judge = RemoteJudge(Endpoint(server.url, "judge-7b", concurrency=2), yes="yes", no="no")
        query = Item("q", "What opens it?", wanted.queries[0].images * 2, "Find it.")
        scores = judge.score([(query, item) for item in list(wanted.corpus_items())[:3]])
    assert scores == pytest.approx([0.6 / 0.8] * 3)
    body = asked[0]
    assert (body["model"], body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (
        "judge-7b",
        1,
        True,
        20,
    )
    kinds = [part["type"] for part in body["messages"][0]["content"]]
    assert kinds == ["text", "text", "image_url", "image_url", "text", "text", "text", "image_url"]
    assert body["messages"][0]["content"][2]["image_url"]["url"].startswith("data:image/")


def test_a_model_of_the_same_name_at_another_address_is_another_judge(tmp_path):
    """`judge_model=default` says nothing: the address and the server's own list of models do."""
    data = write_tables(tmp_path / "set", tables(3, 8))
    (done,) = run(
        RunOptions(checkpoint="fake", set=data, out=tmp_path / "eval", report=False), loader(FakeEncoder())
    )
    calls = []

    async def answer(path, body):
        calls.append(path)
        return reply((" Yes", 0.3), ("No", 0.2))

    def judged(server, **more):
        calls.clear()
        rerank_command(
            RerankOptions(
                of=done, out=tmp_path / "judged", judge=server.url, judge_model="default", top_n=2, **more
            )
        )
        return len(calls), json.loads((tmp_path / "judged/results.json").read_text())

    entry = {"id": "default", "root": "org/model-a", "created": 1}
    with LocalServer(answer, models=[entry]) as a, LocalServer(answer, models=[entry]) as b:
        num, first = judged(a)
        assert num == first["rerank"]["num_pairs"] == 6
        entry["created"] = 2  # of the reply, not of the model
        num, again = judged(a)
        assert (num, again["identity"]) == (0, first["identity"])
        with pytest.raises(UserError, match="already holds an evaluation with rerank.judge"):
            judged(b)
        num, second = judged(b, overwrite=True)
        assert num == 6
        assert first["identity"]["key"] != second["identity"]["key"]
        assert differences(first, second) == {"asked.judge.at": (a.url, b.url)}
        entry["root"] = "org/model-b"
        num, third = judged(b, overwrite=True)
        assert num == 6
        assert differences(second, third) == {"asked.judge.served.root": ("org/model-a", "org/model-b")}
    with pytest.raises(UserError, match=f"default at {b.url} cannot be asked which model it serves"):
        judged(b)


def test_scores_of_a_local_judge_are_kept_under_its_code_and_versions(wanted, tmp_path, monkeypatch):
    ranking = Ranking(np.arange(8, dtype=np.int32)[None].repeat(2, axis=0), np.zeros((2, 8), np.float32), 8)
    known = run_identity._version_now
    store = AnswerStore(tmp_path / "judge.sqlite")

    def asked() -> int:
        judge = Fixed({})
        rerank(wanted, ranking, judge, store, top_n=2, chunk=4)
        return len(judge.asked)

    assert (asked(), asked()) == (4, 0)
    with monkeypatch.context() as patched:
        patched.setattr(
            run_identity, "_version_now", lambda name: "another" if name == "numpy" else known(name)
        )
        assert asked() == 4
    assert asked() == 0  # the first is still there
    monkeypatch.setattr(
        run_identity, "_hash_of", lambda path, *_: "edited" if path.name == "judges.py" else path.name
    )
    assert asked() == 4
    store.close()


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ([("Yes", 0.9), ("Nope", 0.05)], 0.9 / 0.95),  # "no" is at most as likely as the least likely listed
        ([("no", 0.5), ("what", 0.25)], 0.25 / 0.75),
        ([("perhaps", 0.9)], None),
    ],
)
def test_a_word_that_is_not_listed_is_bounded(top, expected):
    async def answer(path, body):
        return reply(*top)

    with LocalServer(answer) as server:
        found = Endpoint(server.url, "m").yes_or_no([["?"]], yes="yes", no="no")[0].probability
    assert found == (None if expected is None else pytest.approx(expected))


def test_what_an_endpoint_refuses_is_asked_once_and_what_came_is_kept(tmp_path):
    """One pair is refused by a policy, one rejected for its length, and one is lost: only that one is asked for again."""
    content = tables(3, 8)
    content["queries"]["text"] = ["refused", "rejected", "lost"]
    content["corpus"]["text"] = content["corpus"]["id"]
    wanted = load_set(write_tables(tmp_path / "set", content))
    rows = np.arange(8, dtype=np.int32)[None].repeat(3, axis=0)
    ranking = Ranking(rows, -rows.astype(np.float32), 8)
    asked, down = [], [True]

    async def answer(path, body):
        asked.append(json.dumps(body))
        if "lost" in asked[-1] and down[0]:
            return Answer("over", 500)
        if "c003" in asked[-1] and "refused" in asked[-1]:
            return Answer(
                {"error": {"code": "content_filter", "message": "triggered the content filter"}}, 400
            )
        if "c005" in asked[-1] and "rejected" in asked[-1]:
            return Answer({"error": {"message": "this model's maximum context length is 5 tokens"}}, 400)
        return reply(("yes", 0.6), ("no", 0.3))

    answers = AnswerStore(tmp_path / "judge.sqlite")
    with LocalServer(answer) as server, pytest.MonkeyPatch.context() as patch:
        endpoint = Endpoint(server.url, "m", concurrency=1)
        sending = endpoint._caller._sending["m"]
        sending.model = replace(sending.model, max_retries=0)
        judge = RemoteJudge(endpoint, yes="yes", no="no")
        patch.setattr("eval.commands.rerank.MAX_UNANSWERED", 0.1)
        options = {"top_n": 8, "chunk": 24}
        with pytest.raises(
            UserError, match="8 of 24 calls of m at .* have no answer, .* the same command continues"
        ):
            rerank(wanted, ranking, judge, answers, **options)
        assert len(asked) == 24 + 1, "and a canary for the one that is rejected"
        down[0] = False
        found = rerank(wanted, ranking, judge, answers, **options)
        assert len(asked) == 33
        assert (found.num_pairs, found.num_unanswered) == (24, 2)
        rerank(wanted, ranking, judge, answers, **options)
        assert len(asked) == 33
    answers.close()


def test_an_endpoint_that_cannot_judge_is_named(monkeypatch):
    async def answer(path, body):
        if body["model"] == "wrong":
            return Answer({"error": {"message": "no such model"}}, status=404)
        if body["model"] == "locked":
            return Answer({"error": {"message": "bad key"}}, status=401)
        message = {"role": "assistant", "content": "" if body["max_tokens"] > 1 else "Yes"}
        return Answer({"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                       "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})  # fmt: skip

    with LocalServer(answer) as server:
        with pytest.raises(UserError, match="m at .* gives no log probabilities"):
            Endpoint(server.url, "m").yes_or_no([["?"]], yes="yes", no="no")
        assert Endpoint(server.url, "m").write([["?"]], max_tokens=5) == [""]
        with pytest.raises(UserError, match="wrong: no such model or address; HTTP 404.*no such model"):
            Endpoint(server.url, "wrong").write([["?"]], max_tokens=5)
        with pytest.raises(UserError, match="rejects the key"):
            Endpoint(server.url, "locked").write([["?"]], max_tokens=5)
    with pytest.raises(UserError, match=r"variable NO_SUCH_KEY \(key_env\) is not set"):
        Endpoint("http://host/v1", "m", "NO_SUCH_KEY")
    with pytest.raises(UserError, match=r"variable NO_SUCH_KEY \(key_env\) is not set"):
        load_judge(RerankOptions(Path("of"), Path("out"), "http://host/v1", "m", judge_key_env="NO_SUCH_KEY"))
    with pytest.raises(UserError, match="is an address: judge_model= names the model there"):
        load_judge(RerankOptions(Path("of"), Path("out"), "http://host/v1"))
    with pytest.raises(UserError, match="yes=No and no=no must be different words"):
        load_judge(RerankOptions(Path("of"), Path("out"), "x", yes="No"))


def test_the_command_reranks_a_finished_evaluation(tmp_path, monkeypatch):
    content = tables()
    data = write_tables(tmp_path / "set", content)
    (done,) = run(
        RunOptions(checkpoint="fake", set=data, out=tmp_path / "eval", report=False), loader(FakeEncoder())
    )
    right = set(zip(content["qrels"]["query-id"], content["qrels"]["corpus-id"], strict=True))

    class Knows(Fixed):
        def score(self, pairs):
            return [0.9 if (query.id, candidate.id) in right else 0.1 for query, candidate in pairs]

    from eval.commands import rerank as module

    monkeypatch.setattr(module, "load_judge", lambda *_, **__: Knows({}))
    options = {"of": done, "out": tmp_path / "judged", "judge": "x"}
    rerank_command(RerankOptions(**options, top_n=60))
    before, after = (json.loads((path / "results.json").read_text()) for path in (done, tmp_path / "judged"))
    assert after["micro"]["hit@1"]["value"] == 1.0 > before["micro"]["hit@1"]["value"]
    assert after["rerank"]["top_n"] == 60
    assert after["rerank"]["num_pairs"] == 24 * 60
    assert after["query_mode"] == "reasoning"
    with pytest.raises(UserError, match="already holds an evaluation with rerank.top_n = 60"):
        rerank_command(RerankOptions(**options, top_n=5))
    other = Knows({})
    other.name = other.name | {"judge": "another"}
    monkeypatch.setattr(module, "load_judge", lambda *_, **__: other)
    with pytest.raises(UserError, match="already holds an evaluation with rerank.judge = .*'another'"):
        rerank_command(RerankOptions(**options, top_n=60))
    rerank_command(RerankOptions(**options, top_n=1, overwrite=True))
    assert json.loads((tmp_path / "judged" / "results.json").read_text())["micro"] == before["micro"]
    content["qrels"]["score"][0] = 9
    write_tables(tmp_path / "set", content)
    with pytest.raises(UserError, match="is not the set that .* was measured on"):
        rerank_command(RerankOptions(**options, overwrite=True))
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="the set of .* is not at .* any more: give set=DIR"):
        rerank_command(RerankOptions(**options, overwrite=True))


def test_answers_are_kept_and_a_file_that_is_none_is_refused(tmp_path):
    keys = [key_of("a", number) for number in range(1200)]
    answers = AnswerStore(tmp_path / "x" / "a.sqlite")
    answers.put_values({key: [number, None] for number, key in enumerate(keys)})
    answers.close()
    assert AnswerStore(tmp_path / "x" / "a.sqlite").get_values([*keys, "none"]) == {
        key: [n, None] for n, key in enumerate(keys)
    }
    assert key_of("a", "b") != key_of("ab", "")
    (tmp_path / "text").write_text("no database at all, but long enough to be taken for a header " * 20)
    with pytest.raises(UserError, match="cannot be used as the file of answers"):
        AnswerStore(tmp_path / "text")


def test_a_mix_adds_to_the_ranking_and_any_scores_stay_above_the_rest():
    found = reorder(RANKING, np.array([[-40.0, -10.0, -20.0], [-5.0, -9.0, -1.0]]), 0.02)
    assert found.rows_QW.tolist() == [[2, 0, 4, 1, 3], [1, 2, 0, -1, -1]]  # .1, .6, .3 and .3, .12, .18
    np.testing.assert_allclose(found.score_QW[0, :3], [0.6, 0.3, 0.1], atol=1e-6)
    alone = reorder(RANKING, np.array([[-40.0, -10.0], [-5.0, -9.0]]))
    assert alone.rows_QW.tolist() == [[2, 4, 0, 1, 3], [1, 0, 2, -1, -1]]
    assert (np.diff(alone.score_QW[0]) < 0).all()  # what was not scored lies below -40
    assert reorder(RANKING, np.array([[-1.0, -np.inf], [0.0, 0.0]]), 0.5).rows_QW[0, 0] == 4


def test_a_likelihood_is_that_of_a_plain_forward(lively_path, wanted):
    judge = DescriptionJudge(str(lively_path), batch_size=2)
    candidates = list(wanted.corpus_items())[:2]
    texts = [Item("a", "because of a key"), Item("b", "it is so"), Item("c", "a")]
    pairs = [(text, candidate) for candidate in candidates for text in texts]
    found = judge.score(pairs)
    embedder, tokenizer = judge._embedder, judge._builder.processor.tokenizer
    for (text, candidate), value in zip(pairs, found, strict=True):
        prompt = judge._builder.build(Item("x", description.QUESTION, candidate.images), "query")
        ids = tokenizer(text.text, add_special_tokens=False).input_ids
        with torch.no_grad():
            _, logits, _ = stock_forward(embedder, [prompt], [ids], "right")
        logits[..., embedder.suppressed_ids] = -torch.inf
        expected, count = nll_of(logits, [0], [prompt], [ids])
        assert count == len(ids)
        assert value == pytest.approx(-float(expected), abs=1e-3)


def test_a_judge_describes_the_answer_once_and_keeps_it(lively_path, tmp_path, monkeypatch):
    judge = DescriptionJudge(str(lively_path), batch_size=2)
    answers = AnswerStore(tmp_path / "judge.sqlite")
    texts = [Item("a", "it is a lock"), Item("b", "it is a door"), Item("c", "it is a lock")]
    first = judge.describe([texts[0]], answers)[0].text
    prompt = judge._builder.build(Item("a", f"it is a lock\n{description.ANSWER_SHOWS}"), "query")
    (plain,) = generate(
        judge._embedder, [prompt], max_new_tokens=description.DESCRIPTION_TOKENS, batch_size=1
    )
    assert not plain.forced
    assert first == judge._builder.processor.tokenizer.decode(plain.ids).strip() != ""

    asked = []
    monkeypatch.setattr(
        "rge.rollout.generate.generate",
        lambda embedder, prompts, **_: asked.append(len(prompts)) or [replace(plain, ids=())] * len(prompts),
    )
    found = judge.describe(texts, answers)
    assert asked == [1]  # one of three was kept, and one is equal to it
    assert [(one.id, one.text) for one in found] == [("a", first), ("b", "it is a door"), ("c", first)]
    with pytest.raises(UserError, match="query .d. has neither a rationale nor a text"):
        judge.describe([Item("d", images=(b"x",))], answers)
    monkeypatch.setattr(
        "rge.rollout.generate.generate",
        lambda embedder, prompts, **_: [replace(plain, forced=True)] * len(prompts),
    )
    with pytest.raises(UserError, match="never ended with <emb>: .*eval records descriptions=FILE"):
        judge.describe([Item("e", "it is a hat")], answers)


def test_the_command_asks_for_what_the_answer_shows(tmp_path, monkeypatch):
    data = write_tables(tmp_path / "set", tables())
    (done,) = run(
        RunOptions(checkpoint="fake", set=data, out=tmp_path / "eval", report=False), loader(FakeEncoder())
    )
    asked = []

    class Describes(Fixed):
        def __init__(self, path, **_):
            super().__init__({})

        def describe(self, texts, answers):
            assert isinstance(answers, AnswerStore)
            return [Item(one.id, text=one.text.replace("because of", "a picture of")) for one in texts]

        def score(self, pairs):
            asked.extend(pairs)
            return [-float(int(candidate.id[1:])) for _, candidate in pairs]

    monkeypatch.setattr(description, "DescriptionJudge", Describes)
    options = {"of": done, "judge": "x", "ask": "description", "top_n": 3, "out": tmp_path / "out"}
    rerank_command(RerankOptions(**options, mix=0.05))
    assert {(query.id, query.text, query.images) for query, _ in asked} == {
        (f"q{n:02d}", f"a picture of q{n:02d}", ()) for n in range(24)
    }
    rerank_command(RerankOptions(**options | {"out": tmp_path / "alone"}))
    rerank_command(RerankOptions(**options | {"out": tmp_path / "nothing"}, mix=0.0))
    before, found, alone, nothing = (
        json.loads((path / "results.json").read_text())
        for path in (done, tmp_path / "out", tmp_path / "alone", tmp_path / "nothing")
    )
    assert (found["rerank"]["ask"], found["rerank"]["mix"]) == ("description", 0.05)
    assert found["rerank"]["question"] == description.QUESTION
    assert found["identity"]["asked"]["ask"] == "description"
    assert nothing["micro"] == before["micro"] != alone["micro"]
    assert nothing["identity"]["key"] != alone["identity"]["key"]
    with pytest.raises(UserError, match="rerank.mix = 0.05, this one has None"):
        rerank_command(RerankOptions(**options))
    remote = options | {"judge": "http://host/v1", "out": tmp_path / "remote"}
    with pytest.raises(UserError, match="ask=description needs a judge that runs here"):
        rerank_command(RerankOptions(**remote))


def test_records_that_teach_to_describe(tmp_path):
    folder = description.Path("data_prep/demo/data/train").resolve()
    options = description.JudgeRecordsOptions(
        src=(folder / "relations.jsonl",),
        descriptions=(folder / "naming.jsonl",),
        out=tmp_path / "a place" / "out.jsonl",
    )
    made = RecordFile(description.write_records(options), need_rationale=True)
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
    assert len(RecordFile(description.write_records(other))) > 0
    some = tmp_path / "some.jsonl"
    row = json.loads((folder / "text.jsonl").read_text().splitlines()[0])
    row["positives"][0] |= {"identity": "nobody", "image": None, "text": "words"}
    some.write_text(json.dumps(row))
    with pytest.raises(UserError, match="describes no positive of src"):
        description.write_records(replace(options, src=(some,)))
