"""How long training stands still while a state is saved: written in the background, and waited for.

    python scripts/bench_save.py [millions=20,80] [repeats=3] [folder=runs/bench_save]

One process, float32 weights with AdamW, so a state is three times the weights. A step here is a matrix product of
about a twentieth of a second; steps go on while the thread writes, and their slow-down is printed beside the gap.
Prints a table and, last, one JSON object.
"""

import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

from rge.checkpoints.training_state import States  # noqa: E402
from rge.common.commands import start  # noqa: E402
from rge.common.options import parse_options  # noqa: E402

WIDTH = 1000


@dataclass
class Options:
    """Sizes that are measured."""

    millions: tuple[float, ...] = (20.0, 80.0)
    """Parameters of the model, in millions."""
    repeats: int = 3
    """Saves of each kind; the median counts."""
    folder: Path = Path("runs/bench_save")
    """Where states are written, and removed again."""


def busy(seconds: float, until) -> list[float]:
    """Durations of steps run one after the other, at least so long and until a condition holds."""
    matrix = torch.randn(WIDTH, WIDTH)
    durations, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or not until():
        began = time.perf_counter()
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)
        durations.append(time.perf_counter() - began)
    return durations


def measure(millions: float, folder: Path) -> dict[str, float]:
    """Gap and duration of one save of each kind."""
    shutil.rmtree(folder, ignore_errors=True)
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(millions)))
    optimizer = torch.optim.AdamW(layers.parameters())
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found: dict[str, float] = {}
    for background in (False, True):
        states = States(
            Accelerator(cpu=True),
            layers,
            optimizer,
            folder / str(background),
            keep_last=2,
            background=background,
        )
        alone = statistics.median(busy(2.0, lambda: True))
        began = time.perf_counter()
        states.save(1, {})
        gap = time.perf_counter() - began
        if background:
            beside = busy(0.0, lambda: not states._thread.is_alive())  # noqa: B023
            found |= {"slow_down": statistics.mean(beside) / alone if beside else 1.0}
        states.wait()
        kind = "background" if background else "waited"
        found |= {f"{kind}_gap_s": gap, f"{kind}_written_s": time.perf_counter() - began}
    found["state_mb"] = sum(path.stat().st_size for path in (folder / "True").rglob("*.*")) / 1e6
    shutil.rmtree(folder)
    return found


def main(arguments: list[str]) -> None:
    """Measure all sizes and print the table."""
    options = parse_options(Options, arguments, "python scripts/bench_save.py")
    torch.set_num_threads(1)
    columns = ("state_mb", "waited_gap_s", "background_gap_s", "background_written_s", "slow_down")
    print(f"{'million parameters':>19}" + "".join(f"{name:>22}" for name in columns))
    rows: dict[str, Any] = {}
    for millions in options.millions:
        runs = [measure(millions, options.folder) for _ in range(options.repeats)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row["gap_ratio"] = row["waited_gap_s"] / row["background_gap_s"]
        rows[f"{millions:g}"] = {name: round(value, 3) for name, value in row.items()}
        print(f"{millions:>19g}" + "".join(f"{row[name]:>22.2f}" for name in columns), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    start(main)
