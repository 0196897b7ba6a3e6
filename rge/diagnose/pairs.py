"""Queries, what answers them, and oracle rationales: from training records or from a retrieval set.

Shape suffixes: Q = queries, C = candidates, D = embedding size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rge.common.schema import ImageRef, Item
from rge.config import RecordsConfig
from rge.data.collate import query_item, target_item
from rge.data.readers import open_records
from rge.data.sources import RecordError, Records, identity
from rge.stats.intervals import cluster_bootstrap, figures, index_of


@dataclass(frozen=True)
class Pairs:
    """What a checkpoint is asked.

    Attributes:
        queries: Q items.
        groups: Q names of what resampling keeps together.
        oracle: Q oracle rationales; None where there is none.
        candidates: C items, ranked for every query.
        right_QC: which of them answer which query, bool.
    """

    queries: list[Item]
    groups: list[str]
    oracle: list[str | None]
    candidates: list[Item]
    right_QC: np.ndarray


def read_pairs(path: str | Path, limit: int, seed: int = 0) -> Pairs:
    """Read at most `limit` queries, drawn at random.

    Args:
        path: training records (see `open_data`), whose targets together are the candidates; or the folder of a retrieval set.
        limit: queries at most.
        seed: of the draw.

    Raises:
        RecordError: neither of both, or a damaged one.
    """
    path = Path(path)
    if (path / "queries.parquet").is_file():
        return _from_set(path, limit, seed)
    return _from_records(open_data(path), limit, seed)


def open_data(path: str | Path, *, need_rationale: bool = False) -> Records:
    """Training records: a file of them, or the split ``train`` of a folder that the library `datasets` reads.

    Raises:
        RecordError: neither of both, or a damaged one.
    """
    path = Path(path)
    if path.suffix != ".jsonl" and not path.is_dir():
        raise RecordError(
            f"{path} is neither training records (FILE.jsonl, or the folder of a data set) nor the folder of a retrieval set"
        )
    source = RecordsConfig(dataset=str(path)) if path.is_dir() else RecordsConfig(path=str(path))
    return open_records(source, need_rationale=need_rationale)


def _draw(count: int, limit: int, seed: int) -> list[int]:
    if count <= limit:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, size=limit, replace=False).tolist())


def _from_records(file: Records, limit: int, seed: int) -> Pairs:
    records = [file[index] for index in _draw(len(file), limit, seed)]
    targets = {target.id: target for record in records for target in (*record.positives, *record.negatives)}
    known = np.array([identity(target) for target in targets.values()])
    right = [np.isin(known, [identity(target) for target in record.positives]) for record in records]
    return Pairs(
        [query_item(record) for record in records],
        [record.group for record in records],
        [record.positives[0].rationale for record in records],
        [target_item(target) for target in targets.values()],
        np.stack(right),
    )


def _from_set(folder: Path, limit: int, seed: int) -> Pairs:
    rows = pq.read_table(folder / "queries.parquet").to_pylist()
    rows = [rows[index] for index in _draw(len(rows), limit, seed)]
    corpus = pq.read_table(folder / "corpus.parquet").to_pylist()
    column = {row["id"]: number for number, row in enumerate(corpus)}
    row_of = {row["id"]: number for number, row in enumerate(rows)}
    right = np.zeros((len(rows), len(corpus)), dtype=bool)
    for judged in pq.read_table(folder / "qrels.parquet").to_pylist():
        if judged["query-id"] in row_of and judged["score"] > 0:
            if judged["corpus-id"] not in column:
                raise RecordError(
                    f"{folder}: {judged['corpus-id']!r} is judged and stands in no row of corpus.parquet"
                )
            right[row_of[judged["query-id"]], column[judged["corpus-id"]]] = True
    return Pairs(
        [
            Item(
                row["id"], row.get("text"), _pictures(row.get("image") or [], folder), row.get("instruction")
            )
            for row in rows
        ],
        [row.get("group") or row["id"] for row in rows],
        [None] * len(rows),
        [Item(row["id"], row.get("text"), _pictures([row.get("image")], folder)) for row in corpus],
        right,
    )


def _pictures(images: Sequence[Any], folder: Path) -> tuple[ImageRef, ...]:
    found: list[ImageRef] = []
    for image in images:
        if isinstance(image, dict):
            image = image["bytes"] or image["path"]
        if image is not None:
            found.append(image if isinstance(image, bytes) else str(folder / image))
    return tuple(found)


def hits(query_QD: np.ndarray, candidate_CD: np.ndarray, right_QC: np.ndarray) -> np.ndarray:
    """Whether the best candidate is a right one, (Q,) float64; of equal scores the first counts."""
    best_Q = (query_QD @ candidate_CD.T).argmax(axis=1)
    return right_QC[np.arange(len(best_Q)), best_Q].astype(np.float64)


def interval(
    values_Q: np.ndarray, groups: Sequence[str], seed: int = 0, *, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float | None, float | None]:
    """Mean and 95 % interval over groups, see `rge.stats.intervals`; None where one group alone has none."""
    (found,) = figures(cluster_bootstrap(values_Q[:, None], index_of(groups), seed=seed), bounds)
    return float(values_Q.mean()), found["low"], found["high"]


def elsewhere(groups: Sequence[str], seed: int = 0) -> np.ndarray:
    """A permutation that gives every query another group's, as far as there are any, (Q,) int64."""
    rng = np.random.default_rng(seed)
    names = np.asarray(groups, dtype=object)
    order = rng.permutation(len(names))
    other = order[np.argsort(names[order].astype(str), kind="stable")]  # groups one after the other
    largest = max(int((names == name).sum()) for name in set(groups))
    moved = np.empty(len(names), dtype=np.int64)
    moved[other] = np.roll(other, largest)  # further than any group is long
    return moved
