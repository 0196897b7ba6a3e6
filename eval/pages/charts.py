"""Charts as SVG, rendered by Vega-Lite without a browser or network.

On a page a chart is as wide as a phone's column, so that its text never shrinks, and takes its colours from the style
sheet, which has light and dark modes. `as_file` makes a standalone file.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import vl_convert
from markupsafe import Markup, escape

from eval.pages.wording import number
from rge.stats.intervals import in_words

WIDTH, HEIGHT = 352, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 26, 44
"""Margins for tick labels, half of the last one, legends, and the axis label."""
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_POINTS = 160
STYLES = 6
"""Number of line styles with distinct colours and dashes."""
COLOURS = [f"var(--series-{place})" for place in range(STYLES)]
DASHES = [[1, 0], [7, 3], [2, 3], [9, 3, 2, 3], [4, 4], [12, 4]]
COSTS = {"tokens": "generated tokens per query", "gflops": "GFLOP per query", "ms": "milliseconds per query"}
"""Labels of the costs in a budget.json; FLOPs are only known of models whose prompts rge makes."""
DOT = {"type": "circle", "size": 60, "opacity": 1}
STYLE_SHEET = Path(__file__).with_name("templates") / "report.css"
CONFIG = {
    "font": "system-ui, sans-serif",
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelColor": "var(--muted)",
        "titleColor": "var(--muted)", "gridColor": "var(--line)", "domainColor": "var(--neutral)",
        "tickColor": "var(--neutral)", "titlePadding": 8, "labelFlush": False,
    },
    "axisY": {"domain": False, "ticks": False, "labelPadding": 7, "tickCount": 5, "title": None},
    "axisX": {"grid": False, "tickCount": 5, "tickSize": 4, "labelOverlap": True},
    "legend": {
        "orient": "top", "title": None, "labelFontSize": 12, "labelColor": "var(--ink)", "symbolSize": 70,
        "symbolType": "circle", "symbolStrokeWidth": 0, "symbolOpacity": 1, "columns": 3, "labelLimit": 260,
    },
    "title": {"color": "var(--ink)", "fontSize": 14, "anchor": "start", "fontWeight": 600, "offset": 10},
    "text": {"color": "var(--ink)", "fontSize": 12, "aria": False},
    # only dots have descriptions; other marks would repeat them
    "line": {"aria": False}, "rule": {"aria": False}, "point": {"aria": False}, "rect": {"aria": False},
    "concat": {"spacing": 22},
}  # fmt: skip


Rows = Sequence[Mapping[str, Any]]
"""Figures with their intervals (``low``, ``high``), as fractions; the bounds may be None."""


def line_chart(points: pd.DataFrame, *, stages: Sequence[str], name: str, unit: str) -> Markup:
    """Values over the steps of a run: faint, with a strong moving average; the y axis includes zero.

    ``points``: columns ``step``, ``stage`` and ``value``. More than `MAX_POINTS` of a stage become means over equal ranges.
    ``stages``: all stages of the run, each with a colour.
    """
    parts = [thinned(part) for _, part in points.groupby("stage", sort=False)]
    legend = {
        "offset": 4,
        "symbolType": "stroke",
        "symbolStrokeWidth": 2,
        "values": list(points["stage"].unique()),
    }
    # a window of a 16th of the line smooths the noise of single steps and keeps visible trends
    half = max(map(len, parts)) // 32
    smooth = {
        "window": [{"op": "mean", "field": "value", "as": "mean"}],
        "frame": [-half, half],
        "groupby": ["stage"],
    }
    line = {"type": "line", "strokeJoin": "round", "strokeCap": "round"}
    scale: dict[str, Any] = {"zero": True}
    if not points["value"].any():  # else the axis would have no length
        scale["domain"] = [0, 100 if unit == "%" else 1]
    y = {"title": None, "axis": {"labelExpr": f"datum.label + '{unit}'"}, "scale": scale}
    spec = {
        "data": {"values": pd.concat(parts).to_dict("records")},
        "encoding": {
            "x": _of("step", title="step", scale={"zero": False, "nice": False}),
            "color": _by(
                "stage",
                legend=legend if len(stages) > 1 else None,
                scale={"domain": list(stages), "range": COLOURS},
            ),
        },
        "layer": [
            {"mark": line | {"opacity": 0.3, "strokeWidth": 1}, "encoding": {"y": _of("value", **y)}},
            {"transform": [smooth], "mark": line | {"strokeWidth": 2}, "encoding": {"y": _of("mean", **y)}},
        ],
    }
    ends = (
        f"{number(row['value'])}{unit} at step {number(row['step'])}"
        for row in points.iloc[[0, -1]].to_dict("records")
    )
    return _on_page(spec, f"{name}. {', '.join(ends)}")


def thinned(points: pd.DataFrame) -> pd.DataFrame:
    """Means over `MAX_POINTS` equal ranges of a stage's points, if it has more."""
    if len(points) <= MAX_POINTS:
        return points
    means = points[["step", "value"]].groupby(np.arange(len(points)) * MAX_POINTS // len(points)).mean()
    return means.assign(stage=points["stage"].iloc[0])


def budget_on_page(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Charts and table of a budget.json for a page: curves of accuracy over each cost, each point with its interval."""
    metric, points = budget["metric"], budget["points"]
    labels = list(dict.fromkeys(point["curve"] for point in points))
    charts = []
    for cost, x_label in _costs_of(points).items():
        last = {point["curve"]: point for point in sorted(points, key=lambda point: point[cost])}
        ends = (f"{name}: {100 * last[name]['value']:.1f} % at {number(last[name][cost])}" for name in labels)
        spec = _over_cost(points, cost, x_label)
        charts.append(_on_page(spec, f"{metric} against {x_label}. {'; '.join(ends)}"))
    return {"charts": charts, "labels": labels, "rows": points} | {
        key: budget[key] for key in ("metric", "costs", "notes")
    }


def _costs_of(points: Rows) -> dict[str, str]:
    return {cost: label for cost, label in COSTS.items() if all(cost in point for point in points)}


def side_by_side(budgets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One budget.json with the points and curves of several, each under its letter."""
    points = [
        {**point, "name": f"{letter}: {point['name']}", "curve": f"{letter}: {point['curve']}"}
        for letter, budget in budgets.items()
        for point in budget["points"]
    ]
    notes = [f"{letter}: {note}" for letter, budget in budgets.items() for note in budget["notes"]]
    return {**next(iter(budgets.values())), "points": points, "notes": notes}


def budget_file(budget: Mapping[str, Any]) -> str:
    """The same charts with a legend as one file."""
    panels = [
        _over_cost(budget["points"], cost, x_label, legend={}) | {"width": 400, "height": 220}
        for cost, x_label in _costs_of(budget["points"]).items()
    ]
    return as_file({"vconcat": panels}, f"{budget['metric']} against cost, 95 % intervals")


def interval_chart(marks: Rows, *, title: str) -> str:
    """Means with intervals as a file: a line for each ``row``, a panel for each ``metric``, colours for slices, rings for seeds.

    Each has a ``mean``, and maybe ``seeds``, the means of single seeds. Lines, slices (up to `STYLES`) and panels keep the order
    of the marks.
    """
    slices = list(dict.fromkeys(mark["slice"] for mark in marks))
    y_axis = {"domain": False, "ticks": False, "title": None, "labelFontSize": 13, "labelColor": "var(--ink)",
              "labelLimit": 200}  # fmt: skip
    rows = list(dict.fromkeys(mark["row"] for mark in marks))
    place = {
        "y": _by("row", sort=rows, axis=y_axis, scale={"padding": 0.25}),
        "yOffset": _by("slice", sort=slices),
        "color": _by("slice", scale={"domain": slices, "range": COLOURS}, legend={} if len(slices) > 1 else None),
    }  # fmt: skip
    panels = [
        _interval_panel([mark for mark in marks if mark["metric"] == metric], place)
        for metric in dict.fromkeys(mark["metric"] for mark in marks)
    ]
    return as_file({"vconcat": panels}, title)


def _interval_panel(marks: Rows, place: Mapping[str, Any]) -> dict[str, Any]:
    """The marks of one metric: a rule for each interval, a ring for each seed, a dot for each mean."""
    metric = marks[0]["metric"]
    rows = [
        {"row": m["row"], "slice": m["slice"], "mean": 100 * m["mean"],
         **{end: 100 * (m["mean"] if m[end] is None else m[end]) for end in ("low", "high")},
         "words": f"{m['row']}, {m['slice']}, {metric}: {100 * m['mean']:.1f}%{_interval(m) or ' –'}"}
        for m in marks
    ]  # fmt: skip
    seeds = [
        {"row": m["row"], "slice": m["slice"], "seed": 100 * seed}
        for m in marks
        for seed in m.get("seeds", ())
    ]
    axis = {"grid": True, "domain": False, "labelExpr": "datum.label + '%'"}
    x = {"title": None, "axis": axis, "scale": {"zero": False, "padding": 8}}
    words = {"description": {"field": "words"}}
    return {
        "title": {"text": metric, "fontSize": 13, "offset": 4},
        "width": 360,
        "height": {"step": 17},
        "data": {"values": rows},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {**place, "x": _of("low", **x), "x2": {"field": "high"}},
            },
            {
                "data": {"values": seeds},
                "mark": {"type": "point", "size": 28, "opacity": 0.6},
                "encoding": {**place, "x": _of("seed", **x)},
            },
            {"mark": DOT, "encoding": {**place, **words, "x": _of("mean", **x)}},
        ],
    }


def as_file(spec: Mapping[str, Any], title: str) -> str:
    """A standalone chart, light by default and dark if the reader prefers it."""
    svg = _render({**spec, "title": textwrap.wrap(title, 52), "padding": 14})
    light, dark = palette()
    rules = []
    for name in sorted(light, key=len, reverse=True):
        if f"var(--{name})" in svg:
            svg = svg.replace(f"var(--{name})", light[name])
            rules += [f'[{kind}="{light[name]}"]{{{kind}:{dark[name]}}}' for kind in ("fill", "stroke")]
    paper = f'<rect width="100%" height="100%" rx="6" fill="{light["surface"]}"/>'
    rules.append(f'[fill="{light["surface"]}"]{{fill:{dark["surface"]}}}')
    head, rest = svg.split(">", 1)
    return (
        f'{head} role="img" aria-label="{escape(title)}">'
        f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>{paper}{rest}\n"
    )


@cache
def palette() -> tuple[dict[str, str], dict[str, str]]:
    """Colours by their names in the pages' style sheet, for light and dark mode."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part))
        for part in STYLE_SHEET.read_text("utf-8").split("@media", 1)
    )
    return light, light | dark


def _of(field: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", **more}


def _by(field: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "nominal", **more}


def _interval(of: Mapping[str, Any]) -> str:
    return "" if of["low"] is None or of["high"] is None else f" {in_words(of['low'], of['high'])}"


def _over_cost(
    points: Rows,
    cost: str,
    x_label: str,
    *,
    legend: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    rows = [
        {"curve": p["curve"], "x": p[cost], "y": 100 * p["value"],
         "low": p["low"] and 100 * p["low"], "high": p["high"] and 100 * p["high"],
         "words": f"{p['name']}: {100 * p['value']:.1f} %{_interval(p)} at {number(p[cost])}"}
        for p in points
    ]  # fmt: skip
    y_scale: dict[str, Any] = {"zero": False}
    if max(p["value"] if p["high"] is None else p["high"] for p in points) <= 0:
        y_scale["domain"] = [0, 1]
    names = list(dict.fromkeys(p["curve"] for p in points))
    return {
        "data": {"values": rows},
        "encoding": {
            # Most FLOPs are the prompt's, so from 0 on all points would be one.
            "x": _of("x", title=x_label, scale={"zero": cost != "gflops", "nice": True}),
            "color": _by("curve", sort=None, legend=legend, scale={"domain": names, "range": COLOURS}),
            "y": _of("y", title=None, axis={"labelExpr": "datum.label + '%'"}, scale=y_scale),
        },
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {
                    "strokeDash": _by("curve", legend=None, scale={"domain": names, "range": DASHES})
                },
            },
            {
                "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
                "mark": {"type": "rule", "opacity": 0.6, "strokeWidth": 1.5},
                "encoding": {"y": _of("low"), "y2": {"field": "high"}},
            },
            {"mark": DOT, "encoding": {"description": {"field": "words"}}},
        ],
    }


def _on_page(spec: Mapping[str, Any], label: str) -> Markup:
    """Embed a chart in a page, as wide as the column."""
    padding = {"left": LEFT, "top": TOP, "right": RIGHT, "bottom": BOTTOM}
    size = {"width": PLOT_WIDTH, "height": PLOT_HEIGHT, "autosize": "none", "padding": padding}
    head, body = _render({**spec, **size}).split(">", 1)
    head = re.sub(r' (?:width|height)="\d+"', "", head)
    return Markup(f'{head} class="chart" role="img" aria-label="{escape(label)}">{body}')


def _render(spec: Mapping[str, Any]) -> str:
    """SVG text of a Vega-Lite chart; descriptions of marks become tooltips."""
    svg = vl_convert.vegalite_to_svg({**spec, "config": CONFIG})
    svg = svg.replace(' class="marks"', "", 1).replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1)
    return re.sub(r'<path aria-label="([^"]*)"([^>]*)/>', r"<path\2><title>\1</title></path>", svg)
