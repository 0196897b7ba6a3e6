"""Peak memory of a training step against its contrastive batch. `python scripts/bench.py memory batches=64,256 micro_batch=16`.

One process, a small Qwen2.5-VL in float32, one picture per query, own rationales of the rollout, both losses. Each point is measured
in a fresh process: the rise of resident memory during a step, after a first step of one micro batch. The batch's pixels are
made before, and listed separately.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from benches.harness import (
    Rows,
    in_new_process,
    peak_growth,
    random_backbone,
    random_batch,
    show,
)
from rge.data.collate import Batch
from rge.model.embedding_model import EmbeddingModel
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

TEXT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 256, "num_heads": 4, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}  # fmt: skip
SIDE_PX = 56
RATIONALE_TOKENS = 24


@dataclass
class Options:
    """Sizes to measure."""

    batches: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Contrastive batches, taken in micro batches."""
    micro_batch: int = 16
    """Queries of a micro batch."""
    repeats: int = 3
    """Processes per point; the median counts."""
    whole: tuple[int, ...] = (64, 128, 256)
    """Batches that are also run undivided; [] for none."""


def point(size: int, micro_batch: int, first: int) -> dict[str, float]:
    """Measure one step of `size` queries, after one of `first` queries for one-time allocations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = ["what opens this", "a key opens it", "Find the picture that answers the question."]
    sizes = {"vocab_size": 400, "text": TEXT, "vision": VISION}
    backbone = random_backbone(texts, sizes, min_pixels=SIDE_PX**2, max_pixels=SIDE_PX**2)
    embedder = EmbeddingModel(backbone).train()
    objective = Objective(1 / 11, 10 / 11, 0.03)

    def batch_of(num: int) -> Batch:
        return random_batch(embedder, num, SIDE_PX, RATIONALE_TOKENS, candidates=1, texts=(4, 5))

    def step(batch: Batch) -> None:
        rationales = generate(
            embedder, batch.queries, max_new_tokens=RATIONALE_TOKENS, batch_size=micro_batch
        )
        TrainingStep(embedder, embedder, objective, micro_batch)(batch, Rollout(rationales))
        embedder.zero_grad(set_to_none=True)

    step(batch_of(first))
    batch = batch_of(size)
    pictures = [prompt.pixels for prompt in (*batch.queries, *batch.candidates)]
    pixels = sum(part.nbytes for part in pictures if part is not None)
    began = time.perf_counter()
    growth = peak_growth(lambda: step(batch))
    return {"growth": growth, "inputs": pixels, "seconds": time.perf_counter() - began}


def measure(options: Options) -> Rows:
    """All points."""
    micro, repeats = options.micro_batch, options.repeats
    rows: Rows = {}
    for size in options.batches:
        rows[f"{size}"] = _repeated(repeats, size, micro, micro)
        if size in options.whole:
            rows[f"{size}, undivided"] = _repeated(repeats, size, size, micro)
    print(f"growth of resident memory in one step, median of {repeats}; in micro batches of {micro}")
    return show(rows)


def _repeated(repeats: int, *point_of: int) -> dict[str, float]:
    found = [in_new_process(point, *point_of) for _ in range(repeats)]
    growth = [run["growth"] / 1e6 for run in found]
    return {
        "growth_mb": statistics.median(growth),
        "spread_mb": max(growth) - min(growth),
        "inputs_mb": found[0]["inputs"] / 1e6,
        "seconds": statistics.median(run["seconds"] for run in found),
    }
