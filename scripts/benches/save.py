"""How long training pauses while a state is saved, in the background or not. `python scripts/bench.py save millions=20,80`.

One process, float32 weights with AdamW, so a state is three times the weights. Steps of matrix products, about a twentieth of a
second each, go on while the thread writes; their slow-down is printed too. ``back_ends=zero2,zero3,fsdp2`` also measures two
processes on this CPU that write a shard each; the main process's figures count.
"""

import json
import os
import shutil
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.multiprocessing import start_processes

from benches.harness import Rows, show
from rge.checkpoints.training_state import States
from rge.config import TrainConfig
from rge.distributed import collectives as dist
from rge.distributed import launch

WIDTH = 1000


@dataclass
class Options:
    """Sizes to measure."""

    millions: tuple[float, ...] = (20.0, 80.0)
    """Parameters of the model, in millions."""
    repeats: int = 3
    """Saves of each kind; the median counts."""
    back_ends: tuple[str, ...] = ()
    """Sharded back ends to measure too: zero1, zero2, zero3, fsdp2."""
    folder: Path = Path("runs/bench_save")
    """Folder for the states, which are removed again."""


def measure(options: Options) -> Rows:
    """All sizes, on one process and under each sharded back end."""
    torch.set_num_threads(1)
    rows: Rows = {}
    for back_end in ("", *options.back_ends):
        for millions in options.millions:
            runs = [_save(millions, options.folder, back_end) for _ in range(options.repeats)]
            row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            row["gap_ratio"] = row["waited_gap_s"] / row["background_gap_s"]
            name = f"{back_end} {millions:g}".strip()
            rows[name] = {column: round(value, 3) for column, value in row.items()}
            show(rows)
    return rows


def _save(millions: float, folder: Path, back_end: str) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if back_end:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(_shard, (millions, folder, back_end, port), nprocs=2, start_method="spawn")
        found = json.loads((folder / "found.json").read_text())
    else:
        layers = _layers(millions)
        optimizer = torch.optim.AdamW(layers.parameters())
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = _times(Accelerator(cpu=True), layers, optimizer, folder)
    found["state_mb"] = sum(path.stat().st_size for path in (folder / "background").rglob("*.*")) / 1e6
    shutil.rmtree(folder)
    return found


def _layers(millions: float) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(millions))))


def _shard(rank: int, millions: float, folder: Path, back_end: str, port: int) -> None:
    """One of two processes."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    if back_end == "fsdp2":
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }  # fmt: skip
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "rge" / "workers"))
        import on_cpu

        on_cpu.allow_fsdp2()
        accelerator = Accelerator()
    else:
        accelerator = launch.make_accelerator(TrainConfig(back_end=back_end))
    layers = _layers(millions)
    optimizer = torch.optim.AdamW(layers.parameters())
    model, optimizer = dist.prepare(accelerator, layers, optimizer, 0.0)
    accelerator.backward(model(torch.randn(2, WIDTH)).sum())
    dist.optimizer_step(accelerator, model, optimizer, 0.0)
    found = _times(accelerator, layers, optimizer, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.close()


def _times(accelerator: Accelerator, layers: torch.nn.Module, optimizer, folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("waited", "background"):
        states = States(
            accelerator, layers, optimizer, folder / kind, keep_last=2, background=kind == "background"
        )
        alone = statistics.median(_busy(2.0))
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        states.save(1, {})
        found[f"{kind}_gap_s"] = time.perf_counter() - began
        if kind == "background":
            beside = _busy(0.0, states._thread)
            found["slow_down"] = statistics.mean(beside) / alone if beside else 1.0
        states.wait()
        found[f"{kind}_written_s"] = time.perf_counter() - began
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
