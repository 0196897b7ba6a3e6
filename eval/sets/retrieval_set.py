"""Load and check a retrieval set: queries, a pool of candidates, and relevance judgements.

A set is a directory of Parquet files, which MTEB can read unchanged:

``corpus.parquet``      id, image, text
``queries.parquet``     id, text, image, category, group, instruction; further columns are kept. Optional ones are
                        num_missing_positives: positives that the pool lacks, which stay in every denominator, and
                        picture_ids: ids of the pictures, joined by "+"
``qrels.parquet``       query-id, corpus-id, score (integer gain)
``negatives.parquet``   query-id, corpus-id: explicit negatives (optional; an id may also be a positive)
``excluded.parquet``    query-id, corpus-id: removed from that query's ranking (optional)
``candidates.parquet``  query-id, corpus-id: each query's own candidates (optional)
``names.parquet``       picture-id, name: other names of a picture in training files, see `eval.commands.audit` (optional)
``rationales.parquet``  query-id, corpus-id, rationale: why a candidate is right (optional)
``meta.json``           name; ``report_by`` lists further query columns to report figures by; ``slice_notes`` explains
                        their values, {column: {value: words}}; ``fingerprint`` is checked if given (see
                        `rge.identity.set_fingerprint`)

A picture is encoded bytes, ``{bytes, path}`` as Hugging Face stores it, the path of a file in the directory, or
``library.parquet#row-id`` in it or beside it; a query's ``image`` is a list of pictures. The columns ``text`` and ``image``
may be missing if they would be empty.

Ties are broken by id everywhere in `eval`. Candidates therefore have two orders: that of the file, in which pictures are
read, and that of ids (`RetrievalSet.corpus_ids`), which the rows in all rankings and judgements refer to.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import ImageError, picture_bytes
from rge.common.schema import ImageRef, Item
from rge.identity.set_fingerprint import set_fingerprint
from rge.tables.rows import is_text

Modality = Literal["both", "text", "image"]
MODALITIES: tuple[Modality, ...] = ("both", "text", "image")
NAMES = "names.parquet"
RATIONALES = "rationales.parquet"
UNCATEGORISED = "uncategorised"
RESERVED = (
    "id", "text", "image", "instruction", "category", "group", "query_id", "num_positives", "first_hit_rank", "mrr", "top10",
    "top10_scores", "rationale", "rationale_tokens", "stop_reason", "generate_ms", "embed_ms",
)  # fmt: skip
"""Columns of ``queries.parquet`` and of results that figures cannot be reported by."""
MAX_REPORT_VALUES = 50
"""Maximum number of values of a column that figures are reported by; longer tables would be unreadable."""
READ_ROWS = 64
"""Rows decoded at a time, since a row group of pictures can be gigabytes large."""


class SetError(UserError):
    """A retrieval set violates the format; the message names file, row and fix."""


@dataclass(frozen=True)
class RetrievalSet:
    """A checked retrieval set: Q queries in file order, and C candidates in the order of their ids.

    Attributes:
        fingerprint: hash of ids and judgements.
        meta: content of ``meta.json``.
        queries: Q items with all modalities.
        columns: query column (``category``, ``group`` and those of ``report_by``) -> Q strings.
        report_by: query columns, besides ``category``, by which figures are reported.
        corpus_ids: C candidate ids, ascending.
        file_rows_C: row of each candidate in ``corpus.parquet``.
        positives: per query (rows, gains): int32 rows into ``corpus_ids`` ascending, float64 gains > 0.
        excluded: per query rows, or None without the table; ``candidates`` likewise.
        negatives: likewise, without those that the other two keep out of the query's ranking.
        num_missing_Q: number of positives that the pool lacks, int64; None without such a column.
        content: see `with_content`; None until the pictures have been read.
    """

    path: Path
    name: str
    fingerprint: str
    meta: dict[str, Any]
    queries: list[Item]
    columns: dict[str, list[str]]
    report_by: tuple[str, ...]
    corpus_ids: list[str]
    file_rows_C: np.ndarray
    positives: list[tuple[np.ndarray, np.ndarray]]
    negatives: list[np.ndarray] | None = None
    excluded: list[np.ndarray] | None = None
    candidates: list[np.ndarray] | None = None
    num_missing_Q: np.ndarray | None = None
    content: str | None = None

    @property
    def query_ids(self) -> list[str]:
        """Q query ids in file order."""
        return [item.id for item in self.queries]

    @property
    def file_order_C(self) -> np.ndarray:
        """Rows of the candidates in the order of ``corpus.parquet``, the inverse of ``file_rows_C``."""
        return np.argsort(self.file_rows_C)

    def pool_sizes(self) -> np.ndarray:
        """Number of candidates that can appear in each query's ranking, (Q,) int64."""
        size_Q = np.full(len(self.queries), len(self.corpus_ids), np.int64)
        if self.candidates is not None:
            size_Q = np.array([len(rows) for rows in self.candidates], np.int64)
        for query, rows in enumerate(self.excluded or []):
            size_Q[query] -= len(
                rows if self.candidates is None else np.intersect1d(rows, self.candidates[query])
            )
        return size_Q

    def first(self, limit: int) -> "RetrievalSet":
        """The set with only its first ``limit`` queries; the pool and the fingerprint do not change."""
        if limit < 1:
            raise UserError(f"limit must be at least 1, got {limit}")
        columns = {name: values[:limit] for name, values in self.columns.items()}
        per_query = ("queries", "positives", "negatives", "excluded", "candidates", "num_missing_Q")
        tables = {name: getattr(self, name) for name in per_query if getattr(self, name) is not None}
        return replace(self, columns=columns, **{name: table[:limit] for name, table in tables.items()})

    def corpus_items(self) -> Iterator[Item]:
        """Candidates in file order, read lazily, since a pool may be larger than memory.

        Raises:
            SetError: a candidate has neither text nor image.
        """
        yield from _items(self.path / "corpus.parquet", self.path)

    def query_items(self, modality: Modality) -> list[Item]:
        """Queries reduced to a modality: ``text`` drops the pictures, ``image`` drops text and instruction.

        Raises:
            SetError: a query would be empty.
        """
        if modality == "both":
            return self.queries
        if modality == "text":
            kept = [Item(id=q.id, text=q.text, instruction=q.instruction) for q in self.queries]
        else:
            kept = [Item(id=q.id, images=q.images) for q in self.queries]
        empty = [item.id for item in kept if not item.text and not item.images]
        if empty:
            raise SetError(
                f"{self.path / 'queries.parquet'}: {len(empty)} of {len(kept)} queries have no {modality}, so "
                f"query_modality={modality} would leave them empty: {some(empty)}"
            )
        return kept


def load_set(path: str | Path, *, by: Sequence[str] = ()) -> RetrievalSet:
    """Load a retrieval set and check everything except the candidates' pictures.

    ``by``: further query columns to report figures by, besides those that ``meta.json`` lists.

    Raises:
        SetError: the set violates the format; the message names the file and the row.
    """
    root = find_shipped(path)
    if not root.is_dir():
        raise SetError(f"set {root} is not a directory")
    meta = _meta(root / "meta.json")
    corpus_ids = _ids(root / "corpus.parquet")
    queries, columns, report_by = _queries(root / "queries.parquet", meta, by)
    order_C = np.array(sorted(range(len(corpus_ids)), key=corpus_ids.__getitem__), np.int64)
    row_of = {corpus_ids[file_row]: row for row, file_row in enumerate(order_C.tolist())}
    query_of = {item.id: row for row, item in enumerate(queries)}
    qrels = _pairs(root / "qrels.parquet", query_of, row_of, with_gain=True)
    tables = {
        name: _pairs(root / f"{name}.parquet", query_of, row_of)
        for name in ("negatives", "excluded", "candidates")
        if (root / f"{name}.parquet").exists()
    }
    rows: dict[str, Any] = {
        name: [rows for rows, _ in _by_query(table, query_of, row_of)] for name, table in tables.items()
    }
    # a negative that a query's ranking cannot contain does not count
    for name, keep in (("candidates", np.intersect1d), ("excluded", np.setdiff1d)):
        if {name, "negatives"} <= rows.keys():
            rows["negatives"] = list(map(keep, rows["negatives"], rows[name]))
    num_missing_Q = _num_missing(root / "queries.parquet")
    positives = _positives(root / "qrels.parquet", qrels, query_of, row_of, num_missing_Q)
    wanted = RetrievalSet(
        path=root,
        name=meta["name"],
        fingerprint=set_fingerprint(query_of, corpus_ids, qrels, **tables),
        meta=meta,
        queries=queries,
        columns=columns,
        report_by=report_by,
        corpus_ids=[corpus_ids[row] for row in order_C.tolist()],
        file_rows_C=order_C,
        positives=positives,
        num_missing_Q=num_missing_Q,
        **rows,
    )
    _check_reachable(wanted)
    # last, since the messages of the other checks are more specific
    if meta.get("fingerprint", wanted.fingerprint) != wanted.fingerprint:
        raise SetError(
            f"{root / 'meta.json'}: fingerprint is {meta['fingerprint']!r}, but the tables beside it have "
            f"{wanted.fingerprint!r}: the set was changed after it was written, or only part of it was copied"
        )
    return wanted


def integer_column(wanted: RetrievalSet, name: str) -> np.ndarray:
    """A column of integers in ``queries.parquet``, (Q,) int64.

    Raises:
        SetError: it does not exist or has another type.
    """
    values = _integers(wanted.path / "queries.parquet", name)
    return np.array(values[: len(wanted.queries)], np.int64)


def string_column(wanted: RetrievalSet, name: str) -> list[str]:
    """A column of Q strings in ``queries.parquet``.

    Raises:
        SetError: it does not exist, has another type, or has nulls.
    """
    return _strings(wanted.path / "queries.parquet", name)[: len(wanted.queries)]


def picture_ids(wanted: RetrievalSet) -> list[list[str]]:
    """Ids of each query's pictures in the release; empty lists if unknown."""
    path = wanted.path / "queries.parquet"
    if "picture_ids" not in _open(path, ["id"]).schema_arrow.names:
        return [[] for _ in wanted.queries]
    return [ids.split("+") if ids else [] for ids in string_column(wanted, "picture_ids")]


def further_names(wanted: RetrievalSet) -> dict[str, set[str]]:
    """Picture id -> its other names in training files, from ``names.parquet``; empty without it."""
    path = wanted.path / NAMES
    if not path.exists():
        return {}
    names_of: dict[str, set[str]] = {}
    for picture, name in zip(_strings(path, "picture-id"), _strings(path, "name"), strict=True):
        names_of.setdefault(picture, set()).add(name)
    return names_of


def given_rationales(wanted: RetrievalSet) -> dict[tuple[str, str], str]:
    """(query id, candidate id) -> rationale, from ``rationales.parquet``; empty without it."""
    path = wanted.path / RATIONALES
    if not path.exists():
        return {}
    queries, candidates, texts = (_strings(path, name) for name in ("query-id", "corpus-id", "rationale"))
    return dict(zip(zip(queries, candidates, strict=True), texts, strict=True))


def content_digest(item: Item) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of an item's text, instruction and pictures, without its id, and of each picture's bytes.

    Raises:
        rge.common.images.ImageError: a picture cannot be read.
    """
    pictures = tuple(hashlib.sha256(picture_bytes(ref)).hexdigest() for ref in item.images)
    content = json.dumps([item.text, item.instruction, pictures], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest(), pictures


def with_content(wanted: RetrievalSet, candidates: Sequence[str] | None = None) -> RetrievalSet:
    """The set with a hash of all its content.

    Besides the fingerprint (ids and judgements), this covers all texts, instructions and pictures, and the columns that
    the set groups figures by. ``candidates``: content digest of each in file order; None: read all pictures of the pool.

    Raises:
        rge.common.images.ImageError: a picture cannot be read.
    """
    if candidates is None:
        candidates = [content_digest(item)[0] for item in wanted.corpus_items()]
    digest = hashlib.sha256(wanted.fingerprint.encode())
    rows: list[list[str]] = sorted(
        [wanted.corpus_ids[r], one] for r, one in zip(wanted.file_order_C, candidates, strict=True)
    )
    # without those of by=, which belong to a command and not to the set
    own = sorted({"category", "group", *wanted.meta.get("report_by", [])})
    columns = [wanted.columns[name] for name in own]
    missing = [] if wanted.num_missing_Q is None else [list(map(str, wanted.num_missing_Q.tolist()))]
    queries = zip(wanted.queries, *columns, *missing, strict=True)
    rows += sorted([query.id, content_digest(query)[0], *values] for query, *values in queries)
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return replace(wanted, content=digest.hexdigest())


def with_readable_content(wanted: RetrievalSet) -> tuple[RetrievalSet, list[str]]:
    """`with_content` for rankings from elsewhere: missing pictures are a warning instead of an error."""
    try:
        return with_content(wanted), []
    except ImageError as error:
        return wanted, [f"the set's texts and pictures are not part of this result's identity: {error}"]


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SetError(f"{path} is not JSON: {error}") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
        raise SetError(f"{path}: 'name' must be a string")
    if not isinstance(meta.get("fingerprint", ""), str):
        raise SetError(f"{path}: 'fingerprint' must be a string; left out, it is computed")
    by = meta.get("report_by", [])
    if not isinstance(by, list) or not all(isinstance(name, str) for name in by):
        raise SetError(f"{path}: report_by must be a list of query columns, got {by!r}")
    return meta


def _open(path: Path, columns: Sequence[str]) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        raise SetError(f"{path} cannot be read: {error}") from None
    except pa.ArrowInvalid as error:
        raise SetError(f"{path} is not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    for column in columns:
        if column not in names:
            raise SetError(f"{path}: column {column!r} is missing; there are {', '.join(names)}")
    if not {"id", "text", "image"}.isdisjoint(columns) and {"text", "image"}.isdisjoint(names):
        raise SetError(f"{path}: columns 'text' and 'image' are both missing; there are {', '.join(names)}")
    return file


def _kind(file: pq.ParquetFile, column: str) -> pa.DataType:
    kind = file.schema_arrow.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _strings(path: Path, column: str, *, nulls: bool = False) -> list[Any]:
    file = _open(path, [column])
    _check_text(path, column, _kind(file, column), nulls=nulls)
    return _values(path, file, column, nulls=nulls)


def _values(path: Path, file: pq.ParquetFile, column: str, *, nulls: bool = False) -> list[Any]:
    values = file.read(columns=[column]).column(0).to_pylist()
    if not nulls and None in values:
        raise SetError(f"{path}: column {column!r} is null in row {values.index(None)}")
    return values


def _check_text(path: Path, column: str, kind: pa.DataType, *, nulls: bool) -> None:
    if not (is_text(kind) or (nulls and pa.types.is_null(kind))):
        raise SetError(f"{path}: column {column!r} must hold strings, it holds {kind}")


def _integers(path: Path, column: str) -> list[Any]:
    file = _open(path, [column])
    if not pa.types.is_integer(_kind(file, column)):
        raise SetError(f"{path}: column {column!r} must hold integers, it holds {_kind(file, column)}")
    return _values(path, file, column)


def _ids(path: Path) -> list[str]:
    ids = _strings(path, "id")
    if not ids:
        raise SetError(f"{path} has no rows")
    seen: set[str] = set()
    for row, name in enumerate(ids):
        # TREC run files separate columns by white space
        if not name or name.split() != [name]:
            raise SetError(f"{path}: id {name!r} in row {row} is empty or contains white space")
        if name in seen:
            raise SetError(f"{path}: id {name!r} occurs twice, again in row {row}")
        seen.add(name)
    return ids


def _queries(
    path: Path, meta: dict[str, Any], by: Sequence[str]
) -> tuple[list[Item], dict[str, list[str]], tuple[str, ...]]:
    _ids(path)  # checks the ids
    _open(path, ["id", "category", "group"])
    columns = {
        "category": [value or UNCATEGORISED for value in _strings(path, "category", nulls=True)],
        "group": _strings(path, "group"),
    }
    report_by = tuple(dict.fromkeys([*meta.get("report_by", []), *by]))
    for name in report_by:
        if name in RESERVED:
            raise SetError(f"{path}: cannot report by {name!r}, which is a reserved column")
        columns[name] = _strings(path, name)
        if len(set(columns[name])) > MAX_REPORT_VALUES:
            raise SetError(
                f"{path}: report_by column {name!r} has {len(set(columns[name]))} values, "
                f"more than {MAX_REPORT_VALUES}: too many for a table"
            )
    queries = list(_items(path, path.parent))
    for item, group in zip(queries, columns["group"], strict=True):
        if not group:
            raise SetError(f"{path}: query {item.id!r} has no group; if it shares nothing, use its id")
    return queries, columns, report_by


def _items(path: Path, root: Path) -> Iterator[Item]:
    file = _open(path, ["id"])
    wanted = [name for name in ("id", "text", "image", "instruction") if name in file.schema_arrow.names]
    for name in {"text", "instruction"}.intersection(wanted):
        _check_text(path, name, _kind(file, name), nulls=True)
    for batch in file.iter_batches(batch_size=READ_ROWS, columns=wanted):
        for row in batch.to_pylist():
            item = Item(
                id=row["id"],
                text=row.get("text") or None,
                images=_pictures(path, root, row["id"], row.get("image")),
                instruction=row.get("instruction") or None,
            )
            if not item.text and not item.images:
                raise SetError(f"{path}: {item.id!r} has neither text nor image")
            yield item


def _pictures(path: Path, root: Path, name: str, cell: Any) -> tuple[ImageRef, ...]:
    if cell is None or cell == "":
        return ()
    if isinstance(cell, list):
        return tuple(ref for part in cell for ref in _pictures(path, root, name, part))
    if isinstance(cell, dict):
        return _pictures(path, root, name, cell.get("bytes") or cell.get("path"))
    if isinstance(cell, bytes):
        return (cell,)
    if isinstance(cell, str):
        return (_in_folder(path, root, name, cell),)
    raise SetError(
        f"{path}: image of {name!r} must be bytes, a path or {{bytes, path}}, got {type(cell).__name__}"
    )


def _in_folder(path: Path, root: Path, name: str, cell: str) -> str:
    """Resolve a picture reference, which must stay in the set, since a foreign set could otherwise expose any file."""
    file, library, row = cell.partition(".parquet#")
    target = root / (file + library.removesuffix("#"))
    real = _real(str(target.parent)) / target.name
    real = Path(os.path.realpath(real)) if real.is_symlink() else Path(os.path.normpath(real))
    folder = _real(str(root))
    # the hub's cache links to files in blobs/; sets may share a library of pictures beside them
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(allowed) for allowed in (folder.parent if library else folder, *blobs)):
        raise SetError(
            f"{path}: image of {name!r} is {cell!r}, outside the set's folder: copy the file, or its content, into the set"
        )
    return str(target) + (f"#{row}" if library else "")


@lru_cache(maxsize=1024)
def _real(folder: str) -> Path:
    return Path(os.path.realpath(folder))


def _pairs(
    path: Path, query_of: dict[str, int], row_of: dict[str, int], *, with_gain: bool = False
) -> list[tuple[Any, ...]]:
    names = ["query-id", "corpus-id", *(["score"] if with_gain else [])]
    _open(path, names)
    table = pd.DataFrame(
        {name: (_integers if name == "score" else _strings)(path, name) for name in names}, dtype=object
    )
    wrong = {
        "query {0!r} is not in queries.parquet": ~table["query-id"].isin(query_of),
        "{1!r}, listed for query {0!r}, is not in corpus.parquet": ~table["corpus-id"].isin(row_of),
        "{1!r} is listed twice for query {0!r}": table.duplicated(names[:2]),
    }
    if with_gain:
        gains = pd.to_numeric(table["score"])
        wrong["score of {1!r} for query {0!r} must be a gain >= 0, got {2}"] = ~(gains >= 0)
    for message, bad in wrong.items():
        if bad.any():
            raise SetError(f"{path}: {message.format(*table[bad].iloc[0])}")
    return list(table.itertuples(index=False, name=None))


def _by_query(
    pairs: Sequence[tuple[Any, ...]], query_of: dict[str, int], row_of: dict[str, int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each query's rows, int32 and ascending, and their gains, float64 (1 for pairs without gain)."""
    query_N = np.array([query_of[query] for query, *_ in pairs], np.int64)
    row_N = np.array([row_of[name] for _, name, *_ in pairs], np.int32)
    gain_N = np.array([pair[2] if len(pair) > 2 else 1 for pair in pairs], np.float64)
    order = np.lexsort((row_N, query_N))
    stops = np.cumsum(np.bincount(query_N, minlength=len(query_of)))[:-1]
    return list(zip(np.split(row_N[order], stops), np.split(gain_N[order], stops), strict=True))


def _positives(
    path: Path,
    qrels: Sequence[tuple[Any, ...]],
    query_of: dict[str, int],
    row_of: dict[str, int],
    num_missing_Q: np.ndarray | None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    # candidates with gain 0 are judged not right
    judged = _by_query([pair for pair in qrels if pair[2] > 0], query_of, row_of)
    missing_Q = np.zeros(len(judged)) if num_missing_Q is None else num_missing_Q
    without = [
        query for query, own, num in zip(query_of, judged, missing_Q, strict=True) if not len(own[0]) + num
    ]
    if without:
        raise SetError(f"{path}: {len(without)} of {len(judged)} queries have no positive: {some(without)}")
    return judged


def _num_missing(path: Path) -> np.ndarray | None:
    name = "num_missing_positives"
    if name not in _open(path, ["id"]).schema_arrow.names:
        return None
    missing_Q = np.array(_integers(path, name), np.int64)
    if missing_Q.min(initial=0) < 0:
        raise SetError(f"{path}: column {name!r} must not be negative")
    return missing_Q if missing_Q.any() else None


def _check_reachable(wanted: RetrievalSet) -> None:
    """Check that the optional tables leave each query's positives in its ranking."""
    judged = [(query, rows) for query, (rows, _) in zip(wanted.query_ids, wanted.positives, strict=True)]
    path = wanted.path / "candidates.parquet"
    for (query, right), own in zip(judged, wanted.candidates or (), strict=False):
        if not len(own):
            raise SetError(f"{path}: query {query!r} has no candidates")
        if len(lost := np.setdiff1d(right, own)):
            name = wanted.corpus_ids[lost[0]]
            raise SetError(f"{path}: positive {name!r} of query {query!r} is not among them")
    path = wanted.path / "excluded.parquet"
    for (query, right), excluded in zip(judged, wanted.excluded or (), strict=False):
        if len(lost := np.intersect1d(right, excluded)):
            raise SetError(f"{path}: {wanted.corpus_ids[lost[0]]!r} is a positive of query {query!r}")


def some(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
