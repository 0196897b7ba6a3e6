"""Choose example queries and show them as cards."""

import base64
import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from PIL import Image

from eval.pages.evaluations import RANK_COLUMN, TOP_COLUMN, Evaluation
from eval.pages.wording import slice_order, tag
from eval.sets.retrieval_set import UNCATEGORISED, RetrievalSet, given_rationales
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, open_picture, picture_bytes
from rge.common.parts import ImagePart, TextPart
from rge.common.schema import Item
from rge.content.preview import SHOWN, sheet, shown

MAX_SIDE_PX = 360  # longest side of an embedded picture, the size of the enlarged view
MAX_PICTURE_BYTES = 16_384  # larger files are re-encoded even if their sides are short enough
WEBP_QUALITY = 72
NAME_COLUMNS = ("concept", "name", "label", "title")
"""Columns of corpus.parquet with names of candidates; the first existing one is used."""
NUM_SHOWN = 5
"""Number of candidates shown per ranking."""
MAX_WANTED = 2
"""Number of right answers shown next to a ranking."""


def choose_examples(
    per_query: pd.DataFrame, *, success_rank: int, num: int, strata: Sequence[str] = ()
) -> list[str]:
    """Draw up to ``num`` queries: successes and failures alternate, and both alternate between the strata.

    Queries are ordered by a hash of their id, so the choice depends on neither file order nor the version of a random
    generator. Within a stratum, groups not shown yet come first. If there are too few of one kind, there are more
    of the other. A query counts as found if its first right candidate has the ``success_rank`` or a better one. Strata are
    combinations of columns.
    """
    groups = per_query["group"]
    is_success = per_query[RANK_COLUMN].between(1, success_rank)
    halves: list[list[str]] = []
    for wanted in (True, False):
        members: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for query_id, row in per_query.loc[is_success == wanted, list(strata)].iterrows():
            members[tuple(map(str, row))].append(str(query_id))
        queues = [
            sorted(members[key], key=lambda name: hashlib.sha256(f"0\n{name}".encode()).hexdigest())
            for key in sorted(members)
        ]
        halves.append(_in_turn(queues, groups))
    hits, misses = halves
    num_hits = min(len(hits), max(num - num // 2, num - len(misses)))
    hits, misses = hits[:num_hits], misses[: max(num - num_hits, 0)]
    return [name for pair in zip_longest(hits, misses) for name in pair if name is not None]


def _in_turn(queues: list[list[str]], groups: pd.Series) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    while any(queues):
        for queue in filter(None, queues):
            fresh = next((i for i, name in enumerate(queue) if str(groups[name]) not in seen), 0)
            name = queue.pop(fresh)
            seen.add(str(groups[name]))
            order.append(name)
    return order


@dataclass(frozen=True)
class Picture:
    """An embedded picture; ``data`` is a data URI."""

    name: str
    width: int
    height: int
    data: str


class Gallery:
    """The distinct pictures of a page, each of which is embedded once."""

    def __init__(self) -> None:
        self._by_digest: dict[str, Picture] = {}

    @property
    def pictures(self) -> list[Picture]:
        """The pictures in the order in which they were added."""
        return list(self._by_digest.values())

    def shown(self, item: Item, owner: str) -> list[Picture]:
        """An item's pictures, pages and frames in their order, of a document or a clip the first few."""
        pictures: list[Picture] = []
        try:
            for part in item.content:
                if isinstance(part, ImagePart):
                    pictures.append(self.add(picture_bytes(part.image)))
                else:
                    pictures += [self.add(image) for image in shown(part)]
        except ImageError as error:
            raise UserError.caused_by(error, place=owner) from error
        return pictures

    def cover(self, item: Item, owner: str) -> Picture | None:
        """One picture of all that an item shows; None for a text."""
        visual = [part for part in item.content if not isinstance(part, TextPart)]
        if len(visual) == 1 and isinstance(visual[0], ImagePart):
            return self.shown(item, owner)[0]
        try:
            pictures = [image for part in visual for image in shown(part)][:SHOWN]
            return self.add(sheet(pictures)) if pictures else None
        except ImageError as error:
            raise UserError.caused_by(error, place=owner) from error

    def add(self, picture: bytes | Image.Image) -> Picture:
        """Embed a picture, unless it already is."""
        data = picture if isinstance(picture, bytes) else repr(picture.size).encode() + picture.tobytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._by_digest:
            self._by_digest[digest] = _embed(f"p{len(self._by_digest)}", picture)
        return self._by_digest[digest]


def _embed(name: str, picture: bytes | Image.Image) -> Picture:
    image, data, kind = load_image(picture), b"", None
    if isinstance(picture, bytes) and max(image.size) <= MAX_SIDE_PX and len(picture) <= MAX_PICTURE_BYTES:
        with open_picture(picture) as original:
            upright = original.size == image.size and not original.getexif()
            data, kind = picture, Image.MIME.get(original.format or "") if upright else None
    if kind not in ("image/webp", "image/png", "image/jpeg"):
        image.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=WEBP_QUALITY, method=6)
        data, kind = buffer.getvalue(), "image/webp"
    return Picture(name, *image.size, f"data:{kind};base64,{base64.b64encode(data).decode()}")


class SetView:
    """Queries of one retrieval set and what evaluations found for them, for cards; ``prefix``: of ids in a suite."""

    def __init__(
        self,
        loaded: RetrievalSet,
        evaluations: Sequence[Evaluation],
        queries: Sequence[str],
        gallery: Gallery,
        prefix: str = "",
    ):
        self._path, self._gallery = loaded.path, gallery
        place = {prefix + name: row for row, name in enumerate(loaded.query_ids)}
        self._queries = {query: loaded.queries[place[query]] for query in queries}
        self._right: dict[str, list[str]] = {}
        self._wrong: dict[str, set[str]] = {}
        needed, name_of = set[str](), loaded.corpus_ids.__getitem__
        for query in queries:
            rows, gains = loaded.positives[place[query]]
            right = self._right[query] = list(map(name_of, rows[np.lexsort((rows, -gains))]))
            listed = () if loaded.negatives is None else loaded.negatives[place[query]].tolist()
            # an explicit negative that is also a positive counts as a positive, as in the metrics
            self._wrong[query] = set(map(name_of, listed)) - set(right)
            needed.update(*(_top(one.per_query.loc[query]) for one in evaluations), right[:MAX_WANTED])
        items = loaded.corpus_items() if needed else ()
        self._corpus = {item.id: item for item in items if item.id in needed}
        self._names = _names(loaded.path / "corpus.parquet")

    def card(self, query: str, row: pd.Series, columns: Sequence[str], **data: str) -> dict[str, Any]:
        """What every card shows of a query, and its ``data`` for filters; ``row``: its values."""
        item = self._queries[query]
        values = {column: str(row[column]) for column in columns}
        facets = {f"f{place}": value for place, value in enumerate(values.values())}
        return {
            "pictures": self._gallery.shown(item, f"query {item.id!r} of {self._path}"),
            "text": item.text,
            "num_positives": len(self._right[query]),
            "data": {"query": query, **facets, "outcome": outcome_of(as_rank(row[RANK_COLUMN])), **data},
            "tags": [tag(column, value) for column, value in values.items() if value != UNCATEGORISED],
        }

    def found(self, query: str, evaluation: Evaluation, own: Sequence[Picture]) -> dict[str, Any]:
        """What an evaluation wrote and ranked first; ``own``: the query's pictures."""
        row = evaluation.per_query.loc[query]
        rationale = row.get("rationale")
        return {
            "rank": as_rank(row[RANK_COLUMN]),
            "rationale": rationale if isinstance(rationale, str) and rationale else None,
            "results": [
                (candidate := self._candidate(name))
                | {
                    "rank": rank,
                    "hit": name in self._right[query],
                    "negative": name in self._wrong[query],
                    "is_query": candidate["picture"] in own,
                }
                for rank, name in enumerate(_top(row), start=1)
            ],
        }

    def wanted(self, query: str) -> list[dict[str, Any]]:
        """A query's best right answers."""
        return [self._candidate(name) for name in self._right[query][:MAX_WANTED]]

    def _candidate(self, name: str) -> dict[str, Any]:
        item = self._corpus[name]
        owner = f"candidate {name!r} of {self._path}"
        picture = self._gallery.cover(item, owner)
        alt = item.text or self._names.get(name, name)
        return {"id": name, "picture": picture, "text": item.text, "alt": alt}


def _names(path: Path) -> dict[str, str]:
    """Names of candidates, as text alternatives of their pictures; empty if the set has none."""
    known = pq.read_schema(path).names
    column = next((name for name in NAME_COLUMNS if name in known), None)
    if column is None:
        return {}
    table = pq.read_table(path, columns=["id", column]).to_pydict()
    pairs = zip(table["id"], table[column], strict=True)
    return {key: str(value).replace("_", " ") for key, value in pairs if value}


def varying(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """The columns that have more than one value."""
    return [name for name in columns if name in frame and frame[name].nunique() > 1]


def _top(measured: pd.Series) -> list[str]:
    """The candidates that a card shows of a query's ranking."""
    return list(map(str, measured[TOP_COLUMN][:NUM_SHOWN]))


def filters_of(frame: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Filters of the cards: ``f0``, ``f1`` ... for query columns, and the first hit's rank; with labels of their values."""
    facets = [
        {
            "name": f"f{place}",
            "label": name.replace("_", " ").capitalize(),
            "values": [(v, tag("", v)) for v in sorted(set(map(str, frame[name])), key=slice_order)],
        }
        for place, name in enumerate(columns)
    ]
    return [*facets, {"name": "outcome", "label": "First hit", "values": list(OUTCOMES.items())}]


def as_rank(value: Any) -> int | None:
    """A rank as integer; None if missing or 0, such as without a right candidate in the ranking."""
    return None if pd.isna(value) or value < 1 else int(value)


OUTCOMES = {
    "first": "rank 1",
    "near": f"rank 2–{NUM_SHOWN}",
    "below": f"below {NUM_SHOWN}",
    "none": "not ranked",
}
"""Where the first right answer is, with labels; ``near`` means that the card shows it."""


def outcome_of(rank: int | None) -> str:
    """The key in `OUTCOMES` of the first right answer's rank."""
    return "none" if rank is None else "first" if rank == 1 else "near" if rank <= NUM_SHOWN else "below"


def cards_of(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    loaded: RetrievalSet,
    metric: str,
    num: int,
    gallery: Gallery,
) -> dict[str, Any]:
    """Template context of the cards."""
    k = re.search(r"@(\d+)", metric)
    success_rank = min(int(k.group(1)), NUM_SHOWN) if k else 1
    strata = varying(main.per_query, ("category", *loaded.report_by))
    chosen = choose_examples(main.per_query, success_rank=success_rank, num=num, strata=strata)
    view = SetView(loaded, [main], chosen, gallery)
    given = given_rationales(loaded)
    texts = {rationale for _, rationale in given}
    cards = []
    for query in chosen:
        measured = main.per_query.loc[query]
        card = view.card(query, measured, strata)
        card |= view.found(query, main, card["pictures"])
        of_query = (query, card["rationale"]) in given
        card |= {
            "forced": measured.get("stop_reason") == "forced",
            "tokens": as_rank(measured.get("rationale_tokens")),
            "wanted": [] if any(result["hit"] for result in card["results"]) else view.wanted(query),
            "ranks": [(e.label, as_rank(e.per_query.at[query, RANK_COLUMN]), e is main) for e in evaluations],
            "says": "right" if of_query else "another" if card["rationale"] in texts else "own",
        }
        cards.append(card)
    found, missed = (
        [card for card in cards if (card["rank"] in range(1, success_rank + 1)) is success]
        for success in (True, False)
    )
    outcomes = Counter(map(outcome_of, map(as_rank, main.per_query[RANK_COLUMN])))
    return {
        "cards": cards,
        "found": _opening(found, given="right"),
        "missed": _opening(missed, given="another"),
        "opens_with_given": bool(given),
        "num_successes": len(found),
        "num_negatives": sum(result["negative"] for card in cards for result in card["results"]),
        "num_forced": sum(card["forced"] for card in cards),
        "reasons": main.mode[0] == "reasoning",
        "success_rank": success_rank,
        "num_first": outcomes["first"],
        "num_near": outcomes["near"],
        "num_below": outcomes["below"] + outcomes["none"],
        "num_queries": len(main.per_query),
        "filters": filters_of(main.per_query, strata),
        "strata": [name.replace("_", " ") for name in strata],
    }


def _opening(cards: Sequence[dict[str, Any]], *, given: str) -> dict[str, Any] | None:
    """The opening card: the first, preferably one whose rationale occurs in the set, since a model's own may contradict its result.

    A failure with the rationale of ``another`` query shows what the query was mistaken for.
    """
    order = (given, "right", "another", "own")  # has the set this rationale, for this query or another?
    return min(cards, key=lambda card: order.index(card["says"]), default=None)
