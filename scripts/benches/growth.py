"""How index, search, pre-flight and near-duplicates grow with their data. `python scripts/bench.py growth`.

Seconds by number of rows, and the exponent from the last but one size to the last: 0 does not grow, 1 grows as the data does. Vectors lie
around 2,000 centres; records are texts; pictures are of one scene, so that their hashes differ in few bits.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from benches.harness import Rows, in_new_process, peak_growth, show
from benches.index import CONDITIONS, MADE, K, drawn, put, rows_of
from rge.content.near_duplicates import NUM_BITS, near_duplicates
from rge.data.verdicts import Verdicts
from rge.index.store import Index

ACTIVE, FLIPPED, BITS = 24, 0.5, 4
"""Bits that differ between pictures of a scene, in at most this share of them; and the distance of near-duplicates."""


@dataclass
class Options:
    """What is measured."""

    sizes: tuple[Annotated[int, Field(ge=100)], ...] = (1_000, 10_000, 100_000)
    """Rows, records and pictures."""
    dimensions: Annotated[int, Field(ge=8)] = 128
    """Dimensions of a vector."""


def of_index(size: int, options: Options, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Building an index, and what is done with it afterwards."""
    vector_ND = drawn(size, options.dimensions, clustered=True, seed=1)
    query_QD = drawn(3, options.dimensions, clustered=True, seed=2)
    index = Index.create(folder / "index", dimensions=options.dimensions, **MADE)

    def update() -> None:
        index.put(rows_of(query_QD[:1], size), new=True)
        index.refresh(ann_from=2 * size)

    yield "index: add all", lambda: put(index, vector_ND, new=True)
    yield "index: first upkeep", lambda: index.refresh(ann_from=2 * size)
    yield "index: add one more", update
    yield "search: the first", lambda: index.search(query_QD[1:2], K)
    yield "search: the next", lambda: index.search(query_QD[2:], K)
    for name, where in CONDITIONS.items():
        yield f"search in {name}", partial(index.search, query_QD[2:], K, where=where)
    yield "index: approximate", lambda: index.refresh(ann_from=1)
    yield "search: approximate", lambda: index.search(query_QD[2:], K)


def of_records(size: int, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The checks of records before training."""
    path = folder / "records.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(size):
            target = {"id": f"t{number}", "text": f"the key of lock {number}", "rationale": "a key"}
            query = {"text": f"what opens lock {number}"}
            record = {"id": f"r{number}", "source": "locks", "query": query, "positives": [target]}
            file.write(json.dumps(record) + "\n")
    os.utime(path, (0, 0))  # what has just been written is not cached
    for name in ("pre-flight", "pre-flight again, cached"):
        yield name, lambda: Verdicts(folder / "verdicts").open(path, need_rationale=True, on_bad="error")


def of_pictures(size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Near-duplicates among pictures of one scene."""
    chance = np.random.default_rng(0)
    bits = np.tile(chance.integers(0, 2, NUM_BITS, dtype=np.uint8), (size, 1))
    share = chance.uniform(0, FLIPPED, ACTIVE)
    bits[:, :ACTIVE] ^= chance.random((size, ACTIVE)) < share
    hashes = [row.tobytes().hex() for row in np.packbits(bits, axis=1)]
    yield "near-duplicates of one scene", lambda: near_duplicates(hashes, BITS)


def measured(size: int, options: Options) -> dict[str, float]:
    """Seconds of each piece of work, and the most memory that one took."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "index": of_index(size, options, folder),
            "pre-flight": of_records(size, folder),
            "near-duplicates": of_pictures(size),
        }
        for part, work in parts.items():
            most = 0
            for label, call in work:
                began = time.perf_counter()
                most = max(most, peak_growth(call))
                found[label] = time.perf_counter() - began
            found[f"MB, most for {part}"] = most / 1e6
    return found


def measure(options: Options) -> Rows:
    """A column for each size, each in its own process."""
    found: Rows = {}
    for size in options.sizes:
        for label, value in in_new_process(measured, size, options).items():
            found.setdefault(label, {})[f"{size:,}"] = value
    if len(options.sizes) > 1:
        before, last = sorted(options.sizes)[-2:]
        for row in found.values():
            row["exponent"] = math.log(row[f"{last:,}"] / row[f"{before:,}"]) / math.log(last / before)
    return show(found)
