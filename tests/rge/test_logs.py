"""metrics.jsonl: every logged step once, also after a kill."""

import json
import time
from collections import Counter

import pytest
from accelerate import Accelerator, tracking
from accelerate.tracking import GeneralTracker

from rge.config import LogConfig, Recipe
from rge.data.config import SourceConfig
from rge.logs import Logs, _same_run, end_trackers, problems, start_trackers
from rge.optim.config import StageConfig


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def write(accelerator, folder, first_step, last_step, log_every=1, num_steps=10, close=True):
    logs = Logs(accelerator, folder, "joint", first_step, num_steps, log_every)
    for step in range(first_step + 1, last_step + 1):
        logs.step(step, {"loss": 1.0 / step})
    if close:
        logs.close()
    return logs


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_first_last_and_every_nth_step_are_written(accelerator, tmp_path):
    write(accelerator, tmp_path / "new", 0, 10, log_every=4)
    found = lines(tmp_path / "new")
    assert [line["step"] for line in found] == [1, 4, 8, 10]
    assert found[1]["loss"] == 0.25
    assert found[1]["stage"] == "joint"


def test_lines_are_there_before_the_run_ends(accelerator, tmp_path):
    logs = write(accelerator, tmp_path, 0, 3, close=False)
    assert len(lines(tmp_path)) == 3
    logs.close()


def test_after_a_resume_no_step_stands_twice_and_time_goes_on(accelerator, tmp_path):
    write(accelerator, tmp_path, 0, 7)
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"stage": "joint", "step": 8, "lo')  # cut by a kill
    before = lines_until(tmp_path, 4)
    write(accelerator, tmp_path, 4, 10)
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 11))
    assert found[:4] == before
    elapsed = [line["elapsed_s"] for line in found]
    assert elapsed == sorted(elapsed)


@pytest.mark.parametrize(("seconds", "advice"), [(9.0, True), (0.01, False)])
def test_a_stage_that_mostly_saves_is_told_so(accelerator, tmp_path, capsys, monkeypatch, seconds, advice):
    now = [100.0]
    monkeypatch.setattr("rge.logs.time.perf_counter", lambda: now[0])
    logs = Logs(accelerator, tmp_path, "joint", 0, 1, 1)
    with logs.saving():
        now[0] += seconds
    logs.step(1, {"step_s": 0.9, "wait_s": 0.1})
    logs.close()
    shown = capsys.readouterr().out
    assert f"10.0% of the time waiting for data, and {seconds / (1 + seconds):.1%} for states" in shown
    assert ("a larger save_every" in shown) == advice


def lines_until(folder, step):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text[:step]]


def test_a_run_from_the_start_begins_a_new_file(accelerator, tmp_path):
    write(accelerator, tmp_path, 0, 7)
    write(accelerator, tmp_path, 0, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_tensorboard_gets_every_figure_at_its_step_and_the_recipe(accelerator, tmp_path):
    """The recipe is nested, and has lists and nothings in it, which TensorBoard's table of parameters cannot hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stage = StageConfig(sources=[SourceConfig(path="a.jsonl")])
    recipe = Recipe(recipe="tiny", out=str(tmp_path), joint=stage, log=LogConfig(["tensorboard"], "mine"))
    start_trackers(accelerator, recipe)
    write(accelerator, tmp_path / "joint", 0, 3)
    accelerator.end_training()
    accelerator.trackers.clear()
    board = EventAccumulator(str(tmp_path / "trackers/mine"))
    board.Reload()
    assert [(it.step, round(it.value, 4)) for it in board.Scalars("joint/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.3333),
    ]
    [settings] = (tmp_path / "trackers/mine").glob("*/hparams.yml")
    text = settings.read_text()
    assert "optim.name: adamw" in text
    assert 'joint.sources: \'[{"path": "a.jsonl", "weight": 1.0}]\'' in text


@pytest.mark.slow
def test_a_run_that_is_started_again_is_the_same_run_of_wandb(accelerator, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for variable in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME"):
        monkeypatch.delenv(variable, raising=False)

    def begun(name):
        start_trackers(accelerator, Recipe(recipe="tiny", out=str(tmp_path / name), log=LogConfig(["wandb"])))
        run = accelerator.trackers[0].run
        found = (run.id, run.name)
        accelerator.end_training()
        accelerator.trackers.clear()
        return found

    first, again, other = begun("one"), begun("one"), begun("other")
    assert first == again
    assert (first[1], other[1]) == ("one", "other")
    assert other[0] != first[0]
    monkeypatch.setenv("WANDB_RUN_ID", "mine")  # which W&B reads itself, once a process
    assert _same_run(tmp_path / "one") == {"resume": "allow", "name": "one"}


class Failing(GeneralTracker):
    """A tracker whose `fails` raises, and which counts the other calls."""

    name, requires_logging_directory = "tensorboard", False
    fails, waits_s, calls = "", 0.0, Counter()

    def __init__(self, *_, **__):
        super().__init__()
        self.called("start")

    def called(self, what):
        Failing.calls[what] += 1
        if what == self.fails:
            time.sleep(self.waits_s)
            raise ConnectionError("no route to host\n" + "x" * 5000)

    tracker = None

    def store_init_configuration(self, values):
        self.called("configure")

    def log(self, values, step=None, **_):
        self.called("log")

    def finish(self):
        self.called("finish")


@pytest.mark.parametrize(
    ("fails", "waits_s"), [("start", 0), ("configure", 0), ("log", 0), ("finish", 0), ("finish", 5)]
)
def test_a_tracker_that_fails_ends_no_run(accelerator, tmp_path, monkeypatch, capfd, fails, waits_s):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Failing)
    monkeypatch.setattr("rge.logs.WAITING_S", 0.05)
    monkeypatch.setattr(Failing, "calls", Counter())
    monkeypatch.setattr(Failing, "fails", fails)
    monkeypatch.setattr(Failing, "waits_s", waits_s)
    start_trackers(accelerator, Recipe(recipe="tiny", out=str(tmp_path), log=LogConfig(["tensorboard"])))
    write(accelerator, tmp_path / "joint", 0, 3)
    end_trackers(accelerator)
    assert accelerator.trackers == []
    assert len(lines(tmp_path / "joint")) == 3
    assert Failing.calls["log"] == {"start": 0, "configure": 0, "log": 1, "finish": 3}[fails]
    said = capfd.readouterr().err
    assert said.count("the tracker tensorboard fails and is left out") == 1
    assert len(said) < 1000


def test_a_tracker_that_cannot_be_had_is_an_error(accelerator, monkeypatch):
    assert list(problems(LogConfig(["wandb", "tensorboard"]))) == []
    monkeypatch.setattr("rge.logs.get_available_trackers", lambda: [])
    assert list(problems(LogConfig(["wandb"]))) == [
        "log.trackers=wandb needs its library, which is not installed: pip install wandb"
    ]
    assert "pip install comet_ml" in next(problems(LogConfig(["comet_ml"])))
    assert "no tracker 'all'" in next(problems(LogConfig(["all"])))


def test_cut_prompts_are_said_once_and_counted(accelerator, tmp_path, capfd):
    logs = Logs(accelerator, tmp_path, "joint", 0, 3, 1)
    for step, num_cut in ((1, 0.0), (2, 3.0), (3, 1.0)):
        logs.step(step, {"loss": 1.0, "cut_prompts": num_cut})
    logs.close()
    assert [line["cut_prompts"] for line in lines(tmp_path)] == [0, 3, 1]
    said = "".join(capfd.readouterr())
    assert (
        said.count("3 prompts of step 2 were longer than data.max_prompt_tokens")
        == said.count("longer than")
        == 1
    )
