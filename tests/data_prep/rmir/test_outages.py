"""An outage, an account without credit, kills: whatever the moment, no picture is lost and the tables come out the same."""

import asyncio
import copy
import hashlib
import json
import os
import random
import shutil
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import forked
import pyarrow.parquet as pq
import pytest
import yaml
from faults import error_about
from forked import Program
from small_runs import config_of, one_family

from data_prep.rmir import oracle
from data_prep.rmir.config import JudgeSpec
from data_prep.rmir.main import run_stages, status
from data_prep.rmir.run import STAGES, Run
from rge.calls.local_server import Answer, LocalServer, chat
from rge.common.errors import UserError

DOWN = Answer({"error": {"message": "busy"}}, 503)
NO_CREDIT = Answer({"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}, 400)  # fmt: skip
UNPAID = Answer({"error": {"message": "Payment required"}}, 402)


def without_content(stop: str = "stop", **message) -> Answer:
    answer = chat("", stop=stop)
    answer.body["choices"][0]["message"] = {"role": "assistant", "content": None, **message}
    return answer


def inside_200(code: int | str) -> Answer:
    return Answer({"error": {"code": code, "message": "no"}})


FAULTS = {
    "503": DOWN,
    "500": Answer({"error": "boom"}, 500),
    "429": Answer({"error": {"message": "slow down"}}, 429),
    "credit": NO_CREDIT,
    "402": UNPAID,
    "401": Answer({"error": {"message": "no such key"}}, 401),
    "404": Answer({"error": {"message": "no such model"}}, 404),
    "page": Answer("<html>Be right back</html>", content_type="text/html"),
    "cut off": Answer('{"choices": [{"message": {"content": "<capt'),
    "no response": Answer(b"", 0),
    "broken off": chat("<reasoning>Half of", stop="error"),
    "null": without_content(),
    "reasoning": without_content(reasoning_content="Well."),
    "endless reasoning": without_content("length", reasoning_content="Well."),
    "tool calls": without_content("tool_calls", tool_calls=[{"function": {"name": "look"}}]),
    "no choices": Answer({**chat("").body, "choices": []}),
    **{f"{code} inside 200": inside_200(code) for code in (429, 400, 401, 402, "rate_limit_exceeded")},
    "wrong path": Answer({"error": "Unexpected endpoint or method. (POST /chat/completions)"}),
}
"""What an endpoint may begin to answer from some call on, without a verdict about any request."""


class World:
    """The oracle behind an endpoint that goes down with the call after `up` of them, answered ones and others alike."""

    def __init__(self):
        self.answers = oracle.Oracle(transient=0, malformed=0)
        self.up: int | None = None
        self.down = DOWN
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.hold_from: int | None = None

    def holds(self) -> bool:
        return self.hold_from is not None and self.answered.total() >= self.hold_from

    async def __call__(self, path, body):
        call = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self.asked[call] += 1
        while self.holds():
            await asyncio.sleep(0.002)
        if self.up is not None and sum(self.answered.values()) >= self.up:
            return self.down
        self.answered[call] += 1
        answer = await self.answers(path, body)
        answer.body["id"] = call
        return answer


def tables(out) -> dict[str, list]:
    """Every table that is made of answers, and the records for training."""
    found = {}
    for path in sorted(out.rglob("*.parquet")):
        name = path.relative_to(out).as_posix()
        if not name.startswith("seed"):
            found[name] = pq.read_table(path).to_pylist()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An endpoint, the config of a small run, and the tables of an undisturbed one."""
    folder = tmp_path_factory.mktemp("undisturbed")
    one_family(folder / "library.csv")
    made = World()
    with LocalServer(made) as server:
        config = config_of(folder / "whole", folder / "library.csv", server.url)
        config.generate.max_inputs, config.queries_per_shard = 4, 2
        config.retrieve.by_image, config.retrieve.by_caption = 3, 1
        config.judge.judges = [JudgeSpec("writer", 1), JudgeSpec("judge", 1)]
        for model in config.models.values():
            model.max_retries, model.concurrency = 0, 2
            model.backoff_s, model.max_limited_s = 0.001, 0.01
        with closing(Run(config, progress=False)) as run:
            run_stages(run, STAGES)
            made.whole = tables(run.out)
        made.config, made.num_calls = config, sum(made.answered.values())
        assert made.whole["pool/pool.parquet"]
        yield made


@pytest.fixture
def world(undisturbed, monkeypatch):
    """The endpoint is up, and the config is one of the test's own."""
    undisturbed.up, undisturbed.down, undisturbed.hold_from = None, DOWN, None
    monkeypatch.setattr(undisturbed, "config", copy.deepcopy(undisturbed.config))
    return undisturbed


def start(world: World, out) -> None:
    """A folder with the seed stage done, which asks nothing."""
    shutil.copytree(world.config.out + "/seed", out / "seed")
    world.config.out = str(out)
    world.asked.clear()
    world.answered.clear()


def attempt(world: World) -> bool:
    """Run the command; whether it finished."""
    with closing(Run(world.config, progress=False)) as run:
        try:
            run_stages(run, STAGES)
        except UserError:
            return False
        return True


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5])
def test_what_an_endpoint_rejects_is_no_verdict(world, tmp_path, monkeypatch, every):
    """A judge that can read no picture leaves its stage open; one that cannot read some leaves out these pairs alone."""
    for stage in STAGES[: STAGES.index("judge")]:
        if (done := Path(world.config.out) / stage).is_dir():
            shutil.copytree(done, tmp_path / "out" / stage)
    world.config.out = str(tmp_path / "out")
    answers = world.answers

    async def picky(path, body):
        rejects = body["model"] == "judge" and zlib.crc32(json.dumps(body).encode()) % every == 0
        return Answer({"error": {"message": "too large"}}, 413) if rejects else await answers(path, body)

    monkeypatch.setattr(world, "answers", picky)
    with closing(Run(world.config, progress=False)) as run:
        if every == 1:
            for _ in range(2):
                with error_about(UserError, "models.judge"):
                    run_stages(run, ["judge"])
            return
        run_stages(run, STAGES)
        votes = Counter(row["verdict"] for row in run.rows("judge", "judgements"))
        states = Counter(row["state"] for row in run.rows("keep", "decided"))
    assert votes["missing"] == states["abstained"] > 0 == states["doubted"]


@pytest.mark.slow
@pytest.mark.parametrize("down", [DOWN, NO_CREDIT, UNPAID], ids=["503", "credit-400", "402"])
def test_the_last_ten_calls_meet_an_outage_in_three_runs(world, tmp_path, down):
    """Kept answers do not make it a verdict: nothing is doubted, and with the endpoint back the same command asks only these."""
    start(world, tmp_path / "out")
    world.up, world.down = world.num_calls - 10, down
    for _ in range(3):
        assert not attempt(world)
        with closing(Run(world.config, read_only=True)) as run:
            assert "judge     not done" in status(run)
    assert not (tmp_path / "out" / "keep").exists()
    world.up = None
    assert attempt(world)
    assert tables(tmp_path / "out") == world.whole
    assert set(world.answered.values()) == {1}


@pytest.mark.slow(7)
@pytest.mark.parametrize("proceed", [False, True])
def test_whatever_call_is_the_first_that_fails_no_picture_is_lost(world, tmp_path, proceed):
    """Then the endpoint is healthy again, and the same command comes to the same tables, bit for bit.

    Each kind of fault at a place that is drawn, where the run goes on without the open calls every third kind; EVERY_PLACE=1
    in the environment tries every kind at every place.
    """
    rng, places = random.Random(0), range(world.num_calls)
    cases = [(first, kind) for kind in FAULTS for first in places]
    if not os.environ.get("EVERY_PLACE"):
        cases = [(rng.choice(places), kind) for kind in [*FAULTS][:: 3 if proceed else 1]]
    for number, (first, kind) in enumerate(cases):
        out = tmp_path / f"{number}"
        start(world, out)
        world.up, world.down = first, FAULTS[kind]
        world.config.on_unanswered = "proceed" if proceed else "wait"
        assert attempt(world) <= proceed, (first, kind)
        world.up = None
        assert attempt(world), (first, kind)
        assert tables(out) == world.whole, (first, kind)
        assert set(world.answered.values()) == {1}, "no answer was paid twice"


@pytest.mark.slow(9)
def test_five_kills_with_an_outage_in_between(world, tmp_path):
    start(world, tmp_path / "out")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(world.config)))
    command = ["-m", "data_prep", "rmir", f"config={tmp_path / 'config.yaml'}"]
    for number in range(1, 6):
        if number == 3:
            world.up = sum(world.answered.values())
            done = forked.run(*command)
            assert done.returncode == 2, done.stderr
            world.up = None
        # The first stage asks little: it is met by the first kill.
        world.hold_from = world.answered.total() + max(1, world.num_calls // (14 if number == 1 else 7))
        with Program(*command) as program:
            program.wait_until(world.holds)
            program.kill()
        world.hold_from = None
    done = forked.run(*command)
    assert done.returncode == 0, done.stderr
    assert tables(tmp_path / "out") == world.whole
    assert len(world.answered) == world.num_calls


def test_a_rest_that_is_rejected_does_not_undo_what_was_answered_before(world, tmp_path):
    """An outage after the first part, and then two inputs that are too large: all that this run asks, but not all of the stage."""
    start(world, tmp_path / "out")
    world.up = 2
    assert not attempt(world)
    world.down = Answer({"error": {"message": "too large"}}, 413)
    with closing(Run(world.config, progress=False)) as run:
        run_stages(run, ["generate"])
        assert run.done("generate")["counts"]["rejected"]["rejected request"] == 6
        assert run.done("generate")["counts"]["queries"] > 0
    assert world.answered.total() == 2


def test_status_looks_while_a_run_works(world, tmp_path):
    start(world, tmp_path / "out")
    with closing(Run(world.config, progress=False)), closing(Run(world.config, read_only=True)) as looking:
        assert "generate  not done" in status(looking)
    world.config.out = str(tmp_path / "never")
    with closing(Run(world.config, read_only=True)) as looking:
        assert "seed      not done" in status(looking)
    assert not (tmp_path / "never").exists()


def test_a_library_that_is_too_small_is_named_before_anything_is_embedded(world, tmp_path):
    world.config.seed.clusters, world.config.out = 1000, str(tmp_path / "out")
    with closing(Run(world.config, progress=False)) as run:
        with error_about(UserError, "seed.clusters"):
            run_stages(run, STAGES)
    assert not (tmp_path / "out" / "seed" / "inspected").exists()


@pytest.mark.slow
def test_the_estimate_is_asked_about_on_a_terminal_and_learns(world, tmp_path, monkeypatch, capsys):
    from data_prep.rmir.main import main

    start(world, tmp_path / "out")
    for model in world.config.models.values():
        model.input_price, model.output_price, model.picture_tokens = 1000, 1000, 10
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(world.config)))
    words = [f"config={tmp_path / 'config.yaml'}"]
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    with error_about(UserError, "cancelled"):
        main(words)
    assert not world.asked
    first = capsys.readouterr().err
    assert "of it in stages not done yet (at most" in first
    main([*words, "yes=true", "stage=generate"])
    capsys.readouterr()
    main([*words, "dry_run=true"])
    learnt = capsys.readouterr().out
    row = [line for line in learnt.splitlines() if line.startswith("| judge | writer")]
    before = [line for line in first.splitlines() if line.startswith("| judge | writer")]
    assert row != before, "the tokens of a picture are those of the bills"
    asked = sum(world.asked.values())
    monkeypatch.setattr("sys.stdin.readline", lambda: "y\n")
    main(words)
    assert sum(world.asked.values()) > asked
