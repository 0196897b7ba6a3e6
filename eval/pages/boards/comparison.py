"""Comparison of two rows: differences in each slice, and example queries that either wins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.benchmarks.suite import mean_over
from eval.pages.boards.rows import name_of, note_of
from eval.pages.boards.side_by_side import side_by_side
from eval.pages.evaluations import Evaluation
from eval.pages.examples import Gallery, varying
from eval.pages.single_file import write_page
from eval.pages.wording import Scale
from eval.scoring.metrics import metric_words
from rge.stats.intervals import NUM_RESAMPLES, OF_DIFFERENCES, figures

MAX_OTHERS = 4
"""Number of rows that a board's best row is compared with."""
MAX_SLICES = 12
"""Maximum number of values of a column shown as slices; for more use `compare`."""


def write_comparison(
    a: Evaluation,
    b: Evaluation,
    out: Path,
    compared: Mapping[str, Any],
    num_examples: int,
    set_dir: Path | None,
    seed: int,
) -> Path:
    """Write the page of a comparison; the same input gives the same bytes.

    ``compared``: content of compare.json; the first metric of its rows decides who wins a query. Without examples the set
    is not needed.
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
        metrics.append({"name": name, "words": metric_words(name), "rows": tests, "scale": _scale(tests)})
    content = dict(
        title="A versus B",
        a=labels[0],
        b=labels[1],
        set=a.results["set"],
        profile=a.results.get("profile"),
        warnings=compared["warnings"],
        metrics=metrics,
        examples=side_by_side(sides, gallery, num_examples, set_dir, seed, main) if num_examples else None,
        differs=compared["differs"],
        pictures=gallery.pictures,
        sizes=gallery.sizes,
    )
    return write_page(out, "compare.html.j2", ["report.css", "leaderboard.css"], content)


def against(runs: Mapping[str, Evaluation], metric: str, seed: int) -> list[dict[str, Any]]:
    """Paired differences between the first run and each of the next few, over all queries and in every slice."""
    known = [(name, evaluation) for name, evaluation in runs.items() if metric in evaluation.per_query]
    if len(known) < 2:
        return []
    (best, first), *others = known
    pairs = [(name, _paired(first, other, metric, seed)) for name, other in others[:MAX_OTHERS]]
    return [{"a": best, "b": name, "rows": rows, "scale": _scale(rows)} for name, rows in pairs]


def _paired(a: Evaluation, b: Evaluation, metric: str, seed: int) -> list[dict[str, Any]]:
    frame = a.per_query.loc[a.per_query.index.intersection(b.per_query.index)]
    frame = frame.assign(a=frame[metric], b=b.per_query.loc[frame.index, metric])
    frame = frame.assign(difference=frame["a"] - frame["b"]).dropna(subset=["difference"])
    suite = bool(a.results.get("suite"))
    slices = [("all members" if suite else "all queries", frame)]
    for column in varying(frame, a.reported_by):
        if frame[column].nunique() <= MAX_SLICES:
            slices += [(f"{column} {value}", part) for value, part in frame.groupby(column, sort=True)]

    def mean(part: pd.DataFrame, column: str, num_resamples: int) -> dict[str, Any]:
        means = mean_over(part, [column], members=suite, seed=seed, num_resamples=num_resamples)
        return figures(means, OF_DIFFERENCES)[0]

    rows = []
    for label, part in slices:
        difference = mean(part, "difference", NUM_RESAMPLES)
        rows.append(
            {"slice": label, "num_queries": len(part), "difference": difference.pop("value"), **difference}
            | {side: mean(part, side, 1)["value"] for side in ("a", "b")}
        )
    return rows


def _scale(rows: Sequence[Mapping[str, Any]]) -> Scale:
    return Scale.around([row[key] for row in rows for key in ("difference", "low", "high")])
