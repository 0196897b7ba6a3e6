"""One HTML page for many models: published rows beside measured ones, categories, cost, and examples side by side.

    rge eval report runs=[LABEL:]DIR[,...] out=FILE page=leaderboard [published=auto|all|none]

Evaluations of one retrieval set share a board. A published table is shown on the board of its benchmark; if the measured set
is not the published one (different counts), its rows are listed separately and the page says why they are not comparable.
Suites (MMEB, MM-BRIGHT) and single sets are handled alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from eval.benchmarks.published_tables import Column, Published, published, table_of
from eval.embedding.identity import identity_of
from eval.pages.boards.comparison import against
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
from eval.pages.boards.side_by_side import side_by_side
from eval.pages.budget_curves import BASES, BUDGET, on_page
from eval.pages.charts import Point, scatter
from eval.pages.evaluations import Evaluation, expand, read_evaluation, warnings_of
from eval.pages.examples import Gallery
from eval.pages.single_file import write_page
from eval.scoring.tables import figure, write_tables
from rge.common.errors import UserError
from rge.common.files import read_json
from rge.identity.run_identity import differences, flattened


@dataclass(frozen=True)
class Board:
    """Content of one section of the page; ``apart`` explains why published rows are not ranked on it."""

    id: str
    title: str
    facts: str
    source: Published | None
    columns: list[Column]
    main: int
    rows: list[Row]
    foreign: list[Row]
    heat: dict[str, Any] | None
    protocol: Sequence[str] = ()
    apart: Sequence[str] = ()
    warnings: Sequence[str] = ()
    differs: Sequence[tuple[str, dict[str, str]]] = ()
    cost: Markup | None = None
    cost_rows: Sequence[dict[str, Any]] = ()
    examples: dict[str, Any] | None = None
    against: Sequence[dict[str, Any]] = ()
    budgets: Sequence[tuple[str, dict[str, Any]]] = ()


def write_leaderboard(
    runs: Sequence[str],
    out: Path,
    *,
    title: str | None = None,
    which: str = "auto",
    num_examples: int = 24,
    set_dir: Path | None = None,
    seed: int = 0,
) -> Path:
    """Write the page, and each board's rows as .csv and .tex, and return ``out``; the output is deterministic.

    Published tables: those of the measured benchmarks (``auto``), ``all``, or ``none``.
    """
    groups, budgets = _groups(runs)
    if set_dir is not None and len(groups) > 1:
        raise UserError(f"set=DIR is for evaluations of one set, but these are of {len(groups)}")
    gallery, boards, unused = Gallery(), [], dict(published())
    for number, (key, members) in enumerate(groups.items()):
        board = _board(number, members, which)
        measured = {f"{row.label}, {row.note}": row.evaluation for row in board.rows if row.evaluation}
        rivals = against(measured, board.columns[board.main].path[-1], seed)
        examples = side_by_side(measured, gallery, num_examples, set_dir, seed) if num_examples else None
        boards.append(replace(board, examples=examples, against=rivals, budgets=budgets[key]))
        if board.source is not None:
            unused.pop(board.source.key, None)
    if which == "all":
        boards += [
            _published_only(number, table) for number, table in enumerate(unused.values(), len(boards))
        ]
    return _write(boards, gallery, out, title)


def _write(boards: Sequence[Board], gallery: Gallery, out: Path, title: str | None) -> Path:
    content = dict(
        title=title or (boards[0].title if len(boards) == 1 else "Leaderboard"),
        boards=boards,
        warnings=[(board.title, warning) for board in boards for warning in board.warnings],
        pictures=gallery.pictures,
        sizes=gallery.sizes,
        max_columns=MAX_COLUMNS,
    )
    for board in boards:
        name = out.stem if len(boards) == 1 else f"{out.stem}-{board.id}"
        write_tables(out.with_name(name), *board_tables(board))
    return write_page(out, "leaderboard.html.j2", ["report.css", "leaderboard.css"], content)


def board_tables(board: Board) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of a board as numbers (fractions), and formatted in per cent."""
    values, formatted_rows = [], []
    for row in [*board.rows, *board.foreign]:
        model = {"model": row.label, "note": row.note}
        cells = {column.name: cell for column, cell in zip(board.columns, row.figures, strict=True)}
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


_Key = tuple[str, ...]
"""(benchmark, profile, limit, fingerprint, content); evaluations on one board agree in all of them."""
_Member = tuple[str, str, Evaluation]
"""Label, note, evaluation."""
_Budget = tuple[str, dict[str, Any]]
"""Label, curves."""


def _groups(runs: Sequence[str]) -> tuple[dict[_Key, list[_Member]], dict[_Key, list[_Budget]]]:
    """Evaluations by retrieval set, in the given order; and outputs of `budget`.

    Of a `budget` output only the two base points become rows; the curves show the others.
    """
    groups: dict[_Key, list[_Member]] = defaultdict(list)
    budgets: dict[_Key, list[_Budget]] = defaultdict(list)
    for word in runs:
        label, colon, directory = word.partition(":")
        if not colon or Path(word).exists():
            label, directory = "", word
        curves = read_json(Path(directory) / BUDGET)
        bases = [Path(directory) / name for name in BASES]
        for path in expand(Path(directory)) if curves is None else bases:
            evaluation = read_evaluation(path)
            key = _key(evaluation.results)
            groups[key].append((label or name_of(evaluation), note_of(evaluation), evaluation))
        if curves is not None:
            budgets[key].append((label or name_of(evaluation), on_page(curves)))
    _join_old(groups, budgets)
    for members in groups.values():
        _refuse_namesakes(members)
    if not groups:
        raise UserError("runs must name at least one evaluation directory")
    return dict(groups), budgets


def _refuse_namesakes(members: Sequence[_Member]) -> None:
    first: dict[tuple[str, str], Evaluation] = {}
    for label, note, evaluation in members:
        if first.setdefault((label, note), evaluation) is not evaluation:
            raise UserError(
                f"{evaluation.directory} is a second {label!r} ({note}) on the same set: give labels with runs=LABEL:DIR"
            )


def _key(results: Mapping[str, Any]) -> _Key:
    about = results["set"]
    words = (results.get("benchmark") or "generic", results.get("profile"), about.get("limit"))
    return *map(str, words), about["fingerprint"], about.get("content") or ""


def _join_old(*tables: dict[_Key, list[Any]]) -> None:
    """Add results without a recorded content to the only board they can belong to; they are not ranked there."""
    for groups in tables:
        for key in [key for key in groups if not key[-1]]:
            same = [other for other in tables[0] if other[:-1] == key[:-1] and other[-1]]
            if len(same) == 1:
                groups[same[0]] = [*groups.get(same[0], []), *groups.pop(key)]


def _board(number: int, members: Sequence[_Member], which: str) -> Board:
    first = members[0][2].results
    table = table_of(first.get("benchmark"), str(first["set"]["name"])) if which != "none" else None
    columns, main = (table.columns, table.main) if table else generic_columns(first)
    known = any(one.results["set"].get("content") for _, _, one in members)
    measured = [measured_row(*member, columns, columns[main].path[-1], known) for member in members]
    apart = [] if table is None else why_unranked(first, table)
    rows, foreign = _ranked_rows(measured, table, main, apart)
    costs = _cost_rows([row for row in rows if not row.published], main)
    return Board(
        id=f"board{number}",
        title=str(first["set"]["name"]),
        facts=_facts(first),
        protocol=first.get("protocol") or [],
        source=table,
        apart=apart,
        columns=columns,
        main=main,
        rows=rows,
        foreign=foreign,
        warnings=warnings_of([replace(one, label=f"{label}, {note}") for label, note, one in members]),
        heat=heat_map(rows, foreign),
        differs=_what_differs(members),
        cost=_cost(costs, columns[main].name),
        cost_rows=costs,
    )


def _ranked_rows(
    measured: Sequence[Row], table: Published | None, main: int, apart: Sequence[str] = ()
) -> tuple[list[Row], list[Row]]:
    """Measured rows and the comparable published ones, ranked; and the other published rows, best first."""
    copied = published_rows(table) if table else []
    fit = [row for row in copied if row.comparable and not apart]
    rest = [row for row in copied if apart or not row.comparable]
    return numbered([*measured, *fit], main), sorted(rest, key=lambda row: order(row.figures[main]))


def _facts(results: Mapping[str, Any]) -> str:
    """Description of a board's set."""
    about = results["set"]
    facts = f"{about['num_queries']:,} queries, {about['num_candidates']:,} candidates"
    if about.get("num_members"):
        facts += f" in {about['num_members']} sets"
    if is_benchmark(results):
        facts += f", {results.get('profile')} protocol"
    if about.get("limit"):
        facts += f", only the first {about['limit']:,} queries"
    return facts


def _published_only(number: int, table: Published) -> Board:
    rows, foreign = _ranked_rows([], table, table.main)
    return Board(
        id=f"board{number}",
        title=table.title,
        facts="published figures only",
        source=table,
        columns=table.columns,
        main=table.main,
        rows=rows,
        foreign=foreign,
        heat=heat_map(rows, foreign),
    )


def _what_differs(members: Sequence[_Member]) -> list[tuple[str, dict[str, str]]]:
    """For each measured row the parts of its identity that differ between rows; empty for a single row."""
    identities = [identity_of(identity.results) for _, _, identity in members]
    differing = dict.fromkeys(name for pair in combinations(identities, 2) for name in differences(*pair))
    facts = [flattened(identity) for identity in identities]
    return [
        (f"{label}, {note}", {name: str(identity.get(name, "")) for name in differing})
        for (label, note, _), identity in zip(members, facts, strict=True)
        if differing
    ]


def _cost_rows(measured: Sequence[Row], main: int) -> list[dict[str, Any]]:
    """Costs and figures of embedders, numbered as in the heat map; external rankings have none."""
    rows = []
    for number, row in enumerate(measured, 1):
        if row.evaluation is None or row.figures[main] is None:
            continue
        table, rationale = row.evaluation.per_query, row.evaluation.results.get("rationale") or {}
        costs = {
            key: float(table[key].mean()) if key in table and table[key].notna().any() else None
            for key in ("rationale_tokens", "generate_ms", "embed_ms")
        }
        if costs["embed_ms"] is not None:
            about = {"number": number, "label": row.label, "note": row.note, "figure": row.figures[main]}
            rows.append({**about, "forced": rationale.get("forced_rate"), **costs})
    return rows


def _cost(rows: Sequence[Mapping[str, Any]], name: str) -> Markup | None:
    """Scatter plot of the cost table's rows."""
    if not rows:
        return None
    points = []
    for row in rows:
        label, ms, figure = (
            f"{row['label']}, {row['note']}",
            row["embed_ms"] + (row["generate_ms"] or 0.0),
            row["figure"],
        )
        points.append(Point(label, ms, figure.value, figure.low, figure.high, row["number"]))
    return scatter(points, name=name, x_label="milliseconds per query, on the machine of the run")
