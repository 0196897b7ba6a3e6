"""Exact search against the bare faiss call it is built on, in one run.

    python scripts/bench_search.py [candidates=35803] [queries=1634] [dim=2048] [depth=1000] [spread=1.0] [repeats=3]

Random unit vectors; ``spread`` < 1 crowds them around a common direction, as trained embeddings are, which makes near
ties more frequent. The two are timed alternately and the best of the repeats counts. Threads: OMP_NUM_THREADS. The last
line is one JSON object.
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
    faiss_s, search_s = [], []
    for _ in range(options.repeats):
        start = time.perf_counter()
        faiss.knn(query_QD, candidate_CD, options.depth, metric=faiss.METRIC_INNER_PRODUCT)
        middle = time.perf_counter()
        search(query_QD, candidate_CD, depth=options.depth)
        faiss_s.append(middle - start)
        search_s.append(time.perf_counter() - middle)
        print(f"faiss.knn {faiss_s[-1]:7.2f} s   search {search_s[-1]:7.2f} s")
    ratio = min(search_s) / min(faiss_s)
    print(f"best      {min(faiss_s):7.2f} s          {min(search_s):7.2f} s   ratio {ratio:.3f}")
    print(
        json.dumps(
            {
                "faiss_s": min(faiss_s),
                "search_s": min(search_s),
                "ratio": ratio,
                "candidates": options.candidates,
                "queries": options.queries,
                "dim": options.dim,
                "depth": options.depth,
                "spread": options.spread,
                "threads": faiss.omp_get_max_threads(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
