"""Hashes of a retrieval set's texts and pictures."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.sets.retrieval_set import Modality, RetrievalSet
from rge.common.commands import progress_bar
from rge.common.images import ImageError, picture_bytes
from rge.common.schema import Item


@dataclass(frozen=True)
class Contents:
    """Content hashes of a set, computed before a model is loaded, so that missing pictures are reported early."""

    candidates: list[str]  # in file order
    queries: dict[Modality, list[str]]
    own: list[np.ndarray]
    """For each query the candidate rows (in id order) with a byte-identical copy of one of its pictures."""


def contents_of(wanted: RetrievalSet, modalities: Collection[Modality]) -> Contents:
    """Read every picture of a set once and hash all contents; an ImageError if one cannot be read."""
    candidates: list[str] = []
    rows_of_picture: dict[str, list[int]] = {}
    items = progress_bar(
        wanted.corpus_items(),
        desc=f"{'reading the pool':>17}",
        total=len(wanted.corpus_ids),
        unit="item",
        delay=2,
    )
    for row, item in zip(wanted.file_order_C.tolist(), items, strict=True):
        content, pictures = content_digest(item)
        candidates.append(content)
        for picture in pictures:
            rows_of_picture.setdefault(picture, []).append(row)
    queries = {
        modality: [content_digest(item)[0] for item in wanted.query_items(modality)]
        for modality in modalities
    }

    def own(query: Item) -> np.ndarray:
        rows = {row for one in content_digest(query)[1] for row in rows_of_picture.get(one, [])}
        return np.array(sorted(rows), np.int64)

    return Contents(candidates, queries, list(map(own, wanted.queries)))


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
