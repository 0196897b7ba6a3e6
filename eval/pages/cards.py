"""Example cards of a report: a query, the model's rationale, its ranking, and the right answers."""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from eval.pages import examples
from eval.pages.evaluations import RANK_COLUMN, Evaluation
from eval.pages.examples import Gallery, SetView
from eval.pages.wording import tag
from eval.sets.retrieval_set import RetrievalSet, given_rationales

_FIRST_HIT: dict[str, Any] = {
    "name": "outcome",
    "label": "First hit",
    "values": [
        ("first", "rank 1"),
        ("near", f"rank 2–{examples.NUM_SHOWN}"),
        ("below", f"below {examples.NUM_SHOWN}"),
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
    success_rank = min(int(k.group(1)), examples.NUM_SHOWN) if k else 1
    strata = examples.varying(main.per_query, ("category", *loaded.report_by))
    chosen = examples.choose_examples(
        main.per_query, success_rank=success_rank, num=num, strata=strata, seed=seed
    )
    tops = {query: examples.top_of(main.per_query, query) for query in chosen}
    view = SetView(loaded, {query: [names] for query, names in tops.items()}, gallery)
    given = given_rationales(loaded)
    right = pd.Series(given, dtype=object).groupby(level=0).agg(set).to_dict() if given else {}
    cards = []
    for query in chosen:
        card = _card(query, main.per_query.loc[query], tops[query], view, strata)
        card["success"] = (card["rank"] or math.inf) <= success_rank
        card["says"] = _says(card["rationale"], right.get(query, set()), given.values())
        card["ranks"] = [
            (e.label, examples.as_rank(e.per_query.at[query, RANK_COLUMN]), e is main) for e in evaluations
        ]
        cards.append(card)
    return {
        "cards": cards,
        **_of_cards(cards),
        "opens_with_given": bool(given),
        "reasons": main.mode[0] == "reasoning",
        "success_rank": success_rank,
        **_num_by_rank(main.per_query[RANK_COLUMN]),
        "filters": [*examples.facets(main.per_query, strata), _FIRST_HIT],
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


def _num_by_rank(ranks: pd.Series) -> dict[str, int]:
    counts = Counter(map(examples.outcome_of, map(examples.as_rank, ranks)))
    return {f"num_{name}": counts[name] for name, _ in _FIRST_HIT["values"]} | {"num_queries": len(ranks)}


def _card(
    query_id: str, measured: pd.Series, top: Sequence[str], view: SetView, strata: Sequence[str]
) -> dict[str, Any]:
    shown_query = view.query(query_id)
    rank = examples.as_rank(measured[RANK_COLUMN])
    values = [str(measured[name]) for name in strata]
    return shown_query | {
        "data": {"query": query_id}
        | {f"f{place}": value for place, value in enumerate(values)}
        | {"outcome": examples.outcome_of(rank)},
        "tags": [tag(name, value) for name, value in zip(strata, values, strict=True)],
        "rationale": examples.as_text(measured.get("rationale")),
        "forced": measured.get("stop_reason") == "forced",
        "tokens": examples.as_rank(measured.get("rationale_tokens")),
        "results": view.ranked(query_id, top, shown_query["pictures"]),
        "rank": rank,
        "wanted": [] if set(top) & set(view.right[query_id]) else view.wanted(query_id),
    }


def _says(written: str | None, right: set[str], sayings: Collection[str]) -> str:
    """Whether the set has this text as a rationale of this query, of another one, or not at all."""
    return "right" if written in right else "another" if written in sayings else "own"


def _opening(cards: Sequence[dict[str, Any]], *, given: str) -> dict[str, Any] | None:
    """The opening card: the first, preferably one whose rationale occurs in the set, since a model's own may contradict its result.

    A failure with the rationale of ``another`` query shows what the query was mistaken for.
    """
    order = (given, "right", "another", "own")
    return min(cards, key=lambda card: order.index(card["says"]), default=None)
