"""Choose example queries and show them as cards: pictures (each embedded once), rationales, rankings and right answers."""

import base64
import hashlib
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from PIL import Image

from eval.pages.evaluations import RANK_COLUMN, TOP_COLUMN, Evaluation
from eval.pages.wording import slice_order, tag
from eval.sets.retrieval_set import RetrievalSet, given_rationales
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, picture_bytes
from rge.common.schema import ImageRef

MAX_SIDE_PX = 360  # longest side of an embedded picture, the size of the enlarged view
MAX_PICTURE_BYTES = 16_384  # larger files are re-encoded even if their sides are short enough
WEBP_QUALITY = 72
NAME_COLUMNS = ("concept", "name", "label", "title")
"""Columns of corpus.parquet with names of candidates; the first existing one is used."""
NUM_SHOWN = 5
"""Number of candidates shown per ranking."""
MAX_WANTED = 2
"""Number of right answers shown beside a ranking."""


def choose_examples(
    per_query: pd.DataFrame, *, success_rank: int, num: int, strata: Sequence[str] = (), seed: int = 0
) -> list[str]:
    """Draw up to ``num`` queries: successes and failures alternate, and both alternate between the strata.

    Queries are ordered by a hash of the seed and their id, so the choice depends on neither file order nor the version of
    a random generator. Within a stratum, groups not shown yet come first. If there are too few of one kind, there are more
    of the other. A query counts as found if its first right candidate has the ``success_rank`` or a better one. Strata are
    combinations of columns.
    """
    groups = per_query["group"] if "group" in per_query else pd.Series(per_query.index, per_query.index)
    is_success = per_query[RANK_COLUMN].between(1, success_rank)
    halves: list[list[str]] = []
    for wanted in (True, False):
        members: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for query_id, row in per_query.loc[is_success == wanted, list(strata)].iterrows():
            members[tuple(map(str, row))].append(str(query_id))
        queues = [
            sorted(members[key], key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).hexdigest())
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


@dataclass
class Gallery:
    """The distinct pictures of the page; cards refer to them by name."""

    pictures: list[Picture] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Width and height by name."""
        return {picture.name: (picture.width, picture.height) for picture in self.pictures}

    def add(self, ref: ImageRef, owner: str) -> str:
        """Embed a picture, unless it already is, and return its name on the page."""
        try:
            data = picture_bytes(ref)
            digest = hashlib.sha256(data).hexdigest()
            if digest not in self._names:
                name = f"p{len(self.pictures)}"
                self.pictures.append(_embed(name, data))
                self._names[digest] = name
        except ImageError as error:
            raise UserError(f"{owner}: {error}") from error
        return self._names[digest]


def _embed(name: str, data: bytes) -> Picture:
    image = load_image(data)
    small = max(image.size) <= MAX_SIDE_PX and len(data) <= MAX_PICTURE_BYTES
    with Image.open(io.BytesIO(data)) as original:
        kind = Image.MIME.get(original.format or "")
        upright = original.size == image.size and not original.getexif()
    if not (small and upright and kind in ("image/webp", "image/png", "image/jpeg")):
        image.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=WEBP_QUALITY, method=6)
        data, kind = buffer.getvalue(), "image/webp"
    return Picture(name, *image.size, f"data:{kind};base64,{base64.b64encode(data).decode()}")


class SetView:
    """Queries and candidates of one retrieval set, for cards; ``rankings``: query -> first candidates of all rankings shown."""

    def __init__(
        self, loaded: RetrievalSet, rankings: Mapping[str, Sequence[Sequence[str]]], gallery: Gallery
    ):
        self._path, self._gallery = loaded.path, gallery
        place = {query_id: row for row, query_id in enumerate(loaded.query_ids)}
        self._queries = {query_id: loaded.queries[place[query_id]] for query_id in rankings}
        self.right: dict[str, list[str]] = {}
        self._wrong: dict[str, set[str]] = {}
        needed, name_of = set[str](), loaded.corpus_ids.__getitem__
        for query_id, lists in rankings.items():
            rows, gains = loaded.positives[place[query_id]]
            best_first = rows[np.lexsort((rows, -gains))]
            right = self.right[query_id] = list(map(name_of, best_first))
            listed = () if loaded.negatives is None else loaded.negatives[place[query_id]].tolist()
            # an explicit negative that is also a positive counts as a positive, as in the metrics
            self._wrong[query_id] = set(map(name_of, listed)) - set(right)
            needed.update(*lists, right[:MAX_WANTED])
        items = loaded.corpus_items() if needed else ()
        self._corpus = {item.id: item for item in items if item.id in needed}
        self._names = _names(loaded.path / "corpus.parquet")

    def query(self, query_id: str) -> dict[str, Any]:
        """Pictures, text and number of right answers of a query."""
        item = self._queries[query_id]
        pictures = [self._gallery.add(ref, f"query {query_id!r} of {self._path}") for ref in item.images]
        return {"pictures": pictures, "text": item.text, "num_positives": len(self.right[query_id])}

    def wanted(self, query_id: str) -> list[dict[str, Any]]:
        """A query's best right answers."""
        return [self._candidate(name) for name in self.right[query_id][:MAX_WANTED]]

    def ranked(self, query_id: str, names: Sequence[str], own: Sequence[str]) -> list[dict[str, Any]]:
        """Candidates with ranks and marks; ``own`` are the query's pictures on the page."""
        return [
            (candidate := self._candidate(name))
            | {
                "rank": rank,
                "hit": name in self.right[query_id],
                "negative": name in self._wrong[query_id],
                "is_query": candidate["picture"] in own,
            }
            for rank, name in enumerate(names, start=1)
        ]

    def _candidate(self, name: str) -> dict[str, Any]:
        item = self._corpus[name]
        owner = f"candidate {name!r} of {self._path}"
        picture = self._gallery.add(item.images[0], owner) if item.images else None
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


def top_of(per_query: pd.DataFrame, query_id: str) -> list[str]:
    """The candidates of a ranking that a card shows."""
    return list(map(str, per_query.at[query_id, TOP_COLUMN][:NUM_SHOWN]))


def facets(frame: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Filters of the cards: ``f0``, ``f1`` ... for query columns, with labels of their values."""
    return [
        {
            "name": f"f{place}",
            "label": name.replace("_", " ").capitalize(),
            "values": [(v, tag("", v)) for v in sorted(set(map(str, frame[name])), key=slice_order)],
        }
        for place, name in enumerate(columns)
    ]


def as_text(value: Any) -> str | None:
    """A cell's text; None for an empty one."""
    return value if isinstance(value, str) and value else None


def as_rank(value: Any) -> int | None:
    """A rank as integer; None if missing or 0, such as without a right candidate in the ranking."""
    return None if pd.isna(value) or value < 1 else int(value)


def outcome_of(rank: int | None) -> str:
    """Whether the first right answer is ``first``, ``near`` (shown on the card) or ``below``."""
    return "below" if rank is None or rank > NUM_SHOWN else "first" if rank == 1 else "near"


_FIRST_HIT: dict[str, Any] = {
    "name": "outcome",
    "label": "First hit",
    "values": [
        ("first", "rank 1"),
        ("near", f"rank 2–{NUM_SHOWN}"),
        ("below", f"below {NUM_SHOWN}"),
    ],
}


def cards_of(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    loaded: RetrievalSet,
    metric: str,
    num: int,
    seed: int,
    gallery: Gallery,
) -> dict[str, Any]:
    """Template context of the cards."""
    k = re.search(r"@(\d+)", metric)
    success_rank = min(int(k.group(1)), NUM_SHOWN) if k else 1
    strata = varying(main.per_query, ("category", *loaded.report_by))
    chosen = choose_examples(main.per_query, success_rank=success_rank, num=num, strata=strata, seed=seed)
    tops = {query: top_of(main.per_query, query) for query in chosen}
    view = SetView(loaded, {query: [names] for query, names in tops.items()}, gallery)
    given = given_rationales(loaded)
    right = pd.Series(given, dtype=object).groupby(level=0).agg(set).to_dict() if given else {}
    cards = []
    for query in chosen:
        card = _card(query, main.per_query.loc[query], tops[query], view, strata)
        card["success"] = (card["rank"] or math.inf) <= success_rank
        of_query = card["rationale"] in right.get(query, ())
        card["says"] = "right" if of_query else "another" if card["rationale"] in given.values() else "own"
        card["ranks"] = [
            (e.label, as_rank(e.per_query.at[query, RANK_COLUMN]), e is main) for e in evaluations
        ]
        cards.append(card)
    outcomes = Counter(map(outcome_of, map(as_rank, main.per_query[RANK_COLUMN])))
    return {
        "cards": cards,
        **_of_cards(cards),
        "opens_with_given": bool(given),
        "reasons": main.mode[0] == "reasoning",
        "success_rank": success_rank,
        **{f"num_{name}": outcomes[name] for name, _ in _FIRST_HIT["values"]},
        "num_queries": len(main.per_query),
        "filters": [*facets(main.per_query, strata), _FIRST_HIT],
        "strata": [name.replace("_", " ") for name in strata],
    }


def _of_cards(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The opening success and failure, and counts of successes, negatives and forced stops."""
    found, missed = ([card for card in cards if card["success"] is success] for success in (True, False))
    return {
        "found": _opening(found, given="right"),
        "missed": _opening(missed, given="another"),
        "num_successes": len(found),
        "num_negatives": sum(result["negative"] for card in cards for result in card["results"]),
        "num_forced": sum(card["forced"] for card in cards),
    }


def _card(
    query_id: str, measured: pd.Series, top: Sequence[str], view: SetView, strata: Sequence[str]
) -> dict[str, Any]:
    shown_query = view.query(query_id)
    rank = as_rank(measured[RANK_COLUMN])
    values = [str(measured[name]) for name in strata]
    return shown_query | {
        "data": {"query": query_id}
        | {f"f{place}": value for place, value in enumerate(values)}
        | {"outcome": outcome_of(rank)},
        "tags": [tag(name, value) for name, value in zip(strata, values, strict=True)],
        "rationale": as_text(measured.get("rationale")),
        "forced": measured.get("stop_reason") == "forced",
        "tokens": as_rank(measured.get("rationale_tokens")),
        "results": view.ranked(query_id, top, shown_query["pictures"]),
        "rank": rank,
        "wanted": [] if set(top) & set(view.right[query_id]) else view.wanted(query_id),
    }


def _opening(cards: Sequence[dict[str, Any]], *, given: str) -> dict[str, Any] | None:
    """The opening card: the first, preferably one whose rationale occurs in the set, since a model's own may contradict its result.

    A failure with the rationale of ``another`` query shows what the query was mistaken for.
    """
    order = (given, "right", "another", "own")  # has the set this rationale, for this query or another?
    return min(cards, key=lambda card: order.index(card["says"]), default=None)
