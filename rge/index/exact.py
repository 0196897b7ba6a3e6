"""Exact search: every vector of a version of the table, in blocks, for all queries of a call in one pass."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rge.index.rows import Hit, hits_of, matrix

if TYPE_CHECKING:
    from lancedb.table import Table

BLOCK_ROWS = 8192
Block = tuple[np.ndarray, np.ndarray]
"""Row ids (N,) and vectors (N, D)."""


class Snapshot:
    """One version of a table; if `cached`, its vectors stay in memory."""

    def __init__(self, table: "Table", version: int, *, cached: bool):
        self.table, self.version, self._cached = table, version, cached
        self._blocks: list[Block] | None = None

    def search(
        self, query_QD: np.ndarray, k: int, where: str | None, columns: Sequence[str]
    ) -> list[list[Hit]]:
        """The k nearest rows of each query that meet a condition."""
        best = [_Best(k) for _ in query_QD]
        for id_N, vector_ND in self._rows(where):
            for top, score_N in zip(best, query_QD @ vector_ND.T, strict=True):
                top.add(id_N, score_N)
        all_ids = np.unique(np.concatenate([np.empty(0, np.uint64), *(top.id_N for top in best)]))
        if not len(all_ids):
            return [[] for _ in query_QD]
        table = self.table.take_row_ids(all_ids.tolist()).select([*columns, "vector"]).to_arrow()
        return [
            hits_of(table.take(np.searchsorted(all_ids, top.id_N)), query_D, k)
            for query_D, top in zip(query_QD, best, strict=True)
        ]

    def _rows(self, where: str | None) -> Iterable[Block]:
        if not self._cached:
            return self._read(where)
        if self._blocks is None:
            self._blocks = list(self._read(None))
        if where is None:
            return self._blocks
        query = self.table.search().where(where).select(["id"]).with_row_id(True).limit(None)
        wanted = query.to_arrow()["_rowid"].to_numpy()
        masks = (np.isin(id_N, wanted) for id_N, _ in self._blocks)
        blocks = zip(self._blocks, masks, strict=True)
        return [(id_N[mask_N], vector_ND[mask_N]) for (id_N, vector_ND), mask_N in blocks]

    def _read(self, where: str | None) -> Iterator[Block]:
        query = self.table.search().select(["vector"]).with_row_id(True).limit(None)
        for batch in (query if where is None else query.where(where)).to_batches(BLOCK_ROWS):
            rows = pa.Table.from_batches([batch])
            if len(rows):
                yield rows["_rowid"].to_numpy(), matrix(rows)


class _Best:
    """The k best rows of one query so far, and all ties of the last."""

    def __init__(self, k: int):
        self._k, self.id_N, self._score_N = k, np.empty(0, np.uint64), np.empty(0, np.float32)

    def add(self, id_N: np.ndarray, score_N: np.ndarray) -> None:
        self.id_N, self._score_N = np.append(self.id_N, id_N), np.append(self._score_N, score_N)
        if len(self.id_N) > self._k:
            # A matrix product rounds equal vectors differently by position, by less than this.
            mask_N = self._score_N >= np.partition(self._score_N, -self._k)[-self._k] - 1e-5
            self.id_N, self._score_N = self.id_N[mask_N], self._score_N[mask_N]
