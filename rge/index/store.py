"""An index: vectors with what they were made of, in a LanceDB table, in a folder or an object store.

    with writing("gallery"):
        index = Index.create("gallery", checkpoint="demo", checkpoint_hash=embedder.checkpoint_hash, dimensions=embedder.size)
        index.put(rows)
        index.refresh(ann_from=50_000)
    hits = Index.open("gallery").search(query_ND, k=10)

Every write is one commit of Lance: whoever reads sees the table before or after it, also when the writer was killed. Search is
exact until `Index.refresh` makes an approximate index (ANN) of the vectors.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from rge.checkpoints.run_lock import InUseError, held
from rge.common.errors import UserError
from rge.common.images import is_there

if TYPE_CHECKING:
    from lancedb.db import DBConnection
    from lancedb.query import LanceVectorQueryBuilder
    from lancedb.table import Table

TABLE = "items"
KEPT_FOR = timedelta(minutes=10)
"""How long a version of the table outlives its successor: longer than a search that still reads it."""
MEASURED, DEPTH, TIMED = 100, 10, 5
"""Rows that stand for queries when the recall of an ANN index is measured, the neighbours looked at, exact searches timed."""
NPROBES, REFINE = 64, 10
"""Cells of the ANN index that are looked into, and how many times k of what they hold is ranked by the true vectors."""


class SearchIndexError(UserError):
    """An index cannot be used as asked; the message names it and the mend."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is stored of one item.

    Attributes:
        source: absolute path of the folder or table it came from.
        id: its name there; source and id together name it.
        stamp: of `rge.index.sources.Entry`.
        digest: of `rge.index.sources.Content`.
        vector: (D,) float32, unit norm.
        text: caption or text.
        image: path of the picture, ``library.parquet#row`` or a web address.
        metadata: a table's other columns.
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
    """What an ANN index finds of what there is.

    Attributes:
        rows: in the index.
        recall: share of the exact `DEPTH` nearest neighbours that it finds, over `queries` rows.
        queries: rows asked for their neighbours, themselves not counted.
        ann_ms: a search, median.
        exact_ms: the same without it.
    """

    rows: int
    recall: float
    queries: int
    ann_ms: float
    exact_ms: float


class Index:
    """A table of `Row`. Readers need no lock; writers on one machine take turns (`writing`)."""

    def __init__(self, uri: str, table: "Table", about: dict[str, Any]):
        self.uri, self._table, self.about = uri, table, about

    @classmethod
    def open(cls, uri: str | Path) -> "Index":
        """Open an index that is there.

        Args:
            uri: a folder, or an address that LanceDB takes.

        Raises:
            SearchIndexError: there is none, or it is damaged.
        """
        uri = str(uri)
        table = _table(uri)
        if table is None:
            raise SearchIndexError(
                f"there is no index at {uri}: make one with `rge index FOLDER out={uri} checkpoint=...`"
            )
        try:
            about = json.loads((table.schema.metadata or {})[b"rge"])
        except (KeyError, ValueError):
            raise SearchIndexError(
                f"{uri} holds a LanceDB table {TABLE!r} that `rge index` did not make"
            ) from None
        if about["format"] != 1:
            raise SearchIndexError(f"{uri} has format {about['format']}, this version reads format 1")
        return cls(uri, table, about)

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
        """Make an empty one, in place of what a killed maker may have left.

        Args:
            uri: a folder, or an address that LanceDB takes.
            checkpoint: where the checkpoint was loaded from.
            checkpoint_hash: of `rge.checkpoints.export.checkpoint_hash`.
            dimensions: components of a vector.
            captions: whether pictures were embedded with their texts (``embed``) or without (``show``).

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
            return cls(uri, _connect(uri).create_table(TABLE, schema=_schema(about), mode="overwrite"), about)

    def check(self, checkpoint: str | Path, checkpoint_hash: str) -> None:
        """Raise where another checkpoint made the index: its vectors mean nothing to this one.

        Args:
            checkpoint: name of the one in use.
            checkpoint_hash: of it.

        Raises:
            SearchIndexError: another one; names both.
        """
        if self.about["checkpoint_hash"] != checkpoint_hash:
            raise SearchIndexError(
                f"{self.uri} was made by another checkpoint: {self.about['checkpoint']} ({self.about['checkpoint_hash'][:12]}), "
                f"not {checkpoint} ({checkpoint_hash[:12]}); use that one, or index into another folder"
            )

    def __len__(self) -> int:
        """Rows."""
        return int(self._table.count_rows())

    def sources(self) -> dict[str, int]:
        """Rows by source."""
        with _in_words(self.uri):
            found = self._table.search().select(["source"]).limit(None).to_arrow()
        counted = found["source"].value_counts().to_pylist()
        return {row["values"]: row["counts"] for row in sorted(counted, key=lambda row: row["values"])}

    def known(self, source: str) -> dict[str, tuple[str, str]]:
        """Stamp and digest of every row of a source, by id."""
        with _in_words(self.uri):
            found = (
                self._table.search()
                .where(f"source = {_quoted(source)}")
                .select(["id", "stamp", "digest"])
                .limit(None)
                .to_arrow()
            )
        columns = (found[name].to_pylist() for name in ("id", "stamp", "digest"))
        return {name: (stamp, digest) for name, stamp, digest in zip(*columns, strict=True)}

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows, or replace those of the same source and id; one commit.

        Raises:
            ValueError: a vector of another size, or one that is not finite.
            SearchIndexError: it cannot be written.
        """
        if not rows:
            return
        vector_ND = np.stack([row.vector for row in rows]).astype(np.float32)
        if vector_ND.shape[1] != self.about["dimensions"]:
            raise ValueError(
                f"{self.uri} holds vectors of {self.about['dimensions']}, got {vector_ND.shape[1]}"
            )
        if not np.isfinite(vector_ND).all():
            raise ValueError("a vector is not finite")
        columns = {
            name: pa.array([getattr(row, name) for row in rows], kind)
            for name, kind in _COLUMNS.items()
            if name != "metadata"
        }
        columns["metadata"] = pa.array(
            [
                json.dumps(_finite(json.dumps(row.metadata, default=str)), ensure_ascii=False)
                if row.metadata
                else None
                for row in rows
            ]
        )
        columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vector_ND.ravel()), vector_ND.shape[1])
        table = pa.table({name: columns[name] for name in (*_COLUMNS, "vector")})
        with _in_words(self.uri):
            merge = self._table.merge_insert(["source", "id"])
            merge.when_matched_update_all().when_not_matched_insert_all().execute(table)

    def vectors(self, source: str, ids: Iterable[str]) -> dict[str, np.ndarray]:
        """Vectors (D,) of rows, by id."""
        found: dict[str, np.ndarray] = {}
        for names in _chunks(list(ids), 1000):
            with _in_words(self.uri):
                chosen = f"source = {_quoted(source)} AND id IN ({', '.join(map(_quoted, names))})"
                rows = self._table.search().where(chosen).select(["id", "vector"]).limit(None).to_arrow()
            found |= zip(rows["id"].to_pylist(), rows["vector"].to_numpy(zero_copy_only=False), strict=True)
        return found

    def remove(self, source: str, ids: Iterable[str] | None = None) -> None:
        """Take rows out.

        Args:
            source: of the rows.
            ids: which of them; None for all.
        """
        with _in_words(self.uri):
            if ids is None:
                self._table.delete(f"source = {_quoted(source)}")
                return
            for names in _chunks(list(ids), 1000):
                self._table.delete(f"source = {_quoted(source)} AND id IN ({', '.join(map(_quoted, names))})")

    def refresh(self, ann_from: int) -> Recall | None:
        """After writing: merge small files, forget old versions, and keep, make or drop the ANN index.

        Args:
            ann_from: rows from which there is one.

        Returns:
            What it finds, measured; None where search is exact.
        """
        with _in_words(self.uri):
            self._table.optimize(cleanup_older_than=KEPT_FOR)
            has = [one.name for one in self._table.list_indices() if "vector" in one.columns]
            if len(self) < ann_from:
                for name in has:
                    self._table.drop_index(name)
                return None
            if not has:
                self._make_ann()
            return self._measure()

    # ------------------------------------------------------------------------------------------------------ searching

    def search(
        self, query_ND: np.ndarray, k: int, *, exact: bool = False, thumbnails: bool = False
    ) -> list[list[Hit]]:
        """The k nearest rows of each query, the best first; of equal scores the name decides.

        Args:
            query_ND: (N, D), unit norm, of the index's checkpoint.
            k: hits a query; fewer where there are fewer rows.
            exact: pass an ANN index by; without one search is exact anyway.
            thumbnails: bring them along.

        Raises:
            ValueError: queries of another size, or k below one.
            SearchIndexError: the index cannot be read.
        """
        query_ND = np.ascontiguousarray(query_ND, dtype=np.float32)
        if query_ND.ndim != 2 or query_ND.shape[1] != self.about["dimensions"]:
            raise ValueError(
                f"{self.uri} is searched with queries (N, {self.about['dimensions']}), got {query_ND.shape}"
            )
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}")
        shown = [name for name in _SHOWN if thumbnails or name != "thumbnail"]
        found = []
        for query_D in query_ND:
            rows = self._nearest(query_D, k, shown, exact)
            # Lance's distance is rounded differently by each kernel: scores are of the stored vectors.
            vector_KD = (
                np.stack(rows["vector"].to_numpy(zero_copy_only=False)) if len(rows) else np.empty((0, 1))
            )
            score_K = [float(query_D @ vector_D) for vector_D in vector_KD]
            hits = [
                _hit(row, score)
                for row, score in zip(rows.drop_columns(["vector"]).to_pylist(), score_K, strict=True)
            ]
            found.append(sorted(hits, key=lambda hit: (-hit.score, hit.source, hit.id)))
        return found

    def sample(self, count: int) -> list[tuple[str, str, bool]]:
        """Source and id of some rows, and whether each has a picture: the first ones."""
        with _in_words(self.uri):
            rows = self._table.search().select(["source", "id", "image"]).limit(count).to_list()
        return [(row["source"], row["id"], row["image"] is not None) for row in rows]

    def picture(self, source: str, id: str) -> tuple[str | None, bytes | None]:  # noqa: A002
        """A row's picture and its small copy; None where there is none.

        Raises:
            SearchIndexError: there is no such row.
        """
        with _in_words(self.uri):
            chosen = f"source = {_quoted(source)} AND id = {_quoted(id)}"
            found = self._table.search().where(chosen).select(["image", "thumbnail"]).limit(1).to_list()
        if not found:
            raise SearchIndexError(f"{self.uri} holds no {id!r} of {source}")
        return found[0]["image"], found[0]["thumbnail"]

    def _nearest(self, query_D: np.ndarray, k: int, columns: Sequence[str], exact: bool) -> pa.Table:
        with _in_words(self.uri):
            asked = cast("LanceVectorQueryBuilder", self._table.search(query_D, vector_column_name="vector"))
            asked = asked.distance_type("dot").limit(k)
            asked = asked.bypass_vector_index() if exact else asked.nprobes(NPROBES).refine_factor(REFINE)
            # Lance wants _distance named, and warns otherwise.
            return asked.select([*columns, "vector", "_distance"]).to_arrow().select([*columns, "vector"])

    def _make_ann(self) -> None:
        from lancedb.index import IvfFlat, IvfRq

        # Four bits a component find candidates, the true vectors rank them (docs/search.md says what that misses). Few
        # components are too few bits, and bits are packed into bytes.
        size = self.about["dimensions"]
        packs = size >= 256 and size % 8 == 0
        config = IvfRq(distance_type="dot", num_bits=4) if packs else IvfFlat(distance_type="dot")
        self._table.create_index("vector", config=config)

    def _measure(self) -> Recall:
        """Ask some rows for their nearest others. One pass over all vectors gives the exact answers, by their scores."""
        count = len(self)
        drawn = np.random.default_rng(0).choice(count, size=min(MEASURED, count), replace=False).tolist()
        best = min(DEPTH + 1, count)  # a row is its own nearest
        with _in_words(self.uri):
            query_QD = _matrix(self._table.take_offsets(drawn).select(["vector"]).to_arrow())
            top_QK = np.full((len(query_QD), best), -np.inf, np.float32)
            for batch in self._table.search().select(["vector"]).limit(None).to_batches():
                seen = np.hstack([top_QK, query_QD @ _matrix(pa.Table.from_batches([batch])).T])
                top_QK = -np.partition(-seen, best - 1, axis=1)[:, :best]
        found = 0
        times: dict[bool, list[float]] = {True: [], False: []}
        for place, (query_D, top_K) in enumerate(zip(query_QD, top_QK, strict=True)):
            for exact in (False, True)[: 1 if place >= TIMED else 2]:
                began = time.perf_counter()
                rows = self._nearest(query_D, best, ["id"], exact)
                times[exact].append((time.perf_counter() - began) * 1000)
                if not exact:
                    # As good as the last of the exact ones, to rounding: of equal pictures any will do.
                    found += int((_matrix(rows) @ query_D >= top_K.min() - 1e-5).sum()) - 1
        recall = found / ((best - 1) * len(drawn)) if best > 1 else 1.0
        return Recall(
            count, recall, len(drawn), float(np.median(times[False])), float(np.median(times[True]))
        )


@contextmanager
def writing(uri: str | Path) -> Iterator[None]:
    """Keep other writers of an index out while inside; those of an object store meet in LanceDB's commits.

    Raises:
        SearchIndexError: another process of this machine, or of one that shares the folder, writes.
    """
    folder = _folder(uri)
    if folder is None:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
        except InUseError as error:
            raise SearchIndexError(str(error).replace("give another out=", "make another index")) from None
        yield


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


def _table(uri: str) -> "Table | None":
    """The table, or None where there is none, or where whoever made it was killed before its first version."""
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
        return connection.open_table(TABLE)


@contextmanager
def _in_words(uri: str) -> Iterator[None]:
    """What LanceDB raises, as what can be done about it."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
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
_SHOWN = ("source", "id", "text", "image", "metadata", "thumbnail")


def _schema(about: dict[str, Any]) -> pa.Schema:
    fields = [pa.field(name, kind) for name, kind in _COLUMNS.items()]
    fields.append(pa.field("vector", pa.list_(pa.float32(), about["dimensions"])))
    return pa.schema(fields, metadata={"rge": json.dumps(about)})


def _matrix(rows: pa.Table) -> np.ndarray:
    """The column of vectors, (N, D)."""
    column = rows["vector"].combine_chunks()
    return (
        column.flatten().to_numpy().reshape(len(column), -1) if len(column) else np.empty((0, 0), np.float32)
    )


def _hit(row: dict[str, Any], score: float) -> Hit:
    image = row["image"]
    gone = bool(image) and not image.startswith(("http://", "https://")) and not is_there(image)
    metadata = _finite(row["metadata"]) if row["metadata"] else {}
    return Hit(row["source"], row["id"], score, row["text"], image, metadata, gone, row.get("thumbnail"))


def _finite(text: str) -> dict[str, Any]:
    """An object of JSON. Python writes NaN and infinities into it, and nothing else reads them: they are None."""
    found: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return found


def _quoted(text: str) -> str:
    """A text inside a filter."""
    return "'" + text.replace("'", "''") + "'"


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))
