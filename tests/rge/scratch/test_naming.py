"""The naming stage: interrupted and started again, it ends with the weights of an uninterrupted run."""

import json
import signal
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from paths import ROOT, WORKERS
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.settings import CheckpointError
from rge.common.errors import SIGNALLED
from rge.common.images import ImageError
from rge.config import load_recipe
from rge.data.sources import RecordError
from rge.distributed import stop_signals
from rge.distributed.config import TrainConfig
from rge.scratch import pretrain_vision, starting_point
from rge.scratch.config import ScratchConfig


class Killed(Exception):
    """What ends a stage without notice."""


@pytest.fixture
def teach(tiny_path, picture, monkeypatch):
    """Run the stage in a folder: 8 steps, the first four only choose; `at` is called before each step."""
    processor = AutoProcessor.from_pretrained(tiny_path)
    stacked = np.stack([np.asarray(picture(28, 28, seed)) for seed in range(4)])
    pictures = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
    names, labels = ["This is a key.", "This is a door."], torch.tensor([0, 1, 0, 1])
    config = ScratchConfig(
        naming_steps=8, naming_batch_size=8, naming_lr=1e-2, naming_say_from=0.5, naming_style=0.5
    )

    def run(folder, at=lambda step: None):
        model, shown = AutoModelForImageTextToText.from_pretrained(tiny_path), []

        def augment(picture, generator):
            at(len(shown))
            shown.append(picture)
            return original(picture, generator)

        with monkeypatch.context() as patched:
            patched.setattr(pretrain_vision, "augment", augment)
            accuracy = pretrain_vision.teach(
                model, Accelerator(cpu=True), processor, pictures, labels, names, folder, config,
                TrainConfig(save_every=2, log_every=1, background_save=False), identity={"of": "test"},
            )  # fmt: skip
        return accuracy, model.state_dict(), len(shown)

    original = pretrain_vision.augment
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
    with pytest.raises(
        RecordError, match=r"model\.scratch\.naming: no query of .*texts\.jsonl shows a picture"
    ):
        pretrain_vision.naming_pictures(tmp_path / "texts.jsonl", 28)


def test_bad_naming_records_and_pictures_are_left_out_if_asked(tmp_path, picture):
    picture(30, 30, 0).save(tmp_path / "key.png")
    (tmp_path / "damaged.png").write_bytes(b"no picture")
    lines = ["{"]
    for name in ("key", "damaged", "missing"):
        target = {"id": name, "text": name, "rationale": f"This is a {name}."}
        lines.append(json.dumps({"query": {"images": [f"{name}.png"]}, "positives": [target]}))
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=r"left out of model.scratch.naming .*: picture .*(damaged|missing)"):
        pictures, labels, names = pretrain_vision.naming_pictures(path, 28, "skip")
    assert (pictures.shape, labels.tolist(), names) == ((1, 3, 28, 28), [0], ["This is a key."])
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ImageError, match="damaged.png"):
        pretrain_vision.naming_pictures(path, 28)


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
def test_a_state_of_another_precision_is_refused_and_other_changes_are_printed(teach, tmp_path, capsys):
    with pytest.raises(Killed):
        teach(tmp_path, failing_before(3))
    (path,) = (tmp_path / "state").glob("step_*/done.json")
    done = json.loads(path.read_text())
    path.write_text(json.dumps(done | {"mixed_precision": "bf16"}))
    with pytest.raises(
        CheckpointError, match="mixed precision 'bf16', and this run has 'no': set model.dtype as before"
    ):
        teach(tmp_path)
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
    said = "saved by 2 processes. With 1, batches would differ, so it cannot be continued: launch 2 processes, or delete"
    with pytest.raises(CheckpointError, match=said):
        teach(tmp_path / "left")


@pytest.fixture
def recipe_with(tmp_path):
    """The demo's recipe with a tiny backbone that learns eight pictures' names in four steps."""
    source = ROOT / "data_prep" / "demo" / "data" / "train"
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    lines = (source / "naming.jsonl").read_text().splitlines()[:8]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "fullatt_block_indexes": [0],
    }
    scratch = {
        "vocab_size": 320, "text": text | {"num_key_value_heads": 1}, "vision": vision, "naming_batch_size": 4,
        "naming": str(tmp_path / "some.jsonl"), "naming_steps": 4, "naming_say_from": 0.5,
    }  # fmt: skip

    def make(out: str, *words: str, **changed):
        overrides = [
            *words,
            f"model.scratch={json.dumps(scratch | changed)}",
            "train.save_every=1",
            "train.background_save=false",
            f"out={tmp_path / out}",
        ]
        return load_recipe(["recipe=demo", *overrides])

    return make


@pytest.mark.slow
def test_a_run_that_was_killed_while_naming_ends_as_a_whole_one(recipe_with, tmp_path, monkeypatch):
    accelerator, original, shown = Accelerator(cpu=True), pretrain_vision.augment, []
    monkeypatch.setattr(starting_point, "stop_after_this_step_at_signals", lambda: None)

    def augment(picture, generator):
        shown.append(picture)
        if len(shown) == 4:
            raise Killed
        return original(picture, generator)

    whole = Path(starting_point.starting_point(recipe_with("whole"), {}, accelerator))
    monkeypatch.setattr(pretrain_vision, "augment", augment)
    with pytest.raises(Killed):
        starting_point.starting_point(recipe_with("killed"), {}, accelerator)
    # The next start is checked against what the state was made with, before anything is built.
    with pytest.raises(
        CheckpointError, match=r"step_00000003 was made from other inputs .*naming_lr 0.003 and 0.5"
    ):
        starting_point.check_backbone(recipe_with("killed", naming_lr=0.5), {})
    killed = Path(starting_point.starting_point(recipe_with("killed"), {}, accelerator))
    assert len(shown) == 5
    for name in ("model.safetensors", "tokenizer.json", "eyes.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    # Once the backbone is written, only the log is left.
    assert [path.name for path in (tmp_path / "killed" / "naming").iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_pictures_are_scaled_to_whole_placeholders(recipe_with, monkeypatch):
    """As in the later stages, whose processor rounds the sides, too; 100 is no multiple of 28."""
    original, sides = pretrain_vision.augment, []
    monkeypatch.setattr(starting_point, "stop_after_this_step_at_signals", lambda: None)

    def augment(picture, generator):
        sides.append(picture.shape[-2:])
        return original(picture, generator)

    monkeypatch.setattr(pretrain_vision, "augment", augment)
    recipe = recipe_with("odd", "model.max_pixels=10000", naming_steps=1)
    starting_point.starting_point(recipe, {}, Accelerator(cpu=True))
    assert sides == [(84, 84)]
