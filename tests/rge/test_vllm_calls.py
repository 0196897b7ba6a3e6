"""`api=vllm`: the same calls by an engine in this process; and, where vLLM is installed, the engine itself with a tiny model.

In an environment that has it: ``python -m pytest -m vllm tests/rge/test_vllm_calls.py``.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

import rge
from rge.calls.caller import Caller
from rge.calls.failures import RequestRejected
from rge.calls.local_server import LocalServer, chat
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.providers import engine
from rge.calls.replies import MissingTag, tag
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.common.errors import UserError

TINY = str(Path(rge.__file__).parent / "demo_checkpoint")


def models(**more) -> dict[str, ModelConfig]:
    return {
        "m": ModelConfig(**{"name": "m", "api": "vllm", "concurrency": 2, "engine": {"model": TINY}, **more})
    }


def ask(*texts: str, **settings) -> list[Request]:
    return [Request("m", (text,), **settings) for text in texts]


# ------------------------------------------------------------------------------------------------------ without vLLM


class Stand:
    """In vLLM's place: answers with the prompt, and takes none that is too long."""

    name = "no vllm"

    def __init__(self, model, rows, more):
        self.model, self.calls, self.closed = model, [], False

    def answer(self, conversations, sampling, *, schemas, **how):
        if any("long" in str(one) for one in conversations):
            raise ValueError("The decoder prompt is longer than\nthe maximum model length")
        self.calls.append((conversations, sampling, schemas, how))
        return [
            Output(one[-1]["content"], how["n"]) for one, how in zip(conversations, sampling, strict=True)
        ]

    def close(self):
        self.closed = True


class Output:
    def __init__(self, content, n):
        self.prompt_token_ids, self.num_cached_tokens = list(range(10)), 4
        again = "again " if any("Your last answer" in part["text"] for part in content) else ""
        self.outputs = [
            Written(number, f"<x>{again}{content[0]['text']} {number}</x>") for number in range(n)
        ]


class Written:
    def __init__(self, index, text):
        self.index, self.text, self.token_ids, self.finish_reason, self.logprobs = (
            index,
            text,
            (1, 2, 3),
            "stop",
            None,
        )


@pytest.fixture
def store():
    made = AnswerStore(None)
    yield made
    made.close()


@pytest.fixture
def stands(monkeypatch):
    """Engines as they are made."""
    made = []

    def loaded(model):
        known = json.dumps([model.name, model.engine])
        if not made or made[-1][0] != known:
            made.append((known, Stand(model.name, model.concurrency, {})))
        return made[-1][1]

    monkeypatch.setattr(engine, "_loaded", loaded)
    return made


def test_an_engine_answers_as_a_server_does(store, stands):
    """Same keys: what a server has answered is not asked of the engine, nor the other way round."""
    found = Caller(models(), store).run(ask("a", "b", temperature=0.5, sample=7))
    assert [tag(one.reply.text, "x") for one in found] == ["a 0", "b 0"]
    ((_, stand),) = stands
    assert stand.calls[0][1][0] == {"temperature": 0.5, "max_tokens": 1024, "n": 1, "seed": 7}
    (spent,) = store.ledger()
    assert (spent.endpoint, spent.calls, spent.input_tokens, spent.output_tokens) == ("m at vllm", 2, 20, 6)
    assert (spent.cached_tokens, spent.cost, spent.lost_calls) == (8, 0, 0)

    async def never(path, body):
        raise AssertionError

    with LocalServer(never) as server:
        http = {"m": ModelConfig(name="m", base_url=server.url)}
        again = Caller(http, store).run(ask("a", "b", temperature=0.5, sample=7))
    assert all(one.cached for one in again)


def test_one_that_is_too_long_is_rejected_and_the_others_are_answered(store, stands):
    texts = [str(number) for number in range(20)]
    caller = Caller(models(), store)
    *good, bad = caller.run(ask(*texts, "long"))
    assert [tag(one.reply.text, "x") for one in good] == [f"{text} 0" for text in texts]
    assert bad.failed
    assert "longer than the maximum" in str(bad.error)
    assert (caller.counts.asked, caller.counts.failed) == (20, 1)
    assert max(len(call[0]) for call in stands[0][1].calls) <= engine.ROUNDS * 2
    assert store.ledger()[0].lost_calls == 0
    with pytest.raises(RequestRejected, match="longer than the maximum model length"):
        Caller(models(), store).run(ask("long", "too long"))


def test_draws_forms_and_what_is_unreadable(store, stands):
    def read(reply):
        if not reply.text.startswith("<x>again") and reply.text.endswith("2</x>"):
            raise MissingTag("no")

    requests = [ask("a", sample=sample, temperature=1.0, fields=(("x", None),))[0] for sample in range(4)]
    caller = Caller(
        models(draws_a_call=4, structured=True, extra_body={"top_k": 5, "chat_template_kwargs": {"t": 1}}),
        store,
    )
    found = caller.run(requests, read=read)
    assert [tag(one.reply.text, "x") for one in found] == ["a 0", "a 1", "again a 0", "a 3"]
    (first, again) = stands[0][1].calls
    assert (first[1][0]["n"], first[1][0]["top_k"], again[1][0]["n"]) == (4, 5, 1)
    assert first[2][0]["required"] == ["x"]
    assert first[3] == {"chat_template_kwargs": {"t": 1}}
    assert caller.counts.reasked == 1


def test_http_and_engine_in_one_panel(store, stands):
    async def answer(path, body):
        return chat("<x>http</x>")

    with LocalServer(answer) as server:
        both = {**models(), "h": ModelConfig(name="h", base_url=server.url)}
        found = Caller(both, store).run([*ask("a"), Request("h", ("a",))])
    assert [tag(one.reply.text, "x") for one in found] == ["a 0", "http"]


def test_an_engine_that_does_not_start_leaves_nothing_in_the_ledger(store, monkeypatch):
    def loaded(model):
        raise UserError("vLLM does not start")

    monkeypatch.setattr(engine, "_loaded", loaded)
    with pytest.raises(UserError, match="does not start"):
        Caller(models(), store).run(ask("a"))
    assert store.ledger() == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named(store):
    with pytest.raises(UserError, match=r"api=vllm needs vLLM.*pip install -e '\.\[vllm\]'"):
        Caller(models(), store).run(ask("a"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "batch"}, "mode means nothing to api=vllm"),
        ({"base_url": "http://host/v1"}, "base_url means nothing to api=vllm"),
        ({"api": "openai"}, "engine is for api=vllm"),
    ],
)
def test_settings_that_cannot_be_right(settings, message):
    with pytest.raises(UserError, match=message):
        check_model("models.m", models(**settings)["m"])


# --------------------------------------------------------------------------------------------------------- with vLLM

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@with_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers(store, tmp_path):
    """Pictures are seen, draws differ, schemas hold, log probabilities come, and what is kept is not asked again."""
    for name, color in (("red", "red"), ("blue", "blue")):
        Image.new("RGB", (84, 84), color).save(tmp_path / f"{name}.png")
    red, blue = (Picture(str(tmp_path / f"{name}.png"), name) for name in ("red", "blue"))
    small = {"model": TINY, "max_model_len": 512, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    settings = {"engine": small, "draws_a_call": 2, "extra_body": {"ignore_eos": True}}
    requests = [
        *ask("What opens this?", max_tokens=8),
        Request("m", ("What opens this?", red), max_tokens=8),
        Request("m", ("What opens this?", blue), max_tokens=8),
        *(
            Request("m", ("What opens this?", red), max_tokens=8, temperature=1.0, sample=sample)
            for sample in range(4)
        ),
        *ask("word " * 600, max_tokens=8),
        *ask("yes or no?", max_tokens=1, top_logprobs=5),
    ]
    try:
        caller = Caller(models(**settings), store)
        found = caller.run(requests)
        texts = [one.reply.text for one in found[:7]]
        assert texts[0] != texts[1] != texts[2]
        assert len(set(texts[3:7])) == 4
        assert found[7].failed
        assert "512" in str(found[7].error)
        assert len(found[8].reply.top_logprobs) >= 5
        assert caller.counts.asked == 6, "two draws a call"
        (spent,) = store.ledger()
        assert (spent.calls, spent.output_tokens, spent.cost) == (6, 3 * 8 + 4 * 8 + 1, 0)
        assert all(one.cached for one in Caller(models(**settings), store).run(requests[:7]))
        # Once more from nothing: the same words.
        assert [
            one.reply.text for one in Caller(models(**settings), AnswerStore(None)).run(requests[:7])
        ] == texts
        held = {**settings, "structured": True, "extra_body": {}, "draws_a_call": 1}
        (answer,) = Caller(models(**held), store).run(
            ask("?", max_tokens=64, fields=(("x", ("True", "False")),))
        )
        assert tag(answer.reply.text, "x") in ("True", "False")
    finally:
        engine.close()
