"""Examples of a board: what every model found for the same queries, side by side."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import is_suite
from eval.pages.boards.rows import Row
from eval.pages.cards import NUM_SHOWN
from eval.pages.evaluations import RANK_COLUMN, TOP_COLUMN
from eval.pages.examples import Gallery, choose_examples
from eval.scoring.metrics import ANSWER_SCORE
from eval.sets.retrieval_set import RetrievalSet, load_set, reference_answers
from rge.common.errors import UserError

MAX_MEMBERS = 6
"""Members of a suite that examples are drawn from: each has to be read."""


def side_by_side(
    rows: Sequence[Row], metric: str, gallery: Gallery, num: int, set_dir: Path | None, seed: int
) -> dict[str, Any]:
    """Cards of queries with the first candidates of every measured row, and what they can be filtered by."""
    measured = [row for row in rows if row.evaluation is not None]
    tables = {f"{row.label}, {row.note}": row.evaluation.per_query for row in measured if row.evaluation}
    frame = next(iter(tables.values())).copy()
    shared = frame.index
    for table in tables.values():
        shared = shared.intersection(table.index)
    frame = frame.loc[shared]
    ranks = pd.DataFrame({name: table.loc[shared, RANK_COLUMN] for name, table in tables.items()})
    ranks = ranks.where(ranks >= 1)
    names = list(ranks)
    marked = all(ANSWER_SCORE in table for table in tables.values())
    places = ranks
    if marked:  # answers: the best mark wins, whatever was found
        places = pd.DataFrame({name: 1 - table.loc[shared, ANSWER_SCORE] for name, table in tables.items()})
    frame["winner"] = [who_wins(row, names) for row in places.to_numpy(np.float64)]
    frame[RANK_COLUMN] = ranks.min(axis=1)
    results = measured[0].evaluation.results if measured[0].evaluation else {}
    folder = Path(set_dir or results["set"].get("path") or "")
    suite = bool(results.get("suite"))
    if not folder.is_dir() or suite != is_suite(folder):
        raise UserError(f"retrieval set {folder} is not there; if it was moved, give set=DIR, or examples=0")
    if suite:
        members = sorted({str(name) for name in frame["category"]})
        wanted = sorted(members, key=lambda name: hashlib.sha256(f"{seed}{name}".encode()).hexdigest())[
            :MAX_MEMBERS
        ]
        frame = frame[frame["category"].astype(str).isin(wanted)]
    chosen = choose_examples(frame, success_rank=1, num=num, strata=["category", "winner"], seed=seed)
    cards = []
    if suite:
        for member in sorted({name.partition("/")[0] for name in chosen}):
            inner = [name for name in chosen if name.partition("/")[0] == member]
            expected = results["set"].get("members", {}).get(member)
            loaded = _load(folder / member, expected)
            cards += _cards(loaded, inner, f"{member}/", tables, frame, gallery)
        cards.sort(key=lambda card: chosen.index(card["id"]))
    else:
        cards = _cards(_load(folder, results["set"]["fingerprint"]), chosen, "", tables, frame, gallery)
    winners = [
        name
        for name in dict.fromkeys([*names, "all alike", "several", "none"])
        if (frame["winner"] == name).any()
    ]
    return {
        "cards": cards,
        "categories": sorted({card["category"] for card in cards}),
        "winners": [(name, int((frame["winner"] == name).sum())) for name in winners],
        "num_queries": len(frame),
        "num_runs": len(names),
        "marked": marked,
    }


def who_wins(ranks: np.ndarray, names: Sequence[str]) -> str:
    """Whose first right candidate stands highest, or whose answer is marked best (1 - mark); NaN is none."""
    if np.isnan(ranks).all():
        return "none"
    best = np.flatnonzero(ranks == np.nanmin(ranks))
    if len(best) == 1 and len(names) > 1:
        return names[int(best[0])]
    return "all alike" if len(best) == len(names) else "several"


def _load(path: Path, fingerprint: str | None) -> RetrievalSet:
    loaded = load_set(path)
    if fingerprint is not None and loaded.fingerprint != fingerprint:
        raise UserError(f"retrieval set {path} is not the one that was measured; give set=DIR, or examples=0")
    return loaded


def _cards(
    loaded: RetrievalSet, chosen: Sequence[str], prefix: str, tables: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame, gallery: Gallery,
) -> list[dict[str, Any]]:  # fmt: skip
    place = {prefix + query: row for row, query in enumerate(loaded.query_ids)}
    shown = {
        (query, name): [str(one) for one in table.at[query, TOP_COLUMN]][:NUM_SHOWN]
        for query in chosen
        for name, table in tables.items()
    }
    right = {
        query: {loaded.corpus_ids[row] for row in loaded.positives[place[query]][0].tolist()}
        for query in chosen
    }
    wanted = {query: sorted(right[query])[:2] for query in chosen}
    needed = {one for names in [*shown.values(), *wanted.values()] for one in names}
    corpus = {item.id: item for item in loaded.corpus_items() if item.id in needed}
    references = reference_answers(loaded)
    if lost := sorted(needed - corpus.keys()):
        raise UserError(f"candidate {lost[0]!r} of the ranking is not in {loaded.path}")

    def candidate(name: str, query: str) -> dict[str, Any]:
        item = corpus[name]
        picture = gallery.add(item.images[0], f"candidate {name!r} of {loaded.path}") if item.images else None
        return {"id": name, "picture": picture, "text": item.text, "hit": name in right[query]}

    cards = []
    for query in chosen:
        item = loaded.queries[place[query]]
        best = frame.at[query, RANK_COLUMN]
        lists = []
        for name, table in tables.items():
            rank = table.at[query, RANK_COLUMN]
            rationale = table.at[query, "rationale"] if "rationale" in table else None
            lists.append(
                {
                    "label": name,
                    "rank": None if pd.isna(rank) or rank < 1 else int(rank),
                    "results": [candidate(one, query) for one in shown[query, name]],
                    "rationale": rationale if isinstance(rationale, str) and rationale else None,
                    "wins": frame.at[query, "winner"] == name,
                    "marks": _marks(table, query),
                }
            )
        cards.append(
            {
                "id": query,
                "category": str(frame.at[query, "category"]),
                "winner": frame.at[query, "winner"],
                "rank": "none"
                if pd.isna(best)
                else "first"
                if best == 1
                else "near"
                if best <= NUM_SHOWN
                else "below",
                "pictures": [gallery.add(ref, f"query {query!r} of {loaded.path}") for ref in item.images],
                "text": item.text,
                "lists": lists,
                "wanted": [candidate(one, query) for one in wanted[query]],
                "num_positives": len(right[query]),
                "reference": references.get(query.removeprefix(prefix)),
            }
        )
    return cards


def _marks(table: pd.DataFrame, query: str) -> list[tuple[str, float | None, str | None]]:
    """(judge, its mark, its words) of an answer; empty for rankings."""
    judges = [name.removeprefix("said.") for name in map(str, table) if name.startswith("said.")]
    row: dict[str, Any] = {str(key): value for key, value in table.loc[query].items()}
    found = []
    for judge in judges:
        mark, words = row.get(f"{ANSWER_SCORE}.{judge}", row[ANSWER_SCORE]), row[f"said.{judge}"]
        found.append(
            (
                judge,
                None if pd.isna(mark) else float(mark),
                words if isinstance(words, str) and words else None,
            )
        )
    return found
