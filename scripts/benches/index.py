"""An index's speed: adding, searching, changing, and the recall of approximate search. `python scripts/bench.py index rows=20000`.

The vectors are random: around 2,000 centres, like embeddings of pictures, and evenly spread over the sphere, the worst case for
any approximate index. Rows are written as by `rge index`, 4,096 per commit. The second table has the same work done by LanceDB's own
calls, in turns: `add` of ready Arrow tables, and its search, which breaks ties by chance.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import lancedb
import numpy as np
from pydantic import Field

from benches.harness import Rows, in_new_process, in_turns, medians, peak_growth, show
from rge.index.__main__ import COMMIT_ROWS as A_COMMIT
from rge.index.rows import Row, as_table, new_schema
from rge.index.store import CACHE_BYTES, Index, writing

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


def rows_of(vector_ND: np.ndarray, first: int = 0) -> list[Row]:
    """A row for each vector, numbered from the first on."""
    return [
        Row("/photos", f"{name:07d}.jpg", "1:1", f"d{name}", vector_D, metadata={"year": 2000 + name % 25})
        for name, vector_D in enumerate(vector_ND, start=first)
    ]


def put(index: Index, vector_ND: np.ndarray, first: int = 0, *, new: bool = False) -> None:
    """Write rows as `rge index` does."""
    for at in range(0, len(vector_ND), A_COMMIT):
        index.put(rows_of(vector_ND[at : at + A_COMMIT], first + at), new=new)


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
        timed(f"add all, {A_COMMIT} a commit", lambda: put(index, vector_ND, new=True))
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


MADE = {"checkpoint": "none", "checkpoint_hash": "0" * 64}
CONDITIONS = {"4 % of the rows": "year = 2003", "half of the rows": "year > 2012"}


def beside_lancedb(folder: Path, options: Options) -> Rows:
    """Seconds of the same work here and by LanceDB's own calls, medians of three turns but for building."""
    vector_ND = drawn(options.rows, options.dimensions, clustered=True, seed=1)
    query_QD = drawn(3, options.dimensions, clustered=True, seed=2)
    index = Index.create(folder / "rge", dimensions=options.dimensions, **MADE)
    schema = new_schema(index.about).remove_metadata()
    plain = lancedb.connect(folder / "plain").create_table("items", schema=schema)

    def blocks():
        for at in range(0, options.rows, A_COMMIT):
            yield rows_of(vector_ND[at : at + A_COMMIT], at), vector_ND[at : at + A_COMMIT]

    ours = plains = 0.0
    for some, some_ND in blocks():
        table, _ = as_table(some, some_ND, schema)
        began = time.perf_counter()
        plain.add(table)
        between = time.perf_counter()
        index.put(some, new=True)
        plains, ours = plains + between - began, ours + time.perf_counter() - between
    found: Rows = {"build": {"rge": ours, "LanceDB": plains}}
    index.refresh(ann_from=options.rows + 1000)
    plain.optimize()
    number = iter(range(options.rows, 10**9))

    def put_one():
        index.put(rows_of(query_QD[:1], next(number)), new=True)
        index.refresh(ann_from=options.rows + 1000)

    def change_one():
        index.put(rows_of(query_QD[1:2], 7))
        index.refresh(ann_from=options.rows + 1000)

    def merge(name: int):
        table, _ = as_table(rows_of(query_QD[:1], name), query_QD[:1], schema)
        rows = plain.merge_insert(["source", "id"]).when_matched_update_all().when_not_matched_insert_all()
        rows.execute(table)

    def found_by(search):
        return search.distance_type("dot").limit(K).select(["id", "_distance"]).to_arrow()

    one, _ = as_table(rows_of(query_QD[:1], options.rows), query_QD[:1], schema)
    work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "add one": (put_one, lambda: plain.add(one)),
        "change one": (change_one, lambda: merge(7)),
        "exact search": (
            lambda: index.search(query_QD[:1], K, exact=True), lambda: found_by(plain.search(query_QD[0])),
        ),
    }  # fmt: skip
    for name, where in CONDITIONS.items():
        narrowed = plain.search(query_QD[0]).where(where)
        work[f"exact search in {name}"] = (
            partial(index.search, query_QD[:1], K, exact=True, where=where), partial(found_by, narrowed),
        )  # fmt: skip
    for name, (here, there) in work.items():
        here(), there()  # what is read once
        found[name] = medians(in_turns({"rge": here, "LanceDB": there}, repeats=3)[0])
    return found


def memory(folder: str, query_QD: np.ndarray) -> float:
    """Largest growth of memory in the first exact search, as a multiple of the vectors that it keeps."""
    index = Index.open(folder)
    kept = min(CACHE_BYTES, len(index) * query_QD.shape[1] * 4)
    return peak_growth(lambda: index.search(query_QD, K, exact=True)) / kept


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
    show(found)
    with tempfile.TemporaryDirectory() as folder:
        beside = beside_lancedb(Path(folder), options)
        query_QD = drawn(1, options.dimensions, clustered=True, seed=2)
        peak = in_new_process(memory, f"{folder}/rge", query_QD)
    for row in beside.values():
        row["rge / LanceDB"] = row["rge"] / row["LanceDB"]
    print("seconds")
    show(beside)
    print(f"the first exact search takes {peak:.2f} x the vectors that it keeps")
    return found | beside | {"memory": {"of the vectors": peak}}
