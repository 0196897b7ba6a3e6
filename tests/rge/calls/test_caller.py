"""Model calls over real HTTP against a server on this machine."""

import asyncio
import hashlib
import io
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import forked
import pytest
from faults import error_about
from forked import Program
from PIL import Image

from rge.calls import grouping, sender
from rge.calls.caller import Caller
from rge.calls.failures import BudgetReached, StopCalls
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.calls.wire.pictures import data_url
from rge.calls.wire.replies import (
    Abstained,
    BadValue,
    EmptyChoices,
    MissingTag,
    NotAChat,
    Refused,
    Reply,
    TooLong,
    Truncated,
    Usage,
    check_complete,
    parse_choice,
    read_replies,
    tag,
)
from rge.common.errors import UserError
from rge.common.images import ImageError, decode_data_url


def ask(text: str, **settings) -> Request:
    return Request("m", (text,), **settings)


class Echo:
    """Answers with the prompt; `script` gives answers to be sent first.

    Holds its answers until `together` calls have been under way at once, and from call number `hold_from` on until that
    is None again: what is under way then does not depend on the speed of the machine.
    """

    def __init__(
        self, *script: Answer, delay_s: float = 0.0, together: int = 1, hold_from: int | None = None
    ):
        self.script, self.delay_s, self.seen = list(script), delay_s, Counter()
        self.together, self.hold_from = together, hold_from
        self.under_way = self.most = 0

    def holds(self) -> bool:
        return self.hold_from is not None and sum(self.seen.values()) >= self.hold_from

    async def __call__(self, path: str, body: dict) -> Answer:
        text = body["messages"][-1]["content"][0]["text"]
        self.seen[text] += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.delay_s)
        while self.most < self.together or self.holds():
            await asyncio.sleep(0.002)
        self.under_way -= 1
        return self.script.pop(0) if self.script else chat(f"you said {text}")


@pytest.fixture
def store(tmp_path):
    made = AnswerStore(tmp_path / "replies.sqlite")
    yield made
    made.close()


def model(server: LocalServer, **settings) -> dict[str, ModelConfig]:
    return {"m": ModelConfig(**{"name": "m", "base_url": server.url, "backoff_s": 0.01, **settings})}


def test_answers_come_back_in_order_and_are_asked_once(store):
    echo = Echo()
    with LocalServer(echo) as server:
        caller = Caller(model(server), store)
        outcomes = caller.run([ask("a"), ask("b"), ask("a")])
        assert [outcome.reply.text for outcome in outcomes] == ["you said a", "you said b", "you said a"]
        again = Caller(model(server), store)
        assert all(outcome.cached for outcome in again.run([ask("b"), ask("a")]))
    assert echo.seen == {"a": 1, "b": 1}
    assert (again.counts.asked, again.counts.cached) == (0, 2)


def test_a_finished_store_can_be_read_in_a_folder_that_one_may_only_read():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.sqlite"
        with closing(AnswerStore(path)) as written:
            written.put_values({"key": 1})
        os.chmod(folder, 0o555)
        user = os.geteuid()
        try:
            if user == 0:  # who may write anywhere
                os.seteuid(65534)
            with pytest.raises(UserError):
                AnswerStore(path)
            with closing(AnswerStore(path, read_only=True)) as found:
                assert found.get_values(["key"]) == {"key": 1}
                assert found.ledger() == []
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o755)
        # A folder in use: what is not yet in the main file counts too.
        with closing(AnswerStore(path)) as writing, closing(AnswerStore(path, read_only=True)) as found:
            writing.put_values({"other": 2})
            assert found.get_values(["other"]) == {"other": 2}


def test_a_draw_of_its_own_is_a_call_of_its_own(store):
    echo = Echo()
    with LocalServer(echo) as server:
        Caller(model(server), store).run([ask("a", sample=0), ask("a", sample=1), ask("a", temperature=0.5)])
    assert echo.seen == {"a": 3}


def test_concurrency_is_limited(store):
    echo = Echo(delay_s=0.02, together=3)
    with LocalServer(echo) as server:
        caller = Caller(model(server, concurrency=3, timeout_s=60, max_retries=0), store)
        assert not any(outcome.error for outcome in caller.run([ask(str(number)) for number in range(12)]))
    assert echo.most == 3


@pytest.mark.parametrize(
    "first",
    [
        Answer({"error": {"message": "slow down"}}, 429),
        Answer({"error": {"message": "oops"}}, 500),
        Answer({"error": {"message": "busy"}}, 503),
        Answer("<html>gateway</html>", content_type="text/html"),
        Answer({"object": "something else"}),
    ],
    ids=["429", "500", "503", "html", "schema"],
)
def test_transient_faults_are_retried(store, first):
    with LocalServer(Echo(first, first)) as server:
        caller = Caller(model(server), store)
        assert caller.run([ask("a")])[0].reply.text == "you said a"
    assert caller.counts.retries + caller.counts.limited == 2


@pytest.mark.parametrize(
    ("answer", "no_chat", "status"),
    [
        (Answer("<html>gateway</html>", content_type="text/html"), True, None),
        (Answer({"object": "something else"}), True, None),
        (Answer({"error": {"message": "busy"}}, 503), False, 503),
    ],
    ids=["html", "schema", "503"],
)
def test_a_fault_that_stays_is_named_and_nothing_is_kept(store, answer, no_chat, status):
    with LocalServer(Echo(chat("fine"), answer, answer)) as server:
        _, outcome = Caller(model(server, max_retries=1, concurrency=1), store).run([ask("b"), ask("a")])
        assert outcome.unanswered
        why = outcome.error.why
        assert (why.no_chat, why.status, why.num) == (no_chat, status, 2)
        assert store.get(outcome.key) is None
        assert Caller(model(server), store).run([ask("a")])[0].reply.text == "you said a"


def test_retry_after_is_honoured(store):
    with LocalServer(Echo(Answer({}, 429, headers={"retry-after": "0.3"}))) as server:
        began = time.perf_counter()
        Caller(model(server), store).run([ask("a")])
    assert time.perf_counter() - began >= 0.3


@pytest.mark.parametrize("status", [429, 503])
def test_no_wait_is_longer_than_max_backoff_s(store, status):
    with LocalServer(Echo(Answer({}, status, headers={"retry-after": "300"}))) as server:
        began = time.perf_counter()
        (found,) = Caller(model(server, max_backoff_s=0.2), store).run([ask("a")])
    assert found.error is None
    assert 0.2 <= time.perf_counter() - began < 100


def test_a_slow_endpoint_times_out_and_the_run_goes_on(store):
    class OneIsSlow(Echo):
        async def __call__(self, path, body):
            if body["model"] == "slow":
                await asyncio.sleep(600)  # for ever: the server ends first
            return await super().__call__(path, body)

    with LocalServer(OneIsSlow()) as server:
        # Only one of the two has a limit that matters: the other must not fail on a machine that is slow itself.
        hasty = ModelConfig(name="slow", base_url=server.url, backoff_s=0.01, timeout_s=0.1, max_retries=1)
        caller = Caller({**model(server), "slow": hasty}, store)
        slow, fast = caller.run([Request("slow", ("slow",)), ask("fast")])
    assert slow.unanswered
    assert (slow.error.model, slow.error.why.status, slow.error.why.num) == ("slow", None, 2)
    assert fast.reply.text == "you said fast"
    assert store.get(slow.key) is None
    (spent,) = store.ledger()[1:]
    assert (spent.calls, spent.lost_calls) == (0, 2), "the provider may have answered, and bills that"


def test_a_wrong_key_stops_at_once(store, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-very-secret-1")
    refusal = Answer({"error": {"message": "Incorrect API key provided: sk-very-secret-1"}}, 401)
    echo = Echo(*[refusal] * 2000, delay_s=0.01)
    with LocalServer(echo) as server:
        caller = Caller(model(server, key_env="A_KEY", concurrency=8), store)
        with error_about(StopCalls, "key", 401) as raised:
            caller.run([ask(str(number)) for number in range(2000)])
    assert sum(echo.seen.values()) <= 8
    assert "sk-very" not in str(raised.value)


def test_a_key_that_is_not_set_is_named_before_any_call(store, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with error_about(UserError, "A_KEY"):
        Caller({"m": ModelConfig(name="m", key_env="A_KEY")}, store)


@pytest.mark.parametrize(
    "url",
    ["http://me:pw@host/v1", "http://host/v1?key=1", "host:8000", "http://host:x/v1", "http://host:99999/v1"],
)
def test_addresses_with_secrets_or_without_a_host_are_refused(store, url):
    with error_about(UserError, "models.m.base_url"):
        Caller({"m": ModelConfig(name="m", base_url=url)}, store)


def test_an_endpoint_that_is_down(store, monkeypatch):
    monkeypatch.setattr(sender, "MAX_UNANSWERED_IN_A_ROW", 3)
    settings = ModelConfig(
        name="m", base_url="http://127.0.0.1:9/v1", max_retries=1, backoff_s=0.01, concurrency=2
    )
    with error_about(StopCalls, "unanswered"):
        Caller({"m": settings}, store).run([ask(str(number)) for number in range(100)])


def test_a_model_that_is_not_there(store):
    with LocalServer(Echo(Answer({"error": {"message": "no model m"}}, 404))) as server:
        with error_about(StopCalls, "address", 404):
            Caller(model(server), store).run([ask("a")])


def test_tokens_and_money_are_counted(store):
    """100 tokens at 3 and 20 at 15 per million are 0.0006 a call."""
    with LocalServer(Echo()) as server:
        Caller(model(server, input_price=3, output_price=15), store).run([ask("a"), ask("b")])
    (found,) = store.ledger()
    assert (found.calls, found.input_tokens, found.output_tokens) == (2, 200, 40)
    assert found.cost == pytest.approx(0.0012)
    assert (found.lost_calls, found.lost_cost) == (0, 0)


def test_a_count_of_tokens_that_cannot_be_is_replaced_by_the_estimate(store):
    with LocalServer(Echo(chat("fine", input_tokens=10**30, output_tokens=7))) as server:
        Caller(model(server), store).run([ask("a" * 300)])
    (found,) = store.ledger()
    assert (found.input_tokens, found.output_tokens) == (100, 7)


def test_thoughts_that_are_only_in_the_total_are_paid_for(store):
    """As Gemini and xAI report them: 100 for the prompt, 20 for the answer, 380 for thoughts."""
    thinks = chat("fine", input_tokens=100, output_tokens=20)
    thinks.body["usage"]["total_tokens"] = 500
    with LocalServer(Echo(thinks)) as server:
        Caller(model(server, output_price=1e6), store).run([ask("a")])
    (found,) = store.ledger()
    assert (found.input_tokens, found.output_tokens, found.cost) == (100, 400, 400)


def test_the_budget_stops_and_the_next_run_goes_on(store):
    """Price 1 per output token: a call costs 20 and might cost 100, so 200 buys six: 5 * 20 + 100 fits, 120 + 100 not."""
    echo = Echo()
    requests = [ask(str(number), max_tokens=100) for number in range(20)]
    with LocalServer(echo) as server:
        with pytest.raises(BudgetReached):
            Caller(model(server, output_price=1e6, budget=200), store).run(requests)
        assert sum(echo.seen.values()) == 6
        assert store.spent(f"m at {server.url}") == 120
        Caller(model(server, output_price=1e6, budget=10_000), store).run(requests)
    assert set(echo.seen.values()) == {1}


def test_a_budget_without_prices_is_refused(store):
    with error_about(UserError, "models.m.budget"):
        Caller({"m": ModelConfig(name="m", budget=1)}, store)


def test_a_malformed_answer_is_kept_with_its_raw_text_and_paid_once(store):
    echo = Echo(chat("x" * 70 * 1024))
    with LocalServer(echo) as server:
        first = Caller(model(server, reasks=0), store).run([ask("a")])[0]
        second = Caller(model(server, reasks=0), store).run([ask("a")])[0]
    assert isinstance(first.error, TooLong)
    assert isinstance(second.error, TooLong)
    assert second.cached
    assert b"xxx" in store.get(first.key)
    assert echo.seen == {"a": 1}


# ---------------------------------------------------------------------------------------------------------- the store


def put(store: AnswerStore, key: str, raw: bytes = b"{}", cost: float = 0.5) -> None:
    store.put(store.begin_attempt("m", key, (1, 2), 9.0, {}), key, "m", raw, Usage(1, 2, 0, False), cost, 0.1)


def test_an_answer_is_never_changed(store):
    first, second = (json.dumps(chat(text).body).encode() for text in ("first", "second"))
    put(store, "k", first)
    put(store, "k", second)
    assert store.get("k") == first
    assert store.spent("m") == 1.0, "both were paid"
    for statement in ("UPDATE replies SET raw = ''", "DELETE FROM replies"):
        with pytest.raises(sqlite3.IntegrityError):
            store._db.execute(statement)


def test_a_full_disk_stops(store):
    number = store.begin_attempt("m", "k", (1, 2), 9.0, {})
    store._db.execute(f"PRAGMA max_page_count={store._db.execute('PRAGMA page_count').fetchone()[0]}")
    with error_about(UserError, store.path.name):
        store.put(number, "k", "m", b"x" * 100_000, Usage(1, 2, 0, False), 0.5, 0.1)
    assert store.get("k") is None
    assert store.spent("m") == 9.0, "it stays at the most it may have cost"


def test_what_was_under_way_when_a_process_was_killed_stays_in_the_ledger(tmp_path):
    first = AnswerStore(tmp_path / "c")
    put(first, "a")
    first.begin_attempt("m", "b", (1, 2), 9.0, {})
    first.close()  # as a kill would
    again = AnswerStore(tmp_path / "c")
    (found,) = again.ledger()
    assert (found.calls, found.cost, found.lost_calls, found.lost_cost) == (1, 0.5, 1, 9.0)
    assert again.begin_attempt("m", "b", (1, 2), 9.0, {"m": 18.4}) is None, (
        "9.5 are gone, and this may cost 9 more"
    )
    assert again.begin_attempt("m", "b", (1, 2), 9.0, {"m": 18.5}) is not None
    assert again.begin_attempt("n", "b", (1, 2), 9.0, {"n": 9.0}) is not None, (
        "another endpoint has a budget of its own"
    )


def test_a_file_that_is_no_cache(tmp_path):
    (tmp_path / "x").write_bytes(b"not a database at all" * 100)
    with error_about(UserError, "x"):
        AnswerStore(tmp_path / "x")


def test_a_file_that_another_process_is_making_is_waited_for(tmp_path):
    """SQLite refuses the switch to write-ahead mode at once where another connection has begun to write."""
    other = sqlite3.connect(tmp_path / "c", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE anything (x)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.close)
    release.start()
    put(AnswerStore(tmp_path / "c"), "k")
    release.join()


def test_processes_share_the_file(tmp_path):
    (tmp_path / "write.py").write_text(
        "import sys\n"
        "from rge.calls.wire.replies import Usage\nfrom rge.calls.store import AnswerStore\n"
        "store = AnswerStore(sys.argv[1])\n"
        "for n in range(50):\n"
        "    key = f'{sys.argv[2]}-{n}'\n"
        "    store.put(store.begin_attempt('m', key, (1, 1), 2.0, {}), key, 'm', b'{}', Usage(1, 1, 0, False), 1.0, 0.0)\n"
    )
    with ExitStack() as stack:
        running = [
            stack.enter_context(Program(tmp_path / "write.py", tmp_path / "c", name)) for name in "abc"
        ]
        assert [program.finished().returncode for program in running] == [0, 0, 0]
    shared = AnswerStore(tmp_path / "c")
    assert shared.num_replies() == 150
    assert shared.spent("m") == 150.0


@pytest.mark.slow
def test_killed_and_resumed_no_kept_call_is_repeated(tmp_path):
    """SIGKILL in the middle; answers that were under way may come twice, kept ones never."""
    echo = Echo(delay_s=0.02, hold_from=23)
    (tmp_path / "ask.py").write_text(
        "import sys\n"
        "from rge.calls.store import AnswerStore\n"
        "from rge.calls.caller import Caller\n"
        "from rge.calls.model_config import ModelConfig\n"
        "from rge.calls.request import Request\n"
        "models = {'m': ModelConfig(name='m', base_url=sys.argv[1], concurrency=4)}\n"
        "Caller(models, AnswerStore(sys.argv[2])).run([Request('m', (str(n),)) for n in range(60)])\n"
    )
    with LocalServer(echo) as server:
        command = [tmp_path / "ask.py", server.url, tmp_path / "c"]
        with Program(*command) as program:
            program.wait_until(echo.holds)
            program.kill()
        store = AnswerStore(tmp_path / "c")
        done = {str(n) for n in range(60) if store.get(ask(str(n)).key())}
        before = dict(echo.seen)
        assert 23 - 4 <= len(done) < 23
        echo.hold_from = None
        assert forked.run(*command).returncode == 0
    assert store.num_replies() == 60
    assert all(echo.seen[text] == before[text] for text in done)
    assert sum(echo.seen.values()) <= 60 + 4, "at most the calls under way come twice"


# --------------------------------------------------------------------------------------------------- keys and pictures


def encode(image: Image.Image, kind: str, **settings) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def test_the_key_follows_content_not_place(tmp_path):
    a, b = Picture("a.png", "1" * 64), Picture("b.png", "1" * 64)
    assert Request("m", (a, "x")).key() == Request("m", (b, "x")).key()
    base = Request("m", (a, "x"))
    others = [
        Request("n", (a, "x")),
        Request("m", ("x", a)),
        Request("m", (Picture("a.png", "2" * 64), "x")),
        Request("m", (Picture("a.png", "1" * 64, 512), "x")),
        Request("m", (a, "x"), system="s"),
        Request("m", (a, "x"), temperature=0.1),
        Request("m", (a, "x"), max_tokens=5),
        Request("m", (a, "x"), sample=1),
    ]
    assert len({request.key() for request in [base, *others]}) == 9


def test_the_key_is_stable():
    """A key of today finds the answers of tomorrow: changing how keys are made throws paid answers away."""
    assert (
        Request("m", ("x",)).key()
        == hashlib.sha256(
            b'{"model": "m", "parts": ["x"], "settings": [0.0, 1024, 0], "system": null}'
        ).hexdigest()
    )


def sent_as(data: bytes, max_side_px: int = 1024) -> tuple[str, bytes]:
    url = data_url(Picture(data, hashlib.sha256(data).hexdigest(), max_side_px))
    return url.partition(";")[0], decode_data_url(url)


def test_pictures_that_servers_read_are_sent_unchanged():
    data = encode(Image.new("RGB", (20, 10), "red"), "WEBP")
    assert sent_as(data) == ("data:image/webp", data)


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("RGB", "BMP"), ("RGB", "TIFF")])
def test_other_pictures_are_sent_as_jpeg(mode, kind):
    media_type, sent = sent_as(encode(Image.new(mode, (20, 10)), kind))
    assert media_type == "data:image/jpeg"
    assert Image.open(io.BytesIO(sent)).mode == "RGB"


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_animations_are_not_sent(kind):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    with error_about(ImageError, "animated"):
        sent_as(encode(frames[0], kind, save_all=True, append_images=frames[1:]))


def test_large_pictures_are_scaled_down():
    _, sent = sent_as(encode(Image.new("RGB", (400, 100)), "PNG"), 200)
    assert Image.open(io.BytesIO(sent)).size == (200, 50)


# ------------------------------------------------------------------------------------------------------------ replies


def reply(text: str, stop: str = "stop") -> Reply:
    return Reply(text, stop)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ("<html>busy</html>", NotAChat),
        ('{"result": 1}', NotAChat),
        ("[1]", NotAChat),
        ("[" * 100_000, NotAChat),
        ('{"choices": [1]}', EmptyChoices),
        ('{"choices": []}', EmptyChoices),
        ('{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}', EmptyChoices),
        ('{"type": "message", "content": []}', NotAChat),
    ],
)
def test_bodies_that_are_no_answers(raw, error):
    with pytest.raises(error):
        raise read_replies(raw.encode())[0]


@pytest.mark.parametrize(
    ("text", "stop", "error"),
    [
        ("ABSTAIN DUE TO SENSITIVE IMAGE", "stop", Abstained),
        ("**ABSTAIN**", "stop", Abstained),
        ("I'm sorry, I can't help with that.", "stop", Refused),
        ("", "refusal", Refused),
        ("<a>half", "length", Truncated),
    ],
)
def test_answers_without_the_format(text, stop, error):
    with pytest.raises(error):
        check_complete(reply(text, stop), "a")


def test_a_complete_answer_is_complete_however_it_stopped():
    check_complete(reply("I can't see much, but <A>yes</A>", "length"), "a")


@pytest.mark.parametrize(
    ("content", "stop", "text"),
    [
        ("<think>No: <a>no</a>? ABSTAIN?</think>\n\n<a>yes</a>", "stop", "\n\n<a>yes</a>"),
        ("No: <a>no</a>?</think>\nABSTAIN", "stop", "\nABSTAIN"),  # its prompt opens the thoughts
        ('<think>{"a": 1}</think>{"a": 2}', "stop", "<a>2</a>"),
        ("[THINK]<a>no</a>[/THINK]<a>yes</a>", "stop", "<a>yes</a>"),
        ("<thinking><a>no</a></thinking><a>yes</a>", "stop", "<a>yes</a>"),
        ("◁think▷<a>no</a>◁/think▷<a>yes</a>", "stop", "<a>yes</a>"),
        ("<|channel>thought\n<a>no</a><channel|><a>yes</a>", "stop", "<a>yes</a>"),
        ("<|channel|>analysis<|message|><a>no</a><|end|><|start|>assistant<|channel|>final<|message|><a>yes</a><|return|>",
         "stop", "<a>yes</a>"),
        ('<|channel|>final <|constrain|>json<|message|>{"a": "yes"}<|return|>', "stop", "<a>yes</a>"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "<a>no</a>"}]}, {"type": "text", "text": "<a>yes</a>"}],
         "stop", "<a>yes</a>"),
        ([{"type": "reasoning", "text": "<a>no</a>"}, {"text": "<a>yes</a>"}], "stop", "<a>yes</a>"),
        ("[thinking] <a>yes</a> </think]", "stop", "[thinking] <a>yes</a> </think]"),  # no such marks
        (" " * 200_000 + "<a>yes</a>", "stop", " " * 200_000 + "<a>yes</a>"),
    ],
)  # fmt: skip
def test_thoughts_that_a_server_leaves_in_the_answer_are_none(content, stop, text):
    body = {"choices": [{"message": {"content": content}, "finish_reason": stop}]}
    assert read_replies(json.dumps(body).encode()) == [reply(text, stop)]


@pytest.mark.parametrize(
    "content",
    [
        "<think>Perhaps <a>no</a>, but",
        "\n<seed:think>Perhaps <a>no</a>, but",
        "<|channel|>analysis<|message|>Perhaps <a>no</a>, but",
        "<|channel>thought\nPerhaps <a>no</a>, but",
        [{"type": "reasoning", "text": "Perhaps <a>no</a>, but"}],
    ],
)
def test_thoughts_that_were_cut_off_are_no_content(content):
    body = {"choices": [{"message": {"content": content}, "finish_reason": "length"}]}
    (found,) = read_replies(json.dumps(body).encode())
    assert isinstance(found, Truncated)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"a": null, "b": "x"}', "<a></a>\n<b>x</b>"),  # empty, not the word None
        ('{"a": ["one", "two"]}', "<a>one\ntwo</a>"),
        ('{"a": [{"b": 1}, {"b": true}]}', "<a><b>1</b>\n<b>True</b></a>"),
        ('{"a": "half of a \\ud83d"}', "<a>half of a ?</a>"),  # could not be written to a table
    ],
)
def test_json_of_any_kind_becomes_text(written, text):
    body = {"choices": [{"message": {"content": written}, "finish_reason": "stop"}]}
    assert read_replies(json.dumps(body).encode()) == [reply(text)]


def test_probabilities_of_tokens_are_content():
    """A model that only thinks has no text in its first token, but a judge may read yes and no in its probabilities."""
    choice = {"message": {"content": None}, "finish_reason": "length"}
    choice["logprobs"] = {"content": [{"token": "yes", "top_logprobs": [{"token": "yes", "logprob": -0.1}]}]}
    assert read_replies(json.dumps({"choices": [choice]}).encode()) == [reply("", "length")]


def test_tags():
    assert tag("<x>one</x> <X>\n two  words</X>", "x") == "two words"
    for text in ("nothing", "<x> </x>"):
        with error_about(MissingTag, "x"):
            tag(text, "x")
    assert parse_choice("<x>Yes.</x>", "x", {"yes": 1, "no": 0}) == 1
    with error_about(BadValue, "x"):
        parse_choice("<x>maybe</x>", "x", {"yes": 1, "no": 0})


def test_requests_are_read_as_they_are_needed_and_equal_ones_asked_once(store, monkeypatch):
    """One model is held up; the other goes on, until too much would pile up for the first."""
    monkeypatch.setattr(grouping, "REQUESTS_AT_ONCE", 4)
    monkeypatch.setattr(sender, "CALLS_AHEAD", 4)
    read, held_at, seen = [], [], Counter()

    async def answer(path, body):
        text = body["messages"][-1]["content"][0]["text"]
        seen[body["model"], text] += 1
        if body["model"] == "held" and not held_at:
            before = 0
            while seen.total() > before:
                before = seen.total()
                await asyncio.sleep(0.3)
            held_at.append((len(read), seen.total()))
        return chat(f"you said {text}")

    def requests():
        for number in range(20):
            for name in ("held", "fast"):
                read.append(number)
                yield Request(name, (str(number % 15),))

    with LocalServer(answer) as server:
        named = {
            name: ModelConfig(name=name, base_url=server.url, concurrency=1) for name in ("held", "fast")
        }
        outcomes = Caller(named, store).run(requests())
    # Read four at a time: the first of the held one is under way, four wait, and reading waits with the sixth.
    assert held_at == [(13, 6)], "the thirteenth was read to see that it is another prompt"
    said = [outcome.reply.text for outcome in outcomes]
    assert said == [f"you said {number % 15}" for number in range(20) for _ in range(2)]
    assert len(seen) == 30
    assert set(seen.values()) == {1}
