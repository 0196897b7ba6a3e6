"""Published figures of the benchmarks: one JSON file a table in a benchmark's folder ``published``, each with its source.

A file lists columns (their name, and where an evaluation of ours has the same figure) and rows in per cent, as printed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from eval.benchmarks.registry import BENCHMARKS
from rge.common.errors import UserError

COUNTED = {"num_members": "sets", "num_queries": "queries", "num_candidates": "candidates"}
"""What a published set is counted by."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: heading.
        path: where results.json has the figure, such as ``("by_category", "causal", "recall@20")``.
        official: the same under ``profile=official``, where that has a figure of its own.
    """

    name: str
    path: tuple[str, ...]
    official: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Published:
    """A published table.

    Attributes:
        key: name of its file.
        benchmark: name of the protocol.
        task: of MM-BRIGHT, else None.
        title: of the benchmark and task.
        source: paper and table, or file and commit.
        url: where the benchmark is.
        counts: what a set must have to be the published one, such as ``{"num_queries": 1634}``.
        notes: what a reader has to know before comparing.
        main: place of the column that rows are ordered by.
        columns: headings.
        rows: (model, note, values); a value is a fraction of 1 or None.
        profiles: of our protocols, those that compute the published figures' definition; the first is the released one.
        made_with: choices of an import that published rows were measured with.
        other_release: places of rows that are of another release of the benchmark.
    """

    key: str
    benchmark: str
    task: int | None
    title: str
    source: str
    url: str
    counts: dict[str, int]
    notes: list[str]
    main: int
    columns: list[Column]
    rows: list[tuple[str, str, list[float | None]]]
    profiles: tuple[str, ...] = ("official",)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    other_release: frozenset[int] = frozenset()

    def not_this_set(self, measured: Mapping[str, Any]) -> str | None:
        """Why a measured set (``set`` of results.json) is not the published one, by its counts; None if it is."""
        wrong = [
            f"{measured.get(key) or 0:,} of {number:,} {COUNTED[key]}"
            for key, number in self.counts.items()
            if measured.get(key) != number
        ]
        if (limit := measured.get("limit")) is not None:
            wrong.append(f"only the first {limit:,} queries")
        return f"the set measured here is not the published one: it has {', '.join(wrong)}" if wrong else None


def published() -> dict[str, Published]:
    """All tables by key, in the order of their names.

    Raises:
        UserError: a file lacks something, or is of another benchmark than its folder.
    """
    files = {
        path.stem: (path, one.name)
        for one in BENCHMARKS.values()
        if one.published is not None
        for path in one.published.glob("*.json")
    }
    return {key: _read(*files[key]) for key in sorted(files)}


def table_of(benchmark: str | None, set_name: str) -> Published | None:
    """The table that an evaluation belongs to; None for a benchmark without one."""
    for table in published().values():
        of_task = table.task is None or set_name.endswith(f"task {table.task}")
        if table.benchmark == benchmark and of_task:
            return table
    return None


@cache
def _read(path: Path, benchmark: str) -> Published:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        columns = [
            Column(one["name"], tuple(one["figure"]), tuple(one["official"]) if "official" in one else None)
            for one in content["columns"]
        ]
        table = Published(
            path.stem, content["benchmark"], content.get("task"), content["title"], content["source"], content["url"],
            content["set"], content["notes"], content["main"], columns,
            [(row["model"], row.get("note", ""), row["values"]) for row in content["rows"]],
            tuple(content.get("profiles", ("official",))), content.get("made_with", {}),
            frozenset(number for number, row in enumerate(content["rows"]) if row.get("other_release")),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no published table: {type(error).__name__}: {error}") from error
    if table.benchmark != benchmark:
        raise UserError(
            f"{path} is of benchmark {table.benchmark!r}, but stands in the folder of {benchmark!r}"
        )
    for model, _, values in table.rows:
        if len(values) != len(columns):
            raise UserError(f"{path}: row {model!r} has {len(values)} of {len(columns)} values")
    rows = [
        (model, note, [None if value is None else value / 100 for value in values])
        for model, note, values in table.rows
    ]
    return replace(table, rows=rows)
