"""Time and memory of the way from data workers to training, against the form that it replaced, in one run.

    python scripts/bench_data_path.py [pictures=8] [side=1024] [steps=12] [workers=2] [prefetch_mb=128]

Both forms decode, scale and cut the same picture files with Qwen2.5-VL's processor and hand a step's batch of `pictures`
prompts to a trainer that works on each for a while. ``bytes`` is `rge.data.loader`: 8-bit pixels, two runs of bytes a batch,
pipes, a bound in bytes; pixels are normalised where training takes them, which is counted (``normalise_s`` of ``later_s``). ``tensors`` is what was before:
normalised float32 pixels, five tensors a prompt, PyTorch's DataLoader with four batches a worker ahead, shared memory.

Printed for each: time to the first batch and of a later one where training does nothing but take them; then, with training
stopped after its first batch until everything is full: peak of shared memory in /dev/shm, of descriptors of this process, and of
memory (PSS) of all processes above what they hold before the first batch. Every form runs in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rge.common.commands import start
from rge.common.images import load_image
from rge.common.options import parse_options
from rge.common.schema import Item
from rge.config import DataConfig
from rge.data.collate import Batch
from rge.data.loader import Loader
from rge.model.families import normalised
from rge.model.prompts import PromptBuilder


@dataclass
class Options:
    """Sizes that are measured."""

    pictures: int = 8
    """Prompts with a picture of a step's batch."""
    side: int = 1024
    """Pixels of a picture's side."""
    steps: int = 12
    """Batches that are taken."""
    workers: int = 2
    """Processes that decode."""
    prefetch_mb: int = 128
    """Bound of what is decoded ahead."""


SETTLED_S = 6.0
"""Memory that has not grown for so long is all that will be taken."""


class Bytes:
    """Batches as they are now."""

    def __init__(self, builder: PromptBuilder, paths: list[str], count: int):
        self.builder, self.paths, self.count = builder, paths, count

    def __getitem__(self, step: int) -> Batch:
        """A step's queries and nothing else."""
        names = [self.paths[(step * self.count + number) % len(self.paths)] for number in range(self.count)]
        prompts = [self.builder.build(Item(name, "what is this", (name,)), "query") for name in names]
        empty: list = []
        return Batch(
            names,
            prompts,
            [[] for _ in names],
            empty,
            empty,
            empty,
            empty,
            [[] for _ in names],
            [0] * len(names),
        )


class Tensors(Dataset):
    """Batches as they were: what the processor makes, tensor by tensor."""

    def __init__(self, builder: PromptBuilder, paths: list[str], count: int):
        self.processor, self.paths, self.count = builder.processor, paths, count
        self.rendered = builder._render("what is this", 1)

    def __getitem__(self, step: int) -> list[dict[str, torch.Tensor]]:
        """A step's prompts."""
        names = [self.paths[(step * self.count + number) % len(self.paths)] for number in range(self.count)]
        found = []
        for name in names:
            fields = self.processor(text=[self.rendered], images=[load_image(name)], return_tensors="pt")
            found.append(dict(fields))
        return found


def batches(
    form: str, options: dict[str, int], folder: Path, normalising: list[float]
) -> Generator[torch.Tensor, None, None]:
    """The pixels of one step after the other, as the vision tower takes them; adds what normalising took here, seconds."""
    builder = PromptBuilder(processor(folder), "plain", max_tokens=10_000, emb_token=None)
    paths = sorted(str(path) for path in folder.glob("*.jpg"))
    steps = range(options["steps"])
    if form == "bytes":
        made: Any = Bytes(builder, paths, options["pictures"])
        settings = DataConfig(num_workers=options["workers"], prefetch_mb=options["prefetch_mb"])
        for batch in Loader(made, steps, settings):
            pixels = torch.cat([prompt.pixels for prompt in batch.queries])  # type: ignore[misc]
            began = time.perf_counter()
            values = normalised(builder.processor.image_processor, pixels)
            normalising.append(time.perf_counter() - began)
            yield values
        return
    loader = DataLoader(
        Tensors(builder, paths, options["pictures"]),
        batch_size=None,
        sampler=list(steps),
        num_workers=options["workers"],
        prefetch_factor=4,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    for prompts in loader:
        yield torch.cat([prompt["pixel_values"] for prompt in prompts])


def processor(folder: Path) -> Any:
    """Qwen2.5-VL's, with the released sizes."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder / "backbone")


class Watch(threading.Thread):
    """Peaks of what this process and its children hold, looked at ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = {"shm_mb": 0.0, "descriptors": 0, "memory_mb": 0.0}
        self.shm_before = _shm()
        self.ended = threading.Event()

    def run(self) -> None:
        """Look until told to stop."""
        while not self.ended.wait(0.1):
            found = {
                "shm_mb": _shm() - self.shm_before,
                "descriptors": _descriptors(),
                "memory_mb": _memory(),
            }
            self.peak = {name: max(value, found[name]) for name, value in self.peak.items()}


def _shm() -> float:
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize / 2**20


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory() -> float:
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 2**20


def measure(form: str, options: dict[str, int], folder: Path) -> dict[str, float]:
    """One form's figures."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    times = []
    normalising: list[float] = []
    for values in batches(form, options, folder, normalising):
        times.append(time.perf_counter() - began)
        checksum = float(values.double().sum())
        began = time.perf_counter()
    before = _memory()
    watch = Watch()
    watch.start()
    waiting = batches(form, options, folder, [])
    next(waiting)
    most, since = 0.0, time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(0.1)
        if watch.peak["memory_mb"] > most + 1:
            most, since = watch.peak["memory_mb"], time.monotonic()
    watch.ended.set()
    watch.join()
    waiting.close()
    peak = watch.peak | {"memory_mb": watch.peak["memory_mb"] - before}
    return {
        "first_s": times[0],
        "later_s": float(np.median(times[1:])),
        "normalise_s": float(np.median(normalising or [0.0])),
        **peak,
        "checksum": checksum,
    }


def main(arguments: list[str]) -> None:
    """Make pictures, measure both forms, print the table."""
    options = vars(parse_options(Options, arguments, "python scripts/bench_data_path.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder, options["side"])
        found = {}
        for form in ("tensors", "bytes"):
            words = [sys.executable, __file__, f"--{form}", str(folder), json.dumps(options)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{form} failed:\n{done.stderr[-3000:]}")
            found[form] = json.loads(done.stdout.splitlines()[-1])
    same = found["tensors"].pop("checksum") == found["bytes"].pop("checksum")
    print(f"{options}; last batch of equal sum: {same}")
    print(f"{'':<14}{'tensors':>10}{'bytes':>10}{'ratio':>8}")
    for key, was in found["tensors"].items():
        now = found["bytes"][key]
        print(f"{key:<14}{was:>10.2f}{now:>10.2f}{now / was if was else float('nan'):>8.2f}")


def _prepare(folder: Path, side: int) -> None:
    from rge.scratch.build import build

    rng = np.random.default_rng(0)
    for number in range(16):
        # Smooth, as photographs are: noise would measure the JPEG decoder.
        rough = rng.integers(0, 255, (side // 32, side // 32, 3), dtype=np.uint8)
        Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / f"{number:02}.jpg"
        )
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [0],
    }
    words = ["what is this", "a key opens a lock"]
    build(
        folder / "backbone",
        words,
        seed=0,
        vocab_size=300,
        text=text,
        vision=vision,
        min_pixels=28 * 28,
        max_pixels=side * side,
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["--tensors"], ["--bytes"]):  # a process of its own
        print(json.dumps(measure(sys.argv[1][2:], json.loads(sys.argv[3]), Path(sys.argv[2]))))
    else:
        start(main)
