"""Load and check a retrieval set: queries, a pool of candidates, and relevance judgements.

A set is a directory of Parquet files, which MTEB can read unchanged; docs/own_data.md describes them. Those that an
import adds:

``names.parquet``       picture-id, name: other names of a picture in training files, see `eval.commands.audit`
``queries.parquet``     num_missing_positives: positives that the pool lacks, which stay in every denominator;
                        picture_ids: ids of the pictures, joined by "+"; answers: the right answer in words, see `eval.commands.rag`
``meta.json``           labels: columns that a model has added, see `eval.judging.label`, and its name

Ties are broken by id everywhere in `eval`. Candidates therefore have two orders: that of the file, in which pictures are
read, and that of ids (`RetrievalSet.corpus_ids`), which the rows in all rankings and judgements refer to.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from eval.sets.tables import SetError, Table, items_of, kinds_of, optional_rows
from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.parts import TextPart, content_of
from rge.common.schema import Item
from rge.identity.set_fingerprint import set_fingerprint

Modality = Literal["both", "text", "image"]
MODALITIES: tuple[Modality, ...] = ("both", "text", "image")
LISTS = ("negatives", "excluded", "candidates")
"""Optional tables of pairs of a query and a candidate."""
NAMES = "names.parquet"
RATIONALES = "rationales.parquet"
UNCATEGORISED = "uncategorised"
RESULT_COLUMNS = {
    "query_id": pa.string(),
    "num_positives": pa.int64(),
    "first_hit_rank": pa.int64(),
    "top10": pa.list_(pa.string()),
    "top10_scores": pa.list_(pa.float64()),
    "rationale": pa.string(),
    "stop_reason": pa.string(),
    "rationale_tokens": pa.int64(),
    "generate_ms": pa.float64(),
    "embed_ms": pa.float64(),
}
"""Columns of per_query.parquet, see `eval.scoring.output_files`, besides metrics and the set's own columns."""
RESERVED = {"id", "text", "image", "instruction", "category", "group", *RESULT_COLUMNS}
"""Columns that figures cannot be reported by; a protocol adds the names of its metrics."""
MAX_REPORT_VALUES = 50
"""Maximum number of values of a column that figures are reported by; longer tables would be unreadable."""


@dataclass(frozen=True)
class RetrievalSet:
    """A checked retrieval set: Q queries in file order, and C candidates in the order of their ids."""

    path: Path
    name: str
    fingerprint: str  # hash of ids and judgements
    meta: dict[str, Any]  # content of ``meta.json``
    queries: list[Item]  # Q items with all modalities
    columns: dict[str, list[str]]
    """Query column (``category``, ``group`` and those of ``report_by``) -> Q strings."""
    report_by: tuple[str, ...]  # query columns, besides ``category``, by which figures are reported
    corpus_ids: list[str]  # C candidate ids, ascending
    file_rows_C: np.ndarray  # row of each candidate in ``corpus.parquet``
    positives: list[tuple[np.ndarray, np.ndarray]]
    """Per query (rows, gains): int32 rows into ``corpus_ids`` ascending, float64 gains > 0."""
    negatives: list[np.ndarray] | None = None
    """Rows of each query, without those that the next two keep out of its ranking; None without the table."""
    excluded: list[np.ndarray] | None = None  # likewise
    candidates: list[np.ndarray] | None = None  # likewise
    num_missing_Q: np.ndarray | None = None
    """Number of positives that the pool lacks, int64; None without such a column."""
    content: str | None = None  # see `with_content`; None until the pictures have been read

    @property
    def query_ids(self) -> list[str]:
        """Q query ids in file order."""
        return [item.id for item in self.queries]

    @property
    def file_order_C(self) -> np.ndarray:
        """Rows of the candidates in the order of ``corpus.parquet``, the inverse of ``file_rows_C``."""
        return np.argsort(self.file_rows_C)

    @cached_property
    def kind_C(self) -> np.ndarray | None:
        """What each candidate is (a text, a picture, both, ...), as a number, (C,) int64; None if all are the same."""
        path = self.path / "corpus.parquet"
        if not path.is_file():
            return None
        kind_C = kinds_of(Table(path))[self.file_rows_C]
        return kind_C if len(np.unique(kind_C)) > 1 else None

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

    def first(self, limit: int | None) -> "RetrievalSet":
        """The set with only its first ``limit`` queries (None: all); the pool and the fingerprint do not change."""
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"it must be at least 1, got {limit}", key="limit")
        columns = {name: values[:limit] for name, values in self.columns.items()}
        per_query = ("queries", "positives", "negatives", "excluded", "candidates", "num_missing_Q")
        tables = {name: getattr(self, name) for name in per_query if getattr(self, name) is not None}
        return replace(self, columns=columns, **{name: table[:limit] for name, table in tables.items()})

    def corpus_items(self) -> Iterator[Item]:
        """Candidates in file order, read lazily, since a pool may exceed the memory; a `SetError` if one is empty."""
        return items_of(Table(self.path / "corpus.parquet"))

    def query_items(self, modality: Modality) -> list[Item]:
        """Queries reduced to a modality: ``text`` drops pictures, pages and clips, ``image`` drops text and instruction.

        A `SetError` if a query would be empty.
        """
        if modality == "both":
            return self.queries
        if modality == "text":
            kept = [Item(q.id, content_of(q.text), q.instruction) for q in self.queries]
        else:
            kept = [
                Item(q.id, tuple(part for part in q.content if not isinstance(part, TextPart)))
                for q in self.queries
            ]
        if empty := [item.id for item in kept if not item.text and not item.is_visual]:
            raise SetError(
                f"{len(empty)} of {len(kept)} queries have no {modality}, and would be empty: {some(empty)}",
                self.path,
                empty[0],
                "query_modality",
            )
        return kept


def load_set(path: str | Path, *, by: Sequence[str] = ()) -> RetrievalSet:
    """Load a retrieval set and check everything except the candidates' pictures; a `SetError` names file and row.

    ``by``: further query columns to report figures by, besides those that ``meta.json`` lists.
    """
    root = find_shipped(path)
    if not root.is_dir():
        raise SetError("it is not a folder", root)
    meta = _meta(root / "meta.json")
    corpus_ids = Table(root / "corpus.parquet").ids()
    table = Table(root / "queries.parquet")
    reported = (*meta.get("report_by", ()), *meta.get("labels", ()), *by)
    query_ids, columns = table.ids(), _query_columns(table, reported)
    corpus_order = sorted(range(len(corpus_ids)), key=corpus_ids.__getitem__)
    query_of = {name: row for row, name in enumerate(query_ids)}
    row_of = {corpus_ids[file_row]: row for row, file_row in enumerate(corpus_order)}
    tables = ["qrels", *(name for name in LISTS if (root / f"{name}.parquet").exists())]
    pairs = {name: _pairs(root / f"{name}.parquet", query_of, row_of) for name in tables}
    # candidates with gain 0 are judged not right
    right = [pair for pair in pairs["qrels"] if pair[2] > 0]
    wanted = RetrievalSet(
        path=root,
        name=meta["name"],
        fingerprint=set_fingerprint(query_ids, corpus_ids, **pairs),
        meta=meta,
        queries=list(items_of(table)),
        columns=columns,
        report_by=tuple(columns)[2:],
        corpus_ids=list(row_of),
        file_rows_C=np.array(corpus_order, np.int64),
        positives=_by_query(right, query_of, row_of),
        num_missing_Q=_num_missing(table),
        **_lists(pairs, query_of, row_of),
    )
    _check_judged(wanted)
    # last, since the messages of the other checks are more specific
    if meta.get("fingerprint", wanted.fingerprint) != wanted.fingerprint:
        raise SetError(
            f"it is {meta['fingerprint']!r}, but the tables next to it have {wanted.fingerprint!r}"
            f": the set was changed after it was written, or only part of it was copied",
            root / "meta.json",
            key="fingerprint",
        )
    return wanted


def _lists(
    pairs: Mapping[str, Sequence[tuple[Any, ...]]], query_of: Mapping[str, int], row_of: Mapping[str, int]
) -> dict[str, Any]:
    lists = {
        name: [rows for rows, _ in _by_query(table, query_of, row_of)]
        for name, table in pairs.items()
        if name != "qrels"
    }
    # a negative that a query's ranking cannot contain does not count
    for name, keep in (("candidates", np.intersect1d), ("excluded", np.setdiff1d)):
        if {name, "negatives"} <= lists.keys():
            lists["negatives"] = list(map(keep, lists["negatives"], lists[name]))
    return lists


def query_column(wanted: RetrievalSet, name: str, words: str = "strings") -> list[Any]:
    """A column of Q strings or integers in ``queries.parquet``."""
    return Table(wanted.path / "queries.parquet").read(name, words)[: len(wanted.queries)]


def paraphrases(wanted: RetrievalSet) -> list[str] | None:
    """The question that each query words, shared by its paraphrases; None if the set does not say."""
    path = wanted.path / "queries.parquet"
    if not path.is_file() or "paraphrase" not in (table := Table(path)).names:
        return None
    return table.read("paraphrase")[: len(wanted.queries)]


def picture_ids(wanted: RetrievalSet) -> list[list[str]]:
    """Ids of each query's pictures in the release; empty lists if unknown."""
    table = Table(wanted.path / "queries.parquet")
    ids_Q = table.read("picture_ids") if "picture_ids" in table.names else [""] * len(wanted.queries)
    return [ids.split("+") if ids else [] for ids in ids_Q[: len(wanted.queries)]]


def reference_answers(wanted: RetrievalSet) -> list[str]:
    """The right answer of each query in words, from the column ``answers`` of ``queries.parquet``; "" for none."""
    table = Table(wanted.path / "queries.parquet")
    texts = table.read("answers", null=True) if "answers" in table.names else []
    return [(text or "").strip() for text in texts[: len(wanted.queries)]] or [""] * len(wanted.queries)


def given_rationales(wanted: RetrievalSet) -> set[tuple[str, str]]:
    """Pairs of a query id and a rationale for one of its right answers, from ``rationales.parquet``; empty without it."""
    rows = optional_rows(wanted.path / RATIONALES, "query-id", "corpus-id", "rationale")
    return {(query, text) for query, _, text in rows}


class _Meta(BaseModel):
    """The keys of meta.json that have a type; null counts as absent."""

    name: str
    fingerprint: str | None = None
    report_by: list[str] | None = None
    notes: list[str] | None = None
    slice_notes: dict[str, dict[str, str]] | None = None
    labels: dict[str, str] | None = None


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        _Meta.model_validate(meta)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise SetError(f"{wrong['msg']}, got {wrong['input']!r}", path, key=where) from None
    except (OSError, ValueError) as error:
        raise SetError(f"it cannot be read: {error}", path) from None
    return {key: value for key, value in meta.items() if value is not None}


def _query_columns(table: Table, report_by: Iterable[str]) -> dict[str, list[str]]:
    """``category``, ``group`` and the columns that figures are reported by."""
    columns = {
        "category": [value or UNCATEGORISED for value in table.read("category", null=True)],
        "group": table.read("group"),
    }
    if "" in columns["group"]:
        name = table.read("id")[columns["group"].index("")]
        raise SetError("it is empty; if the query shares nothing, use its id", table.path, name, "group")
    for name in dict.fromkeys(report_by):
        if name in RESERVED:
            raise SetError("figures cannot be reported by it, since it is reserved", table.path, key=name)
        columns[name] = table.read(name)
        if (num := len(set(columns[name]))) > MAX_REPORT_VALUES:
            raise SetError(
                f"it has {num} values, more than report_by takes ({MAX_REPORT_VALUES})",
                table.path,
                key=name,
                kind="many",
            )
    return columns


def _pairs(path: Path, query_of: Mapping[str, int], row_of: Mapping[str, int]) -> list[tuple[Any, ...]]:
    """The rows of a table: query id, candidate id and, in ``qrels.parquet``, gain."""
    table = Table(path)
    names = ["query-id", "corpus-id"]
    pairs = pd.DataFrame({name: table.read(name) for name in names}, dtype=object)
    wrong = {
        "the query is not in queries.parquet": ~pairs["query-id"].isin(query_of),
        "it is not in corpus.parquet": ~pairs["corpus-id"].isin(row_of),
        "it is listed twice": pairs.duplicated(names),
    }
    if path.stem == "qrels":
        pairs["score"] = np.array(table.read("score", "integers"), dtype=object)
        wrong["its score must be a gain >= 0"] = pairs["score"] < 0
    for reason, bad in wrong.items():
        if bad.any():
            raise SetError(reason, path, *pairs[bad].iloc[0][names])
    return list(pairs.itertuples(index=False, name=None))


def _by_query(
    pairs: Sequence[tuple[Any, ...]], query_of: Mapping[str, int], row_of: Mapping[str, int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each query's rows, int32 and ascending, and their gains, float64 (1 for pairs without gain)."""
    query_N = np.array([query_of[query] for query, *_ in pairs], np.int64)
    row_N = np.array([row_of[name] for _, name, *_ in pairs], np.int32)
    gain_N = np.array([pair[2] if len(pair) > 2 else 1 for pair in pairs], np.float64)
    order = np.lexsort((row_N, query_N))
    stops = np.cumsum(np.bincount(query_N, minlength=len(query_of)))[:-1]
    return list(zip(np.split(row_N[order], stops), np.split(gain_N[order], stops), strict=True))


def _num_missing(table: Table) -> np.ndarray | None:
    name = "num_missing_positives"
    if name not in table.names:
        return None
    missing_Q = np.array(table.read(name, "integers"), np.int64)
    if missing_Q.min(initial=0) < 0:
        raise SetError("it must not be negative", table.path, key=name)
    return missing_Q if missing_Q.any() else None


def _check_judged(wanted: RetrievalSet) -> None:
    """Check that every query has a positive, and that the optional tables leave its positives in its ranking."""
    missing_Q = np.zeros(len(wanted.queries)) if wanted.num_missing_Q is None else wanted.num_missing_Q
    right = [rows for rows, _ in wanted.positives]
    num_Q = [len(rows) + num for rows, num in zip(right, missing_Q, strict=True)]
    if none := [query for query, num in zip(wanted.query_ids, num_Q, strict=True) if not num]:
        raise SetError(
            f"{len(none)} of {len(num_Q)} queries have no positive: {some(none)}",
            wanted.path / "qrels.parquet",
            none[0],
        )
    for name, lost_of, words in (("candidates", np.setdiff1d, "not "), ("excluded", np.intersect1d, "")):
        for query, rows, listed in zip(wanted.query_ids, right, getattr(wanted, name) or (), strict=False):
            if len(lost := lost_of(rows, listed)):
                positive = wanted.corpus_ids[lost[0]]
                raise SetError(
                    f"it is {words}listed, but a positive", wanted.path / f"{name}.parquet", query, positive
                )


def some(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
