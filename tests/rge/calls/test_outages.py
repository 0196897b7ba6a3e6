"""An unanswered call is never an answer: outages, accounts without credit, requests that are too large, and budgets that learn."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

import pytest
from faults import error_about
from PIL import Image

from rge.calls.caller import Caller
from rge.calls.failures import (
    AttemptFailed,
    BudgetReached,
    StopCalls,
    classify,
    effective_status,
    failure,
    parse_seconds,
)
from rge.calls.keys import Mask
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.prices import confirm, fill_prices
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import MissingTag, Refused, Reply, check_complete, read_replies, tag
from rge.common.errors import UserError

CANARY = "Answer with the word ok."


@pytest.fixture
def store(tmp_path):
    made = AnswerStore(tmp_path / "replies.sqlite")
    yield made
    made.close()


class Server:
    """Answers what `says` makes of a prompt and the number of the call; None is a chat."""

    def __init__(self, says=lambda text, number: None, delay_s: float = 0.0):
        self.says, self.delay_s, self.seen, self.num = says, delay_s, Counter(), 0

    async def __call__(self, path, body):
        text = body["messages"][-1]["content"][0]["text"]
        self.seen[text] += 1
        self.num += 1
        answer = self.says(text, self.num)
        if answer is None:
            await asyncio.sleep(self.delay_s)
        return answer or chat(f"you said {text}")


def model(server: LocalServer, **settings) -> dict[str, ModelConfig]:
    quick = {"backoff_s": 0.01, "max_retries": 1, "concurrency": 4}
    return {"m": ModelConfig(**{"name": "m", "base_url": server.url, **quick, **settings})}


def asks(number: int, **settings) -> list[Request]:
    return [Request("m", (str(one),), **settings) for one in range(number)]


# --------------------------------------------------------------------------------------- what an error of a provider means

DOCUMENTED = [
    (402, {"error": {"message": "Payment required"}}, "account"),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low to access"}}, "account"),
    (429, {"error": {"type": "insufficient_quota", "code": "credit_balance_exhausted", "message": "no"}}, "account"),
    (429, {"error": {"type": "requests", "code": "rate_limit_exceeded", "message": "slow"}}, "overload"),
    (400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}], "message": "x"}}, "account"),
    (404, {"error": {"code": "model_not_found", "message": "no"}}, "account"),
    (413, {"error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}}, "request"),
    (413, None, "request"),
    (400, {"error": {"code": "context_length_exceeded", "type": "invalid_request_error", "message": "x"}}, "request"),
    (400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "Request payload size exceeds the limit"}}, "unknown"),
    (400, {"error": {"message": "Could not process image"}}, "unknown"),
    (400, {"error": {"code": "content_filter", "message": "x"}}, "policy"),
    (400, {"error": {"code": None, "innererror": {"code": "ResponsibleAIPolicyViolation"}, "message": "no"}}, "policy"),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"}}, "policy"),
    (403, {"error": {"code": 403, "message": "flagged", "metadata": {"flagged_input": "x", "reasons": []}}}, "policy"),
    (400, {"error": {"message": "unknown field 'moderation'"}}, "unknown"),
    (403, {"error": {"message": "The moderation endpoint needs another key"}}, "account"),
    (503, {"error": {"status": "UNAVAILABLE", "message": "busy"}}, "overload"),
    (529, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, "overload"),
    (200, {"error": {"message": "upstream"}}, "overload"),
    (429, {"error": {"type": "tokens", "code": "rate_limit_exceeded", "message": "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 31538."}}, "request"),
    (429, {"error": {"type": "tokens", "code": "rate_limit_exceeded", "message": "Rate limit reached on tokens per min (TPM): Limit 30,000, Used 29,000, Requested 1,500. Try again in 1s"}}, "overload"),
    (429, {"error": {"type": "tokens", "code": "rate_limit_exceeded", "message": "On tokens per min: Limit: 30,000, Requested: 1,500"}}, "overload"),
    (413, {"error": {"type": "tokens", "code": "rate_limit_exceeded", "message": "Request too large, please reduce your message size"}}, "request"),
    (413, {"error": {"code": "insufficient_quota", "message": "x"}}, "account"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "means"), DOCUMENTED, ids=[f"{row[0]}-{n}" for n, row in enumerate(DOCUMENTED)]
)
def test_errors_by_code_then_status_then_words(status, body, means):
    assert classify(status, body) == means


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"code": 429, "message": "slow"}}, 429),
        ({"error": {"code": "402", "message": "pay"}}, 402),
        ({"error": {"code": "rate_limit_exceeded", "message": "slow"}}, 429),
        ({"error": {"status": "RESOURCE_EXHAUSTED", "message": "slow"}}, 429),
        ({"object": "error", "message": "slow", "type": "Overloaded", "code": 503}, 503),
        ([{"error": {"code": 401, "message": "no"}}], 401),
        ({"choices": [{"error": {"code": 502}, "message": {"content": "half"}}]}, 502),
        ({"error": "Unexpected endpoint or method. (POST /chat/completions). Returning 200 anyway"}, 404),
        ({"error": {"code": 1302, "message": "another numbering"}}, 200),
        ({"error": "upstream"}, 200),
    ],
)
def test_an_error_inside_a_200_has_the_status_of_its_code(body, status):
    assert effective_status(200, body) == status
    assert effective_status(503, body) == 503, "a status that is one stays"


BROKEN_OFF = {
    "error after a long id": {"id": f"gen-{'a' * 300}", "error": {"code": 502, "message": "upstream"}},
    "error beside choices": {**chat("").body, "error": {"code": 502, "message": "upstream"}},
    "error that is no object": {"error": True, "message": "upstream"},
    "error of a choice": {"choices": [{"error": {"code": 502}, "message": {"content": "half of"}}]},
    **{
        reason: chat("half of", stop=reason).body
        for reason in ("error", "abort", "insufficient_system_resource")
    },
}


@pytest.mark.parametrize("mode", ["calls", "batch"])
@pytest.mark.parametrize("body", BROKEN_OFF.values(), ids=BROKEN_OFF)
def test_an_answer_that_the_server_broke_off_is_none_although_its_status_is_200(store, body, mode):
    """Providers that fail while they write can no longer change the status; stored, it would be a verdict for ever."""
    server = Server(lambda text, number: Answer(body))
    with LocalServer(server) as at:
        models = model(at, mode=mode, batch_poll_s=0.01, output_price=1)
        (found,) = Caller(models, store).run(asks(1))
        assert found.unanswered
        assert store.num_replies() == 0
        server.says = lambda text, number: None
        assert Caller(models, store).run(asks(1))[0].reply.text == "you said 0"


def empty(choices: list, **message) -> Answer:
    """A chat completion without content, which costs 7 for its output."""
    answer = chat("", output_tokens=7)
    if message:
        answer.body["choices"][0]["message"] = {"role": "assistant", "content": None, **message}
    else:
        answer.body["choices"] = choices
    return answer


NO_CONTENT = {
    "null": empty([], refusal=None),
    "reasoning": empty([], reasoning_content="Let me think."),
    "tool calls": empty([], tool_calls=[{"type": "function", "function": {"name": "look"}}]),
    "thoughts": chat("<think>Let me think.</think>", output_tokens=7),
    "blank": chat(" \n", output_tokens=7),
    "no choices": empty([]),
    "no message": empty([{"index": 0, "finish_reason": "stop"}]),
}


@pytest.mark.parametrize("mode", ["calls", "batch"])
@pytest.mark.parametrize("answer", NO_CONTENT.values(), ids=NO_CONTENT)
def test_an_answer_without_content_is_paid_and_asked_for_again(store, answer, mode):
    """Stored as an answer, it would be an empty text or a lost verdict for ever."""
    server = Server(lambda text, number: answer)
    with LocalServer(server) as at:
        models = model(at, mode=mode, batch_poll_s=0.01, batch_price=1, output_price=1e6, reasks=1)
        caller = Caller(models, store)
        (found,) = caller.run(asks(1))
        assert found.unanswered
        assert (server.num, caller.counts.unanswered) == (2 + (mode == "batch"), 1)
        assert store.num_replies() == 0
        assert store.spent(None) == server.num * 7, "as billed, not as feared"
        server.says = lambda text, number: None
        assert Caller(models, store).run(asks(1))[0].reply.text == "you said 0"


def test_an_empty_answer_that_an_earlier_version_stored_is_open(store):
    server = Server()
    with LocalServer(server) as at:
        (first,) = Caller(model(at), store).run(asks(1))
        body = json.dumps(NO_CONTENT["null"].body).encode()
        store._db.execute(
            "INSERT OR REPLACE INTO replies SELECT key, model, ?, 0, 0, 0, 0, at FROM replies", (body,)
        )
        assert Caller(model(at), store).run(asks(1))[0].reply == first.reply
        (again,) = Caller(model(at), store).run(asks(1))
    assert again.cached
    assert server.num == 2


def test_an_endpoint_that_gives_no_content_is_given_up(store):
    server = Server(lambda text, number: None if number <= 3 else NO_CONTENT["reasoning"])
    with LocalServer(server) as at, error_about(StopCalls, "unanswered"):
        Caller(model(at), store).run(asks(100))
    assert server.num < 100


def test_reasoning_that_never_ends_is_no_answer(store):
    """It is asked with more room; without an answer in the end, another run begins at the first request."""
    cut = chat("", stop="length")
    server = Server(lambda text, number: cut)

    def read(reply):
        check_complete(reply, "x")

    with LocalServer(server) as at:
        for num in (3, 6):
            (found,) = Caller(model(at), store).run(asks(1, max_tokens=10), read=read)
            assert found.unanswered
            assert server.num == num
        server.says = lambda text, number: chat("<x>y</x>") if number == 8 else cut
        for _ in range(2):
            (found,) = Caller(model(at), store).run(asks(1, max_tokens=10), read=read)
            assert found.reply.text == "<x>y</x>"
            assert server.num == 8, "from the store, the first request that was cut off leads to the second"
        server.says = lambda text, number: None
        (found,) = Caller(model(at, reasks=0), store).run(asks(1, max_tokens=10))
    assert found.reply.text == "you said 0", "where it may not be asked with more room, it is open as well"


def test_a_sample_without_content_is_asked_for_by_itself(store):
    """Others of its call have content, and are kept."""

    async def several(path, body):
        answer, seed = chat(""), body["seed"]
        texts = [
            str(seed + number) if body.get("n") != 3 or number != 1 else None
            for number in range(body.get("n", 1))
        ]
        answer.body["choices"] = [{"message": {"content": text}, "finish_reason": "stop"} for text in texts]
        return answer

    requests = [Request("m", ("a",), sample=sample) for sample in range(3)]
    with LocalServer(several) as at:
        caller = Caller(model(at, draws_a_call=3), store)
        assert [one.reply.text for one in caller.run(requests)] == ["0", "1", "2"]
        assert caller.counts.asked == 2
        again = Caller(model(at, draws_a_call=3), store).run(requests)
    assert all(one.cached for one in again)


def test_a_limit_inside_a_200_is_waited_for_and_not_billed(store):
    """Of 40 calls, the seventh to the thirtieth; with a budget that a lost attempt at its highest cost would use up."""
    slow = Answer({"error": {"code": 429, "message": "slow down"}})
    server = Server(lambda text, number: slow if 6 < number <= 30 else None)
    with LocalServer(server) as at:
        caller = Caller(model(at, output_price=1e3, budget=0.9, max_backoff_s=0.05), store)
        assert all(one.reply for one in caller.run(asks(40, max_tokens=20)))
    assert caller.counts.limited == 24
    assert store.spent(None) == pytest.approx(0.8)


PAGE = Answer("<html>Welcome</html>", content_type="text/html")
LM_STUDIO = Answer({"error": "Unexpected endpoint or method. (POST /chat/completions). Returning 200 anyway"})


@pytest.mark.parametrize("answer", [PAGE, LM_STUDIO, Answer("Ollama is running"), Answer({"status": "ok"})])
def test_a_wrong_address_that_answers_200_stops_and_costs_nothing(store, answer):
    with LocalServer(Server(lambda text, number: answer)) as at:
        with error_about(StopCalls, "address"):
            Caller(model(at, output_price=1e6, budget=1e9), store).run(asks(40))
    assert store.spent(None) == 0


def test_a_request_that_is_over_the_limit_of_a_minute_is_rejected(store):
    """No wait helps it; as a limit, it held up every other call of the endpoint, and then its file."""
    words = "Request too large for m on tokens per min (TPM): Limit 30000, Requested 31538."
    no = Answer({"error": {"message": words, "type": "tokens", "code": "rate_limit_exceeded"}}, 429)
    server = Server(lambda text, number: no if text == "5" else None)
    with LocalServer(server) as at:
        caller = Caller(model(at), store)
        found = caller.run(asks(20))
    assert [one.rejected for one in found] == [number == 5 for number in range(20)]
    assert (server.seen["5"], caller.counts.limited) == (1, 0)


def test_an_answer_of_two_megabytes_is_asked_for_again(store):
    """A server that ignores `max_tokens`; it may have the tags that its reader looks for."""
    server = Server(lambda text, number: chat("<x>y</x>" + "z" * 2_000_000) if number == 1 else None)
    with LocalServer(server) as at:
        (found,) = Caller(model(at), store).run(asks(1))
    assert (found.reply.text, server.num) == ("you said 0", 2)


def test_a_message_that_mentions_moderation_is_no_refusal(store):
    """It would be kept for ever; an unknown 400 whose canary passes is a rejection of this one request."""
    no = Answer({"error": {"message": "field 'moderation' must be a string"}}, 400)
    with LocalServer(Server(lambda text, number: no if text == "0" else None)) as at:
        first, second = Caller(model(at), store).run(asks(2))
    assert first.rejected
    assert not isinstance(first.error, Refused)
    assert second.reply is not None
    assert store.num_replies() == 2, "the second, and the canary"


# -------------------------------------------------------------------------------------------------------------- accounts


@pytest.mark.parametrize(
    "no",
    [
        Answer({"error": {"type": "invalid_request_error", "message": "Your credit balance is too low to access the API"}}, 400),
        Answer({"error": {"message": "Payment required"}}, 402),
        Answer({"error": {"type": "insufficient_quota", "message": "You exceeded your current quota"}}, 429),
        Answer({"error": {"message": "no such key"}}, 401),
    ],
    ids=["credit-400", "402", "quota-429", "key-401"],
)  # fmt: skip
def test_an_account_without_credit_stops_costs_nothing_and_keeps_what_was_answered(store, no):
    """From call 6 on; the other three that are under way then are answered, kept and in the ledger."""
    server = Server(lambda text, number: no if number > 6 else None, delay_s=0.05)
    with LocalServer(server) as at:
        models = model(at, input_price=1, output_price=1)
        with error_about(StopCalls, "key" if no.status == 401 else "credit", no.status):
            Caller(models, store).run(asks(100))
        assert server.num <= 6 + 4
        assert store.num_replies() == store.ledger()[0].calls == 6
        assert store.spent(models["m"].endpoint) == pytest.approx(6 * 120e-6), (
            "nothing is held for the others"
        )
        server.says = lambda text, number: None
        found = Caller(models, store).run(asks(100))
    assert all(one.reply for one in found)
    assert sum(one.cached for one in found) == 6


# -------------------------------------------------------------------------------------------- one request that is too large


@pytest.mark.parametrize(
    ("status", "words"),
    [(413, "Payload Too Large"), (400, "Request payload size exceeds the limit: 20971520 bytes.")],
)
@pytest.mark.parametrize("which", [0, 5])
def test_one_request_that_is_too_large_is_settled_wherever_it_comes(store, status, words, which):
    """First of all, or later; the others are answered, and a further run neither sends it nor fails."""
    no = Answer({"error": {"message": words}}, status)
    server = Server(lambda text, number: no if text == str(which) else None)
    with LocalServer(server) as at:
        found = Caller(model(at, concurrency=1), store).run(asks(20))
        assert [one.rejected for one in found] == [number == which for number in range(20)]
        again = Caller(model(at), store).run(asks(20))
    assert all(one.cached for one in again)
    assert again[which].rejected
    assert words in str(again[which].error)
    assert server.seen[str(which)] == 1
    assert server.seen[CANARY] == (status == 400)


def test_records_of_rejections_do_not_stop_a_restart(store):
    """Five that are too large come first, and the process is killed after each: the sixth start answers the rest."""
    no = Answer({"error": {"message": "too large"}}, 413)
    server = Server(lambda text, number: no if int(text) < 5 else None)
    with LocalServer(server) as at:
        for number in range(1, 6):
            found = Caller(model(at), AnswerStore(store.path)).run(asks(number))
            assert all(one.rejected for one in found)
        found = Caller(model(at), store).run(asks(10))
    assert [one.rejected for one in found] == [True] * 5 + [False] * 5
    assert set(server.seen.values()) == {1}


def test_a_canary_that_gets_no_answer_leaves_the_call_open(store):
    def says(text, number):
        return (
            Answer({}, 503)
            if text == CANARY
            else Answer({"error": {"message": "odd"}}, 400)
            if text == "0"
            else None
        )

    server = Server(says)
    with LocalServer(server) as at:
        first, second = Caller(model(at, concurrency=1), store).run(asks(2))
        assert first.unanswered
        assert second.reply is not None
        server.says = lambda text, number: None
        assert Caller(model(at), store).run(asks(2))[0].reply is not None


@pytest.mark.parametrize("mode", ["calls", "batch"])
def test_a_picture_that_cannot_be_opened_leaves_its_call_open(store, tmp_path, mode):
    """A disk that is not mounted says nothing about the picture; once it is, the same command asks."""
    path, elsewhere = tmp_path / "a.png", tmp_path / "elsewhere.png"
    Image.new("RGB", (40, 40)).save(elsewhere)
    picture = Picture(str(path), hashlib.sha256(elsewhere.read_bytes()).hexdigest())
    with LocalServer(Server()) as at:
        models = model(at, mode=mode, batch_poll_s=0.01)
        requests = [*(Request("m", (str(one), picture)) for one in range(30)), *asks(1)]
        *gone, other = Caller(models, store).run(requests)
        assert {(one.unanswered, Path(one.error.why.file).name) for one in gone} == {(True, "a.png")}
        assert other.reply is not None, "however many there are, it is no fault of the endpoint"
        elsewhere.rename(path)
        assert all(one.reply for one in Caller(models, store).run(requests))


def test_a_canary_shows_as_many_pictures(store, tmp_path):
    """A model that takes no pictures, or only one, rejects it as well: that is a setting, and no request's fault."""
    paths, shown = [str(tmp_path / name) for name in ("a.png", "b.png")], []
    for number, path in enumerate(paths):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(path)

    async def at_most_one(path, body):
        pictures = sum(part["type"] == "image_url" for part in body["messages"][-1]["content"])
        shown.append(pictures)
        return (
            Answer({"error": {"message": "At most 1 image(s) may be provided"}}, 400)
            if pictures > 1
            else chat("fine")
        )

    pictures = [Picture(path, hashlib.sha256(Path(path).read_bytes()).hexdigest()) for path in paths]
    with LocalServer(at_most_one) as at, error_about(StopCalls, "settings", 400):
        Caller(model(at), store).run([Request("m", ("a", *pictures))])
    assert shown == [2, 2]


# --------------------------------------------------------------------------------------------------------------- overload


def test_times_of_http_are_read():
    assert parse_seconds(formatdate(time.time() + 90, usegmt=True)) == pytest.approx(90, abs=2)
    assert parse_seconds(formatdate(time.time() - 90, usegmt=True)) == 0
    assert parse_seconds("Mon, 99 Foo 2026") is None


@pytest.mark.parametrize("retry_after", ["0", formatdate(0, usegmt=True)])
def test_a_wait_of_nothing_is_no_reason_to_call_without_a_pause(retry_after):
    delay = {"retryDelay": "7s"}
    body = json.dumps({"error": {"details": [{"reason": "RATE_LIMIT_EXCEEDED"}, delay]}}).encode()
    headers = {"retry-after": retry_after}
    for content, wait_s in ((b"{}", None), (body, 7)):
        found = failure(429, content, headers, ModelConfig(name="m"), Mask([]))
        assert isinstance(found, AttemptFailed)
        assert (found.limited, found.wait_s) == (True, wait_s)


@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_is_too_long_is_an_error_at_once(store, status):
    with LocalServer(Server(lambda text, number: Answer({}, status, headers={"retry-after": "3600"}))) as at:
        began = time.monotonic()
        with error_about(StopCalls, "limited", status):
            Caller(model(at), store).run(asks(3))
    assert time.monotonic() - began < 10


def test_a_dead_endpoint_leaves_its_calls_open_however_often(store):
    """Answers of before count for nothing: in the fourth run as in the first they are unanswered, and asked again."""
    server = Server(lambda text, number: Answer({}, 503) if int(text) >= 10 else None)
    with LocalServer(server) as at:
        for _ in range(4):
            found = Caller(model(at), store).run(asks(18))
            assert [one.unanswered for one in found] == [number >= 10 for number in range(18)]
        server.says = lambda text, number: None
        found = Caller(model(at), store).run(asks(18))
    assert all(one.reply for one in found)


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "text",
    ["I’m sorry, but I can’t help.", "I can’t do that.", "I apologize, but no.", "I'm not able to say.", "I am not able to."],
)  # fmt: skip
def test_refusals_are_read_however_they_are_typed(text):
    with pytest.raises(Refused):
        check_complete(Reply(text, "stop"), "x")


# ---------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "said",
    [
        '```json\n{"verdict": "yes", "why": "it is"}\n```',
        'Here it is:\n```\n{"verdict": "yes", "why": "it is"}\n```\nAnything else?',
        '{"verdict": "yes", "why": "it is",}',
        '{"verdict": "yes", "why": "it is" and "so" }',
        "{'verdict': 'yes', 'why': 'it is'}",
    ],
)
def test_fenced_or_slightly_broken_json_is_read(said):
    reply = read_replies(json.dumps(chat(said).body).encode())[0]
    assert tag(reply.text, "verdict") == "yes"


@pytest.mark.parametrize(
    "said", ['{"a":' * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_a_model_that_opens_brackets_without_end_is_no_traceback(said):
    reply = read_replies(json.dumps(chat(said).body).encode())[0]
    with pytest.raises(MissingTag):
        tag(reply.text, "verdict")


def test_half_an_object_is_not_made_whole():
    import json

    raw = json.dumps(chat('{"verdict": "yes", "why": "it i', stop="length").body).encode()
    assert read_replies(raw)[0].text.startswith("{")


# ---------------------------------------------------------------------------------------------------------------- budgets


def test_a_budget_learns_from_bills(store):
    """Calls cost 17 times the estimate: without learning 32 would be under way at once, and 5 times the budget spent."""

    async def expensive(path, body):
        await asyncio.sleep(0.01)
        return chat("fine", input_tokens=1700, output_tokens=1)

    with LocalServer(expensive) as at:
        models = model(
            at, input_price=1e3, concurrency=32, budget=20
        )  # 100 tokens, as estimated: 0.1; 1,700: 1.7
        with error_about(BudgetReached, "budget"):
            Caller(models, store).run([Request("m", (f"{number:>300}",)) for number in range(60)])
    (spent,) = store.ledger()
    assert (spent.calls, spent.cost) == (11, pytest.approx(18.7))
    learnt = store.billing_stats(models["m"].endpoint, pictures=False)
    assert (learnt.calls, learnt.mean_input, learnt.max_input) == (11, pytest.approx(17), pytest.approx(17))


def test_a_budget_of_the_command_is_one_for_all_models(store):
    server = Server()
    with LocalServer(server) as at:
        both = {name: ModelConfig(name=name, base_url=at.url, output_price=1e6) for name in ("m", "n")}
        requests = [Request(name, (str(number),), max_tokens=20) for number in range(20) for name in both]
        with error_about(BudgetReached, "budget"):
            Caller(both, store, budget=200).run(requests)
    assert store.spent(None) == 200
    assert server.num == 10


def test_what_one_model_may_still_spend_is_waited_for_by_the_others(store):
    """A call costs 20 and might cost 100: at first nearly all of 500 is set aside for one model's calls in flight."""
    with LocalServer(Server(delay_s=0.02)) as at:
        both = {
            name: ModelConfig(name=name, base_url=at.url, output_price=1e6, concurrency=8)
            for name in ("m", "n")
        }
        requests = [Request(name, (str(number),), max_tokens=100) for number in range(9) for name in both]
        assert len(Caller(both, store, budget=500).run(requests)) == 18
    assert store.spent(None) == 360


def test_prices_come_from_a_table_where_none_are_given(tmp_path, monkeypatch):
    """The shipped one for providers' own addresses only; one's own for all; a model's own settings come first."""
    known, mine = "claude-haiku-4-5", tmp_path / "prices.yaml"
    mine.write_text(
        f"{known}: {{input_price: 7, output_price: 8}}\nlocal: {{input_price: 1, output_price: 2, batch_price: 0.4}}\n"
    )
    models = {
        "known": ModelConfig(name=known, base_url="https://api.anthropic.com/v1/"),
        "served": ModelConfig(name=known, base_url="http://host/v1"),
        "own": ModelConfig(name=known, input_price=0.5),
        "cached": ModelConfig(name=known, cached_price=0.02),
        "local": ModelConfig(name="local", base_url="http://host/v1"),
    }
    shipped, given = fill_prices(models), fill_prices(models, mine)
    assert (shipped["known"].input_price, shipped["known"].output_price) == (1, 5)
    assert shipped["served"].cost(10**6, 10**6) == shipped["local"].cost(10**6, 10**6) == 0
    assert shipped["own"].input_price == given["own"].input_price == 0.5
    assert (shipped["cached"].input_price, shipped["cached"].cached_price) == (1, 0.02)
    assert given["served"].cost(10**6, 10**6) == 15
    assert given["local"].cost(10**6, 0, batch=True) == 0.4
    assert given["served"].cost(10**6, 0, batch=True) == 3.5
    for row in ("input: 7", "input_price: -1, output_price: 2", "input_price: 1, output_price: .nan"):
        mine.write_text(f"{known}: {{{row}}}\n")
        with pytest.raises(UserError):
            fill_prices(models, mine)


@pytest.mark.parametrize("typed", ["no\n", "\n", ""], ids=["no", "return", "ctrl-d"])
def test_one_is_asked_only_on_a_terminal(monkeypatch, capsys, typed):
    confirm("about 5", yes=False)  # standard input is no terminal here
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    confirm("about 6", yes=True)
    assert capsys.readouterr().err == "about 5\nabout 6\n"
    monkeypatch.setattr("sys.stdin.readline", lambda: typed)
    with error_about(UserError, "cancelled"):
        confirm("about 7", yes=False)
