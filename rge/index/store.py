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
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from rge.checkpoints.run_lock import held
from rge.common.errors import UserError
from rge.common.images import WEB, is_there

if TYPE_CHECKING:
    from lancedb.db import DBConnection
    from lancedb.query import LanceVectorQueryBuilder
    from lancedb.table import Table

    from rge.embedder import Embedder

TABLE = "items"
KEPT_FOR = timedelta(minutes=10)
"""How long a version of the table outlives its successor: longer than a search that still reads it."""
MEASURED, DEPTH, TIMED = 100, 10, 5
"""To measure the recall of an ANN index: rows used as queries, neighbours of each, exact searches timed."""
KEPT_BYTES = 512 << 20
"""Vectors of an index that stay in memory between exact searches, if all of them take no more."""
BLOCK_ROWS = 8192
FUSED = 100
"""Rows of each ranking that are fused, at least."""
MAX_WHERE = 1000
NPROBES, REFINE = 64, 10
"""Cells of the ANN index that are looked into, and how many times k of what they hold is ranked by the true vectors."""


class SearchIndexError(UserError):
    """An index cannot be used as asked; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is stored of one item.

    Attributes:
        source: absolute path of the folder or table it came from.
        id: its name there; source and id together name it. Its vector is that of its content, by `digest`.
        stamp: of `rge.index.sources.Entry`.
        digest: of `rge.index.sources.Content`.
        vector: (D,) float32, unit norm.
        text: caption or text.
        image: path of the picture, ``library.parquet#row`` or a web address.
        metadata: a table's other columns, the album (folder) of a file, and what the picture's EXIF says.
        thumbnail: a small copy of the picture, WebP.
    """

    source: str
    id: str
    stamp: str
    digest: str
    vector: np.ndarray
    text: str | None = None
    image: str | None = None
    metadata: dict[str, Any] | None = None
    thumbnail: bytes | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """What a search found; attributes as of `Row`.

    Attributes:
        score: cosine similarity, float32.
        gone: the picture is no longer where it was when it was indexed.
    """

    source: str
    id: str
    score: float
    text: str | None
    image: str | None
    metadata: dict[str, Any]
    gone: bool
    thumbnail: bytes | None = None


@dataclass(frozen=True, slots=True)
class Recall:
    """Share of the exact `DEPTH` nearest neighbours that an ANN index of `rows` finds, over `queries` of them; median times."""

    rows: int
    recall: float
    queries: int
    ann_ms: float
    exact_ms: float


class Index:
    """A table of `Row`. Readers need no lock; writers on one machine take turns (`writing`)."""

    def __init__(self, uri: str, connection: "DBConnection", table: "Table", about: dict[str, Any]):
        self.uri, self._connection, self._table, self.about = uri, connection, table, about
        self._kept: _Snapshot | None = None

    @classmethod
    def open(cls, uri: str | Path) -> "Index":
        """Open an index: a folder, or an address that LanceDB takes.

        Raises:
            SearchIndexError: there is none, or it is damaged.
        """
        uri = str(uri)
        found = _table(uri)
        if found is None:
            raise SearchIndexError(
                f"there is no index at {uri}: make one with `rge index FOLDER out={uri} checkpoint=...`"
            )
        connection, table = found
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
        """Whether there is one; what a killed maker left before its first commit is none."""
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
        """Make an empty one; what a killed maker left is replaced.

        `captions` says whether pictures are embedded with their texts (``embed``) or without (``show``).

        Raises:
            SearchIndexError: there is one already, or it cannot be written.
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
        with _in_words(uri):
            connection = _connect(uri)
            table = connection.create_table(TABLE, schema=_schema(about), mode="overwrite")
            return cls(uri, connection, table, about)

    def check(self, checkpoint: str | Path, checkpoint_hash: str) -> None:
        """Refuse a checkpoint that did not make the index: the vectors mean nothing to it.

        Raises:
            SearchIndexError: another one; names both.
        """
        if self.about["checkpoint_hash"] != checkpoint_hash:
            raise SearchIndexError(
                f"{self.uri} was made by another checkpoint: {self.about['checkpoint']} ({self.about['checkpoint_hash'][:12]}), "
                f"not {checkpoint} ({checkpoint_hash[:12]}); use that one, or index into another folder"
            )

    def embedder(self, checkpoint: str | None = None, base: str | None = None) -> "Embedder":
        """The checkpoint that made the index, from where it is now if it was moved.

        Raises:
            SearchIndexError: `checkpoint` is another one.
        """
        from rge.embedder import Embedder

        found = checkpoint or self.about["checkpoint"]
        embedder = Embedder.from_pretrained(found, base=base)
        self.check(found, embedder.checkpoint_hash)
        return embedder

    def __len__(self) -> int:
        """Rows."""
        return int(self._table.count_rows())

    def sources(self) -> dict[str, int]:
        """Rows by source."""
        return dict(sorted(Counter(self._select(["source"])["source"].to_pylist()).items()))

    def known(self, source: str) -> dict[str, tuple[str, str]]:
        """Stamp and digest of every row of a source, by id."""
        found = self._select(["id", "stamp", "digest"], f"source = {_quoted(source)}")
        columns = (found[name].to_pylist() for name in ("id", "stamp", "digest"))
        return {name: (stamp, digest) for name, stamp, digest in zip(*columns, strict=True)}

    @property
    def columns(self) -> dict[str, str]:
        """Columns that `where` may name, and their types."""
        return {field.name: str(field.type) for field in self._table.schema if field.name not in PRIVATE}

    # ------------------------------------------------------------------------------------------------------- writing

    def declare(self, metadata: Iterable[dict[str, Any]]) -> None:
        """Add a column to filter by for every metadata key whose values are numbers, texts or booleans.

        Takes the metadata of all rows to come, so that a column's type fits all of them.
        """
        found: dict[str, set[type]] = {}
        for row in metadata:
            for name, value in row.items():
                if value is not None and not isinstance(value, list | dict | tuple | bytes):
                    found.setdefault(column_name(name), set()).add(type(value))
        held = set(self._table.schema.names)
        new = [pa.field(name, _common(kinds)) for name, kinds in found.items() if name not in held]
        if new:
            with _in_words(self.uri):
                self._table.add_columns(new)

    def put(self, rows: Sequence[Row]) -> int:
        """Add rows, or replace those of the same source and id; one commit.

        Returns:
            How many values of their metadata do not fit the type of their column, and so are not seen by `where`.

        Raises:
            ValueError: a vector of another size, or one that is not finite.
            SearchIndexError: it cannot be written.
        """
        if not rows:
            return 0
        schema = self._table.schema.remove_metadata()
        metadata = [_finite(json.dumps(row.metadata or {}, default=str)) for row in rows]
        columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
        columns |= {
            "metadata": [json.dumps(one, ensure_ascii=False) if one else None for one in metadata],
            "vector": self._vector_column(rows),
            "words": [_words(row) for row in rows],
        }
        unfit = 0
        by_column = [{column_name(name): value for name, value in one.items()} for one in metadata]
        for field in schema:
            if field.name not in columns:
                given = [one.get(field.name) for one in by_column]
                columns[field.name] = fitting = [_fitting(value, field.type) for value in given]
                unfit += fitting.count(None) - given.count(None)
        table = pa.table(columns, schema=schema)
        with _in_words(self.uri):
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
        """Digests of all that is embedded here."""
        return set(self._select(["digest"])["digest"].to_pylist())

    def vectors_of(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Vectors (D,) of contents, by digest, whatever the rows are called."""
        found: dict[str, np.ndarray] = {}
        for condition in _one_of("digest", digests):
            rows = self._select(["digest", "vector"], condition)
            found |= zip(rows["digest"].to_pylist(), _matrix(rows), strict=True)
        return found

    def remove(self, source: str, ids: Iterable[str] | None = None) -> None:
        """Take rows of a source out; None: all of them."""
        with _in_words(self.uri):
            for condition in ["TRUE"] if ids is None else _one_of("id", ids):
                self._table.delete(f"source = {_quoted(source)} AND {condition}")

    def refresh(self, ann_from: int) -> Recall | None:
        """After writing: merge small files, forget old versions, index words, and keep, make or drop the ANN index.

        Returns:
            Its measured recall; None where search is exact, with fewer rows than `ann_from`.
        """
        from lancedb.index import FTS

        with _in_words(self.uri):
            self._table.optimize(cleanup_older_than=KEPT_FOR)
            if not self._indices("words"):
                self._table.create_index("words", config=FTS())
            has = self._indices("vector")
            if len(self) < ann_from:
                for name in has:
                    self._table.drop_index(name)
                return None
            if not has:
                self._make_ann()
            return self._measure()

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
        """The k nearest rows of each query, the best first; of equal scores the name decides.

        Args:
            query_ND: (N, D), unit norm, of the index's checkpoint.
            k: hits a query; fewer where there are fewer rows.
            where: condition in SQL on `columns`, such as ``year > 2023 and album = 'Rome'``; other rows are left out first.
            words: N texts, whose words are looked up in captions, names and metadata too. The two rankings are fused by
                rank, so hits are not ordered by score then.
            exact: pass an ANN index by; without one search is exact anyway.
            thumbnails: bring them along.

        Raises:
            ValueError: queries of another size, or k below one.
            SearchIndexError: the index cannot be read, or `where` is no condition on it.
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
        shown = [name for name in _SHOWN if thumbnails or name != "thumbnail"]
        with _in_words(self.uri, where):
            if words is not None:
                if not self._indices("words"):
                    raise SearchIndexError(
                        f"{self.uri} has no index of words yet: run `rge index` on its source again"
                    )
                return [
                    _hits(self._fused(query_D, text, k, where, shown, exact), query_D, k, is_ranked=True)
                    for query_D, text in zip(query_ND, words, strict=True)
                ]
            if exact or not self._indices("vector"):
                return self._exact(query_ND, k, where, shown)
            return [_hits(self._nearest(query_D, k, shown, where), query_D, k) for query_D in query_ND]

    def sample(self, count: int) -> list[tuple[str, str, bool]]:
        """Source and id of some rows, and whether each has a picture: the first ones."""
        rows = self._select(["source", "id", "image"], limit=count).to_pylist()
        return [(row["source"], row["id"], row["image"] is not None) for row in rows]

    def picture(self, source: str, id: str) -> tuple[str | None, bytes | None]:  # noqa: A002
        """A row's picture and its small copy; None where there is none.

        Raises:
            SearchIndexError: there is no such row.
        """
        chosen = f"source = {_quoted(source)} AND id = {_quoted(id)}"
        found = self._select(["image", "thumbnail"], chosen, limit=1).to_pylist()
        if not found:
            raise SearchIndexError(f"{self.uri} holds no {id!r} of {source}")
        return found[0]["image"], found[0]["thumbnail"]

    def _select(self, columns: list[str], where: str | None = None, limit: int | None = None) -> pa.Table:
        with _in_words(self.uri):
            asked = self._table.search().select(columns).limit(limit)
            return (asked if where is None else asked.where(where)).to_arrow()

    def _check(self, where: str) -> None:
        outside = re.sub(r"'(?:[^']|'')*'", "", where)
        named = {word.lower() for word in re.findall(r"\w+", outside)}
        if len(where) > MAX_WHERE or named & PRIVATE:
            raise SearchIndexError(
                f"where={where[:80]!r} must be a condition of at most {MAX_WHERE} characters on: {', '.join(self.columns)}"
            )

    def _indices(self, column: str) -> list[str]:
        return [one.name for one in self._table.list_indices() if column in one.columns]

    def _nearest(
        self,
        query_D: np.ndarray,
        k: int,
        columns: Sequence[str],
        where: str | None = None,
        exact: bool = False,
    ) -> pa.Table:
        asked = cast("LanceVectorQueryBuilder", self._table.search(query_D, vector_column_name="vector"))
        asked = asked.distance_type("dot").limit(k)
        asked = asked.bypass_vector_index() if exact else asked.nprobes(NPROBES).refine_factor(REFINE)
        if where is not None:
            asked = asked.where(where, prefilter=True)
        # Lance wants _distance named, and warns otherwise.
        return asked.select([*columns, "vector", "_distance"]).to_arrow().select([*columns, "vector"])

    def _fused(
        self, query_D: np.ndarray, words: str, k: int, where: str | None, columns: Sequence[str], exact: bool
    ) -> pa.Table:
        """The rows of both rankings, fused by reciprocal rank."""
        from lancedb.rerankers import RRFReranker

        asked: Any = self._table.search(query_type="hybrid", vector_column_name="vector", fts_columns="words")
        asked = asked.vector(query_D).text(words).distance_type("dot").rerank(RRFReranker())
        asked = asked.limit(max(k, FUSED))
        if exact:
            asked = asked.bypass_vector_index()
        if where is not None:
            asked = asked.where(where, prefilter=True)
        return asked.to_arrow().select([*columns, "vector"])

    def _exact(
        self, query_QD: np.ndarray, k: int, where: str | None, columns: Sequence[str]
    ) -> list[list[Hit]]:
        """All queries against every vector, in one pass."""
        at = self._snapshot()
        best = [_Best(k) for _ in query_QD]
        for id_N, vector_ND in at.blocks(where):
            for one, score_N in zip(best, query_QD @ vector_ND.T, strict=True):
                one.add(id_N, score_N)
        found = [one.id_N for one in best]
        if not any(map(len, found)):
            return [[] for _ in query_QD]
        chosen = np.unique(np.concatenate(found))
        table = at.table.take_row_ids(chosen.tolist()).select([*columns, "vector"]).to_arrow()
        return [
            _hits(table.take(np.searchsorted(chosen, id_N)), query_D, k)
            for query_D, id_N in zip(query_QD, found, strict=True)
        ]

    def _snapshot(self) -> "_Snapshot":
        """The table as it is now; its vectors stay in memory until it changes, if they are few."""
        version = self._table.version
        if self._kept is None or self._kept.version != version:
            table = self._connection.open_table(TABLE)
            table.checkout(version)
            self._kept = _Snapshot(
                table, version, 4 * self.about["dimensions"] * table.count_rows() <= KEPT_BYTES
            )
        return self._kept

    def _make_ann(self) -> None:
        from lancedb.index import IvfFlat, IvfRq

        # Four bits a component find candidates, the true vectors rank them (docs/search.md says what that misses). Few
        # components are too few bits, and bits are packed into bytes.
        size = self.about["dimensions"]
        packs = size >= 256 and size % 8 == 0
        config = IvfRq(distance_type="dot", num_bits=4) if packs else IvfFlat(distance_type="dot")
        self._table.create_index("vector", config=config)

    def _measure(self) -> Recall:
        """Ask some rows for their nearest others; an exact search of all of them is one pass over the vectors."""
        count = len(self)
        drawn = np.random.default_rng(0).choice(count, size=min(MEASURED, count), replace=False).tolist()
        best = min(DEPTH + 1, count)  # a row is its own nearest
        query_QD = _matrix(self._table.take_offsets(drawn).select(["vector"]).to_arrow())
        nearest = self._exact(query_QD, best, None, _SHOWN[:-1])
        found = 0
        times: dict[bool, list[float]] = {True: [], False: []}
        for place, (query_D, hits) in enumerate(zip(query_QD, nearest, strict=True)):
            for exact in (False, True)[: 1 if place >= TIMED else 2]:
                began = time.perf_counter()
                rows = self._nearest(query_D, best, ["id"], exact=exact)
                times[exact].append((time.perf_counter() - began) * 1000)
                if not exact:
                    # As good as the last of the exact ones, to rounding: of equal pictures any will do.
                    found += int((_matrix(rows) @ query_D >= hits[-1].score - 1e-5).sum()) - 1
        recall = found / ((best - 1) * len(drawn)) if best > 1 else 1.0
        return Recall(
            count, recall, len(drawn), float(np.median(times[False])), float(np.median(times[True]))
        )


def writing(uri: str | Path) -> AbstractContextManager[None]:
    """Keep other writers of an index out while inside; those of an object store meet in LanceDB's commits.

    Raises:
        rge.checkpoints.run_lock.InUseError: another process of this machine, or of one that shares the folder, writes.
    """
    folder = _folder(uri)
    return nullcontext() if folder is None else held(folder)


def _folder(uri: str | Path) -> Path | None:
    """The index's folder, None in an object store."""
    path = str(uri).removeprefix("file://")
    return None if "://" in path else Path(path)


def _connect(uri: str) -> "DBConnection":
    os.environ.setdefault("LANCEDB_LOG", "error")  # else it warns of every table that it makes
    try:
        import lancedb
    except ImportError:
        raise SearchIndexError(
            "an index needs LanceDB, which is not installed: pip install -e '.[search]'"
        ) from None
    # An update of another process is seen by the next search.
    return lancedb.connect(uri, read_consistency_interval=timedelta(0))


def _table(uri: str) -> "tuple[DBConnection, Table] | None":
    """The table, or None where there is none, or its maker was killed before the first version."""
    folder = _folder(uri)
    if folder is not None and not folder.is_dir():
        if folder.exists():
            raise SearchIndexError(f"{uri} is a file; an index is a folder")
        return None
    with _in_words(uri):
        connection = _connect(uri)
        if TABLE not in connection.list_tables().tables:
            return None
        if folder is not None and not any((folder / f"{TABLE}.lance" / "_versions").glob("*.manifest")):
            return None
        return connection, connection.open_table(TABLE)


@contextmanager
def _in_words(uri: str, where: str | None = None) -> Iterator[None]:
    """Turn LanceDB's errors into a `SearchIndexError`."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if where is not None and any(
            word in reason for word in ("predicate", "Schema error", "SQL", "type_coercion")
        ):
            hidden = "|".join(f"`{name}`" for name in sorted(PRIVATE))
            reason = re.sub(rf"(, )?({hidden})", "", reason).replace("Invalid input, ", "")
            raise SearchIndexError(f"where={where!r} is not a valid condition on {uri}: {reason}") from error
        raise SearchIndexError(f"the index {uri} cannot be used: {reason}") from error


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
"""Columns that `where` may not name: searches must not reveal where files are on this machine."""
_EXIF = {
    "taken": pa.string(), "year": pa.int64(), "month": pa.int64(), "latitude": pa.float64(), "longitude": pa.float64(),
    "album": pa.string(),
}  # fmt: skip
_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_SHOWN = ("source", "id", "text", "image", "metadata", "thumbnail")


def column_name(name: str) -> str:
    """The column that holds a key of the metadata: a word that a condition can name without quotes."""
    plain = re.sub(r"\W", "_", name)
    return (
        f"{plain}_" if plain.lower() in PRIVATE | {"id", "text"} or not plain or plain[0].isdigit() else plain
    )


def _common(kinds: set[type]) -> pa.DataType:
    """The type of a column that holds values of these types."""
    if kinds == {int, float}:
        return pa.float64()
    return _ARROW.get(kinds.pop(), pa.string()) if len(kinds) == 1 else pa.string()


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """A value of the metadata for its column, None where it does not fit."""
    if value is None or isinstance(value, list | dict):
        return None
    if kind == pa.string():
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) or isinstance(value, bool) != (kind == pa.bool_()):
        return None
    if kind in (pa.bool_(), pa.float64()):
        return value if kind == pa.bool_() else float(value)
    return int(value) if value == int(value) and abs(value) < 1 << 63 else None


def _words(row: Row) -> str:
    """What a search by words looks at."""
    said = [row.text or "", re.sub(r"[\W_]+", " ", row.id)]
    return " ".join(
        [*said, *(str(value) for value in (row.metadata or {}).values() if isinstance(value, str))]
    )


Block = tuple[np.ndarray, np.ndarray]
"""Row ids (N,) and vectors (N, D)."""


class _Snapshot:
    """One version of a table, and its vectors, where they may stay in memory."""

    def __init__(self, table: "Table", version: int, keeps: bool):
        self.table, self.version, self._keeps = table, version, keeps
        self._held: list[Block] | None = None

    def blocks(self, where: str | None) -> Iterable[Block]:
        """The rows that fulfil a condition."""
        if self._keeps and self._held is None:
            self._held = list(self._read(None))
        if self._held is None:
            return self._read(where)
        if where is None:
            return self._held
        asked = self.table.search().where(where).select(["id"]).with_row_id(True).limit(None)
        wanted = asked.to_arrow()["_rowid"].to_numpy()
        masks = (np.isin(id_N, wanted) for id_N, _ in self._held)
        return [(id_N[is_in], some[is_in]) for (id_N, some), is_in in zip(self._held, masks, strict=True)]

    def _read(self, where: str | None) -> Iterator[Block]:
        asked = self.table.search().select(["vector"]).with_row_id(True).limit(None)
        for batch in (asked if where is None else asked.where(where)).to_batches(BLOCK_ROWS):
            rows = pa.Table.from_batches([batch])
            if len(rows):
                yield rows["_rowid"].to_numpy(), _matrix(rows)


class _Best:
    """The k best rows of one query so far, and all that tie with the last of them."""

    def __init__(self, k: int):
        self._k, self.id_N, self._score_N = k, np.empty(0, np.uint64), np.empty(0, np.float32)

    def add(self, id_N: np.ndarray, score_N: np.ndarray) -> None:
        self.id_N, self._score_N = np.append(self.id_N, id_N), np.append(self._score_N, score_N)
        if len(self.id_N) > self._k:
            # One product rounds equal vectors differently from place to place, by less than this.
            good = self._score_N >= np.partition(self._score_N, -self._k)[-self._k] - 1e-5
            self.id_N, self._score_N = self.id_N[good], self._score_N[good]


def _schema(about: dict[str, Any]) -> pa.Schema:
    fields = [pa.field(name, kind) for name, kind in {**_COLUMNS, **_EXIF, "words": pa.string()}.items()]
    fields.append(pa.field("vector", pa.list_(pa.float32(), about["dimensions"])))
    return pa.schema(fields, metadata={"rge": json.dumps(about)})


def _matrix(rows: pa.Table) -> np.ndarray:
    """The column of vectors, (N, D)."""
    column = rows["vector"].combine_chunks()
    return (
        column.flatten().to_numpy().reshape(len(column), -1) if len(column) else np.empty((0, 0), np.float32)
    )


def _hits(rows: pa.Table, query_D: np.ndarray, k: int, is_ranked: bool = False) -> list[Hit]:
    """Rows as hits. Lance's distance is rounded differently by each kernel: scores are of the stored vectors."""
    scores = [float(query_D @ vector_D) for vector_D in _matrix(rows)]
    found = list(zip(scores, rows.drop_columns(["vector"]).to_pylist(), strict=True))
    if not is_ranked:
        found.sort(key=lambda one: (-one[0], one[1]["source"], one[1]["id"]))
    return [_hit(score, row) for score, row in found[:k]]


def _hit(score: float, row: dict[str, Any]) -> Hit:
    image = row["image"]
    gone = bool(image) and not image.startswith(WEB) and not is_there(image)
    metadata = _finite(row["metadata"]) if row["metadata"] else {}
    return Hit(row["source"], row["id"], score, row["text"], image, metadata, gone, row.get("thumbnail"))


def _finite(text: str) -> dict[str, Any]:
    """An object of JSON. Python writes NaN and infinities into it, and nothing else reads them: they are None."""
    found: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return found


def _quoted(text: str) -> str:
    """A text inside a filter."""
    return "'" + text.replace("'", "''") + "'"


def _one_of(column: str, values: Iterable[str]) -> Iterator[str]:
    """Conditions that a column is one of the values, a thousand of them each."""
    left = list(values)
    for start in range(0, len(left), 1000):
        yield f"{column} IN ({', '.join(map(_quoted, left[start : start + 1000]))})"
