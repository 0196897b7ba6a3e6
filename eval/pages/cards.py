"""Example cards of a report: a query, what the model wrote, what it found, and what was wanted."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from eval.pages.evaluations import RANK_COLUMN, TOP_COLUMN, Evaluation
from eval.pages.examples import Gallery, choose_examples
from eval.pages.wording import slice_order, tag
from eval.sets.retrieval_set import RetrievalSet, given_rationales
from rge.common.errors import UserError

NAME_COLUMNS = ("concept", "name", "label", "title")
"""Of corpus.parquet, the first that is there."""
NUM_SHOWN = 5
"""Pictures of a ranking on an example card."""
MAX_WANTED = 2
"""Right answers shown beside a ranking that has none of them."""


def cards_of(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    loaded: RetrievalSet,
    metric: str,
    num: int,
    seed: int,
    gallery: Gallery,
) -> dict[str, Any]:
    """Everything the template needs for the cards."""
    k = re.search(r"@(\d+)", metric)
    success_rank = min(int(k.group(1)), NUM_SHOWN) if k else 1
    strata = [name for name in ("category", *loaded.report_by) if main.per_query[name].nunique() > 1]
    chosen = choose_examples(main.per_query, success_rank=success_rank, num=num, strata=strata, seed=seed)
    place = {query_id: row for row, query_id in enumerate(loaded.query_ids)}
    strange = [query_id for query_id in chosen if query_id not in place]
    if strange:
        raise UserError(f"{main.directory} evaluates query {strange[0]!r}, which {loaded.path} does not have")
    ranked = {
        query_id: [str(name) for name in main.per_query.at[query_id, TOP_COLUMN]][:NUM_SHOWN]
        for query_id in chosen
    }
    right, wrong = {}, {}
    for query_id in chosen:
        rows, gains = loaded.positives[place[query_id]]
        best_first = np.lexsort((rows, -gains))
        right[query_id] = [loaded.corpus_ids[row] for row in rows[best_first]]
        listed = () if loaded.negatives is None else loaded.negatives[place[query_id]].tolist()
        # an explicit negative that is also a positive counts as a positive, as in the metrics
        wrong[query_id] = {loaded.corpus_ids[row] for row in listed} - set(right[query_id])
    wanted = {
        query_id: [] if set(ranked[query_id]) & set(right[query_id]) else right[query_id][:MAX_WANTED]
        for query_id in chosen
    }
    needed = {name for lists in (ranked, wanted) for names in lists.values() for name in names}
    corpus = {item.id: item for item in loaded.corpus_items() if item.id in needed} if needed else {}
    names = _names(loaded.path / "corpus.parquet")
    given: dict[str, set[str]] = defaultdict(set)
    for (query_id, _), text in given_rationales(loaded).items():
        given[query_id].add(text)
    sayings = set().union(*given.values())
    lost = sorted(needed - corpus.keys())
    if lost:
        raise UserError(f"{main.directory} ranks candidate {lost[0]!r}, which {loaded.path} does not have")

    def candidate(name: str) -> dict[str, Any]:
        item = corpus[name]
        picture = gallery.add(item.images[0], f"candidate {name!r} of {loaded.path}") if item.images else None
        return {"id": name, "picture": picture, "text": item.text, "alt": item.text or names.get(name, name)}

    cards = []
    for query_id in chosen:
        item, measured = loaded.queries[place[query_id]], main.per_query.loc[query_id]
        pictures = [gallery.add(ref, f"query {query_id!r} of {loaded.path}") for ref in item.images]
        results = []
        for rank, name in enumerate(ranked[query_id], start=1):
            shown = candidate(name)
            marks = {
                "rank": rank,
                "hit": name in right[query_id],
                "negative": name in wrong[query_id],
                "is_query": shown["picture"] in pictures,
            }
            results.append(shown | marks)
        first = _rank(measured[RANK_COLUMN])
        cards.append(
            {
                "id": query_id,
                "facets": [str(measured[name]) for name in strata],
                "tags": [tag(name, str(measured[name])) for name in strata],
                "outcome": "below"
                if first is None or first > NUM_SHOWN
                else "first"
                if first == 1
                else "near",
                "success": first is not None and first <= success_rank,
                "pictures": pictures,
                "text": item.text,
                "rationale": _text(measured.get("rationale")),
                "says": _says(_text(measured.get("rationale")), given.get(query_id, set()), sayings),
                "forced": measured.get("stop_reason") == "forced",
                "tokens": _rank(measured.get("rationale_tokens")),
                "results": results,
                "rank": first,
                "num_positives": len(right[query_id]),
                "wanted": [candidate(name) for name in wanted[query_id]],
                "ranks": [
                    (one.label, _rank(one.per_query.at[query_id, RANK_COLUMN]), one is main)
                    for one in evaluations
                ],
            }
        )
    ranks = main.per_query[RANK_COLUMN]
    num_first, num_near = int(ranks.eq(1).sum()), int(ranks.between(2, NUM_SHOWN).sum())
    facets = [(name, sorted(set(main.per_query[name].astype(str)), key=slice_order)) for name in strata]
    return {
        "cards": cards,
        "found": _opening([card for card in cards if card["success"]], given="right"),
        "missed": _opening([card for card in cards if not card["success"]], given="another"),
        "opens_with_given": bool(sayings),
        "reasons": main.mode[0] == "reasoning",
        "success_rank": success_rank,
        "num_successes": sum(card["success"] for card in cards),
        "num_first": num_first,
        "num_near": num_near,
        "num_below": len(ranks) - num_first - num_near,
        "num_queries": len(ranks),
        "num_negatives": sum(result["negative"] for card in cards for result in card["results"]),
        "num_forced": sum(card["forced"] for card in cards),
        "facets": [
            {
                "name": name,
                "label": name.replace("_", " ").capitalize(),
                "values": [(v, tag("", v)) for v in values],
            }
            for name, values in facets
        ],
        "strata": [name.replace("_", " ") for name in strata],
    }


def _names(path: Path) -> dict[str, str]:
    """What candidates are called, for those who do not see the pictures; empty where the set does not say."""
    known = pq.read_schema(path).names
    column = next((name for name in NAME_COLUMNS if name in known), None)
    if column is None:
        return {}
    table = pq.read_table(path, columns=["id", column]).to_pydict()
    return {
        key: str(value).replace("_", " ")
        for key, value in zip(table["id"], table[column], strict=True)
        if value
    }


def _says(written: str | None, right: set[str], sayings: set[str]) -> str:
    """Whether the set gives these words as a reason of this query, of another one, or not at all."""
    return "right" if written in right else "another" if written in sayings else "own"


def _opening(cards: Sequence[dict[str, Any]], *, given: str) -> dict[str, Any] | None:
    """The card that the page opens with: the first one, where the set gives reasons the first that wrote one of them.

    A model's own wording may contradict itself and still lead to a right answer, or to a wrong one for no reason that
    can be seen; what a set gives as a reason of something does not. A success should give the ``right`` reason; a failure
    a reason of ``another`` query, which shows what the model mistook the query for, or the right one.
    """
    order = (given, "right", "another", "own")
    return min(cards, key=lambda card: order.index(card["says"]), default=None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _rank(value: Any) -> int | None:
    """A rank, or another count from one; None where there is none, such as no right candidate in the ranking."""
    return None if pd.isna(value) or value < 1 else int(value)
