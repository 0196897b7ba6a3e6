"""What a query costs in each mode of a checkpoint, in one run.

All modes that the checkpoint was trained for embed the same queries, in turns. Seconds cover everything from open records to
embeddings; FLOPs are counted. A decode step is one more token of a query, ``<emb>`` included; modes that write nothing have none,
since ``<emb>`` is part of the prompt's pass.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benches.harness import Rows, count_flops, in_turns, medians, show
from rge.diagnose.pairs import read_pairs
from rge.embedder import Embedder


@dataclass
class Options:
    """Checkpoint and queries."""

    checkpoint: Path = Path("demo")
    """Directory with ``rge.json``, or ``demo``."""
    set: Path = Path("data_prep/demo/data/test")
    """Retrieval set or training records, for their queries."""
    limit: int = 256
    """Maximum number of queries."""
    batch_size: int = 64
    """Queries per batch."""
    repeats: int = 5
    """Repetitions of each mode; the median counts."""


def measure(options: Options) -> Rows:
    """Embed the queries in all modes."""
    encoder = Embedder.from_pretrained(options.checkpoint)
    queries = read_pairs(options.set, options.limit).queries
    settings = encoder.settings
    trained = {
        "auto": settings.decides_itself,
        "reasoning": settings.reasons != "none",
    }
    modes = ["direct", *filter(trained.get, trained)]

    def ask(mode: Any):
        return encoder.encode(queries, side="query", mode=mode, batch_size=options.batch_size, progress=False)

    steps, flops = {}, {}
    for mode in modes:  # also warms up
        written = ask(mode).num_rationale_tokens
        silent = (written == 0) if mode != "reasoning" else written < 0
        steps[mode] = float((written + ~silent).mean())
        flops[mode] = count_flops(partial(ask, mode)) / len(queries)
    wall, cpu = map(medians, in_turns({mode: partial(ask, mode) for mode in modes}, options.repeats))
    print(f"{len(queries)} queries, {options.batch_size} at once, {torch.get_num_threads()} threads")
    found = {
        mode: {
            "decode_steps": steps[mode],
            "flops": flops[mode],
            "ms": 1000 * wall[mode] / len(queries),
            "cpu_ms": 1000 * cpu[mode] / len(queries),
        }
        for mode in modes
    }
    return show(found, over="direct")
