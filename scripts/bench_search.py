"""Exact search against the bare faiss call it is built on, against numpy and torch, and scoring of what it finds.

    python scripts/bench_search.py [candidates=35803] [queries=1634] [dim=2048] [depth=1000] [spread=1.0] [repeats=3]
        [others=false] [memory_mb=2048]

Random unit vectors; ``spread`` < 1 crowds them around a common direction, as trained embeddings are, which makes near
ties more frequent. All are timed in turn and the best of the repeats counts; on a busy machine the ratio of CPU times
is the one to trust. ``others=true`` adds a product with a partial sort in numpy and `torch.topk`, in blocks of queries,
which break ties as it happens. ``score`` is every metric of every query from the ranking, with both tie orders. Threads:
OMP_NUM_THREADS. The last line is one JSON object.
"""

import json
import time
from dataclasses import dataclass

import faiss
import numpy as np

from eval.scoring.metrics import compute, cut, judge, names_of, tied_order
from eval.scoring.search import Ranking, rows_within, search
from rge.common.commands import start
from rge.common.options import parse_options


@dataclass
class Options:
    """Sizes; the defaults are those of RMIR."""

    candidates: int = 35_803
    queries: int = 1_634
    dim: int = 2_048
    depth: int = 1_000
    spread: float = 1.0
    repeats: int = 3
    others: bool = False
    memory_mb: float = 2048.0


BLOCK_QUERIES = 64
"""Queries whose scores against the whole pool numpy and torch hold at a time."""


def unit(rng: np.random.Generator, rows: int, dim: int, spread: float) -> np.ndarray:
    """Random float32 unit vectors, (rows, dim), of which ``spread`` is the random part."""
    x = rng.standard_normal((rows, dim), dtype=np.float32) * (spread / np.sqrt(dim, dtype=np.float32))
    x[:, 0] += 1.0 - spread
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def with_numpy(query_QD: np.ndarray, candidate_CD: np.ndarray, depth: int) -> None:
    """Best ``depth`` by a matrix product and a partial sort."""
    for first in range(0, len(query_QD), BLOCK_QUERIES):
        score_BC = query_QD[first : first + BLOCK_QUERIES] @ candidate_CD.T
        top_BK = np.argpartition(-score_BC, depth - 1, axis=1)[:, :depth]
        np.take_along_axis(top_BK, np.argsort(-np.take_along_axis(score_BC, top_BK, axis=1), axis=1), axis=1)


def with_torch(query_QD: np.ndarray, candidate_CD: np.ndarray, depth: int) -> None:
    """Best ``depth`` by a matrix product and `torch.topk`."""
    import torch

    candidates = torch.from_numpy(candidate_CD)
    for first in range(0, len(query_QD), BLOCK_QUERIES):
        torch.topk(torch.from_numpy(query_QD[first : first + BLOCK_QUERIES]) @ candidates.T, depth, dim=1)


def score(ranking: Ranking, positives: list[tuple[np.ndarray, np.ndarray]], candidates: int) -> None:
    """Every metric of every set, as `eval.scoring.output_files.score_ranking` computes them."""
    wide = judge(ranking.rows_QW, positives, None, num_candidates=candidates)
    for order in (wide, *(tied_order(wide, ranking.score_QW, best=best) for best in (True, False))):
        for name in names_of():
            compute(name, cut(order, ranking.depth))


def main(argv: list[str]) -> None:
    """Time both, print the table and the JSON line."""
    options = parse_options(Options, argv)
    rng = np.random.default_rng(0)
    candidate_CD = unit(rng, options.candidates, options.dim, options.spread)
    query_QD = unit(rng, options.queries, options.dim, options.spread)
    calls = {
        "faiss": lambda: faiss.knn(query_QD, candidate_CD, options.depth, metric=faiss.METRIC_INNER_PRODUCT),
        "search": lambda: search(
            query_QD,
            candidate_CD,
            depth=options.depth,
            block_rows=rows_within(options.memory_mb, options.dim),
        ),
    }
    if options.others:
        calls["numpy"] = lambda: with_numpy(query_QD, candidate_CD, options.depth)
        calls["torch"] = lambda: with_torch(query_QD, candidate_CD, options.depth)
    ranking = calls["search"]()
    positives = [
        (np.sort(rng.choice(options.candidates, 12, replace=False)).astype(np.int32), np.ones(12))
        for _ in range(options.queries)
    ]
    calls["score"] = lambda: score(ranking, positives, options.candidates)
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
        **{f"{name}_s": min(found) for name, found in wall_s.items()},
        **{f"{name}_cpu_s": min(found) for name, found in cpu_s.items()},
        "ratio": min(wall_s["search"]) / min(wall_s["faiss"]),
        "cpu_ratio": min(cpu_s["search"]) / min(cpu_s["faiss"]),
        "threads": faiss.omp_get_max_threads(),
    }
    print(f"{'ratio':8}{figures['ratio']:10.3f}{figures['cpu_ratio']:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    start(main)
