"""Write a retrieval set.

The set is written to a temporary directory, checked by `eval.sets.retrieval_set`, and renamed if it is valid.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eval.sets.retrieval_set import NAMES, RetrievalSet, load_set
from eval.sets.tables import SetError
from rge.common.files import replacing_folder, write_json
from rge.common.images import ImageError, load_image, picture_bytes
from rge.common.parts import (
    Content,
    ImagePart,
    ImageRef,
    Part,
    PdfPart,
    VideoPart,
    parts_to_json,
    pictures_of,
)
from rge.content import pdf
from rge.content.video import probe
from rge.identity.set_fingerprint import set_fingerprint

WRITE_ROWS = 64
"""Candidates with pictures written at a time, since a pool may be larger than memory; of texts 128 times as many."""


@dataclass(frozen=True)
class Candidate:
    """One row of the pool. ``image``: encoded bytes, or the path of a picture file; ``content``: parts, instead of text and image."""

    id: str
    text: str | None = None
    image: bytes | Path | None = None
    content: Content = ()


@dataclass(frozen=True)
class Query:
    """One query; it needs a text, a picture or ``content``: parts in their order, instead of both."""

    id: str  # unique, without white space
    text: str | None = None  # the user's text; None for a query of pictures only
    images: tuple[bytes | Path, ...] = ()  # encoded bytes or paths, in the order of the prompt
    category: str | None = None  # slice of the macro mean, if any
    group: str | None = None
    """Queries that share it, or a picture, are resampled together; None: the query's id."""
    instruction: str | None = None  # task instruction
    content: Content = ()
    columns: Mapping[str, str | int] = field(default_factory=dict)
    """Further columns of ``queries.parquet``, strings or integers, the same for every query."""


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
    embed: bool = True,
    decode: bool = True,
    overwrite: bool = False,
) -> RetrievalSet:
    """Write a retrieval set and load it; a `UserError` if ``out`` exists, a picture is broken, or the set is invalid.

    ``decode``: open all pictures to detect broken ones. ``embed``: copy pictures into the tables instead of linking to
    them. ``corpus`` is iterated over once.
    """
    with replacing_folder(out, overwrite=overwrite) as work:
        place = _Pictures(work, embed=embed, decode=decode)
        corpus_ids = _write_corpus(work / "corpus.parquet", corpus, place)
        _write_queries(work / "queries.parquet", queries, place)
        given = {"negatives": negatives, "excluded": excluded, "candidates": candidates}
        lists = {name: pairs for name, pairs in given.items() if pairs is not None}
        _write_rows(work / "qrels.parquet", ("query-id", "corpus-id", "score"), qrels)
        for name, pairs in lists.items():
            _write_rows(work / f"{name}.parquet", ("query-id", "corpus-id"), pairs)
        if names:
            _write_rows(work / NAMES, ("picture-id", "name"), names)
        fingerprint = set_fingerprint([query.id for query in queries], corpus_ids, qrels, **lists)
        counts = {"queries": len(queries), "corpus": len(corpus_ids), "qrels": len(qrels)}
        counts |= {name: len(pairs) for name, pairs in lists.items()}
        content = {"split": "test"} | meta | {"counts": counts, "fingerprint": fingerprint}
        write_json(work / "meta.json", content)
        (work / "README.md").write_text(_CARD.format(name=content["name"]), "utf-8")
        load_set(work)
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
{name}, written by `rge eval import`; see meta.json for its source and counts.
"""


@dataclass
class _Pictures:
    """Makes table cells of pictures: their bytes, or the name of a hard link in the set's folder."""

    root: Path
    embed: bool
    decode: bool
    num_links: int = 0
    files: dict[Path, str] = field(default_factory=dict)  # documents and clips in the set, by where they were

    def content(self, content: Content, name: str) -> str | None:
        """The cell of parts: JSON, whose files are in the set's folder."""
        if not content:
            return None
        return json.dumps(
            parts_to_json(tuple(self._part(part, name) for part in content)), ensure_ascii=False
        )

    def _part(self, part: Part, name: str) -> Part:
        if isinstance(part, ImagePart):
            return replace(part, image=self._picture(part.image, name))
        if isinstance(part, PdfPart):
            if self.decode:
                pdf.page_sizes(part.pdf, part.pages)
            return replace(part, pdf=self._file(part.pdf, ".pdf", name))
        if isinstance(part, VideoPart):
            video = part.video
            if isinstance(video, tuple):
                return replace(part, video=tuple(self._picture(frame, name) for frame in video))
            if self.decode:
                probe(video)
            return replace(part, video=self._file(video, ".mp4", name))
        return part

    def _picture(self, ref: ImageRef, name: str) -> str:
        if self.decode:
            self.check(ref, name)
        if isinstance(ref, str) and ".parquet#" in ref:
            ref = picture_bytes(ref)
        return self._file(ref, ".png", name)

    def _file(self, ref: str | bytes, ending: str, name: str) -> str:
        """The name in the set of a file that it links to, or a copy of, once for all rows that show it."""
        known = Path(os.path.abspath(ref)) if isinstance(ref, str) else Path(hashlib.sha256(ref).hexdigest())
        if known not in self.files:
            own = f"{len(self.files):06d}" + ("" if isinstance(ref, bytes) else f"_{known.stem[:80]}")
            target = (
                self.root / "files" / f"{own}{ending if isinstance(ref, bytes) else known.suffix.lower()}"
            )
            target.parent.mkdir(exist_ok=True)
            if isinstance(ref, bytes):
                target.write_bytes(ref)
            else:
                try:
                    shutil.copyfile(known, target)
                except OSError as error:
                    raise SetError(f"it cannot be copied: {error.strerror}", ref, name) from None
            self.files[known] = target.relative_to(self.root).as_posix()
        return self.files[known]

    def check(self, ref: ImageRef, name: str) -> None:
        """A `SetError` if a picture cannot be decoded."""
        try:
            load_image(ref)
        except ImageError as error:
            raise SetError.caused_by(error, place=name) from None

    def cell(self, image: bytes | Path | None, name: str) -> bytes | str | None:
        """The cell of a picture; ``name``: the item's id, for messages."""
        if image is None:
            return None
        ref = image if isinstance(image, bytes) else str(image)
        if self.decode:
            self.check(ref, name)
        if isinstance(ref, bytes) or self.embed:
            return picture_bytes(ref)
        link = self.root / "pictures" / f"{self.num_links:07d}{Path(ref).suffix.lower()}"
        self.num_links += 1
        try:
            link.parent.mkdir(exist_ok=True)
            os.link(os.path.realpath(ref), link)
        except OSError as error:
            raise SetError(f"it cannot be linked ({error.strerror}): use pictures=embed", ref, name) from None
        return link.relative_to(self.root).as_posix()


def joined_groups(queries: Sequence[Query]) -> list[str]:
    """Group of each query; groups that share a picture are joined under the alphabetically first name."""
    parent: dict[tuple[int, str], tuple[int, str]] = {}

    def root(node: tuple[int, str]) -> tuple[int, str]:
        while (above := parent.setdefault(node, node)) != node:
            node = above
        return node

    for query in queries:
        group = root((0, query.group or query.id))
        for image in (*query.images, *pictures_of(query.content)):
            data = image if isinstance(image, bytes) else picture_bytes(str(image))
            group, other = sorted((root(group), root((1, hashlib.sha256(data).hexdigest()))))
            parent[other] = group
    return [root((0, query.group or query.id))[1] for query in queries]


def _write_corpus(path: Path, corpus: Iterable[Candidate], place: _Pictures) -> list[str]:
    candidates = iter(corpus)
    first = next(candidates, None)
    columns = {"id": pa.string(), "image": pa.binary() if place.embed else pa.string(), "text": pa.string()}
    if first is not None and first.content:
        columns["content"] = pa.string()
    schema = pa.schema(columns)
    ids: list[str] = []
    rows: list[dict[str, Any]] = []
    weight = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for candidate in chain([] if first is None else [first], candidates):
            ids.append(candidate.id)
            if candidate.content and "content" not in columns:
                raise SetError(
                    "the first candidate has none: give it to all", place=candidate.id, key="content"
                )
            image = place.cell(candidate.image, candidate.id)
            if isinstance(image, bytes) and not place.embed:
                raise SetError(
                    "it is no file to link to: pass pictures=embed", place=candidate.id, key="image"
                )
            content = place.content(candidate.content, candidate.id)
            rows.append(
                {"id": candidate.id, "image": image, "text": candidate.text or None, "content": content}
            )
            weight += 128 if image else 1
            if weight >= 128 * WRITE_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows, weight = [], 0
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return ids


def _write_queries(path: Path, queries: Sequence[Query], place: _Pictures) -> None:
    binary = place.embed or any(isinstance(image, bytes) for query in queries for image in query.images)
    place = replace(place, embed=binary)
    names = ("id", "text", "image", "category", "group", "instruction")
    columns = dict.fromkeys(
        (*names, "content") if any(query.content for query in queries) else names, pa.string()
    )
    schema = pa.schema(columns | {"image": pa.list_(pa.binary() if binary else pa.string())})
    rows = [
        {
            **vars(query),
            "text": query.text or None,
            "image": [place.cell(one, query.id) for one in query.images],
            "content": place.content(query.content, query.id),
            "group": group,
        }
        for query, group in zip(queries, joined_groups(queries), strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema)
    more = pa.Table.from_pylist([dict(query.columns) for query in queries])
    for name in more.column_names:
        table = table.append_column(name, more[name])
    pq.write_table(table, path, compression="zstd")


def _write_rows(path: Path, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    schema = pa.schema([(name, pa.int64() if name == "score" else pa.string()) for name in columns])
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    pq.write_table(pa.Table.from_pylist(cells, schema), path, compression="zstd")
