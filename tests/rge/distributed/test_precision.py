"""What bfloat16 recipes train: float32 weights on every back end, which a launch without a config sets up by itself."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import forked
import pytest
import torch
from paths import WORKERS
from recorded import settings_of
from safetensors.torch import load_file

from rge.config import load_recipe, to_dict
from rge.model.prompts import PromptBuilder
from rge.objective import Objective

WORKER = WORKERS / "precision.py"
BACK_ENDS = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "FSDP2": "fsdp2"}
STEPS = 4
EVERY = [("bfloat16", 1), *((name, 2) for name in BACK_ENDS)]
"""Cases in bfloat16, and their numbers of processes."""

SETTINGS = settings_of(
    emb_id=0, profile="plain", max_prompt_tokens=100, min_pixels=784, max_pixels=3136, max_new_tokens=9, reasons="query",
    recipe=to_dict(load_recipe(["recipe=demo"])), stage="joint", step=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Filled by the first test that needs it."""
    return {"folder": tmp_path_factory.mktemp("precision")}


@pytest.fixture
def found(shared, lively_path, lively, make_batch, merge, roll_out):
    """The first step's gradient and four steps of AdamW at 2e-5, by one process and by two under every back end."""
    if "ended" in shared:
        return shared
    folder = shared["folder"]
    builder = PromptBuilder(lively.processor)
    batches = [make_batch(builder, 0, True, True), make_batch(builder, 10, True, False)]
    # Their states are left to the step: with the weights, and in the precision, that it has.
    rationales = [[replace(each, state_D=None) for each in roll_out(lively, batch)] for batch in batches]
    task = {
        "objective": Objective(1 / 11, 10 / 11, 0.07),
        "micro_batch_size": 2,
        "lr": 2e-5,
        "steps": STEPS,
        "settings": SETTINGS,
    }
    one = {
        "batches": [merge(batches)],
        "rationales": [sum(rationales, [])],
        "cases": [("float32", "zero2", "float32"), ("bfloat16", "zero2", "bfloat16")],
        "descent": {
            "batches": [make_batch(builder, seed, False, False) for seed in (20, 40)],
            "objective": Objective(1 / 11, 10 / 11, 0.07, "oracle"),
            "lr": 2e-5,
            "steps": 140,
        },
    }
    two = {
        "batches": batches,
        "rationales": rationales,
        "cases": [(name, key, "bfloat16") for name, key in BACK_ENDS.items()],
    }
    # As in a clone whose path has a space, on a machine where DeepSpeed has never compiled anything.
    place = folder / "a clone"
    place.mkdir()
    (place / ".venv").symlink_to(sys.prefix)
    python = str(place / ".venv" / "bin" / "python")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_EXTENSIONS_DIR": str(place / "built"),
    }
    torch.save(task | one, folder / "task.pt")
    alone = forked.run(WORKER, lively_path, folder, **environment)
    assert alone.returncode == 0, alone.stdout[-2000:] + alone.stderr[-6000:]
    torch.save(task | two, folder / "task.pt")
    pair = subprocess.run(
        [python, *torchrun, str(WORKER), str(lively_path), str(folder)], env=os.environ | environment,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert pair.returncode == 0, pair.stdout[-2000:] + pair.stderr[-6000:]
    shared["ended"] = True
    return shared


def result(shared: dict, name: str, num_processes: int) -> dict:
    return torch.load(shared["folder"] / f"{name}_{num_processes}.pt", weights_only=False)


def gradient(shared: dict, name: str, num_processes: int) -> torch.Tensor:
    """What a step of plain descent at a rate of one took away."""
    change = result(shared, name, num_processes)["gradient"]["change"]
    return -torch.cat([change[key].flatten().double() for key in sorted(change)])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow(40)
def test_in_a_path_with_a_space_nothing_is_compiled(found):
    assert not (found["folder"] / "a clone" / "built").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_launch_without_a_config_gets_the_recipes_back_end(found, name):
    assert result(found, name, 2)["adamw"]["back_end"] == f"{name} on 2 processes"
    # One process has nobody to share with.
    assert result(found, "bfloat16", 1)["adamw"]["back_end"] == "one process"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_processes"), EVERY)
def test_every_weight_moves(found, name, num_processes):
    """At 2e-5, which in bfloat16 alone is lost in the rounding of nearly all of them."""
    steps = result(found, name, num_processes)["adamw"]
    assert steps["dtypes"] == {"torch.float32"}
    assert min(steps["moved"].values()) > 0.999  # of each matrix, all but what has no gradient at all
    assert len(steps["lengths"]) == (
        10 if num_processes == 1 else 5
    )  # rationales are written in this precision
    assert 0 < max(steps["lengths"]) <= 5
    change = torch.cat([value.flatten() for value in steps["change"].values()])
    rounded = (change.abs() < 2 * STEPS * 2e-5).float().mean()
    assert rounded > 0.999, "nothing moves further than these steps of AdamW can"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_processes"), EVERY)
def test_gradients_point_where_float32s_do(found, name, num_processes):
    """With ``-s`` this prints the figures behind docs/scaling.md."""
    exact, here = gradient(found, "float32", 1), gradient(found, name, num_processes)
    cosine = float(torch.cosine_similarity(here, exact, dim=0))
    moved = result(found, name, num_processes)["adamw"]["moved"]
    share = sum(moved.values()) / len(moved)
    sys.stdout.write(
        f"\n| {name} | {num_processes} | {cosine:.4f} | {relative(here, exact):.3f} | {100 * share:.2f} |\n"
    )
    assert cosine > 0.998
    assert float(here.norm() / exact.norm()) == pytest.approx(1, abs=0.05)
    assert result(found, name, num_processes)["gradient"]["accumulated_in"] == "torch.float32"


@pytest.mark.slow
def test_the_loss_falls_as_far_as_float32s(found):
    """Over some hundred steps at the recipes' rate, by rounds of the batches.

    With bfloat16 weights and no float32 ones it would hardly fall where these fall by more than half.
    """
    rounds = {}
    for name in ("float32", "bfloat16"):
        losses = torch.tensor(result(found, name, 1)["descent"], dtype=torch.float64)
        rounds[name] = losses.unflatten(0, (-1, 2)).mean(dim=1)
        sys.stdout.write(f"\n{name}: from {rounds[name][0]:.3f} to {rounds[name][-1]:.3f}\n")
        assert rounds[name][-1] < 0.5 * rounds[name][0]
    half = (
        len(rounds["float32"]) // 2
    )  # before, where it falls fastest, a few steps' lag is a great difference
    torch.testing.assert_close(rounds["bfloat16"][half:], rounds["float32"][half:], atol=0, rtol=0.05)


@pytest.mark.slow
def test_two_processes_under_autocast_equal_one(found):
    """As far as rows that are cut into other micro batches do: far closer than either is to float32."""
    one, two = gradient(found, "bfloat16", 1), gradient(found, "DDP", 2)
    sys.stdout.write(f"\nDDP against one process: {relative(two, one):.4f}\n")
    assert relative(two, one) < 0.5 * relative(one, gradient(found, "float32", 1))
    for ours, theirs in zip(
        result(found, "DDP", 2)["adamw"]["losses"],
        result(found, "bfloat16", 1)["adamw"]["losses"],
        strict=True,
    ):
        assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_processes"), EVERY)
def test_what_is_exported_is_as_it_was_loaded(found, name, num_processes):
    folder = found["folder"] / f"{name}_{num_processes}"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(folder / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert len(weights) == len(load_file(found["folder"] / "float32_1" / "model.safetensors"))
