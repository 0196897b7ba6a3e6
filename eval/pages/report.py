"""One HTML page from finished evaluations: figures with intervals, training curves, and examples with pictures.

    python -m eval report runs=DIR[,DIR...] out=FILE [log=FILE,...] [baseline=LABEL:DIR,...]

evaluation directories --read_evaluations--> Evaluation --_main_table, examples, plots--> context
  --templates/report.html.j2--> one file: no network, every picture in it once, readable without script

Anything that cannot be shown honestly is a `UserError` that names the directory and the mend: an incomplete evaluation,
figures of different sets side by side, a number that is not finite, a missing picture.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from eval.embedding.identity import OLD, old_results, set_mismatch
from eval.pages.budget_plot import on_page
from eval.pages.examples import RANK_COLUMN, Gallery, choose_examples
from eval.pages.plots import CURVE_NAMES, Series, check_finite, line_chart, number, read_training_logs
from eval.pages.single_file import write_page
from eval.scoring.metrics import judge, random_floor
from eval.scoring.stats import cluster_bootstrap, index_of, interval
from eval.sets.retrieval_set import RetrievalSet, load_set, with_readable_content
from rge.common.errors import UserError

QUERY_COLUMN, TOP_COLUMN = "query_id", "top10"
NAME_COLUMNS = ("concept", "name", "label", "title")  # of corpus.parquet, the first that is there
NUM_SHOWN = 5  # pictures of a ranking on an example card
LONG_QUESTION, LONG_RATIONALE = 260, 420  # characters; what is longer folds
MAX_MAIN_SLICES = 4  # slices beside "all queries" in the main table; more have a table of their own
MAX_WANTED = 2  # right answers shown beside a ranking that has none of them

_NAMES = {  # (query_mode, query_modality) -> order in the table, label, what it means
    ("reasoning", "text"): (1, "Question only", "picture withheld"),
    ("reasoning", "image"): (2, "Image only", "question withheld"),
    ("direct", "text"): (3, "Question only, direct", "picture withheld, no rationale"),
    ("direct", "image"): (4, "Image only, direct", "question withheld, no rationale"),
    ("direct", "both"): (5, "Direct", "no rationale, same checkpoint"),
    ("reasoning", "both"): (9, "Reasoning", "writes a rationale first"),
}
_FOREIGN_ORDER, _BASELINE_ORDER = 6, 7
_METRIC_WORDS = {
    "recall": "share of a query’s right candidates that are among the first {k}, mean over queries",
    "hit": "share of queries with a right candidate among the first {k}",
    "precision": "share of the first {k} that is right, mean over queries",
    "ndcg": "gain of the first {k}, discounted by rank, as a share of the best possible",
    "mrr": "one over the rank of the first right candidate, mean over queries",
    "map": "average precision over the first {k}, divided by the number of right candidates",
    "map_capped": "average precision over the first {k}, divided by the right candidates that fit into {k}",
    "negative_recall": "share of a query’s explicit negatives among the first {k}: lower is better",
}
_SLICE_WORDS = {"seen": "Seen pairs", "held_out": "Held\u2011out pairs"}


@dataclass(frozen=True)
class Figure:
    """A value with its 95 % interval, all fractions of 1; the interval is None where none was computed."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation directory.

    Attributes:
        directory: where it was read.
        label: row name in the tables.
        note: a few words under the label.
        order: position among the rows; ascending.
        is_baseline: another checkpoint, named by the caller.
        results: results.json.
        per_query: per_query.parquet, indexed by query id.
    """

    directory: Path
    label: str
    note: str
    order: int
    is_baseline: bool
    results: Mapping[str, Any]
    per_query: pd.DataFrame

    @property
    def mode(self) -> tuple[str, str]:
        """Query mode and query modality; both ``None`` for a ranking made elsewhere."""
        return str(self.results.get("query_mode")), str(self.results.get("query_modality"))

    def figure(self, block: str, metric: str, slice_name: str | None = None) -> Figure | None:
        """A figure of results.json, None where that slice or metric was not computed.

        Args:
            block: ``micro``, ``macro``, ``by_category`` or ``by_pair``.
            metric: metric name, such as ``recall@1``.
            slice_name: category or pair; None for the blocks without slices.

        Raises:
            UserError: the value or a bound is not a finite number.
        """
        figures = self.results.get(block) or {}
        if slice_name is not None:
            figures = figures.get(slice_name) or {}
        entry = figures.get(metric)
        if entry is None:
            return None
        where = f"{self.directory}/results.json: {block}{f'.{slice_name}' if slice_name else ''}.{metric}"
        numbers = {}
        for key in ("value", "low", "high"):
            numbers[key] = entry.get(key)
            if key == "value" or numbers[key] is not None:
                check_finite(numbers[key], f"{where}.{key}")
        return Figure(**numbers)


def write_report(
    dirs: Sequence[Path],
    out: Path,
    *,
    training_logs: Sequence[Path] = (),
    title: str | None = None,
    metric: str = "recall@1",
    num_examples: int = 48,
    baselines: Mapping[str, Path] | None = None,
    set_dir: Path | None = None,
    seed: int = 0,
    budget: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report page of one or several evaluations of one retrieval set.

    The same input gives the same bytes: examples are drawn by a seeded hash of the query id, and nothing on the page
    is a date.

    Args:
        dirs: evaluation directories, or directories that hold them (``out`` of ``python -m eval run``).
        out: the HTML file; its directory is created.
        training_logs: ``metrics.jsonl`` files: stages of one run, or runs to be compared (see `read_training_logs`).
        title: heading of the page.
        metric: the metric of the main table.
        num_examples: how many queries are shown with pictures; half of them successes while there are enough.
        baselines: label -> evaluation directory of another checkpoint on the same set.
        set_dir: where the retrieval set is now; default: where results.json says it was.
        seed: draws other examples.
        budget: content of ``budget.json``: accuracy against tokens and milliseconds.

    Returns:
        ``out``.

    Raises:
        UserError: an evaluation is incomplete, holds a number that is not finite, or is of another retrieval set;
            a picture is missing; a training log cannot be read.
    """
    evaluations = read_evaluations(dirs, baselines or {})
    _check_one_set(evaluations)
    main = _featured(evaluations)
    if main.figure("micro", metric) is None:
        known = ", ".join(main.results["micro"])
        raise UserError(
            f"metric must be one that {main.directory}/results.json holds, got {metric!r}; it holds {known}"
        )
    compared = _compared(evaluations)
    gallery = Gallery()
    loaded = _load_set(main, set_dir)
    examples = _examples(compared, main, loaded, metric, num_examples, seed, gallery)
    main_table, other_tables = _main_table(compared, main, metric, _floor(main, loaded, metric))
    content = dict(
        title=title or f"What reasoning bought on {main.results['set']['name']}",
        set=main.results["set"],
        profile=main.results.get("profile"),
        warnings=warnings_of(evaluations),
        metric=metric,
        metric_words=metric_words(metric),
        verdict=_verdict(compared, main, metric),
        main_table=main_table,
        other_tables=other_tables,
        ceiling=_ceiling(main, metric),
        metrics_table=_metrics_table(evaluations, main),
        health=[_health(evaluation, metric) for evaluation in evaluations],
        examples=examples,
        pictures=gallery.pictures,
        sizes={picture.name: (picture.width, picture.height) for picture in gallery.pictures},
        curves=_curves(training_logs),
        budget=None if budget is None else on_page(budget),
        provenance=_provenance(evaluations),
        long_question=LONG_QUESTION,
        long_rationale=LONG_RATIONALE,
        cut_at=cut_at,
        max_slices=MAX_MAIN_SLICES,
    )
    filters = {"percent": percent, "signed": signed, "count": lambda n: f"{n:,}"}
    return write_page(out, "report.html.j2", ["report.css"], filters, content)


# --- reading and checking -------------------------------------------------------------------------------------------


def read_evaluations(dirs: Sequence[Path], baselines: Mapping[str, Path]) -> list[Evaluation]:
    """Read evaluation directories in the order of the table: ablations, direct, baselines, reasoning.

    Args:
        dirs: evaluation directories; one without results.json whose subdirectories are evaluations stands for these.
        baselines: label -> evaluation directory.

    Raises:
        UserError: no directory, one of them incomplete, or its files do not fit together.
    """
    found: list[Path] = []
    for directory in map(Path, dirs):
        found += expand(directory)
    if not found:
        raise UserError("dirs must name at least one evaluation directory, got none")
    evaluations = [read_evaluation(directory) for directory in dict.fromkeys(found)]
    counts: dict[str, int] = defaultdict(int)
    for evaluation in evaluations:
        counts[evaluation.label] += 1
    evaluations = [
        one
        if counts[one.label] == 1
        else _relabel(one, f"{one.label} · {one.directory.parent.name}/{one.directory.name}")
        for one in evaluations
    ]
    for label, directory in baselines.items():
        for one in expand(Path(directory), single=True):
            evaluations.append(_relabel(read_evaluation(one), label, is_baseline=True))
    labels = [one.label for one in evaluations]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UserError(f"every evaluation needs a label of its own, got {twice[0]!r} twice")
    return sorted(evaluations, key=lambda one: one.order)


def _relabel(evaluation: Evaluation, label: str, *, is_baseline: bool = False) -> Evaluation:
    note = f"other checkpoint, {evaluation.label.lower()}" if is_baseline else evaluation.note
    order = _BASELINE_ORDER if is_baseline else evaluation.order
    return replace(evaluation, label=label, note=note, order=order, is_baseline=is_baseline)


def expand(directory: Path, *, single: bool = False) -> list[Path]:
    """The directory itself if it is an evaluation, else the evaluations in it.

    Raises:
        UserError: there is none, or several where ``single`` was asked for.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: name the output of `python -m eval run`")
    if (directory / "results.json").exists() or (directory / "per_query.parquet").exists():
        return [directory]
    inner = sorted(
        child
        for child in directory.iterdir()
        if any((child / name).exists() for name in ("results.json", "per_query.parquet", "run.trec"))
    )
    if not inner:
        raise UserError(
            f"{directory} has no results.json: the evaluation is incomplete, or was written elsewhere"
        )
    if single and len(inner) > 1:
        names = ", ".join(child.name for child in inner)
        raise UserError(f"a baseline is one evaluation, {directory} holds {len(inner)}: name one of {names}")
    return inner


def read_evaluation(directory: Path) -> Evaluation:
    """Read one evaluation directory.

    Raises:
        UserError: it is incomplete, or its files do not fit together.
    """
    for name in ("results.json", "per_query.parquet"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}: the evaluation is incomplete, run it again")
    try:
        results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{directory}/results.json is not JSON: {error}") from error
    missing = [key for key in ("set", "micro") if not results.get(key)]
    missing += [f"set.{key}" for key in ("name", "fingerprint") if not (results.get("set") or {}).get(key)]
    if missing:
        raise UserError(f"{directory}/results.json lacks {', '.join(missing)}")
    try:
        per_query = pd.read_parquet(directory / "per_query.parquet")
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}/per_query.parquet cannot be read: {error}") from error
    absent = [name for name in (QUERY_COLUMN, RANK_COLUMN, TOP_COLUMN) if name not in per_query]
    if absent:
        raise UserError(
            f"{directory}/per_query.parquet has no column {absent[0]!r}; it has {', '.join(per_query.columns)}"
        )
    per_query = per_query.set_index(QUERY_COLUMN)
    if per_query.index.has_duplicates:
        twice = per_query.index[per_query.index.duplicated()][0]
        raise UserError(f"{directory}/per_query.parquet has query {twice!r} more than once")
    if results.get("query_mode") is None:  # `python -m eval score`: a ranking made elsewhere
        order, label, note = (
            _FOREIGN_ORDER,
            str(results.get("tag") or directory.name),
            "a ranking made elsewhere",
        )
    else:
        mode = (str(results["query_mode"]), str(results.get("query_modality") or "both"))
        order, label, note = _NAMES.get(mode, (_FOREIGN_ORDER, " · ".join(mode), "see the foot of the page"))
    return Evaluation(directory, label, note, order, False, results, per_query)


def _check_one_set(evaluations: Sequence[Evaluation]) -> None:
    first = evaluations[0]
    for other in evaluations[1:]:
        if why := set_mismatch(first.results, other.results):
            raise UserError(
                f"{first.directory} and {other.directory} are evaluations of different retrieval sets ({why}): write one "
                "report for each set"
            )
        missing = first.per_query.index.symmetric_difference(other.per_query.index)
        if len(missing):
            raise UserError(
                f"{first.directory} and {other.directory} hold different queries: {missing[0]!r} is in one only"
            )


def warnings_of(evaluations: Sequence[Evaluation]) -> list[str]:
    """Every warning of the results on a page, each once, with the rows that it holds for where that is not all of them."""
    rows: dict[str, list[str]] = defaultdict(list)
    for one in evaluations:
        for warning in [
            *(one.results.get("warnings") or []),
            *([f"this {OLD}"] if old_results(one.results) else []),
        ]:
            rows[str(warning)].append(one.label)
    return [
        warning if len(labels) == len(evaluations) else f"{', '.join(labels)}: {warning}"
        for warning, labels in rows.items()
    ]


def _featured(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation whose examples are shown: reasoning with picture and question, else the nearest to it."""
    own = [one for one in evaluations if not one.is_baseline]
    return max(own or evaluations, key=lambda one: (one.mode[0] == "reasoning", one.mode[1] == "both"))


def _compared(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The rows of the main table: a shortcut (text or image only) without rationale is left to the details.

    It stays where there is no such shortcut with rationale.
    """
    reasoned = {one.mode[1] for one in evaluations if one.mode[0] == "reasoning" and not one.is_baseline}
    return [
        one
        for one in evaluations
        if one.is_baseline or one.mode[0] != "direct" or one.mode[1] == "both" or one.mode[1] not in reasoned
    ]


def _load_set(main: Evaluation, given: Path | None) -> RetrievalSet:
    path = given or main.results["set"].get("path")
    if path is None:
        raise UserError(
            f"{main.directory}/results.json does not say where the retrieval set is: give set=DIR"
        )
    if not Path(path).is_dir():
        raise UserError(
            f"retrieval set {path} of {main.directory} is not there; if it was moved, give set=DIR"
        )
    loaded, _ = with_readable_content(load_set(path))
    now = {"set": {"fingerprint": loaded.fingerprint, "content": loaded.content}}
    if why := set_mismatch(now, main.results):
        raise UserError(f"retrieval set {path} is not the one that {main.directory} was measured on ({why})")
    return loaded


# --- words and numbers ----------------------------------------------------------------------------------------------


def percent(value: float, like: float | None = None) -> str:
    """A fraction as per cent without the sign: one decimal, two below one per cent, a true minus sign.

    Args:
        value: a fraction of 1.
        like: take the number of decimals that this value has; a bound looks like the value it belongs to.
    """
    size = abs(value if like is None else like)
    digits = 2 if 0 < size < 0.00995 else 1
    return f"{100 * value:.{digits}f}".replace("-", "\u2212")


def signed(value: float, plus: str = "+") -> str:
    """A difference in per cent points, one decimal, with a true minus sign or ``plus`` before it."""
    return (f"{plus}{100 * value:.1f}" if value >= 0 else f"{100 * value:.1f}").replace("-", "\u2212")


def cut_at(text: str, limit: int) -> int:
    """Where to fold a text that is longer than ``limit`` characters: at the last space before, if one is near."""
    space = text.rfind(" ", limit - 60, limit)
    return space if space > 0 else limit


def metric_words(metric: str) -> str:
    """What a metric means, in a clause; empty for a metric without a definition here."""
    name, _, k = metric.partition("@")
    return _METRIC_WORDS.get(name, "").format(k=k or "all")


def _slice_label(name: str) -> str:
    words = name.replace("_", " ")
    return _SLICE_WORDS.get(name, words[:1].upper() + words[1:])


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A table cell: a figure and where its dot and interval lie on the column's scale, in per cent."""

    figure: Figure | None
    at: float = 0.0
    low: float = 0.0
    high: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class Row:
    """A table row; ``featured`` is the row that the page is about."""

    label: str
    note: str
    cells: list[Cell]
    featured: bool = False
    is_random: bool = False


@dataclass(frozen=True)
class Table:
    """Figures of one metric.

    Attributes:
        by: what its slices are; empty without slices.
        columns: heading and number of queries of each.
        rows: evaluations, and the random floor first.
        scale: left and right end of every track.
        gains: paired differences between the featured row and its rivals.
    """

    by: str
    columns: list[tuple[str, int | None]]
    rows: list[Row]
    scale: Figure
    gains: list[Row] = field(default_factory=list)


def _table(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    metric: str,
    columns: Sequence[tuple[str, str, str | None]],
    counts: Mapping[str | None, int],
    block_name: str | None,
    floor: np.ndarray | None,
) -> Table:
    grid: list[tuple[str, str, list[Figure | None], bool, bool]] = []
    figures: list[Figure | None]
    if floor is not None:
        figures = []
        for _, block, name in columns:
            rows_Q = _members(main, block, name)
            figures.append(None if rows_Q is None else Figure(float(np.nanmean(floor[rows_Q]))))
        if columns[0][2] is None:  # as it was measured; the slices are not in results.json
            figures[0] = Figure(main.results["random"][metric])
        grid.append(("Random floor", "a shuffled ranking", figures, False, True))
    for one in evaluations:
        figures = [one.figure(block, metric, name) for _, block, name in columns]
        grid.append((one.label, one.note, figures, one is main, False))
    shown = [f for _, _, figures, _, _ in grid for f in figures if f is not None]
    top = max([f.high if f.high is not None else f.value for f in shown] + [1e-9])
    bottom = min([f.low if f.low is not None else f.value for f in shown] + [0.0])

    def place(value: float) -> float:
        return round(100 * (value - bottom) / (top - bottom), 2)

    rows = []
    for label, note, figures, featured, is_random in grid:
        cells = []
        for (_, block, name), figure in zip(columns, figures, strict=True):
            where = f"{label}|{'random' if is_random else block}|{name or ''}|{metric}"
            if figure is None:
                cells.append(Cell(None, where=where))
                continue
            low = figure.value if figure.low is None else figure.low
            high = figure.value if figure.high is None else figure.high
            cells.append(Cell(figure, place(figure.value), place(low), place(high), where))
        rows.append(Row(label, note, cells, featured, is_random))
    heads = [(heading, counts.get(name)) for heading, _, name in columns]
    name = (block_name or "").removeprefix("by_").replace("_", " ")
    return Table(name, heads, rows, Figure(top, bottom, top))


def _main_table(
    evaluations: Sequence[Evaluation], main: Evaluation, metric: str, floor: np.ndarray | None
) -> tuple[Table, list[Table]]:
    """The main table (all queries, then pairs, or the categories of a set without pairs) and one for each other slice."""
    blocks = [block for one in evaluations for block in one.results if block.startswith("by_")]
    blocks = sorted(set(blocks), key=lambda b: (b != "by_pair", b != "by_category", b))
    everything: list[tuple[str, str, str | None]] = [("All queries", "micro", None)]
    sliced = {}
    for block in blocks:
        names = sorted({n for one in evaluations for n in one.results.get(block) or {}}, key=_slice_order)
        if len(names) > 1:
            sliced[block] = [(_slice_label(n), block, n) for n in names]
    lead = next((block for block in sliced if len(sliced[block]) <= MAX_MAIN_SLICES), None)
    columns = everything + (sliced.pop(lead) if lead else [])
    counts = _counts(main, lead)
    others = [_table(evaluations, main, metric, sliced[b], _counts(main, b), b, floor) for b in sliced]
    table = _table(evaluations, main, metric, columns, counts, lead, floor)
    return replace(table, gains=_gains(evaluations, main, metric, columns)), others


def _members(main: Evaluation, block: str, name: str | None) -> np.ndarray | None:
    """Which queries of per_query.parquet a column of a table is about; None if it does not say."""
    if name is None:
        return np.ones(len(main.per_query), bool)
    column = block.removeprefix("by_")
    return (main.per_query[column] == name).to_numpy() if column in main.per_query else None


def _floor(main: Evaluation, loaded: RetrievalSet, metric: str) -> np.ndarray | None:
    """Expected value of the metric under a shuffled ranking, for each query of the evaluation; None if unknown."""
    value = (main.results.get("random") or {}).get(metric)
    if value is None:
        return None
    check_finite(value, f"{main.directory}/results.json: random.{metric}")
    nothing = np.full((len(loaded.queries), 1), -1)
    judged = judge(nothing, loaded.positives, loaded.negatives, num_candidates=len(loaded.corpus_ids))
    depth = int(main.results.get("depth") or len(loaded.corpus_ids))
    floors = pd.Series(random_floor(metric, judged, loaded.pool_sizes(), depth=depth), loaded.query_ids)
    return floors.reindex(main.per_query.index).to_numpy()


def _gains(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    metric: str,
    columns: Sequence[tuple[str, str, str | None]],
) -> list[Row]:
    """What the featured row has over each rival: per-query differences, groups resampled as in `eval.scoring.stats`."""
    rivals = [one for one in evaluations if one is not main and _is_rival(one, main)]
    rows = []
    for one in rivals:
        if metric not in main.per_query or metric not in one.per_query:
            continue
        difference = main.per_query[metric] - one.per_query.loc[main.per_query.index, metric]
        cells = []
        for _, block, name in columns:
            rows_Q = _members(main, block, name)
            where = f"{one.label}|gain {block}|{name or ''}|{metric}"
            if rows_Q is None:
                cells.append(Cell(None, where=where))
                continue
            chosen = difference[rows_Q]
            group_Q = index_of(main.per_query.loc[chosen.index, "group"].tolist())
            found = cluster_bootstrap(chosen.to_numpy(np.float64)[:, None], group_Q)
            low_M, high_M = interval(found)
            bounds = [float(x[0]) for x in (found.estimate_M, low_M, high_M)]
            cells.append(Cell(Figure(*bounds) if np.isfinite(bounds).all() else None, where=where))
        rows.append(Row(f"Gain over {one.label}", "", cells))
    return rows


def _is_rival(one: Evaluation, main: Evaluation) -> bool:
    """The same checkpoint without a rationale, given the same; or another checkpoint."""
    return one.is_baseline or (main.mode[0] == "reasoning" and one.mode == ("direct", main.mode[1]))


def _slice_order(name: str) -> tuple[int, str]:
    known = list(_SLICE_WORDS)
    return (known.index(name) if name in known else len(known), name)


def _counts(main: Evaluation, block: str | None) -> dict[str | None, int]:
    counts: dict[str | None, int] = {None: len(main.per_query)}
    column = (block or "").removeprefix("by_")
    if column in main.per_query:
        counts |= {str(k): int(v) for k, v in main.per_query[column].value_counts().items()}
    return counts


def _metrics_table(evaluations: Sequence[Evaluation], main: Evaluation) -> dict[str, Any]:
    blocks = []
    for block, heading in (("micro", "Mean over queries"), ("macro", "Mean over categories")):
        metrics = list(dict.fromkeys(m for one in evaluations for m in (one.results.get(block) or {})))
        rows = []
        for metric in metrics:
            cells = [
                Cell(one.figure(block, metric), where=f"{one.label}|{block}||{metric}") for one in evaluations
            ]
            floor = (main.results.get("random") or {}).get(metric) if block == "micro" else None
            rows.append({"metric": metric, "words": metric_words(metric), "floor": floor, "cells": cells})
        if rows:
            has_floor = any(row["floor"] is not None for row in rows)
            blocks.append({"heading": heading, "rows": rows, "has_floor": has_floor})
    return {"labels": [one.label for one in evaluations], "blocks": blocks}


def _ceiling(main: Evaluation, metric: str) -> float | None:
    """What a perfect ranking reaches where that is less than all: recall@k of queries with more than k positives."""
    name, _, k = metric.partition("@")
    if name != "recall" or "num_positives" not in main.per_query:
        return None
    num_positives = main.per_query["num_positives"]
    ceiling = float((num_positives.clip(upper=int(k)) / num_positives).mean())
    return ceiling if ceiling < 0.9995 else None


def _verdict(evaluations: Sequence[Evaluation], main: Evaluation, metric: str) -> list[tuple[str, Figure]]:
    """The figures of the opening sentence: the featured row, its rivals, chance; each with its words."""
    reasons = main.mode[0] == "reasoning"
    words = (
        "with its own rationale"
        if reasons
        else "without a rationale"
        if main.mode[0] == "direct"
        else "in this ranking"
    )
    found = [(words, main.figure("micro", metric))]
    for one in evaluations:
        if one.is_baseline:
            found.append((f"for “{one.label}”", one.figure("micro", metric)))
        elif _is_rival(one, main):
            found.append(("by the same checkpoint without it", one.figure("micro", metric)))
    floor = (main.results.get("random") or {}).get(metric)
    if floor is not None:
        found.append(("by chance", Figure(floor)))
    return [(words, figure) for words, figure in found if figure is not None]


def _health(evaluation: Evaluation, metric: str) -> dict[str, Any]:
    """Cost and trustworthiness of one evaluation: rationale length, forced stops, time, spread by ties."""
    rationale = evaluation.results.get("rationale") or {}
    reasons = evaluation.mode[0] == "reasoning"
    row: dict[str, Any] = {"label": evaluation.label}
    for key in ("forced_rate", "tokens_mean", "tokens_p95"):
        value = rationale.get(key) if reasons else None
        if value is not None:
            check_finite(value, f"{evaluation.directory}/results.json: rationale.{key}")
        row[key] = value
    for key in ("generate_ms", "embed_ms"):
        column = evaluation.per_query.get(key)
        row[key] = None if column is None or column.isna().all() else float(column.mean())
    ties = (evaluation.results.get("ties") or {}).get(metric)
    for key, value in (ties or {}).items():
        check_finite(value, f"{evaluation.directory}/results.json: ties.{metric}.{key}")
    own = evaluation.results.get("self_retrieval") or {}
    row["own_first"] = own.get("rate@1")
    row["ties"] = None if ties is None else (ties["worst"], ties["best"])
    return row


def _provenance(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """What produced the evaluations: facts that all share, those that differ, and everything recorded but figures."""
    figures = {"set", "micro", "macro", "ties", "rationale", "random"}
    blocks, recorded = [], []
    for one in evaluations:
        rest = {k: v for k, v in one.results.items() if k not in figures and not k.startswith("by_")}
        rest = _without_paths(rest)
        facts = {}
        for name, value in rest.items():
            if isinstance(value, Mapping) and all(isinstance(v, (str, int, float)) for v in value.values()):
                value = ", ".join(f"{k} {_brief(v)}" for k, v in value.items())
            if isinstance(value, (str, int, float)) and 0 < len(_brief(value)) <= 300:
                facts[name.replace("_", " ")] = _brief(value)
        facts["again with"] = _command(one)
        blocks.append(facts)
        recorded.append((one.label, json.dumps(rest, indent=1, ensure_ascii=False, default=str)))
    common = {k: v for k, v in blocks[0].items() if all(facts.get(k) == v for facts in blocks[1:])}
    return {
        "common": common if len(blocks) > 1 else {},
        "own": [
            (one.label, {k: v for k, v in facts.items() if len(blocks) == 1 or k not in common})
            for one, facts in zip(evaluations, blocks, strict=True)
        ],
        "recorded": recorded,
    }


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command(evaluation: Evaluation) -> str:
    """The command that makes this evaluation again, out= apart."""
    results = evaluation.results
    if results.get("query_mode") is None:
        return f"python -m eval score run={evaluation.label} set={_local(str(results['set'].get('path')))}"
    words = {"checkpoint": results.get("checkpoint"), "set": results["set"].get("path")}
    words |= {
        key: results.get(key) for key in ("query_mode", "query_modality", "batch_size", "dtype", "seed")
    }
    given = [f"{key}={_local(str(value))}" for key, value in words.items() if value is not None]
    return " ".join(("python -m eval run", *given))


def _without_paths(value: Any) -> Any:
    """The same with absolute paths made local: a page is passed on, a machine's folders need not be."""
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return _local(value) if isinstance(value, str) else value


def _local(text: str) -> str:
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


# --- examples -------------------------------------------------------------------------------------------------------


def _examples(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    loaded: RetrievalSet,
    metric: str,
    num: int,
    seed: int,
    gallery: Gallery,
) -> dict[str, Any]:
    """Everything the template needs for the cards."""
    k = re.search(r"@(\d+)", metric)
    success_rank = min(int(k.group(1)), NUM_SHOWN) if k else 1
    strata = [name for name in ("category", *loaded.report_by) if main.per_query[name].nunique() > 1]
    chosen = choose_examples(main.per_query, success_rank=success_rank, num=num, strata=strata, seed=seed)
    place = {query_id: row for row, query_id in enumerate(loaded.query_ids)}
    strange = [query_id for query_id in chosen if query_id not in place]
    if strange:
        raise UserError(f"{main.directory} evaluates query {strange[0]!r}, which {loaded.path} does not have")
    ranked = {
        query_id: [str(name) for name in main.per_query.at[query_id, TOP_COLUMN]][:NUM_SHOWN]
        for query_id in chosen
    }
    right, wrong = {}, {}
    for query_id in chosen:
        rows, gains = loaded.positives[place[query_id]]
        best_first = np.lexsort((rows, -gains))
        right[query_id] = [loaded.corpus_ids[row] for row in rows[best_first]]
        listed = () if loaded.negatives is None else loaded.negatives[place[query_id]].tolist()
        # an explicit negative that is also a positive counts as a positive, as in the metrics
        wrong[query_id] = {loaded.corpus_ids[row] for row in listed} - set(right[query_id])
    wanted = {
        query_id: [] if set(ranked[query_id]) & set(right[query_id]) else right[query_id][:MAX_WANTED]
        for query_id in chosen
    }
    needed = {name for lists in (ranked, wanted) for names in lists.values() for name in names}
    corpus = {item.id: item for item in loaded.corpus_items() if item.id in needed} if needed else {}
    names = _names(loaded.path / "corpus.parquet")
    lost = sorted(needed - corpus.keys())
    if lost:
        raise UserError(f"{main.directory} ranks candidate {lost[0]!r}, which {loaded.path} does not have")

    def candidate(name: str) -> dict[str, Any]:
        item = corpus[name]
        picture = gallery.add(item.images[0], f"candidate {name!r} of {loaded.path}") if item.images else None
        return {"id": name, "picture": picture, "text": item.text, "alt": item.text or names.get(name, name)}

    cards = []
    for query_id in chosen:
        item, measured = loaded.queries[place[query_id]], main.per_query.loc[query_id]
        pictures = [gallery.add(ref, f"query {query_id!r} of {loaded.path}") for ref in item.images]
        results = []
        for rank, name in enumerate(ranked[query_id], start=1):
            shown = candidate(name)
            marks = {
                "rank": rank,
                "hit": name in right[query_id],
                "negative": name in wrong[query_id],
                "is_query": shown["picture"] in pictures,
            }
            results.append(shown | marks)
        first = _rank(measured[RANK_COLUMN])
        cards.append(
            {
                "id": query_id,
                "facets": [str(measured[name]) for name in strata],
                "tags": [_tag(name, str(measured[name])) for name in strata],
                "outcome": "below"
                if first is None or first > NUM_SHOWN
                else "first"
                if first == 1
                else "near",
                "success": first is not None and first <= success_rank,
                "pictures": pictures,
                "text": item.text,
                "rationale": _text(measured.get("rationale")),
                "forced": measured.get("stop_reason") == "forced",
                "tokens": _rank(measured.get("rationale_tokens")),
                "results": results,
                "rank": first,
                "num_positives": len(right[query_id]),
                "wanted": [candidate(name) for name in wanted[query_id]],
                "ranks": [
                    (one.label, _rank(one.per_query.at[query_id, RANK_COLUMN]), one is main)
                    for one in evaluations
                ],
            }
        )
    ranks = main.per_query[RANK_COLUMN]
    num_first, num_near = int(ranks.eq(1).sum()), int(ranks.between(2, NUM_SHOWN).sum())
    facets = [(name, sorted(set(main.per_query[name].astype(str)), key=_slice_order)) for name in strata]
    return {
        "cards": cards,
        "found": next((card for card in cards if card["success"]), None),
        "missed": next((card for card in cards if not card["success"]), None),
        "reasons": main.mode[0] == "reasoning",
        "success_rank": success_rank,
        "num_successes": sum(card["success"] for card in cards),
        "num_first": num_first,
        "num_near": num_near,
        "num_below": len(ranks) - num_first - num_near,
        "num_queries": len(ranks),
        "num_negatives": sum(result["negative"] for card in cards for result in card["results"]),
        "num_forced": sum(card["forced"] for card in cards),
        "facets": [
            {
                "name": name,
                "label": name.replace("_", " ").capitalize(),
                "values": [(v, _tag("", v)) for v in values],
            }
            for name, values in facets
        ],
        "strata": [name.replace("_", " ") for name in strata],
    }


def _names(path: Path) -> dict[str, str]:
    """What candidates are called, for those who do not see the pictures; empty where the set does not say."""
    known = pq.read_schema(path).names
    column = next((name for name in NAME_COLUMNS if name in known), None)
    if column is None:
        return {}
    table = pq.read_table(path, columns=["id", column]).to_pydict()
    return {
        key: str(value).replace("_", " ")
        for key, value in zip(table["id"], table[column], strict=True)
        if value
    }


def _tag(column: str, value: str) -> str:
    words = value.replace("held_out", "held-out").replace("_", " ")
    return f"{words} pair" if column == "pair" else words


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _rank(value: Any) -> int | None:
    """A rank, or another count from one; None where there is none, such as no right candidate in the ranking."""
    return None if pd.isna(value) or value < 1 else int(value)


# --- training curves ------------------------------------------------------------------------------------------------


def _curves(paths: Sequence[Path]) -> dict[str, Any] | None:
    if not paths:
        return None
    runs = read_training_logs(paths)
    keys = list(dict.fromkeys(key for run in runs for key in run.curves))
    keys = [key for key in CURVE_NAMES if key in keys] + sorted(set(keys) - set(CURVE_NAMES))
    charts = []
    for key in keys:
        name, is_percent = CURVE_NAMES.get(key, (key.replace("_", " ").capitalize(), False))
        series = [Series(run.label, *run.curves[key]) for run in runs if key in run.curves]
        bands = runs[0].stages if len(runs) == 1 else []
        last = "" if len(series) > 1 else f"ends at {number(series[0].y[-1] * (100 if is_percent else 1))}"
        charts.append(
            {
                "name": name,
                "last": last + ("%" if last and is_percent else ""),
                "svg": line_chart(series, name=name, bands=bands, percent=is_percent),
            }
        )
    return {"charts": charts, "labels": [run.label for run in runs] if len(runs) > 1 else []}


# --- command --------------------------------------------------------------------------------------------------------
