"""What a query costs in each mode of a checkpoint, in one run: `python scripts/bench.py modes checkpoint=demo`.

Every mode that the checkpoint was trained to be asked in embeds the same queries, in turns; seconds are of all work from opened
records to embeddings: pictures, tokens, the model. FLOPs are counted. A decode step is one more token of one query, ``<emb>`` included;
where nothing is written there is none, since think tokens and ``<emb>`` stand in the prompt's own pass.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from benches.harness import count_flops, in_turns, medians
from rge.diagnose.pairs import read_pairs
from rge.embedder import Embedder


@dataclass
class Options:
    """Which checkpoint is asked what."""

    checkpoint: Path = Path("demo")
    """Directory with ``rge.json``, or ``demo``."""
    set: Path = Path("data_prep/demo/data/test")
    """Retrieval set or training records, for their queries."""
    limit: int = 256
    """Queries."""
    batch_size: int = 64
    """Of them at once."""
    repeats: int = 5
    """Of each mode; the median counts."""


def measure(options: Options) -> dict:
    """Ask in all modes."""
    encoder = Embedder.from_pretrained(options.checkpoint)
    queries = read_pairs(options.set, options.limit).queries
    modes = ["direct"]
    modes += ["latent"] if encoder.settings.think_tokens else []
    modes += ["auto"] if encoder.settings.decides_itself else []
    modes += ["reasoning"] if encoder.settings.reasons != "none" else []

    def ask(mode: str):
        return encoder.encode(queries, side="query", mode=mode, batch_size=options.batch_size, progress=False)

    steps, flops = {}, {}
    for mode in modes:  # also warms up
        written = ask(mode).num_rationale_tokens
        silent = (written == 0) if mode != "reasoning" else written < 0
        steps[mode] = float((written + ~silent).mean())
        flops[mode] = count_flops(lambda mode=mode: ask(mode)) / len(queries)
    wall, cpu = map(medians, in_turns({mode: lambda mode=mode: ask(mode) for mode in modes}, options.repeats))
    print(f"{len(queries)} queries, {options.batch_size} at once, {torch.get_num_threads()} threads")
    print(
        f"{'mode':12}{'decode steps':>14}{'MFLOP':>10}{'x direct':>10}{'ms':>10}{'x direct':>10}{'CPU ms':>10}{'x direct':>10}"
    )
    found = {}
    for mode in modes:
        times = [1000 * of[mode] / len(queries) for of in (wall, cpu)]
        ratios = [of[mode] / of["direct"] for of in (flops, wall, cpu)]
        cells = [flops[mode] / 1e6, ratios[0], times[0], ratios[1], times[1], ratios[2]]
        print(f"{mode:12}{steps[mode]:14.1f}" + "".join(f"{cell:10.2f}" for cell in cells))
        found[mode] = {"decode_steps": steps[mode], "flops": flops[mode], "ms": times[0], "cpu_ms": times[1]}
    return {"queries": len(queries), "batch_size": options.batch_size, "modes": found}
