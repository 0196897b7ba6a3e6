"""Published figures of the benchmarks: one JSON file per table, with its source, in a folder ``published``.

A file lists columns (with the path of the same figure in our results) and rows in per cent, as printed.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from eval.benchmarks.registry import BENCHMARKS
from eval.scoring.metrics import lower_is_better
from rge.common.errors import UserError

COUNTED = {"num_members": "sets", "num_queries": "queries", "num_candidates": "candidates"}
"""Counts that identify a published set."""


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
    profiles: tuple[str, ...] = ("official",)
    """Our profiles that compute the published definition; the first is the released one."""
    made_with: dict[str, Any] = {}  # import options that the published rows were measured with

    def not_this_set(self, measured: Mapping[str, Any]) -> str | None:
        """Reason why a measured set (``set`` of results.json) is not the published one; None if its counts match."""
        wrong = [
            f"{measured.get(key) or 0:,} of {number:,} {COUNTED[key]}"
            for key, number in self.counts.items()
            if measured.get(key) != number
        ]
        if (limit := measured.get("limit")) is not None:
            wrong.append(f"only the first {limit:,} queries")
        return f"the set measured here is not the published one: it has {', '.join(wrong)}" if wrong else None


def published() -> dict[str, Published]:
    """All tables by key, sorted."""
    folders = {benchmark.published for benchmark in BENCHMARKS.values() if benchmark.published is not None}
    tables = [_read(path) for folder in folders for path in folder.glob("[!.]*.json")]
    return {table.key: table for table in sorted(tables, key=lambda table: table.key)}


def table_of(benchmark: str | None, set_name: str) -> Published | None:
    """The published table that an evaluation can be compared with, or None."""
    tables = (table for table in published().values() if table.benchmark == benchmark)
    fitting = (table for table in tables if table.task is None or set_name.endswith(f"task {table.task}"))
    return next(fitting, None)


@cache
def _read(path: Path) -> Published:
    try:
        table = Published.model_validate(json.loads(path.read_text(encoding="utf-8")) | {"key": path.stem})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a valid published table: {type(error).__name__}: {error}") from error
    if table.benchmark not in BENCHMARKS or path.parent != BENCHMARKS[table.benchmark].published:
        raise UserError(
            f"{path} names benchmark {table.benchmark!r}, whose published tables are not in that folder"
        )
    for row in table.rows:
        if len(row.values) != len(table.columns):
            raise UserError(f"{path}: row {row.model!r} has {len(row.values)} of {len(table.columns)} values")
    return table
