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
        nothing = np.empty(0, np.uint64), np.empty(0, np.float32)
        best = [nothing] * len(query_QD)
        for id_N, vector_ND in self._rows(where):
            best = [
                _best(np.append(ids, id_N), np.append(scores, score_N), k)
                for (ids, scores), score_N in zip(best, query_QD @ vector_ND.T, strict=True)
            ]
        all_ids = np.unique(np.concatenate([ids for ids, _ in [nothing, *best]]))
        if not len(all_ids):
            return [[] for _ in query_QD]
        table = self.table.take_row_ids(all_ids.tolist()).select([*columns, "vector"]).to_arrow()
        return [
            hits_of(table.take(np.searchsorted(all_ids, ids)), query_D, k)
            for query_D, (ids, _) in zip(query_QD, best, strict=True)
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


def _best(id_N: np.ndarray, score_N: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows and all ties of the last."""
    if len(id_N) <= k:
        return id_N, score_N
    # A matrix product rounds equal vectors differently by position, by less than this.
    mask_N = score_N >= np.partition(score_N, -k)[-k] - 1e-5
    return id_N[mask_N], score_N[mask_N]
