"""Rows of a board, measured and published: their labels, and which of them are ranked.

Only comparable rows are ranked: those with the same set, profile, import options and release.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from eval.benchmarks.published_tables import Column, Published
from eval.benchmarks.registry import GENERIC
from eval.pages.evaluations import Evaluation, Figure, ways_of
from eval.scoring.metrics import lower_is_better
from eval.scoring.protocol import Protocol

MAX_COLUMNS = 8
"""Maximum number of columns of a board's table; others are only in the heat map."""
ROUNDED = 1e-5
"""Tolerance for equality with figures of released scorers, which round."""
TRAINED, UNRANKED = "TRAINED ON THE TEST", ": unranked"
MAX_MODELS = 8
"""Maximum number of models in the heat map: first all measured ones, then the best published ones."""


@dataclass(frozen=True)
class Row:
    """A model on a board, measured (with its ``evaluation``) or published."""

    label: str
    note: str  # mode, modality and profile of a measured row; a remark on a published one
    figures: list[Figure | None]  # one per column
    slices: dict[str, Figure]  # of the main metric
    evaluation: Evaluation | None = None  # None: published
    labels: Sequence[str] = ()  # its special properties
    warnings: Sequence[str] = ()
    comparable: bool = True  # whether it is ranked
    place: int | None = None

    @property
    def published(self) -> bool:
        """Whether its figures were copied."""
        return self.evaluation is None


def name_of(run: Evaluation) -> str:
    """Name of a measured row whose run has no label."""
    name = str((run.results.get("model") or {}).get("name") or run.results.get("checkpoint") or "")
    if not name:
        return str(run.results.get("tag") or run.directory.name)
    parts = [part for part in Path(name).parts if part not in ("final", "/")]
    return "/".join(parts[-2:])


def note_of(run: Evaluation) -> str:
    """Conditions of a measured row."""
    modality = run.results.get("query_modality")
    withheld = [] if modality in (None, "both") else [f"query {modality} only"]
    return ", ".join([*ways_of(run.results), *withheld])


def measured_row(run: Evaluation, columns: Sequence[Column], metric: str, known: bool) -> Row:
    """A row of one of our evaluations; `known`: the set's content is, so rows without a recorded content are not ranked."""
    official = run.results.get("profile") == "official"
    figures = [_official(run, column) if official else run.figure(*column.path) for column in columns]
    warnings = [str(warning) for warning in run.results.get("warnings") or []]
    labels = _labels(run.results, warnings, known)
    comparable = not any(label.endswith(UNRANKED) for label in labels)
    if official and run.results.get("coverage", 1.0) < 1.0:
        comparable = False  # this profile leaves out queries without a ranking, which inflates figures
    return Row(run.label, run.note, figures, _slices(run, metric), run, labels, warnings, comparable)


def _labels(results: Mapping[str, Any], warnings: Sequence[str], known: bool) -> list[str]:
    """Labels of a row; one that ends with `UNRANKED` means that it is not ranked."""
    about, coverage = results["set"], results.get("coverage", 1.0)
    code = (results.get("settings") or {}).get("release_code", "")
    labels = [
        (f"{results.get('profile')} protocol", is_benchmark(results)),
        *((f"{key}={value}", key != "task") for key, value in (about.get("made_with") or {}).items()),
        (f"trained on the test{UNRANKED}", TRAINED in "\n".join(warnings)),
        (f"{100 * coverage:.1f} % of the queries", coverage < 1.0),
        *((f"plugin {name}", True) for name in results.get("plugins") or {}),
        (f"as released, {code}".removesuffix(", "), results.get("asked_as_released")),
        (f"the set's texts and pictures were not recorded{UNRANKED}", known and not about.get("content")),
    ]
    return [label for label, applies in labels if applies]


def is_benchmark(results: Mapping[str, Any]) -> bool:
    """Whether the figures follow a benchmark's protocol."""
    return (results.get("benchmark") or GENERIC) != GENERIC


def _official(run: Evaluation, column: Column) -> Figure | None:
    """The released scorer's figure, with the interval of our corresponding figure if both agree."""
    figure = run.figure(*column.path)
    if column.official is None:
        return figure
    released = run.figure(*column.official)
    if released is None or figure is None or abs(released.value - figure.value) > ROUNDED:
        return released
    return Figure(released.value, figure.low, figure.high)


def why_unranked(results: Mapping[str, Any], table: Published) -> list[str]:
    """Reasons why a published table cannot be ranked among measured rows; empty if it can."""
    about = results["set"]
    reasons = [why] if (why := table.not_this_set(about)) else []
    if results.get("profile") not in table.profiles:
        reasons.append(
            f"the rows here have the {results.get('profile')} protocol, the published ones the {table.profiles[0]} protocol"
        )
    for key, value in table.made_with.items():
        made = (about.get("made_with") or {}).get(key)
        if made != value:
            reasons.append(f"the set was imported with {key}={made}, the published rows have {key}={value}")
    return reasons


def numbered(rows: Sequence[Row], main: int, metric: str) -> list[Row]:
    """Rows sorted by their main figure, of ``metric``, with places for the comparable ones that have it; equal figures share a place."""
    known = [order(figure, metric) for row in rows if row.comparable and (figure := row.figures[main])]

    def place(figure: Figure | None) -> int | None:
        return None if figure is None else 1 + sum(other < order(figure, metric) for other in known)

    ordered = sorted(rows, key=lambda row: order(row.figures[main], metric))
    return [replace(row, place=place(row.figures[main]) if row.comparable else None) for row in ordered]


def order(figure: Figure | None, metric: str) -> tuple[bool, float]:
    """Sort key of figures of a metric: best first, None last."""
    value = figure.value if figure else 0.0
    return figure is None, value if lower_is_better(metric) else -value


def generic_columns(results: Mapping[str, Any]) -> tuple[list[Column], int]:
    """Columns for a set without a published table, and the index of the main one."""
    block = "macro" if results.get("suite") else "micro"
    headline = [one["metric"] for one in results.get("headline") or []]
    names = [name for name in dict.fromkeys([*headline, *Protocol().headline]) if name in results[block]]
    return [Column(name=name, figure=(block, name)) for name in names[:MAX_COLUMNS]], 0


def published_rows(table: Published) -> list[Row]:
    """Rows of a published table."""
    out, metric = [], table.columns[table.main].path[-1]
    for row in table.rows:
        figures = [None if value is None else Figure(value) for value in row.values]
        slices = {
            column.path[1]: figure
            for column, figure in zip(table.columns, figures, strict=True)
            if len(column.path) == 3 and column.path[-1] == metric and figure is not None
        }
        out.append(Row(row.model, row.note, figures, slices, comparable=not row.other_release))
    return out


def _slices(run: Evaluation, metric: str) -> dict[str, Figure]:
    """Figures by slice; of two columns with the same value, the second one is named."""
    out: dict[str, Figure] = {}
    for column in run.reported_by:
        names = run.names(f"by_{column}")
        for name in names if len(names) > 1 else ():
            if figure := run.figure(f"by_{column}", name, metric):
                out[f"{column} {name}" if name in out else name] = figure
    return out


def heat_map(rows: Sequence[Row], foreign: Sequence[Row]) -> dict[str, Any] | None:
    """Categories by models; None for fewer than two categories. A cell is a figure and its place between the lowest (0) and highest (1)."""
    # all measured rows, then the best published ones
    sliced = [row for row in (*rows, *foreign) if row.slices]
    chosen = sorted(sliced, key=lambda row: row.published)[:MAX_MODELS]
    names = list(dict.fromkeys(chain.from_iterable(row.slices for row in chosen)))
    if len(names) < 2:
        return None
    values = [figure.value for row in chosen for figure in row.slices.values()]
    low, high = min(values), max(values)

    def cell(figure: Figure | None) -> tuple[Figure, float] | None:
        return None if figure is None else (figure, (figure.value - low) / ((high - low) or 1.0))

    return {
        "models": [(row.label, row.note, row.published) for row in chosen],
        "lines": [(name.replace("_", " "), [cell(row.slices.get(name)) for row in chosen]) for name in names],
    }
