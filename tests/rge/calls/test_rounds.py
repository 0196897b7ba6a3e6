"""Rounds of batches of several models."""

import asyncio

import pytest

from rge.calls import caller
from rge.calls.caller import Caller
from rge.calls.dispatch.grouping import Call
from rge.calls.model_config import ModelConfig
from rge.calls.request import Request
from rge.calls.store import AnswerStore


def test_a_models_last_round_does_not_wait_for_another_models_round(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []

    async def make_batches(run: caller._ModelRun, calls: list[Call]) -> None:
        began.append(calls[0].request.model)
        async with asyncio.timeout(2):
            while "b" not in began:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(caller, "CALLS_A_ROUND", 2)
    monkeypatch.setattr(caller._ModelRun, "_make_batches", make_batches)
    models = {
        name: ModelConfig(name=name, base_url=f"http://127.0.0.1:9/{name}", mode="batch") for name in "ab"
    }
    requests = [Request("a", (f"{number}",)) for number in range(3)] + [Request("b", ("0",))]
    Caller(models, AnswerStore(None)).run(requests, lambda position, outcome: None)
    assert sorted(began) == ["a", "a", "b"]
