"""Example cards with the rankings and rationales of several evaluations, and the winner of each query."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import is_suite
from eval.pages import examples
from eval.pages.evaluations import RANK_COLUMN, Evaluation
from eval.pages.examples import Gallery, SetView
from eval.pages.wording import tag
from eval.sets.retrieval_set import UNCATEGORISED, RetrievalSet, load_set
from rge.common.errors import UserError

MAX_MEMBERS = 6
"""Maximum number of suite members that examples are drawn from, since each must be read."""
TIE = "tie"
_RANKS = [
    ("first", "1"),
    ("near", f"2–{examples.NUM_SHOWN}"),
    ("below", f"below {examples.NUM_SHOWN}"),
    ("none", "not ranked"),
]


def side_by_side(
    runs: Mapping[str, Evaluation],
    gallery: Gallery,
    num: int,
    set_dir: Path | None,
    seed: int,
    metric: str | None = None,
) -> dict[str, Any]:
    """Example cards with the first candidates of every run, and their filters.

    The metric decides who wins; without one, the rank of the first right candidate does.
    """
    names, first = list(runs), next(iter(runs.values()))
    frame = _ranked(runs, metric)
    counts = frame["winner"].value_counts()
    winners = [name for name in (*names, TIE, "several", "none") if name in counts]
    columns = examples.varying(frame, [name for name in first.reported_by if name != "category"])
    drawn = frame if not first.results.get("suite") else _of_some_members(frame, seed)
    chosen = examples.choose_examples(
        drawn, success_rank=1, num=num, strata=["category", "winner"], seed=seed
    )
    cards = _cards(chosen, runs, drawn, columns, gallery, first, set_dir)
    categories = sorted({card["data"]["category"] for card in cards})
    return {
        "cards": cards,
        "runs": names,
        "filters": [
            {"name": "category", "label": "Category", "values": [(one, tag("", one)) for one in categories]},
            {"name": "winner", "label": "Winner", "values": [(one, one) for one in winners]},
            {"name": "rank", "label": "Best rank", "values": _RANKS},
            *examples.facets(drawn, columns),
        ],
        "winners": [(name, int(counts[name])) for name in winners],
        "num_queries": len(frame),
    }


def _ranked(runs: Mapping[str, Evaluation], metric: str | None) -> pd.DataFrame:
    """The first run's table, limited to queries of all runs, with the ``winner`` and best rank of each."""
    index = next(iter(runs.values())).per_query.index
    for run in runs.values():
        index = index.intersection(run.per_query.index)

    def of_all(column: str) -> pd.DataFrame:
        return pd.DataFrame({name: run.per_query.loc[index, column] for name, run in runs.items()})

    frame = next(iter(runs.values())).per_query.loc[index].copy()
    ranks = of_all(RANK_COLUMN)
    ranks = ranks.where(ranks >= 1)
    lower_wins = ranks if metric is None else -of_all(metric)
    frame["winner"] = [who_wins(row, list(runs)) for row in lower_wins.to_numpy(np.float64)]
    frame[RANK_COLUMN] = ranks.min(axis=1)
    return frame


def who_wins(values: np.ndarray, names: Sequence[str]) -> str:
    """Name with the lowest value, such as the rank of the first right candidate; NaN means none."""
    if np.isnan(values).all():
        return "none"
    best = np.flatnonzero(values == np.nanmin(values))
    if len(best) == 1 and len(names) > 1:
        return names[int(best[0])]
    return TIE if len(best) == len(names) else "several"


def _of_some_members(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    members = sorted({str(name) for name in frame["category"]})
    order = sorted(members, key=lambda name: hashlib.sha256(f"{seed}{name}".encode()).hexdigest())
    return frame[frame["category"].astype(str).isin(order[:MAX_MEMBERS])]


def _cards(
    chosen: Sequence[str],
    runs: Mapping[str, Evaluation],
    frame: pd.DataFrame,
    columns: Sequence[str],
    gallery: Gallery,
    first: Evaluation,
    set_dir: Path | None,
) -> list[dict[str, Any]]:
    tops = {query: [examples.top_of(run.per_query, query) for run in runs.values()] for query in chosen}
    cards = {}
    for loaded, prefix, queries in _sets_of(chosen, first, set_dir):
        names = {query: query.removeprefix(prefix) for query in queries}
        view = SetView(loaded, {names[query]: tops[query] for query in queries}, gallery)
        for query in queries:
            cards[query] = _card(query, names[query], runs, tops[query], frame.loc[query], columns, view)
    return [cards[query] for query in chosen]


def _sets_of(
    chosen: Sequence[str], first: Evaluation, set_dir: Path | None
) -> list[tuple[RetrievalSet, str, list[str]]]:
    """The set of the evaluations, or the members of their suite that the queries belong to, each with its queries."""
    about = first.results["set"]
    folder, suite = Path(set_dir or about.get("path") or ""), bool(first.results.get("suite"))
    if not folder.is_dir() or suite != is_suite(folder):
        raise UserError(
            f"retrieval set {folder} does not exist; if it was moved, pass set=DIR, or examples=0"
        )
    if not suite:
        return [(_load(folder, about["fingerprint"]), "", list(chosen))]
    members: dict[str, list[str]] = defaultdict(list)
    for query in chosen:
        members[query.partition("/")[0]].append(query)
    known = about.get("members", {})
    return [(_load(folder / name, known.get(name)), f"{name}/", members[name]) for name in sorted(members)]


def _load(path: Path, fingerprint: str | None) -> RetrievalSet:
    loaded = load_set(path)
    if fingerprint is not None and loaded.fingerprint != fingerprint:
        raise UserError(f"retrieval set {path} is not the one that was measured; pass set=DIR, or examples=0")
    return loaded


def _card(
    query: str,
    name: str,
    runs: Mapping[str, Evaluation],
    tops: Sequence[Sequence[str]],
    row: pd.Series,
    columns: Sequence[str],
    view: SetView,
) -> dict[str, Any]:
    shown_query = view.query(name)
    best, winner, category = examples.as_rank(row[RANK_COLUMN]), str(row["winner"]), str(row["category"])
    values = [str(row[column]) for column in columns]
    return shown_query | {
        "data": {
            "query": query,
            "category": category,
            "winner": winner,
            "rank": "none" if best is None else examples.outcome_of(best),
            **{f"f{place}": value for place, value in enumerate(values)},
        },
        "tags": [
            tag(column, value)
            for column, value in zip(("category", *columns), (category, *values), strict=True)
            if value != UNCATEGORISED
        ],
        "wanted": view.wanted(name),
        "lists": [
            {
                "label": label,
                "rank": examples.as_rank(run.per_query.at[query, RANK_COLUMN]),
                "rationale": examples.as_text(run.per_query.loc[query].get("rationale")),
                "results": view.ranked(name, top, shown_query["pictures"]),
                "wins": label == winner,
            }
            for (label, run), top in zip(runs.items(), tops, strict=True)
        ],
    }
