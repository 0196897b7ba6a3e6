"""What is mined: distinct queries and candidates of records, and which are right for which.

Two candidates with one id, one identity or equal content are right together; so are they for two records that ask the same.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from rge.common.schema import Item, Record, Target
from rge.mining.search import Groups, exact_scores

T = TypeVar("T")
PAIRS = 1 << 14
"""Pairs scored at once."""


class Candidate(NamedTuple, Generic[T]):
    """A candidate before it is known which ones are equal."""

    digest: str  # of its content
    id: str
    identity: str
    target: T


@dataclass(frozen=True)
class Query(Generic[T]):
    """A query as it is asked by one or more records."""

    item: T
    digest: str  # of its content
    positives: tuple[int, ...]  # rows of all right answers that records name
    negatives: tuple[int, ...]  # rows of the negatives that records have


Asked = tuple[str, Any, Sequence[Candidate[Any]], Sequence[Candidate[Any]]]
"""A record: hash of its query's content, the query, its positives and its negatives."""


class Table:
    """Distinct queries and candidates, by content. Candidates are in the order of their ids, then of their content.

    Attributes:
        targets: one target of each content.
        digests: the contents' hashes.
        allowed_C: which candidates may be found: all (None), or those of a pool.
        group_C: number of the group of each candidate; those of one group are right together.
        queries: in the order of the records.
        num_merged: ids of candidates that have the content of another.
    """

    def __init__(self, records: Iterable[Asked], pool: Iterable[Candidate[Any]] | None = None):
        """`pool` replaces the records' own targets as candidates."""
        found: dict[str, Candidate[Any]] = {}
        names: dict[str, set[str]] = {}
        asked: dict[str, tuple[Any, set[str], set[str]]] = {}
        ids: set[tuple[str, str]] = set()

        def add(one: Candidate[Any]) -> str:
            key = one.digest
            ids.add((one.id, key))
            names.setdefault(key, set()).update((one.id, one.identity))
            if key not in found or one.id < found[key].id:
                found[key] = one
            return key

        for name, item, positives, negatives in records:
            _, right, wrong = asked.setdefault(name, (item, set(), set()))
            right.update(map(add, positives))
            wrong.update(map(add, negatives))
        in_pool = None if pool is None else set(map(add, pool))
        self.digests = sorted(found, key=lambda key: (found[key].id, key))
        self.targets = [found[key].target for key in self.digests]
        self.ids = [found[key].id for key in self.digests]
        self.rows: Mapping[str, int] = {key: row for row, key in enumerate(self.digests)}
        self.places: Mapping[str, int] = {name: place for place, name in enumerate(asked)}
        self.num_merged = len(ids) - len(found)
        self.allowed_C = None if in_pool is None else np.array([key in in_pool for key in self.digests])
        self.group_C = _groups([names[key] for key in self.digests])
        self.queries = [
            Query(item, name, self._rows_of(right), self._rows_of(wrong))
            for name, (item, right, wrong) in asked.items()
        ]

    def groups(self, *, keep: bool = True, places: Sequence[int] | None = None) -> Groups:
        """What must not be found as a query's negative: what is right and, with `keep`, what is already there.

        Of the queries at these `places`; None: of all.
        """
        queries = self._at(places)
        return Groups(
            self.group_C, self._right(queries), [query.negatives if keep else () for query in queries]
        )

    def num_same(self) -> int:
        """Pairs of a query and a candidate that no record calls right, but which shares an identity with one that is."""
        size = np.bincount(self.group_C, minlength=len(self.group_C))
        named = sum(len(query.positives) for query in self.queries)
        return int(sum(size[groups].sum() for groups in self._right(self.queries))) - named

    def positive_pairs(self, places: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(P,) numbers of queries, among those at `places` (None: all), and (P,) rows of their positives."""
        queries = self._at(places)
        number_P = np.repeat(np.arange(len(queries)), [len(query.positives) for query in queries])
        return number_P, np.array([row for query in queries for row in query.positives], np.int64)

    def lowest_positive(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> np.ndarray:
        """(Q,) float32 scores of each query's positive with the lowest."""
        place_P, row_P = self.positive_pairs()
        lowest_Q = np.full(len(self.queries), np.inf, np.float32)
        np.minimum.at(lowest_Q, place_P, pair_scores(query_QD, candidate_CD, place_P, row_P))
        return lowest_Q

    def _at(self, places: Sequence[int] | None) -> list[Query[Any]]:
        return self.queries if places is None else [self.queries[place] for place in places]

    def _right(self, queries: Sequence[Query[Any]]) -> list[list[int]]:
        return [sorted(set(self.group_C[list(query.positives)].tolist())) for query in queries]

    def _rows_of(self, keys: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self.rows[key] for key in keys))


class RecordTable(Table):
    """The table of training records and, as a pool, of targets; `items` are its candidates, to embed.

    Raises:
        ImageError: a picture cannot be read.
    """

    queries: list[Query[Item]]
    targets: list[Target]

    def __init__(
        self,
        records: Iterable[Record],
        digest: Callable[[Item], str],
        pool: Iterable[Target] | None = None,
    ):
        """`digest` is a hash of an item's content; what many records name is hashed once."""
        self._digest = digest
        self._known: dict[Hashable, str] = {}
        rows = (
            (
                self._hash(query),
                query,
                *([*map(self._candidate, part)] for part in (one.positives, one.negatives)),
            )
            for one in records
            for query in [_query_of(one)]
        )
        super().__init__(rows, None if pool is None else map(self._candidate, pool))  # type: ignore[arg-type]
        self.items = list(map(_item_of, self.targets))

    def row(self, target: Target) -> int:
        """Row of a target of the records or the pool."""
        return self.rows[self._hash(_item_of(target))]

    def place(self, record: Record) -> int:
        """Number of a record's query."""
        return self.places[self._hash(_query_of(record))]

    def _candidate(self, target: Target) -> Candidate[Target]:
        return Candidate(self._hash(_item_of(target)), target.id, target.identity or target.id, target)

    def _hash(self, item: Item) -> str:
        content = replace(item, id="")
        if content not in self._known:
            self._known[content] = self._digest(item)
        return self._known[content]


def _query_of(record: Record) -> Item:
    return Item(record.id, record.query.parts, record.instruction)


def _item_of(target: Target) -> Item:
    return Item(target.id, target.parts)


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
            other, own = root(first.setdefault(name, row)), root(row)
            parent[max(own, other)] = min(own, other)
    return np.array([root(row) for row in range(len(names))], np.int64)
