"""An index's speed: adding, searching, changing, and what approximate search finds. `python scripts/bench.py index rows=20000`.

The vectors are random: around 2,000 centres, like embeddings of pictures, and evenly spread over the sphere, the worst case for
any approximate index. Rows are written as by `rge index`, 256 per commit.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from rge.index.store import Index, Row, writing

A_COMMIT = 256
QUERIES, K = 50, 10


@dataclass
class Options:
    """What is measured."""

    rows: Annotated[int, Field(ge=1000)] = 100_000
    """Vectors in the index."""
    dimensions: Annotated[int, Field(ge=8)] = 1024
    """Dimensions of a vector."""


def drawn(count: int, size: int, clustered: bool, seed: int) -> np.ndarray:
    """(count, size) unit vectors."""
    rng = np.random.default_rng(seed)
    vector_ND = rng.standard_normal((count, size), dtype=np.float32)
    if clustered:
        centre_CD = np.random.default_rng(0).standard_normal((2000, size), dtype=np.float32)
        vector_ND = centre_CD[rng.integers(0, len(centre_CD), count)] + 0.7 * vector_ND
    return (vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)).astype(np.float32)


def put(index: Index, vector_ND: np.ndarray, first: int = 0) -> None:
    """Write rows as `rge index` does."""
    for at in range(0, len(vector_ND), A_COMMIT):
        some = enumerate(vector_ND[at : at + A_COMMIT], start=first + at)
        index.put([Row("/photos", f"{name:07d}.jpg", "1:1", "d", vector_D) for name, vector_D in some])


def searched(index: Index, query_QD: np.ndarray, exact: bool) -> tuple[float, list[set[str]]]:
    """Median milliseconds of a search, and what was found."""
    times, found = [], []
    for query_D in query_QD:
        began = time.perf_counter()
        [hits] = index.search(query_D[None], K, exact=exact)
        times.append((time.perf_counter() - began) * 1000)
        found.append({hit.id for hit in hits})
    return float(np.median(times)), found


def _column(folder: Path, options: Options, clustered: bool) -> dict[str, float]:
    """Print one column of the table."""
    spread = "around 2,000 centres" if clustered else "evenly spread"
    print(f"\n{options.rows:,} vectors of {options.dimensions}, {spread}")
    vector_ND = drawn(options.rows, options.dimensions, clustered, seed=1)
    query_QD = drawn(QUERIES, options.dimensions, clustered, seed=2)

    def timed(label: str, work):
        began = time.perf_counter()
        answer = work()
        print(f"  {label:<58}{time.perf_counter() - began:>9.1f} s", flush=True)
        return answer

    with writing(folder):
        index = Index.create(
            folder, checkpoint="none", checkpoint_hash="0" * 64, dimensions=options.dimensions
        )
        timed(f"add all, {A_COMMIT} a commit", lambda: put(index, vector_ND))
        timed("merge small files", lambda: index.refresh(ann_from=options.rows + 1))
        exact_ms, right = searched(index, query_QD, exact=True)
        numpy_right = [
            {f"{place:07d}.jpg" for place in np.argsort(-(vector_ND @ query_D), kind="stable")[:K]}
            for query_D in query_QD
        ]
        agree = np.mean([len(a & b) / K for a, b in zip(right, numpy_right, strict=True)])
        print(f"  {'a search, exact':<58}{exact_ms:>9.1f} ms   (agrees with numpy: {agree:.3f})")
        for number in (1, 8):
            began = time.process_time()
            for start in range(0, QUERIES - number + 1, number):
                index.search(query_QD[start : start + number], K, exact=True)
            spent = (time.process_time() - began) * 1000 / (QUERIES // number)
            label = f"CPU time of an exact search, {number} in one call"
            print(f"  {label:<58}{spent:>9.1f} ms")
        recall = timed(
            "make the approximate index, and measure its recall", lambda: index.refresh(ann_from=1)
        )
        print(f"  {'recall@10 as `rge index` prints it, over 100 rows':<58}{recall.recall:>9.3f}")
        ann_ms, found = searched(index, query_QD, exact=False)
        share = np.mean([len(a & b) / K for a, b in zip(right, found, strict=True)])
        print(f"  {'a search, approximate':<58}{ann_ms:>9.1f} ms")
        print(f"  {f'recall@{K} against exact, {QUERIES} new queries':<58}{share:>9.3f}")
        tenth = options.rows // 10
        other_ND = drawn(tenth, options.dimensions, clustered, seed=3)
        timed(f"change {tenth:,} rows", lambda: put(index, other_ND))
        gone = [f"{number:07d}.jpg" for number in range(tenth, 2 * tenth)]
        timed(f"remove {tenth:,} rows", lambda: index.remove("/photos", gone))
        timed("which rows there are, with their stamps", lambda: index.known("/photos"))
        again = timed("refresh, and measure again", lambda: index.refresh(ann_from=1))
        print(f"  {'recall@10 afterwards':<58}{again.recall:>9.3f}")
    recalls = {"recall": recall.recall, "recall_of_new_queries": float(share)}
    return {"exact_ms": exact_ms, "approximate_ms": ann_ms, **recalls, "recall_afterwards": again.recall}


def measure(options: Options) -> dict:
    """Both kinds of vectors."""
    found = {}
    for name, clustered in (("clustered", True), ("even", False)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _column(Path(folder) / "index", options, clustered)
    return found
