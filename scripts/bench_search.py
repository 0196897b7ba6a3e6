"""Exact search against the bare faiss call it is built on, in one run.

    python scripts/bench_search.py [candidates=35803] [queries=1634] [dim=2048] [depth=1000] [spread=1.0] [repeats=3]

Random unit vectors; ``spread`` < 1 crowds them around a common direction, as trained embeddings are, which makes near
ties more frequent. The two are timed alternately and the best of the repeats counts; on a busy machine the ratio of CPU
times is the one to trust. Threads: OMP_NUM_THREADS. The last line is one JSON object.
"""

import json
import sys
import time
from dataclasses import dataclass

import faiss
import numpy as np

from eval.options import parse_options
from eval.search import search


@dataclass
class Options:
    """Sizes; the defaults are those of RMIR."""

    candidates: int = 35_803
    queries: int = 1_634
    dim: int = 2_048
    depth: int = 1_000
    spread: float = 1.0
    repeats: int = 3


def unit(rng: np.random.Generator, rows: int, dim: int, spread: float) -> np.ndarray:
    """Random float32 unit vectors, (rows, dim), of which ``spread`` is the random part."""
    x = rng.standard_normal((rows, dim), dtype=np.float32) * (spread / np.sqrt(dim, dtype=np.float32))
    x[:, 0] += 1.0 - spread
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def main(argv: list[str]) -> None:
    """Time both, print the table and the JSON line."""
    options = parse_options(Options, argv)
    rng = np.random.default_rng(0)
    candidate_CD = unit(rng, options.candidates, options.dim, options.spread)
    query_QD = unit(rng, options.queries, options.dim, options.spread)
    calls = {
        "faiss": lambda: faiss.knn(query_QD, candidate_CD, options.depth, metric=faiss.METRIC_INNER_PRODUCT),
        "search": lambda: search(query_QD, candidate_CD, depth=options.depth),
    }
    wall_s: dict[str, list[float]] = {name: [] for name in calls}
    cpu_s: dict[str, list[float]] = {name: [] for name in calls}
    print(f"{'':8}{'wall s':>10}{'CPU s':>10}")
    for _ in range(options.repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            wall_s[name].append(time.perf_counter() - wall)
            cpu_s[name].append(time.process_time() - cpu)
            print(f"{name:8}{wall_s[name][-1]:10.2f}{cpu_s[name][-1]:10.2f}")
    figures = vars(options) | {
        "faiss_s": min(wall_s["faiss"]),
        "search_s": min(wall_s["search"]),
        "ratio": min(wall_s["search"]) / min(wall_s["faiss"]),
        "cpu_ratio": min(cpu_s["search"]) / min(cpu_s["faiss"]),
        "threads": faiss.omp_get_max_threads(),
    }
    print(f"{'ratio':8}{figures['ratio']:10.3f}{figures['cpu_ratio']:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
