"""How every part grows with its data, in one run: `python scripts/bench.py growth`.

Seconds and largest growth of memory by number of rows, and the exponent from the last but one size to the last: 0 does not grow, 1 grows as
the data does. Vectors lie around 2,000 centres; records are texts, or have two pictures each in a folder or in Parquet, of which a few
files are linked under many names; pictures of the near-duplicates are of one scene. Embedding (demo checkpoint) and data preparation (a
local stand-in answers) cost milliseconds an item and stop at a size of their own.
"""

import contextlib
import io
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
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from benches import data_prep
from benches.harness import (
    Rows,
    in_new_process,
    peak_growth,
    random_backbone,
    random_picture,
    show,
)
from benches.index import A_COMMIT, CONDITIONS, MADE, K, drawn, put, rows_of
from eval.scoring.metrics import compute, cut, judge, names_of
from eval.scoring.search import search
from rge.content.near_duplicates import NUM_BITS, near_duplicates
from rge.data.collate import Source, StepBatches
from rge.data.config import DataConfig
from rge.data.layout import lay_out_once
from rge.data.mixture import Mixture
from rge.data.verdicts import Verdicts
from rge.index import embed
from rge.index.store import Index

ACTIVE, FLIPPED, BITS = 24, 0.5, 4
"""Bits that differ between pictures of a scene, in at most this share of them; and the distance of near-duplicates."""
FILES, A_FOLDER, SIDE_PX = 64, 1000, 56
"""Pictures on the disk, whose links have many names, so many to a folder; a file has at most 65,000 names."""
QUERIES, DEPTH, RIGHT = 200, 100, 3
"""Of an evaluation."""
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]}  # fmt: skip
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip

Work = Iterator[tuple[str, Callable[[], Any]]]


@dataclass
class Options:
    """What is measured."""

    sizes: tuple[Annotated[int, Field(ge=100)], ...] = (1_000, 10_000, 100_000)
    """Rows, records and pictures."""
    dimensions: Annotated[int, Field(ge=8)] = 128
    """Dimensions of a vector."""
    most_embedded: Annotated[int, Field(ge=0)] = 10_000
    """Largest size at which texts are embedded, and pictures prepared as data."""
    parts: tuple[str, ...] = ()
    """Only these parts, such as index or pre-flight; none: all."""


def of_index(size: int, options: Options, folder: Path) -> Work:
    """Building an index, and what is done with it afterwards."""
    vector_ND = drawn(size, options.dimensions, clustered=True, seed=1)
    query_QD = drawn(3, options.dimensions, clustered=True, seed=2)
    block_ND = drawn(A_COMMIT, options.dimensions, clustered=True, seed=3)
    index = Index.create(folder / "index", dimensions=options.dimensions, **MADE)

    def add(vectors_ND: np.ndarray, first: int) -> None:
        index.put(rows_of(vectors_ND, first), new=True)
        index.refresh(ann_from=4 * size)

    yield "index: add all", lambda: put(index, vector_ND, new=True)
    yield "index: first upkeep", lambda: index.refresh(ann_from=4 * size)
    yield "index: add one more", lambda: add(query_QD[:1], size)
    yield f"index: add a block of {A_COMMIT:,}", lambda: add(block_ND, size + 1)
    yield "index: change a block", lambda: index.put(rows_of(block_ND))
    yield "search: the first", lambda: index.search(query_QD[1:2], K)
    yield "search: the next", lambda: index.search(query_QD[2:], K)
    for name, where in CONDITIONS.items():
        yield f"search in {name}", partial(index.search, query_QD[2:], K, where=where)
    yield "index: approximate", lambda: index.refresh(ann_from=1)
    yield "search: approximate", lambda: index.search(query_QD[2:], K)


def of_evaluation(size: int, options: Options, folder: Path) -> Work:
    """Ranking a pool for `QUERIES` queries, and every metric."""
    candidate_CD = drawn(size, options.dimensions, clustered=True, seed=1)
    query_QD = drawn(QUERIES, options.dimensions, clustered=True, seed=2)
    chance = np.random.default_rng(0)
    right = [(np.sort(chance.choice(size, RIGHT, replace=False)).astype(np.int32), np.ones(RIGHT)) for _ in range(QUERIES)]  # fmt: skip

    def evaluate() -> None:
        ranking = search(query_QD, candidate_CD, depth=DEPTH)
        order = judge(ranking.rows_QW, right, None, num_candidates=size)
        for name in names_of():
            compute(name, cut(order, ranking.depth))

    yield f"evaluate {QUERIES} queries", evaluate


def of_texts(size: int, options: Options, folder: Path) -> Work:
    """The checks of records of texts before training."""
    path = _written(folder / "texts.jsonl", size, lambda number: None)
    for name in ("pre-flight of texts", "pre-flight of texts, cached"):
        yield name, lambda: Verdicts(folder / "verdicts").open(path, need_rationale=True, on_bad="error")


def of_pictures(size: int, options: Options, folder: Path, *, in_parquet: bool) -> Work:
    """From records with two pictures each to the first batch: checks, lengths from the pictures' headers, both from the cache, batch."""
    kind, count = "Parquet" if in_parquet else "folders", 2 * size
    chance = np.random.default_rng(0)
    files = []
    for _ in range(FILES):
        random_picture(chance, SIDE_PX).save(data := io.BytesIO(), "JPEG")
        files.append(data.getvalue())
    if in_parquet:
        path = folder / "pictures.parquet"
        with pq.ParquetWriter(path, pa.schema({"id": pa.string(), "image": pa.binary()})) as out:
            for first in range(0, count, A_COMMIT):
                names = range(first, count)[:A_COMMIT]
                rows = {"id": list(map(str, names)), "image": [files[name % FILES] for name in names]}
                out.write_table(pa.table(rows, schema=out.schema), row_group_size=256)
        os.utime(path, (0, 0))
        records = _written(folder / "records.jsonl", size, lambda number: f"pictures.parquet#{number}")
    else:
        for number in range(count):
            path = folder / f"{number // A_FOLDER}" / f"{number}.jpg"
            if number % A_FOLDER == 0:
                path.parent.mkdir()
            if number < FILES:
                path.write_bytes(files[number])
                os.utime(path, (0, 0))
            else:
                os.link(folder / "0" / f"{number % FILES}.jpg", path)
        for path in folder.glob("*/"):
            os.utime(path, (0, 0))
        records = _written(
            folder / "records.jsonl", size, lambda number: f"{number // A_FOLDER}/{number}.jpg"
        )
    backbone = random_backbone(["what opens a lock", "a key"], {"vocab_size": 400, "text": TEXT, "vision": VISION}, min_pixels=SIDE_PX**2, max_pixels=SIDE_PX**2)  # fmt: skip
    from rge.model.prompts import PromptBuilder  # imports torch, as `random_backbone` has

    builder, settings, sources = PromptBuilder(backbone.processor), DataConfig(), list[Source]()

    def check() -> None:
        verdicts = Verdicts(folder / "verdicts")
        file = verdicts.open(records, need_rationale=False, on_bad="stop")
        sources[:] = [Source(file, builder, settings)]
        lay_out_once(sources[0], verdicts, need_oracle=False, need_candidates=True)

    def batch() -> None:
        mixture = Mixture([size], [1.0], 32, seed=0)
        StepBatches(sources, mixture, rank=0, world_size=1, need_oracle=False, need_candidates=True)[0]

    yield f"pre-flight of pictures in {kind}", check
    yield f"pre-flight of pictures in {kind}, cached", check
    yield f"first batch of pictures in {kind}", batch


def of_near_duplicates(size: int, options: Options, folder: Path) -> Work:
    """Near-duplicates among pictures of one scene."""
    chance = np.random.default_rng(0)
    bits = np.tile(chance.integers(0, 2, NUM_BITS, dtype=np.uint8), (size, 1))
    share = chance.uniform(0, FLIPPED, ACTIVE)
    bits[:, :ACTIVE] ^= chance.random((size, ACTIVE)) < share
    hashes = [row.tobytes().hex() for row in np.packbits(bits, axis=1)]
    yield "near-duplicates of one scene", lambda: near_duplicates(hashes, BITS)


def of_embedding(size: int, options: Options, folder: Path) -> Work:
    """`rge embed` of a table of texts."""
    lines = (json.dumps({"id": f"t{number}", "text": f"the key of lock {number}"}) for number in range(size))
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [str(folder / "texts.jsonl"), f"out={folder / 'texts.parquet'}", "checkpoint=demo"]

    def quiet() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            embed.main(words)

    yield "embed texts", quiet


def of_preparation(size: int, options: Options, folder: Path) -> Work:
    """All stages of `rge data rmir`."""
    given = data_prep.Options(pictures=size, out=str(folder / "prepared"))
    yield "data preparation", lambda: data_prep.measure(given)


PARTS: dict[str, Callable[[int, Options, Path], Work]] = {
    "embed": of_embedding,
    "index": of_index,
    "evaluate": of_evaluation,
    "pre-flight": of_texts,
    "folders": partial(of_pictures, in_parquet=False),
    "parquet": partial(of_pictures, in_parquet=True),
    "near-duplicates": of_near_duplicates,
    "preparation": of_preparation,
}
SLOW = ("embed", "preparation")


def _written(path: Path, size: int, picture: Callable[[int], str | None]) -> Path:
    """Records of a question and its answer, each with a picture unless there is none."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(size):
            target: dict[str, Any] = {"id": f"t{number}", "rationale": "a key"}
            query: dict[str, Any] = {"text": f"what opens lock {number}"}
            if (shown := picture(2 * number)) is not None:
                query["images"], target["image"] = [shown], picture(2 * number + 1)
            else:
                target["text"] = f"the key of lock {number}"
            record = {"id": f"r{number}", "source": "locks", "query": query, "positives": [target]}
            file.write(json.dumps(record) + "\n")
    os.utime(path, (0, 0))  # what has just been written is not cached
    return path


def measured(part: str, size: int, options: Options) -> dict[str, tuple[float, float]]:
    """Seconds of each piece of work of a part, and the memory that it took, in MB."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for label, call in PARTS[part](size, options, Path(name)):
            began = time.perf_counter()
            grown = peak_growth(call)
            found[label] = time.perf_counter() - began, grown / 1e6
    return found


def measure(options: Options) -> dict[str, Rows]:
    """A column for each size; each part in its own process."""
    seconds, memory = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for part in options.parts or PARTS:
        for size in sorted(options.sizes):
            if part in SLOW and size > options.most_embedded:
                continue
            for label, (took, grown) in in_new_process(measured, part, size, options).items():
                seconds.setdefault(label, {})[f"{size:,}"] = took
                memory.setdefault(label, {})[f"{size:,}"] = grown
            print(part, f"{size:,}", flush=True)
    for row in seconds.values():
        if len(row) > 1:
            (before, earlier), (last, latest) = list(row.items())[-2:]
            sizes = [int(name.replace(",", "")) for name in (before, last)]
            row["exponent"] = math.log(latest / earlier) / math.log(sizes[1] / sizes[0])
    block = A_COMMIT * options.dimensions * 4 / 1e6
    for label, row in list(memory.items()):
        if "block" in label:
            memory[f"{label}, as a multiple of its vectors"] = {name: mb / block for name, mb in row.items()}
    print("\nseconds")
    show(seconds)
    print("\nlargest growth of memory, MB")
    show(memory)
    return {"seconds": seconds, "MB": memory}
