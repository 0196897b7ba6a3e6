"""What is mined: the distinct queries and candidates of training records, and which candidates are right for which queries.

Two candidates with one id, one identity or equal content are right together; so are they for two records that ask the same.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rge.common.schema import Item, Record, Target
from rge.data.collate import query_item, target_item
from rge.mining.search import Groups, exact_scores
from rge.vectors.contents import content_digest


@dataclass(frozen=True)
class Query:
    """A query as it is asked by one or more records."""

    item: Item
    digest: str  # of its content
    positives: tuple[int, ...]  # rows of all right answers that records name
    negatives: tuple[int, ...]  # rows of the negatives that records have


class Table:
    """Distinct queries and candidates, by content. Candidates are in the order of their ids, then of their content.

    Attributes:
        targets: one target of each content.
        items: the same, to embed.
        digests: the content's hash, see `rge.vectors.contents.content_digest`.
        allowed_C: which candidates may be found: all, or those of a pool.
        group_C: number of the group of each candidate; those of one group are right together.
        queries: in the order of the records.
        num_merged: ids of candidates that have the content of another.
    """

    def __init__(
        self,
        records: Iterable[Record],
        pool: Iterable[Target] | None = None,
        digest: Callable[[Item], str] = content_digest,
    ):
        """`pool` replaces the records' own targets as candidates; an `ImageError` if a picture cannot be read."""
        self._digests: dict[Item, str] = {}
        self._digest = digest
        found: dict[str, Target] = {}
        names: dict[str, set[str]] = {}
        in_pool: set[str] = set()
        ids: set[tuple[str, str]] = set()
        asked: dict[str, tuple[Item, set[str], set[str]]] = {}

        def add(target: Target) -> str:
            key = self._hash(target_item(target))
            ids.add((target.id, key))
            names.setdefault(key, set()).update((target.id, target.identity or target.id))
            if key not in found or target.id < found[key].id:
                found[key] = target
            return key

        for record in records:
            item = query_item(record)
            name = self._hash(item)
            _, right, wrong = asked.setdefault(name, (item, set(), set()))
            right.update(map(add, record.positives))
            wrong.update(map(add, record.negatives))
        if pool is not None:
            in_pool.update(map(add, pool))
        self.digests = sorted(found, key=lambda key: (found[key].id, key))
        self.targets = [found[key] for key in self.digests]
        self.items = list(map(target_item, self.targets))
        self._rows = {key: row for row, key in enumerate(self.digests)}
        self._places = {name: place for place, name in enumerate(asked)}
        self.num_merged = len(ids) - len(found)
        self.allowed_C = None if pool is None else np.array([key in in_pool for key in self.digests])
        self.group_C = _groups([names[key] for key in self.digests])
        self.queries = [
            Query(item, name, self._rows_of(right), self._rows_of(wrong))
            for name, (item, right, wrong) in asked.items()
        ]

    def row(self, target: Target) -> int:
        """Row of a target of the records or the pool."""
        return self._rows[self._hash(target_item(target))]

    def place(self, record: Record) -> int:
        """Number of a record's query."""
        return self._places[self._hash(query_item(record))]

    def groups(self, *, keep: bool = True) -> Groups:
        """What must not be found as a query's negative: what is right and, with `keep`, what is already there."""
        return Groups(
            self.group_C, self._right(), [query.negatives if keep else () for query in self.queries]
        )

    def num_same(self) -> int:
        """Pairs of a query and a candidate that no record calls right, but which shares an identity with one that is."""
        size = np.bincount(self.group_C, minlength=len(self.group_C))
        named = sum(len(query.positives) for query in self.queries)
        return int(sum(size[groups].sum() for groups in self._right())) - named

    def _hash(self, item: Item) -> str:
        """Hash of an item's content; a picture that many records name is read once."""
        content = replace(item, id="")
        if content not in self._digests:
            self._digests[content] = self._digest(item)
        return self._digests[content]

    def _right(self) -> list[list[int]]:
        return [sorted(set(self.group_C[list(query.positives)].tolist())) for query in self.queries]

    def lowest_positive(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> np.ndarray:
        """(Q,) float32 scores of each query's positive with the lowest."""
        place_P = np.repeat(np.arange(len(self.queries)), [len(query.positives) for query in self.queries])
        row_P = np.array([row for query in self.queries for row in query.positives], np.int64)
        score_P = pair_scores(query_QD, candidate_CD, place_P, row_P)
        lowest_Q = np.full(len(self.queries), np.inf, np.float32)
        np.minimum.at(lowest_Q, place_P, score_P)
        return lowest_Q

    def _rows_of(self, keys: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self._rows[key] for key in keys))


PAIRS = 1 << 14
"""Pairs scored at once."""


def pair_scores(
    query_QD: np.ndarray, candidate_CD: np.ndarray, place_P: np.ndarray, row_P: np.ndarray
) -> np.ndarray:
    """(P,) float32 scores of pairs of a query and a candidate."""
    parts = [
        exact_scores(query_QD[place_P[part]], candidate_CD[row_P[part]])
        for part in (slice(start, start + PAIRS) for start in range(0, len(row_P), PAIRS))
    ]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _groups(names: Sequence[set[str]]) -> np.ndarray:
    """Number of each row's group: rows that share a name, directly or over others, are one group."""
    parent = list(range(len(names)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    first: dict[str, int] = {}
    for row, of_row in enumerate(names):
        for name in of_row:
            other = root(first.setdefault(name, row))
            parent[max(root(row), other)] = min(root(row), other)
    return np.array([root(row) for row in range(len(names))], np.int64)
