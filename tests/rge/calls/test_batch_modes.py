"""The batch mode, against a server on this machine that speaks OpenAI's protocol, badly too."""

import asyncio
import json
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from faults import error_about
from forked import Program

from rge.calls import batches, grouping
from rge.calls.caller import Caller
from rge.calls.failures import BudgetReached, StopCalls
from rge.calls.local_server import Answer, Batches, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.request import Request
from rge.calls.store import AnswerStore, BatchRow
from rge.calls.wire.replies import MissingTag, Refused, tag
from rge.common.files import InUseError, held

KEY = "sk-batch-0123456789"


class OpenAI(LocalServer):
    """A local server that requires a key, with faults of a provider's batch API."""

    filtered = ({"error": {"code": "content_filter", "message": "filtered"}}, 400)
    cannot = ({"error": {"message": "Could not process image"}}, 400)
    busy = ({"error": {"message": "busy"}}, 503)

    def __init__(self):
        super().__init__(self.chat)
        self.batches.polls = 2
        self.batches.poll = self.poll
        self.faults: dict[str, list] = {}
        self.asked, self.by_calls, self.created, self.results = [], [], 0, 0
        self.ids = self.cut = None
        self.expires = 0
        self.special = {}

    async def chat(self, path, body):
        text = body["messages"][-1]["content"][0]["text"]
        self.asked.append(text)
        return Answer(*self.special[text]) if text in self.special else chat(f"<x>{text}</x>")

    def fault(self, what):
        return self.faults[what].pop(0) if self.faults.get(what) else None

    async def respond(self, method, path, data):
        if self.headers.get("authorization") != f"Bearer {KEY}":
            return Answer({"error": {"message": "who are you?"}}, 401)
        place = path.partition("?")[0]
        if method == "POST" and place == "/v1/batches":
            if (fault := self.fault("create before")) is not None:
                return fault
            self.created += 1
        if place == "/v1/chat/completions":
            self.by_calls.append(json.loads(data)["messages"][-1]["content"][0]["text"])
        if method == "GET" and place == "/v1/batches" and (fault := self.fault("list")):
            return fault
        if place.startswith("/v1/batches/") and (fault := self.fault("look")):
            return fault
        if place.endswith("/content") and (fault := self.fault("results")):
            return fault
        answer = await super().respond(method, path, data)
        if method == "POST" and place == "/v1/batches" and (fault := self.fault("create after")):
            return fault
        if place.endswith("/content"):
            self.results += 1
            answer.body = self.spoilt(answer.body)
        return answer

    def spoilt(self, lines: bytes) -> bytes:
        if self.ids:
            lines = lines.replace(b"rge-", self.ids)
        return lines[: -self.cut] if self.cut and self.results == 1 else lines

    async def poll(self, name):
        shown = await Batches.poll(self.batches, name)
        if self.expires and shown["status"] == "completed":
            # The last of its calls were not made in time.
            shown["status"] = "expired"
            rows = self.batches.files[shown["output_file_id"]].splitlines(keepends=True)
            self.batches.files[shown["output_file_id"]] = b"".join(rows[: -self.expires])
            shown["error_file_id"] = f"{name}-expired"
            self.batches.files[shown["error_file_id"]] = b"".join(
                json.dumps(
                    {
                        "custom_id": json.loads(row)["custom_id"],
                        "response": None,
                        "error": {"code": "batch_expired", "message": "not in time"},
                    }
                ).encode()
                + b"\n"
                for row in rows[-self.expires :]
            )
        return shown


@contextmanager
def openai_server(monkeypatch, provider=None):
    monkeypatch.setenv("A_KEY", KEY)
    provider = provider or OpenAI()
    with provider:
        yield provider


@pytest.fixture
def provider(monkeypatch):
    with openai_server(monkeypatch) as made:
        yield made


@pytest.fixture
def store(tmp_path):
    made = AnswerStore(tmp_path / "replies.sqlite")
    yield made
    made.close()


def model(provider, **settings) -> dict[str, ModelConfig]:
    fixed = {
        "name": "m",
        "base_url": provider.url,
        "key_env": "A_KEY",
        "mode": "batch",
    }
    quick = {"backoff_s": 0.01, "batch_poll_s": 0.02, "input_price": 1e4, "output_price": 1e6}
    return {"m": ModelConfig(**{**fixed, **quick, **settings})}


def ask(*texts: str, **settings) -> list[Request]:
    return [Request("m", (text,), **settings) for text in texts]


def read(reply):
    return tag(reply.text, "x")


TEXTS = [f"question {number}" for number in range(6)]
PRICE = 0.5 * (100 * 1e4 + 20 * 1e6) / 1e6
"""Of an answer by a batch: 10.5; by a call it is 21."""


def asked_twice(provider) -> list[str]:
    return sorted({text for text in provider.asked if provider.asked.count(text) > 1})


def test_a_batch_answers_as_calls_do_at_half_the_price(provider, store):
    caller = Caller(model(provider), store)
    found = caller.run(ask(*TEXTS), read=read)
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, provider.by_calls) == (1, [])
    assert caller.counts.asked == 6
    with sqlite3.connect(store.path) as file:
        assert {seconds for (seconds,) in file.execute("SELECT seconds FROM replies")} == {0}
    (spent,) = store.ledger()
    assert (spent.calls, spent.batch_calls, spent.input_tokens, spent.output_tokens) == (6, 6, 600, 120)
    assert spent.cost == pytest.approx(6 * PRICE)
    assert spent.lost_calls == 0
    # The same key as by calls: neither way asks again what the other has answered.
    again = Caller(model(provider, mode="calls"), store).run(ask(*TEXTS))
    assert all(one.cached for one in again)
    assert [one.key for one in again] == [one.key for one in found]


def test_what_fails_in_a_batch_is_asked_by_calls(provider, store):
    provider.special = {TEXTS[1]: provider.busy, TEXTS[2]: provider.filtered, TEXTS[3]: provider.cannot}
    caller = Caller(model(provider), store)

    class Mended(dict):
        def __contains__(self, text):  # what was busy is not when it is asked by itself
            return dict.__contains__(self, text) and not (text == TEXTS[1] and provider.by_calls)

    provider.special = Mended(provider.special)
    found = caller.run(ask(*TEXTS), read=read)
    assert [read(found[place].reply) for place in (0, 1, 4, 5)] == [TEXTS[place] for place in (0, 1, 4, 5)]
    assert isinstance(found[2].error, Refused)
    assert found[3].rejected
    assert sorted(provider.by_calls) == ["Answer with the word ok.", TEXTS[1], TEXTS[3]]
    (spent,) = store.ledger()
    assert (spent.calls, spent.batch_calls, spent.lost_calls) == (6, 4, 0)
    assert spent.cost == pytest.approx(3 * PRICE + 4 * PRICE), (
        "one and a canary by calls, three by the batch, the filtered one for nothing"
    )


def test_what_cannot_be_read_is_asked_again_by_calls(provider, store):
    provider.special = {}
    answers = {TEXTS[0]: "no tag"}

    def picky(reply):
        if reply.text == f"<x>{TEXTS[0]}</x>" and answers.pop(TEXTS[0], None):
            raise MissingTag("no")

    caller = Caller(model(provider), store)
    caller.run(ask(*TEXTS), read=picky)
    assert (caller.counts.reasked, caller.counts.asked, store.ledger()[0].batch_calls) == (1, 7, 6)
    assert provider.by_calls == [TEXTS[0]]


def test_an_expired_batch_is_not_finished_at_the_whole_price(provider, store):
    """The maximum that the user confirmed was that of batches."""
    provider.expires = 2
    seen = {}
    with error_about(StopCalls, "expired"):
        Caller(model(provider), store).run(ask(*TEXTS), seen.__setitem__)
    assert sorted(seen) == [0, 1, 2, 3], "what was answered is kept and handed over"
    provider.expires = 0
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, provider.by_calls, asked_twice(provider)) == (2, [], TEXTS[-2:])
    (spent,) = store.ledger()
    assert (spent.calls, spent.batch_calls, spent.lost_calls) == (6, 6, 0)
    assert spent.cost == pytest.approx(6 * PRICE)


@pytest.mark.parametrize(
    "fault", [Answer({"error": {"message": "oops"}}, 500), Answer("", 0)], ids=["500", "lost"]
)
def test_a_batch_that_was_accepted_is_not_created_twice(provider, store, fault):
    """The provider has it, but its answer never comes: it is looked for before anything is sent again."""
    provider.faults = {"create after": [fault], "list": [Answer({"error": {"message": "oops"}}, 500)]}
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, len(provider.batches.batches)) == (1, 1)
    assert asked_twice(provider) == []
    (spent,) = store.ledger()
    assert spent.cost == pytest.approx(6 * PRICE)


@pytest.mark.parametrize(
    "fault", [Answer({"error": {"message": "oops"}}, 503), Answer("", 0)], ids=["503", "lost"]
)
@pytest.mark.parametrize(
    "listed", [None, Answer({"data": [{"id": "other"}], "has_more": True})], ids=["list", "same page again"]
)
def test_a_batch_that_was_not_accepted_is_created_again(provider, store, fault, listed):
    provider.faults = {"create before": [fault], "list": [listed] * 6}
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert provider.created == 1
    (spent,) = store.ledger()
    assert (spent.cost, spent.lost_calls) == (pytest.approx(6 * PRICE), 0)


def test_results_that_are_cut_short_are_fetched_again(provider, store):
    provider.cut = 40
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert provider.by_calls == []
    assert provider.results == 2
    assert store.ledger()[0].cost == pytest.approx(6 * PRICE), (
        "what was read of the first file is not counted twice"
    )


def test_results_with_ids_of_nobody_are_no_answers(provider, store):
    """They may have been billed, so they stay in the ledger as lost; the calls are made one by one."""
    provider.ids = b"who-"
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert sorted(provider.by_calls) == TEXTS
    (spent,) = store.ledger()
    assert (spent.calls, spent.batch_calls, spent.lost_calls) == (6, 0, 6)
    assert spent.cost == pytest.approx(12 * PRICE)


def test_a_budget_holds_what_is_under_way(provider, store):
    """A call may cost 0.5 * (about 0.03 + 100) = 50; a budget of 160 sends three, then what their real price leaves."""
    requests = ask(*TEXTS, max_tokens=100)
    with pytest.raises(BudgetReached):
        Caller(model(provider, budget=100), store).run(requests)
    assert store.ledger()[0].cost == pytest.approx(store.spent(store.ledger()[0].endpoint))
    assert store.ledger()[0].cost <= 100
    before = provider.created
    assert before >= 2
    found = Caller(model(provider, budget=10_000), store).run(requests)
    assert [read(one.reply) for one in found] == TEXTS
    assert asked_twice(provider) == []


def test_a_wrong_key_stops_at_once_and_nothing_is_held(provider, store, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-not-the-key-0")
    with error_about(StopCalls, "key", "m"):
        Caller(model(provider), store).run(ask(*TEXTS))
    assert store.spent(model(provider)["m"].endpoint) == 0
    assert store.open_batches(model(provider)["m"].endpoint) == []


def test_a_batch_that_is_rejected_stops_with_the_providers_words(provider, store):
    provider.faults = {"create before": [Answer({"error": {"message": "no batches for m"}}, 400)]}
    with error_about(StopCalls, "batch", 400):
        Caller(model(provider), store).run(ask(*TEXTS))
    assert store.spent(model(provider)["m"].endpoint) == 0


@pytest.mark.parametrize(
    "fault", [Answer("<html>", 502), Answer({}, 503, headers={"retry-after": "3600"})], ids=["down", "wait"]
)
def test_a_batch_that_cannot_be_submitted_now_says_to_try_again(provider, store, fault):
    """No setting of the model is to blame."""
    provider.faults = {"create before": [fault] * 9}
    with error_about(StopCalls, "unanswered", fault.status):
        Caller(model(provider, max_retries=1), store).run(ask(*TEXTS))
    assert store.spent(model(provider)["m"].endpoint) == 0


@pytest.mark.parametrize(
    "answers",
    [[Answer("<html>", 502)] * 3, [Answer({}, 404)], [Answer({"error": {"message": "who?"}}, 401)]],
    ids=["down", "no list", "key"],
)
def test_a_batch_of_which_nothing_is_known_is_not_forgotten(provider, store, monkeypatch, answers):
    """The provider has it, but neither answers the creation nor lists it; the next run looks for it again."""
    monkeypatch.setattr(batches, "MAX_FAILED_POLLS", 3)
    provider.faults = {"create after": [Answer("", 0)], "list": list(answers)}
    with error_about(StopCalls, "unknown"):
        Caller(model(provider), store).run(ask(*TEXTS))
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, asked_twice(provider)) == (1, [])


def test_stopped_by_hand_while_a_batch_is_created(provider, store, monkeypatch):
    async def interrupted(jobs, row):
        raise KeyboardInterrupt

    provider.faults = {"create after": [Answer("", 0)]}
    with monkeypatch.context() as patched:
        patched.setattr(batches.BatchJobs, "_find", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Caller(model(provider), store).run(ask(*TEXTS))
    Caller(model(provider), store).run(ask(*TEXTS))
    assert (provider.created, asked_twice(provider)) == (1, [])


FULL = {"error": {"code": "token_limit_exceeded", "message": "queue"}}
BUSY = {"error": {"message": "slow down"}}


@pytest.mark.parametrize(
    ("body", "status", "num", "waits"),
    [(BUSY, 429, 2, False), (BUSY, 429, 10**4, True), (FULL, 429, 10**4, True), (FULL, 400, 10**4, True)],
    ids=["429 once or twice", "429 for long", "full", "full, 400"],
)
def test_a_queue_that_is_full_while_a_batch_is_in_flight(store, monkeypatch, body, status, num, waits):
    """What is left waits for the end of a batch, but not after one 429, which may be about requests per minute."""

    class Queue(OpenAI):
        in_flight_at_second = None

        async def respond(self, method, path, data):
            if method == "POST" and path == "/v1/batches":
                running = [one for one in self.batches.batches.values() if one["status"] == "in_progress"]
                self.faults["create before"] = [Answer(body, status)] * bool(running and self.num > 0)
                self.num -= bool(running)
                if self.created == 1 and not self.faults["create before"]:
                    self.in_flight_at_second = len(running)
            return await super().respond(method, path, data)

    monkeypatch.setattr(batches, "MAX_CALLS", 4)
    with openai_server(monkeypatch, Queue()) as provider:
        provider.num = num
        found = Caller(model(provider, max_limited_s=0.1 if waits else 60), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert provider.in_flight_at_second == (0 if waits else 1)
    assert (provider.created, provider.by_calls, asked_twice(provider)) == (2, [], [])
    assert store.ledger()[0].cost == pytest.approx(6 * PRICE)


def test_a_queue_that_others_fill_stops_at_once(provider, store):
    provider.faults = {"create before": [Answer(FULL, 429)]}
    with error_about(StopCalls, "queue", 429):
        Caller(model(provider), store).run(ask(*TEXTS))
    assert store.spent(model(provider)["m"].endpoint) == 0


def test_a_queue_that_is_full_is_waited_for(provider, store):
    provider.faults = {
        "create before": [Answer({"error": {"message": "slow"}}, 429, headers={"retry-after": "0.05"})] * 2
    }
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    provider.faults = {"create before": [Answer({"error": {"message": "slow"}}, 429)] * 500}
    with error_about(StopCalls, "queue", 429):
        Caller(model(provider, max_limited_s=0.1), store).run(ask("another"))


def test_waiting_has_an_end_and_says_for_what(provider, store):
    provider.batches.polls = 10**9
    with error_about(StopCalls, "waiting"):
        Caller(model(provider, batch_wait_s=0.1), store).run(ask(*TEXTS))
    provider.batches.polls = 3 + max(provider.batches.num_polls.values())
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert provider.created == 1


def test_an_endpoint_that_goes_down_while_it_is_waited_for(provider, store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_FAILED_POLLS", 3)
    provider.faults = {"look": [Answer("<html>", 502)] * 3}
    with error_about(StopCalls, "waiting", 502):
        Caller(model(provider), store).run(ask(*TEXTS))
    Caller(model(provider), store).run(ask(*TEXTS))
    assert provider.created == 1


KILLED = f"""
import os
import sys
os.environ['A_KEY'] = {KEY!r}  # forked from a process that started before the test
from rge.calls.caller import Caller
from rge.calls.model_config import ModelConfig
from rge.calls.request import Request
from rge.calls.store import AnswerStore
models = {{'m': ModelConfig(name='m', base_url=sys.argv[1], key_env='A_KEY', mode='batch', batch_poll_s=0.05)}}
Caller(models, AnswerStore(sys.argv[2])).run([Request('m', (f'question {{n}}',)) for n in range(6)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["creating", "waiting"])
def test_killed_and_resumed_no_batch_is_created_twice(provider, store, tmp_path, when):
    (tmp_path / "ask.py").write_text(KILLED)
    provider.batches.polls = 10**9
    if when == "creating":  # the answer to the creation never comes, nor the list
        provider.faults = {"create after": [Answer("", 0)] * 99, "list": [Answer("", 0)] * 10**4}
    with Program(tmp_path / "ask.py", provider.url, store.path) as program:
        program.wait_until(lambda: provider.created if when == "creating" else provider.batches.num_polls)
        time.sleep(0.3)
        program.kill()
    (row,) = store.open_batches(model(provider)["m"].endpoint)
    assert (row.id is None) == (when == "creating")
    provider.batches.polls, provider.faults = 2 + max(provider.batches.num_polls.values(), default=0), {}
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert provider.created == 1
    assert asked_twice(provider) == []
    assert store.open_batches(model(provider)["m"].endpoint) == []


def test_batches_are_kept_below_what_providers_take(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_CALLS", 4)
    with openai_server(monkeypatch) as provider:
        Caller(model(provider), store).run(ask(*TEXTS))
        assert [
            len(provider.batches.files[f"file-{number}"].splitlines()) for number in range(provider.created)
        ] == [
            4,
            2,
        ]
        monkeypatch.setattr(batches, "MAX_BYTES", 500)
        Caller(model(provider), store).run(ask(*(f"another {number}" for number in range(4))))
        assert provider.created > 3


def test_a_batch_that_fails_as_a_whole(store, monkeypatch):
    """Too much in the provider's queue: it is sent again when another batch has ended; alone it is an error."""

    class Full(OpenAI):
        num_full = 1

        async def poll(self, name):
            if self.num_full and len(self.batches.batches) > 1 and name == max(self.batches.batches):
                self.num_full -= 1
                self.batches.batches[name]["status"] = "failed"
                error = {"code": "token_limit_exceeded", "message": "Enqueued token limit reached"}
                self.batches.batches[name]["errors"] = {"data": [error]}
            if self.batches.batches[name]["status"] == "failed":
                return self.batches.batches[name]
            return await super().poll(name)

    monkeypatch.setattr(batches, "MAX_CALLS", 4)
    with openai_server(monkeypatch, Full()) as provider:
        found = Caller(model(provider), store).run(ask(*TEXTS))
        assert [read(one.reply) for one in found] == TEXTS
        assert (provider.created, asked_twice(provider)) == (3, [])
        provider.num_full = 9
        with error_about(StopCalls, "queue"):
            Caller(model(provider), store).run(ask("alone"))
    assert store.spent(model(provider)["m"].endpoint) == pytest.approx(6 * PRICE)


def test_what_a_full_queue_refused_is_submitted_when_another_batch_has_ended(store, monkeypatch):
    """A provider with room for one batch at a time: three are sent, then two, then one, however long each takes."""

    class One(OpenAI):
        async def poll(self, name):
            batches = self.batches.batches.values()
            running = [batch["id"] for batch in batches if batch["status"] == "in_progress"]
            if running and name != running[0] and name in running:
                error = {"code": "token_limit_exceeded", "message": "Enqueued token limit reached"}
                self.batches.batches[name] |= {"status": "failed", "errors": {"data": [error]}}
            return await super().poll(name)

    monkeypatch.setattr(batches, "MAX_CALLS", 2)
    with openai_server(monkeypatch, One()) as provider:
        provider.batches.polls = 5
        found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, provider.by_calls, asked_twice(provider)) == (6, [], [])
    assert store.ledger()[0].cost == pytest.approx(6 * PRICE)


def test_no_batch_is_submitted_once_calls_have_stopped(provider, store, monkeypatch):
    """The key of another model is wrong: its error comes now, and not when the batches have ended."""
    monkeypatch.setattr(grouping, "REQUESTS_AT_ONCE", 1)
    monkeypatch.setenv("B_KEY", "sk-not-the-key-0")
    other = ModelConfig(name="n", base_url=provider.url, key_env="B_KEY")

    def requests():
        yield Request("n", ("first",))
        for number in range(300):
            time.sleep(0.002)
            yield Request("m", (str(number),))

    with error_about(StopCalls, "key", "n"):
        Caller({**model(provider), "n": other}, store).run(requests())
    assert provider.created == 0


def test_what_is_in_flight_when_calls_stop_is_collected_and_nothing_else_submitted(
    provider, store, monkeypatch, capsys
):
    """Credit runs out between two batches."""
    monkeypatch.setattr(batches, "MAX_CALLS", 4)
    provider.batches.polls = 10
    provider.faults = {"create before": [None, Answer(FULL, 429)]}
    original = provider.chat

    async def no_credit(path, body):
        if body["messages"][-1]["content"][0]["text"] != "plain":
            return await original(path, body)
        while not provider.batches.num_polls:
            await asyncio.sleep(0.01)
        return Answer({"error": {"message": "no credit"}}, 402)

    provider.handler = no_credit
    both = {**model(provider), "plain": model(provider, mode="calls")["m"]}
    with error_about(StopCalls, "credit"):
        Caller(both, store, progress=True).run([Request("plain", ("plain",)), *ask(*TEXTS)])
    assert (provider.created, store.num_replies()) == (1, 4)
    assert store.open_batches(both["m"].endpoint) == []
    assert "calls have stopped; 2 are left to the next run" in capsys.readouterr().err


def test_outcomes_of_a_batch_come_when_it_has_ended(store, monkeypatch):
    seen = {}

    class Slow(OpenAI):
        async def poll(self, name):
            if name == "batch_1" and len(seen) < 4:
                return self.batches.batches[name]
            return await super().poll(name)

    monkeypatch.setattr(batches, "MAX_CALLS", 4)
    with openai_server(monkeypatch, Slow()) as provider:
        Caller(model(provider, batch_wait_s=5), store).run(ask(*TEXTS), seen.__setitem__)
    assert [read(seen[place].reply) for place in range(6)] == TEXTS


def left_open(provider, store) -> str:
    """Stop while a batch is in flight; returns its endpoint."""
    provider.batches.polls = 10**9
    with error_about(StopCalls, "waiting"):
        Caller(model(provider, batch_wait_s=0.05), store).run(ask(*TEXTS))
    provider.batches.polls = 1 + max(provider.batches.num_polls.values())
    return model(provider)["m"].endpoint


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_plain_calls_do_not_pay_for_an_open_batch_again(provider, store, status):
    endpoint = left_open(provider, store)
    plain = model(provider, mode="calls")
    with error_about(StopCalls, "open"):
        Caller(plain, store).run(ask("another", *TEXTS[:2]))
    assert provider.by_calls == []
    Caller(plain, store).run(ask("another"))
    if status == "cancelled":
        provider.batches.polls = 0
        provider.batches.batches["batch_0"]["status"] = status
        with error_about(StopCalls, "cancelled"):
            Caller(model(provider), store).run(ask("another", *TEXTS, "a third"))
    else:
        Caller(model(provider), store).run(ask(*TEXTS))
    assert (provider.created, store.open_batches(endpoint)) == (1, [])
    found = Caller(plain, store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert asked_twice(provider) == []


GONE = Answer({"error": {"message": "not found"}}, 404)


@pytest.mark.parametrize(
    ("faults", "status", "num_open", "num_stored", "lost"),
    [
        ([], "in_progress", 0, 7, 0),  # the next request for its status completes it
        ([], "validating", 1, 1, 6),
        ([], "failed", 0, 1, 0),
        ([GONE], "in_progress", 0, 1, 6),
        ([Answer({"error": {"message": "odd"}}, 400)], "in_progress", 1, 1, 6),
    ],
    ids=["ended", "in progress", "failed", "gone", "odd"],
)
def test_a_batch_of_which_nothing_is_wanted_now_is_looked_at_once(
    provider, store, faults, status, num_open, num_stored, lost
):
    """Otherwise it would count against the budget at its maximum for ever."""
    endpoint = left_open(provider, store)
    provider.batches.batches["batch_0"]["status"] = status
    provider.faults = {"look": faults}
    before = provider.batches.num_polls["batch_0"]
    if faults or status != "in_progress":
        provider.batches.polls = 1
    (found,) = Caller(model(provider), store).run(ask("another"))
    assert read(found.reply) == "another"
    assert provider.batches.num_polls["batch_0"] <= before + 1, "nobody waits for it"
    assert (len(store.open_batches(endpoint)), store.num_replies()) == (num_open, num_stored)
    assert (store.ledger()[0].lost_calls, provider.by_calls) == (lost, [])


def test_a_batch_killed_between_its_last_result_and_its_end_is_closed(provider, store):
    endpoint = model(provider)["m"].endpoint
    row = BatchRow("rge-1", 1.0, "file-9", "batch_9")
    store.begin_batch(row, endpoint, [("key", (1, 1), 1.0)], {})
    store.end_attempt(row.calls["rge-1-0"].number, billed=False)
    Caller(model(provider), store).run(ask("another"))
    assert store.open_batches(endpoint) == []


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize("what", ["look", "results"])
def test_a_request_that_is_refused_throws_no_batch_away(provider, store, what, status):
    """A proxy, or a permission that was taken away: only a batch that is not there is gone."""
    provider.faults = {what: [Answer({"error": {"message": "odd"}}, status)]}
    with error_about(StopCalls, status):
        Caller(model(provider), store).run(ask(*TEXTS))
    assert len(store.open_batches(model(provider)["m"].endpoint)) == 1
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, provider.by_calls) == (1, [])
    assert store.ledger()[0].cost == pytest.approx(6 * PRICE)


def test_one_process_waits_for_batches(store, monkeypatch):
    with openai_server(monkeypatch) as provider:
        with (
            held(store.path.parent, f"{store.path.name}.batches"),
            pytest.raises(InUseError),
        ):
            Caller(model(provider), store).run(ask("a"))
        Caller(model(provider), store).run(ask("a"))


@pytest.mark.parametrize("resumed", [False, True])
def test_models_wait_for_their_batches_at_once(store, monkeypatch, resumed):
    """Two of them share an endpoint: neither takes the other's batch for one that nobody wants."""
    requests = [*ask("a"), Request("n", ("b",)), Request("same", ("c",))]
    with openai_server(monkeypatch) as provider:
        all_three = {
            label: model(provider, name=name)["m"] for label, name in (("m", "m"), ("n", "n"), ("same", "m"))
        }
        if resumed:
            provider.batches.polls = 10**9
            short = {label: replace(one, batch_wait_s=0.1) for label, one in all_three.items()}
            with error_about(StopCalls, "waiting"):
                Caller(short, store).run(requests)
            provider.batches.polls = 2 + max(provider.batches.num_polls.values())
            for name in provider.batches.batches:
                provider.batches.num_polls[name] = provider.batches.polls - 2
        found = Caller(all_three, store).run(requests)
        assert not any(store.open_batches(one.endpoint) for one in all_three.values())
    assert [read(one.reply) for one in found] == ["a", "b", "c"]
    assert provider.by_calls == []
    assert provider.created == 3


def test_a_web_page_in_the_results_is_no_answer(store, monkeypatch):
    """The local server of chats answers with one and status 200, as gateways do."""
    with openai_server(monkeypatch) as provider:
        provider.special = {"page": ("<html>502</html>", 200)}
        original = provider.chat

        async def once(path, body):
            answer = await original(path, body)
            provider.special = {}
            return answer

        provider.batches.chats = once
        (found,) = Caller(model(provider), store).run(ask("page"))
    assert read(found.reply) == "page"
    assert provider.by_calls == ["page"]


def test_a_file_of_answers_of_before_batches_is_read(tmp_path):
    old = sqlite3.connect(tmp_path / "c")
    old.execute(
        "CREATE TABLE spending (endpoint TEXT, estimated INTEGER, calls INTEGER, input_tokens INTEGER, cached_tokens INTEGER,"
        " output_tokens INTEGER, cost REAL, PRIMARY KEY (endpoint, estimated))"
    )
    old.execute("INSERT INTO spending VALUES ('m', 0, 3, 300, 0, 60, 1.5)")
    old.commit()
    old.close()
    (spent,) = AnswerStore(tmp_path / "c").ledger()
    assert (spent.calls, spent.cost, spent.batch_calls) == (3, 1.5, 0)


def test_a_cancelled_batch_is_not_bought_again_at_the_whole_price(store, monkeypatch):
    """Somebody cancelled it at the provider: what it brought is kept, the rest goes into a new batch with the next run."""

    class Cancelled(OpenAI):
        async def poll(self, name):
            shown = await super().poll(name)
            if name == "batch_0" and shown["status"] == "completed":
                shown["status"] = "cancelled"
                rows = self.batches.files[shown["output_file_id"]].splitlines(keepends=True)
                self.batches.files[shown["output_file_id"]] = b"".join(rows[:2])
            return shown

    with openai_server(monkeypatch, Cancelled()) as provider:
        with error_about(StopCalls, "cancelled"):
            Caller(model(provider), store).run(ask(*TEXTS))
        assert store.num_replies() == 2
        found = Caller(model(provider), store).run(ask(*TEXTS))
        assert [read(one.reply) for one in found] == TEXTS
        assert (provider.created, provider.by_calls) == (2, [])
    assert store.ledger()[0].cost == pytest.approx(6 * PRICE)


@pytest.mark.parametrize(("what", "status"), [("look", 404), ("results", 404), ("look", 410)])
def test_a_batch_that_is_gone_is_not_bought_again_at_the_whole_price(provider, store, what, status):
    provider.faults = {what: [Answer({"error": {"message": "not found"}}, status)]}
    with error_about(StopCalls, "gone"):
        Caller(model(provider), store).run(ask(*TEXTS))
    assert provider.by_calls == []
    (spent,) = store.ledger()
    assert (spent.calls, spent.lost_calls) == (0, 6), "what it cost is unknown"
    found = Caller(model(provider), store).run(ask(*TEXTS))
    assert [read(one.reply) for one in found] == TEXTS
    assert (provider.created, provider.by_calls) == (2, [])


def test_a_budget_for_batches_rests_on_a_bill(store, monkeypatch):
    """A call costs 17 times the estimate: one is made by itself first, and no batch is larger than the budget."""
    with openai_server(monkeypatch) as provider:

        async def expensive(path, body):
            answer = chat("<x>y</x>", input_tokens=1700, output_tokens=1)
            provider.by_calls += [1]
            return answer

        provider.handler = provider.batches.chats = expensive
        prices = {
            "input_price": 1e3,
            "output_price": 0,
        }  # 100 tokens, as estimated, are 0.1; 1,700 are 1.7, in a batch 0.85
        texts = [f"{number:>300}" for number in range(60)]
        with pytest.raises(BudgetReached):
            Caller(model(provider, budget=10, **prices), store).run(ask(*texts))
        assert store.ledger()[0].calls == 1 + 9
        assert store.ledger()[0].cost == pytest.approx(1.7 + 9 * 0.85)
