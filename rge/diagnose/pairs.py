"""Queries, targets and oracle rationales to diagnose on: from training records or a retrieval set.

Shape suffixes: Q = queries, C = candidates, D = embedding size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rge.common.parts import content_of
from rge.common.schema import Item
from rge.data.collate import query_item, target_item
from rge.data.config import RecordsConfig
from rge.data.readers import open_records
from rge.data.sources import RecordError, Records, identity
from rge.stats.intervals import cluster_bootstrap, figures, index_of
from rge.tables.rows import picture_cell, table_rows


@dataclass(frozen=True)
class Pairs:
    """Q queries, C candidates and oracle rationales to diagnose on."""

    queries: list[Item]
    groups: list[str]  # of the queries, for resampling
    oracle: list[str | None]  # rationales of the queries
    candidates: list[Item]  # ranked for every query
    right_QC: np.ndarray  # which candidates answer which query, bool
    ranked_QC: np.ndarray | None = None  # which candidates a query's ranking may contain, bool; None: all

    def best(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> np.ndarray:
        """Each query's best candidate (the first of ties), (Q,) int64."""
        score_QC = query_QD @ candidate_CD.T
        if self.ranked_QC is not None:
            score_QC = np.where(self.ranked_QC, score_QC, -np.inf)
        return score_QC.argmax(axis=1)


def read_pairs(path: str | Path, limit: int, seed: int = 0) -> Pairs:
    """Draw at most `limit` queries from training records (see `open_data`), whose targets are the candidates, or a retrieval set."""
    path = Path(path)
    if not (path / "queries.parquet").is_file():
        return _from_records(open_data(path), limit, seed)
    invalid = RecordError(
        f"it is not a valid retrieval set: `rge eval check set={path}` says why", path, kind="set"
    )
    try:
        pairs = _from_set(path, limit, seed)
    except (KeyError, TypeError) as error:  # a column is missing or of another type
        raise invalid from error
    items = (*pairs.queries, *pairs.candidates)
    if not (pairs.queries and pairs.candidates and all(item.text or item.is_visual for item in items)):
        raise invalid
    return pairs


def open_data(path: str | Path, *, need_rationale: bool = False) -> Records:
    """Open training records: a file, or the split ``train`` of a folder that the library `datasets` reads."""
    path = Path(path)
    if path.suffix != ".jsonl" and not path.is_dir():
        raise RecordError(
            "it is neither training records (FILE.jsonl, or the folder of a data set) nor the folder of a retrieval set",
            path,
            kind="format",
        )
    if (path / "queries.parquet").is_file():
        raise RecordError(
            "it is a retrieval set, which has no oracle rationales: give training records", path, kind="set"
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
    identities = np.array([identity(target) for target in targets.values()])
    right = [np.isin(identities, list(map(identity, record.positives))) for record in records]
    return Pairs(
        queries=[query_item(record) for record in records],
        groups=[record.group for record in records],
        oracle=[record.positives[0].rationale for record in records],
        candidates=[target_item(target) for target in targets.values()],
        right_QC=np.stack(right),
    )


def _from_set(folder: Path, limit: int, seed: int) -> Pairs:
    rows = list(table_rows(folder / "queries.parquet"))
    rows = [rows[index] for index in _draw(len(rows), limit, seed)]
    corpus = list(table_rows(folder / "corpus.parquet"))
    column_of = {row["id"]: number for number, row in enumerate(corpus)}
    row_of = {row["id"]: number for number, row in enumerate(rows)}

    def listed(name: str) -> np.ndarray:
        pairs_QC = np.zeros((len(rows), len(corpus)), dtype=bool)
        for pair in table_rows(folder / name):
            query, candidate = pair["query-id"], pair["corpus-id"]
            if query not in row_of or pair.get("score", 1) <= 0:
                continue
            if candidate not in column_of:
                raise RecordError(
                    "it is listed, but corpus.parquet has no such row", folder / name, key=candidate
                )
            pairs_QC[row_of[query], column_of[candidate]] = True
        return pairs_QC

    ranked = None
    if (folder / "candidates.parquet").is_file():
        ranked = listed("candidates.parquet")
    if (folder / "excluded.parquet").is_file():
        ranked = ~listed("excluded.parquet") & (True if ranked is None else ranked)
    return Pairs(
        queries=[_item(row, folder) for row in rows],
        groups=[row.get("group") or row["id"] for row in rows],
        oracle=[None] * len(rows),
        candidates=[_item(row, folder) for row in corpus],
        right_QC=listed("qrels.parquet"),
        ranked_QC=ranked,
    )


def _item(row: dict[str, Any], folder: Path) -> Item:
    images = row.get("image")
    cells = map(picture_cell, images if isinstance(images, list) else [images])
    pictures = [cell if isinstance(cell, bytes) else str(folder / cell) for cell in cells if cell]
    return Item(row["id"], content_of(row.get("text"), pictures), row.get("instruction"))


def interval(
    values_Q: np.ndarray, groups: Sequence[str], seed: int = 0, *, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float | None, float | None]:
    """Mean and 95 % interval over groups, see `rge.stats.intervals`; None for a single group."""
    (figure,) = figures(cluster_bootstrap(values_Q[:, None], index_of(groups), seed=seed), bounds)
    return float(values_Q.mean()), figure["low"], figure["high"]


def permute_across_groups(groups: Sequence[str], seed: int = 0) -> np.ndarray:
    """A permutation that maps every query to one of another group, if there is another, (Q,) int64."""
    rng = np.random.default_rng(seed)
    names = np.asarray(groups, dtype=object)
    order = rng.permutation(len(names))
    by_group = order[np.argsort(names[order].astype(str), kind="stable")]
    largest = max(int((names == name).sum()) for name in set(groups))
    moved = np.empty(len(names), dtype=np.int64)
    moved[by_group] = np.roll(by_group, largest)  # a shift by the largest group leaves every group
    return moved
