"""Providers as they are: filters, settings that they refuse, echoes, half characters, limits, answers in odd shapes."""

import asyncio
import base64
import hashlib
import io
import json
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from faults import error_about
from PIL import Image

from rge.calls.caller import Caller
from rge.calls.failures import BudgetReached, StopCalls, parse_seconds
from rge.calls.keys import Mask
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import WITHOUT_BATCHES, ModelConfig, cache_names, check_model
from rge.calls.pace import Pace
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.calls.wire.pictures import Pictures
from rge.calls.wire.replies import EmptyChoices, MissingTag, Refused, check_complete, read_replies, tag
from rge.common.errors import UserError
from rge.common.images import ImageError
from rge.common.options import build


def text_of(body: dict) -> str:
    return body["messages"][-1]["content"][0]["text"]


class Server:
    """Answers with what `answer` makes of a body; counts by the prompt's first part."""

    def __init__(self, answer):
        self.answer, self.seen, self.bodies = answer, Counter(), []

    async def __call__(self, path, body):
        self.seen[text_of(body)] += 1
        self.bodies.append(body)
        return self.answer(body)


@pytest.fixture
def store(tmp_path):
    made = AnswerStore(tmp_path / "replies.sqlite")
    yield made
    made.close()


def model(server: LocalServer, **settings) -> dict[str, ModelConfig]:
    return {"m": ModelConfig(**{"name": "m", "base_url": server.url, "backoff_s": 0.01, **settings})}


def ask(text: str, **settings) -> Request:
    return Request("m", (text,), **settings)


def picture_of(path) -> Picture:
    return Picture(str(path), hashlib.sha256(Path(path).read_bytes()).hexdigest())


# ------------------------------------------------------------------------------------------------- classes of failures

FILTERED = [
    {"error": {"code": "content_filter", "message": "The response was filtered", "status": 400}},
    {"error": {"code": None, "innererror": {"code": "ResponsibleAIPolicyViolation"}, "message": "no"}},
    {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"},
    },
]


@pytest.mark.parametrize("body", FILTERED, ids=["openai", "azure", "anthropic"])
def test_a_filtered_picture_is_an_answer_and_stops_nobody(store, body):
    """More of them in a row than calls without an answer would be allowed; kept, counted, and not asked again."""
    server = Server(lambda given: Answer(body, 400) if "bad" in text_of(given) else chat("fine"))
    requests = [ask(f"bad {number}") for number in range(30)] + [ask("good")]
    with LocalServer(server) as at:
        caller = Caller(model(at, concurrency=1, input_price=1, output_price=1), store)
        *bad, good = caller.run(requests)
        assert all(isinstance(one.error, Refused) for one in bad)
        assert good.reply.text == "fine"
        assert (caller.counts.refused, caller.counts.unanswered) == (30, 0)
        again = Caller(model(at), store).run(requests)
    assert all(isinstance(one.error, Refused) and one.cached for one in again[:-1])
    assert set(server.seen.values()) == {1}
    (spent,) = store.ledger()
    assert spent.cost == pytest.approx(120e-6), "what the policy stops is not billed"


def test_a_setting_that_the_endpoint_does_not_know_stops_at_once_with_its_words(store):
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."

    def picky(body):
        if "max_tokens" in body:
            return Answer(
                {"error": {"message": words, "param": "max_tokens", "code": "unsupported_parameter"}}, 400
            )
        return chat("fine")

    server = Server(picky)
    requests = [ask(str(number)) for number in range(200)]
    with LocalServer(server) as at:
        with error_about(StopCalls, "settings", 400) as caught:
            Caller(model(at, concurrency=4, output_price=1e6, budget=1e9), store).run(requests)
        assert "max_tokens" in caught.value.reason, "the provider's own words"
        assert sum(server.seen.values()) <= 4
        assert store.num_replies() == 0
        assert store.spent(f"m at {at.url}") == 0, "what was rejected is not billed"
        found = Caller(model(at, token_limit="max_completion_tokens", send_temperature=False), store).run(
            requests[:3]
        )
    assert [one.reply.text for one in found] == ["fine"] * 3
    assert server.bodies[-1]["max_completion_tokens"] == 1024
    assert "temperature" not in server.bodies[-1]


def test_one_picture_that_the_endpoint_cannot_read_stops_nobody(store):
    """Also where it is the very first, and where nothing else is asked: a canary tells that the settings are right."""
    cannot = Answer({"error": {"message": "Could not process image"}}, 400)
    server = Server(lambda body: cannot if "bad" in text_of(body) else chat("fine"))
    with LocalServer(server) as at:
        caller = Caller(model(at, concurrency=1), store)
        bad, good = caller.run([ask("bad"), ask("good")])
        assert (bad.rejected, bad.error.kind) == (True, "rejected request")
        assert "Could not process image" in str(bad.error)
        assert good.reply.text == "fine"
        again, other = Caller(model(at), store).run([ask("bad"), ask("bad 2")])
        assert (again.cached, other.cached) == (True, False), "what was rejected is kept, and not sent again"
        assert again.rejected
        assert other.rejected
        assert server.seen == {"bad": 1, "good": 1, "bad 2": 1, CANARY: 2}
        Caller(model(at, token_limit="max_completion_tokens"), store).run([ask("bad")])
    assert server.seen["bad"] == 2, "with another setting it is sent again"


def test_an_endpoint_that_rejects_a_canary_too_stops(store):
    server = Server(
        lambda body: chat("fine") if "good" in text_of(body) else Answer({"error": {"message": "no"}}, 400)
    )
    with LocalServer(server) as at:
        with error_about(StopCalls, "settings", 400):
            Caller(model(at, concurrency=1), store).run(
                [ask("good"), *(ask(str(number)) for number in range(50))]
            )
    assert server.seen == {"good": 1, "0": 1, CANARY: 1}
    assert store.num_replies() == 1


CANARY = "Answer with the word ok."


def read_x(reply):
    return tag(reply.text, "x")


def test_an_unreadable_answer_is_asked_for_again_with_the_format_named(store):
    def answer(body):
        parts = [part["text"] for part in body["messages"][-1]["content"]]
        hopeless = parts[0] == "hopeless"
        return chat("<x>yes</x>" if len(parts) > 1 and not hopeless else "no tag")

    server = Server(answer)
    requests = [ask("poor", form="<x>yes or no</x>"), ask("hopeless", form="<x>yes or no</x>")]
    with LocalServer(server) as at:
        caller = Caller(model(at), store)
        poor, hopeless = caller.run(requests, read=read_x)
        assert read_x(poor.reply) == "yes"
        with pytest.raises(MissingTag):
            read_x(hopeless.reply)
        assert (caller.counts.reasked, caller.counts.unreadable) == (3, 1)
        again = Caller(model(at), store).run(requests, read=read_x)
        assert all(one.cached for one in again)
        assert [one.key for one in again] == [poor.key, hopeless.key]
    assert server.seen == {"poor": 2, "hopeless": 3}
    asked = server.bodies[-1]["messages"][-1]["content"][-1]["text"]
    assert (
        asked
        == "Your last answer could not be read: missing tag. Answer in exactly this format:\n<x>yes or no</x>"
    )
    assert len({body["seed"] for body in server.bodies}) == 3


def test_an_answer_cut_short_is_given_more_room(store):
    server = Server(lambda body: chat("<x>y</x>") if body["max_tokens"] > 10 else chat("<x>y", stop="length"))

    def read(reply):
        check_complete(reply, "x")

    with LocalServer(server) as at:
        (found,) = Caller(model(at), store).run([ask("a", max_tokens=10)], read=read)
    assert found.reply.text == "<x>y</x>"


@pytest.mark.parametrize("message", [{}, {"message": None}, {"message": {"role": "assistant"}}], ids=str)
def test_thoughts_cut_short_are_given_more_room(store, message):
    """As Gemini answers if its thoughts alone reach ``max_tokens``."""
    cut = chat("")
    cut.body["choices"] = [{"index": 0, "finish_reason": "length", **message}]
    server = Server(lambda body: chat("<x>y</x>") if body["max_tokens"] > 10 else cut)
    with LocalServer(server) as at:
        read = partial(check_complete, last_tag="x")
        (found,) = Caller(model(at), store).run([ask("a", max_tokens=10)], read=read)
    assert found.reply.text == "<x>y</x>"


def test_draws_that_are_requested_again_stay_separate(store):
    """The second remark to one judge is that of the first to the next one: only the seeds tell the two apart."""
    server = Server(
        lambda body: chat("no tag" if body["seed"] in (0, 1, 1_000_000) else f"<x>{body['seed']}</x>")
    )
    with LocalServer(server) as at:
        found = Caller(model(at), store).run([ask("a", sample=0), ask("a", sample=1)], read=read_x)
    assert len({read_x(outcome.reply) for outcome in found}) == 2
    assert server.seen == {"a": 5}


def test_reasks_can_be_switched_off(store):
    server = Server(lambda body: chat("no tag"))
    with LocalServer(server) as at:
        caller = Caller(model(at, reasks=0), store)
        caller.run([ask("a")], read=read_x)
    assert server.seen == {"a": 1}
    assert caller.counts.unreadable == 1


# ----------------------------------------------------------------------------------------------------- odd answers, keys


def test_odd_shapes_are_read_or_passed_on(store):
    in_parts = chat("")
    in_parts.body["choices"][0]["message"]["content"] = [
        {"type": "text", "text": "in "},
        {"type": "text", "text": "parts"},
    ]
    no_message = chat("")
    no_message.body["choices"] = [{"text": "of another schema"}]
    filtered = chat("")
    filtered.body["choices"] = [{"index": 0, "finish_reason": "content_filter: PROHIBITED_CONTENT"}]
    answers = {"parts": in_parts, "odd": no_message, "filtered": filtered}
    server = Server(lambda body: answers[text_of(body)])
    with LocalServer(server) as at:
        requests = [ask(text) for text in answers]
        parts, odd, declined = Caller(model(at), store).run(
            requests, read=lambda reply: check_complete(reply, "x")
        )
    assert parts.reply.text == "in parts"
    assert odd.unanswered, "no content is no answer"
    with pytest.raises(Refused):  # Gemini's filter
        check_complete(declined.answer(), "x")
    assert server.seen == {"parts": 1, "odd": 3, "filtered": 1}


def test_half_a_character_is_no_error_of_ours(store, tmp_path):
    answer = chat("")
    raw = json.dumps(answer.body).replace('"content": ""', '"content": "broken \\ud83d here"')
    with LocalServer(Server(lambda body: Answer(raw))) as at:
        for _ in range(2):  # and from the store
            (found,) = Caller(model(at), store).run([ask("half \ud83d a prompt")])
            assert found.reply.text == "broken ? here"
            (tmp_path / "x").write_text(found.reply.text, encoding="utf-8")
    assert b"\\ud83d" in store.get(found.key), "what was answered is kept as it came"


KEY = "sk-abc/def+123456"


def test_keys_are_masked_in_what_is_shown_and_never_in_what_is_kept(store, monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", KEY)
    echo = f"key {KEY} or {base64.b64encode(f'user:{KEY}!'.encode()).decode()} or {KEY.encode().hex()}"

    def leaky(body):
        return (
            Answer({"error": {"message": echo + " image"}}, 400)
            if text_of(body) == "bad"
            else chat(f"it is {echo}")
        )

    with LocalServer(Server(leaky)) as at:
        good, bad = Caller(model(at, key_env="A_KEY", concurrency=1), store).run([ask("good"), ask("bad")])
    shown = f"{good.reply.text} {bad.error}"
    assert shown.count("[key]") == 6
    for form in (KEY, base64.b64encode(KEY.encode()).decode()[4:-4], KEY.encode().hex()):
        assert form not in shown
        assert form not in str(store._db.execute("SELECT message FROM rejections").fetchall())
    assert json.loads(store.get(good.key))["choices"][0]["message"]["content"] == f"it is {echo}"


def test_a_key_is_found_in_base64_wherever_it_stands():
    rng = np.random.default_rng(0)
    for length in range(12, 40):
        key = "".join(chr(code) for code in rng.integers(48, 123, length))
        for before in range(4):
            for after in range(4):
                text = rng.bytes(before) + key.encode() + rng.bytes(after)
                for encode in (base64.b64encode, base64.urlsafe_b64encode):
                    shown = Mask([key])(encode(text).decode())
                    assert "[key]" in shown
                    assert len(shown) < 15 + len("[key]")


@pytest.mark.parametrize("key", ["x", "key", "elevenchars"])
def test_what_is_too_short_for_a_key_is_refused(store, monkeypatch, key):
    monkeypatch.setenv("A_KEY", key)
    with error_about(UserError, "A_KEY"):
        Caller({"m": ModelConfig(name="m", key_env="A_KEY")}, store)


@pytest.mark.parametrize("key", ["sk-abcdefghij\u2026klm", "sk-abcdefg\nsk-hijklmnop"])
def test_what_no_header_can_hold_is_no_key(store, monkeypatch, key):
    monkeypatch.setenv("A_KEY", key)
    with error_about(UserError, "A_KEY"):
        Caller({"m": ModelConfig(name="m", key_env="A_KEY")}, store)


# --------------------------------------------------------------------------------------------- what newer models ask for


def test_settings_of_newer_models_are_sent_and_are_part_of_the_key(store):
    server = Server(lambda body: chat("fine"))
    with LocalServer(server) as at:
        for send_seed in (True, False):
            Caller(model(at, send_seed=send_seed), store).run([ask(f"a seed is sent: {send_seed}")])
            assert ("seed" in server.bodies.pop()) is send_seed
        keys = set()
        for settings in (
            {},
            {"reasoning_effort": "low"},
            {"extra_body": {"top_k": 5}},
            {"send_temperature": False},
        ):
            caller = Caller(model(at, **settings), store)
            keys |= {one.key for one in caller.run([ask("a")])}
    assert len(keys) == 4
    assert server.bodies[1]["reasoning_effort"] == "low"
    assert server.bodies[2]["top_k"] == 5
    assert "reasoning_effort" not in server.bodies[0]
    assert store.get(ask("a").key()) is not None, "without settings the key is what it always was"


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"token_limit": "tokens"}, (("choice", "token_limit"),)),
        ({"draws_a_call": 0}, (("range", "draws_a_call"),)),
        ({"reasks": -1}, (("range", "reasks"),)),
        ({"input_price": -1.0, "output_price": 1.0}, (("range", "input_price"),)),
        ({"backoff_s": -1.0}, (("range", "backoff_s"),)),
        ({"extra_body": {"messages": []}}, ("reserved", "models.m.extra_body")),
        ({"extra_body": {"top_p": float("nan")}}, ("JSON", "models.m.extra_body")),
        ({"mode": "later"}, (("choice", "mode"),)),
        ({"batch_price": 50}, (("range", "batch_price"),)),
        ({"mode": "batch", "base_url": f"{WITHOUT_BATCHES[0]}/"}, ("models.m.mode",)),
        ({"mode": "batch", "base_url": WITHOUT_BATCHES[1]}, ("models.m.mode",)),
    ],
)
def test_settings_that_cannot_be_right(settings, fields):
    with error_about(UserError, *fields):
        check_model("models.m", build(ModelConfig, [("", {"name": "m", **settings})]))


FIELDS = (("input_desc", None), ("consistent", ("True", "False")), ("block", (("query", None),)))


def test_a_schema_holds_the_answer_and_is_read_as_tags(store):
    found = {"input_desc": "a <b>", "consistent": "True", "block": {"query": "what?"}}
    server = Server(lambda body: chat(json.dumps(found)))
    with LocalServer(server) as at:
        request = ask("a", fields=FIELDS)
        (structured,) = Caller(model(at, structured=True), store).run([request])
        (plain,) = Caller(model(at), store).run([request])
    schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["consistent"] == {"type": "string", "enum": ["True", "False"]}
    assert schema["properties"]["block"]["required"] == ["query"]
    assert schema["required"] == ["input_desc", "consistent", "block"]
    assert "response_format" not in server.bodies[1]
    assert tag(structured.reply.text, "consistent") == "True"
    assert tag(tag(structured.reply.text, "block"), "query") == "what?"
    assert structured.key != plain.key


def several(body) -> Answer:
    answer = chat("")
    answer.body["choices"] = [
        {"index": number, "message": {"role": "assistant", "content": f"<x>draw {body['seed'] + number}</x>"}}
        for number in range(body.get("n", 1))
    ]
    answer.body["choices"][-1]["message"]["content"] += "" if body.get("n", 1) < 4 else "</y>"
    return answer


def test_draws_of_one_prompt_by_one_call(store):
    """Five draws at four a call are two calls; a draw that cannot be read is asked for by itself."""

    def read(reply):
        if "</y>" in reply.text:
            raise MissingTag("no")

    server = Server(several)
    requests = [ask("a", sample=sample) for sample in range(5)]
    with LocalServer(server) as at:
        caller = Caller(model(at, draws_a_call=4, input_price=1), store)
        found = caller.run(requests, read=read)
        assert [tag(one.reply.text, "x") for one in found] == [
            "draw 0",
            "draw 1",
            "draw 2",
            "draw 1000003",
            "draw 4",
        ]
        assert [body.get("n", 1) for body in server.bodies].count(4) == 1
        assert (caller.counts.asked, sum(server.seen.values())) == (3, 3)
        again = Caller(model(at, draws_a_call=4), store).run(requests, read=read)
    assert [one.reply.text for one in again] == [one.reply.text for one in found]
    assert sum(server.seen.values()) == 3
    assert store.ledger()[0].input_tokens == 300, "one prompt is paid for once"


def test_draws_that_were_asked_for_singly_are_not_asked_for_again(store):
    """Three draws were made before the setting was changed; the other two are one call, which is found again."""
    server = Server(several)
    draws = [ask("a", sample=sample) for sample in range(5)]
    with LocalServer(server) as at:
        first = Caller(model(at), store).run([draws[0], draws[1], draws[4]])
        for _ in range(2):
            found = Caller(model(at, draws_a_call=5), store).run(draws)
            assert [one.reply for one in (found[0], found[1], found[4])] == [one.reply for one in first]
            assert [tag(one.reply.text, "x") for one in found[2:4]] == ["draw 2", "draw 3"]
            assert [body.get("n", 1) for body in server.bodies] == [1, 1, 1, 2]


def test_a_server_that_knows_no_n_is_asked_for_the_others(store):
    def only_one(body):
        answer = several({**body, "n": 1})
        return answer

    server = Server(only_one)
    with LocalServer(server) as at:
        requests = [ask("a", sample=sample) for sample in range(4)]
        found = Caller(model(at, draws_a_call=4), store).run(requests)
        again = Caller(model(at, draws_a_call=4), store).run(requests)
    assert [tag(one.reply.text, "x") for one in found] == [f"draw {number}" for number in range(4)]
    assert all(one.cached for one in again), "the shorter and shorter calls are found in the same order"


def test_cached_input_has_a_price_of_its_own(store):
    """100 input tokens, 80 of them cached: 20 at 10 and 80 at 1, and 20 output tokens at 0."""
    answer = chat("fine")
    answer.body["usage"]["prompt_tokens_details"] = {"cached_tokens": 80}
    with LocalServer(Server(lambda body: answer)) as at:
        Caller(model(at, input_price=10, cached_price=1), store).run([ask("a")])
    (spent,) = store.ledger()
    assert (spent.cached_tokens, spent.cost) == (80, pytest.approx(280e-6))


# ------------------------------------------------------------------------------------------------------------- endpoints


def test_two_endpoints_of_one_model_are_asked_each_for_itself(store):
    servers = [Server(lambda body, number=number: chat(f"from {number}")) for number in range(2)]
    with LocalServer(servers[0]) as first, LocalServer(servers[1]) as second:
        models = {
            "a": ModelConfig(name="m", base_url=first.url),
            "b": ModelConfig(name="m", base_url=second.url, cache_as="m of b"),
        }
        for config in models.values():
            config.output_price, config.budget = 1e6, 1100
        models["b"].budget = 3000
        found = Caller(models, store).run([Request("a", ("x",)), Request("b", ("x",), max_tokens=2000)])
    assert [one.reply.text for one in found] == ["from 0", "from 1"]
    assert [sum(server.seen.values()) for server in servers] == [1, 1]
    assert {one.endpoint: one.cost for one in store.ledger()} == {
        f"m at {first.url}": 20.0,
        f"m at {second.url}": 20.0,
    }


def test_a_server_that_moves_keeps_its_answers():
    one = ModelConfig(name="m", base_url="http://host:1/v1")
    moved = ModelConfig(name="m", base_url="http://host:2/v1")
    assert cache_names({"a": one}) == cache_names({"a": moved}) == {"a": "m"}
    assert cache_names({"a": one, "b": one}) == {"a": "m", "b": "m"}


@pytest.mark.parametrize("name", ["other", "m"])
def test_a_model_s_answers_do_not_depend_on_which_others_there_are(store, name):
    """Two judges that are both called m: the second one's answers stay its own where it comes first, or alone."""
    servers = [Server(lambda body, word=word: chat(word)) for word in ("NO", "YES")]
    with LocalServer(servers[0]) as first, LocalServer(servers[1]) as second:
        a, b = ModelConfig(name="m", base_url=first.url), ModelConfig(name="m", base_url=second.url)
        for models in ({"a": a, "b": b}, {"b": b, "a": a}):
            with error_about(UserError, f"{[*models][1]}.cache_as"):
                Caller(models, store)
        b.cache_as = name
        for models in ({"a": a, "b": b}, {"b": b, "a": a}, {"b": b}):
            found = Caller(models, store).run([Request(label, ("x",)) for label in models])
            said = {label: one.reply.text for label, one in zip(models, found, strict=True)}
            assert said["b"] == ("YES" if name == "other" else "NO")
    assert [sum(server.seen.values()) for server in servers] == [1, name == "other"]


def test_one_endpoint_is_one_however_it_is_written(store):
    """A slash would give its budget and its pace a second time."""
    server = Server(lambda body: chat("fine"))
    with LocalServer(server) as at:
        spellings = (at.url, f"{at.url}/", at.url.replace("http:", "HTTP:"))
        models = {
            str(number): ModelConfig(name="m", base_url=url, output_price=1e6, budget=50)
            for number, url in enumerate(spellings)
        }
        requests = [Request(label, (label,), max_tokens=20) for label in models]
        with pytest.raises(BudgetReached):
            Caller(models, store).run(requests)
    assert [entry.cost for entry in store.ledger()] == [40]
    hosts = ("https://API.openai.com:443/v1", "https://api.openai.com/v1/", None)
    assert len({ModelConfig(name="m", base_url=host).endpoint for host in hosts}) == 1


# --------------------------------------------------------------------------------------------------------------- the pace


class Limited:
    """Lets `rate` calls a second through, in whole windows, and answers the others with 429."""

    def __init__(self, rate: int, window_s: float):
        self.each, self.window_s = int(rate * window_s), window_s
        self.began, self.count, self.refused = time.monotonic(), Counter(), 0

    async def __call__(self, path, body):
        window = int((time.monotonic() - self.began) / self.window_s)
        self.count[window] += 1
        if self.count[window] > self.each:
            self.refused += 1
            return Answer(
                {"error": {"message": "slow down"}}, 429, headers={"retry-after": str(self.window_s)}
            )
        return chat("fine")


@pytest.mark.slow
def test_the_pace_is_learnt_from_429(store):
    """100 calls a second are allowed and 64 tried at once: nothing fails, few are refused, and the rate is used."""
    limited = Limited(100, 0.2)
    with LocalServer(limited) as at:
        caller = Caller(model(at, concurrency=64, max_retries=0), store)
        began = time.monotonic()
        found = caller.run([ask(str(number)) for number in range(240)])
        took_s = time.monotonic() - began
    assert not any(one.error for one in found)
    assert limited.refused == caller.counts.limited
    assert limited.refused < 120
    assert took_s < 12, "240 calls at 100 a second need 2.4 s"


def test_an_endpoint_that_only_refuses_is_given_up_in_the_end(store):
    with LocalServer(Server(lambda body: Answer({"error": {"message": "slow"}}, 429))) as at:
        with error_about(StopCalls, "limited", 429):
            Caller(model(at, max_limited_s=0.3), store).run([ask("a")])


def test_the_pace_by_hand():
    """Ten answers in the last second, then a 429: eight a second from now on, after the pause."""
    now = [100.0]
    pace = Pace(clock=lambda: now[0])
    for _ in range(10):
        pace.on_answer()
    pace.on_limited(now[0], 2.0, 1.0, 60.0)
    assert pace.rate == pytest.approx(10 / 2 * 0.8), "ten in the two seconds that it asks for"
    pace.on_limited(now[0] - 1, None, 1.0, 60.0)
    assert pace.rate == pytest.approx(4.0), "a call that was sent before the cut says nothing new"
    turns = []

    async def three():
        async def sleep(seconds):
            now[0] += seconds

        original, asyncio.sleep = asyncio.sleep, sleep
        try:
            for _ in range(3):
                await pace.wait_turn()
                turns.append(now[0])
        finally:
            asyncio.sleep = original

    asyncio.run(three())
    assert turns == pytest.approx([102.0, 102.25, 102.5])


def test_an_endpoint_that_refuses_a_thousand_times_in_a_row_is_waited_for():
    """With a short `max_backoff_s` it takes a minute to come to 2 to the power of 1,024, which no float holds."""
    now = [100.0]
    pace = Pace(clock=lambda: now[0])
    for _ in range(1100):
        pace.on_limited(now[0], None, 0.01, 0.05)
        now[0] += 0.05
    assert pace._paused_until == pytest.approx(now[0])


def test_how_long_a_provider_says_to_wait():
    waits = [parse_seconds(text) for text in ("1.5", "20s", "0.5s", "soon", "", None)]
    assert waits == [1.5, 20, 0.5, None, None, None]


# --------------------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def photos(tmp_path):
    """Three photographs of twelve megapixels, with a place."""
    exif = Image.Exif()
    exif[0x0110] = "MyPhone"
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    paths = []
    for number in range(3):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(noise).resize((4000, 3000)).save(path, exif=exif)
        paths.append(str(path))
    return paths


@pytest.mark.slow
def test_photographs_hold_up_no_other_call(store, photos):
    """While three are scaled down, the loop that makes the calls goes on turning."""

    async def measure():
        gaps, last = [], time.perf_counter()

        async def tick():
            nonlocal last
            while True:
                await asyncio.sleep(0.005)
                gaps.append(time.perf_counter() - last)
                last = time.perf_counter()

        ticking = asyncio.create_task(tick())
        pictures = Pictures()
        found = await asyncio.gather(*(pictures.encode(picture_of(path)) for path in photos * 2))
        ticking.cancel()
        return found, gaps

    found, gaps = asyncio.run(measure())
    assert len(gaps) > 20
    assert sorted(gaps)[-3] < 0.3
    for url in found:
        media_type, _, data = url.partition(";base64,")
        sent = base64.b64decode(data)
        assert media_type == "data:image/jpeg"
        assert max(Image.open(io.BytesIO(sent)).size) == 1024
        assert b"MyPhone" not in sent


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no picture")

    async def prepare():
        await Pictures().encode(picture_of(tmp_path / "a.jpg"))

    with error_about(ImageError, "a.jpg"):
        asyncio.run(prepare())


def test_a_picture_that_has_changed_is_not_sent_as_the_one_before(store, tmp_path):
    """Its answer would be stored, and paid for, as that of the other picture."""
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    request = Request("m", ("a", picture_of(tmp_path / "a.png")))
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    server = Server(lambda body: chat("fine"))
    with LocalServer(server) as at:
        (found,) = Caller(model(at), store).run([request])
    assert found.unanswered
    assert found.error.why.file == str(tmp_path / "a.png")
    assert (server.bodies, store.num_replies()) == ([], 0)


def test_what_is_sent_of_a_small_photograph_has_no_metadata(store, tmp_path):
    exif = Image.Exif()
    exif[0x0110] = "MyPhone"
    Image.new("RGB", (80, 60), "red").save(tmp_path / "small.jpg", exif=exif)
    sent = []

    def look(body):
        url = body["messages"][-1]["content"][1]["image_url"]["url"]
        sent.append(base64.b64decode(url.partition("base64,")[2]))
        return chat("fine")

    with LocalServer(Server(look)) as at:
        Caller(model(at), store).run([Request("m", ("a", picture_of(tmp_path / "small.jpg")))])
    assert b"MyPhone" in (tmp_path / "small.jpg").read_bytes()
    assert b"MyPhone" not in sent[0]
    assert Image.open(io.BytesIO(sent[0])).size == (80, 60)


def test_replies_of_several_draws():
    raw = json.dumps({"choices": [{"message": {"content": "a"}}, {"message": {"content": ""}}]}).encode()
    first, second = read_replies(raw)
    assert first.text == "a"
    assert isinstance(second, EmptyChoices)
    assert read_replies(raw)[0].text == "a"
