"""Published figures of the benchmarks: one JSON file per table, with its source, in a folder ``published``.

A file lists columns (with the path of the same figure in our results) and rows in per cent, as printed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, Field, field_validator

from eval.benchmarks.registry import BENCHMARKS
from eval.scoring.metrics import lower_is_better
from eval.scoring.results import Results, SetFacts
from rge.common.errors import UserError

COUNTED = {"num_members": "sets", "num_queries": "queries", "num_candidates": "candidates"}
"""Counts that identify a published set."""
MAX_COLUMNS = 8
"""Of a table on a terminal; the main one comes first."""
TRAINED = "TRAINED ON THE TEST"
"""Start of the warning of a checkpoint whose training records hold queries or answers of the set."""


class Column(BaseModel):
    """A column of a table."""

    name: str
    path: tuple[str, ...] = Field(alias="figure")
    """Path of the figure in results.json, such as ``("by_category", "causal", "recall@20")``."""
    official: tuple[str, ...] | None = None
    """The same under ``profile=official``, if that is a different figure."""

    @property
    def lower_wins(self) -> bool:
        """Whether its lowest figure is the best: a metric's own property, or an arrow in the published name."""
        return "↓" in self.name or lower_is_better(self.path[-1])


class Row(BaseModel):
    """A published row; ``other_release``: measured on another release of the benchmark."""

    model: str
    note: str = ""
    values: list[float | None]
    other_release: bool = False

    @field_validator("values")
    @classmethod
    def as_fractions(cls, values: list[float | None]) -> list[float | None]:
        """Files have per cent."""
        return [None if value is None else value / 100 for value in values]


class Published(BaseModel):
    """A published table."""

    key: str  # name of its file
    benchmark: str
    task: int | None = None  # task number of MM-BRIGHT, else None
    title: str
    source: str  # paper and table, or file and commit
    url: str  # home page of the benchmark
    counts: dict[str, int] = Field(alias="set")
    """Counts of the published set, such as ``{"num_queries": 1634}``."""
    notes: list[str]  # caveats for comparisons
    main: int  # index of the column that rows are sorted by
    columns: list[Column]
    rows: list[Row]
    by_member: bool = (
        False  # one column for each member of a suite, printed as a row; also for a member alone
    )
    profiles: tuple[str, ...] = ("official",)
    """Our profiles that compute the published definition; the first is the released one."""
    made_with: dict[str, Any] = {}  # import options that the published rows were measured with

    def not_this_set(self, measured: SetFacts) -> str | None:
        """Reason why a measured set is not the published one; None if its counts match."""
        wrong = [
            f"{getattr(measured, key) or 0:,} of {number:,} {COUNTED[key]}"
            for key, number in self.counts.items()
            if getattr(measured, key) != number
        ]
        if measured.limit is not None:
            wrong.append(f"only the first {measured.limit:,} queries")
        return f"the set measured here is not the published one: it has {', '.join(wrong)}" if wrong else None


def published() -> dict[str, Published]:
    """All tables by key, sorted."""
    folders = {benchmark.published for benchmark in BENCHMARKS.values() if benchmark.published is not None}
    tables = [_read(path) for folder in folders for path in folder.glob("[!.]*.json")]
    return {table.key: table for table in sorted(tables, key=lambda table: table.key)}


def table_of(benchmark: str | None, set_name: str) -> Published | None:
    """The published table that an evaluation can be compared with, or None."""
    tables = (table for table in published().values() if table.benchmark == benchmark and not table.by_member)
    fitting = (table for table in tables if table.task is None or set_name.endswith(f"task {table.task}"))
    return next(fitting, None)


def beside(measured: Mapping[str, Results]) -> str:
    """The published rows of a benchmark with measured ones among them, best first, in per cent, and their source.

    Says why the rows cannot be compared, where that is so. "" for a benchmark without a published table.

    Args:
        measured: by label; all of one set under one protocol.
    """
    first = next(iter(measured.values()))
    benchmark, name = first.benchmark, first.set.name
    for one in published().values():
        if one.by_member and one.benchmark == benchmark:
            alone = [at for at, column in enumerate(one.columns) if name.split()[-1] == column.name]
            if alone and first.set.num_members is None:
                return _by_member(one, measured, alone)
    table = table_of(benchmark, name)
    if table is None:
        return ""
    shown = _best_first(table, measured)
    for one in published().values():
        if one.by_member and one.benchmark == benchmark:
            figures = [[_of_ours(results, column) for column in one.columns] for results in measured.values()]
            places = [
                at
                for at, of_one in enumerate(zip(*figures, strict=True))
                if any(v is not None for v in of_one)
            ]
            shown += "\n" + _by_member(one, measured, places) if places else ""
    return shown


def _by_member(table: Published, measured: Mapping[str, Results], places: Sequence[int]) -> str:
    """A table with the models as columns, ours first, and a row for each of some members."""
    chosen = [table.columns[at] for at in places]
    alone = next(iter(measured.values())).set.num_members is None
    if alone:
        chosen = [column.model_copy(update={"path": ("micro", column.path[-1])}) for column in chosen]
    content = {
        f"{label} (measured)": [_of_ours(results, column) for column in chosen]
        for label, results in measured.items()
    } | {row.model: [row.values[at] for at in places] for row in table.rows}
    frame = pd.DataFrame(
        {label: list(map(_per_cent, values)) for label, values in content.items()},
        [column.name for column in chosen],
    )
    # a suite's first table says why its figures cannot be compared
    reasons = _reasons(table.model_copy(update={"counts": {}}), measured) if alone else []
    return _with_source(table, frame, reasons)


def _best_first(table: Published, measured: Mapping[str, Results]) -> str:
    main = table.columns[table.main]
    columns = [main, *(column for column in table.columns if column is not main)][:MAX_COLUMNS]
    ours = {
        f"{label} (measured)": [_of_ours(results, column) for column in columns]
        for label, results in measured.items()
    }
    place = [table.columns.index(column) for column in columns]
    theirs = {
        f"{row.model}{f' ({row.note})' if row.note else ''}{' (other release)' if row.other_release else ''}": [
            row.values[at] for at in place
        ]
        for row in table.rows
    }
    sign = 1 if main.lower_wins else -1
    rows = sorted({**ours, **theirs}.items(), key=lambda row: (row[1][0] is None, sign * (row[1][0] or 0.0)))
    frame = pd.DataFrame(
        [list(map(_per_cent, values)) for _, values in rows],
        [label for label, _ in rows],
        [column.name for column in columns],
    )
    return _with_source(table, frame, _reasons(table, measured))


def _per_cent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _reasons(table: Published, measured: Mapping[str, Results]) -> list[str]:
    """Lines that say why measured figures cannot be compared."""
    reasons = [f"NOT COMPARABLE: {reason}" for reason in _why_not(table, next(iter(measured.values())))]
    return reasons + [
        f"NOT COMPARABLE: {label}: {warning}"
        for label, results in measured.items()
        for warning in results.warnings
        if TRAINED in warning
    ]


def _with_source(table: Published, frame: pd.DataFrame, reasons: Sequence[str]) -> str:
    source = f"published rows: {table.source} ({table.url})"
    return "\n".join([f"\n{table.title}, in per cent", frame.to_string(), source, *reasons, *table.notes])


def _of_ours(results: Results, column: Column) -> float | None:
    path = (column.official or column.path) if results.profile == "official" else column.path
    entry = results.look_up(path)
    value = entry.get("value") if isinstance(entry, Mapping) else entry
    return None if value is None else float(value)


def _why_not(table: Published, results: Results) -> Iterator[str]:
    """Reasons why measured figures cannot be ranked among the published ones."""
    if why := table.not_this_set(results.set):
        yield why
    if results.profile not in table.profiles:
        yield f"measured with profile={results.profile}, published with profile={table.profiles[0]}"
    for key, value in table.made_with.items():
        made = (results.set.made_with or {}).get(key)
        if made != value:
            yield f"the set was imported with {key}={made}, the published rows have {key}={value}"


@cache
def _read(path: Path) -> Published:
    try:
        table = Published.model_validate(json.loads(path.read_text(encoding="utf-8")) | {"key": path.stem})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"it is no published table: {type(error).__name__}: {error}", path) from error
    if table.benchmark not in BENCHMARKS or path.parent != BENCHMARKS[table.benchmark].published:
        raise UserError(
            f"the published tables of {table.benchmark!r} are not in that folder", path, key="benchmark"
        )
    for row in table.rows:
        if len(row.values) != len(table.columns):
            raise UserError(f"it has {len(row.values)} of {len(table.columns)} values", path, row.model)
    return table
