"""Published figures of the benchmarks: one JSON file per table, with its source, in a benchmark's folder ``published``.

A file lists columns (with the path of the same figure in our results) and rows in per cent, as printed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eval.benchmarks.registry import BENCHMARKS
from rge.common.errors import UserError

COUNTED = {"num_members": "sets", "num_queries": "queries", "num_candidates": "candidates"}
"""Counts that identify a published set."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: heading.
        path: path of the figure in results.json, such as ``("by_category", "causal", "recall@20")``.
        official: the same under ``profile=official``, if that is a different figure.
    """

    name: str
    path: tuple[str, ...]
    official: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Published:
    """A published table.

    Attributes:
        key: name of its file.
        task: task number of MM-BRIGHT, else None.
        source: paper and table, or file and commit.
        url: home page of the benchmark.
        counts: counts of the published set, such as ``{"num_queries": 1634}``.
        notes: caveats for comparisons.
        main: index of the column that rows are sorted by.
        rows: (model, note, values); a value is a fraction of 1 or None.
        profiles: our profiles that compute the published definition; the first is the released one.
        made_with: import options that the published rows were measured with.
        other_release: indices of rows measured on another release of the benchmark.
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
    profiles: tuple[str, ...]
    made_with: Mapping[str, Any]
    other_release: frozenset[int]

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
    """All tables by key, sorted.

    Raises:
        UserError: a file is incomplete, or its benchmark is not that of its folder.
    """
    files = {
        path.stem: (path, benchmark.name)
        for benchmark in BENCHMARKS.values()
        if benchmark.published is not None
        for path in benchmark.published.glob("*.json")
    }
    return {key: _read(*files[key]) for key in sorted(files)}


def table_of(benchmark: str | None, set_name: str) -> Published | None:
    """The published table that an evaluation can be compared with, or None."""
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
            Column(c["name"], tuple(c["figure"]), tuple(c["official"]) if "official" in c else None)
            for c in content["columns"]
        ]
        rows = [
            (row["model"], row.get("note", ""), [x if x is None else x / 100 for x in row["values"]])
            for row in content["rows"]
        ]
        table = Published(
            path.stem, content["benchmark"], content.get("task"), content["title"], content["source"], content["url"],
            content["set"], content["notes"], content["main"], columns, rows,
            tuple(content.get("profiles", ("official",))), content.get("made_with", {}),
            frozenset(number for number, row in enumerate(content["rows"]) if row.get("other_release")),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a valid published table: {type(error).__name__}: {error}") from error
    if table.benchmark != benchmark:
        raise UserError(f"{path} names benchmark {table.benchmark!r}, but is in the folder of {benchmark!r}")
    for model, _, values in rows:
        if len(values) != len(columns):
            raise UserError(f"{path}: row {model!r} has {len(values)} of {len(columns)} values")
    return table
