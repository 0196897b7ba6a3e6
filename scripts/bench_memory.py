"""Peak memory of a training step against the size of its contrastive batch, at a fixed micro batch.

    python scripts/bench_memory.py [batches=64,128,256,512,1024] [micro_batch=16] [repeats=3] [whole=64,128,256]

One process, a small Qwen2.5-VL in float32, queries with a picture each, own rationales of the rollout, both losses.
Every point is a process of its own. Measured is how far the resident memory rises while the step runs, after a first
step at the micro batch's size; the batch itself (its pictures' pixels) is made before and given beside it. ``whole``
are the batches that are also run undivided, for comparison. Prints a table and, last, one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bench_step import peak_growth  # noqa: E402

from rge.common.commands import start  # noqa: E402
from rge.common.options import parse_options  # noqa: E402
from rge.common.schema import Item  # noqa: E402
from rge.data.collate import Batch  # noqa: E402
from rge.model.backbone import load_backbone  # noqa: E402
from rge.model.embedding_model import EmbeddingModel  # noqa: E402
from rge.model.prompts import PromptBuilder  # noqa: E402
from rge.objective import Objective  # noqa: E402
from rge.rollout.generate import generate  # noqa: E402
from rge.rollout.writer import Rollout  # noqa: E402
from rge.scratch import build as scratch  # noqa: E402
from rge.step import TrainingStep  # noqa: E402

TEXT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 256, "num_heads": 4, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}  # fmt: skip
SIDE_PX = 56


@dataclass
class Options:
    """Sizes that are measured."""

    batches: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Contrastive batches, taken in micro batches."""
    micro_batch: int = 16
    """Queries of a micro batch."""
    repeats: int = 3
    """Processes a point; the median counts."""
    whole: tuple[int, ...] = (64, 128, 256)
    """Those of the batches that are also run undivided; [] for none."""


RATIONALE_TOKENS = 24


def make_batch(builder: PromptBuilder, size: int) -> tuple[Batch, int]:
    """A batch of random pictures and words, and its bytes of pixels."""
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(0)
    batch = Batch([], [], [], [], [], [], [], [], [])

    def prompt(side: str, number: int):
        image = Image.fromarray(chance.integers(0, 255, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8))
        return builder.build(Item(str(number), "what opens this " * 4), side, [image])

    for number in range(size):
        batch.record_ids.append(str(number))
        batch.queries.append(prompt("query", number))
        batch.oracle_ids.append(builder.rationale_ids("a key opens it " * 6, ""))
        batch.candidates.append(prompt("candidate", number))
        batch.candidate_identity.append(number)
        batch.positive.append(number)
        batch.negatives.append([])
        batch.right_answers.append([number])
        batch.seeds.append(number)
    pixels = sum(one.pixels.nbytes for one in (*batch.queries, *batch.candidates))
    return batch, pixels


def point(folder: str, size: int, micro_batch: int, first: int) -> dict[str, Any]:
    """Run one step in this process and measure it.

    Args:
        folder: the backbone.
        size: of the contrastive batch.
        micro_batch: queries a forward.
        first: size of the step that is run before, so that what is made once is not counted.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    embedder = EmbeddingModel(load_backbone(folder, add_emb=True)).train()
    builder = PromptBuilder(embedder.processor)
    objective = Objective(1 / 11, 10 / 11, 0.03)

    def step(batch: Batch) -> None:
        rationales = generate(
            embedder, batch.queries, max_new_tokens=RATIONALE_TOKENS, batch_size=micro_batch
        )
        TrainingStep(embedder, embedder, objective, micro_batch)(batch, Rollout(rationales))
        embedder.zero_grad(set_to_none=True)

    step(make_batch(builder, first)[0])
    batch, pixels = make_batch(builder, size)
    began = time.perf_counter()
    growth = peak_growth(lambda: step(batch))
    return {"growth": growth, "inputs": pixels, "seconds": time.perf_counter() - began}


def measure(folder: str, size: int, micro_batch: int, first: int, repeats: int) -> dict[str, Any]:
    """`point`, each time in a new process: median and spread of the growth."""
    # An allocator that gives freed tensors back at once; else what is resident is whatever was needed before.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    found = []
    for _ in range(repeats):
        arguments = ["point", folder, str(size), str(micro_batch), str(first)]
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"error: batch {size}: {done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    growth = [one["growth"] for one in found]
    return {
        "batch": size,
        "growth_mb": statistics.median(growth) / 1e6,
        "low_mb": min(growth) / 1e6,
        "high_mb": max(growth) / 1e6,
        "inputs_mb": found[0]["inputs"] / 1e6,
        "seconds": statistics.median(one["seconds"] for one in found),
    }


def main(arguments: list[str]) -> None:
    """Measure all points and print the table."""
    options = parse_options(Options, arguments, "python scripts/bench_memory.py")
    micro, repeats = options.micro_batch, options.repeats
    with tempfile.TemporaryDirectory() as folder:
        texts = ["what opens this", "a key opens it", "Find the picture that answers the question."]
        scratch.build(
            Path(folder) / "model", texts, seed=0, vocab_size=400, text=TEXT, vision=VISION,
            min_pixels=SIDE_PX**2, max_pixels=SIDE_PX**2,
        )  # fmt: skip
        model = str(Path(folder) / "model")
        print(
            f"micro batch {micro}; growth of resident memory in one step, MB: median [lowest, highest] of {repeats}"
        )
        print(f"{'batch':>6}{'in micro batches':>28}{'undivided':>28}{'its inputs':>12}{'s':>8}", flush=True)
        rows = []
        for size in options.batches:
            row = measure(model, size, micro, micro, repeats)
            if size in options.whole:
                row["whole"] = measure(model, size, size, micro, repeats)
            rows.append(row)
            whole = row.get("whole")
            print(
                f"{size:>6}{_interval(row):>28}{_interval(whole) if whole else '':>28}"
                f"{row['inputs_mb']:>12.1f}{row['seconds']:>8.1f}",
                flush=True,
            )
    growth = [row["growth_mb"] for row in rows]
    noise = max(row["high_mb"] - row["low_mb"] for row in rows)
    found = {
        "micro_batch": micro,
        "growth_mb": {row["batch"]: round(row["growth_mb"], 1) for row in rows},
        "whole_mb": {row["batch"]: round(row["whole"]["growth_mb"], 1) for row in rows if "whole" in row},
        "largest_over_smallest_batch": round(growth[-1] / growth[0], 3),
        "noise_mb": round(noise, 1),
    }
    print(json.dumps(found))


def _interval(row: dict[str, Any]) -> str:
    return f"{row['growth_mb']:.1f} [{row['low_mb']:.1f}, {row['high_mb']:.1f}]"


if __name__ == "__main__":
    if sys.argv[1:2] == ["point"]:  # a process of its own, see `measure`
        print(json.dumps(point(sys.argv[2], *map(int, sys.argv[3:6]))))
    else:
        start(main)
