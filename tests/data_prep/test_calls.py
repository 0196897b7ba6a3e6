"""Model calls over real HTTP against a server on this machine."""

import asyncio
import hashlib
import io
import re
import sqlite3
import threading
import time
from collections import Counter
from contextlib import ExitStack

import forked
import pytest
from forked import Program
from PIL import Image

from data_prep.calls import client
from data_prep.calls.cache import CacheError, Kept, ReplyCache
from data_prep.calls.client import BudgetReached, Caller, EndpointDown, KeyRejected, ModelConfig, _Desk
from data_prep.calls.local_server import Answer, LocalServer, chat
from data_prep.calls.replies import (
    Abstained,
    BadValue,
    EmptyChoices,
    MissingTag,
    NotAChat,
    Refused,
    Reply,
    Truncated,
    check_complete,
    one_of,
    read_reply,
    tag,
)
from data_prep.calls.request import Picture, Request, sendable
from rge.common.errors import UserError


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
def cache(tmp_path):
    made = ReplyCache(tmp_path / "replies.sqlite")
    yield made
    made.close()


def model(server: LocalServer, **settings) -> dict[str, ModelConfig]:
    return {"m": ModelConfig(**{"name": "m", "base_url": server.url, "backoff_s": 0.01, **settings})}


def test_answers_come_back_in_order_and_are_asked_once(cache):
    echo = Echo()
    with LocalServer(echo) as server:
        caller = Caller(model(server), cache)
        outcomes = caller.run([ask("a"), ask("b"), ask("a")])
        assert [outcome.reply.text for outcome in outcomes] == ["you said a", "you said b", "you said a"]
        again = Caller(model(server), cache)
        assert all(outcome.cached for outcome in again.run([ask("b"), ask("a")]))
    assert echo.seen == {"a": 1, "b": 1}
    assert (again.counts.asked, again.counts.cached) == (0, 2)


def test_a_draw_of_its_own_is_a_call_of_its_own(cache):
    echo = Echo()
    with LocalServer(echo) as server:
        Caller(model(server), cache).run([ask("a", sample=0), ask("a", sample=1), ask("a", temperature=0.5)])
    assert echo.seen == {"a": 3}


def test_concurrency_is_limited(cache):
    echo = Echo(delay_s=0.02, together=3)
    with LocalServer(echo) as server:
        caller = Caller(model(server, concurrency=3, timeout_s=60, max_retries=0), cache)
        assert not any(outcome.failed for outcome in caller.run([ask(str(number)) for number in range(12)]))
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
def test_transient_faults_are_retried(cache, first):
    with LocalServer(Echo(first, first)) as server:
        caller = Caller(model(server), cache)
        assert caller.run([ask("a")])[0].reply.text == "you said a"
    assert caller.counts.retries == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer("<html>gateway</html>", content_type="text/html"), "not JSON but '<html>gateway</html>'"),
        (Answer({"object": "something else"}), "JSON of another schema: .*something else"),
        (Answer({"error": {"message": "busy"}}, 503), "HTTP 503: .*busy"),
    ],
    ids=["html", "schema", "503"],
)
def test_a_fault_that_stays_is_named_and_nothing_is_kept(cache, answer, said):
    with LocalServer(Echo(answer, answer)) as server:
        outcome = Caller(model(server, max_retries=1), cache).run([ask("a")])[0]
        assert outcome.lost
        assert re.search(f"{said}.*2 attempts", str(outcome.error))
        assert cache.get(outcome.key) is None
        assert Caller(model(server), cache).run([ask("a")])[0].reply.text == "you said a"


def test_retry_after_is_honoured(cache):
    with LocalServer(Echo(Answer({}, 429, headers={"retry-after": "0.3"}))) as server:
        began = time.perf_counter()
        Caller(model(server), cache).run([ask("a")])
    assert time.perf_counter() - began >= 0.3


def test_a_slow_endpoint_times_out_and_the_run_goes_on(cache):
    class OneIsSlow(Echo):
        async def __call__(self, path, body):
            if body["model"] == "slow":
                await asyncio.sleep(600)  # for ever: the server ends first
            return await super().__call__(path, body)

    with LocalServer(OneIsSlow()) as server:
        # Only one of the two has a limit that matters: the other must not fail on a machine that is slow itself.
        hasty = ModelConfig(name="slow", base_url=server.url, backoff_s=0.01, timeout_s=0.1, max_retries=1)
        caller = Caller({**model(server), "slow": hasty}, cache)
        slow, fast = caller.run([Request("slow", ("slow",)), ask("fast")])
    assert slow.failed
    assert slow.lost
    assert "slow: no answer within 0.1 s (2 attempts)" in str(slow.error)
    assert fast.reply.text == "you said fast"
    assert cache.get(slow.key) is None
    assert cache.failures()[0][0] == "failed call"


def test_a_wrong_key_stops_at_once(cache, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-very-secret-1")
    refusal = Answer({"error": {"message": "Incorrect API key provided: sk-very-secret-1"}}, 401)
    echo = Echo(*[refusal] * 2000, delay_s=0.01)
    with LocalServer(echo) as server:
        caller = Caller(model(server, key_env="A_KEY", concurrency=8), cache)
        with pytest.raises(KeyRejected, match=r"rejects the key \(from A_KEY\); HTTP 401.*\[key\]") as raised:
            caller.run([ask(str(number)) for number in range(2000)])
    assert sum(echo.seen.values()) <= 8
    assert "sk-very" not in str(raised.value)


def test_a_key_that_is_not_set_is_named_before_any_call(cache, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UserError, match="A_KEY"):
        Caller({"m": ModelConfig(name="m", key_env="A_KEY")}, cache)


def test_no_secret_reaches_the_cache_or_its_keys(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", "sk-very-secret-1")
    leaky = Echo(chat("your key is sk-very-secret-1"), Answer({"error": "sk-very-secret-1"}, 400))
    with LocalServer(leaky) as server:
        Caller(model(server, key_env="A_KEY", concurrency=1), cache).run([ask("a"), ask("b")])
    cache.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"your key is [key]" in stored
    assert b"very-secret" not in stored


@pytest.mark.parametrize("url", ["http://me:pw@host/v1", "http://host/v1?key=1", "host:8000"])
def test_addresses_with_secrets_or_without_a_host_are_refused(cache, url):
    with pytest.raises(UserError, match="base_url"):
        Caller({"m": ModelConfig(name="m", base_url=url)}, cache)


def test_an_endpoint_that_is_down(cache, monkeypatch):
    monkeypatch.setattr(client, "MAX_FAILURES_IN_A_ROW", 3)
    settings = ModelConfig(
        name="m", base_url="http://127.0.0.1:9/v1", max_retries=1, backoff_s=0.01, concurrency=2
    )
    with pytest.raises(EndpointDown, match="3 calls in a row failed.*no connection"):
        Caller({"m": settings}, cache).run([ask(str(number)) for number in range(100)])


def test_a_model_that_is_not_there(cache):
    with LocalServer(Echo(Answer({"error": {"message": "no model m"}}, 404))) as server:
        with pytest.raises(EndpointDown, match="no such model or address; HTTP 404.*no model m"):
            Caller(model(server), cache).run([ask("a")])


def test_a_refused_request_is_counted_and_not_repeated_at_once(cache):
    echo = Echo(Answer({"error": {"message": "picture too large"}}, 400))
    with LocalServer(echo) as server:
        caller = Caller(model(server, concurrency=1), cache)
        bad, good = caller.run([ask("a"), ask("b")])
        assert bad.failed
        assert not bad.lost
        assert "picture too large" in str(bad.error)
        assert good.reply is not None
        assert Caller(model(server), cache).run([ask("a")])[0].reply.text == "you said a"


def test_tokens_and_money_are_counted(cache):
    """100 tokens at 3 and 20 at 15 per million are 0.0006 a call."""
    with LocalServer(Echo()) as server:
        Caller(model(server, input_price=3, output_price=15), cache).run([ask("a"), ask("b")])
    ledger = cache.ledger()["m"]
    assert (ledger["calls"], ledger["input_tokens"], ledger["output_tokens"]) == (2, 200, 40)
    assert ledger["cost"] == pytest.approx(0.0012)


def test_the_budget_stops_and_the_next_run_goes_on(cache):
    """Price 1 per output token: a call costs 20 and might cost 100, so 200 buys six: 5 * 20 + 100 fits, 120 + 100 not."""
    echo = Echo()
    requests = [ask(str(number), max_tokens=100) for number in range(20)]
    with LocalServer(echo) as server:
        with pytest.raises(BudgetReached, match=r"120\.0000 of the budget 200 is spent"):
            Caller(model(server, output_price=1e6, budget=200), cache).run(requests)
        assert sum(echo.seen.values()) == 6
        assert cache.spent("m") == 120
        Caller(model(server, output_price=1e6, budget=10_000), cache).run(requests)
    assert set(echo.seen.values()) == {1}


def test_a_reserve_is_given_back_before_anybody_can_miss_it(cache):
    """Two calls cost the whole budget each; the second one is waiting when the first one, which cost nothing, leaves."""

    async def second_while_first_leaves():
        desk = _Desk(ModelConfig(name="m", budget=10, output_price=1), cache)
        await desk.admit(10)
        second = asyncio.create_task(desk.admit(10))
        await asyncio.sleep(0)
        async with desk._left:
            desk._left.notify_all()
            for _ in range(3):  # the second one is awake and stands first for the lock
                await asyncio.sleep(0)
            first = asyncio.create_task(desk.leave(10))
            await asyncio.sleep(0)
        await asyncio.gather(first, second)
        return desk.under_way

    assert asyncio.run(second_while_first_leaves()) == 1


def test_a_budget_without_prices_is_refused(cache):
    with pytest.raises(UserError, match="budget needs input_price and output_price"):
        Caller({"m": ModelConfig(name="m", budget=1)}, cache)


def test_a_malformed_answer_is_kept_with_its_raw_text_and_paid_once(cache):
    empty = chat("x")
    empty.body["choices"] = []
    echo = Echo(empty)
    with LocalServer(echo) as server:
        first = Caller(model(server), cache).run([ask("a")])[0]
        second = Caller(model(server), cache).run([ask("a")])[0]
    assert isinstance(first.error, EmptyChoices)
    assert isinstance(second.error, EmptyChoices)
    assert second.cached
    assert '"choices": []' in cache.get(first.key).raw
    assert echo.seen == {"a": 1}


def test_anthropic(cache):
    pytest.importorskip("anthropic")

    async def handler(path, body):
        assert path.endswith("/messages")
        usage = {"input_tokens": 7, "output_tokens": 3}
        text = {"type": "text", "text": f"{body['system']}: {body['messages'][0]['content'][0]['text']}"}
        return Answer({"type": "message", "content": [text], "stop_reason": "end_turn", "usage": usage})

    with LocalServer(handler) as server:
        models = model(server, api="anthropic")
        models["m"].base_url = server.url.removesuffix("/v1")
        outcome = Caller(models, cache).run([ask("a", system="s")])[0]
    assert outcome.reply == Reply("s: a", "stop", 7, 3)


# ---------------------------------------------------------------------------------------------------------- the cache


def kept(raw: str = "{}") -> Kept:
    return Kept(raw, 1, 2, 0.5, 0.1)


def test_an_answer_is_never_changed(cache):
    cache.put("k", "m", kept("first"))
    cache.put("k", "m", kept("second"))
    assert cache.get("k").raw == "first"
    assert cache.spent("m") == 1.0, "both were paid"
    for statement in ("UPDATE replies SET raw = ''", "DELETE FROM replies"):
        with pytest.raises(sqlite3.IntegrityError, match="an answer is never"):
            cache._db.execute(statement)


def test_a_full_disk_stops(cache):
    cache._db.execute(f"PRAGMA max_page_count={cache._db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(
        CacheError, match=r"could not be kept \(database or disk is full\); nothing more is asked"
    ):
        cache.put("k", "m", kept("x" * 100_000))
    assert cache.spent("m") == 0


def test_a_file_that_is_no_cache(tmp_path):
    (tmp_path / "x").write_bytes(b"not a database at all" * 100)
    with pytest.raises(CacheError, match="cannot be used as the file of answers"):
        ReplyCache(tmp_path / "x")


def test_a_file_that_another_process_is_making_is_waited_for(tmp_path):
    """SQLite refuses the switch to write-ahead mode at once where another connection has begun to write."""
    other = sqlite3.connect(tmp_path / "c", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE anything (x)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.close)
    release.start()
    ReplyCache(tmp_path / "c").put("k", "m", kept())
    release.join()


def test_processes_share_the_file(tmp_path):
    (tmp_path / "write.py").write_text(
        "import sys\n"
        "from data_prep.calls.cache import Kept, ReplyCache\n"
        "cache = ReplyCache(sys.argv[1])\n"
        "for n in range(50): cache.put(f'{sys.argv[2]}-{n}', 'm', Kept('{}', 1, 1, 1.0, 0.0))\n"
    )
    with ExitStack() as stack:
        running = [
            stack.enter_context(Program(tmp_path / "write.py", tmp_path / "c", name)) for name in "abc"
        ]
        assert [program.finished().returncode for program in running] == [0, 0, 0]
    shared = ReplyCache(tmp_path / "c")
    assert shared.num_replies() == 150
    assert shared.spent("m") == 150.0


@pytest.mark.slow
def test_killed_and_resumed_no_kept_call_is_repeated(tmp_path):
    """SIGKILL in the middle; answers that were under way may come twice, kept ones never."""
    echo = Echo(delay_s=0.02, hold_from=23)
    (tmp_path / "ask.py").write_text(
        "import sys\n"
        "from data_prep.calls.cache import ReplyCache\n"
        "from data_prep.calls.client import Caller, ModelConfig\n"
        "from data_prep.calls.request import Request\n"
        "models = {'m': ModelConfig(name='m', base_url=sys.argv[1], concurrency=4)}\n"
        "Caller(models, ReplyCache(sys.argv[2])).run([Request('m', (str(n),)) for n in range(60)])\n"
    )
    with LocalServer(echo) as server:
        command = [tmp_path / "ask.py", server.url, tmp_path / "c"]
        with Program(*command) as program:
            program.wait_until(echo.holds)
            program.kill()
        cache = ReplyCache(tmp_path / "c")
        done = {str(n) for n in range(60) if cache.get(ask(str(n)).key())}
        before = dict(echo.seen)
        assert 23 - 4 <= len(done) < 23
        echo.hold_from = None
        assert forked.run(*command).returncode == 0
    assert cache.num_replies() == 60
    assert all(echo.seen[text] == before[text] for text in done)
    assert sum(echo.seen.values()) <= 60 + 4, "at most the calls under way come twice"


# --------------------------------------------------------------------------------------------------- keys and pictures


def encode(image: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
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


def test_pictures_that_servers_read_are_sent_unchanged():
    data = encode(Image.new("RGB", (20, 10), "red"), "WEBP")
    assert sendable(Picture(data, "")) == ("image/webp", data)


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("RGB", "BMP"), ("RGB", "TIFF")])
def test_other_pictures_are_sent_as_jpeg(mode, kind):
    media_type, sent = sendable(Picture(encode(Image.new(mode, (20, 10)), kind), ""))
    assert media_type == "image/jpeg"
    assert Image.open(io.BytesIO(sent)).mode == "RGB"


def test_large_pictures_are_scaled_down():
    _, sent = sendable(Picture(encode(Image.new("RGB", (400, 100)), "PNG"), "", max_side_px=200))
    assert Image.open(io.BytesIO(sent)).size == (200, 50)


# ------------------------------------------------------------------------------------------------------------ replies


def reply(text: str, stop: str = "stop") -> Reply:
    return Reply(text, stop, 1, 2)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ("<html>busy</html>", NotAChat),
        ('{"result": 1}', NotAChat),
        ("[1]", NotAChat),
        ('{"choices": [1]}', NotAChat),
        ('{"choices": [{"message": {"content": ["x"]}}]}', NotAChat),
        ('{"choices": []}', EmptyChoices),
        ('{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}', EmptyChoices),
        ('{"type": "message", "content": []}', EmptyChoices),
    ],
)
def test_bodies_that_are_no_answers(raw, error):
    with pytest.raises(error):
        read_reply(raw)


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


def test_tags():
    assert tag("<x>one</x> <X>\n two  words</X>", "x") == "two words"
    with pytest.raises(MissingTag, match="<x> is missing in 'nothing'"):
        tag("nothing", "x")
    with pytest.raises(MissingTag, match="<x> is empty"):
        tag("<x> </x>", "x")
    assert one_of("<x>Yes.</x>", "x", {"yes": 1, "no": 0}) == 1
    with pytest.raises(BadValue, match="<x> must be one of yes, no; got 'maybe'"):
        one_of("<x>maybe</x>", "x", {"yes": 1, "no": 0})
