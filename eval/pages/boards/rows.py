"""Rows of a board: measured and published, what sets each apart, and which of them take a place.

A place means that two rows can be compared: the same set, profile, choices of the import and release.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from eval.benchmarks.published_tables import Column, Published
from eval.benchmarks.registry import GENERIC
from eval.pages.evaluations import Evaluation, Figure
from rge.common.errors import UserError

MAX_COLUMNS = 8
"""Columns of a board's table; further ones are in the heat map only."""
ROUNDED = 1e-5
"""Released scorers round: their figure and ours within this are the same figure."""
TRAINED, NO_PLACE = "TRAINED ON THE TEST", ": no place"
COLUMNS = ("recall@1", "recall@10", "mrr", "ndcg@10")
"""Of a set without a published table."""
MAX_MODELS = 8
"""Models of the heat map: all measured ones first, then the best published."""


@dataclass(frozen=True)
class Row:
    """A model on a board.

    Attributes:
        label: its name.
        note: mode, modality and profile of a measured row; a remark on a published one.
        figures: one a column, None where there is none.
        published: whether the figures are from a publication.
        slices: slice -> figure of the main metric.
        evaluation: of a measured row.
        labels: what sets the row apart, in a word or two each.
        warnings: of its results.json.
        comparable: whether it takes a place among the others; place None stands beside those that do not.
        place: its number among the comparable rows of its board.
    """

    label: str
    note: str
    figures: list[Figure | None]
    published: bool
    slices: dict[str, Figure]
    evaluation: Evaluation | None = None
    labels: Sequence[str] = ()
    warnings: Sequence[str] = ()
    comparable: bool = True
    place: int | None = None


@dataclass(frozen=True)
class HeatMap:
    """Figures by category.

    Attributes:
        models: (label, note, whether published), one a column.
        lines: (category, cells), a cell being a figure and how far it lies from the lowest (0) to the highest (1) of all.
    """

    models: list[tuple[str, str, bool]]
    lines: list[tuple[str, list[tuple[Figure, float] | None]]]


def name_of(one: Evaluation) -> str:
    """What a measured row is called where its run has no label."""
    name = str((one.results.get("model") or {}).get("name") or one.results.get("checkpoint") or "")
    if not name:
        return str(one.results.get("tag") or one.directory.name)
    parts = [part for part in Path(name).parts if part not in ("final", "/")]
    return "/".join(parts[-2:])


def note_of(one: Evaluation) -> str:
    """How it was asked."""
    mode, modality = one.results.get("query_mode"), one.results.get("query_modality")
    words = [str(mode) if mode else "a ranking made elsewhere"]
    point = (one.results.get("budget") or {}).get("name")
    if point not in (None, mode):  # one of the ways of asking of `budget`
        words = [str(point)]
    if judged := one.results.get("rerank"):
        words.append(f"first {judged['top_n']} judged")
    if modality not in (None, "both"):
        words.append(f"{modality} of the query only")
    return ", ".join(words)


def measured_row(
    label: str, note: str, one: Evaluation, columns: Sequence[Column], metric: str, known: bool
) -> Row:
    """A row of ours.

    `known` says that the board knows the content of its set, so that a row which does not say takes no place.
    """
    official = one.results.get("profile") == "official"
    figures = [_official(one, column) if official else one.figure_at(column.path) for column in columns]
    warnings = [str(warning) for warning in one.results.get("warnings") or []]
    labels = _labels(one.results, warnings, known)
    comparable = not any(label.endswith(NO_PLACE) for label in labels)
    if official and one.results.get("coverage", 1.0) < 1.0:
        comparable = False  # officially queries without a ranking are left out, which flatters
    return Row(label, note, figures, False, _slices(one, metric), one, labels, warnings, comparable)


def _labels(results: Mapping[str, Any], warnings: Sequence[str], known: bool) -> list[str]:
    """What sets a row apart; one that ends with `NO_PLACE` takes none."""
    wanted, coverage = results["set"], results.get("coverage", 1.0)
    code = (results.get("settings") or {}).get("release_code", "")
    found = [
        (f"{results.get('profile')} protocol", is_benchmark(results)),
        *((f"{key}={value}", key != "task") for key, value in (wanted.get("made_with") or {}).items()),
        (f"trained on the test{NO_PLACE}", TRAINED in "\n".join(warnings)),
        (f"{100 * coverage:.1f} % of the queries", coverage < 1.0),
        *((f"plugin {name}", True) for name in results.get("plugins") or {}),
        (f"as released, {code}".removesuffix(", "), results.get("asked_as_released")),
        (f"written before sets had a content{NO_PLACE}", known and not wanted.get("content")),
    ]
    return [label for label, applies in found if applies]


def is_benchmark(results: Mapping[str, Any]) -> bool:
    """Whether figures are by the protocol of a benchmark."""
    return (results.get("benchmark") or GENERIC) != GENERIC


def _official(one: Evaluation, column: Column) -> Figure | None:
    """The released scorer's figure, with the interval of our own figure of the same name where they are the same."""
    ours = one.figure_at(column.path)
    if column.official is None:
        return ours
    theirs = one.figure_at(column.official)
    if theirs is None or ours is None or abs(theirs.value - ours.value) > ROUNDED:
        return theirs
    return Figure(theirs.value, ours.low, ours.high)


def why_unranked(results: Mapping[str, Any], table: Published) -> list[str]:
    """Why rows of a published table cannot be numbered among measured ones; empty if they can."""
    wanted = results["set"]
    found = [why] if (why := table.not_this_set(wanted)) else []
    if results.get("profile") not in table.profiles:
        found.append(
            f"the rows here have the {results.get('profile')} protocol, published ones the {table.profiles[0]} protocol"
        )
    for key, value in table.made_with.items():
        made = (wanted.get("made_with") or {}).get(key)
        if made != value:
            found.append(f"the set was imported with {key}={made}, published rows are of {key}={value}")
    return found


def numbered(rows: Sequence[Row], main: int) -> list[Row]:
    """Rows by their main figure; the comparable ones numbered."""
    place, out = 0, []
    for row in sorted(rows, key=lambda row: order(row.figures[main])):
        place += row.comparable
        out.append(replace(row, place=place if row.comparable else None))
    return out


def order(figure: Figure | None) -> tuple[bool, float]:
    """Sorts figures, the best first, none last."""
    return figure is None, -(figure.value if figure else 0.0)


def generic_columns(results: Mapping[str, Any]) -> tuple[list[Column], int]:
    """Columns of a set without a published table, and which is the main one."""
    block = "macro" if results.get("suite") else "micro"
    headline = [one["metric"] for one in results.get("headline") or []]
    names = [name for name in dict.fromkeys([*headline, *COLUMNS]) if name in (results.get(block) or {})]
    if not names:
        raise UserError(f"an evaluation of {results['set']['name']} has none of {', '.join(COLUMNS)}")
    return [Column(name, (block, name)) for name in names[:MAX_COLUMNS]], 0


def published_rows(table: Published) -> list[Row]:
    """Rows of a published table."""
    out = []
    for number, (model, note, values) in enumerate(table.rows):
        figures = [None if value is None else Figure(value) for value in values]
        slices = {
            column.path[1]: figure
            for column, figure in zip(table.columns, figures, strict=True)
            if len(column.path) == 3
            and figure is not None
            and column.path[-1] == table.columns[table.main].path[-1]
        }
        out.append(Row(model, note, figures, True, slices, comparable=number not in table.other_release))
    return out


def _slices(one: Evaluation, metric: str) -> dict[str, Figure]:
    """Figures of every category, and of whatever else the set is reported by."""
    found: dict[str, Figure] = {}
    for block, slices in one.results.items():
        if block.startswith("by_") and isinstance(slices, Mapping) and len(slices) > 1:
            for name in slices:
                figure = one.figure_at((block, name, metric))
                if figure is not None:
                    found.setdefault(str(name), figure)
    return found


def heat_map(rows: Sequence[Row], foreign: Sequence[Row]) -> HeatMap | None:
    """Categories by models; every cell has its number, so nothing hangs on colour. None for fewer than two categories."""
    # all measured rows, then the first published ones
    sliced = [row for row in (*rows, *foreign) if row.slices]
    chosen = sorted(sliced, key=lambda row: row.published)[:MAX_MODELS]
    names = list(dict.fromkeys(chain.from_iterable(row.slices for row in chosen)))
    if len(names) < 2:
        return None
    values = [figure.value for row in chosen for figure in row.slices.values()]
    low, high = min(values), max(values)

    def cell(figure: Figure | None) -> tuple[Figure, float] | None:
        return None if figure is None else (figure, (figure.value - low) / ((high - low) or 1.0))

    return HeatMap(
        models=[(row.label, row.note, row.published) for row in chosen],
        lines=[(name.replace("_", " "), [cell(row.slices.get(name)) for row in chosen]) for name in names],
    )
