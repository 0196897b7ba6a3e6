"""Compare two evaluations of one retrieval set, query by query.

    rge eval compare a=DIR b=DIR [metric=recall@1,mrr] [out=DIR]

Differences are a - b. Each metric gets one test over all queries, one of the macro mean, and one for every category
and every value of a ``report_by`` column; the tests of one column are a family, and their p values are also given
adjusted by Holm's method. Of a suite, all of them but "all queries" and the members' own are means over members, as in its
results.json. Beside p stands what it cannot say: the effect size, and the smallest difference that so many queries could have
shown.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import mean_of, member_bootstraps
from eval.embedding.identity import OLD, differences, old_results, versions
from eval.pages.boards.comparison import write_comparison
from eval.pages.charts import Mark, interval_chart
from eval.pages.evaluations import check_one_set, read_evaluation
from eval.scoring.output_files import FORMAT, statistics_settings
from eval.scoring.stats import POWER, effect_size, holm, minimum_detectable, sign_flip_p
from eval.scoring.tables import write_tables
from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.common.registry import PluginOptions
from rge.identity.run_identity import in_words as what_differs
from rge.stats.intervals import (
    NUM_RESAMPLES,
    OF_DIFFERENCES,
    Bootstrap,
    cluster_bootstrap,
    figures,
    in_words,
    index_of,
)

COMPARE, PLOT, PAGE, TABLE = "compare.json", "compare.svg", "compare.html", "compare"
BY_THE_WAY = ("software.", "machine.", "settings.dtype", "settings.exact")
"""Parts of an identity that usually differ by accident: another version, another machine, another dtype."""
DEFAULT_METRICS = ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10")


@dataclass
class CompareOptions(PluginOptions):
    """Compare two evaluations of one set with a paired test."""

    a: Path
    """Evaluation directory."""
    b: Path
    """Evaluation directory of the same set; differences are a - b."""
    metric: tuple[str, ...] = DEFAULT_METRICS
    """Metrics to test; `all`: every metric that both have."""
    out: Path | None = None
    """Folder for compare.json, compare.svg, the table (compare.csv, compare.tex) and the page; null: print only."""
    examples: int = 60
    """Number of queries that the page shows with pictures, rationales and rankings; 0: none."""
    set: Path | None = None
    """Current location of the retrieval set, for the page; null: as in results.json."""
    seed: int = 0
    """Seed of the resampling."""


@dataclass(frozen=True)
class Row:
    """One test: a slice of the queries and a metric. Differences are a - b, fractions of one.

    ``p_holm`` is p adjusted within the slice's family (the values of one column), None for the whole set.
    ``effect`` is None for a mean over categories or members, and where all queries differ by the same amount.
    ``low`` and ``high`` are None where one group alone says nothing of others, ``minimum_detectable`` also where all
    groups differ by the same amount.
    """

    slice: str
    metric: str
    num_queries: int
    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    p: float
    p_holm: float | None
    effect: float | None
    minimum_detectable: float | None


def compare(options: CompareOptions) -> list[Row]:
    """Test every metric on every slice, print the table, and write it if asked to.

    Raises:
        UserError: the evaluations are of different sets or queries, or a metric is in neither.
    """
    a, b = read_evaluation(options.a), read_evaluation(options.b)
    check_one_set([a, b])
    results_a, frame_a, results_b = dict(a.results), a.per_query, dict(b.results)
    frame_b = b.per_query.loc[frame_a.index]
    names = _metrics(options, results_a, frame_a, frame_b)
    columns = [key.removeprefix("by_") for key in results_a if key.startswith("by_") and key in results_b]
    suite = bool(results_a.get("suite"))
    rows = paired_tests(frame_a, frame_b, names, columns, seed=options.seed, suite=suite)
    notes = _notes(options, results_a, results_b)
    for note in notes:
        print(f"WARNING: {note}", file=sys.stderr, flush=True)
    print(_table(rows, options, results_a, results_b))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "set": results_a["set"],
            "a": _about(options.a, results_a),
            "b": _about(options.b, results_b),
            "difference": "a - b",
            "differs": {key: list(pair) for key, pair in differences(results_a, results_b).items()},
            "warnings": notes,
            "rows": [vars(row) for row in rows],
            "statistics": statistics_settings(options.seed, NUM_RESAMPLES)
            | {"test": "sign flips by group, two-sided", "adjusted": "Holm", "effect": "d_z", "power": POWER},
            "versions": versions(),
        }
        write_bytes(
            options.out / PLOT, plot([row for row in rows if row.metric == names[0]], names[0]).encode()
        )
        write_bytes(options.out / COMPARE, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
        tables = write_tables(options.out / TABLE, pd.DataFrame([vars(row) for row in rows]), _shown(rows))
        print("\n" + "\n".join(map(str, (options.out / COMPARE, options.out / PLOT, *tables))))
        page = write_comparison(
            a,
            b,
            options.out / PAGE,
            content["rows"],
            differs=content["differs"],
            warnings=notes,
            num_examples=options.examples,
            set_dir=options.set,
            seed=options.seed,
        )
        print(page)
    return rows


def paired_tests(
    frame_a: pd.DataFrame,
    frame_b: pd.DataFrame,
    names: list[str],
    columns: list[str],
    *,
    seed: int,
    suite: bool = False,
) -> list[Row]:
    """Every metric over all queries, as macro mean and on every slice.

    Args:
        frame_a: per-query values, indexed by query id; ``group``, ``category`` and the columns.
        frame_b: the same queries in the same order.
        names: metrics.
        columns: each a family of slices.
        seed: of the resampling.
        suite: categories are members of a suite, so that slices of other columns are means over members.
    """
    value_a, value_b = (frame[names].to_numpy(np.float64) for frame in (frame_a, frame_b))
    about = frame_a[["group", "category"]]
    over = "members" if suite else "categories"
    rows = _slice("all queries", value_a, value_b, about, names, seed)
    if about["category"].nunique() > 1:
        rows += _slice("macro", value_a, value_b, about, names, seed, over=over)
    for column in columns:
        of_Q = frame_a[column].to_numpy(dtype=object)
        values = sorted(
            {value for value in of_Q if isinstance(value, str)}
        )  # a suite's member may not have it
        if len(values) < 2:
            continue
        average = "members" if suite and column != "category" else None
        family: list[Row] = []
        for value in values:
            chosen = of_Q == value
            label = f"{column} {value}"
            family += _slice(
                label, value_a[chosen], value_b[chosen], about[chosen], names, seed, over=average
            )
        for name in names:
            own = [row for row in family if row.metric == name]
            adjusted = holm([row.p for row in own])
            rows += [Row(**vars(row) | {"p_holm": float(p)}) for row, p in zip(own, adjusted, strict=True)]
    return rows


def _slice(
    label: str,
    value_a: np.ndarray,
    value_b: np.ndarray,
    about: pd.DataFrame,
    names: list[str],
    seed: int,
    *,
    over: str | None = None,
) -> list[Row]:
    """One row a metric: of means over queries, or ``over`` categories or members of their means over queries."""
    group_Q = index_of(about["group"].tolist())
    stratum_Q = index_of(about["category"].tolist()) if over else None
    difference_QM = value_a - value_b
    # a query counts for a metric only where both runs define it
    both = np.isfinite(difference_QM)

    def means(value_QM: np.ndarray, **more: int) -> Bootstrap:
        if over == "members":  # independent of each other, as everywhere in a suite
            table = pd.DataFrame(value_QM, about.index, names).join(about)
            return mean_of(list(member_bootstraps(table, names, seed=seed, **more).values()))
        return cluster_bootstrap(value_QM, group_Q, stratum_Q=stratum_Q, seed=seed, **more)

    mean_a, mean_b = (
        means(np.where(both, value, np.nan), num_resamples=1).estimate_M for value in (value_a, value_b)
    )
    found = means(difference_QM)
    figure_M = figures(found, OF_DIFFERENCES)
    p_M = sign_flip_p(difference_QM, group_Q, stratum_Q=stratum_Q, seed=seed)
    # d_z is a property of queries; a mean of categories has none
    effect_M = effect_size(difference_QM) if over is None else np.full(len(names), np.nan)
    least_M = minimum_detectable(found.standard_error_M)
    return [
        Row(
            slice=label,
            metric=name,
            num_queries=int(both[:, m].sum()),
            a=float(mean_a[m]),
            b=float(mean_b[m]),
            difference=float(found.estimate_M[m]),
            low=figure_M[m]["low"],
            high=figure_M[m]["high"],
            p=float(p_M[m]),
            p_holm=None,
            effect=None if math.isnan(effect_M[m]) else float(effect_M[m]),
            minimum_detectable=None if math.isnan(least_M[m]) else float(least_M[m]),
        )
        for m, name in enumerate(names)
        if np.isfinite(found.estimate_M[m])  # nothing is a mean over members where one does not define it
    ]


def plot(rows: list[Row], metric: str) -> str:
    """One metric's differences with their intervals as SVG, one line a slice."""
    marks = [
        Mark(f"{row.slice} ({row.num_queries})", metric, "", row.difference, row.low, row.high)
        for row in rows
    ]
    return interval_chart(marks, title=f"{metric}, a - b, points of 100, 95 % intervals")


def _notes(options: CompareOptions, results_a: dict[str, Any], results_b: dict[str, Any]) -> list[str]:
    """What a reader of the comparison has to know first."""
    found = []
    told: dict[str, list[str]] = {}
    for path, results in ((options.a, results_a), (options.b, results_b)):
        if old_results(results):
            found.append(f"{path} {OLD}")
        for warning in results.get("warnings") or []:
            told.setdefault(warning, []).append(str(path))
    found += [f"{'a and b' if len(paths) > 1 else paths[0]}: {warning}" for warning, paths in told.items()]
    by_the_way = {
        key: pair
        for key, pair in differences(results_a, results_b).items()
        if key.startswith(BY_THE_WAY) or (key.startswith("plugins.") and None not in pair)
    }
    if by_the_way:
        said = "; ".join(what_differs(by_the_way))
        found.append(f"a and b also differ in settings that are not being compared: {said}")
    return found


def _metrics(
    options: CompareOptions, results: dict[str, Any], frame_a: pd.DataFrame, frame_b: pd.DataFrame
) -> list[str]:
    known = [name for name in results["micro"] if name in frame_a.columns and name in frame_b.columns]
    names = known if options.metric == ("all",) else list(dict.fromkeys(options.metric))
    for name in names:
        if name not in known:
            raise UserError(f"metric {name!r} is not in both evaluations; they have {', '.join(known)}")
    return names


def _about(directory: Path, results: dict[str, Any]) -> dict[str, Any]:
    keys = ("checkpoint", "checkpoint_hash", "query_mode", "query_modality", "run", "tag")
    return {"path": str(directory)} | {key: results[key] for key in keys if key in results}


def _table(
    rows: list[Row], options: CompareOptions, results_a: dict[str, Any], results_b: dict[str, Any]
) -> str:
    head = [
        f"{results_a['set']['name']}: differences are a - b, in points of 100; 95 % intervals over groups"
    ]
    for letter, path, results in (("a", options.a, results_a), ("b", options.b, results_b)):
        words = [
            results.get("query_mode"),
            results.get("query_modality"),
            (results.get("checkpoint_hash") or "")[:12],
        ]
        head.append(f"{letter} = {path} ({', '.join(filter(None, words)) or results.get('tag')})")
    apart = what_differs(differences(results_a, results_b))
    head.append(
        f"a and b differ in {'; '.join(apart) or 'nothing: they are two measurements of the same thing'}"
    )
    return "\n".join([*head, _shown(rows).to_string(index=False)])


def _shown(rows: list[Row]) -> pd.DataFrame:
    """The rows as people read them."""
    return pd.DataFrame(
        {
            "slice": [row.slice for row in rows],
            "n": [row.num_queries for row in rows],
            "metric": [row.metric for row in rows],
            "a": [f"{100 * row.a:.2f}" for row in rows],
            "b": [f"{100 * row.b:.2f}" for row in rows],
            "a - b": [f"{100 * row.difference:+.2f}" for row in rows],
            "interval": [in_words(row.low, row.high, "+.2f") for row in rows],
            "p": [f"{row.p:.4f}" for row in rows],
            "p Holm": ["" if row.p_holm is None else f"{row.p_holm:.4f}" for row in rows],
            "effect": ["" if row.effect is None else f"{row.effect:+.2f}" for row in rows],
            "detectable": [
                "–" if row.minimum_detectable is None else f"{100 * row.minimum_detectable:.2f}"
                for row in rows
            ],
        }
    )
