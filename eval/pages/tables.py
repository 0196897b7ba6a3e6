"""The tables of a report: figures with intervals, slices, paired gains, all metrics, cost and ties."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.registry import BENCHMARKS, GENERIC, protocol_for
from eval.pages.evaluations import Evaluation, Figure
from eval.pages.wording import Scale, percent, slice_label, slice_order
from eval.scoring.metrics import metric_words, of_kinds
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet
from rge.stats.intervals import OF_DIFFERENCES, cluster_bootstrap, figures, index_of

MAX_MAIN_SLICES = 4
"""Maximum number of slices in addition to "all queries" in the main table; others get separate tables."""


@dataclass(frozen=True)
class Row:
    """A table row; ``featured`` marks the row that the page is about."""

    label: str
    note: str
    figures: list[Figure | None]  # one per column
    featured: bool = False


@dataclass(frozen=True)
class Table:
    """Figures of one metric; gains are paired differences between the featured row and its rivals."""

    by: str
    columns: list[tuple[str, int | None]]
    rows: list[Row]
    scale: Scale
    gains: list[Row] = field(default_factory=list)
    metric: str = ""


@dataclass(frozen=True)
class _Column:
    """A figure of results.json, and its queries in per_query.parquet (None: unknown)."""

    heading: str
    path: tuple[str, ...]  # in results.json, up to the metric
    rows_Q: np.ndarray | None

    @property
    def num_queries(self) -> int | None:
        return None if self.rows_Q is None else int(self.rows_Q.sum()) or None


def _table(
    evaluations: Sequence[Evaluation],
    main: Evaluation,
    metric: str,
    columns: Sequence[_Column],
    floor: np.ndarray | None,
) -> Table:
    rows = [
        Row(one.label, one.note, [one.figure(*c.path, metric) for c in columns], featured=one is main)
        for one in evaluations
    ]
    if floor is not None:
        chance = [_chance(main, metric, column, floor) for column in columns]
        rows.insert(0, Row("Random floor", "a shuffled ranking", chance))
    known = filter(None, chain.from_iterable(row.figures for row in rows))
    scale = Scale.around(end for figure in known for end in (figure.value, figure.low, figure.high))
    block, *value = columns[-1].path
    by = block.removeprefix("by_").replace("_", " ") if value else ""
    return Table(by, [(c.heading, c.num_queries) for c in columns], rows, scale, metric=metric)


def _chance(main: Evaluation, metric: str, column: _Column, floor: np.ndarray) -> Figure | None:
    """Expected figure of a random ranking; that of a slice is the mean of its queries' expected values."""
    if len(column.path) == 1:
        return main.figure("random", metric)
    if column.rows_Q is None:
        return None
    values = floor[column.rows_Q & np.isfinite(floor)]
    return Figure(float(values.mean())) if len(values) else None


def main_table(
    evaluations: Sequence[Evaluation], main: Evaluation, metric: str, floor: np.ndarray | None
) -> tuple[Table, list[Table]]:
    """The main table (all queries, then pairs, or categories of a set without pairs), and one for each other slice."""
    sliced = _slices(evaluations, main)
    lead = next((block for block in sliced if len(sliced[block]) <= MAX_MAIN_SLICES), "")
    every_Q = np.ones(len(main.per_query), bool)
    columns = [_Column("All queries", ("micro",), every_Q), *sliced.pop(lead, [])]
    others = [_table(evaluations, main, metric, rest, floor) for rest in sliced.values()]
    for name in of_kinds(main.names("micro")):
        if name != metric:
            everywhere = [columns, *sliced.values()]
            others += [_table(evaluations, main, name, rest, None) for rest in everywhere]
    table = _table(evaluations, main, metric, columns, floor)
    return replace(table, gains=_gains(evaluations, main, metric, columns)), others


def _slices(evaluations: Sequence[Evaluation], main: Evaluation) -> dict[str, list[_Column]]:
    """Columns by block: pairs, categories, then others; without blocks that have a single value."""
    blocks = {f"by_{column}" for one in evaluations for column in one.reported_by}
    out = {}
    for block in sorted(blocks, key=lambda b: (b != "by_pair", b != "by_category", b)):
        names = sorted(set().union(*(one.names(block) for one in evaluations)), key=slice_order)
        column = main.per_query.get(block.removeprefix("by_"))
        if len(names) > 1:
            out[block] = [
                _Column(
                    slice_label(name), (block, name), None if column is None else (column == name).to_numpy()
                )
                for name in names
            ]
    return out


def random_floors(main: Evaluation, loaded: RetrievalSet, metric: str) -> np.ndarray | None:
    """Expected value of the metric under a random ranking, for each query of the evaluation; None if unknown.

    NaN for queries without a value, see `Protocol.without`.
    """
    results = main.results
    if main.figure("random", metric) is None:
        return None
    benchmark = results.benchmark
    if benchmark not in (GENERIC, *BENCHMARKS):  # of a plugin that is not loaded
        return np.full(len(main.per_query), np.nan)
    protocol = protocol_for(benchmark, results.profile, loaded, [metric])
    empty = np.full((len(loaded.queries), 1), -1, np.int32)
    depth = results.depth or len(loaded.corpus_ids)
    scored = protocol.score(protocol.prepare(loaded), Ranking(empty, np.full(empty.shape, -np.inf), depth))
    floors = pd.Series(scored.random_QM[:, scored.names.index(metric)], loaded.query_ids)
    return floors.reindex(main.per_query.index).where(main.per_query[metric].notna()).to_numpy()


def _gains(
    evaluations: Sequence[Evaluation], main: Evaluation, metric: str, columns: Sequence[_Column]
) -> list[Row]:
    """Paired differences between the featured row and each rival, with groups resampled as in `eval.scoring.stats`."""

    def gain(difference_Q: pd.Series, rows_Q: np.ndarray | None) -> Figure | None:
        if rows_Q is None:
            return None
        group_Q = index_of(main.per_query["group"][rows_Q].tolist())
        means = cluster_bootstrap(difference_Q[rows_Q].to_numpy(np.float64)[:, None], group_Q)
        value, low, high = figures(means, OF_DIFFERENCES)[0].values()
        return None if value is None else Figure(value, low, high)

    rows = []
    for one in evaluations:
        if _is_rival(one, main) and metric in main.per_query and metric in one.per_query:
            difference_Q = main.per_query[metric] - one.per_query.loc[main.per_query.index, metric]
            gains = [gain(difference_Q, column.rows_Q) for column in columns]
            rows.append(Row(f"Gain over {one.label}", "", gains))
    return rows


def _is_rival(one: Evaluation, main: Evaluation) -> bool:
    """Whether an evaluation is of another checkpoint, or of the same one and modality without a rationale."""
    same = main.mode[0] == "reasoning" and one.mode == ("direct", main.mode[1])
    return one is not main and (one.is_baseline or same)


def metrics_table(evaluations: Sequence[Evaluation], main: Evaluation) -> dict[str, Any]:
    """All metrics of all evaluations, as means over queries and means over categories."""
    blocks, floors = [], {"micro": main.results.random, "macro": {}}
    for block, heading in (("micro", "Mean over queries"), ("macro", "Mean over categories")):
        rows = [
            {
                "metric": metric,
                "words": metric_words(metric),
                "floor": floors[block].get(metric),
                "figures": [one.figure(block, metric) for one in evaluations],
            }
            for metric in dict.fromkeys(chain.from_iterable(one.names(block) for one in evaluations))
        ]
        if rows:
            has_floor = any(row["floor"] is not None for row in rows)
            blocks.append({"heading": heading, "rows": rows, "has_floor": has_floor})
    return {"labels": [one.label for one in evaluations], "blocks": blocks}


def ceiling_of(main: Evaluation, metric: str) -> float | None:
    """Maximum of the metric if it is below 1: recall@k of queries with more than k positives."""
    name, _, k = metric.partition("@")
    if name != "recall" or "num_positives" not in main.per_query:
        return None
    num_positives = main.per_query["num_positives"]
    ceiling = float((num_positives.clip(upper=int(k)) / num_positives).mean())
    return ceiling if ceiling < 0.9995 else None


def verdict_of(evaluations: Sequence[Evaluation], main: Evaluation, metric: str) -> list[tuple[str, Figure]]:
    """Figures of the opening sentence, with their wording: the featured row, its rivals, and chance."""
    words = {"reasoning": "with its own rationale", "direct": "without a rationale"}
    shown = [(words.get(main.mode[0], "in this ranking"), main)]
    for one in evaluations:
        if one.is_baseline:
            shown.append((f"for “{one.label}”", one))
        elif _is_rival(one, main):
            shown.append(("by the same checkpoint without it", one))
    parts = [(name, figure) for name, one in shown if (figure := one.figure("micro", metric)) is not None]
    floor = main.figure("random", metric)
    return parts if floor is None else [*parts, ("by chance", floor)]


def cost_and_ties(evaluations: Sequence[Evaluation], metric: str) -> dict[str, Any]:
    """Costs and reliability: rationale length, forced stops, time, and spread by ties.

    Only columns of which at least one evaluation has a value (external rankings have no costs); other cells are None.
    """
    cells = [_cost_cells(one, metric) for one in evaluations]
    columns = [heading for heading in cells[0] if any(row[heading] for row in cells)]
    rows = [(one.label, [row[name] for name in columns]) for one, row in zip(evaluations, cells, strict=True)]
    return {"columns": columns, "rows": rows}


def _cost_cells(one: Evaluation, metric: str) -> dict[str, str | None]:
    def shown(words: Callable[..., str], *paths: tuple[str, ...]) -> str | None:
        figures = [one.figure(*path) for path in paths]
        return None if None in figures else words(*(figure.value for figure in figures if figure))

    def milliseconds(key: str) -> str | None:
        mean = one.mean(key)
        return f"{mean:.1f}" if mean else None  # 0: nothing was generated

    def share(value: float) -> str:
        return f"{percent(value)} %"

    tokens = shown("{:.1f} / {:.0f}".format, ("rationale", "tokens_mean"), ("rationale", "tokens_p95"))
    ties = ("ties", metric, "worst"), ("ties", metric, "best")
    writes = one.mode[0] == "reasoning"
    return {
        "Forced stops": shown(share, ("rationale", "forced_rate")) if writes else None,
        "Tokens, mean / p95": tokens if writes else None,
        "Generate, ms per query": milliseconds("generate_ms"),
        "Embed, ms per query": milliseconds("embed_ms"),
        "Ties, worst–best": shown(lambda worst, best: f"{percent(worst)}–{share(best)}", *ties),
        "Own picture first": shown(share, ("self_retrieval", "rate@1")),
    }
