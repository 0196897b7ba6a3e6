"""An index: a LanceDB table of vectors with their provenance; checks ``where=`` conditions.

    with writing("gallery"):
        index = Index.create("gallery", checkpoint="demo", checkpoint_hash=embedder.checkpoint_hash, dimensions=embedder.size)
        index.put(rows)
        index.refresh(ann_from=50_000)
    hits = Index.open("gallery").search(query_ND, k=10)

Every write is one commit of Lance: a reader sees the table before or after it, even if the writer is killed. Search is exact
until `Index.refresh` makes an approximate index (ANN) of the vectors.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rge.checkpoints.settings import CheckpointError
from rge.common.errors import UserError
from rge.common.files import held
from rge.index.nearest import search_device, within
from rge.index.rows import (
    EXIF,
    HIT_COLUMNS,
    PRIVATE,
    Hit,
    Row,
    as_table,
    hits_of,
    matrix,
    metadata_fields,
    new_schema,
    row_key,
    typed_name,
)
from rge.index.sources import composed

if TYPE_CHECKING:
    import torch
    from lancedb.db import DBConnection
    from lancedb.table import Table

    from rge.embedder import Embedder

TABLE, FORMAT = "items", 3
VERSION_AGE = timedelta(minutes=10)
"""Old versions of the table are deleted after this time, since a search may still read them."""
NUM_QUERIES, DEPTH = 100, 10
"""To measure the recall of an ANN index: rows used as queries at most, and neighbours per query."""
BLOCK_ROWS = 8192
"""Vectors that are read, or compared with all queries, at once."""
SELECTED_ROWS = 1 << 16
"""Short columns are read in batches of this size; LanceDB's own take up to ten times as long."""
ROUNDING = 1e-5
"""A matrix product rounds equal vectors differently by position, by less than this."""
SPARSE = 0.1
"""Share of rows up to which a condition's are gathered instead of masked."""
FEW_COMMITS, FEW_NEW, FEW_DELETED = 100, 1 / 32, 1 / 8
"""Changes since the last upkeep that it waits for: commits, and shares of rows that are new to the indices or were deleted."""
INDEXED_FROM = 50_000
"""With at least so many rows, an index of a column costs less than reading the column."""
LOOKUP_ROWS = 4_000
"""To look one digest up takes as long as to read so many."""
FILTERED = 24
"""Columns with an index for conditions, at most."""
GROWTH = 2
"""An approximate index is trained anew when it has so many times the rows that it was trained on."""
Block = tuple[np.ndarray, np.ndarray]
"""Row ids (N,) and vectors (N, D)."""
UPKEEP = "rge.upkeep"
"""Key of the metadata of the vectors' column that describes the last upkeep."""
CACHE_BYTES = 512 << 20
"""Vectors of an index stay in memory between exact searches if all of them take no more."""
MIN_FUSED = 100
"""The nearest rows that are fused with those found by words, at least."""
MAX_WORDED = 10_000
"""Rows found by words, at most; those that share the last one's score are left out then, since the cut is arbitrary among them."""
MAX_WORD = 256
"""Longest word that is found, in letters: file names are hashes or titles without spaces."""
NUM_NAMED = 1_000
"""Rows found by words, best first, whose names are compared with the question."""
FIRST_RANK = 60
"""Reciprocal rank fusion: a row gets 1 / 60 for the first place of a ranking, 1 / 61 for the second."""
FUNCTIONS = frozenset(
    "abs acos array_has array_length ascii asin atan atan2 btrim cbrt ceil char_length character_length "
    "coalesce concat contains contains_tokens cos current_date date_bin date_part date_trunc degrees "
    "ends_with exp find_in_set floor from_unixtime gcd greatest ifnull initcap instr isnan least left length "
    "levenshtein ln log log10 log2 lower ltrim make_date md5 now nullif nvl nvl2 octet_length pow power "
    "radians regexp_count regexp_like regexp_match reverse right round rtrim signum sin split_part sqrt "
    "starts_with strpos tan to_date to_timestamp to_timestamp_seconds trunc upper".split()
)
"""What a condition may call: a result is no larger than its arguments, or of a fixed size, unlike that of ``repeat`` or nested ``replace``,
which a client could use to take all memory of a server."""
_NOT_CALLED = frozenset(
    "and between cast datetime decimal ilike in is like not or timestamp try_cast".split()
)
_NAME = r'\w+|"[^"]*"|`[^`]*`'
_TOKEN = re.compile(
    rf"({_NAME})\s*\(|\b(?i:date|timestamp)(?=')|(?:{_NAME})(?!')"
    r"|'[^']*(?:'|\Z)|--[^\r\n]*\Z|-(?!-)|/(?!\*)|[\s(),.;:+*%=<>!|\[\]]"
)
"""A call, or any other token of a condition. Those that SQL reads in several ways, such as comments within, are none."""
NPROBES, REFINE = 64, 10
"""Cells of the ANN index that are searched, and how many times k of their rows are reranked by the true vectors."""


class SearchIndexError(UserError):
    """An index, the ``file``, cannot be used this way."""


class ConditionError(SearchIndexError):
    """A condition cannot be used; the error does not name the index, which is elsewhere for a server's clients."""


class Snapshot:
    """One version of a table, searched exactly in one pass; if `cached`, its vectors stay in memory."""

    def __init__(self, table: "Table", version: int, *, cached: bool):
        self.table, self.version, self._cached = table, version, cached
        self._all: tuple[np.ndarray, np.ndarray | torch.Tensor] | None = None

    def search(
        self, query_QD: np.ndarray, k: int, where: str | None, columns: Sequence[str]
    ) -> list[list[Hit]]:
        """The k nearest rows of each query that meet a condition."""
        nothing = np.empty(0, np.uint64), np.empty(0, np.float32)
        best = [nothing] * len(query_QD)
        for id_N, vectors, mask_N in self._blocks(where):
            if isinstance(vectors, np.ndarray):
                score_QN = query_QD @ vectors.T
                if mask_N is not None:
                    id_N, score_QN = id_N[mask_N], score_QN[:, mask_N]
                found = [(id_N, score_N) for score_N in score_QN]
            else:
                near = within(query_QD, vectors, mask_N, k, ROUNDING)
                found = [(id_N[row_K], score_K) for row_K, score_K in near]
            best = [
                _best(np.append(ids, new_ids), np.append(scores, new_scores), k)
                for (ids, scores), (new_ids, new_scores) in zip(best, found, strict=True)
            ]
        all_ids = np.unique(np.concatenate([ids for ids, _ in [nothing, *best]]))
        if not len(all_ids):
            return [[] for _ in query_QD]
        table = self.table.take_row_ids(all_ids.tolist()).select([*columns, "vector"]).to_arrow()
        return [
            hits_of(table.take(np.searchsorted(all_ids, ids)), query_D, k)
            for query_D, (ids, _) in zip(query_QD, best, strict=True)
        ]

    def _blocks(
        self, where: str | None
    ) -> "Iterator[tuple[np.ndarray, np.ndarray | torch.Tensor, np.ndarray | None]]":
        """Row ids (N,), vectors (N, D), and which of them meet the condition (N,), None: all.

        What is cached lies on the GPU, if there is one, and is one block there.
        """
        if not self._cached:
            yield from ((*block, None) for block in self._read(where))
            return
        if self._all is None:
            self._all = self._read_all()
            if (device := search_device()) is not None:
                import torch

                self._all = self._all[0], torch.from_numpy(self._all[1]).to(device)
        id_N, vector_ND = self._all
        is_here = isinstance(vector_ND, np.ndarray)
        size = BLOCK_ROWS if is_here else max(1, len(id_N))
        slices = [slice(at, at + size) for at in range(0, len(id_N), size)]
        if where is None:
            yield from ((id_N[part], vector_ND[part], None) for part in slices)
            return
        query = self.table.search().where(where).select(["_rowid"]).limit(None)
        batches = [batch["_rowid"].to_numpy() for batch in query.to_batches(SELECTED_ROWS)]
        wanted = _places(id_N, np.concatenate([id_N[:0], *batches]))
        if is_here and len(wanted) < SPARSE * len(id_N):  # copies of so few cost less than products with all
            for at in range(0, len(wanted), BLOCK_ROWS):
                part_N = wanted[at : at + BLOCK_ROWS]
                yield id_N[part_N], vector_ND[part_N], None
            return
        mask_N = np.zeros(len(id_N), bool)
        mask_N[wanted] = True
        yield from ((id_N[part], vector_ND[part], mask_N[part]) for part in slices)

    def _read_all(self) -> Block:
        """All vectors, and no more memory than they take."""
        blocks, rows = self._read(None), self.table.count_rows()
        id_N, vector_ND, end = np.empty(rows, np.uint64), np.empty((rows, 0), np.float32), 0
        for some_N, some_ND in blocks:
            if not end:
                vector_ND = np.empty((rows, some_ND.shape[1]), np.float32)
            id_N[end : end + len(some_N)], vector_ND[end : end + len(some_N)] = some_N, some_ND
            end += len(some_N)
        assert end == rows, (end, rows)
        return id_N, vector_ND

    def _read(self, where: str | None) -> Iterator[Block]:
        query = self.table.search().select(["vector"]).with_row_id(True).limit(None)
        for batch in (query if where is None else query.where(where)).to_batches(BLOCK_ROWS):
            rows = pa.Table.from_batches([batch])
            if len(rows):
                yield rows["_rowid"].to_numpy(), matrix(rows)


def _places(id_N: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Where some of the ids are, ascending."""
    # Fragments that were merged have the newest ids, wherever they are.
    order_N = None if (id_N[1:] > id_N[:-1]).all() else np.argsort(id_N)
    places = np.searchsorted(id_N, np.sort(some), sorter=order_N)
    return places if order_N is None else np.sort(order_N[places])


def _best(id_N: np.ndarray, score_N: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows and all ties of the last."""
    if len(id_N) <= k:
        return id_N, score_N
    mask_N = score_N >= np.partition(score_N, -k)[-k] - ROUNDING
    return id_N[mask_N], score_N[mask_N]


class Digests:
    """Contents that an index holds (looked up unless `index` is None) and others, by digest."""

    def __init__(self, index: "Index | None", others: Iterable[str] = ()):
        self._index, self._others = index, set(others)

    def __contains__(self, digest: object) -> bool:
        if digest in self._others:
            return True
        return self._index is not None and bool(
            self._index._select(["digest"], f"digest = {_quoted(str(digest))}", limit=1)
        )

    def copy(self) -> "Digests":
        """The same contents, to which others can be added."""
        return Digests(self._index, self._others)

    def update(self, digests: Iterable[str]) -> None:
        """Add others."""
        self._others.update(digests)


class Index:
    """A table of `Row`. Readers need no lock; writers on one machine lock each other out (`writing`)."""

    def __init__(self, uri: str, connection: "DBConnection", table: "Table", about: dict[str, Any]):
        self.uri, self._connection, self._table, self.about = uri, connection, table, about
        self._latest: Snapshot | None = None

    @classmethod
    def open(cls, uri: str | Path) -> "Index":
        """Open an index, a folder or an address that LanceDB supports; `SearchIndexError` if there is none."""
        uri = str(uri)
        if (opened := _table(uri)) is None:
            raise SearchIndexError(
                f"there is no index: make one with `rge index FOLDER out={uri} checkpoint=...`",
                uri,
                kind="missing",
            )
        about = _about(uri, opened[1])
        if about["format"] != FORMAT:
            raise SearchIndexError(
                f"it has format {about['format']}, this version reads format {FORMAT}: make the index anew",
                uri,
                kind="format",
            )
        return cls(uri, *opened, about)

    @staticmethod
    def exists(uri: str | Path) -> bool:
        """Whether an index exists; an attempt that was killed before its first commit does not count."""
        return _table(str(uri)) is not None

    @classmethod
    def create(
        cls,
        uri: str | Path,
        *,
        checkpoint: str,
        checkpoint_hash: str,
        dimensions: int,
        captions: str = "show",
        task: str | None = None,
    ) -> "Index":
        """Create an empty index, in place of an attempt that was killed.

        `captions` says whether pictures are embedded with their texts (``embed``) or without (``show``), and `task` with the
        prompts of which training task.
        """
        uri = str(uri)
        about = {
            "format": FORMAT,
            "checkpoint": checkpoint,
            "checkpoint_hash": checkpoint_hash,
            "dimensions": dimensions,
            "captions": captions,
            "task": task,
        }
        if cls.exists(uri):
            raise SearchIndexError("there is an index already", uri, kind="exists")
        with _lancedb_errors(uri):
            connection = _connect(uri)
            table = connection.create_table(TABLE, schema=new_schema(about), mode="overwrite")
            return cls(uri, connection, table, about)

    def check(self, checkpoint: str | Path, checkpoint_hash: str) -> None:
        """Refuse a checkpoint other than the one that made the index, whose vectors mean nothing to it."""
        if self.about["checkpoint_hash"] != checkpoint_hash:
            made_by = f"{self.about['checkpoint']} ({self.about['checkpoint_hash'][:12]})"
            raise SearchIndexError(
                f"it was made by another checkpoint: {made_by}, not {checkpoint} ({checkpoint_hash[:12]}); use that one, or index "
                "into another folder",
                self.uri,
                key="checkpoint",
            )

    def check_made_with(self, **wanted: Any) -> None:
        """Refuse settings (``captions``, ``dimensions``, ``task``) other than those of the index; None: as they are."""
        for key, value in wanted.items():
            if value not in (None, stored := self.about[key]):
                made = f"without {key}" if stored is None else f"with {key}={stored}"
                raise SearchIndexError(
                    f"it was made {made}, not {value}: leave it out, or make another index", self.uri, key=key
                )

    def embedder(self, checkpoint: str | None = None, base: str | None = None) -> "Embedder":
        """Load the checkpoint that made the index, see `check`, with the prompts of the index's task.

        `checkpoint` is its new location if it was moved.
        """
        from rge.embedder import Embedder

        location = checkpoint or self.about["checkpoint"]
        try:
            embedder = Embedder.from_pretrained(location, base=base)
        except CheckpointError as error:
            if checkpoint is not None:
                raise
            error.reason += (
                f"; {self.uri} was made by it: if it was moved, give its new location with checkpoint="
            )
            error.about("checkpoint")
            raise
        self.check(location, embedder.checkpoint_hash)
        return embedder.for_task(self.about["task"])

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.count_rows())

    def sources(self) -> dict[str, int]:
        """Number of rows by source."""
        counts = pc.value_counts(self._select(["source"])["source"])
        return {row["values"]: row["counts"] for row in sorted(counts.to_pylist(), key=itemgetter("values"))}

    def known(self, source: str) -> dict[str, tuple[str, str]]:
        """Stamp and digest of every row of a source, by id."""
        rows = self._select(["id", "stamp", "digest"], f"source = {_quoted(source)}")
        ids, *stamps = (rows[name].to_pylist() for name in ("id", "stamp", "digest"))
        return dict(zip(ids, zip(*stamps, strict=True), strict=True))

    @property
    def columns(self) -> dict[str, str]:
        """Columns that `where` may name, and their types."""
        return {field.name: str(field.type) for field in self._table.schema if field.name not in PRIVATE}

    # ------------------------------------------------------------------------------------------------------- writing

    def declare(self, metadata: Iterable[dict[str, Any]]) -> None:
        """Add a filter column for every metadata key whose values are numbers, texts or booleans.

        Needs the metadata of all rows to come, so that a column's type fits all of them.
        """
        schema, fields = self._table.schema, metadata_fields(metadata)
        types = {field.name.lower(): field.type for field in schema}
        spellings = Counter(field.name.lower() for field in fields)
        new = [
            field
            for field in fields
            if field.name not in schema.names
            # A condition finds `Year` as `year` unless there is a column of that name too, then without the other's values.
            and (not _holds(types, field) or spellings[field.name.lower()] > 1)
        ]
        if new:
            with _lancedb_errors(self.uri):
                self._table.add_columns(new)

    def put(self, rows: Sequence[Row], *, new: bool = False) -> int:
        """Add rows, or replace those with the same source and id, in one commit; see `put_all`."""
        return self.put_all([rows], new=new)

    def put_all(self, batches: Iterable[Sequence[Row]], *, new: bool = False) -> int:
        """As `put` for rows that come batch by batch, in one commit; of which few are in memory.

        With `new`, the caller knows that none is in the index, and no row is looked for. Returns the number of metadata values that
        do not fit the type of their column, and which `where` ignores.

        Raises:
            ValueError: a vector has another size, or is not finite; then nothing is written.
        """
        schema, unfit, fault = self._table.schema.remove_metadata(), 0, None

        def tables() -> Iterator[pa.Table]:
            nonlocal unfit, fault
            try:
                for rows in filter(None, batches):
                    table, more = as_table(rows, self._vectors(rows), schema)
                    unfit += more
                    yield table
            except Exception as error:
                fault = error  # LanceDB tells it in its own words only
                raise

        found = tables()
        if (first := next(found, None)) is None:
            return 0
        flat = (batch for table in chain([first], found) for batch in table.to_batches())
        reader = pa.RecordBatchReader.from_batches(schema, flat)
        try:
            with _lancedb_errors(self.uri):
                # Elsewhere than in a folder, no lock keeps another writer from adding the same.
                if new and _folder(self.uri) is not None:
                    self._table.add(reader)
                else:
                    merge = self._table.merge_insert("key")
                    merge.when_matched_update_all().when_not_matched_insert_all().execute(reader)
        except SearchIndexError:
            if fault is None:
                raise
            raise fault from None
        return unfit

    def _vectors(self, rows: Sequence[Row]) -> np.ndarray:
        """The rows' vectors, (N, D) float32."""
        wanted = self.about["dimensions"]
        if sizes := {len(row.vector) for row in rows} - {wanted}:
            raise ValueError(f"{self.uri} holds vectors of {wanted}, got {min(sizes)}")
        vector_ND = np.stack([row.vector for row in rows], dtype=np.float32)
        if not np.isfinite(vector_ND).all():
            raise ValueError("a vector is not finite")
        return vector_ND

    def digests(self, num_asked: int) -> "Digests":
        """Digests of all embedded contents; those of few are looked up one by one, for more all are read."""
        if num_asked * LOOKUP_ROWS <= len(self) and self._indices("digest"):
            return Digests(self)
        return Digests(None, self._select(["digest"])["digest"].to_pylist())

    def vectors_of(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Vectors (D,) of contents by digest, from any row."""
        vectors: dict[str, np.ndarray] = {}
        for condition in _one_of("digest", digests):
            rows = self._select(["digest", "vector"], condition)
            vectors |= zip(rows["digest"].to_pylist(), matrix(rows), strict=True)
        return vectors

    def remove(self, source: str, ids: Iterable[str] | None = None) -> None:
        """Delete rows of a source; None: all of them."""
        with _lancedb_errors(self.uri):
            if ids is None:
                self._table.delete(f"source = {_quoted(source)}")
                return
            for condition in _one_of("key", (row_key(source, id) for id in ids)):
                self._table.delete(condition)

    def refresh(self, ann_from: int) -> float | None:
        """After writing: the upkeep of files and indices, if enough has changed since the last; until then searches read both.

        It merges small files, deletes old versions, and brings the indices of words, of keys and of columns for conditions up to
        date. With at least `ann_from` rows there is an approximate index (ANN) of the vectors, with fewer there is none.

        Returns the share of the exact `DEPTH` nearest neighbours that it found when it was last brought up to date; None without.
        """
        with _lancedb_errors(self.uri):
            kept, num_rows, ann = self._upkeep(), len(self), self._indices("vector")
            if not self._is_aged(kept, num_rows) and bool(ann) == (num_rows >= ann_from):
                return kept["recall"]
            self._table.optimize(cleanup_older_than=VERSION_AGE)
            self._index_columns(num_rows)
            trained, recall = kept.get("trained", 0), None
            if num_rows < ann_from:
                for name in ann:
                    self._table.drop_index(name)
            else:
                if not ann or num_rows >= GROWTH * trained:
                    self._train()
                    trained = num_rows
                recall = self._recall()
            kept = {"version": self._table.version + 1, "trained": trained, "recall": recall}
            self._table.update_field_metadata({"path": "vector", "metadata": {UPKEEP: json.dumps(kept)}})
            return recall

    def _upkeep(self) -> dict[str, Any]:
        """What is known of the last upkeep: ``version``, rows that the ANN index was ``trained`` on, its ``recall``; else nothing."""
        metadata = self._table.schema.field("vector").metadata or {}
        kept: dict[str, Any] = json.loads(metadata.get(UPKEEP.encode(), b"{}"))
        return kept

    def _is_aged(self, kept: Mapping[str, Any], num_rows: int) -> bool:
        """Whether an upkeep is due, by numbers that the table keeps."""
        if not kept or self._table.version - kept["version"] > FEW_COMMITS:
            return True
        stats: Any = self._table.stats()  # a dictionary, whatever its annotation says
        files = stats["fragment_stats"]
        num_deleted = files["lengths"]["mean"] * files["num_fragments"] - num_rows
        words = self._table.index_stats(self._indices("words")[0])
        num_new = words.num_unindexed_rows if words is not None else num_rows
        return num_new > FEW_NEW * num_rows or num_deleted > FEW_DELETED * num_rows

    def _index_columns(self, num_rows: int) -> None:
        """Make what is missing of the indices of words, keys, digests and columns for conditions."""
        from lancedb.index import FTS, BTree

        if not self._indices("words"):
            self._table.create_index("words", config=FTS(max_token_length=MAX_WORD))
        if num_rows < INDEXED_FROM:
            return
        for name in (
            "key",
            "digest",
            *[name for name in self.columns if name not in ("id", "text")][:FILTERED],
        ):
            if not self._indices(name):
                self._table.create_index(name, config=BTree())

    def _train(self) -> None:
        """Make the ANN index, in place of one that there may be."""
        from lancedb.index import IvfFlat, IvfRq

        # Four bits per component find candidates, which the true vectors rank (docs/search.md says what that misses).
        # Few components are too few bits, and bits are packed into bytes.
        size = self.about["dimensions"]
        packs = size >= 256 and size % 8 == 0
        config = IvfRq(distance_type="dot", num_bits=4) if packs else IvfFlat(distance_type="dot")
        self._table.create_index("vector", config=config)

    # ------------------------------------------------------------------------------------------------------ searching

    def search(
        self,
        query_ND: np.ndarray,
        k: int,
        *,
        where: str | None = None,
        words: Sequence[str] | None = None,
        exact: bool = False,
        thumbnails: bool = False,
    ) -> list[list[Hit]]:
        """The k nearest rows of each query (N, D), unit norm, best first; ties are ordered by source and id.

        Args:
            query_ND: of the index's checkpoint.
            k: hits per query; fewer if there are fewer rows.
            where: condition in SQL on `columns`, such as ``year > 2023 and album = 'Rome'``, applied before the search.
            words: N texts whose words are also searched in captions, names and metadata. The two rankings are fused by rank, so
                hits are not ordered by score then.
            exact: bypass the ANN index, if there is one.
            thumbnails: return them too.

        Raises:
            ValueError: queries of another size, or k below one.
            SearchIndexError: the index cannot be read; as `ConditionError`, `where` is not a valid condition on it.
        """
        query_ND = np.ascontiguousarray(query_ND, dtype=np.float32)
        if query_ND.ndim != 2 or query_ND.shape[1] != self.about["dimensions"]:
            raise ValueError(
                f"{self.uri} is searched with queries (N, {self.about['dimensions']}), got {query_ND.shape}"
            )
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}")
        columns = [name for name in HIT_COLUMNS if thumbnails or name != "thumbnail"]
        find = partial(self._search, query_ND, k, where, words, exact, columns)
        with _lancedb_errors(self.uri):
            try:
                return find()
            except UserError:
                raise
            except LANCEDB_ERRORS:
                # A writer has deleted the version that was being read, or re-created the index.
                self._latest = None
                return find()

    def _search(
        self,
        query_ND: np.ndarray,
        k: int,
        where: str | None,
        words: Sequence[str] | None,
        exact: bool,
        columns: Sequence[str],
    ) -> list[list[Hit]]:
        self._table = self._connection.open_table(TABLE)
        now = _about(self.uri, self._table)
        if any(now[key] != self.about[key] for key in ("checkpoint_hash", "dimensions", "task")):
            raise SearchIndexError(
                "it was re-created since it was opened, by another checkpoint, or with other dimensions or another task"
                ": open it again",
                self.uri,
                kind="re-created",
            )
        if where is not None:
            where = self._condition(where)
        if words is not None and not self._indices("words"):
            raise SearchIndexError(
                "it has no index of words yet: run `rge index` on its source again", self.uri, key="words"
            )
        depth = k if words is None else max(k, MIN_FUSED)
        if exact or not self._indices("vector"):
            near = self._snapshot().search(query_ND, depth, where, columns)
        else:
            near = [
                hits_of(self._nearest(query_D, depth, columns, where), query_D, depth) for query_D in query_ND
            ]
        if words is None:
            return near
        return [
            self._fused(hits, query_D, text, k, where, columns)
            for hits, query_D, text in zip(near, query_ND, words, strict=True)
        ]

    def sample(self, count: int) -> list[tuple[str, str, bool]]:
        """Source and id of the first rows, and whether each has a picture."""
        rows = self._select(["source", "id", "image"], limit=count).to_pylist()
        return [(row["source"], row["id"], row["image"] is not None) for row in rows]

    def picture(self, source: str, id: str) -> tuple[str | None, bytes | None]:
        """A row's picture and its thumbnail, each None if there is none; `SearchIndexError` without such a row."""
        condition = f"key = {_quoted(row_key(source, id))}"
        rows = self._select(["image", "thumbnail"], condition, limit=1).to_pylist()
        if not rows:
            raise SearchIndexError(f"it holds no such item of {source}", self.uri, id)
        return rows[0]["image"], rows[0]["thumbnail"]

    def _select(self, columns: list[str], where: str | None = None, limit: int | None = None) -> pa.Table:
        with _lancedb_errors(self.uri):
            query = self._table.search().select(columns).limit(limit)
            query = query if where is None else query.where(where)
            return query.to_batches(SELECTED_ROWS).read_all()

    def _condition(self, where: str) -> str:
        """The condition in parentheses: without them, LanceDB ignores what follows the first expression."""
        # The line break keeps a comment at the end from swallowing the closing one.
        condition = f"({where.strip().rstrip(';')}\n)"
        fields = [field for field in self._table.schema if field.name not in PRIVATE]
        table = _empty(pa.schema(fields))
        _check_calls(where.strip())
        try:
            table.search().where(condition).limit(1).explain_plan()
        except Exception as error:  # LanceDB panics on SQL that it does not support yet
            reason, kind = _reason(error).replace("Invalid input, ", ""), "invalid"
            if "of type 'Utf8'" in reason:
                kind, texts = (
                    "text",
                    [
                        field.name
                        for field in fields
                        if field.type == pa.string() and _is_named(field.name, where)
                    ],
                )
                reason = (
                    f"it compares a text with a number, and {' and '.join(texts)} hold{'s' if len(texts) == 1 else ''} texts: write '9' instead of 9, or "
                    f"try_cast({texts[0] if texts else 'price'} as double) > 9"
                )
            raise ConditionError(
                f"{where!r} is not a valid condition: {reason}", key="where", kind=kind
            ) from error
        return condition

    def _indices(self, column: str) -> list[str]:
        return [index.name for index in self._table.list_indices() if column in index.columns]

    def _nearest(
        self, query_D: np.ndarray, k: int, columns: Sequence[str], where: str | None = None
    ) -> pa.Table:
        """The rows that the ANN index finds."""
        query: Any = self._table.search(query_D, vector_column_name="vector")
        query = query.distance_type("dot").limit(k).nprobes(NPROBES).refine_factor(REFINE)
        if where is not None:
            # The nearest cells may hold fewer than k such rows: then others are searched too.
            query = query.maximum_nprobes(0).where(where, prefilter=True)
        # Lance warns unless _distance is selected.
        return query.select([*columns, "vector", "_distance"]).to_arrow().select([*columns, "vector"])

    def _fused(
        self,
        near: Sequence[Hit],
        query_D: np.ndarray,
        words: str,
        k: int,
        where: str | None,
        columns: Sequence[str],
    ) -> list[Hit]:
        """The nearest rows and those with these words, fused by reciprocal rank; equal scores of words share a rank.

        Rows whose name was typed come first.
        """
        # For a text in quotes LanceDB would search the phrase, which the index of words does not support.
        words = composed(words.replace('"', " "))
        if not words.strip():
            return list(near[:k])
        # `self._table` follows the writers, whose versions number the rows anew.
        table = self._snapshot().table
        query: Any = table.search(words, query_type="fts", fts_columns="words").with_row_id(True)
        query = query if where is None else query.where(where, prefilter=True)
        found = query.select(["source", "id", "_score"]).limit(MAX_WORDED).to_arrow()
        found = found.sort_by([("_score", "descending")])
        top = found.slice(0, NUM_NAMED).to_pylist()
        typed = {
            (row["source"], row["id"]): (length, row["_score"])
            for row in top
            if (length := typed_name(row["id"], words))
        }
        if len(found) == MAX_WORDED:
            found = found.filter(pc.field("_score") > pc.min(found["_score"]))
        names = list(zip(found["source"].to_pylist(), found["id"].to_pylist(), strict=True))
        row_ids = dict(zip(names, found["_rowid"].to_pylist(), strict=True))
        loss_N = -found["_score"].to_numpy()
        points = Counter({(hit.source, hit.id): 1 / (FIRST_RANK + rank) for rank, hit in enumerate(near)})
        for name, rank in zip(names, np.searchsorted(np.sort(loss_N), loss_N), strict=True):
            points[name] += 1 / (FIRST_RANK + rank)

        def order(name: tuple[str, str]) -> tuple[Any, ...]:
            length, score = typed.get(
                name, (0, 0.0)
            )  # of two of one name, the one with more of the other words
            return -length, -score, -points[name], name

        best = sorted(points, key=order)[:k]
        hits = {(hit.source, hit.id): hit for hit in near}
        if further := sorted(row_ids[name] for name in best if name not in hits):
            rows = table.take_row_ids(further).select([*columns, "vector"]).to_arrow()
            hits |= {(hit.source, hit.id): hit for hit in hits_of(rows, query_D, len(rows))}
        return [hits[name] for name in best]

    def as_of_now(self) -> "Index":
        """The index of now, for `vectors_of`: later writes do not change it, but a search reads the latest version."""
        with _lancedb_errors(self.uri):
            return Index(self.uri, self._connection, self._as_of(self._table.version), self.about)

    def _as_of(self, version: int) -> "Table":
        table = self._connection.open_table(TABLE)
        table.checkout(version)
        return table

    def _snapshot(self) -> Snapshot:
        """The current version of the table; if its vectors are few, they stay in memory until it changes."""
        version, latest = self._table.version, self._latest  # which another thread's search may drop
        if latest is None or latest.version != version:
            table = self._as_of(version)
            num_bytes = 4 * self.about["dimensions"] * table.count_rows()
            latest = self._latest = Snapshot(table, version, cached=num_bytes <= CACHE_BYTES)
        return latest

    def _recall(self) -> float:
        """Measure recall with random rows as queries; the exact search for all of them is one pass over the vectors."""
        rows = len(self)
        drawn = np.random.default_rng(0).choice(rows, size=min(NUM_QUERIES, rows), replace=False).tolist()
        k = min(DEPTH + 1, rows)  # a row is its own nearest neighbour
        if k == 1:
            return 1.0
        query_QD = matrix(self._table.take_offsets(drawn).select(["vector"]).to_arrow())
        num_found = 0
        for query_D, hits in zip(
            query_QD, self._snapshot().search(query_QD, k, None, HIT_COLUMNS[:-1]), strict=True
        ):
            score_K = matrix(self._nearest(query_D, k, ["id"])) @ query_D
            # As good as the last exact hit, up to rounding: any of several equal pictures will do.
            num_found += int((score_K >= hits[-1].score - ROUNDING).sum()) - 1
        return num_found / ((k - 1) * len(drawn))


def _check_calls(where: str) -> None:
    """`ConditionError` for a condition that calls anything but `FUNCTIONS`."""
    end = 0
    while end < len(where):
        if (token := _TOKEN.match(where, end)) is None:
            raise ConditionError(
                f"{where!r} cannot be read from {where[end : end + 20]!r} on", key="where", kind="unreadable"
            )
        name = token[1] and token[1].strip('"`').lower()
        if name and name not in FUNCTIONS | _NOT_CALLED:
            raise ConditionError(
                f"{where!r} calls {name}; functions are {', '.join(sorted(FUNCTIONS))}",
                key="where",
                kind="calls",
            )
        end = token.end()


def _is_named(column: str, where: str) -> bool:
    return re.search(rf"\b{re.escape(column)}\b", where, re.IGNORECASE) is not None


def writing(uri: str | Path) -> AbstractContextManager[None]:
    """Lock an index for writing, see `held`; LanceDB's commits settle conflicts in an object store."""
    folder = _folder(uri)
    return nullcontext() if folder is None else held(folder)


def _folder(uri: str | Path) -> Path | None:
    """The index's folder, None in an object store."""
    path = str(uri).removeprefix("file://")
    return None if "://" in path else Path(path)


def _holds(types: Mapping[str, pa.DataType], field: pa.Field) -> bool:
    """Whether a column (type by name in lower case) holds a field's values: pandas writes integers beside an empty cell as floats."""
    name, numbers = field.name.lower(), {pa.int64(), pa.float64()}
    known = types.get(name)
    return known == field.type or (name in EXIF and {known, field.type} <= numbers)


@lru_cache(maxsize=16)
def _empty(schema: pa.Schema) -> "Table":
    """An empty table, which shows whether a condition is valid and names none but these columns."""
    return _connect("memory://").create_table(TABLE, schema=schema)


def _connect(uri: str) -> "DBConnection":
    os.environ.setdefault("LANCEDB_LOG", "error")  # else it warns about every table that it creates
    try:
        import lancedb
    except ImportError:
        raise SearchIndexError(
            "an index needs it: pip install -e '.[search]'", key="lancedb", kind="package"
        ) from None
    # The next search sees an update by another process.
    return lancedb.connect(uri, read_consistency_interval=timedelta(0))


def _table(uri: str) -> "tuple[DBConnection, Table] | None":
    """Open the table; None if it does not exist, or its creation was killed before the first version."""
    folder = _folder(uri)
    if folder is not None and not folder.is_dir():
        if folder.exists():
            raise SearchIndexError("it is a file; an index is a folder", uri, kind="file")
        return None
    with _lancedb_errors(uri):
        connection = _connect(uri)
        if TABLE not in connection.list_tables().tables:
            return None
        if folder is not None and not any((folder / f"{TABLE}.lance" / "_versions").glob("*.manifest")):
            return None
        return connection, connection.open_table(TABLE)


def _about(uri: str, table: "Table") -> dict[str, Any]:
    """What `Index.create` wrote about the index; `SearchIndexError` if it did not make the table."""
    try:
        about: dict[str, Any] = json.loads((table.schema.metadata or {})[b"rge"])
    except (KeyError, ValueError):
        raise SearchIndexError(
            f"it holds a LanceDB table {TABLE!r} that `rge index` did not make", uri, kind="foreign"
        ) from None
    return about


@contextmanager
def _lancedb_errors(uri: str) -> Iterator[None]:
    """Turn LanceDB's errors into a `SearchIndexError`."""
    try:
        yield
    except UserError:
        raise
    except LANCEDB_ERRORS as error:
        reason = _reason(error)
        _, filters, cause = reason.partition("Error applying filter expression to batch: ")
        if filters:
            raise ConditionError(f"it fails on a row: {cause}", key="where", kind="row") from error
        raise SearchIndexError(f"it cannot be used: {reason}", uri, kind="broken") from error


LANCEDB_ERRORS = (RuntimeError, ValueError, OSError)


def _reason(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__  # a condition in it ends in a line break
    return re.sub(r", /\S+\.rs:\d+:\d+", "", reason)  # places in LanceDB's source


def _quoted(text: str) -> str:
    """A string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _one_of(column: str, values: Iterable[str]) -> Iterator[str]:
    """Conditions that a column has one of the values, with a thousand values each."""
    all_values = list(values)
    for start in range(0, len(all_values), 1000):
        yield f"{column} IN ({', '.join(map(_quoted, all_values[start : start + 1000]))})"
