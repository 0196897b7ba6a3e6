"""Load and check a retrieval set: queries, a pool of candidates, and which of them are right.

A set is a directory of Parquet files, readable by MTEB unchanged:

``corpus.parquet``      id, image, text
``queries.parquet``     id, text, image, category, group, instruction; further columns are kept, among them
                        num_missing_positives: positives that the pool lacks, which stay in every denominator, and
                        picture_ids: of the pictures, joined by "+" (both optional)
``qrels.parquet``       query-id, corpus-id, score (integer gain)
``negatives.parquet``   query-id, corpus-id: explicit negatives (optional; an id may also be a positive)
``excluded.parquet``    query-id, corpus-id: removed from that query's ranking (optional)
``candidates.parquet``  query-id, corpus-id: each query's own candidates (optional)
``names.parquet``       picture-id, name: what a picture also goes by in training files, see `eval.commands.audit` (optional)
``rationales.parquet``  query-id, corpus-id, rationale: why a candidate is right, in words (optional)
``meta.json``           name; ``report_by`` lists further query columns to report figures by; ``slice_notes`` says what
                        their values mean, {column: {value: words}}; ``fingerprint``, where
                        given, is checked (see `rge.identity.set_fingerprint`), and otherwise computed

A picture is encoded bytes, ``{bytes, path}`` as Hugging Face stores it, the path of a file in the directory, or
``library.parquet#row-id`` in it or beside it; a query's ``image`` is a list of those. ``text`` and ``image`` may be left out where every
row lacks them.

Ties are broken by id everywhere in `eval`. That is why candidates have two orders: the file's, in which pictures are
read, and the order of ids (`RetrievalSet.corpus_ids`), which every array of rankings and judgements counts in. There,
"lower row" and "smaller id" are the same thing.
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
MAX_REPORT_VALUES = 50
"""A column with more values than this is no grouping, and its table would be unreadable."""
READ_ROWS = 64
"""Rows decoded at once from a file of pictures; a Parquet row group can hold gigabytes of them."""


class SetError(UserError):
    """A retrieval set breaks the format; the message names file, row and fix."""


@dataclass(frozen=True)
class RetrievalSet:
    """A checked retrieval set. Q queries in file order; C candidates, counted in the order of their ids.

    Attributes:
        path: the directory.
        name: from ``meta.json``.
        fingerprint: of ids and judgements; recomputed, equal to that of ``meta.json`` where it has one.
        meta: content of ``meta.json``.
        queries: Q items with all modalities.
        columns: per query column (``category``, ``group`` and those of ``report_by``) Q strings.
        report_by: query columns, besides ``category``, by which figures are reported.
        corpus_ids: C candidate ids, ascending.
        file_rows_C: row of each candidate in ``corpus.parquet``.
        positives: per query (rows, gains): int32 rows into ``corpus_ids`` ascending, float64 gains > 0.
        negatives: per query rows, or None without the table.
        excluded: likewise.
        candidates: likewise.
        num_missing_Q: positives that the pool lacks, int64, or None without such a column.
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
    negatives: list[np.ndarray] | None
    excluded: list[np.ndarray] | None
    candidates: list[np.ndarray] | None
    num_missing_Q: np.ndarray | None = None
    content: str | None = None

    @property
    def query_ids(self) -> list[str]:
        """Q query ids in file order."""
        return [item.id for item in self.queries]

    def pool_sizes(self) -> np.ndarray:
        """Number of candidates that can appear in each query's ranking, (Q,) int64."""
        size_Q = np.full(len(self.queries), len(self.corpus_ids), np.int64)
        if self.candidates is not None:
            size_Q = np.array([len(rows) for rows in self.candidates], np.int64)
        if self.excluded is not None:
            for query, rows in enumerate(self.excluded):
                size_Q[query] -= len(
                    rows if self.candidates is None else np.intersect1d(rows, self.candidates[query])
                )
        return size_Q

    def first(self, limit: int) -> "RetrievalSet":
        """The same set with only its first ``limit`` queries; the pool and the fingerprint stay."""
        if limit < 1:
            raise UserError(f"limit must be at least 1, got {limit}")
        return replace(
            self,
            queries=self.queries[:limit],
            columns={name: values[:limit] for name, values in self.columns.items()},
            positives=self.positives[:limit],
            negatives=self.negatives and self.negatives[:limit],
            excluded=self.excluded and self.excluded[:limit],
            candidates=self.candidates and self.candidates[:limit],
            num_missing_Q=None if self.num_missing_Q is None else self.num_missing_Q[:limit],
        )

    def corpus_items(self) -> Iterator[Item]:
        """Candidates in the order of the file, pictures read as needed: a pool may be larger than memory.

        Raises:
            SetError: a candidate has neither text nor image.
        """
        yield from _items(self.path / "corpus.parquet", self.path)

    def query_items(self, modality: Modality) -> list[Item]:
        """Queries reduced to a modality.

        Args:
            modality: ``both``; ``text`` drops the pictures; ``image`` drops text and instruction.

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
                f"query_modality={modality} would leave them empty: {_some(empty)}"
            )
        return kept


def load_set(path: str | Path, *, by: Sequence[str] = ()) -> RetrievalSet:
    """Load a retrieval set and check everything that does not need the candidates' pictures.

    Args:
        path: the directory, see the module.
        by: query columns to report figures by, besides those that ``meta.json`` lists.

    Raises:
        SetError: see the messages; each names the file and the row.
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
    rows = {name: [rows for rows, _ in _by_query(table, query_of, row_of)] for name, table in tables.items()}
    num_missing_Q = _num_missing(root / "queries.parquet")
    positives = _positives(root / "qrels.parquet", qrels, query_of, row_of, num_missing_Q)
    _check_reachable(root, [item.id for item in queries], corpus_ids, order_C, positives, rows)
    # last, since a message about the fingerprint says less than any of the above
    fingerprint = set_fingerprint(query_of, corpus_ids, qrels, **tables)
    if meta.get("fingerprint", fingerprint) != fingerprint:
        raise SetError(
            f"{root / 'meta.json'}: fingerprint is {meta['fingerprint']!r}, but the tables beside it have "
            f"{fingerprint!r}: the set was changed after it was written, or only part of it was copied"
        )
    return RetrievalSet(
        content=None,
        path=root,
        name=meta["name"],
        fingerprint=fingerprint,
        meta=meta,
        queries=queries,
        columns=columns,
        report_by=report_by,
        corpus_ids=[corpus_ids[row] for row in order_C.tolist()],
        file_rows_C=order_C,
        positives=positives,
        negatives=rows.get("negatives"),
        excluded=rows.get("excluded"),
        candidates=rows.get("candidates"),
        num_missing_Q=num_missing_Q,
    )


def integer_column(wanted: RetrievalSet, name: str) -> np.ndarray:
    """A column of whole numbers of ``queries.parquet``, (Q,) int64.

    Raises:
        SetError: it is not there, or holds something else.
    """
    values = _integers(wanted.path / "queries.parquet", name)
    return np.array(values[: len(wanted.queries)], np.int64)


def string_column(wanted: RetrievalSet, name: str) -> list[str]:
    """A column of strings of ``queries.parquet``, Q values.

    Raises:
        SetError: it is not there, holds something else, or has gaps.
    """
    return _strings(wanted.path / "queries.parquet", name)[: len(wanted.queries)]


def picture_ids(wanted: RetrievalSet) -> list[list[str]]:
    """Ids of each query's pictures as the release has them; empty lists where the set does not say."""
    path = wanted.path / "queries.parquet"
    if "picture_ids" not in _open(path, ["id"]).schema_arrow.names:
        return [[] for _ in wanted.queries]
    return [one.split("+") if one else [] for one in string_column(wanted, "picture_ids")]


def further_names(wanted: RetrievalSet) -> dict[str, set[str]]:
    """Picture id -> what it also goes by in training files; empty where the set does not say.

    Raises:
        SetError: the file is there, but not with two columns of strings.
    """
    path = wanted.path / NAMES
    if not path.exists():
        return {}
    found: dict[str, set[str]] = {}
    for one, name in zip(_strings(path, "picture-id"), _strings(path, "name"), strict=True):
        found.setdefault(one, set()).add(name)
    return found


def given_rationales(wanted: RetrievalSet) -> dict[tuple[str, str], str]:
    """(query id, candidate id) -> why that candidate is right, as the set says; empty where it does not.

    Raises:
        SetError: the file is there, but not with three columns of strings.
    """
    path = wanted.path / RATIONALES
    if not path.exists():
        return {}
    queries, candidates, texts = (_strings(path, name) for name in ("query-id", "corpus-id", "rationale"))
    return dict(zip(zip(queries, candidates, strict=True), texts, strict=True))


def content_digest(item: Item) -> tuple[str, tuple[str, ...]]:
    """What an item shows, as hashes: two items that differ only in their ids are equal.

    Args:
        item: its pictures are read, which also proves that they exist.

    Returns:
        (sha256 of text, instruction and pictures, sha256 of each picture's bytes), hexadecimal.

    Raises:
        rge.common.images.ImageError: a picture cannot be read.
    """
    pictures = tuple(hashlib.sha256(picture_bytes(ref)).hexdigest() for ref in item.images)
    content = json.dumps([item.text, item.instruction, pictures], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest(), pictures


def with_content(wanted: RetrievalSet, candidates: Sequence[str] | None = None) -> RetrievalSet:
    """The same set with the hash of everything it shows and means.

    Ids and judgements are in the fingerprint. This adds each text, instruction and picture, and the columns that figures are
    grouped by: the same ids under another wording or with other pictures are another set.

    Args:
        wanted: with all its queries.
        candidates: content digest of each candidate in the order of the file, where they are known already; None reads
            every picture of the pool.

    Raises:
        rge.common.images.ImageError: a picture cannot be read.
    """
    if candidates is None:
        candidates = [content_digest(item)[0] for item in wanted.corpus_items()]
    digest = hashlib.sha256(wanted.fingerprint.encode())
    rank_of = np.empty(len(wanted.file_rows_C), np.int64)
    rank_of[wanted.file_rows_C] = np.arange(len(rank_of))
    shown: list[list[str]] = sorted(
        [wanted.corpus_ids[r], one] for r, one in zip(rank_of, candidates, strict=True)
    )
    columns = [wanted.columns[name] for name in sorted(wanted.columns)]
    missing = [] if wanted.num_missing_Q is None else [list(map(str, wanted.num_missing_Q.tolist()))]
    asked = zip(wanted.queries, *columns, *missing, strict=True)
    shown += sorted([query.id, content_digest(query)[0], *values] for query, *values in asked)
    for row in shown:
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return replace(wanted, content=digest.hexdigest())


def with_readable_content(wanted: RetrievalSet) -> tuple[RetrievalSet, list[str]]:
    """`with_content` for a ranking that was made elsewhere: pictures that are not here are a warning, no error."""
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
        raise SetError(f"{path}: neither column 'text' nor 'image' is there; there are {', '.join(names)}")
    return file


def _kind(file: pq.ParquetFile, column: str) -> pa.DataType:
    kind = file.schema_arrow.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _strings(path: Path, column: str, *, nulls: bool = False) -> list[Any]:
    file = _open(path, [column])
    _check_text(path, column, _kind(file, column), nulls=nulls)
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
    return file.read(columns=[column]).column(0).to_pylist()


def _ids(path: Path) -> list[str]:
    ids = _strings(path, "id")
    if not ids:
        raise SetError(f"{path} has no rows")
    seen: set[str] = set()
    for row, name in enumerate(ids):
        # a TREC run separates its columns by white space
        if not name or name.split() != [name]:
            raise SetError(f"{path}: id {name!r} in row {row} is empty or contains white space")
        if name in seen:
            raise SetError(f"{path}: id {name!r} occurs twice, again in row {row}")
        seen.add(name)
    return ids


def _queries(
    path: Path, meta: dict[str, Any], by: Sequence[str]
) -> tuple[list[Item], dict[str, list[str]], tuple[str, ...]]:
    _ids(path)  # for its checks; the ids themselves come with the items
    _open(path, ["id", "category", "group"])
    columns = {
        "category": [value or UNCATEGORISED for value in _strings(path, "category", nulls=True)],
        "group": _strings(path, "group"),
    }
    report_by = tuple(dict.fromkeys([*meta.get("report_by", []), *by]))
    for name in report_by:
        if name in ("id", "text", "image", "instruction", "category", "group"):
            raise SetError(f"{path}: cannot report by {name!r}, which has a meaning of its own")
        columns[name] = _strings(path, name)
        if len(set(columns[name])) > MAX_REPORT_VALUES:
            raise SetError(
                f"{path}: report_by column {name!r} has {len(set(columns[name]))} values, "
                f"more than {MAX_REPORT_VALUES}: too many for a table"
            )
    queries = list(_items(path, path.parent))
    for item, group in zip(queries, columns["group"], strict=True):
        if not group:
            raise SetError(f"{path}: query {item.id!r} has no group; where nothing is shared, repeat the id")
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
        return tuple(ref for one in cell for ref in _pictures(path, root, name, one))
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
    """A picture's reference, which may not leave the set: a set made elsewhere could show any file of this machine."""
    file, library, row = cell.partition(".parquet#")
    target = root / (file + library.removesuffix("#"))
    real = _real(str(target.parent)) / target.name
    real = Path(os.path.realpath(real)) if real.is_symlink() else Path(os.path.normpath(real))
    folder = _real(str(root))
    # the hub's cache keeps files apart and links to them; a library of pictures may stand beside the sets that share it
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(one) for one in (folder.parent if library else folder, *blobs)):
        raise SetError(
            f"{path}: image of {name!r} is {cell!r}, outside the set's folder: put the picture itself, or a copy of the file, "
            "into the set"
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
    """Each query's rows, int32 and ascending, and their gains, float64; 1 where there are none."""
    query_N = np.array([query_of[query] for query, *_ in pairs], np.int64)
    row_N = np.array([row_of[name] for _, name, *_ in pairs], np.int32)
    gain_N = np.array(
        [gain for *_, gain in pairs] if pairs and len(pairs[0]) > 2 else np.ones(len(pairs)), np.float64
    )
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
    # gain 0 is a judgement too: judged, and not right
    found = _by_query([pair for pair in qrels if pair[2] > 0], query_of, row_of)
    missing_Q = np.zeros(len(found)) if num_missing_Q is None else num_missing_Q
    without = [one for one, own, num in zip(query_of, found, missing_Q, strict=True) if not len(own[0]) + num]
    if without:
        raise SetError(f"{path}: {len(without)} of {len(found)} queries have no positive: {_some(without)}")
    return found


def _num_missing(path: Path) -> np.ndarray | None:
    name = "num_missing_positives"
    if name not in _open(path, ["id"]).schema_arrow.names:
        return None
    missing_Q = np.array(_integers(path, name), np.int64)
    if missing_Q.min(initial=0) < 0:
        raise SetError(f"{path}: column {name!r} must not be negative")
    return missing_Q if missing_Q.any() else None


def _check_reachable(
    root: Path,
    query_ids: Sequence[str],
    corpus_ids: Sequence[str],
    order_C: np.ndarray,
    positives: Sequence[tuple[np.ndarray, np.ndarray]],
    rows: dict[str, list[np.ndarray]],
) -> None:
    """No query may be impossible to answer because of the optional tables."""

    def name(row: int) -> str:
        return corpus_ids[order_C[row]]

    for number, query in enumerate(query_ids):
        right = positives[number][0]
        if (lists := rows.get("candidates")) is not None:
            if not len(lists[number]):
                raise SetError(f"{root / 'candidates.parquet'}: query {query!r} has no candidates")
            if len(lost := np.setdiff1d(right, lists[number])):
                raise SetError(
                    f"{root / 'candidates.parquet'}: positive {name(lost[0])!r} of query {query!r} is not among them"
                )
        if (lists := rows.get("excluded")) is not None and len(lost := np.intersect1d(right, lists[number])):
            raise SetError(f"{root / 'excluded.parquet'}: {name(lost[0])!r} is a positive of query {query!r}")


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
