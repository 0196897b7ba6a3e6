"""Charts of ``budget.json``: accuracy against cost, for a page and as a file."""

from collections.abc import Mapping
from typing import Any

from eval.pages.charts import Curves, Point, curves_chart, curves_file

X_LABELS = {"tokens": "generated tokens per query", "ms": "milliseconds per query"}


def curves_of(content: Mapping[str, Any]) -> dict[str, Curves]:
    """The points of budget.json as curves, by the label of each cost."""
    out: dict[str, Curves] = {}
    for cost, label in X_LABELS.items():
        points: dict[str, list[Point]] = {row["curve"]: [] for row in content["points"]}
        for row in sorted(content["points"], key=lambda row: row[cost]):
            points[row["curve"]].append(Point(row["name"], row[cost], row["value"], row["low"], row["high"]))
        out[label] = points
    return out


def on_page(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Charts and table of a budget.json for a page."""
    charts = curves_of(budget)
    return {
        "charts": [
            curves_chart(curves, metric=budget["metric"], x_label=label) for label, curves in charts.items()
        ],
        "labels": list(next(iter(charts.values()))),
        "rows": budget["points"],
        "metric": budget["metric"],
        "costs": budget["costs"],
    }


def as_file(budget: Mapping[str, Any]) -> str:
    """The charts with a legend as one standalone SVG file."""
    return curves_file(curves_of(budget), budget["metric"])
