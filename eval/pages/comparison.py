"""The page of a comparison, and example cards with the rankings and rationales of all evaluations."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.pages import examples
from eval.pages.charts import budget_on_page
from eval.pages.evaluations import RANK_COLUMN, Evaluation, name_of, note_of
from eval.pages.examples import Gallery, SetView
from eval.pages.single_file import write_page
from eval.pages.wording import Scale
from eval.scoring.metrics import lower_is_better, metric_words
from eval.scoring.output_files import check_measured_on, set_path
from eval.scoring.results import SetFacts
from eval.sets.retrieval_set import UNCATEGORISED, RetrievalSet, load_set

MAX_MEMBERS = 6
"""Maximum number of suite members that examples are drawn from, since each must be read."""
TIE = "tie"


def write_comparison(
    a: Evaluation,
    b: Evaluation,
    out: Path,
    compared: Mapping[str, Any],
    num_examples: int,
    set_dir: Path | None,
    budget: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of a comparison; the same input gives the same bytes.

    ``compared``: content of compare.json; the first metric of its rows decides who wins a query. Without examples the set
    is not needed. ``budget``: `eval.pages.charts.side_by_side` of the sides' curves, if there are any.
    """
    sides = {"A": a, "B": b}
    labels = [f"{name_of(side)}, {note_of(side)}" for side in (a, b)]
    if labels[0] == labels[1]:
        labels = [f"{labels[0]} ({side.directory.parent.name}/{side.directory.name})" for side in (a, b)]
    gallery, rows = Gallery(), compared["rows"]
    main = rows[0]["metric"]
    metrics = []
    for name in dict.fromkeys(row["metric"] for row in rows):
        tests = [row for row in rows if row["metric"] == name]
        scale = Scale.around(row[key] for row in tests for key in ("difference", "low", "high"))
        metrics.append({"name": name, "words": metric_words(name), "rows": tests, "scale": scale})
    content = dict(
        title="A versus B",
        a=labels[0],
        b=labels[1],
        set=a.results.set,
        profile=a.results.profile,
        warnings=compared["warnings"],
        metrics=metrics,
        examples=side_by_side(sides, gallery, num_examples, set_dir, main) if num_examples else None,
        differs=compared["differs"],
        budget=None if budget is None else budget_on_page(budget),
        pictures=gallery.pictures,
    )
    return write_page(out, "compare.html.j2", ["report.css", "compare.css"], content)


def side_by_side(
    runs: Mapping[str, Evaluation], gallery: Gallery, num: int, set_dir: Path | None, metric: str
) -> dict[str, Any]:
    """Example cards with the first candidates of every run, and their filters; the metric decides who wins."""
    names, first = list(runs), next(iter(runs.values()))
    frame = _ranked(runs, metric)
    counts = frame["winner"].value_counts()
    winners = [name for name in (*names, TIE, "none") if name in counts]
    columns = examples.varying(frame, list(dict.fromkeys(("category", *first.reported_by))))
    frame[columns] = frame[columns].fillna(UNCATEGORISED)  # members of a suite may lack a column
    drawn = frame
    if first.results.suite:
        of_query = frame["category"].astype(str)
        order = sorted(set(of_query), key=lambda name: hashlib.sha256(f"0{name}".encode()).hexdigest())
        drawn = frame[of_query.isin(order[:MAX_MEMBERS])]
    chosen = examples.choose_examples(drawn, success_rank=1, num=num, strata=["category", "winner"])
    cards = {}
    for loaded, prefix, queries in _sets_of(chosen, first, set_dir):
        view = SetView(loaded, list(runs.values()), queries, gallery, prefix)
        for query in queries:
            winner = str(drawn.at[query, "winner"])
            card = view.card(query, drawn.loc[query], columns, winner=winner) | {"wanted": view.wanted(query)}
            lists = [
                {"label": label, "wins": label == winner, **view.found(query, run, card["pictures"])}
                for label, run in runs.items()
            ]
            cards[query] = card | {"lists": lists}
    return {
        "cards": [cards[query] for query in chosen],
        "runs": names,
        "filters": [
            {"name": "winner", "label": "Winner", "values": [(one, one) for one in winners]},
            *examples.filters_of(drawn, columns),
        ],
        "winners": [(name, int(counts[name])) for name in winners],
        "num_queries": len(frame),
    }


def _ranked(runs: Mapping[str, Evaluation], metric: str) -> pd.DataFrame:
    """The first run's table, limited to queries of all runs, with the ``winner`` and best rank of each."""
    index = next(iter(runs.values())).per_query.index
    for run in runs.values():
        index = index.intersection(run.per_query.index)

    def of_all(column: str) -> pd.DataFrame:
        return pd.DataFrame({name: run.per_query.loc[index, column] for name, run in runs.items()})

    frame = next(iter(runs.values())).per_query.loc[index].copy()
    ranks = of_all(RANK_COLUMN)
    ranks = ranks.where(ranks >= 1)
    values = of_all(metric)
    lower_wins = values if lower_is_better(metric) else -values
    frame["winner"] = [who_wins(row, list(runs)) for row in lower_wins.to_numpy(np.float64)]
    frame[RANK_COLUMN] = ranks.min(axis=1)
    return frame


def who_wins(values: np.ndarray, names: Sequence[str]) -> str:
    """Name with the lowest value; NaN means that it has none."""
    if np.isnan(values).all():
        return "none"
    best = np.flatnonzero(values == np.nanmin(values))
    return names[int(best[0])] if len(best) == 1 else TIE


def _sets_of(
    chosen: Sequence[str], first: Evaluation, set_dir: Path | None
) -> list[tuple[RetrievalSet, str, list[str]]]:
    """The set of the evaluations, or the members of their suite that the queries belong to, each with its queries."""
    measured, folder = first.results.set, set_path(first.results.set, set_dir, otherwise=", or examples=0")
    members: dict[str, list[str]] = defaultdict(list)
    for query in chosen:
        members[str(first.per_query.at[query, "category"]) if first.results.suite else ""].append(query)
    fingerprints = measured.members or {"": measured.fingerprint}
    sets = []
    for name, queries in sorted(members.items()):
        loaded = load_set(folder / name)
        check_measured_on(loaded, SetFacts(name=name, fingerprint=fingerprints[name]))
        sets.append((loaded, f"{name}/" if name else "", queries))
    return sets
