"""Training states: complete or not there, found out when damaged, written while training continues."""

import json
import math
import random
import threading
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from faults import error_about
from recorded import settings_of

from rge.checkpoints import checkpoint_manager
from rge.checkpoints import training_state as module
from rge.checkpoints.manifest import damage
from rge.checkpoints.settings import CheckpointError, Validated
from rge.checkpoints.training_state import States, trained_tensors
from rge.common.errors import UserError
from rge.config import load_recipe, to_dict
from rge.distributed import launch


class Trained:
    """A small model with an optimizer that has moved, as training prepares them."""

    def __init__(self, folder, keep_last=2, background=True, frozen=False):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        layers = torch.nn.Sequential(
            torch.nn.Linear(100, 100), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(100)
        )
        if frozen:
            layers[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in layers.parameters() if p.requires_grad], lr=0.1)
        self.model, self.optimizer = accelerator.prepare(layers, optimizer)
        self.states = States(
            accelerator, layers, self.optimizer, folder, keep_last=keep_last, background=background
        )

    def step(self) -> None:
        scale = random.random() + float(np.random.rand())
        (scale * self.model(torch.rand(2, 100))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step, **meta) -> None:
        self.states.save(step, meta)
        self.states.wait()

    def snapshot(self):
        return deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))


def flat(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for value in (tree.values() if isinstance(tree, dict) else tree) for leaf in flat(value)]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("background", [True, False])
def test_a_state_brings_weights_optimizer_and_every_random_number_back(tmp_path, background):
    trained = Trained(tmp_path, background=background)
    trained.step()
    trained.states.save(1, {"recipe": {"a": 1}})
    # Training goes on at once, whatever is still being written.
    trained.step()
    trained.step()
    expected = trained.snapshot()
    trained.states.wait()
    path, done = trained.states.latest()
    assert (path.name, done["step"], done["recipe"]) == ("step_00000001", 1, {"a": 1})
    for again in (trained, Trained(tmp_path)):
        again.states.load(path)
        assert not same(again.snapshot(), expected)
        again.step()
        again.step()
        assert same(again.snapshot(), expected)


def test_the_copy_is_of_the_step_that_was_saved(tmp_path, monkeypatch):
    """The thread is held until training has moved on; what it writes must not have moved with it."""
    trained = Trained(tmp_path)
    trained.step()
    expected = trained.snapshot()
    go_on = threading.Event()
    write = module.save_file
    monkeypatch.setattr(module, "save_file", lambda *args: (go_on.wait(), write(*args)))
    trained.states.save(1, {})
    trained.step()
    assert not list(tmp_path.glob("step_*"))
    go_on.set()
    trained.states.wait()
    trained.states.load(trained.states.latest()[0])
    assert same(trained.snapshot(), expected)


def test_weights_that_are_not_trained_are_not_saved(tmp_path):
    trained = Trained(tmp_path, frozen=True)
    trained.step()
    trained.save(1)
    saved = module.load_file(tmp_path / "step_00000001/model.safetensors")
    assert "0.bias" not in saved
    assert (
        {"0.weight", "2.running_mean", "2.num_batches_tracked"}
        <= saved.keys()
        == trained_tensors(trained.model).keys()
    )
    with error_about(CheckpointError, tmp_path / "step_00000001", "0.bias"):
        Trained(tmp_path).states.load(tmp_path / "step_00000001")


def test_only_the_newest_states_are_kept(tmp_path):
    trained = Trained(tmp_path)
    for step in (1, 2, 9, 10, 100):
        trained.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000100"]
    assert trained.states.latest()[1]["step"] == 100


def test_the_latest_state_is_never_one_that_was_not_finished(tmp_path):
    trained = Trained(tmp_path / "state")
    assert trained.states.latest() is None
    trained.save(5)
    folder = tmp_path / "state"
    (folder / "tmp_step_00000006").mkdir()
    (folder / "tmp_step_00000006/done.json").write_text('{"step": 6}')
    (folder / "step_00000007").mkdir()
    (folder / "step_8").mkdir()
    (folder / "step_8/done.json").write_text('{"step": 8}')
    assert trained.states.latest()[1]["step"] == 5
    assert not (folder / "tmp_step_00000006").exists()  # what a kill left behind is cleared


DAMAGES = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"has \d+ bytes instead of \d+"),
    "zeros": (lambda file: file.write_bytes(bytes(file.stat().st_size)), "does not match its checksum"),
    "gone": (lambda file: file.unlink(), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states.bin"])
def test_a_torn_file_is_found_and_the_state_before_is_used(tmp_path, capsys, kind, name):
    trained = Trained(tmp_path)
    trained.step()
    trained.save(1)
    trained.step()
    trained.save(2)
    tear, message = DAMAGES[kind]
    tear(tmp_path / "step_00000002" / name)
    path, done = trained.states.latest()
    assert done["step"] == 1
    shown = capsys.readouterr().out
    assert f"step_00000002 is damaged: {name} " in shown
    trained.states.load(path)
    trained.save(2)  # takes the damaged one's place
    assert damage(tmp_path / "step_00000002") is None


def test_a_damaged_state_takes_no_sound_ones_place(tmp_path):
    """Resumed before it with keep_last=1 and stopped before its step is reached again."""
    trained = Trained(tmp_path, keep_last=1)
    trained.states.keep_last = 2
    trained.save(4)
    trained.save(8)
    trained.states.keep_last = 1
    (tmp_path / "step_00000008/optimizer.bin").write_bytes(b"")
    assert trained.states.latest()[1]["step"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000004", "step_00000008"}
    trained.save(6)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000006"]
    assert trained.states.latest()[1]["step"] == 6


def test_where_nothing_was_summed_up_the_sizes_are_checked(tmp_path):
    """As a sharded back end's states are: other nodes' files are not read again."""
    state, temporary = tmp_path / "step_00000003", tmp_path / "tmp_step_00000003"
    temporary.mkdir()
    (temporary / "shard_0.bin").write_bytes(b"1234")
    states = Trained(tmp_path).states
    states._group = "of all processes"
    states._complete(3, temporary, state, {})
    assert damage(state) is None
    (state / "shard_0.bin").write_bytes(b"123")
    assert damage(state) == "shard_0.bin has 3 bytes instead of 4"


def test_if_every_state_is_damaged_nothing_starts_anew_in_silence(tmp_path):
    trained = Trained(tmp_path)
    trained.save(1)
    trained.save(2)
    (tmp_path / "step_00000001/optimizer.bin").write_bytes(b"")
    (tmp_path / "step_00000002/done.json").write_text('{"step": 2')
    with error_about(CheckpointError, tmp_path, "damaged"):
        trained.states.latest()


# 20 kB stops the weights (40 kB), 60 kB lets them pass and stops the optimizer (80 kB).
@pytest.mark.parametrize("limit", [0, 20_000, 60_000])
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_the_earlier_state_and_nothing_partial(
    tmp_path, limit, background, files_of_at_most
):
    trained = Trained(tmp_path, keep_last=1, background=background)
    trained.step()
    trained.save(1)
    before = content(tmp_path)
    trained.step()
    with (
        files_of_at_most(limit),
        error_about(CheckpointError, tmp_path, "step 2", "unwritten"),
    ):
        trained.save(2)
    assert content(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    trained.save(2)
    assert trained.states.latest()[1]["step"] == 2


def test_what_fails_in_the_background_stops_the_next_step(tmp_path, files_of_at_most):
    trained = Trained(tmp_path)
    with files_of_at_most(0):
        trained.states.save(1, {})
        trained.states._thread.join()
    with error_about(CheckpointError, tmp_path, "step 1", "unwritten"):
        trained.states.check()
    trained.states.check()  # said once


def test_no_error_of_the_writing_thread_is_lost(tmp_path, monkeypatch):
    def fail(*_, **settings):
        raise MemoryError("no room for the manifest")

    monkeypatch.setattr("rge.checkpoints.training_state.write_manifest", fail)
    trained = Trained(tmp_path)
    trained.states.save(1, {})
    with error_about(CheckpointError, tmp_path, "step 1", "unwritten"):
        trained.states.wait()
    assert not list(tmp_path.iterdir())


def test_a_resume_with_a_key_that_changes_rounding_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    trained = Trained(tmp_path / "joint/state")
    started = launch.describe(trained.states.accelerator)
    trained.save(
        3,
        recipe=to_dict(load_recipe(["recipe=demo"])),
        launch=started,
        validated=None,
        best=(0.0, 0),
        identity={},
    )

    def resume(*overrides):
        again = Trained(tmp_path / "unused")
        parts = None, again.model, again.model, again.optimizer, again.states.accelerator, {}, "no start"
        recipe = load_recipe(["recipe=demo", *overrides])
        manager = checkpoint_manager.CheckpointManager(recipe, "joint", tmp_path / "joint", 9, *parts)
        assert manager.resume() == 3
        return capsys.readouterr().out

    assert "bit-identical" not in resume()
    assert (
        "not be bit-identical to that of an uninterrupted run, since these were changed: train.micro_batch_size (there"
        in (resume("train.micro_batch_size=1"))
    )


@pytest.mark.slow
def test_a_stage_that_is_over_leaves_nothing_of_its_own_to_the_next(tmp_path, monkeypatch):
    """A rerun skips the finished stage: what that had registered nobody registers again."""
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "_export", lambda *_: None)
    recipe = load_recipe(["recipe=demo"])
    recipe.rl.sources = recipe.joint.sources

    class Registered:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def begin(name, value, accelerator):
        trained = Trained(tmp_path / "unused")
        kept = Registered(value)
        accelerator.register_for_checkpointing(kept)
        manager = checkpoint_manager.CheckpointManager(
            recipe,
            name,
            tmp_path / name,
            9,
            None,
            trained.model,
            trained.model,
            trained.optimizer,
            accelerator,
            {},
            "no start",
        )
        return manager, kept

    joint, _ = begin("joint", 1, Accelerator(cpu=True))
    joint.states.save(3, {"recipe": {}})
    joint.states.wait()
    joint.finish()
    rl, _ = begin("rl", 2, joint.accelerator)
    rl.states.save(3, {"recipe": {}})
    rl.states.wait()
    # The same command again: the joint stage is finished and registers nothing.
    again, kept = begin("rl", 0, Accelerator(cpu=True))
    again.states.load(again.states.latest()[0])
    assert kept.value == 2


@pytest.mark.slow
def test_an_export_that_fails_costs_no_step(tmp_path, monkeypatch):
    """The last step's state is there, with what was measured after it; the same command exports and trains nothing."""
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    recipe = load_recipe(["recipe=demo"])

    def manager():
        trained = Trained(tmp_path / "unused")
        parts = trained.model, trained.model, trained.optimizer, trained.states.accelerator, {}, "no start"
        return checkpoint_manager.CheckpointManager(recipe, "joint", tmp_path / "joint", 9, None, *parts)

    exported = []
    first = manager()
    first._validated = measured = Validated(metric="loss", sources=["held out"], figures={"val_loss": 2.0})
    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "_export", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.finish()
    monkeypatch.setattr(
        checkpoint_manager.CheckpointManager,
        "_export",
        lambda self, *given: exported.append((*given, self._validated)),
    )
    again = manager()
    assert again.resume() == 9
    again.finish()
    assert exported == [(tmp_path / "joint/final", 9, measured)]


@pytest.mark.slow
def test_a_disk_with_room_for_the_checkpoint_alone_gets_it(tmp_path, monkeypatch, capsys, files_of_at_most):
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    exported = []
    monkeypatch.setattr(
        checkpoint_manager.CheckpointManager,
        "_export",
        lambda self, *given: exported.append((*given, self._validated)),
    )
    trained = Trained(tmp_path / "unused")
    parts = trained.model, trained.model, trained.optimizer, trained.states.accelerator, {}, "no start"
    manager = checkpoint_manager.CheckpointManager(
        load_recipe(["recipe=demo"]), "joint", tmp_path / "joint", 9, None, *parts
    )
    with files_of_at_most(20_000):
        manager.finish()
    assert len(exported) == 1
    said = capsys.readouterr().out
    assert "joint: warning: " in said
    assert "state, step 9: the state could not be written" in said


@pytest.mark.parametrize("earlier", ["another recipe", "other records", "not a number"])
def test_only_this_runs_best_checkpoints_compete(tmp_path, monkeypatch, earlier):
    """`state/` was deleted to start a stage again, as messages advise; `best/` was not."""
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    best, trained = tmp_path / "joint/best", Trained(tmp_path / "unused")

    def export(manager, path, step):
        settings = settings_of(
            emb_id=1, profile="plain", max_prompt_tokens=9, max_new_tokens=1, reasons="query", stage="joint", step=step,
            recipe=to_dict(manager.recipe), identity=manager.identity, validation=manager._validated,
        )  # fmt: skip
        path.mkdir(parents=True)
        (path / "rge.json").write_text(json.dumps(settings.content()))

    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "_export", export)

    def validate(words, records, figures):
        validation = SimpleNamespace(
            objective=SimpleNamespace(compares=True), measure=lambda _: {"val_loss": figures.pop(0)}
        )
        recipe = load_recipe(["recipe=demo", "validation.every=1", "validation.metric=loss", *words])
        parts = trained.model, trained.model, trained.optimizer, trained.states.accelerator
        manager = checkpoint_manager.CheckpointManager(
            recipe,
            "joint",
            tmp_path / "joint",
            9,
            validation,
            *parts,
            {"records": {"r": records}},
            "no start",
        )
        for step in range(3, 3 + len(figures)):
            manager.validate(step)

    words, figure = ["joint.lr=9"] * (earlier == "another recipe"), math.nan if earlier[0] == "n" else 0.1
    validate(words, {"bytes": 1 + (earlier == "other records")}, [figure])
    assert [path.name for path in best.iterdir()] == ["step_00000003"]
    (best / "step_00000003").rename(best / "step_00000009")
    settings = json.loads((best / "step_00000009/rge.json").read_text()) | {"step": 9}
    (best / "step_00000009/rge.json").write_text(json.dumps(settings))
    validate([], {"bytes": 1}, [0.5, 0.5, 0.7, math.nan])
    assert [path.name for path in best.iterdir()] == ["step_00000003"]


def test_a_run_that_diverges_says_which_state_is_left(tmp_path):
    def message():
        with (
            pytest.raises(UserError) as caught,
            checkpoint_manager.divergence_explained("joint", tmp_path / "joint"),
        ):
            raise FloatingPointError("the loss is nan; records of this batch: ['r1']")
        return str(caught.value)

    assert (
        "joint has diverged: the loss is nan; records of this batch: ['r1']. No state was saved" in message()
    )
    trained = Trained(tmp_path / "joint/state")
    trained.save(3)
    trained.save(6)
    assert f"The last good state is of step 6: {tmp_path}/joint/state/step_00000006. The same" in message()
    (tmp_path / "joint/state/step_00000006/optimizer.bin").unlink()
    assert "state is of step 3: " in message()


@pytest.mark.slow
def test_sources_that_are_gone_when_a_stage_ends_do_not_cost_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_manager, "stop_after_this_step_at_signals", lambda: None)
    written = []
    monkeypatch.setattr(checkpoint_manager, "export", lambda *given: written.append(given))
    monkeypatch.setattr(checkpoint_manager, "has_adapters", lambda _: False)
    records = tmp_path / "records.jsonl"
    record = {"id": "r", "group": "g", "source": "s", "split": "train", "instruction": "Find it."}
    record |= {"query": {"text": "what"}, "positives": [{"id": "t", "text": "an egg"}]}
    records.write_text(json.dumps(record) + "\n")
    recipe = load_recipe(["recipe=demo", f"joint.sources=[{{path: {records}}}]"])
    trained = Trained(tmp_path / "unused")
    trained.model.emb_id = 7
    object.__setattr__(trained.model, "model", trained.model)  # not as a part of itself
    manager = checkpoint_manager.CheckpointManager(
        recipe, "joint", tmp_path / "joint", 9, None,
        trained.model, trained.model, trained.optimizer, Accelerator(cpu=True), {}, "no start",
    )  # fmt: skip
    records.unlink()
    manager.finish()
    [(_, path, settings, _)] = written
    assert path == tmp_path / "joint" / "final"
    assert settings.instructions.default == "Find it."
    assert settings.trained_on[-1].sources[0].path == str(records)
