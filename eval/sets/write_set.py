"""Write a retrieval set.

It is written beside its place, loaded once with every check of `eval.sets.retrieval_set`, and renamed when it passes: a directory
that carries the name is complete and right.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eval.sets.retrieval_set import ANSWERS, NAMES, RetrievalSet, SetError, load_set, reference_answers
from rge.common.fingerprint import set_fingerprint
from rge.common.images import ImageError, load_image, picture_bytes

WRITE_ROWS = 64
"""Candidates written at once; pictures of a pool do not fit into memory together."""


@dataclass(frozen=True)
class Candidate:
    """One row of the pool. ``image``: encoded bytes, or the path of a picture file."""

    id: str
    text: str | None = None
    image: bytes | Path | None = None


@dataclass(frozen=True)
class Query:
    """One query.

    Attributes:
        id: unique, without white space.
        text: the user's text.
        images: encoded bytes or paths, in the order of the prompt.
        category: slice of the macro mean; None where the benchmark has none.
        group: queries that share it are resampled together.
        instruction: task instruction.
        columns: further columns of ``queries.parquet``, strings or integers, the same for every query.
    """

    id: str
    text: str | None
    images: tuple[bytes | Path, ...]
    category: str | None
    group: str
    instruction: str | None = None
    columns: Mapping[str, str | int] = field(default_factory=dict)


def write_set(
    out: Path,
    *,
    meta: dict[str, Any],
    queries: Sequence[Query],
    corpus: Iterable[Candidate],
    qrels: Sequence[tuple[str, str, int]],
    negatives: Sequence[tuple[str, str]] | None = None,
    excluded: Sequence[tuple[str, str]] | None = None,
    candidates: Sequence[tuple[str, str]] | None = None,
    names: Sequence[tuple[str, str]] = (),
    answers: Sequence[tuple[str, str]] = (),
    embed: bool = True,
    decode: bool = True,
    overwrite: bool = False,
) -> RetrievalSet:
    """Write a retrieval set and load it again.

    Args:
        out: the directory; must not exist, or be a retrieval set if ``overwrite``.
        meta: content of ``meta.json`` besides fingerprint and counts; ``name`` is needed.
        queries: in the order of the file.
        corpus: read once, in the order of the file.
        qrels: (query id, candidate id, gain).
        negatives: explicit negatives.
        excluded: pairs removed from a query's ranking.
        candidates: per-query candidates.
        names: (picture id, another name that it goes by in training files), see `eval.commands.audit`.
        answers: (query id, its answer in words), see `eval.commands.rag`.
        embed: copy pictures into the Parquet files; else their absolute paths are written.
        decode: open every picture, so that a broken one shows now.
        overwrite: replace a set that is already there.

    Raises:
        UserError: ``out`` is taken, a picture cannot be opened, or the set breaks the format.
    """
    if out.exists() and not (overwrite and (out / "meta.json").exists()):
        raise SetError(f"out {out} already exists: give another, or overwrite=true if it is a retrieval set")
    work = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        corpus_ids = _write_corpus(work / "corpus.parquet", corpus, embed=embed, decode=decode)
        _write_queries(work / "queries.parquet", queries, embed=embed, decode=decode)
        pairs = {"negatives": negatives, "excluded": excluded, "candidates": candidates}
        _write_pairs(work / "qrels.parquet", qrels)
        for name, rows in pairs.items():
            if rows is not None:
                _write_pairs(work / f"{name}.parquet", rows)
        if names:
            columns = {"picture-id": [one for one, _ in names], "name": [name for _, name in names]}
            pq.write_table(pa.table(columns), work / NAMES, compression="zstd")
        if answers:
            columns = {"query-id": [one for one, _ in answers], "answer": [text for _, text in answers]}
            pq.write_table(pa.table(columns), work / ANSWERS, compression="zstd")
        fingerprint = set_fingerprint(
            [query.id for query in queries],
            corpus_ids,
            qrels,
            **{name: rows or () for name, rows in pairs.items()},
        )
        counts = {"queries": len(queries), "corpus": len(corpus_ids), "qrels": len(qrels)}
        counts |= {name: len(rows) for name, rows in pairs.items() if rows is not None}
        content = {"split": "test"} | meta | {"counts": counts, "fingerprint": fingerprint}
        (work / "meta.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (work / "README.md").write_text(_CARD.format(name=content["name"]), "utf-8")
        reference_answers(load_set(work))
        shutil.rmtree(out, ignore_errors=True)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return load_set(out)


_CARD = """---
configs:
- config_name: corpus
  data_files: [{{split: test, path: corpus.parquet}}]
- config_name: queries
  data_files: [{{split: test, path: queries.parquet}}]
- config_name: qrels
  data_files: [{{split: test, path: qrels.parquet}}]
---
{name}, written by `python -m eval import`; see meta.json for its source and counts.
"""


def _picture(image: bytes | Path | None, name: str, *, embed: bool, decode: bool) -> bytes | str | None:
    if image is None:
        return None
    ref = image if isinstance(image, bytes) else str(image)
    if decode:
        try:
            load_image(ref)
        except ImageError as error:
            raise SetError(f"picture of {name!r}: {error}") from None
    if isinstance(image, bytes) or not embed:
        return ref
    return picture_bytes(ref)


def _write_corpus(path: Path, corpus: Iterable[Candidate], *, embed: bool, decode: bool) -> list[str]:
    schema = pa.schema(
        [("id", pa.string()), ("image", pa.binary() if embed else pa.string()), ("text", pa.string())]
    )
    ids: list[str] = []
    rows: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

        for one in corpus:
            ids.append(one.id)
            image = _picture(one.image, one.id, embed=embed, decode=decode)
            if isinstance(image, bytes) and not embed:
                raise SetError(
                    f"picture of {one.id!r} comes as bytes, so there is no file to link to: pictures=embed"
                )
            rows.append({"id": one.id, "image": image, "text": one.text or None})
            if len(rows) == (WRITE_ROWS if image is not None else 8192):
                flush()
        flush()
    return ids


def _write_queries(path: Path, queries: Sequence[Query], *, embed: bool, decode: bool) -> None:
    cell = (
        pa.binary() if embed or any(isinstance(i, bytes) for q in queries for i in q.images) else pa.string()
    )
    columns: dict[str, Any] = {
        "id": pa.array([query.id for query in queries], pa.string()),
        "text": pa.array([query.text or None for query in queries], pa.string()),
        "image": pa.array(
            [
                [
                    _picture(one, query.id, embed=pa.types.is_binary(cell), decode=decode)
                    for one in query.images
                ]
                for query in queries
            ],
            pa.list_(cell),
        ),
        "category": pa.array([query.category for query in queries], pa.string()),
        "group": pa.array([query.group for query in queries], pa.string()),
        "instruction": pa.array([query.instruction for query in queries], pa.string()),
    }
    for name in queries[0].columns if queries else ():
        columns[name] = pa.array([query.columns[name] for query in queries])
    pq.write_table(pa.table(columns), path, compression="zstd")


def _write_pairs(path: Path, pairs: Sequence[tuple[Any, ...]]) -> None:
    columns: dict[str, Any] = {
        "query-id": pa.array([pair[0] for pair in pairs], pa.string()),
        "corpus-id": pa.array([pair[1] for pair in pairs], pa.string()),
    }
    if path.stem.startswith("qrels"):
        columns["score"] = pa.array([pair[2] for pair in pairs], pa.int64())
    pq.write_table(pa.table(columns), path, compression="zstd")
