"""A reward from a judge model behind an OpenAI-compatible endpoint.

Calls go through `rge.calls`: rate-limited, retried and within a budget. Answers are cached in ``judge.sqlite`` in the stage's
folder, so that none is paid for twice and a resumed run gets the same ones. The main process calls for all: several machines
cannot share such a file, and concurrency, pace and budget are the endpoint's.
"""

import json
import math
import re
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rge.calls.caller import Caller
from rge.calls.grouping import Outcome
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import BadValue, Reply, ReplyError, Truncated
from rge.common.errors import UserError
from rge.common.options import build
from rge.distributed import collectives as dist
from rge.rl.rewards import Rollouts, reward

BEST = 10
"""The best possible mark."""

INSTRUCTION = f"""A search engine writes a short line of reasoning about a query before it looks the answer up.
Say how well the reasoning works out what is asked for, from 0 (misleading or empty) to {BEST} (names exactly what answers the
query). Answer with the number alone."""


def _endpoint(endpoint: dict[str, Any], instruction: str = INSTRUCTION) -> ModelConfig:
    config = build(ModelConfig, [("rl.rewards: endpoint of judge: ", endpoint)])
    check_model("rl.rewards: endpoint of judge", config)
    if config.mode == "batch":
        raise UserError(
            "endpoint of judge: mode=batch takes up to a day, and training waits for every answer",
            key="rl.rewards",
        ).about("mode")
    return config


@reward("judge", needs_oracle=True, check=_endpoint)
def judge_reward(group: Rollouts, endpoint: dict[str, Any], instruction: str = INSTRUCTION) -> Tensor:
    """The mark of a judge, 0 to 1; 0 for an empty rationale, without a call.

    The judge reads the query's text, the oracle rationale and the rationale, but sees no pictures. If no readable mark
    comes in spite of retries, the rationale's value is NaN, so its group is left out of the step and counted
    (``unscored_groups``). If the endpoint is down or the budget spent, the run ends with a message. Source: the
    process reward of Embed-RL (arXiv:2602.13823). Differs: there the judge picks the positive among candidates. `endpoint` is
    a `rge.calls.model_config.ModelConfig`: name, base_url, key_env, budget, prices, concurrency ...
    """
    values = torch.zeros(group.forced_BK.shape, dtype=torch.float64)
    places, requests = [], []
    for row, texts in enumerate(group.texts):
        question, oracle = group.decode(group.query_ids[row]), group.decode(group.oracle_ids[row])
        for number, text in enumerate(texts):
            if not text:
                continue
            parts = (f"Query:\n{question}\n\nReference reasoning:\n{oracle}\n\nReasoning:\n{text}",)
            places.append((row, number))
            requests.append(
                Request("judge", parts, instruction, max_tokens=16, form=f"a number from 0 to {BEST}")
            )
    shares, marks = dist.gather_objects(requests), list[list[float]]()
    if dist.rank() == 0:
        caller = _caller(group.folder, json.dumps(endpoint, sort_keys=True))
        every = [request for share in shares for request in share]
        found = map(_value, caller.run(every, read=mark) if every else ())
        marks = [[*islice(found, len(share))] for share in shares]
    for (row, number), value in zip(places, dist.from_main(marks)[dist.rank()], strict=True):
        values[row, number] = value
    return values.to(group.state_BKD)


def _value(outcome: Outcome) -> float:
    with suppress(ReplyError):
        if outcome.reply is not None:
            return mark(outcome.reply) / BEST
    return math.nan


def mark(reply: Reply) -> float:
    """The number in the answer; BadValue if it is missing or out of range, Truncated if it may go on."""
    if reply.stop == "length":
        raise Truncated(f"the answer is cut off after {reply.text[-80:]!r}")
    found = re.fullmatch(r"\D{0,20}?(\d+(?:\.\d+)?)(?:\s*/\s*10)?\s*\.?\s*", reply.text.strip())
    if found is None or float(found[1]) > BEST:
        raise BadValue(f"expected a number from 0 to {BEST}, got {reply.text[:80]!r}")
    return float(found[1])


@cache
def _caller(folder: Path, endpoint: str) -> Caller:
    return Caller({"judge": _endpoint(json.loads(endpoint))}, AnswerStore(folder / "judge.sqlite"))
