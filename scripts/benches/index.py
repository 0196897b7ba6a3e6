"""An index's speed: adding, searching, changing, and the recall of approximate search. `python scripts/bench.py index rows=20000`.

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

from benches.harness import Rows, show
from rge.index.rows import Row
from rge.index.store import Index, writing

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


def _measured(folder: Path, options: Options, clustered: bool) -> dict[str, float]:
    vector_ND = drawn(options.rows, options.dimensions, clustered, seed=1)
    query_QD = drawn(QUERIES, options.dimensions, clustered, seed=2)
    found: dict[str, float] = {}

    def timed(label: str, work):
        began = time.perf_counter()
        answer = work()
        found[f"{label}, s"] = time.perf_counter() - began
        return answer

    with writing(folder):
        index = Index.create(
            folder, checkpoint="none", checkpoint_hash="0" * 64, dimensions=options.dimensions
        )
        timed(f"add all, {A_COMMIT} a commit", lambda: put(index, vector_ND))
        timed("merge small files", lambda: index.refresh(ann_from=options.rows + 1))
        found["exact_ms"], right = searched(index, query_QD, exact=True)
        best_QK = np.argsort(-(query_QD @ vector_ND.T), axis=1, kind="stable")[:, :K]
        numpy_right = [{f"{place:07d}.jpg" for place in best_K} for best_K in best_QK]
        found["exact agrees with numpy"] = _shared(right, numpy_right)
        for number in (1, 8):
            began = time.process_time()
            for start in range(0, QUERIES - number + 1, number):
                index.search(query_QD[start : start + number], K, exact=True)
            spent = (time.process_time() - began) * 1000 / (QUERIES // number)
            found[f"CPU time of an exact search, {number} in one call, ms"] = spent
        # As `rge index` prints it, over 100 rows.
        found["recall"] = timed("make the approximate index", lambda: index.refresh(ann_from=1))
        found["approximate_ms"], close = searched(index, query_QD, exact=False)
        found["recall_of_new_queries"] = _shared(right, close)
        tenth = options.rows // 10
        other_ND = drawn(tenth, options.dimensions, clustered, seed=3)
        timed("change a tenth of the rows", lambda: put(index, other_ND))
        gone = [f"{number:07d}.jpg" for number in range(tenth, 2 * tenth)]
        timed("remove a tenth of the rows", lambda: index.remove("/photos", gone))
        found["recall_afterwards"] = timed("refresh, and measure again", lambda: index.refresh(ann_from=1))
    return found


def _shared(found: list[set[str]], others: list[set[str]]) -> float:
    return float(np.mean([len(a & b) / K for a, b in zip(found, others, strict=True)]))


def measure(options: Options) -> Rows:
    """Both kinds of vectors."""
    found: Rows = {}
    for name, clustered in (("around 2,000 centres", True), ("evenly spread", False)):
        with tempfile.TemporaryDirectory() as folder:
            for label, value in _measured(Path(folder) / "index", options, clustered).items():
                found.setdefault(label, {})[name] = value
    print(f"{options.rows:,} vectors of {options.dimensions}")
    return show(found)
