"""Kill a training run again and again, and see whether it ends with the weights of an undisturbed run.

    python scripts/kill_training.py [kills=20] [seed=0] [out=runs/kill_training]

A tiny model is trained on a few shipped records: once in peace, once under SIGKILL. The moments are random: a third
anywhere, start-up included, a third some time after a new step, a third while a state is being written. A SIGKILL
cannot be caught, so nothing of ours runs between it and the end. Prints one row a kill and, last, one JSON object.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rge import train  # noqa: E402
from rge.common.commands import start  # noqa: E402
from rge.common.options import parse_options  # noqa: E402


@dataclass
class Options:
    """How often, and where."""

    kills: int = 20
    """SIGKILLs, a third of each kind of moment."""
    seed: int = 0
    """Draws the moments."""
    out: Path = Path("runs/kill_training")
    """Folder of both runs; its contents are removed."""


RECIPE: dict[str, Any] = {
    "model": {
        "scratch": {
            "vocab_size": 400,
            "text": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1,
            },
            "vision": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
                "window_size": 56, "fullatt_block_indexes": [1],
            },
        },
        "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784, "max_pixels": 3136,
    },
    "data": {"profile": "plain", "num_workers": 1, "augment": "drawing"},
    "rollout": {"max_new_tokens": 8, "temperature": 0.7},
    "joint": {
        "batch_size": 4, "lr": 1e-3,
        "sources": [{"path": str(ROOT / "data_prep/demo/data/train/relations.jsonl")}],
    },
    "stage": "joint",
    "train": {"micro_batch_size": 3, "save_every": 3, "log_every": 1},
}  # fmt: skip


class Run:
    """One training run, started as often as it takes.

    Args:
        recipe: path of its recipe.
        out: its folder.
    """

    def __init__(self, recipe: Path, out: Path):
        self.folder, self.log = out / "joint", out.with_suffix(".log")
        self.arguments = [f"recipe={recipe}", f"out={out}"]

    def start(self) -> BaseProcess:
        """Start or resume it, in a process forked from this one, which has the libraries loaded."""
        process = multiprocessing.get_context("fork").Process(target=self._train)
        process.start()
        return process

    def _train(self) -> None:
        with self.log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # what a killed process said must be in its log
        train.main(self.arguments)

    def finish(self) -> float:
        """Run it to its end, and return the seconds until its first step was done."""
        began, process = time.perf_counter(), self.start()
        first = 0.0
        while process.is_alive():
            if not first and self.steps():
                first = time.perf_counter() - began
            time.sleep(0.05)
        if process.exitcode:
            sys.exit(f"training failed with exit code {process.exitcode}:\n{self.log.read_text()[-3000:]}")
        return first

    def steps(self) -> int:
        """Steps that the log holds."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def resumed_after(self) -> int:
        """The step that the last start went on from; 0 from the beginning, -1 if it never got that far."""
        text = self.log.read_text()
        if "resuming after step " in text:
            return int(text.split("resuming after step ")[1].split()[0])
        return 0 if self.steps() else -1

    def writing(self) -> bool:
        """Whether a state is being written at this moment."""
        return any(not path.name.endswith("_old") for path in (self.folder / "state").glob("tmp_step_*"))

    def weights(self) -> str:
        """Sha256 of the final weights."""
        return hashlib.sha256((self.folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def kill(run: Run, moment: str, chance: random.Random, start_up_s: float) -> dict[str, Any] | None:
    """Start the run and kill it at such a moment; None if it ended first."""
    process = run.start()
    before = run.steps()
    # Left over from the kill before; its own writing is what this one waits for.
    old = set((run.folder / "state").glob("tmp_step_*"))
    began = time.perf_counter()
    until = began + chance.uniform(0, 1.5 * start_up_s)
    new_steps = chance.randint(1, 4)
    delay = chance.uniform(0, 0.3)
    while process.is_alive():
        if moment == "anywhere" and time.perf_counter() > until:
            break
        if moment == "after a step" and run.resumed_after() >= 0 and abs(run.steps() - before) >= new_steps:
            time.sleep(delay)
            break
        if (
            moment == "in a write"
            and run.writing()
            and not old & set((run.folder / "state").glob("tmp_step_*"))
        ):
            break
        time.sleep(0.001)
    in_write = run.writing() and not old & set((run.folder / "state").glob("tmp_step_*"))
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    return {
        "moment": moment,
        "seconds": round(time.perf_counter() - began, 1),
        "resumed_after": run.resumed_after(),
        "last_step": run.steps(),
        "in_write": in_write,
    }


def main(arguments: list[str]) -> int:
    """Run the experiment and print the table."""
    options = parse_options(Options, arguments, "python scripts/kill_training.py")
    kills, chance, out = options.kills, random.Random(options.seed), options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # Enough steps that every kill finds a run to kill, whatever the steps between two of them.
    steps = 10 + 3 * kills
    recipe = out / "tiny.yaml"  # JSON is YAML
    recipe.write_text(json.dumps({**RECIPE, "joint": {**RECIPE["joint"], "steps": steps}}))
    undisturbed, disturbed = Run(recipe, out / "undisturbed"), Run(recipe, out / "disturbed")
    start_up_s = undisturbed.finish()
    began = time.perf_counter()
    shutil.copytree(out / "undisturbed" / "backbone", out / "disturbed" / "backbone")  # killed while training
    rows: list[dict[str, Any]] = []
    print(
        f"{'kill':>4}  {'moment':<13}{'resumed after':>14}{'last step':>11}{'in a write':>12}{'seconds':>9}"
    )
    for number in range(kills):
        moment = ("anywhere", "after a step", "in a write")[number % 3]
        row = kill(disturbed, moment, chance, start_up_s)
        if row is None:
            break
        rows.append(row)
        resumed = {-1: "(starting)", 0: "0"}.get(row["resumed_after"], str(row["resumed_after"]))
        print(
            f"{number + 1:>4}  {moment:<13}{resumed:>14}{row['last_step']:>11}"
            f"{'yes' if row['in_write'] else 'no':>12}{row['seconds']:>9}",
            flush=True,
        )
    disturbed.finish()
    equal = undisturbed.weights() == disturbed.weights()
    losses = [
        [json.loads(line)["loss"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        for run in (undisturbed, disturbed)
    ]
    print(
        f"{len(rows)} kills in {time.perf_counter() - began:.0f} s; then it ran to its end after step {steps}"
    )
    print(
        f"final weights equal bit for bit: {'yes' if equal else 'NO'}; losses of all steps equal: {losses[0] == losses[1]}"
    )
    found = {
        "kills": len(rows),
        "kills_in_a_write": sum(row["in_write"] for row in rows),
        "steps": steps,
        "weights_equal": equal,
        "losses_equal": losses[0] == losses[1],
    }
    print(json.dumps(found))
    return 0 if equal and len(rows) == kills else 1


if __name__ == "__main__":
    start(main)
