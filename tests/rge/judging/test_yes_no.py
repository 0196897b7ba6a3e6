"""The training-free judge: its probability, its shared queries, and what an endpoint may answer instead."""

import json
import math

import pytest
import torch
from eval_fakes import picture as png
from family_models import every_family
from pdfs import GREEN, RED, page, pdf
from stock import stock_forward

from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.parts import ImagePart, PdfPart, TextPart, VideoPart, content_of
from rge.common.schema import Item
from rge.judging.scorer import SCORERS, Judge, Score
from rge.judging.yes_no import NEITHER, QUESTION, LocalYesNo, _words, joined, probability, word_ids

QUERY = Item("q", content_of("in blue", (png(1), png(2))), instruction="Find the same thing.")
CANDIDATES = [
    Item("c0", content_of(None, (png(10),))),
    Item("c1", content_of("a blue key")),
    Item("c2", content_of("a door", (png(11),))),
    Item("c3", content_of(None, (png(12), png(13)))),
]
ORDERED = (TextPart("first"), ImagePart(png(14)), TextPart("then"), ImagePart(png(15)))
PAGES = (PdfPart(pdf([page("a", RED), page("b", GREEN)])), TextPart("a manual"))
CLIP = (TextPart("It moves:"), VideoPart(tuple(png(number) for number in range(20, 24)), fps=2.0))


def in_parts(scorer):
    """Queries and candidates whose parts have an order: texts between pictures, pages and, if the judge reads them, clips."""
    kinds = [ORDERED, PAGES, *[CLIP] * scorer.model.embedder.family.reads_clips]
    found = [Item(f"p{number}", content) for number, content in enumerate(kinds)]
    return [QUERY, *found], [*CANDIDATES, *found]


@every_family
def test_scores_are_those_of_separate_prompts_and_the_query_is_computed_once(lively_path):
    judge = Judge(str(lively_path), batch_size=3)
    shared, apart = LocalYesNo(judge), LocalYesNo(judge, share=False)
    other = Item("r", content_of("to open it"))
    parts = in_parts(shared)
    pairs = [(query, candidate) for query in (parts[0][-1], other) for candidate in parts[1]]
    found = [score.value for score in shared.score(pairs)]
    assert found == pytest.approx([score.value for score in apart.score(pairs)], abs=1e-5)
    shared.counts, apart.counts = {}, {}
    pairs = [(query, candidate) for query in (QUERY, other) for candidate in CANDIDATES]
    found = [score.value for score in shared.score(pairs)]
    assert found == pytest.approx([score.value for score in apart.score(pairs)], abs=1e-5)
    assert len(set(found)) == len(pairs)
    assert shared.counts["tokens_alone"] == apart.counts["tokens"] == apart.counts["tokens_alone"]
    if shared.model.embedder.family.whole_pictures:
        return
    builder, computed = shared.model.builder, 0
    for query in (QUERY, other):
        head, rests = builder.build_pairs(
            Item("x", content_of("\n".join(filter(None, (query.instruction, query.text))), query.pictures)),
            CANDIDATES,
            wording=("Query: ", "\nCandidate:", QUESTION),
        )
        computed += len(head) - 1 + 2 + sum(map(len, rests))  # the last token opens each of two passes
    assert shared.counts["tokens"] == computed < shared.counts["tokens_alone"]


@every_family
def test_the_score_is_that_of_a_plain_forward(lively_path):
    scorer = LocalYesNo(Judge(str(lively_path)))
    embedder, builder = scorer.model.embedder, scorer.model.builder
    queries, candidates = in_parts(scorer)
    for query in queries:
        found = scorer.score([(query, candidate) for candidate in candidates])
        head, rests = builder.build_pairs(
            _words(query), candidates, wording=("Query: ", "\nCandidate:", QUESTION)
        )
        for rest, score in zip(rests, found, strict=True):
            whole = joined(head, rest)
            with torch.no_grad():
                _, logits, _ = stock_forward(embedder, [whole], [rest.input_ids[-1:].tolist()], "right")
            yes, no = (logits[0, -1, list(ids)].double().logsumexp(0) for ids in scorer.ids)
            assert score.value == pytest.approx(float(torch.sigmoid(yes - no)), abs=1e-5)


@every_family
def test_what_is_shown_stands_in_its_order(lively_path):
    """Words of the judge around each item, and none of an item's parts on the other side of another."""
    builder = LocalYesNo(Judge(str(lively_path))).model.builder
    seen = []
    builder._turn, turn = lambda content: seen.append(content) or turn(content), builder._turn
    builder.build_pairs(
        Item("q", ORDERED), [Item("c", PAGES), Item("d", ORDERED)], wording=("Q: ", "\nC:", "Same?")
    )
    picture = {"type": "image"}
    query = [text("Q: first\n"), picture, text("\nthen\n"), picture]
    assert seen[1] == [*query, text("\nC:"), picture, picture, text("\na manual\nSame?")]
    assert seen[2] == [*query, text("\nC:first\n"), picture, text("\nthen\n"), picture, text("\nSame?")]


def text(words):
    return {"type": "text", "text": words}


def test_every_casing_of_a_word_that_is_one_token_counts():
    class Tokenizer:
        known = ("yes", " Yes", "YES", "no", "No", " no")

        def __call__(self, text, add_special_tokens):
            ids = [self.known.index(text)] if text in self.known else [100 + ord(sign) for sign in text]
            return type("Encoding", (), {"input_ids": ids})

    assert word_ids(Tokenizer()) == ((0, 1, 2), (3, 4, 5))
    Tokenizer.known = ()  # of characters: the first ones are told apart
    assert word_ids(Tokenizer()) == ((100 + ord("y"),), (100 + ord("n"),))


def test_a_probability_of_the_most_probable_tokens():
    logs = {"Yes": 0.5, " yes": 0.1, "no": 0.2, "maybe": 0.05}
    top = [(word, math.log(share)) for word, share in logs.items()]
    assert probability(top) == pytest.approx(0.6 / 0.8)
    assert probability([top[0], top[3]]) == pytest.approx(0.5 / 0.55)  # no has at most what the last one has
    assert probability([top[3]]) is None
    assert probability([]) is None


def test_a_long_text_is_cut_and_counted(lively_path, monkeypatch):
    monkeypatch.setattr("rge.judging.yes_no.MAX_PROMPT_TOKENS", 200)
    scorer = LocalYesNo(Judge(str(lively_path)))
    query = Item("q", content_of("a key"))
    (long, short) = scorer.score(
        [(query, Item("a", content_of("key " * 300))), (query, Item("b", content_of("key")))]
    )
    assert scorer.counts["cut"] == 1
    assert long.value != short.value
    with pytest.raises(UserError):
        scorer.score([(Item("q", content_of("key " * 300)), Item("b", content_of("key")))])


def completion(text, top=None, stop="length"):
    answer = chat(text, stop=stop)
    if top is not None:
        listed = [{"token": token, "logprob": math.log(share)} for token, share in top.items()]
        answer.body["choices"][0]["logprobs"] = {"content": [{"token": text, "top_logprobs": listed}]}
    return answer


def test_an_endpoint_that_answers_refuses_or_answers_nonsense(tmp_path):
    asked = []

    async def respond(path, body):
        asked.append(body)
        text = json.dumps(body["messages"])
        if "blue key" in text:
            return Answer({"error": {"code": "content_filter", "message": "the content filter"}}, 400)
        if "a door" in text:
            return completion("blue", {"blue": 0.9, "red": 0.1})
        if "a hat" in text:
            return completion("yes")
        return completion("Yes", {"Yes": 0.6, "No": 0.2})

    candidates = [*CANDIDATES[:3], Item("c4", content_of("a hat")), Item("p", ORDERED), Item("v", CLIP)]
    with LocalServer(respond) as server:
        for calls in (6, 0):
            judge = Judge(
                endpoint=ModelConfig("vlm", server.url), answers=AnswerStore(tmp_path / "judge.sqlite")
            )
            scorer = SCORERS["yes_no"](judge)
            found = scorer.score([(QUERY, candidate) for candidate in candidates])
            assert found[0] == Score(pytest.approx(0.75))
            assert [score.why for score in found[1:4]] == [
                "refusal",
                NEITHER,
                "no top_logprobs in the answer",
            ]
            assert all(score.value is None for score in found[1:4])
            assert found[4:] == [found[0]] * 2
            assert scorer.counts == {"pairs": 6, "calls": calls}
            judge.answers.close()
        assert server.num_answered == 6
    sent = [[part["type"] for part in body["messages"][-1]["content"]] for body in asked]
    shown = [*["image_url"] * 2, "text"]
    assert [*shown, "text", "image_url", "text", "image_url", "text"] in sent
    assert [*shown, "text", *["image_url"] * 2, "text"] in sent  # four frames within 2 s, at one a second
    (body,) = [
        body
        for body in asked
        if sum(part["type"] == "image_url" for part in body["messages"][0]["content"]) == 3
        and "a door" not in json.dumps(body["messages"])
    ]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)
    kinds = [part["type"] for part in body["messages"][0]["content"]]
    assert kinds == ["image_url", "image_url", "text", "image_url", "text"]  # the query first


def test_calls_without_an_answer_stay_open(tmp_path):
    down = [True]

    async def respond(path, body):
        if down[0] and "a door" in json.dumps(body["messages"]):
            return Answer({"error": {"message": "overloaded"}}, 500)
        return completion("no", {"no": 0.8, "yes": 0.2})

    with LocalServer(respond) as server:
        judge = Judge(
            endpoint=ModelConfig("vlm", server.url, max_retries=0),
            answers=AnswerStore(tmp_path / "judge.sqlite"),
        )
        pairs = [(QUERY, candidate) for candidate in CANDIDATES]
        with pytest.raises(UserError):
            SCORERS["yes_no"](judge).score(pairs)
        num = server.num_answered
        down[0] = False
        assert [score.value for score in SCORERS["yes_no"](judge).score(pairs)] == pytest.approx([0.2] * 4)
        assert server.num_answered == num + 1


def test_sequences_without_padding_give_the_same_scores(lively_path):
    padded, flat = (LocalYesNo(Judge(str(lively_path), batch_size=3)) for _ in range(2))
    flat.model.embedder.attention = "varlen"
    pairs = [(QUERY, candidate) for candidate in CANDIDATES]
    found = [[score.value for score in scorer.score(pairs)] for scorer in (padded, flat)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
