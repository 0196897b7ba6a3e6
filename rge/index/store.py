"""An index: vectors and their provenance in a LanceDB table, in a folder or an object store.

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
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rge.checkpoints.run_lock import held
from rge.common.errors import UserError
from rge.common.images import WEB, is_there
from rge.index.sources import Content, Entry, Source

if TYPE_CHECKING:
    from lancedb.db import DBConnection
    from lancedb.table import Table

    from rge.embedder import Embedder

TABLE = "items"
VERSION_AGE = timedelta(minutes=10)
"""Old versions of the table are deleted after this time, since a search may still read them."""
NUM_QUERIES, DEPTH = 100, 10
"""To measure the recall of an ANN index: rows used as queries at most, and neighbours per query."""
CACHE_BYTES = 512 << 20
"""Vectors of an index stay in memory between exact searches if all of them take no more."""
BLOCK_ROWS = 8192
MIN_FUSED = 100
"""Rows of each ranking that are fused, at least."""
MAX_WHERE = 1000
NPROBES, REFINE = 64, 10
"""Cells of the ANN index that are searched, and how many times k of their rows are reranked by the true vectors."""


class SearchIndexError(UserError):
    """An index cannot be used this way; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Row:
    """One item."""

    source: str  # absolute path of the folder or table it came from
    id: str  # unique within the source
    stamp: str  # of `rge.index.sources.Entry`
    digest: str  # of `rge.index.sources.Content`, to which the vector belongs
    vector: np.ndarray  # (D,) float32, unit norm
    text: str | None = None  # caption or text
    image: str | None = None  # path of the picture, ``library.parquet#row`` or a web address
    # A table's other columns, a file's album (folder), and facts from the picture's EXIF.
    metadata: dict[str, Any] | None = None
    thumbnail: bytes | None = None  # WebP

    @classmethod
    def of(cls, source: Source, entry: Entry, content: Content, vector: np.ndarray) -> "Row":
        """The row of an entry that has been read and embedded."""
        metadata = content.facts | entry.metadata
        names = source.name, entry.id, entry.stamp, content.digest
        return cls(*names, vector, content.text, entry.image, metadata, content.thumbnail)


@dataclass(frozen=True, slots=True)
class Hit:
    """One search result; see `Row`."""

    source: str
    id: str
    score: float  # cosine similarity, float32
    text: str | None
    image: str | None
    metadata: dict[str, Any]
    gone: bool  # the picture is no longer where it was when it was indexed
    thumbnail: bytes | None = None


class Index:
    """A table of `Row`. Readers need no lock; writers on one machine lock each other out (`writing`)."""

    def __init__(self, uri: str, connection: "DBConnection", table: "Table", about: dict[str, Any]):
        self.uri, self._connection, self._table, self.about = uri, connection, table, about
        self._latest: _Snapshot | None = None

    @classmethod
    def open(cls, uri: str | Path) -> "Index":
        """Open an index, a folder or an address that LanceDB supports; `SearchIndexError` if there is none."""
        uri = str(uri)
        if (opened := _table(uri)) is None:
            raise SearchIndexError(
                f"there is no index at {uri}: make one with `rge index FOLDER out={uri} checkpoint=...`"
            )
        connection, table = opened
        try:
            about = json.loads((table.schema.metadata or {})[b"rge"])
        except (KeyError, ValueError):
            raise SearchIndexError(
                f"{uri} holds a LanceDB table {TABLE!r} that `rge index` did not make"
            ) from None
        if about["format"] != 1:
            raise SearchIndexError(f"{uri} has format {about['format']}, this version reads format 1")
        return cls(uri, connection, table, about)

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
    ) -> "Index":
        """Create an empty index, in place of an attempt that was killed.

        `captions` says whether pictures are embedded with their texts (``embed``) or without (``show``).
        """
        uri = str(uri)
        about = {
            "format": 1,
            "checkpoint": checkpoint,
            "checkpoint_hash": checkpoint_hash,
            "dimensions": dimensions,
            "captions": captions,
        }
        if cls.exists(uri):
            raise SearchIndexError(f"there is an index at {uri} already")
        with _lancedb_errors(uri):
            connection = _connect(uri)
            table = connection.create_table(TABLE, schema=_schema(about), mode="overwrite")
            return cls(uri, connection, table, about)

    def check(self, checkpoint: str | Path, checkpoint_hash: str) -> None:
        """Refuse a checkpoint other than the one that made the index, whose vectors mean nothing to it."""
        if self.about["checkpoint_hash"] != checkpoint_hash:
            raise SearchIndexError(
                f"{self.uri} was made by another checkpoint: {self.about['checkpoint']} ({self.about['checkpoint_hash'][:12]}), "
                f"not {checkpoint} ({checkpoint_hash[:12]}); use that one, or index into another folder"
            )

    def embedder(self, checkpoint: str | None = None, base: str | None = None) -> "Embedder":
        """Load the checkpoint that made the index, see `check`; `checkpoint` is its new location if it was moved."""
        from rge.embedder import Embedder

        location = checkpoint or self.about["checkpoint"]
        embedder = Embedder.from_pretrained(location, base=base)
        self.check(location, embedder.checkpoint_hash)
        return embedder

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.count_rows())

    def sources(self) -> dict[str, int]:
        """Number of rows by source."""
        return dict(sorted(Counter(self._select(["source"])["source"].to_pylist()).items()))

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
        types: dict[str, set[type]] = {}
        for row in metadata:
            for name, value in row.items():
                if value is not None and not isinstance(value, list | dict | tuple | bytes):
                    types.setdefault(column_name(name), set()).add(type(value))
        existing = set(self._table.schema.names)
        new = [pa.field(name, _common(kinds)) for name, kinds in types.items() if name not in existing]
        if new:
            with _lancedb_errors(self.uri):
                self._table.add_columns(new)

    def put(self, rows: Sequence[Row]) -> int:
        """Add rows, or replace those with the same source and id, in one commit.

        Returns:
            The number of metadata values that do not fit the type of their column, and which `where` ignores.

        Raises:
            ValueError: a vector of another size, or one that is not finite.
            SearchIndexError: the index cannot be written.
        """
        if not rows:
            return 0
        schema = self._table.schema.remove_metadata()
        metadata = [_finite(json.dumps(row.metadata or {}, default=_other)) for row in rows]
        columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
        columns |= {
            "metadata": [json.dumps(row, ensure_ascii=False) if row else None for row in metadata],
            "vector": self._vector_column(rows),
            "words": [_words(row) for row in rows],
        }
        unfit = 0
        by_column = [{column_name(name): value for name, value in row.items()} for row in metadata]
        for field in schema:
            if field.name not in columns:
                values = [row.get(field.name) for row in by_column]
                columns[field.name] = fitting = [_fitting(value, field.type) for value in values]
                unfit += fitting.count(None) - values.count(None)
        table = pa.table(columns, schema=schema)
        with _lancedb_errors(self.uri):
            merge = self._table.merge_insert(["source", "id"])
            merge.when_matched_update_all().when_not_matched_insert_all().execute(table)
        return unfit

    def _vector_column(self, rows: Sequence[Row]) -> pa.FixedSizeListArray:
        vector_ND = np.stack([row.vector for row in rows]).astype(np.float32)
        if vector_ND.shape[1] != self.about["dimensions"]:
            raise ValueError(
                f"{self.uri} holds vectors of {self.about['dimensions']}, got {vector_ND.shape[1]}"
            )
        if not np.isfinite(vector_ND).all():
            raise ValueError("a vector is not finite")
        return pa.FixedSizeListArray.from_arrays(pa.array(vector_ND.ravel()), vector_ND.shape[1])

    def digests(self) -> set[str]:
        """Digests of all embedded contents."""
        return set(self._select(["digest"])["digest"].to_pylist())

    def vectors_of(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Vectors (D,) of contents by digest, from any row."""
        vectors: dict[str, np.ndarray] = {}
        for condition in _one_of("digest", digests):
            rows = self._select(["digest", "vector"], condition)
            vectors |= zip(rows["digest"].to_pylist(), _matrix(rows), strict=True)
        return vectors

    def remove(self, source: str, ids: Iterable[str] | None = None) -> None:
        """Delete rows of a source; None: all of them."""
        with _lancedb_errors(self.uri):
            for condition in ["TRUE"] if ids is None else _one_of("id", ids):
                self._table.delete(f"source = {_quoted(source)} AND {condition}")

    def refresh(self, ann_from: int) -> float | None:
        """After writing: merge small files, delete old versions, index words, and create, keep or drop the ANN index.

        Returns:
            The share of the exact `DEPTH` nearest neighbours that it finds; None with fewer rows than `ann_from`, where search is
            exact.
        """
        from lancedb.index import FTS, IvfFlat, IvfRq

        with _lancedb_errors(self.uri):
            self._table.optimize(cleanup_older_than=VERSION_AGE)
            if not self._indices("words"):
                self._table.create_index("words", config=FTS())
            ann = self._indices("vector")
            if len(self) < ann_from:
                for name in ann:
                    self._table.drop_index(name)
                return None
            if not ann:
                # Four bits per component find candidates, which the true vectors rank (docs/search.md says what that misses).
                # Few components are too few bits, and bits are packed into bytes.
                size = self.about["dimensions"]
                packs = size >= 256 and size % 8 == 0
                config = IvfRq(distance_type="dot", num_bits=4) if packs else IvfFlat(distance_type="dot")
                self._table.create_index("vector", config=config)
            return self._recall()

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
        """The k nearest rows of each query, best first; ties are ordered by source and id.

        Args:
            query_ND: (N, D), unit norm, of the index's checkpoint.
            k: hits per query; fewer if there are fewer rows.
            where: condition in SQL on `columns`, such as ``year > 2023 and album = 'Rome'``, applied before the search.
            words: N texts whose words are also searched in captions, names and metadata. The two rankings are fused by rank, so
                hits are not ordered by score then.
            exact: bypass the ANN index, if there is one.
            thumbnails: return them too.

        Raises:
            ValueError: queries of another size, or k below one.
            SearchIndexError: the index cannot be read, or `where` is not a valid condition on it.
        """
        query_ND = np.ascontiguousarray(query_ND, dtype=np.float32)
        if query_ND.ndim != 2 or query_ND.shape[1] != self.about["dimensions"]:
            raise ValueError(
                f"{self.uri} is searched with queries (N, {self.about['dimensions']}), got {query_ND.shape}"
            )
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}")
        if where is not None:
            self._check(where)
        columns = [name for name in _HIT_COLUMNS if thumbnails or name != "thumbnail"]
        with _lancedb_errors(self.uri):
            if words is not None:
                if not self._indices("words"):
                    raise SearchIndexError(
                        f"{self.uri} has no index of words yet: run `rge index` on its source again"
                    )
                return [
                    _hits(self._fused(query_D, text, k, where, columns, exact), query_D, k, is_ranked=True)
                    for query_D, text in zip(query_ND, words, strict=True)
                ]
            if exact or not self._indices("vector"):
                return self._exact(query_ND, k, where, columns)
            return [_hits(self._nearest(query_D, k, columns, where), query_D, k) for query_D in query_ND]

    def sample(self, count: int) -> list[tuple[str, str, bool]]:
        """Source and id of the first rows, and whether each has a picture."""
        rows = self._select(["source", "id", "image"], limit=count).to_pylist()
        return [(row["source"], row["id"], row["image"] is not None) for row in rows]

    def picture(self, source: str, id: str) -> tuple[str | None, bytes | None]:
        """A row's picture and its thumbnail, each None if there is none; `SearchIndexError` without such a row."""
        condition = f"source = {_quoted(source)} AND id = {_quoted(id)}"
        rows = self._select(["image", "thumbnail"], condition, limit=1).to_pylist()
        if not rows:
            raise SearchIndexError(f"{self.uri} holds no {id!r} of {source}")
        return rows[0]["image"], rows[0]["thumbnail"]

    def _select(self, columns: list[str], where: str | None = None, limit: int | None = None) -> pa.Table:
        with _lancedb_errors(self.uri):
            query = self._table.search().select(columns).limit(limit)
            return (query if where is None else query.where(where)).to_arrow()

    def _check(self, where: str) -> None:
        without_strings = re.sub(r"'(?:[^']|'')*'", "", where)
        words = {word.lower() for word in re.findall(r"\w+", without_strings)}
        if len(where) > MAX_WHERE or words & PRIVATE:
            raise SearchIndexError(
                f"where={where[:80]!r} must be a condition of at most {MAX_WHERE} characters on: {', '.join(self.columns)}"
            )
        with _lancedb_errors(self.uri):
            self._table.search().limit(1).explain_plan()
        try:  # nothing is read for a plan: if only this one fails, the condition is wrong
            self._table.search().where(where).limit(1).explain_plan()
        except LANCEDB_ERRORS as error:
            hidden = "|".join(f"`{name}`" for name in sorted(PRIVATE))
            reason = re.sub(rf"(, )?({hidden})", "", _reason(error)).replace("Invalid input, ", "")
            raise SearchIndexError(
                f"where={where!r} is not a valid condition on {self.uri}: {reason}"
            ) from error

    def _indices(self, column: str) -> list[str]:
        return [index.name for index in self._table.list_indices() if column in index.columns]

    def _nearest(
        self,
        query_D: np.ndarray,
        k: int,
        columns: Sequence[str],
        where: str | None = None,
        exact: bool = False,
    ) -> pa.Table:
        query: Any = self._table.search(query_D, vector_column_name="vector")
        query = query.distance_type("dot").limit(k)
        query = query.bypass_vector_index() if exact else query.nprobes(NPROBES).refine_factor(REFINE)
        if where is not None:
            query = query.where(where, prefilter=True)
        # Lance warns unless _distance is selected.
        return query.select([*columns, "vector", "_distance"]).to_arrow().select([*columns, "vector"])

    def _fused(
        self, query_D: np.ndarray, words: str, k: int, where: str | None, columns: Sequence[str], exact: bool
    ) -> pa.Table:
        """The rows of both rankings, fused by reciprocal rank."""
        from lancedb.rerankers import RRFReranker

        # For a text in quotes LanceDB would search the phrase, which the index of words does not support.
        words = _composed(words.replace('"', " "))
        if not words.strip():
            return self._nearest(query_D, k, columns, where, exact)
        query: Any = self._table.search(query_type="hybrid", vector_column_name="vector", fts_columns="words")
        query = query.vector(query_D).text(words).distance_type("dot").rerank(RRFReranker())
        query = query.limit(max(k, MIN_FUSED))
        if exact:
            query = query.bypass_vector_index()
        if where is not None:
            query = query.where(where, prefilter=True)
        return query.to_arrow().select([*columns, "vector"])

    def _exact(
        self, query_QD: np.ndarray, k: int, where: str | None, columns: Sequence[str]
    ) -> list[list[Hit]]:
        """All queries against every vector, in one pass."""
        snapshot = self._snapshot()
        best = [_Best(k) for _ in query_QD]
        for id_N, vector_ND in snapshot.blocks(where):
            for top, score_N in zip(best, query_QD @ vector_ND.T, strict=True):
                top.add(id_N, score_N)
        all_ids = np.unique(np.concatenate([np.empty(0, np.uint64), *(top.id_N for top in best)]))
        if not len(all_ids):
            return [[] for _ in query_QD]
        table = snapshot.table.take_row_ids(all_ids.tolist()).select([*columns, "vector"]).to_arrow()
        return [
            _hits(table.take(np.searchsorted(all_ids, top.id_N)), query_D, k)
            for query_D, top in zip(query_QD, best, strict=True)
        ]

    def _snapshot(self) -> "_Snapshot":
        """The current version of the table; if its vectors are few, they stay in memory until it changes."""
        version = self._table.version
        if self._latest is None or self._latest.version != version:
            table = self._connection.open_table(TABLE)
            table.checkout(version)
            num_bytes = 4 * self.about["dimensions"] * table.count_rows()
            self._latest = _Snapshot(table, version, cached=num_bytes <= CACHE_BYTES)
        return self._latest

    def _recall(self) -> float:
        """Measure recall with random rows as queries; the exact search for all of them is one pass over the vectors."""
        rows = len(self)
        drawn = np.random.default_rng(0).choice(rows, size=min(NUM_QUERIES, rows), replace=False).tolist()
        k = min(DEPTH + 1, rows)  # a row is its own nearest neighbour
        if k == 1:
            return 1.0
        query_QD = _matrix(self._table.take_offsets(drawn).select(["vector"]).to_arrow())
        num_found = 0
        for query_D, hits in zip(query_QD, self._exact(query_QD, k, None, _HIT_COLUMNS[:-1]), strict=True):
            score_K = _matrix(self._nearest(query_D, k, ["id"])) @ query_D
            # As good as the last exact hit, up to rounding: any of several equal pictures will do.
            num_found += int((score_K >= hits[-1].score - 1e-5).sum()) - 1
        return num_found / ((k - 1) * len(drawn))


def writing(uri: str | Path) -> AbstractContextManager[None]:
    """Lock an index for writing, see `held`; LanceDB's commits settle conflicts in an object store."""
    folder = _folder(uri)
    return nullcontext() if folder is None else held(folder)


def _folder(uri: str | Path) -> Path | None:
    """The index's folder, None in an object store."""
    path = str(uri).removeprefix("file://")
    return None if "://" in path else Path(path)


def _connect(uri: str) -> "DBConnection":
    os.environ.setdefault("LANCEDB_LOG", "error")  # else it warns about every table that it creates
    try:
        import lancedb
    except ImportError:
        raise SearchIndexError(
            "an index needs LanceDB, which is not installed: pip install -e '.[search]'"
        ) from None
    # The next search sees an update by another process.
    return lancedb.connect(uri, read_consistency_interval=timedelta(0))


def _table(uri: str) -> "tuple[DBConnection, Table] | None":
    """Open the table; None if it does not exist, or its creation was killed before the first version."""
    folder = _folder(uri)
    if folder is not None and not folder.is_dir():
        if folder.exists():
            raise SearchIndexError(f"{uri} is a file; an index is a folder")
        return None
    with _lancedb_errors(uri):
        connection = _connect(uri)
        if TABLE not in connection.list_tables().tables:
            return None
        if folder is not None and not any((folder / f"{TABLE}.lance" / "_versions").glob("*.manifest")):
            return None
        return connection, connection.open_table(TABLE)


@contextmanager
def _lancedb_errors(uri: str) -> Iterator[None]:
    """Turn LanceDB's errors into a `SearchIndexError`."""
    try:
        yield
    except UserError:
        raise
    except LANCEDB_ERRORS as error:
        raise SearchIndexError(f"the index {uri} cannot be used: {_reason(error)}") from error


LANCEDB_ERRORS = (RuntimeError, ValueError, OSError)


def _reason(error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r", /\S+\.rs:\d+:\d+", "", reason)  # places in LanceDB's source


_COLUMNS = {
    "source": pa.string(),
    "id": pa.string(),
    "stamp": pa.string(),
    "digest": pa.string(),
    "text": pa.string(),
    "image": pa.string(),
    "metadata": pa.string(),
    "thumbnail": pa.binary(),
}
PRIVATE = frozenset(
    {"source", "stamp", "digest", "image", "metadata", "thumbnail", "vector", "words", "_rowid", "_rowaddr"}
)
"""Columns that `where` must not use: searches must not reveal where files are on this machine."""
_EXIF = {
    "taken": pa.string(), "year": pa.int64(), "month": pa.int64(), "latitude": pa.float64(), "longitude": pa.float64(),
    "album": pa.string(),
}  # fmt: skip
_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_HIT_COLUMNS = ("source", "id", "text", "image", "metadata", "thumbnail")


def column_name(name: str) -> str:
    """The column of a metadata key: a word that needs no quotes in a condition."""
    plain = re.sub(r"\W", "_", name)
    if not plain or plain[0].isdigit():
        return f"_{plain}"
    return f"{plain}_" if plain.lower() in PRIVATE | {"id", "text"} else plain


def _common(kinds: set[type]) -> pa.DataType:
    """The type of a column with values of these types."""
    if kinds == {int, float}:
        return pa.float64()
    return _ARROW.get(kinds.pop(), pa.string()) if len(kinds) == 1 else pa.string()


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """A metadata value for its column; None if it does not fit."""
    if isinstance(value, list | dict | None):
        return None
    if kind == pa.string():
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) or isinstance(value, bool) != (kind == pa.bool_()):
        return None
    if kind in (pa.bool_(), pa.float64()):
        return value if kind == pa.bool_() else float(value)
    return int(value) if value == int(value) and abs(value) < 1 << 63 else None


def _other(value: Any) -> str | None:
    """A value that JSON has no form for; pictures in other columns are left out."""
    return None if isinstance(value, bytes) else str(value)


def _words(row: Row) -> str:
    """The text for searching by words."""
    values = [value for value in (row.metadata or {}).values() if isinstance(value, str)]
    return _composed(" ".join([row.text or "", re.sub(r"[\W_]+", " ", _composed(row.id)), *values]))


def _composed(text: str) -> str:
    """Letters with their accents as one character: macOS separates the two in file names."""
    return unicodedata.normalize("NFC", text)


Block = tuple[np.ndarray, np.ndarray]
"""Row ids (N,) and vectors (N, D)."""


class _Snapshot:
    """One version of a table; if `cached`, its vectors stay in memory."""

    def __init__(self, table: "Table", version: int, *, cached: bool):
        self.table, self.version, self._cached = table, version, cached
        self._blocks: list[Block] | None = None

    def blocks(self, where: str | None) -> Iterable[Block]:
        """The rows that meet a condition."""
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
                yield rows["_rowid"].to_numpy(), _matrix(rows)


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


def _schema(about: dict[str, Any]) -> pa.Schema:
    fields = [pa.field(name, kind) for name, kind in {**_COLUMNS, **_EXIF, "words": pa.string()}.items()]
    fields.append(pa.field("vector", pa.list_(pa.float32(), about["dimensions"])))
    return pa.schema(fields, metadata={"rge": json.dumps(about)})


def _matrix(rows: pa.Table) -> np.ndarray:
    """The vectors, (N, D)."""
    column = rows["vector"].combine_chunks()
    if not len(column):
        return np.empty((0, 0), np.float32)
    return column.flatten().to_numpy().reshape(len(column), -1)


def _hits(rows: pa.Table, query_D: np.ndarray, k: int, is_ranked: bool = False) -> list[Hit]:
    """Rows as hits, scored by the stored vectors: each of Lance's kernels rounds distances differently."""
    scores = [float(query_D @ vector_D) for vector_D in _matrix(rows)]
    scored = list(zip(scores, rows.drop_columns(["vector"]).to_pylist(), strict=True))
    if not is_ranked:
        scored.sort(key=lambda pair: (-pair[0], pair[1]["source"], pair[1]["id"]))
    return [_hit(score, row) for score, row in scored[:k]]


def _hit(score: float, row: dict[str, Any]) -> Hit:
    image = row["image"]
    gone = bool(image) and not image.startswith(WEB) and not is_there(image)
    metadata = _finite(row["metadata"]) if row["metadata"] else {}
    return Hit(row["source"], row["id"], score, row["text"], image, metadata, gone, row.get("thumbnail"))


def _finite(text: str) -> dict[str, Any]:
    """Parse a JSON object, with None for NaN and infinities, which Python writes but other programs cannot read."""
    value: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return value


def _quoted(text: str) -> str:
    """A string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _one_of(column: str, values: Iterable[str]) -> Iterator[str]:
    """Conditions that a column has one of the values, with a thousand values each."""
    all_values = list(values)
    for start in range(0, len(all_values), 1000):
        yield f"{column} IN ({', '.join(map(_quoted, all_values[start : start + 1000]))})"
