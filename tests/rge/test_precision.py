"""What bfloat16 recipes train: float32 weights on every back end, which a launch without a config sets up by itself."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rge.model.prompts import PromptBuilder
from rge.step import Objective

WORKER = Path(__file__).parent / "workers" / "precision.py"
BACK_ENDS = {
    "DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "FSDP2": "fsdp2"
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Filled by the first test that needs it."""
    return {"folder": tmp_path_factory.mktemp("pre cision")}


@pytest.fixture
def found(shared, lively_path, lively, make_batch, merge, roll_out):
    """The first step's gradient and eight steps of AdamW at 2e-5, by one process and by two under every back end."""
    if "ended" in shared:
        return shared
    folder = shared["folder"]
    builder = PromptBuilder(lively.processor)
    batches = [make_batch(builder, 0, True, True), make_batch(builder, 10, True, False)]
    # Their states are left to the step: with the weights, and in the precision, that it has.
    rationales = [[replace(each, state_D=None) for each in roll_out(lively, batch)] for batch in batches]
    common = {"objective": Objective(1 / 11, 10 / 11, 0.07), "lr": 2e-5, "steps": 8}
    one = {
        "batches": [merge(batches)], "rationales": [sum(rationales, [])], "micro_batch_size": 5,
        "cases": [("float32", "zero2", "float32"), ("bfloat16", "zero2", "bfloat16")], **common,
    }  # fmt: skip
    torch.save(one, folder / "task.pt")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(lively_path), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    two = {
        "batches": batches, "rationales": rationales, "micro_batch_size": 2,
        "cases": [(name, key, "bfloat16") for name, key in BACK_ENDS.items() if key=="zero1"], **common,
    }  # fmt: skip

    torch.save(two, folder / "task.pt")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(WORKER), str(lively_path), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    shared["ended"] = True
    return shared


def result(shared: dict, name: str, world: int) -> dict:
    return torch.load(shared["folder"] / f"{name}_{world}.pt", weights_only=False)


def flat(changes: dict) -> torch.Tensor:
    return torch.cat([changes[name].flatten().double() for name in sorted(changes)])


def test_show(found):
    ref = flat(result(found, "float32", 1)["gradient"]["change"])
    for name, world in [("float32", 1), ("bfloat16", 1), ("ZeRO-1", 2)]:
        r = result(found, name, world)
        g = flat(r["gradient"]["change"])
        print(
            name,
            r["gradient"]["back_end"],
            r["adamw"]["dtypes"],
            float(torch.cosine_similarity(g, ref, dim=0)),
            float((g - ref).norm() / ref.norm()),
            min(r["adamw"]["moved"].values()),
            r["adamw"]["losses"][0],
            r["adamw"]["losses"][-1],
            r["adamw"]["lengths"][0],
        )
        out = load_file(found["folder"] / f"{name}_{world}" / "model.safetensors")
        print(
            {v.dtype for v in out.values()},
            len(out),
            (found["folder"] / f"{name}_{world}" / "config.json").read_text().count("float32"),
        )
