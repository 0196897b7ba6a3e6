"""How long training pauses while a state is saved, in the background or not. `python scripts/bench.py save millions=20,80`.

One process, float32 weights with AdamW, so a state is three times the weights. Steps of matrix products, about a twentieth of a
second each, go on while the thread writes; their slow-down is printed too.
"""

import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from benches.harness import Rows, show
from rge.checkpoints.training_state import States

WIDTH = 1000


@dataclass
class Options:
    """Sizes to measure."""

    millions: tuple[float, ...] = (20.0, 80.0)
    """Parameters of the model, in millions."""
    repeats: int = 3
    """Saves of each kind; the median counts."""
    folder: Path = Path("runs/bench_save")
    """Folder for the states, which are removed again."""


def measure(options: Options) -> Rows:
    """All sizes."""
    torch.set_num_threads(1)
    rows: Rows = {}
    for millions in options.millions:
        runs = [_save(millions, options.folder) for _ in range(options.repeats)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row["gap_ratio"] = row["waited_gap_s"] / row["background_gap_s"]
        rows[f"{millions:g}"] = {column: round(value, 3) for column, value in row.items()}
    return show(rows)


def _save(millions: float, folder: Path) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(millions))))
    optimizer = torch.optim.AdamW(layers.parameters())
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    accelerator, found = Accelerator(cpu=True), dict[str, float]()
    for kind in ("waited", "background"):
        states = States(
            accelerator, layers, optimizer, folder / kind, keep_last=2, background=kind == "background"
        )
        alone = statistics.median(_busy(2.0))
        began = time.perf_counter()
        states.save(1, {})
        found[f"{kind}_gap_s"] = time.perf_counter() - began
        if kind == "background":
            beside = _busy(0.0, states._thread)
            found["slow_down"] = statistics.mean(beside) / alone if beside else 1.0
        states.wait()
        found[f"{kind}_written_s"] = time.perf_counter() - began
    found["state_mb"] = sum(path.stat().st_size for path in (folder / "background").rglob("*.*")) / 1e6
    shutil.rmtree(folder)
    return found


def _busy(seconds: float, thread=None) -> list[float]:
    """Durations of consecutive steps, for at least so many seconds and as long as the thread lives."""
    matrix = torch.randn(WIDTH, WIDTH)
    durations, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or (thread is not None and thread.is_alive()):
        began = time.perf_counter()
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)
        durations.append(time.perf_counter() - began)
    return durations
