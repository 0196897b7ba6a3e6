"""Tables of figures: for the terminal, as CSV, as LaTeX."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from eval.scoring.results import Figure, Figures, Results
from rge.common.files import write_text
from rge.stats.intervals import in_words


def slices(results: Results) -> Iterator[tuple[str, Figures]]:
    """Rows of an evaluation's table: the overall figures, then slices of columns with several values; members last."""
    by, members = results.by, results.set.num_members
    if members:
        yield f"mean of {members} members", results.macro
        by["category"] = by.pop("category")
    else:
        yield "all queries", results.micro
        if len(by["category"]) > 1:
            yield "mean of categories", results.macro
    for column, block in by.items():
        if len(block) > 1 or members:
            shown = results.suite if members and column == "category" else column
            yield from ((f"{shown} {value}", figures) for value, figures in block.items())


def in_per_cent(results: Results, names: Sequence[str]) -> pd.DataFrame:
    """Metrics of every slice and of a random ranking, in per cent with intervals."""
    floor: Figures = {name: {"value": value} for name, value in results.random.items()}
    rows = [*slices(results), ("random ranking", floor)]
    names = list(dict.fromkeys(names))  # metrics= may repeat the headline
    cells = [[figure(values.get(name)) for name in names] for _, values in rows]
    return pd.DataFrame(cells, index=[label for label, _ in rows], columns=names)


def numbers(results: Results) -> pd.DataFrame:
    """All slices and metrics as fractions: columns slice, metric, value, low, high."""
    rows = [
        {"slice": label, "metric": name, **one}
        for label, block in slices(results)
        for name, one in block.items()
    ]
    return pd.DataFrame(rows)


def figure(one: Figure | None) -> str:
    """A figure in per cent with its interval, if it has one; empty for None."""
    if one is None or one["value"] is None:
        return ""
    value = f"{100 * one['value']:.2f}"
    return f"{value} {in_words(one['low'], one['high'], '.2f')}" if "low" in one else value


def latex(frame: pd.DataFrame) -> str:
    """A table with escaped text for a paper, which needs the package booktabs."""
    indexed = not isinstance(frame.index, pd.RangeIndex)
    return frame.to_latex(index=indexed, escape=True).replace("–", "--")


def write_tables(stem: Path, values: pd.DataFrame, formatted: pd.DataFrame) -> list[Path]:
    """Write ``stem.csv`` with numbers and ``stem.tex`` with formatted figures; returns both paths."""
    csv, tex = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.tex")
    write_text(csv, values.to_csv(index=False))
    write_text(tex, latex(formatted))
    return [csv, tex]
