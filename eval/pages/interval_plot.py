"""Means with intervals as one SVG file: a row an arm, a panel a metric, a colour a slice, a dot a seed.

The file stands alone: its colours follow the reader's light or dark scheme, and nothing is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import escape

from eval.pages.plots import nice_ticks, number

WIDTH, LABELS, GAP, MARGIN = 820, 150, 26, 12
"""Of the picture, of the arms' names, between panels, and at the edges; in pixels at full size."""
LINE, PAD = 17, 7
"""Height of one interval, and what separates one arm from the next."""
COLOURS = (
    ("#3556c4", "#9db2ff"),
    ("#c2571a", "#f5a06a"),
    ("#0a7a5a", "#5fd0a8"),
    ("#9a3f96", "#e39be0"),
    ("#6d6a1c", "#d4d06a"),
    ("#4d5560", "#b5bac4"),
)
"""Of the slices, in light and in dark schemes: the report page's."""


@dataclass(frozen=True)
class Mark:
    """One mean and what surrounds it.

    Attributes:
        arm: row.
        group: slice of the data; has its colour.
        panel: metric.
        mean: where the dot stands.
        low: lower end of the interval.
        high: upper end.
        seeds: the means of single seeds, drawn as faint dots.
    """

    arm: str
    group: str
    panel: str
    mean: float
    low: float
    high: float
    seeds: Sequence[float] = ()


def interval_chart(marks: Sequence[Mark], *, title: str, percent: bool = True) -> str:
    """Draw all marks; arms, slices and panels stand in the order of their first mark.

    Args:
        marks: finite numbers; not every combination has to be there.
        title: what is compared; the first line and the accessible name.
        percent: values are fractions of 1, shown as per cent.

    Returns:
        The text of an SVG file.

    Raises:
        ValueError: no marks, or more slices than colours.
    """
    if not marks:
        raise ValueError(f"plot {title!r} has nothing to show")
    arms, groups, panels = (
        list(dict.fromkeys(getattr(mark, name) for mark in marks)) for name in ("arm", "group", "panel")
    )
    if len(groups) > len(COLOURS):
        raise ValueError(f"plot {title!r} has {len(groups)} slices, there are {len(COLOURS)} colours")
    scale, unit = (100.0, "%") if percent else (1.0, "")
    top = 62 if len(groups) > 1 else 46
    row_height = LINE * len(groups) + PAD
    bottom = top + row_height * len(arms)
    panel_width = (WIDTH - LABELS - 2 * MARGIN - GAP * (len(panels) - 1)) / len(panels)
    parts = [f'<text class="title" x="{MARGIN}" y="20">{escape(title)}</text>']
    if len(groups) > 1:
        x = float(LABELS + MARGIN)
        for place, group in enumerate(groups):
            parts.append(f'<circle class="g{place} mean" cx="{x + 4:.1f}" cy="33" r="4"/>')
            parts.append(f'<text x="{x + 13:.1f}" y="37">{escape(group)}</text>')
            x += 34 + 6.6 * len(group)
    for row, arm in enumerate(arms):
        y = top + row_height * row
        if row % 2:
            parts.append(
                f'<rect class="band" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{row_height}"/>'
            )
        parts.append(f'<text x="{MARGIN + 4}" y="{y + row_height / 2 + 4:.1f}">{escape(arm)}</text>')
    for column, panel in enumerate(panels):
        shown = [mark for mark in marks if mark.panel == panel]
        left = LABELS + MARGIN + column * (panel_width + GAP)
        values = [scale * v for mark in shown for v in (mark.low, mark.high, mark.mean, *mark.seeds)]
        ticks = nice_ticks(min(values), max(values), 4)

        def at(value: float, left: float = left, ticks: Sequence[float] = ticks) -> float:
            return left + (value * scale - ticks[0]) / (ticks[-1] - ticks[0]) * panel_width

        parts.append(f'<text class="panel" x="{left:.1f}" y="{top - 8}">{escape(panel)}</text>')
        for tick in ticks:
            x = at(tick / scale)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{number(tick)}{unit}</text>'
            )
        for mark in shown:
            place = groups.index(mark.group)
            y = top + row_height * arms.index(mark.arm) + PAD / 2 + LINE * (place + 0.5)
            words = f"{mark.arm}, {mark.group}, {panel}: {scale * mark.mean:.1f}{unit} [{scale * mark.low:.1f}, {scale * mark.high:.1f}]"
            parts.append(f'<g class="g{place}"><title>{escape(words)}</title>')
            parts.append(
                f'<line class="whisker" x1="{at(mark.low):.1f}" x2="{at(mark.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts += [f'<circle class="seed" cx="{at(seed):.1f}" cy="{y:.1f}" r="3"/>' for seed in mark.seeds]
            parts.append(f'<circle class="mean" cx="{at(mark.mean):.1f}" cy="{y:.1f}" r="4"/></g>')
    light = "".join(f".g{place}{{color:{pair[0]}}}" for place, pair in enumerate(COLOURS))
    dark = "".join(f".g{place}{{color:{pair[1]}}}" for place, pair in enumerate(COLOURS))
    style = (
        "text{font:12px system-ui,sans-serif;fill:#1c1e22}.title{font-size:14px;font-weight:600}"
        ".panel{font-weight:600}.tick{font-size:11px;fill:#595f6a}.grid{stroke:#dfdcd5}.paper{fill:#fff}"
        ".band{fill:#f1efea}.whisker{stroke:currentColor;stroke-width:2}.mean{fill:currentColor}"
        ".seed{fill:none;stroke:currentColor;opacity:.55}"
        f"{light}@media(prefers-color-scheme:dark){{text{{fill:#ebe9e4}}.tick{{fill:#a7acb7}}.grid{{stroke:#31343b}}"
        f".paper{{fill:#1b1d21}}.band{{fill:#24262c}}{dark}}}"
    )
    height = bottom + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>' + "\n".join(parts) + "</svg>\n"
    )
