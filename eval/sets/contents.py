"""Hashes of a retrieval set's texts and pictures."""

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.sets.retrieval_set import Modality, RetrievalSet
from rge.common.commands import progress_bar
from rge.common.images import ImageError
from rge.common.parts import ImageRef, with_pictures
from rge.common.schema import Item
from rge.vectors.contents import content_digest, picture_digests


@dataclass(frozen=True)
class Contents:
    """Content hashes of a set, computed before a model is loaded, so that missing pictures are reported early."""

    candidates: list[str]  # in file order
    queries: dict[Modality, list[str]]
    pictures: list[tuple[str, ...]]  # of each query, see `picture_digests`
    own: list[np.ndarray]
    """For each query the candidate rows (in id order) with a byte-identical copy of one of its pictures."""


def contents_of(wanted: RetrievalSet, modalities: Collection[Modality]) -> Contents:
    """Read every picture of a set once and hash all contents; an ImageError if one cannot be read."""
    candidates: list[str] = []
    rows_of_picture: dict[str, list[int]] = {}
    num, desc = len(wanted.corpus_ids), f"{'reading the pool':>17}"
    items = progress_bar(wanted.corpus_items(), desc=desc, total=num, unit="item", delay=2)
    for row, item in zip(wanted.file_order_C.tolist(), items, strict=True):
        of_item = picture_digests(item)
        candidates.append(content_digest(item, of_item))
        for picture in of_item:
            rows_of_picture.setdefault(picture, []).append(row)
    pictures = list(map(picture_digests, wanted.queries))

    def own(of_query: Iterable[str]) -> np.ndarray:
        return np.array(sorted({row for one in of_query for row in rows_of_picture.get(one, [])}), np.int64)

    queries = query_contents(wanted, modalities, pictures)
    return Contents(candidates, queries, pictures, list(map(own, pictures)))


def query_contents(
    wanted: RetrievalSet, modalities: Collection[Modality], pictures: Sequence[tuple[str, ...]]
) -> dict[Modality, list[str]]:
    """Content hashes of the queries in each modality; ``pictures``: see `Contents`."""
    return {
        modality: [
            content_digest(item, of_item if item.pictures else ())
            for item, of_item in zip(wanted.query_items(modality), pictures, strict=True)
        ]
        for modality in modalities
    }


class CandidatesOf:
    """Candidates of some rows (in id order), by row, as a context: pictures inside the set's tables wait in a temporary file.

    Attributes:
        digests: the `content_digest` of each row.
    """

    def __init__(self, wanted: RetrievalSet, rows: Collection[int]):
        self.digests: dict[int, str] = {}
        self._items: dict[int, tuple[Item, list[tuple[int, int] | None]]] = {}
        self._room, end = tempfile.TemporaryFile(), 0
        for row, item in (
            zip(wanted.file_order_C.tolist(), wanted.corpus_items(), strict=True) if rows else ()
        ):
            if row not in rows:
                continue
            self.digests[row] = content_digest(item)
            places: list[tuple[int, int] | None] = []
            for ref in item.pictures:
                places.append((end, len(ref)) if isinstance(ref, bytes) else None)
                if isinstance(ref, bytes):
                    end += self._room.write(ref)
            refs = ("" if isinstance(ref, bytes) else ref for ref in item.pictures)
            self._items[row] = replace(item, content=with_pictures(item.content, refs)), places

    def __enter__(self) -> "CandidatesOf":
        return self

    def __exit__(self, *_: object) -> None:
        self._room.close()

    def __getitem__(self, row: int) -> Item:
        """The candidate of a row."""
        item, places = self._items[row]
        refs = map(self._picture, item.pictures, places)
        return replace(item, content=with_pictures(item.content, refs))

    def _picture(self, ref: ImageRef, place: tuple[int, int] | None) -> ImageRef:
        if place is None:
            return ref
        self._room.seek(place[0])
        return self._room.read(place[1])


def with_content(wanted: RetrievalSet, candidates: Sequence[str] | None = None) -> RetrievalSet:
    """The set with a hash of all its content; an `ImageError` if a picture cannot be read.

    Besides the fingerprint (ids and judgements), this covers all texts, instructions and pictures, and the columns that
    the set groups figures by. ``candidates``: content digest of each in file order; None: read all pictures of the pool.
    """
    if candidates is None:
        candidates = list(map(content_digest, wanted.corpus_items()))
    digest = hashlib.sha256(wanted.fingerprint.encode())
    rows: list[list[str]] = sorted(
        [wanted.corpus_ids[r], one] for r, one in zip(wanted.file_order_C, candidates, strict=True)
    )
    # without those of by=, which belong to a command and not to the set
    own = sorted({"category", "group", *wanted.meta.get("report_by", [])})
    columns = [wanted.columns[name] for name in own]
    missing = [] if wanted.num_missing_Q is None else [list(map(str, wanted.num_missing_Q.tolist()))]
    queries = zip(wanted.queries, *columns, *missing, strict=True)
    rows += sorted([query.id, content_digest(query), *values] for query, *values in queries)
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return replace(wanted, content=digest.hexdigest())


def with_readable_content(wanted: RetrievalSet) -> tuple[RetrievalSet, list[str]]:
    """`with_content` for rankings from elsewhere: missing pictures are a warning instead of an error."""
    try:
        return with_content(wanted), []
    except ImageError as error:
        return wanted, [f"the set's texts and pictures are not part of this result's identity: {error}"]
