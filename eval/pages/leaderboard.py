"""One HTML page for many models: published rows beside measured ones, category bars, cost, and examples side by side.

    python -m eval report runs=[LABEL:]DIR[,...] out=FILE page=leaderboard [published=auto|all|none]

Evaluations of one retrieval set share a board. A published table stands on the board of its benchmark; where the set at
hand is not the published one (other counts), its rows are kept apart and the page says that the two cannot be compared.
Suites (MMEB, MM-BRIGHT) and single sets are treated alike.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from eval.benchmarks.published_tables import Column, Published, published, table_of
from eval.benchmarks.suite import is_suite
from eval.pages.budget_curves import BASES, on_page, read_budget
from eval.pages.cards import NUM_SHOWN
from eval.pages.charts import Point, scatter
from eval.pages.evaluations import (
    RANK_COLUMN,
    TOP_COLUMN,
    Evaluation,
    Figure,
    expand,
    read_evaluation,
    warnings_of,
)
from eval.pages.examples import Gallery, choose_examples
from eval.pages.single_file import write_page
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.common.errors import UserError

MAX_COLUMNS = 8
"""Columns of a board's table; further ones are bars only."""
MAX_BARS = 8
"""Models in the bars: all measured ones first, then the best published."""
MAX_OPEN_SLICES = 9
"""Slices whose bars are shown; more of them fold."""
MAX_MEMBERS = 6
"""Members of a suite that examples are drawn from: each has to be read."""
ROUNDED = 1e-5
"""Released scorers round: their figure and ours within this are the same figure."""
TRAINED = "TRAINED ON THE TEST"
COUNTED = {"num_queries": "queries", "num_candidates": "candidates", "num_members": "sets"}
GENERIC = ("recall@1", "recall@10", "mrr", "ndcg@10")


@dataclass(frozen=True)
class Row:
    """A model on a board.

    Attributes:
        label: its name.
        note: mode, modality and profile of a measured row; a remark on a published one.
        figures: one a column, None where there is none.
        published: whether the figures are somebody else's.
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
class Board:
    """Everything that one section of the page shows; ``apart`` says why published rows take no places on it."""

    id: str
    title: str
    facts: str
    source: Published | None
    apart: list[str]
    columns: list[Column]
    main: int
    rows: list[Row]
    foreign: list[Row]
    warnings: list[str]
    bars: list[dict[str, Any]]
    bar_labels: list[tuple[str, bool]]
    cost: Markup | None
    cost_rows: list[dict[str, Any]]
    examples: dict[str, Any] | None = None
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
    """Write the page; the same input gives the same bytes.

    Args:
        runs: evaluation directories, or directories that hold them, each with ``LABEL:`` before it if wanted.
        out: the HTML file.
        title: heading of the page.
        which: published tables: ``auto`` those of the benchmarks at hand, ``all``, or ``none``.
        num_examples: queries shown with pictures on each board.
        set_dir: where the retrieval set is now, if there is one board and the set was moved.
        seed: draws other examples.

    Returns:
        ``out``.

    Raises:
        UserError: an evaluation is incomplete, two have the same name, or a set or a picture is missing.
    """
    if which not in ("auto", "all", "none"):
        raise UserError(f"published must be auto, all or none, got {which!r}")
    groups, budgets = _groups(runs)
    if set_dir is not None and len(groups) > 1:
        raise UserError(f"set=DIR is for evaluations of one set, these are of {len(groups)}")
    gallery = Gallery()
    boards = [
        replace(_board(number, members, which, gallery, num_examples, set_dir, seed), budgets=budgets[key])
        for number, (key, members) in enumerate(groups.items())
    ]
    used = {board.source.key for board in boards if board.source}
    if which == "all":
        rest = [table for key, table in published().items() if key not in used]
        boards += [_published_only(len(boards) + number, table) for number, table in enumerate(rest)]
    return _write(boards, gallery, out, title)


def _write(boards: Sequence[Board], gallery: Gallery, out: Path, title: str | None) -> Path:
    content = dict(
        title=title or (boards[0].title if len(boards) == 1 else "Leaderboard"),
        boards=boards,
        warnings=[(board.title, warning) for board in boards for warning in board.warnings],
        pictures=gallery.pictures,
        sizes={picture.name: (picture.width, picture.height) for picture in gallery.pictures},
        max_columns=MAX_COLUMNS,
        max_open=MAX_OPEN_SLICES,
    )
    return write_page(out, "leaderboard.html.j2", ["report.css", "leaderboard.css"], content)


# --- reading --------------------------------------------------------------------------------------------------------


_Key = tuple[str, ...]
"""Benchmark, profile, limit, fingerprint and content: only evaluations that agree in all of these share a board."""


def _groups(
    runs: Sequence[str],
) -> tuple[dict[_Key, list[tuple[str, str, Evaluation]]], dict[_Key, list[tuple[str, dict[str, Any]]]]]:
    """(label, note, evaluation) by retrieval set, in the order given, and (label, curves) of the output of `budget`.

    Of such an output the two ways that all others start from are rows; the rest is in the curves.
    """
    groups: dict[_Key, list[tuple[str, str, Evaluation]]] = defaultdict(list)
    budgets: dict[_Key, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for word in runs:
        label, colon, directory = word.partition(":")
        if not colon or Path(word).exists():
            label, directory = "", word
        curves = read_budget(Path(directory))
        bases = [Path(directory) / name for name in BASES]
        for path in expand(Path(directory)) if curves is None else bases:
            one = read_evaluation(path)
            key = _key(one.results)
            groups[key].append((label or _name(one), _note(one), one))
        if curves is not None:
            budgets[key].append((label or _name(one), on_page(curves)))
    _join_old(groups, budgets)
    for members in groups.values():
        seen: set[tuple[str, str]] = set()
        for label, note, one in members:
            if (label, note) in seen:
                raise UserError(
                    f"{one.directory} is a second {label!r} ({note}) of one set: name them with runs=LABEL:DIR"
                )
            seen.add((label, note))
    if not groups:
        raise UserError("runs must name at least one evaluation directory")
    return dict(groups), budgets


def _key(results: Mapping[str, Any]) -> _Key:
    wanted = results["set"]
    words = (results.get("benchmark") or "generic", results.get("profile"), wanted.get("limit"))
    return *map(str, words), wanted["fingerprint"], wanted.get("content") or ""


def _join_old(*tables: dict[_Key, list[Any]]) -> None:
    """Results from before contents were known join the one board that they can be of; they get no number there."""
    for groups in tables:
        for key in [key for key in groups if not key[-1]]:
            same = [other for other in tables[0] if other[:-1] == key[:-1] and other[-1]]
            if len(same) == 1:
                groups[same[0]] = [*groups.get(same[0], []), *groups.pop(key)]


def _name(one: Evaluation) -> str:
    name = str((one.results.get("model") or {}).get("name") or one.results.get("checkpoint") or "")
    if not name:
        return str(one.results.get("tag") or one.directory.name)
    parts = [part for part in Path(name).parts if part not in ("final", "/")]
    return "/".join(parts[-2:])


def _note(one: Evaluation) -> str:
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


def _figure(one: Evaluation, path: Sequence[str]) -> Figure | None:
    found: Any = one.results
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None:
        return None
    if isinstance(found, Mapping):
        value, low, high = (found.get(key) for key in ("value", "low", "high"))
    else:
        value, low, high = found, None, None
    if not isinstance(value, (int, float)) or not np.isfinite(value):
        raise UserError(
            f"{one.directory}/results.json: {'.'.join(path)} must be a finite number, got {value!r}"
        )
    return Figure(float(value), low, high)


# --- one board ------------------------------------------------------------------------------------------------------


def _board(
    number: int,
    members: Sequence[tuple[str, str, Evaluation]],
    which: str,
    gallery: Gallery,
    num_examples: int,
    set_dir: Path | None,
    seed: int,
) -> Board:
    first = members[0][2].results
    table = table_of(first.get("benchmark"), str(first["set"]["name"])) if which != "none" else None
    columns, main = (table.columns, table.main) if table else _generic_columns(first)
    metric = columns[main].path[-1]
    known = any(one.results["set"].get("content") for _, _, one in members)
    rows = [_measured_row(*member, columns, metric, known) for member in members]
    theirs = _published_rows(table) if table else []
    why = [] if table is None else _why_apart(first, table)
    foreign = [row for row in theirs if why or not row.comparable]
    rows = _numbered([*rows, *(row for row in theirs if row not in foreign)], main)
    facts = f"{first['set']['num_queries']:,} queries, {first['set']['num_candidates']:,} candidates"
    if first["set"].get("num_members"):
        facts += f" in {first['set']['num_members']} sets"
    benchmark = first.get("benchmark") or "generic"
    if benchmark != "generic":
        facts += f", {first.get('profile')} protocol"
    if first["set"].get("limit"):
        facts += f", only the first {first['set']['limit']:,} queries"
    bars, labels = _bars(rows, foreign)
    costs = [cost for row in rows if (cost := _cost_row(row, main)) is not None]
    return Board(
        id=f"board{number}",
        title=str(first["set"]["name"]),
        facts=facts,
        source=table,
        apart=why,
        columns=columns,
        main=main,
        rows=rows,
        foreign=sorted(foreign, key=lambda row: _order(row.figures[main])),
        warnings=warnings_of([replace(one, label=f"{label}, {note}") for label, note, one in members]),
        bars=bars,
        bar_labels=labels,
        cost=_cost(costs, columns[main].name),
        cost_rows=costs,
        examples=_examples(rows, metric, gallery, num_examples, set_dir, seed) if num_examples else None,
    )


def _published_only(number: int, table: Published) -> Board:
    rows = _published_rows(table)
    foreign = [row for row in rows if not row.comparable]
    rows = _numbered([row for row in rows if row.comparable], table.main)
    bars, labels = _bars(rows, foreign)
    return Board(
        f"board{number}", table.title, "published figures only", table, [], table.columns, table.main, rows,
        sorted(foreign, key=lambda row: _order(row.figures[table.main])), [], bars, labels, None, [],
    )  # fmt: skip


def _measured_row(
    label: str, note: str, one: Evaluation, columns: Sequence[Column], metric: str, known: bool
) -> Row:
    """A row of ours.

    Args:
        label: its name.
        note: how it was asked.
        one: its evaluation.
        columns: of the board.
        metric: whose slices it has.
        known: whether the board knows the content of its set, so that a row which does not say takes no place.
    """
    results, labels = one.results, []
    official = results.get("profile") == "official"
    if (results.get("benchmark") or "generic") != "generic":
        labels.append(f"{results.get('profile')} protocol")
    labels += [
        f"{key}={value}" for key, value in (results["set"].get("made_with") or {}).items() if key != "task"
    ]
    warnings = [str(warning) for warning in results.get("warnings") or []]
    comparable = True
    if any(TRAINED in warning for warning in warnings):
        labels.append("trained on the test: no place")
        comparable = False
    if results.get("coverage", 1.0) < 1.0:
        labels.append(f"{100 * results['coverage']:.1f} % of the queries")
        comparable = comparable and not official  # officially the others are left out, which flatters
    if known and not results["set"].get("content"):
        labels.append("written before sets had a content: no place")
        comparable = False
    figures = [_official(one, column) if official else _figure(one, column.path) for column in columns]
    return Row(label, note, figures, False, _slices(one, metric), one, labels, warnings, comparable)


def _official(one: Evaluation, column: Column) -> Figure | None:
    """The released scorer's figure, with the interval of our own figure of the same name where they are the same."""
    ours = _figure(one, column.path)
    if column.official is None:
        return ours
    theirs = _figure(one, column.official)
    if theirs is None or ours is None or abs(theirs.value - ours.value) > ROUNDED:
        return theirs
    return Figure(theirs.value, ours.low, ours.high)


def _why_apart(results: Mapping[str, Any], table: Published) -> list[str]:
    """Why rows of a published table cannot be numbered among measured ones; empty if they can."""
    found, wanted = [], results["set"]
    counts = {key: n for key, n in table.counts.items() if wanted.get(key) != n}
    if counts or wanted.get("limit") is not None:
        has = ", ".join(f"{n:,} {COUNTED.get(key, key)}" for key, n in table.counts.items())
        found.append(f"the set measured here is not the published one (it has {has})")
    if results.get("profile") not in table.profiles:
        found.append(
            f"the rows here have the {results.get('profile')} protocol, published ones the {table.profiles[0]} protocol"
        )
    for key, value in table.made_with.items():
        made = (wanted.get("made_with") or {}).get(key)
        if made != value:
            found.append(f"the set was imported with {key}={made}, published rows are of {key}={value}")
    return found


def _numbered(rows: Sequence[Row], main: int) -> list[Row]:
    """Rows by their main figure; the comparable ones numbered."""
    place, out = 0, []
    for row in sorted(rows, key=lambda row: _order(row.figures[main])):
        place += row.comparable
        out.append(replace(row, place=place if row.comparable else None))
    return out


def _order(figure: Figure | None) -> tuple[bool, float]:
    return figure is None, -(figure.value if figure else 0.0)


def _generic_columns(results: Mapping[str, Any]) -> tuple[list[Column], int]:
    block = "macro" if results.get("suite") else "micro"
    headline = [one["metric"] for one in results.get("headline") or []]
    names = [name for name in dict.fromkeys([*headline, *GENERIC]) if name in (results.get(block) or {})]
    if not names:
        raise UserError(f"an evaluation of {results['set']['name']} has none of {', '.join(GENERIC)}")
    return [Column(name, (block, name)) for name in names[:MAX_COLUMNS]], 0


def _published_rows(table: Published) -> list[Row]:
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
                figure = _figure(one, (block, name, metric))
                if figure is not None:
                    found.setdefault(str(name), figure)
    return found


def _bars(rows: Sequence[Row], foreign: Sequence[Row]) -> tuple[list[dict[str, Any]], list[tuple[str, bool]]]:
    """One group of bars a slice; every bar has its number, so nothing hangs on colour."""
    measured = [row for row in rows if not row.published and row.slices]
    theirs = [row for row in [*rows, *foreign] if row.published and row.slices]
    chosen = (measured + theirs[: max(MAX_BARS - len(measured), 0)])[:MAX_BARS]
    names = list(dict.fromkeys(name for row in chosen for name in row.slices))
    if len(names) < 2:
        return [], []
    top = max(figure.value for row in chosen for figure in row.slices.values()) or 1.0
    groups = []
    for name in names:
        bars = [
            {"style": place, "published": row.published, "label": row.label, "note": row.note, "figure": figure,
             "width": 100 * figure.value / top}
            for place, row in enumerate(chosen)
            if (figure := row.slices.get(name)) is not None
        ]  # fmt: skip
        groups.append({"name": name.replace("_", " "), "bars": bars})
    return groups, [(row.label + (f" ({row.note})" if row.note else ""), row.published) for row in chosen]


def _cost_row(row: Row, main: int) -> dict[str, Any] | None:
    """What a query costs, and the figure that it buys; None for published rows and rankings made elsewhere."""
    if row.evaluation is None or row.figures[main] is None:
        return None
    columns = {
        key: row.evaluation.per_query.get(key) for key in ("rationale_tokens", "generate_ms", "embed_ms")
    }
    found: dict[str, float | None] = {
        key: None if values is None or values.isna().all() else float(values.mean())
        for key, values in columns.items()
    }
    if found["embed_ms"] is None:
        return None
    forced = (row.evaluation.results.get("rationale") or {}).get("forced_rate")
    return {"label": row.label, "note": row.note, "figure": row.figures[main], "forced": forced, **found}


def _cost(rows: Sequence[Mapping[str, Any]], name: str) -> Markup | None:
    """The rows of the table as numbered points."""
    if not rows:
        return None
    points = [
        Point(
            f"{row['label']}, {row['note']}",
            row["embed_ms"] + (row["generate_ms"] or 0.0),
            row["figure"].value,
            row["figure"].low,
            row["figure"].high,
        )
        for row in rows
    ]
    return scatter(points, name=name, x_label="milliseconds a query, on the machine of the run")


# --- examples -------------------------------------------------------------------------------------------------------


def _examples(
    rows: Sequence[Row], metric: str, gallery: Gallery, num: int, set_dir: Path | None, seed: int
) -> dict[str, Any]:
    measured = [row for row in rows if row.evaluation is not None]
    tables = {f"{row.label}, {row.note}": row.evaluation.per_query for row in measured if row.evaluation}
    frame = next(iter(tables.values())).copy()
    shared = frame.index
    for table in tables.values():
        shared = shared.intersection(table.index)
    frame = frame.loc[shared]
    ranks = pd.DataFrame({name: table.loc[shared, RANK_COLUMN] for name, table in tables.items()})
    ranks = ranks.where(ranks >= 1)
    names = list(ranks)
    frame["winner"] = [_winner(row, names) for row in ranks.to_numpy(np.float64)]
    frame[RANK_COLUMN] = ranks.min(axis=1)
    results = measured[0].evaluation.results if measured[0].evaluation else {}
    folder = Path(set_dir or results["set"].get("path") or "")
    suite = bool(results.get("suite"))
    if not folder.is_dir() or suite != is_suite(folder):
        raise UserError(f"retrieval set {folder} is not there; if it was moved, give set=DIR, or examples=0")
    if suite:
        members = sorted({str(name) for name in frame["category"]})
        wanted = sorted(members, key=lambda name: hashlib.sha256(f"{seed}{name}".encode()).hexdigest())[
            :MAX_MEMBERS
        ]
        frame = frame[frame["category"].astype(str).isin(wanted)]
    chosen = choose_examples(frame, success_rank=1, num=num, strata=["category", "winner"], seed=seed)
    cards = []
    if suite:
        for member in sorted({name.partition("/")[0] for name in chosen}):
            inner = [name for name in chosen if name.partition("/")[0] == member]
            expected = results["set"].get("members", {}).get(member)
            loaded = _load(folder / member, expected)
            cards += _cards(loaded, inner, f"{member}/", tables, frame, gallery)
        cards.sort(key=lambda card: chosen.index(card["id"]))
    else:
        cards = _cards(_load(folder, results["set"]["fingerprint"]), chosen, "", tables, frame, gallery)
    winners = [
        name
        for name in dict.fromkeys([*names, "all alike", "several", "none"])
        if (frame["winner"] == name).any()
    ]
    return {
        "cards": cards,
        "categories": sorted({card["category"] for card in cards}),
        "winners": [(name, int((frame["winner"] == name).sum())) for name in winners],
        "num_queries": len(frame),
        "num_runs": len(names),
    }


def _winner(ranks: np.ndarray, names: Sequence[str]) -> str:
    """Whose first right candidate stands highest; rank NaN is none."""
    if np.isnan(ranks).all():
        return "none"
    best = np.flatnonzero(ranks == np.nanmin(ranks))
    if len(best) == 1 and len(names) > 1:
        return names[int(best[0])]
    return "all alike" if len(best) == len(names) else "several"


def _load(path: Path, fingerprint: str | None) -> RetrievalSet:
    loaded = load_set(path)
    if fingerprint is not None and loaded.fingerprint != fingerprint:
        raise UserError(f"retrieval set {path} is not the one that was measured; give set=DIR, or examples=0")
    return loaded


def _cards(
    loaded: RetrievalSet, chosen: Sequence[str], prefix: str, tables: Mapping[str, pd.DataFrame],
    frame: pd.DataFrame, gallery: Gallery,
) -> list[dict[str, Any]]:  # fmt: skip
    place = {prefix + query: row for row, query in enumerate(loaded.query_ids)}
    shown = {
        (query, name): [str(one) for one in table.at[query, TOP_COLUMN]][:NUM_SHOWN]
        for query in chosen
        for name, table in tables.items()
    }
    right = {
        query: {loaded.corpus_ids[row] for row in loaded.positives[place[query]][0].tolist()}
        for query in chosen
    }
    wanted = {query: sorted(right[query])[:2] for query in chosen}
    needed = {one for names in [*shown.values(), *wanted.values()] for one in names}
    corpus = {item.id: item for item in loaded.corpus_items() if item.id in needed}
    if lost := sorted(needed - corpus.keys()):
        raise UserError(f"candidate {lost[0]!r} of the ranking is not in {loaded.path}")

    def candidate(name: str, query: str) -> dict[str, Any]:
        item = corpus[name]
        picture = gallery.add(item.images[0], f"candidate {name!r} of {loaded.path}") if item.images else None
        return {"id": name, "picture": picture, "text": item.text, "hit": name in right[query]}

    cards = []
    for query in chosen:
        item = loaded.queries[place[query]]
        best = frame.at[query, RANK_COLUMN]
        lists = []
        for name, table in tables.items():
            rank = table.at[query, RANK_COLUMN]
            rationale = table.at[query, "rationale"] if "rationale" in table else None
            lists.append(
                {
                    "label": name,
                    "rank": None if pd.isna(rank) or rank < 1 else int(rank),
                    "results": [candidate(one, query) for one in shown[query, name]],
                    "rationale": rationale if isinstance(rationale, str) and rationale else None,
                    "wins": frame.at[query, "winner"] == name,
                }
            )
        cards.append(
            {
                "id": query,
                "category": str(frame.at[query, "category"]),
                "winner": frame.at[query, "winner"],
                "rank": "none"
                if pd.isna(best)
                else "first"
                if best == 1
                else "near"
                if best <= NUM_SHOWN
                else "below",
                "pictures": [gallery.add(ref, f"query {query!r} of {loaded.path}") for ref in item.images],
                "text": item.text,
                "lists": lists,
                "wanted": [candidate(one, query) for one in wanted[query]],
                "num_positives": len(right[query]),
            }
        )
    return cards
