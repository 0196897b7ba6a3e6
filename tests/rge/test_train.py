"""rge/train.py as users run it: both stages, killed and resumed, in parts, on two processes, with mistakes."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from forked import LIMIT_S, Program
from paths import ROOT, WORKERS
from ports import free_port
from safetensors.torch import load_file

from rge.checkpoints.settings import read_settings
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.small_models.build import build

TRAIN = str(ROOT / "rge" / "train.py")
WORDS = ["what", "egg", "key", "opens", "this", "turns", "into", "a", "locked", "chick", "over", "time"]
STEPS = {"cold_start": 4, "joint": 7}
KEPT = {"cold_start": [2, 4], "joint": [6, 7]}
"""Steps whose states are left at the end."""
HELD = str(WORKERS / "held_train.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory, picture_module):
    """Records with pictures and without, and a recipe for a model small enough to train in seconds."""
    folder = tmp_path_factory.mktemp("training")
    chance = random.Random(0)
    for number in range(8):
        picture_module(40 + 10 * number, 90 - 5 * number, number).save(folder / f"{number}.png")
    lines = []
    for number in range(14):

        def target(which: int) -> dict:
            shown = {"image": f"{which % 8}.png"} if which % 3 else {"text": f"thing {which}"}
            return {"id": f"t{which % 12}", **shown}

        rationale = " ".join(chance.choices(WORDS, k=chance.randint(2, 9)))
        lines.append(
            {
                "id": f"r{number}", "group": str(number), "source": "s", "split": "train",
                "query": {"text": " ".join(chance.choices(WORDS, k=6)), "images": [f"{number % 8}.png"][: number % 2]},
                "positives": [{**target(number), "rationale": rationale}],
                "negatives": [target(number + 5)][: number % 4 // 2],
            }
        )  # fmt: skip
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:7]))
    stage = {
        "batch_size": 4,
        "lr": 3e-3,
        "warmup_steps": 2,
        "sources": [{"path": str(folder / "records.jsonl")}],
    }
    build(
        folder / "backbone", [*WORDS, rationale], seed=0, vocab_size=300, min_pixels=784, max_pixels=3136,
        text={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        vision={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    )  # fmt: skip
    recipe = {
        "model": {
            "path": str(folder / "backbone"), "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784, "max_pixels": 3136,
        },
        "data": {"profile": "plain", "num_workers": 1, "augment": "drawing"},
        "loss": {"ratio": "1:10", "temperature": 0.05},
        # Records come again after four steps, so that a killed run has to get back what it had written.
        "rollout": {"max_new_tokens": 6, "temperature": 0.7, "reuse_steps": 8, "direct_share": 0.2},
        "optim": {"name": "muon"},
        "cold_start": {"steps": STEPS["cold_start"], **stage},
        "joint": {"steps": STEPS["joint"], **stage},
        "train": {"micro_batch_size": 3, "save_every": 2, "log_every": 1},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def picture_module():
    """Plain pictures: augmentation needs a few colours, not noise."""
    from PIL import Image, ImageDraw

    def draw(width: int, height: int, seed: int) -> Image.Image:
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).ellipse(
            (5, 5, width - 5, height - 9), fill=(40 * seed % 256, 90, 255 - 30 * seed)
        )
        return image

    return draw


def command(home: Path, out: Path, *overrides: str) -> list[str]:
    return [TRAIN, f"recipe={home / 'tiny.yaml'}", f"out={out}", *overrides]


def start(
    home: Path, out: Path, *overrides: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """As users start it: Python, or a launcher, from nothing."""
    return subprocess.run(
        [sys.executable, *launcher, *command(home, out, *overrides)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "lo"},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )


def run(home: Path, out: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess:
    """The same without the imports."""
    return forked.run(*command(home, out, *overrides), **environment)


def trained(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def whole(home):
    """An uninterrupted run of both stages, measured at every third step."""
    trained(run(home, home / "whole", *validated(home)))
    return home / "whole"


def validated(home: Path) -> list[str]:
    return [
        f"validation.sources=[{{path: {home / 'held_out.jsonl'}}}]",
        "validation.every=3",
        "validation.keep_best=2",
        "validation.metric=loss",
    ]


@pytest.mark.slow
def test_both_stages_train_and_leave_checkpoints(whole, home):
    for stage, steps in STEPS.items():
        lines = metrics(whole / stage)
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert all(line["grad_norm"] > 0 and line["loss"] > 0 for line in lines)
        settings = read_settings(whole / stage / "final")
        assert (settings.stage, settings.step, settings.profile) == (stage, steps, "plain")
        # Every second step is a state, and so is the last; two are kept.
        states = sorted(path.name for path in (whole / stage / "state").iterdir())
        assert states == [f"step_{step:08d}" for step in KEPT[stage]]
    cold, joint = metrics(whole / "cold_start"), metrics(whole / "joint")
    assert cold[-1]["loss"] < cold[0]["loss"]
    assert all(line["loss"] == line["loss_lm"] for line in cold)
    assert all("forced_rate" not in line for line in cold)
    for line in joint:
        assert line["loss"] == pytest.approx(line["loss_lm"] / 11 + line["loss_contrastive"] * 10 / 11)
        assert 0 <= line["forced_rate"] <= 1
        assert line["rationale_tokens_mean"] > 0
    assert any(line["rationale_age_mean"] > 0 for line in joint)
    assert any(line["direct_rate"] > 0 for line in joint)
    found = Embedder.from_pretrained(whole / "joint/final").encode(
        [Item("1", content_of("what opens this"))], side="query", mode="reasoning"
    )
    assert found.embeddings.shape == (1, 32)


@pytest.mark.slow
def test_a_finished_run_is_left_alone(whole, home):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    again = run(home, whole)
    trained(again)
    assert again.stdout.splitlines() == [
        f"{whole} is finished: its checkpoint is {whole}/joint/final. To train again, give another out=, or delete {whole}"
    ]
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before
    refused = run(home, whole, "cold_start.lr=0.5")
    assert refused.returncode == 2
    assert "error: " in refused.stderr
    assert "cold_start.lr (there 0.003, now 0.5)" in refused.stderr
    assert "Traceback" not in refused.stderr


def held(home: Path, out: Path, stage: str, step: int, *overrides: str) -> Program:
    """A run that waits after a step of a stage until ``<out>/go_on`` is there."""
    return Program(HELD, stage, str(step), out / "go_on", *command(home, out, *overrides))


def start_and_kill(home: Path, out: Path, stage: str, after_step: int) -> None:
    """Start training, and kill it without warning at a random moment between a step of a stage and the stage's last."""
    with held(home, out, stage, STEPS[stage] - 1) as program:
        program.wait_until(lambda: len(metrics_or_partial(out / stage)) >= after_step)
        # Written beside the training, so perhaps later.
        program.wait_until(lambda: list((out / stage / "state").glob("step_*")))
        time.sleep(random.random() * 0.15)
        program.kill()
    assert not (out / stage / "final").exists()


def metrics_or_partial(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_killed_run_started_again_ends_with_the_same_weights(whole, home):
    out = home / "killed"
    start_and_kill(home, out, "cold_start", after_step=2)
    start_and_kill(home, out, "joint", after_step=3)
    # Half a state, as a kill in the middle of writing leaves it.
    (out / "joint/state/tmp_step_00000006").mkdir(parents=True, exist_ok=True)
    (out / "joint/state/tmp_step_00000006/model.safetensors").write_bytes(b"half")
    refused = run(home, out, "joint.lr=0.5")
    assert refused.returncode == 2
    assert "joint.lr (there 0.003, now 0.5)" in refused.stderr
    resumed = run(home, out)
    trained(resumed)
    assert "joint: resuming after step " in resumed.stdout
    for stage, steps in STEPS.items():
        assert_same_weights(out / stage / "final", whole / stage / "final")
        again, once = metrics(out / stage), metrics(whole / stage)
        assert [line["step"] for line in again] == list(range(1, steps + 1))
        assert [line["loss"] for line in again] == [line["loss"] for line in once]
        elapsed = [line["elapsed_s"] for line in again]
        assert elapsed == sorted(elapsed)


@pytest.mark.slow
def test_the_best_checkpoints_by_validation_are_kept(whole):
    for stage, metric, measured in (
        ("cold_start", "val_loss_lm", [3, 4]),
        ("joint", "val_loss", [3, 6, 7]),
    ):
        found = {line["step"]: line[metric] for line in metrics(whole / stage) if metric in line}
        assert sorted(found) == measured
        best = sorted(sorted(found), key=found.get)[:2]
        kept = sorted((whole / stage / "best").iterdir())
        assert [path.name for path in kept] == [f"step_{step:08d}" for step in sorted(best)]
        for path in kept:
            settings = read_settings(path)
            assert settings.validation.figures[metric] == found[settings.step]
            Embedder.from_pretrained(path)
        last = read_settings(whole / stage / "final").validation.figures
        assert last[metric] == found[max(found)]


@pytest.mark.slow
def test_a_stage_that_gets_no_better_ends_at_the_same_step_after_a_resume(whole, home):
    """With nothing learned, two measurements after the first are no better."""
    out = home / "patient"
    words = [
        "stage=joint", f"init={whole / 'cold_start/final'}", "joint.lr=1e-30", "train.save_every=1",
        f"validation.sources=[{{path: {home / 'held_out.jsonl'}}}]", "validation.every=1", "validation.patience=2",
    ]  # fmt: skip
    trained(run(home, out, *words))
    final = read_settings(out / "joint/final")
    assert final.step == 3
    assert final.validation.figures["val_hit_at_1"] == metrics(out / "joint")[-1]["val_hit_at_1"]
    for last in (3, 2):  # stopped before the export, and one step earlier
        shutil.rmtree(out / "joint/final")
        for step in range(last + 1, 4):
            shutil.rmtree(out / f"joint/state/step_{step:08d}")
        trained(run(home, out, *words))
        assert read_settings(out / "joint/final").step == 3
        assert [line["step"] for line in metrics(out / "joint")] == [1, 2, 3]
        assert read_settings(out / "joint/final").validation == final.validation


@pytest.mark.slow
def test_a_finished_stage_goes_on_with_what_it_may_change(whole, home):
    """One step more, at another rate; recorded, and not done again."""
    out = home / "longer"
    shutil.copytree(whole, out)
    last, more = STEPS["joint"], ["joint.lr=1e-4", f"joint.steps={STEPS['joint'] + 1}"]
    refused = run(home, out, *validated(home), *more)
    assert refused.returncode == 2
    assert "joint.lr" in refused.stderr
    again = [*validated(home), *more, "resume_with=[joint.lr,joint.steps]"]
    trained(run(home, out, *again))
    final = read_settings(out / "joint/final")
    assert final.step == last + 1
    [entry] = final.identity["resumed_with"]
    assert entry["step"] == last
    assert entry["changed"]["joint.steps"] == [last, last + 1]
    assert entry["changed"]["joint.lr"][1] == 1e-4
    before = (out / "joint/metrics.jsonl").read_text()
    assert "is finished" in run(home, out, *again).stdout
    assert (out / "joint/metrics.jsonl").read_text() == before
    shutil.rmtree(out / "joint/final")
    fewer = run(home, out, *validated(home), f"joint.steps={last}", "resume_with=[joint.lr,joint.steps]")
    assert fewer.returncode == 2
    assert f"is of step {last + 1}" in fewer.stderr


@pytest.mark.slow
def test_figures_of_other_records_or_weights_are_not_taken_for_this_runs(whole, home):
    """Resumed before the last step: without validation, and with the best checkpoints measured on other records."""
    out = home / "measured_otherwise"
    for validation in ([], validated(home)):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        shutil.rmtree(out / "joint/final")
        shutil.rmtree(out / "joint/state/step_00000007")
        for file in (out / "joint/best").glob("*/rge.json"):
            settings = json.loads(file.read_text())
            settings["validation"]["figures"]["val_loss"] = -1.0
            settings["recipe"]["validation"]["max_records"] = 1
            file.write_text(json.dumps(settings))
        trained(run(home, out, *validation))
        final = read_settings(out / "joint/final").validation
        assert (final is None) == (not validation)
    assert (out / "joint/best/step_00000007").is_dir()
    assert len(list((out / "joint/best").iterdir())) == 2


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_143_and_validation_changes_nothing(whole, home):
    """Stopped between two saves, started again, and never validated: the weights are those of `whole`."""
    out, keep, step = home / "stopped", ["train.save_every=1000"], 3
    with held(home, out, "joint", step, *keep) as program:
        program.wait_until(lambda: len(metrics_or_partial(out / "joint")) >= step)
        program.send(signal.SIGTERM, group=True)  # as Slurm does
        (out / "go_on").touch()
        done = program.finished()
    assert done.returncode == 143
    assert "Traceback" not in done.stderr
    assert [state.name for state in (out / "joint/state").iterdir()] == [f"step_{step:08d}"]
    assert f"joint: stopped by SIGTERM after step {step} of {STEPS['joint']}" in done.stderr
    again = run(home, out, *keep)
    trained(again)
    assert f"joint: resuming after step {step} from" in again.stdout
    for stage in STEPS:
        assert_same_weights(out / stage / "final", whole / stage / "final")


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_with_130_and_the_second_one_ends_at_once(whole, home):
    """The folder is another run's no longer than its process lives."""
    out, keep, step = home / "interrupted", ["train.save_every=1000"], 3
    with held(home, out, "joint", step, *keep) as program:
        program.wait_until(lambda: len(metrics_or_partial(out / "joint")) >= step)
        second = run(home, out, *keep)
        assert second.returncode == 2
        assert f"error: {out}: it is in use by process " in second.stderr
        assert not list(out.glob("joint/state/*"))
        program.send(signal.SIGINT, group=True)  # as a terminal does, to data workers too
        program.send(signal.SIGINT)  # and a launcher once more
        (out / "go_on").touch()
        done = program.finished()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "stopping after this step" in done.stderr
    assert f"joint: stopped by SIGINT after step {step} of {STEPS['joint']}" in done.stderr
    assert [state.name for state in (out / "joint/state").iterdir()] == [f"step_{step:08d}"]
    (out / "go_on").unlink()
    with held(home, out, "joint", step + 1, *keep) as program:
        program.wait_until(lambda: len(metrics_or_partial(out / "joint")) >= step + 1)
        program.send(signal.SIGINT)
        time.sleep(1.2)
        program.send(signal.SIGINT)
        assert (
            program.finished().returncode == -signal.SIGINT
        )  # in the middle of a step that would never have ended
    again = run(home, out, *keep)
    trained(again)
    assert f"joint: resuming after step {step} from" in again.stdout
    assert_same_weights(out / "joint/final", whole / "joint/final")


@pytest.mark.slow
def test_two_processes_say_once_what_is_wrong_and_both_end(home, tmp_path):
    wrong = [
        "joint.sources=[{path: gone.jsonl}]",
        "log.trackers=[nothing]",
        "validation.sources=[{path: away.jsonl}]",
    ]
    done = forked.run_pair(*command(home, tmp_path / "out", *wrong))
    assert done.returncode != 0
    assert done.stderr.count("error: 3 problems; nothing was started:") == 1
    assert done.stderr.count("gone.jsonl: there is no such file") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_adapters_and_the_other_batch_settings_train(whole, home):
    """LoRA with dropout, all positives, one source a batch, further embedding sizes: a plain checkpoint comes out."""
    out, start = home / "adapted", whole / "cold_start/final"
    trained(
        run(
            home, out, "stage=joint", f"init={start}", "joint.steps=3",
            "model.lora={rank: 2, alpha: 4, dropout: 0.1, targets: [q_proj]}",
            "data.positives=all", "loss.matryoshka_dims=[16]",
        )
    )  # fmt: skip
    lines = metrics(out / "joint")
    assert all(line["grad_norm"] > 0 and 0 <= line["wait_share"] <= 1 for line in lines)
    assert any(line["labelled_negatives_mean"] > 0 for line in lines)
    before, after = (load_file(folder / "model.safetensors") for folder in (start, out / "joint/final"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rsplit(".", 2)[-2] for name in changed} == {"q_proj", "embed_tokens"}
    saved = load_file(out / "joint/state/step_00000002/model.safetensors")
    assert all("lora_" in name or "emb_row" in name for name in saved)
    Embedder.from_pretrained(out / "joint/final")


@pytest.mark.slow
def test_the_stages_one_by_one_equal_the_run_of_both(whole, home):
    """One cold start initialises several joint runs, baselines included."""
    trained(run(home, home / "cold", "stage=cold_start"))
    assert not (home / "cold/joint").exists()
    assert_same_weights(home / "cold/cold_start/final", whole / "cold_start/final")
    trained(
        run(
            home,
            home / "joint",
            "stage=joint",
            f"init={home / 'cold/cold_start/final'}",
            "data.num_workers=0",
        )
    )
    assert not (home / "joint/cold_start").exists()
    assert_same_weights(home / "joint/joint/final", whole / "joint/final")


RL = (
    "stage=rl", "rl.alpha_con=0.5", "rl.steps=5", "rl.batch_size=4", "rl.lr=1e-3", "rl.num_rationales=3", "rl.beta=0.1", "rl.num_iterations=2",
    "rl.rewards=[{name: gain_over_direct}, {name: length, weight: 0.1}]", "validation.every=3",
)  # fmt: skip


@pytest.mark.slow
def test_a_killed_rl_run_ends_with_the_same_weights(whole, home):
    """Rationales that were sampled, the reference, which is where the stage began, and the figures of every step."""
    given = (
        *RL,
        f"init={whole / 'joint/final'}",
        f"validation.sources=[{{path: {home / 'held_out.jsonl'}}}]",
    )
    given = (
        *given,
        f"rl.candidates=pool:{home / 'records.jsonl'}",
        "rl.pool_every=4",
    )  # embedded before steps 1 and 5
    once, killed = home / "rl", home / "rl killed"
    trained(run(home, once, *given))
    lines = metrics(once / "rl")
    for line in lines:
        assert line["kl"] >= 0
        assert line["direct_rate"] >= 0.25  # a fourth member of each group that writes nothing
        assert math.isfinite(line["reward"])
        assert {
            "hit_at_1",
            "hit_at_1_direct",
            "hit_at_1_counterfactual",
            "entropy",
            "clip_share",
        } <= line.keys()
    assert any(line["kl"] > 1e-6 for line in lines)
    assert [line["step"] for line in lines if "val_hit_at_1" in line] == [3, 5]
    settings = read_settings(once / "rl/final")
    assert (settings.stage, settings.step, settings.reasons) == ("rl", 5, "query")
    with held(home, killed, "rl", 4, *given) as program:
        program.wait_until(lambda: len(metrics_or_partial(killed / "rl")) >= 3)
        program.wait_until(lambda: list((killed / "rl/state").glob("step_*")))
        program.kill()
    resumed = run(home, killed, *given)
    trained(resumed)
    assert "rl: resuming after step " in resumed.stdout
    assert_same_weights(killed / "rl/final", once / "rl/final")
    again = metrics(killed / "rl")
    for name in ("loss", "reward", "kl", "entropy", "hit_at_1_counterfactual", "rationale_tokens_p95"):
        assert [line[name] for line in again] == [line[name] for line in lines], name
    assert any(not torch.equal(one, other) for one, other in zip(
        load_file(once / "rl/final/model.safetensors").values(),
        load_file(whole / "joint/final/model.safetensors").values(), strict=True,
    ))  # fmt: skip


@pytest.mark.slow
def test_nothing_to_learn_from_ends_both_processes_with_one_message(whole, home):
    (home / "constant_reward.py").write_text("def always(group):\n    return 0.5 * (group.length_BK >= 0)\n")
    words = command(
        home, home / "constant", *RL, "rl.rewards=[{name: 'constant_reward:always'}]", "rl.patience=2", "rl.beta=0",
        f"init={whole / 'joint/final'}",
    )  # fmt: skip
    done = forked.run_pair(*words, PYTHONPATH=f"{home}{os.pathsep}{ROOT}")
    assert done.returncode != 0
    assert "rl: for 2 steps no query had two rationales of different reward" in done.stderr
    assert "constant_reward:always 0.5" in done.stderr
    assert [line["step"] for line in metrics(home / "constant/rl")] == [1, 2]


BREAKS = """
import torch
from rge.losses import register_loss

calls = []

@register_loss("breaks")
def breaks(q_BD, c_CD, positive_BC, ignored_BC, *, temperature):
    calls.append(len(calls))
    return (q_BD - q_BD.detach()).square().sum().sqrt() if len(calls) == 5 else q_BD.sum() * 0
"""
"""A loss of 0 whose gradient, in the fourth step after the check's own call, is infinity times zero."""


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_before_a_state_is_saved(whole, home):
    (home / "loss_that_breaks.py").write_text(BREAKS)
    words = command(
        home, home / "broken", "stage=joint", f"init={whole / 'cold_start/final'}", "train.micro_batch_size=4",
        "plugins=[loss_that_breaks]", "loss.terms={info_nce: 1, breaks: 1}",
    )  # fmt: skip
    done = forked.run(*words, PYTHONPATH=f"{home}{os.pathsep}{ROOT}")
    assert done.returncode != 0
    assert "the loss is finite, but the norm of its gradient is nan; step 4, records of this" in done.stderr
    assert [path.name for path in (home / "broken/joint/state").iterdir()] == ["step_00000002"]
    assert "the same command with optim.skip_nonfinite=1" in done.stderr

    done = forked.run(*words, "optim.skip_nonfinite=1", PYTHONPATH=f"{home}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "joint: step 6 is skipped (optim.skip_nonfinite): the loss is finite, but the norm" in done.stdout
    lines = [json.loads(line) for line in (home / "broken/joint/metrics.jsonl").read_text().splitlines()]
    assert [(line.get("skipped_steps"), "loss" in line) for line in lines] == [(None, True)] * 5 + [
        (1, False),
        (None, True),
    ]
    weights = load_file(home / "broken/joint/final/model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def accelerate(*words: str) -> tuple[str, ...]:
    return "-m", "accelerate.commands.launch", "--main_process_port", str(free_port()), *words


def told_by_accelerate(*words: str) -> dict[str, str]:
    """What `accelerate launch` tells a process that it starts alone, without the launcher's own imports."""
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args([*accelerate(*words)[2:], TRAIN])
    )
    environment = prepare_simple_launcher_cmd_env(args)[1]
    kinds = ("ACCELERATE_", "MASTER_", "CUDA_")
    return {name: value for name, value in environment.items() if name.startswith(kinds)}


SHORT = ("stage=cold_start", "cold_start.steps=2", "cold_start.warmup_steps=0", "optim.name=adamw")
OWN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.fixture
def nobodys_home(tmp_path, monkeypatch):
    """No config of accelerate's that somebody made here once, and no GPU."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.slow
def test_a_plain_launch_trains(home, nobodys_home):
    """The README's command, to the letter: what is not said is the recipe's."""
    out = nobodys_home / "out"
    done = start(home, out, *SHORT, launcher=("-m", "accelerate.commands.launch"))
    trained(done)
    assert "one process, cpu; float32 weights trained" in done.stdout
    assert [line["step"] for line in metrics(out / "cold_start")] == [1, 2]
    assert (out / "cold_start/final/model.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_train_as_one_does(whole, home, nobodys_home):
    """Launched with a config of one's own, which is taken where it keeps to the recipe."""
    # AdamW and Muon turn rounding into a step's worth of difference where a gradient is nearly zero, so the losses of
    # the first steps are compared and not the weights.
    config, out = nobodys_home / "my own.yaml", nobodys_home / "out"
    config.write_text(OWN)
    launcher = accelerate("--config_file", str(config))
    done = start(home, out, "train.num_processes=2", *validated(home), launcher=launcher)
    trained(done)
    assert "DDP on 2 processes, cpu; float32 weights trained" in done.stdout
    for stage in STEPS:
        for one, two in list(zip(metrics(whole / stage), metrics(out / stage), strict=True))[:5]:
            for name in {"loss", "val_loss", "val_hit_at_1"} & one.keys():
                assert two[name] == pytest.approx(one[name], rel=2e-4), name
    weights = load_file(out / "joint/final/model.safetensors")
    assert weights.keys() == load_file(whole / "joint/final/model.safetensors").keys()
    states = sorted(path.name for path in (out / "joint/state").iterdir())
    assert states == [f"step_{step:08d}" for step in KEPT["joint"]]


@pytest.mark.slow
def test_a_config_of_ones_own_is_refused_where_it_does_not(home, nobodys_home):
    config, out = nobodys_home / "my own.yaml", nobodys_home / "out"
    text = OWN.replace("'no'\nnum", "fp16\nnum").replace("MULTI_GPU", "'NO'")
    config.write_text(text.replace("num_processes: 2", "num_processes: 1"))
    done = run(home, out, *SHORT, **told_by_accelerate("--config_file", str(config)))
    assert done.returncode == 2
    said = (
        "error: the launch asks for mixed_precision fp16, but the recipe computes in float32 (model.dtype); launch with it "
        "off: accelerate launch --mixed_precision no "
    )
    assert done.stderr.count(said) == 1
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "launcher", "message"),
    [
        (
            [],
            ("--cpu", "--num_processes", "2"),
            "the launcher was asked for several processes and started one, as accelerate does with `--cpu`",
        ),
        (["loss.alfa=1"], (), "unknown key loss.alfa; did you mean loss.al"),
        (["joint.sources=[{path: gone.jsonl}]"], (), "gone.jsonl: there is no such file"),
    ],
)
def test_a_mistake_is_one_line_and_not_a_traceback(home, tmp_path, overrides, launcher, message):
    done = run(home, tmp_path / "out", *overrides, **(told_by_accelerate(*launcher) if launcher else {}))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*/final"))


def test_adapters_alone_go_from_stage_to_stage_on_one_base(home, tmp_path):
    options = ("model.lora={rank: 2}", "export.adapters_only=true", "cold_start.steps=2", "joint.steps=2")
    trained(run(home, tmp_path, *options))
    cold, joint = (tmp_path / stage / "final" for stage in ("cold_start", "joint"))
    one, other = read_settings(cold).base, read_settings(joint).base
    assert one == other
    assert (one.path, one.beside) == (str(home / "backbone"), os.path.relpath(home / "backbone", joint))
    weights = [load_file(path / "adapter_model.safetensors") for path in (cold, joint)]
    assert weights[0].keys() == weights[1].keys()
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert read_settings(joint).identity["start"]["base"] == one.sha256
    found = Embedder.from_pretrained(joint).encode(
        [Item("1", content_of("what opens this"))], side="query", mode="reasoning"
    )
    assert found.embeddings.shape == (1, 32)
    other = run(home, tmp_path, *options, "export.adapters_only=false")
    assert other.returncode == 2
    assert "export.adapters_only (there True, now False)" in other.stderr


MINED = [
    "stage=joint",
    "data.mine.every=3",
    "data.mine.num=4",
    "data.mine.relative_margin=null",
    "data.max_negatives=2",
]


@pytest.mark.slow
def test_negatives_are_mined_from_the_present_model_the_same_after_a_kill_and_on_two_processes(whole, home):
    """Killed between two minings: what was mined before is not in the weights of the state."""
    words = [*MINED, f"init={whole / 'cold_start/final'}"]
    once, again, two = home / "mined", home / "mined_again", home / "mined_by_two"
    trained(run(home, once, *words))
    lines = metrics(once / "joint")
    assert [line["step"] for line in lines if "mined_margin" in line] == [1, 4, 7]
    assert lines[3]["labelled_negatives_mean"] == 2, "of four mined and the record's own"
    files = sorted(path.name for path in (once / "joint/mined").iterdir())
    assert files == ["step_00000003.json", "step_00000006.json"], "no state needs the first one any more"

    with held(home, again, "joint", 5, *words) as program:
        program.wait_until(lambda: (again / "joint/state/step_00000004/done.json").is_file())
        program.kill()
    resumed = run(home, again, *words)
    trained(resumed)
    assert "joint: resuming after step 4" in resumed.stdout
    assert_same_weights(again / "joint/final", once / "joint/final")
    for name in files:
        assert (again / "joint/mined" / name).read_bytes() == (once / "joint/mined" / name).read_bytes()

    one = home / "mined_once"
    trained(run(home, one, *words, "joint.steps=1"))
    done = forked.run_pair(*command(home, two, *words, "joint.steps=1", "train.num_processes=2"))
    assert done.returncode == 0, done.stderr[-4000:]
    first = "joint/mined/step_00000000.json"
    assert (two / first).read_bytes() == (one / first).read_bytes()
    figures = [
        {name: line[name] for name in ("mined_mean", "mined_margin")}
        for line in (metrics(one / "joint") + metrics(two / "joint"))
    ]
    assert figures[0] == figures[1]
