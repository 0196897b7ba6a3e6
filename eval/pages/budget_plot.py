"""Accuracy against cost as inline SVG: points with intervals, joined where they are one curve."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from eval.pages.plots import NUM_SERIES_STYLES, nice_ticks, number
from rge.common.errors import UserError

BUDGET = "budget.json"
BASES = ("direct", "reasoning")
"""The two ways of asking that all others start from."""
WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 14, 42
COLOURS = ("#3556c4", "#c2571a", "#0a7a5a", "#9a3f96", "#6d6a1c", "#4d5560")
"""Of a chart that stands alone; on a page the style sheet knows light and dark."""
X_LABELS = {"tokens": "generated tokens a query", "ms": "milliseconds a query"}


@dataclass(frozen=True)
class Mark:
    """A point: its name, cost, and accuracy with its interval as fractions of 1."""

    name: str
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Points that are joined, by ascending cost."""

    name: str
    marks: Sequence[Mark]


def read_budget(directory: Path) -> dict[str, Any] | None:
    """Content of ``budget.json``; None where a directory has none.

    Raises:
        UserError: it cannot be read.
    """
    path = directory / BUDGET
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def curves_of(content: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """The points of budget.json as curves, once against ``tokens`` and once against ``ms``."""
    out: dict[str, list[Curve]] = {}
    for cost in ("tokens", "ms"):
        marks: dict[str, list[Mark]] = {}
        for row in content["points"]:
            mark = Mark(row["name"], row[cost], row["value"], row["low"], row["high"])
            marks.setdefault(row["curve"], []).append(mark)
        out[cost] = [Curve(name, sorted(found, key=lambda m: m.x)) for name, found in marks.items()]
    return out


def on_page(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Charts and table of a budget.json for a page."""
    found = curves_of(budget)
    return {
        "charts": [
            budget_chart(curves, metric=budget["metric"], cost=cost) for cost, curves in found.items()
        ],
        "labels": [curve.name for curve in next(iter(found.values()))],
        "rows": budget["points"],
        "metric": budget["metric"],
        "costs": budget["costs"],
    }


def budget_chart(curves: Sequence[Curve], *, metric: str, cost: str) -> Markup:
    """One chart of all curves.

    Args:
        curves: at least one point in all; the same order gives the same colours.
        metric: what the y axis shows, as per cent.
        cost: ``tokens`` or ``ms``.
    """
    marks = [mark for curve in curves for mark in curve.marks]
    y_ticks = nice_ticks(min(100 * mark.low for mark in marks), max(100 * mark.high for mark in marks), 6)
    x_ticks = nice_ticks(0.0, max(mark.x for mark in marks), 6)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at_x(value: float) -> float:
        return LEFT + value / x_ticks[-1] * width

    def at_y(value: float) -> float:
        return TOP + (y_ticks[-1] - value) / (y_ticks[-1] - y_ticks[0]) * height

    parts = []
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}%</text>'
        )
    for tick in x_ticks:
        parts.append(
            f'<text class="tick" x="{at_x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{number(tick)}</text>"
        )
    parts.append(
        f'<text class="label" x="{LEFT + width / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{X_LABELS[cost]}</text>'
    )
    for index, curve in enumerate(curves):
        style = f"series-{index % NUM_SERIES_STYLES}"
        if len(curve.marks) > 1:
            joined = " ".join(f"{at_x(mark.x):.1f},{at_y(100 * mark.y):.1f}" for mark in curve.marks)
            parts.append(f'<polyline class="line {style}" points="{joined}"/>')
        for mark in curve.marks:
            x = at_x(mark.x)
            said = f"{mark.name}: {100 * mark.y:.1f} % [{100 * mark.low:.1f}, {100 * mark.high:.1f}], {mark.x:.1f} {cost}"
            parts.append(
                f'<line class="whisker {style}" x1="{x:.1f}" x2="{x:.1f}" y1="{at_y(100 * mark.low):.1f}" '
                f'y2="{at_y(100 * mark.high):.1f}"/><circle class="last {style}" cx="{x:.1f}" '
                f'cy="{at_y(100 * mark.y):.1f}" r="3.5"><title>{escape(said)}</title></circle>'
            )
    ends = [
        f"{curve.name}: {100 * curve.marks[-1].y:.1f} % at {number(curve.marks[-1].x)} {cost}"
        for curve in curves
    ]
    spoken = f"{metric} against {X_LABELS[cost]}. " + "; ".join(ends)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(spoken)}">'
        f"{''.join(parts)}</svg>"
    )


def standalone(curves: Mapping[str, Sequence[Curve]], metric: str) -> str:
    """All charts side by side with a legend as one SVG file that needs no style sheet."""
    names = [curve.name for curve in next(iter(curves.values()))]
    total, legend = WIDTH * len(curves), 24 + 18 * -(-len(names) // 3)
    style = "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}.whisker{stroke-width:1}"
    for index, colour in enumerate(COLOURS):
        style += f".series-{index}{{stroke:{colour}}}.last.series-{index}{{fill:{colour}}}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT + legend}"><style>{style}</style>'
        f'<rect width="{total}" height="{HEIGHT + legend}" fill="#fff"/>'
        f'<text x="{LEFT}" y="16">{escape(metric)} against cost, 95 % intervals</text>'
    ]
    for index, name in enumerate(names):
        x, y = LEFT + 220 * (index % 3), 34 + 18 * (index // 3)
        parts.append(
            f'<circle class="last series-{index % NUM_SERIES_STYLES}" cx="{x}" cy="{y - 4}" r="4"/>'
            f'<text x="{x + 10}" y="{y}">{escape(name)}</text>'
        )
    for index, (cost, found) in enumerate(curves.items()):
        chart = budget_chart(found, metric=metric, cost=cost)
        placed = f'<svg x="{index * WIDTH}" y="{legend}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(str(chart).replace('<svg class="chart"', placed, 1))
    return "\n".join([*parts, "</svg>\n"])
