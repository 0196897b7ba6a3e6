"""The embeddings of one set by one encoder.

Filling a cache and reading it are separate steps: all processes fill, but only the first one reads.
"""

from dataclasses import dataclass, replace

import numpy as np

from eval.sets.contents import Contents
from eval.sets.retrieval_set import Modality, RetrievalSet
from rge.common.modes import Mode
from rge.common.schema import Encoded
from rge.vectors import shards
from rge.vectors.caches import EmbeddingCaches
from rge.vectors.fill_cache import check_collapse, cut
from rge.vectors.shards import Cache


@dataclass
class Embeddings(EmbeddingCaches):
    """The embeddings of one encoder on one set."""

    wanted: RetrievalSet
    contents: Contents
    candidate_mode: Mode
    dims: int | None  # components kept of each embedding, but not in caches; None: all
    memory_mb: float  # for a pool's embeddings; larger ones become a memory map

    def fill_queries(self, mode: Mode, modality: Modality) -> Cache:
        """Complete the cache of the queries for a condition."""
        items, ids = self.wanted.query_items(modality), self.wanted.query_ids
        return self.fill(
            "query", mode, items, self.contents.queries[modality], ids, modality=modality, **self._of_set
        )

    def fill_candidates(self) -> Cache:
        """Complete the cache of the pool."""
        wanted = self.wanted
        ids = [wanted.corpus_ids[row] for row in wanted.file_order_C]
        items, contents = wanted.corpus_items(), self.contents.candidates
        return self.fill("candidate", self.candidate_mode, items, contents, ids, **self._of_set)

    def queries(self, mode: Mode, modality: Modality) -> Encoded:
        """Embeddings and rationales of the queries, in file order; a UserError if all embeddings are the same."""
        encoded = shards.read(self.fill_queries(mode, modality))
        encoded = replace(encoded, embeddings=cut(encoded.embeddings, self.dims))
        check_collapse(encoded.embeddings, self.contents.queries[modality], "query")
        return encoded

    def candidates(self) -> np.ndarray:
        """Embeddings of the pool in id order, (C, D) float32; a UserError if all are the same."""
        cache = self.fill_candidates()
        embedding_CD = cut(shards.read_embeddings(cache, self.wanted.file_order_C, self.memory_mb), self.dims)
        contents = [self.contents.candidates[row] for row in self.wanted.file_rows_C.tolist()]
        check_collapse(embedding_CD, contents, "candidate")
        return embedding_CD

    @property
    def _of_set(self) -> dict[str, str]:
        return {"fingerprint": self.wanted.fingerprint, "set": self.wanted.name}
