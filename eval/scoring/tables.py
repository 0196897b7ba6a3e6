"""Tables of figures: for the terminal, as CSV with numbers, as LaTeX."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rge.common.files import write_text
from rge.stats.intervals import in_words


def slices(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of an evaluation's table: the whole, then every slice that has more than one value; of a suite members last."""
    by = {key.removeprefix("by_"): block for key, block in results.items() if key.startswith("by_")}
    members = results["set"].get("num_members")
    if members:
        yield f"mean of {members} members", results["macro"]
        by["category"] = by.pop("category")
    else:
        yield "all queries", results["micro"]
        if len(by["category"]) > 1:
            yield "mean of categories", results["macro"]
    for column, block in by.items():
        if len(block) > 1 or members:
            shown = results["suite"] if members and column == "category" else column
            yield from ((f"{shown} {value}", figures) for value, figures in block.items())


def in_per_cent(results: Mapping[str, Any], names: Sequence[str]) -> pd.DataFrame:
    """Every slice by these metrics, in per cent with intervals, and what a random ranking would have."""
    rows = [(label, [figure(values.get(name)) for name in names]) for label, values in slices(results)]
    floor = results.get("random", {})
    rows.append(
        ("random ranking", [figure({"value": floor[name]} if name in floor else None) for name in names])
    )
    return pd.DataFrame([cells for _, cells in rows], index=[label for label, _ in rows], columns=list(names))


def numbers(results: Mapping[str, Any]) -> pd.DataFrame:
    """Every slice and every metric as fractions of one: slice, metric, value, low, high."""
    rows = [
        {"slice": label, "metric": name, **one}
        for label, block in slices(results)
        for name, one in block.items()
    ]
    return pd.DataFrame(rows)


def summary(
    results: Mapping[str, Any], names: Sequence[str] = ("recall@1", "recall@10", "mrr", "ndcg@10")
) -> str:
    """`in_per_cent` for the terminal."""
    return in_per_cent(results, names).to_string()


def figure(one: Mapping[str, Any] | None) -> str:
    """A figure in per cent with its interval, where it has one; empty for None."""
    if one is None:
        return ""
    value = f"{100 * one['value']:.2f}"
    return f"{value} {in_words(one['low'], one['high'], '.2f')}" if "low" in one else value


def latex(frame: pd.DataFrame) -> str:
    """A table for a paper: needs the package booktabs; text is escaped."""
    escaped = frame.rename(columns=_escape, index=_escape).map(_escape)
    return escaped.to_latex(index=not isinstance(frame.index, pd.RangeIndex))


def write_tables(stem: Path, values: pd.DataFrame, shown: pd.DataFrame) -> list[Path]:
    """Write ``stem.csv``, the numbers, and ``stem.tex``, as people read them; returns both paths."""
    csv, tex = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.tex")
    write_text(csv, values.to_csv(index=False))
    write_text(tex, latex(shown))
    return [csv, tex]


def _escape(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    for mark in "\\&%$#_{}":
        cell = cell.replace(mark, "\\textbackslash " if mark == "\\" else f"\\{mark}")
    return cell.replace("~", "\\textasciitilde ").replace("^", "\\textasciicircum ").replace("–", "--")
