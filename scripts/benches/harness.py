"""Helpers of the benches: alternating timings, peak memory, counted FLOPs, batches from random pictures."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from PIL import Image

if TYPE_CHECKING:
    from rge.data.collate import Batch
    from rge.model.backbone import Backbone
    from rge.model.embedding_model import EmbeddingModel
    from rge.model.prompts import Prompt

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Makes glibc return freed tensors at once; otherwise resident memory includes earlier work."""


def in_turns(
    work: Mapping[str, Callable[[], object]], repeats: int, before: Callable[[], object] = lambda: None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and CPU seconds of each piece of work; every second repetition goes through them backwards."""
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats):
        for name in list(work) if repeat % 2 == 0 else reversed(list(work)):
            before()
            began, cpu_began = time.perf_counter(), time.process_time()
            work[name]()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - cpu_began)
    return wall, cpu


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in found.items()}


Rows = dict[str, dict[str, float]]
"""Figures by line and column of a table."""


def show(rows: Rows, over: str = "") -> Rows:
    """Print figures, a line for each name; with ``over``, also as multiples of that line's. Returns them."""
    table = pd.DataFrame.from_dict(rows, orient="index")
    if over:
        table = table.join(table / table.loc[over], rsuffix=f" / {over}")
    print(table.to_string(float_format=_in_digits, na_rep=""), flush=True)
    return rows


def _in_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    """Reset the peak to the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_growth(work: Callable[[], object]) -> int:
    """Largest growth of resident memory in bytes while `work` runs."""
    reset_peak()
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a fresh process, with `GIVES_BACK`."""
    os.environ |= GIVES_BACK  # glibc reads it at the start of a process, so this one is not affected
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def count_flops(work: Callable[[], object]) -> float:
    """FLOPs of a call; torch's counter does not know the CPU's fused attention, so it is registered here."""
    import torch  # here, so that benches of other things do not carry its memory
    from torch.utils import flop_counter

    aten = torch.ops.aten
    counts = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: (
            flop_counter.sdpa_flop_count(query, key, value)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
            flop_counter.sdpa_backward_flop_count(grad, query, key, value)
        ),
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=counts) as counter:
        work()
    return counter.get_total_flops()


def random_picture(chance: np.random.Generator, side_px: int) -> Image.Image:
    """A square picture of random pixels."""
    return Image.fromarray(chance.integers(0, 255, (side_px, side_px, 3), dtype=np.uint8))


def random_backbone(texts: Sequence[str], sizes: Mapping[str, Any], **pixels: Any) -> "Backbone":
    """A model with random weights whose tokenizer is learned from the texts; arguments as of `rge.small_models.build.build`."""
    from rge.model.backbone import load_backbone
    from rge.small_models.build import build

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backbone"
        build(path, texts, seed=0, **sizes, **pixels)
        return load_backbone(path, add_emb=True, **pixels)


def random_batch(
    embedder: "EmbeddingModel",
    num: int,
    side_px: int = 112,
    rationale: int = 12,
    *,
    candidates: int = 2,
    texts: tuple[int, int] = (2, 12),
) -> "Batch":
    """Queries and their candidates, all with a picture and a text repeated so often (the last excluded); random oracle rationales."""
    from rge.common.parts import content_of
    from rge.common.schema import Item
    from rge.model.prompts import PromptBuilder

    chance, builder = np.random.default_rng(0), PromptBuilder(embedder.processor)

    def prompt(side: str, name: str) -> "Prompt":
        text = "what opens this " * int(chance.integers(*texts))
        return builder.build(Item(name, content_of(text, [random_picture(chance, side_px)])), side)

    queries = [prompt("query", f"q{row}") for row in range(num)]
    found = [[prompt("candidate", f"c{row}.{place}") for place in range(candidates)] for row in range(num)]
    oracles = chance.integers(0, min(embedder.suppressed_ids), (num, rationale - 1)).tolist()
    return make_batch(queries, found, [[*ids, embedder.emb_id] for ids in oracles])


def make_batch(
    queries: "list[Prompt]", candidates: "Sequence[Sequence[Prompt]]", oracle_ids: list[list[int]]
) -> "Batch":
    """A batch in which every query has its own candidates: a positive, then negatives, equally many for each query."""
    from rge.data.collate import Batch

    rows, each = range(len(queries)), len(candidates[0])
    return Batch(
        record_ids=[prompt.id for prompt in queries],
        queries=queries,
        oracle_ids=oracle_ids,
        candidates=[prompt for own in candidates for prompt in own],
        candidate_identity=list(range(each * len(queries))),
        positive=[each * row for row in rows],
        negatives=[list(range(each * row + 1, each * row + each)) for row in rows],
        right_answers=[[each * row] for row in rows],
        seeds=list(rows),
    )
