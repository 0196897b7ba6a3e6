"""One HTML page for many models: published and measured rows, categories, cost, and examples side by side.

    rge eval report runs=[LABEL:]DIR[,...] out=FILE page=leaderboard [published=auto|all|none]

Evaluations of one retrieval set share a board. A published table is shown on the board of its benchmark; if the measured set
is not the published one (different counts), its rows are listed separately and the page says why they are not comparable.
Suites (MMEB, MM-BRIGHT) and single sets are handled alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from eval.benchmarks.published_tables import Published, published, table_of
from eval.embedding.identity import identity_of
from eval.pages.boards.comparison import side_by_side
from eval.pages.boards.rows import (
    MAX_COLUMNS,
    Row,
    generic_columns,
    heat_map,
    is_benchmark,
    measured_row,
    name_of,
    note_of,
    numbered,
    order,
    published_rows,
    why_unranked,
)
from eval.pages.charts import budget_on_page, scatter
from eval.pages.evaluations import BUDGET, Evaluation, expand, labelled, read_evaluation, warnings_of
from eval.pages.examples import Gallery
from eval.pages.single_file import write_page
from eval.scoring.tables import figure, write_tables
from rge.common.errors import UserError
from rge.common.files import read_json
from rge.identity.run_identity import differences, flattened

_Key = tuple[str, ...]
"""(benchmark, profile, limit, fingerprint, content); evaluations on one board agree in all of them."""
_Budget = tuple[str, dict[str, Any]]
"""Label, curves."""
_Cost = tuple[int, Row, dict[str, Any]]
"""Number in the chart and of the row in the heat map, row, mean costs of a query."""


def write_leaderboard(
    runs: Sequence[str],
    out: Path,
    *,
    which: str = "auto",
    num_examples: int = 24,
    set_dir: Path | None = None,
) -> Path:
    """Write the page, and each board's rows as .csv and .tex, and return ``out``; the output is deterministic.

    Published tables: those of the measured benchmarks (``auto``), ``all``, or ``none``.
    """
    groups, budgets = _groups(runs)
    if set_dir is not None and len(groups) > 1:
        raise UserError(f"set=DIR is for evaluations of one set, but these are of {len(groups)}")
    gallery, boards, unused = Gallery(), list[dict[str, Any]](), dict(published())
    for key, members in groups.items():
        first = members[0].results
        table = None if which == "none" else table_of(first.get("benchmark"), str(first["set"]["name"]))
        board = _board(f"board{len(boards)}", members, table)
        measured = {_name(row): row.evaluation for row in board["rows"] if row.evaluation}
        shown = side_by_side(measured, gallery, num_examples, set_dir) if num_examples else None
        boards.append(board | {"examples": shown, "budgets": budgets[key]})
        unused.pop(table.key if table else "", None)
    for table in unused.values() if which == "all" else ():
        boards.append(_board(f"board{len(boards)}", [], table))
    for board in boards:
        name = out.stem if len(boards) == 1 else f"{out.stem}-{board['id']}"
        write_tables(out.with_name(name), *board_tables(board))
    content = dict(
        title=boards[0]["title"] if len(boards) == 1 else "Leaderboard",
        boards=boards,
        warnings=[(board["title"], warning) for board in boards for warning in board["warnings"]],
        pictures=gallery.pictures,
        max_columns=MAX_COLUMNS,
    )
    return write_page(out, "leaderboard.html.j2", ["report.css", "leaderboard.css"], content)


def board_tables(board: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of a board as numbers (fractions), and formatted in per cent."""
    values, formatted_rows = [], []
    for row in [*board["rows"], *board["foreign"]]:
        model = {"model": row.label, "note": row.note}
        cells = {column.name: cell for column, cell in zip(board["columns"], row.figures, strict=True)}
        values.append(
            {"place": row.place, **model, "published": row.published}
            | {
                f"{name} {key}".removesuffix(" value"): getattr(cell, key, None)
                for name, cell in cells.items()
                for key in ("value", "low", "high")
            }
        )
        formatted = {name: figure(None if cell is None else vars(cell)) for name, cell in cells.items()}
        formatted_rows.append({"": row.place or "–", **model, **formatted})
    return pd.DataFrame(values).astype({"place": "Int64"}), pd.DataFrame(formatted_rows).astype({"": str})


def _groups(runs: Sequence[str]) -> tuple[dict[_Key, list[Evaluation]], dict[_Key, list[_Budget]]]:
    """Evaluations by retrieval set, in the given order, with labels and notes of rows; and outputs of `budget`.

    Of a `budget` output only the two base points become rows; the curves show the others.
    """
    groups: dict[_Key, list[Evaluation]] = defaultdict(list)
    budgets: dict[_Key, list[_Budget]] = defaultdict(list)
    for label, directory in map(labelled, runs):
        curves = read_json(directory / BUDGET)
        for path in expand(directory):
            run = read_evaluation(path)
            run = replace(run, label=label or name_of(run), note=note_of(run))
            key = _key(run.results)
            groups[key].append(run)
        if curves is not None:
            budgets[key].append((run.label, budget_on_page(curves)))
    _join_unrecorded(groups, budgets)
    for members in groups.values():
        _refuse_namesakes(members)
    return dict(groups), budgets


def _name(row: Row | Evaluation) -> str:
    return f"{row.label}, {row.note}"


def _refuse_namesakes(members: Sequence[Evaluation]) -> None:
    first: dict[str, Evaluation] = {}
    for run in members:
        if first.setdefault(_name(run), run) is not run:
            raise UserError(
                f"{run.directory} is a second {run.label!r} ({run.note}) on the same set: give labels with runs=LABEL:DIR"
            )


def _key(results: Mapping[str, Any]) -> _Key:
    about = results["set"]
    words = (results.get("benchmark") or "generic", results.get("profile"), about.get("limit"))
    return *map(str, words), about["fingerprint"], about.get("content") or ""


def _join_unrecorded(*tables: dict[_Key, list[Any]]) -> None:
    """Add results without a recorded content to the only board they can belong to; they are not ranked there."""
    for groups in tables:
        for key in [key for key in groups if not key[-1]]:
            same = [other for other in tables[0] if other[:-1] == key[:-1] and other[-1]]
            if len(same) == 1:
                groups[same[0]] = [*groups.get(same[0], []), *groups.pop(key)]


def _board(name: str, members: Sequence[Evaluation], table: Published | None) -> dict[str, Any]:
    """Content of one section of the page: a board of measured rows, published ones, or both.

    Rows are sorted by the column ``main``. Those of ``foreign`` are not ranked, ``apart`` says why.
    """
    first = members[0].results if members else {}
    columns, main = (table.columns, table.main) if table else generic_columns(first)
    known = any(one.results["set"].get("content") for one in members)
    metric = columns[main].path[-1]
    measured = [measured_row(one, columns, metric, known) for one in members]
    copied, apart = published_rows(table) if table else [], list[str]()
    if table and members:
        apart = why_unranked(first, table)
    fit = [row for row in copied if row.comparable and not apart]
    rows = numbered([*measured, *fit], main, metric)
    costs = _costs(rows, main)
    rest = [row for row in copied if apart or not row.comparable]
    foreign = sorted(rest, key=lambda row: order(row.figures[main], metric))
    return dict(
        id=name,
        title=str(first["set"]["name"]) if members or table is None else table.title,
        facts=_facts(first) if members else "published figures only",
        protocol=first.get("protocol") or [],
        source=table,
        apart=apart,
        columns=columns,
        main=main,
        rows=rows,
        foreign=foreign,
        warnings=warnings_of([replace(one, label=_name(one)) for one in members]),
        heat=heat_map(rows, foreign),
        differs=_what_differs(members),
        costs=costs,
        cost_chart=_cost_chart(costs, main, columns[main].name),
        examples=None,
        budgets=(),
    )


def _facts(results: Mapping[str, Any]) -> str:
    about = results["set"]
    facts = f"{about['num_queries']:,} queries, {about['num_candidates']:,} candidates"
    if about.get("num_members"):
        facts += f" in {about['num_members']} sets"
    if is_benchmark(results):
        facts += f", {results.get('profile')} protocol"
    if about.get("limit"):
        facts += f", only the first {about['limit']:,} queries"
    return facts


def _what_differs(members: Sequence[Evaluation]) -> list[tuple[str, dict[str, str]]]:
    """For each measured row the parts of its identity that differ between rows; empty for a single row."""
    identities = [identity_of(one.results) for one in members]
    differing = dict.fromkeys(name for pair in combinations(identities, 2) for name in differences(*pair))
    facts = map(flattened, identities)
    return [
        (_name(one), {name: "" if fact.get(name) is None else str(fact[name]) for name in differing})
        for one, fact in zip(members, facts, strict=True)
        if differing
    ]


def _costs(rows: Sequence[Row], main: int) -> list[_Cost]:
    """Mean costs of a query of measured rows that have a main figure; external rankings have none."""
    measured = [(row, row.evaluation) for row in rows if row.evaluation is not None]
    keys = ("rationale_tokens", "generate_ms", "embed_ms")
    return [
        (
            number,
            row,
            {key: run.mean(key) for key in keys} | {"forced": run.figure("rationale", "forced_rate")},
        )
        for number, (row, run) in enumerate(measured, 1)
        if row.figures[main] is not None and run.mean("embed_ms") is not None
    ]


def _cost_chart(costs: Sequence[_Cost], main: int, name: str) -> Markup | None:
    """Chart of the main figure over the time of a query."""
    points = [
        {"name": _name(row), "number": number, "cost": cost["embed_ms"] + (cost["generate_ms"] or 0.0)}
        | vars(row.figures[main])
        for number, row, cost in costs
    ]
    label = "milliseconds per query, on the machine of the run"
    return scatter(points, name=name, x_label=label) if points else None
