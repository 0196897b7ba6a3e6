"""The naming stage: interrupted and started again, it ends with the weights of an uninterrupted run."""

import json
import signal
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from faults import error_about
from paths import WORKERS
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.settings import CheckpointError
from rge.common.errors import SIGNALLED
from rge.data.sources import RecordError
from rge.distributed import stop_signals
from rge.small_models import naming
from rge.small_models.config import Naming


class Killed(Exception):
    """What ends a stage without notice."""


@pytest.fixture
def teach(tiny_path, picture, monkeypatch):
    """Run the stage in a folder: 8 steps, the first four only choose; `at` is called before each step."""
    processor = AutoProcessor.from_pretrained(tiny_path)
    stacked = np.stack([np.asarray(picture(28, 28, seed)) for seed in range(4)])
    pictures = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
    names, labels = ["This is a key.", "This is a door."], torch.tensor([0, 1, 0, 1])
    config = Naming(
        Path("names.jsonl"),
        steps=8,
        batch_size=8,
        lr=1e-2,
        say_from=0.5,
        style=0.5,
        save_every=2,
        log_every=1,
    )

    def run(folder, at=lambda step: None):
        model, shown = AutoModelForImageTextToText.from_pretrained(tiny_path), []

        def augment(picture, generator):
            at(len(shown))
            shown.append(picture)
            return original(picture, generator)

        with monkeypatch.context() as patched:
            patched.setattr(naming, "augment", augment)
            accuracy = naming.teach(
                model, Accelerator(cpu=True), processor, pictures, labels, names, folder, config,
                identity={"of": "test"},
            )  # fmt: skip
        return accuracy, model.state_dict(), len(shown)

    original = naming.augment
    return run


@pytest.fixture(scope="module")
def ended():
    """Filled by the first test that needs it."""
    return {}


@pytest.fixture
def whole(teach, ended, tmp_path):
    """An uninterrupted run's accuracy and weights."""
    if not ended:
        ended["accuracy"], ended["weights"], _ = teach(tmp_path / "whole")
    return ended


def failing_before(step):
    def at(now):
        if now == step:
            raise Killed

    return at


def test_records_without_pictures_name_nothing(tmp_path):
    record = {"query": {"text": "what"}, "positives": [{"text": "a key", "rationale": "This is a key."}]}
    (tmp_path / "texts.jsonl").write_text(json.dumps(record))
    with error_about(RecordError, "texts.jsonl", "naming.records"):
        naming.naming_pictures(tmp_path / "texts.jsonl", 28)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "repeated"),
    [
        pytest.param(1, 8, id="before any state"),
        pytest.param(3, 6, id="while only choosing"),
        pytest.param(4, 6, id="between the phases"),
        pytest.param(5, 6, id="where the second phase begins"),
        pytest.param(7, 2, id="while writing names too"),
    ],
)
def test_a_killed_stage_ends_as_a_whole_one(teach, whole, tmp_path, killed, repeated):
    with pytest.raises(Killed):
        teach(tmp_path / "killed", failing_before(killed))
    accuracy, weights, steps = teach(tmp_path / "killed")
    assert steps == repeated
    assert accuracy == whole["accuracy"]
    assert all(torch.equal(weights[name], weight) for name, weight in whole["weights"].items())
    logged = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == list(range(1, 9))
    assert [bool(line["loss_saying"]) for line in logged] == [False] * 4 + [True] * 4


@pytest.mark.slow
def test_a_signal_saves_and_ends_it(teach, whole, tmp_path, monkeypatch, capsys):
    received = []
    monkeypatch.setattr(stop_signals, "_received", {})

    def at(step):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(stop_signals.dist, "close", lambda: received.append("closed"))
    before = {number: signal.getsignal(number) for number in stop_signals.SIGNALS}
    stop_signals.stop_after_this_step_at_signals()
    try:
        with pytest.raises(SystemExit) as ended:
            teach(tmp_path / "stopped", at)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == SIGNALLED + signal.SIGTERM
    assert received == ["closed"]
    said = capsys.readouterr().err
    assert "naming: stopped by SIGTERM after step 5 of 8" in said
    assert str(tmp_path / "stopped" / "state") in said
    stop_signals._received.clear()
    _, weights, steps = teach(tmp_path / "stopped")
    assert steps == 3
    assert all(torch.equal(weights[name], weight) for name, weight in whole["weights"].items())


@pytest.mark.slow
def test_changes_since_a_state_are_printed(teach, tmp_path, capsys):
    with pytest.raises(Killed):
        teach(tmp_path, failing_before(3))
    (path,) = (tmp_path / "state").glob("step_*/done.json")
    done = json.loads(path.read_text())
    path.write_text(json.dumps(done | {"identity": {"of": "yesterday"}}))
    teach(tmp_path)
    said = capsys.readouterr().out
    assert "naming: resuming after step 2 from" in said
    assert "not be bit-identical" in said
    assert '"yesterday" and "test"' in said


@pytest.mark.slow
def test_two_processes_resume_too_and_one_cannot_continue_for_them(teach, tiny_path, tmp_path):
    done = forked.run_pair(WORKERS / "naming.py", tiny_path, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "naming: resuming after step 6 from" in done.stdout
    found = torch.load(tmp_path / "found.pt")
    assert all(torch.equal(found["resumed"][name], weight) for name, weight in found["whole"].items())
    with error_about(CheckpointError, "processes"):
        teach(tmp_path / "left")
