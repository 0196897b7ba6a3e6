"""Training logs, and line charts as inline SVG: sharp on a phone, in both colour schemes, without a plotting library.

A chart is drawn at the size of a phone's column (360 units wide) and laid out as small multiples, so its text never
shrinks. Colours come from the page's style sheet (classes ``series-0`` ...), which knows dark from light.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from rge.common.errors import UserError

WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = (
    46,
    18,
    24,
    40,
)  # room for tick labels, half of the last one, stage names, the axis label
MAX_POINTS = 160
NUM_SERIES_STYLES = 6

CURVE_NAMES = {
    "loss": ("Loss", False),
    "loss_lm": ("Rationale loss (nats a token)", False),
    "loss_contrastive": ("Contrastive loss (nats)", False),
    "hit_at_1": ("In-batch hit@1", True),
    "forced_rate": ("Forced stops", True),
    "rationale_tokens_mean": ("Rationale length (tokens)", False),
}
"""Keys of ``metrics.jsonl`` that are drawn, in this order: name of the chart, and whether it shows per cent."""


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        label: name in the legend and in the hover text; empty for a chart of one line.
        x: strictly increasing.
        y: as long as ``x``, finite.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with a name, such as a training stage."""

    label: str
    start: float
    end: float


def nice_ticks(low: float, high: float, target: int) -> list[float]:
    """Round axis values that cover ``[low, high]``.

    Args:
        low: smallest value shown.
        high: largest value shown; if it equals ``low``, the range is widened.
        target: about how many ticks; at least 2.

    Returns:
        Ascending multiples of 1, 2, 2.5 or 5 times a power of ten; the first is <= low, the last >= high.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(target - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float, *, digits: int = 3) -> str:
    """A number for people: ``digits`` significant digits, no exponent between 0.001 and a million.

    Args:
        value: finite.
        digits: significant digits of small numbers; whole numbers keep all of theirs.
    """
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}g}"
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}".rstrip("0").rstrip(".")


def thin(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Mean over equal stretches of the series, at most ``max_points`` of them; a short series stays as it is."""
    n = len(series.x)
    if n <= max_points:
        return series
    edges = [round(i * n / max_points) for i in range(max_points + 1)]
    cuts = list(zip(edges[:-1], edges[1:], strict=True))
    return Series(
        series.label,
        [sum(series.x[a:b]) / (b - a) for a, b in cuts],
        [sum(series.y[a:b]) / (b - a) for a, b in cuts],
    )


def smooth(series: Series, window: int) -> Series:
    """Centred moving average over ``window`` points, narrower at both ends; the x values stay."""
    half = max(window, 1) // 2
    n = len(series.y)
    sums = [0.0]
    for value in series.y:
        sums.append(sums[-1] + value)
    y = []
    for i in range(n):
        reach = min(half, i, n - 1 - i)
        y.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return Series(series.label, series.x, y)


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    x_label: str = "step",
    bands: Sequence[Band] = (),
    percent: bool = False,
    zero: bool = True,
) -> Markup:
    """Draw lines over a shared x axis: the values faint, their moving average strong.

    Args:
        series: one or more, each with at least one point; the first six have distinct colours and dashes.
        name: what the y axis shows; the chart's accessible name.
        x_label: text under the x axis.
        bands: named stretches of x, drawn behind the lines where there is more than one.
        percent: y is a fraction of 1, shown as per cent.
        zero: let the y axis begin at zero, so that heights can be compared.

    Returns:
        An ``<svg>`` element. Its ``data-chart`` attribute holds what the page's script needs to show a value on
        hover; without script the chart is complete but for that.

    Raises:
        ValueError: no series, an empty series, or x and y of different length.
    """
    if not series:
        raise ValueError(f"chart {name!r} must have a series, got none")
    for one in series:
        if not one.x or len(one.x) != len(one.y):
            raise ValueError(
                f"chart {name!r}: series {one.label!r} has {len(one.x)} x and {len(one.y)} y values"
            )
    # A line breaks where a stage ends: the same name may stand for another sum of losses there.
    raws = [[thin(part) for part in _split(one, bands)] for one in series]
    # a window as wide as a 16th of the line calms the noise of single steps and keeps every bend that can be seen
    lines = [[smooth(part, len(part.x) // 16) for part in parts_] for parts_ in raws]
    joined = [
        Series(one.label, [x for part in parts_ for x in part.x], [y for part in parts_ for y in part.y])
        for one, parts_ in zip(series, lines, strict=True)
    ]

    scale = 100.0 if percent else 1.0
    y_all = [v * scale for parts_ in raws for part in parts_ for v in part.y]
    y_ticks = nice_ticks(min(0.0, *y_all) if zero else min(y_all), max(y_all), 5)
    x_low, x_high = min(one.x[0] for one in series), max(one.x[-1] for one in series)
    x_low, x_high = (x_low - 0.5, x_high + 0.5) if x_low == x_high else (x_low, x_high)
    x_ticks = [t for t in nice_ticks(x_low, x_high, 5) if x_low <= t <= x_high]
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at_x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * plot_width

    def at_y(value: float) -> float:
        return TOP + (y_ticks[-1] - value) / (y_ticks[-1] - y_ticks[0]) * plot_height

    def points(one: Series) -> str:
        return " ".join(f"{at_x(x):.1f},{at_y(y * scale):.1f}" for x, y in zip(one.x, one.y, strict=True))

    unit = "%" if percent else ""
    parts: list[str] = []
    visible = [band for band in bands if band.end > x_low and band.start < x_high]
    if len(bands) > 1:
        for index, band in enumerate(visible):
            start, end = at_x(max(band.start, x_low)), at_x(min(band.end, x_high))
            shade = " odd" if index % 2 else ""
            parts.append(
                f'<rect class="band{shade}" x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" '
                f'height="{plot_height}"/>'
            )
            if (end - start) > 6.2 * len(band.label):  # a name that would run into the next one is left out
                parts.append(
                    f'<text class="stage" x="{start + 4:.1f}" y="{TOP - 7}">{escape(band.label)}</text>'
                )
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}{unit}</text>'
        )
    for tick in x_ticks:
        x = at_x(tick)
        bottom = HEIGHT - BOTTOM
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="label" x="{LEFT + plot_width / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    for index, (raw_parts, line_parts) in enumerate(zip(raws, lines, strict=True)):
        style = f"series-{index % NUM_SERIES_STYLES}"
        for raw, line in zip(raw_parts, line_parts, strict=True):
            if raw.y != line.y:
                parts.append(f'<polyline class="raw {style}" points="{points(raw)}"/>')
            if len(line.x) > 1:
                parts.append(f'<polyline class="line {style}" points="{points(line)}"/>')
        last = line_parts[-1]
        parts.append(
            f'<circle class="last {style}" cx="{at_x(last.x[-1]):.1f}" cy="{at_y(last.y[-1] * scale):.1f}" r="3"/>'
        )
    hover = {
        "plot": [LEFT, TOP, plot_width, plot_height],
        "domain": [x_low, x_high, y_ticks[0], y_ticks[-1]],
        "unit": unit,
        "xLabel": x_label,
        "series": [
            {"label": one.label, "x": [_short(v) for v in one.x], "y": [_short(v * scale) for v in one.y]}
            for one in joined
        ],
    }
    data = escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")))
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(_spoken(name, joined, x_label, scale, unit))}" data-chart="{data}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class Point:
    """One mark of a scatter plot: ``y`` with its interval is a fraction of 1; the bounds are None without one."""

    label: str
    x: float
    y: float
    low: float | None
    high: float | None


def scatter(points: Sequence[Point], *, name: str, x_label: str) -> Markup:
    """Draw points with vertical intervals, in per cent over a cost; the x axis is logarithmic where costs differ tenfold.

    Args:
        points: at least one; the first six have distinct colours, all have numbers.
        name: what the y axis shows; part of the chart's accessible name.
        x_label: text under the x axis.

    Returns:
        An ``<svg>`` element.

    Raises:
        ValueError: no points, or a negative cost.
    """
    if not points or min(point.x for point in points) < 0:
        raise ValueError(f"plot {name!r} must have points with costs from 0 up")
    tops = [100 * (point.y if point.high is None else point.high) for point in points]
    y_ticks = nice_ticks(0.0, max(*tops, 1e-9), 5)
    positive = [point.x for point in points if point.x > 0]
    log = len(positive) == len(points) and max(positive) >= 10 * min(positive)
    if log:
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        x_ticks = [10.0**power for power in range(first, max(last, first + 1) + 1)]
    else:
        x_ticks = nice_ticks(0.0, max(*positive, 1e-9) if positive else 1.0, 5)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    ends = [math.log10(x) if log else x for x in (x_ticks[0], x_ticks[-1])]

    def at_x(value: float) -> float:
        return LEFT + ((math.log10(value) if log else value) - ends[0]) / (ends[1] - ends[0]) * plot_width

    def at_y(value: float) -> float:
        return TOP + (y_ticks[-1] - value) / (y_ticks[-1] - y_ticks[0]) * plot_height

    bottom = HEIGHT - BOTTOM
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{at_y(tick) + 3.5:.1f}" text-anchor="end">{number(tick)}%</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<line class="axis" x1="{at_x(tick):.1f}" x2="{at_x(tick):.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        f'<text class="tick" x="{at_x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>'
        for tick in x_ticks
    ]
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="label" x="{LEFT + plot_width / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for index, point in enumerate(points):
        x, style = at_x(point.x), f"series-{index % NUM_SERIES_STYLES}"
        if point.low is not None and point.high is not None:
            y1, y2 = at_y(100 * point.low), at_y(100 * point.high)
            parts.append(
                f'<line class="whisker {style}" x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
            )
        y = at_y(100 * point.y)
        parts.append(f'<circle class="last {style}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(f'<text class="mark" x="{x + 8:.1f}" y="{y + 4:.1f}">{index + 1}</text>')
    spoken = "; ".join(f"{p.label} {100 * p.y:.1f} % at {number(p.x)}" for p in points)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{name} over {x_label}: {spoken}")}">{"".join(parts)}</svg>'
    )


def _split(series: Series, bands: Sequence[Band]) -> list[Series]:
    """The parts of a series that lie in different bands; bands are open at their start."""
    parts: dict[int, tuple[list[float], list[float]]] = {}
    for x, y in zip(series.x, series.y, strict=True):
        place = next((i for i, band in enumerate(bands) if band.start < x <= band.end), -1)
        xs, ys = parts.setdefault(place, ([], []))
        xs.append(x)
        ys.append(y)
    return [Series(series.label, xs, ys) for xs, ys in parts.values()]


def _short(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1e4 else round(value)


def _spoken(name: str, lines: Sequence[Series], x_label: str, scale: float, unit: str) -> str:
    """The chart in one sentence, for those who do not see it."""
    ends = [
        f"{one.label + ': ' if one.label else ''}{number(one.y[0] * scale)}{unit} at {x_label} {number(one.x[0])}, "
        f"{number(one.y[-1] * scale)}{unit} at {x_label} {number(one.x[-1])}"
        for one in lines
    ]
    return f"{name}. " + "; ".join(ends)


# --- training logs --------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """Curves of one run: key -> (steps, values), and the stages on the same step axis."""

    label: str
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    stages: list[Band] = field(default_factory=list)


def read_training_logs(paths: Sequence[Path]) -> list[Training]:
    """Read ``metrics.jsonl`` files.

    Files without a stage in common are stages of one run and are laid end to end, in the order given; otherwise each
    file is a run of its own. A stage that counts its steps from the beginning continues the axis; a step met again
    within a stage (a resumed run) replaces the earlier one.

    Args:
        paths: one JSON object a line, with ``step`` and any of the losses, ``forced_rate``,
            ``rationale_tokens_mean``; ``stage`` where the run has several.

    Raises:
        UserError: a file is missing or empty, a line is not a JSON object with a step, or a value is not finite.
    """
    logs = [(Path(path), _read_log(Path(path))) for path in paths]
    stages = [{entry.get("stage") for entry in entries} for _, entries in logs]
    flat = [stage for found in stages for stage in found]
    if len(logs) > 1 and None not in flat and len(flat) == len(set(flat)):
        return [_training("", [entry for _, entries in logs for entry in entries])]
    labels = _short_names([path for path, _ in logs])
    return [_training(label, entries) for label, (_, entries) in zip(labels, logs, strict=True)]


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"training log {path} cannot be read: {error.strerror or error}") from error
    entries = []
    lines = content.splitlines()
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            if place == len(lines) and not content.endswith("\n"):
                break  # a run that was killed, or is still going, may end in half a line
            raise UserError(f"{path}:{place} is not JSON: {error}") from error
        if not isinstance(entry, dict) or "step" not in entry:
            raise UserError(f"{path}:{place} must be a JSON object with a step, got {line[:80]}")
        for key in ("step", *filter(_is_curve, entry)):
            if entry[key] is not None:
                check_finite(entry[key], f"{path}:{place}: {key}")
        entries.append(entry)
    if not entries:
        raise UserError(f"training log {path} is empty")
    return entries


def _is_curve(key: str) -> bool:
    return key in CURVE_NAMES or key.startswith("loss")


def _training(label: str, entries: Sequence[Mapping[str, Any]]) -> Training:
    training = Training(label)
    values: dict[str, dict[float, float]] = defaultdict(dict)
    offset, last, stage = 0.0, 0.0, object()
    for entry in entries:
        if entry.get("stage") != stage:
            stage = entry.get("stage")
            if entry["step"] + offset <= last:
                offset = last
            training.stages.append(Band(str(stage or "").replace("_", " "), last, last))
        x = entry["step"] + offset
        last = max(last, x)
        training.stages[-1] = Band(training.stages[-1].label, training.stages[-1].start, last)
        for key in filter(_is_curve, entry):
            if entry[key] is not None:
                values[key][x] = float(entry[key])
    for key, points in values.items():
        steps = sorted(points)
        training.curves[key] = (steps, [points[step] for step in steps])
    return training


def _short_names(paths: Sequence[Path]) -> list[str]:
    """What tells the files apart: their paths without the parts that all of them share."""
    parts = [path.with_suffix("").parts for path in paths]
    if len(parts) < 2:
        return [""]
    kept = [
        [part for place, part in enumerate(one) if any(place >= len(o) or o[place] != part for o in parts)]
        for one in parts
    ]
    return ["/".join(one) or str(path) for one, path in zip(kept, paths, strict=True)]


def check_finite(value: object, where: str) -> None:
    """Refuse what cannot be shown as a number.

    Args:
        value: as read from JSON.
        where: file and key, for the message.

    Raises:
        UserError: it is no number, not a number, or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{where} must be a finite number, got {value!r}")
