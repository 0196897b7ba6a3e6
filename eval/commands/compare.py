"""Compare two evaluations of one retrieval set, query by query.

    rge eval compare a=DIR b=DIR [metric=recall@1,mrr] [out=DIR]

Each metric is tested over all queries, as macro mean, and for every category and every value of a ``report_by`` column; the
tests of one column are a family, whose p values are also adjusted by Holm's method. For a suite, all but "all queries" and the
members' own tests are means over members, as in its results.json.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.published_tables import beside
from eval.benchmarks.suite import mean_over
from eval.pages.charts import interval_chart, side_by_side
from eval.pages.comparison import write_comparison
from eval.pages.evaluations import BASES, BUDGET, Evaluation, check_one_set, read_evaluation, warnings_of
from eval.scoring.identity import differences, versions
from eval.scoring.metrics import of_kinds
from eval.scoring.output_files import statistics_settings
from eval.scoring.results import FORMAT
from eval.scoring.stats import POWER, effect_size, holm, minimum_detectable, sign_flip_p
from eval.scoring.tables import write_tables
from rge.common.errors import UserError
from rge.common.files import read_json, write_text
from rge.common.options import Count, one_of
from rge.common.registry import PluginOptions
from rge.identity.run_identity import in_words as what_differs
from rge.stats.intervals import OF_DIFFERENCES, Bootstrap, cluster_bootstrap, figures, in_words, index_of

COMPARE, PLOT, PAGE, TABLE = "compare.json", "compare.svg", "compare.html", "compare"
INCIDENTAL = ("software.", "machine.", "settings.dtype", "settings.exact")
"""Parts of an identity that usually differ by accident: versions, machine, dtype."""
DEFAULT_METRICS = ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10")


@dataclass
class CompareOptions(PluginOptions):
    """Compare two evaluations of one set with a paired test."""

    a: Path
    """Evaluation directory, or an output of `budget`, whose mode reasoning is compared; the page shows its curves."""
    b: Path
    """The same, of the same set; differences are a - b."""
    metric: tuple[str, ...] = DEFAULT_METRICS
    """Metrics to test, with `wrong_kind@1` of a pool of several kinds; `all`: every metric that both have."""
    out: Path | None = None
    """Folder for compare.json, compare.svg, the table (compare.csv, compare.tex) and the page; null: print only."""
    examples: int = 60
    """Number of queries that the page shows with pictures, rationales and rankings; 0: none."""
    set: Path | None = None
    """Current location of the retrieval set, for the page; null: as in results.json."""
    seed: Count = 0
    """Seed of the resampling."""


def compare(options: CompareOptions) -> pd.DataFrame:
    """Test every metric on every slice, print the table, and write it if ``out`` is given; returns `paired_tests`."""
    a, b = (
        read_evaluation(path / BASES[-1] if (path / BUDGET).exists() else path)
        for path in (options.a, options.b)
    )
    check_one_set([a, b])
    frame_b = b.per_query.loc[a.per_query.index]
    names = _metrics(options.metric, a, frame_b)
    columns = [name for name in a.reported_by if name in b.reported_by]
    suite = bool(a.results.suite)
    rows = paired_tests(a.per_query, frame_b, names, columns, seed=options.seed, suite=suite)
    warnings = _warnings(a, b)
    for warning in warnings:
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    print(_heading(a, b), _formatted(rows).to_string(index=False), sep="\n")
    print(beside({letter: run.results for letter, run in (("a", a), ("b", b))}))
    if options.out is not None:
        _write(options, options.out, a, b, rows, warnings)
    return rows


def _write(
    options: CompareOptions, out: Path, a: Evaluation, b: Evaluation, rows: pd.DataFrame, warnings: list[str]
) -> None:
    """Write compare.json, the plot of the first metric, both tables and the page."""
    content = {
        "format": FORMAT,
        "set": a.results.set.as_json(),
        "a": _about(a),
        "b": _about(b),
        "difference": "a - b",
        "differs": {key: list(pair) for key, pair in differences(a.results, b.results).items()},
        "warnings": warnings,
        "rows": rows.to_dict("records"),
        "statistics": statistics_settings(options.seed)
        | {"test": "sign flips by group, two-sided", "adjusted": "Holm", "effect": "d_z", "power": POWER},
        "versions": versions(),
    }
    first = rows["metric"].iloc[0]
    marks = rows[rows["metric"] == first].assign(metric="", mean=rows["difference"])
    marks["row"] = marks["slice"] + " (" + marks["num_queries"].astype(str) + ")"
    title = f"{first}, a - b, percentage points, 95 % intervals"
    write_text(out / PLOT, interval_chart(marks.assign(slice=first).to_dict("records"), title=title))
    write_text(out / COMPARE, json.dumps(content, indent=1, allow_nan=False) + "\n")
    tables = write_tables(out / TABLE, rows, _formatted(rows))
    print("", out / COMPARE, out / PLOT, *tables, sep="\n")
    budget = _budget(options)
    print(write_comparison(a, b, out / PAGE, content, options.examples, options.set, budget))


def _budget(options: CompareOptions) -> dict[str, Any] | None:
    """The curves of both outputs of `budget`, or of the one; None without any."""
    of_sides = {"A": read_json(options.a / BUDGET), "B": read_json(options.b / BUDGET)}
    known = {letter: one for letter, one in of_sides.items() if one is not None}
    if len({one["metric"] for one in known.values()}) > 1:
        names = ", ".join(f"{letter} by {one['metric']}" for letter, one in known.items())
        raise UserError(
            f"the curves are of different metrics: {names}; measure both with one metric=", key="metric"
        )
    return side_by_side(known) if known else None


def paired_tests(
    frame_a: pd.DataFrame,
    frame_b: pd.DataFrame,
    names: list[str],
    columns: list[str],
    *,
    seed: int,
    suite: bool = False,
) -> pd.DataFrame:
    """Test every metric over all queries, as macro mean and on every slice; each column is a family of slices.

    Frames have per-query values of the same queries in the same order, with ``group``, ``category`` and `columns`. In a
    `suite` categories are members, and slices of other columns are means over members.

    Returns:
        One row per test: ``slice``, ``metric``, ``num_queries``, ``a``, ``b``, ``difference`` (a - b, fractions) with ``low``
        and ``high``, ``p``, ``p_holm``, ``effect``, ``minimum_detectable``. None: ``p_holm`` of the whole set; ``effect`` of
        means over categories or members, or if all queries differ by the same amount; bounds for a single group;
        ``minimum_detectable`` also if all groups differ by the same amount.
    """
    test = partial(_slice, names=names, seed=seed)
    tables = [test("all queries", frame_a, frame_b)]
    if frame_a["category"].nunique() > 1:
        tables.append(test("macro", frame_a, frame_b, over="members" if suite else "categories"))
    for column in columns:
        parts = list(frame_a.groupby(column))  # drops queries of members without this column
        if len(parts) > 1:
            over = "members" if suite and column != "category" else None
            family = pd.concat(
                test(f"{column} {value}", part, frame_b.loc[part.index], over=over) for value, part in parts
            )
            family["p_holm"] = family.groupby("metric")["p"].transform(holm)
            tables += [family[family["metric"] == name] for name in names]
    rows = pd.concat(tables, ignore_index=True).astype(object)
    return rows.where(rows.notna(), None)


def _slice(
    label: str,
    frame_a: pd.DataFrame,
    frame_b: pd.DataFrame,
    *,
    names: list[str],
    seed: int,
    over: str | None = None,
) -> pd.DataFrame:
    """One row per metric: means over queries, or means ``over`` categories or members of their means."""
    about = frame_a[["group", "category"]]
    group_Q = index_of(about["group"].tolist())
    stratum_Q = index_of(about["category"].tolist()) if over else None
    value_a, value_b = (frame[names].to_numpy(np.float64) for frame in (frame_a, frame_b))
    difference_QM = value_a - value_b
    # a query counts for a metric only if both runs define it
    both = np.isfinite(difference_QM)

    def means(value_QM: np.ndarray, **more: int) -> Bootstrap:
        if over == "members":  # resampled independently, as everywhere in a suite
            table = pd.DataFrame(value_QM, about.index, names).join(about)
            return mean_over(table, names, members=True, seed=seed, **more)
        return cluster_bootstrap(value_QM, group_Q, stratum_Q=stratum_Q, seed=seed, **more)

    mean_a, mean_b = (
        means(np.where(both, value, np.nan), num_resamples=1).estimate_M for value in (value_a, value_b)
    )
    differences = means(difference_QM)
    table = pd.DataFrame(
        {
            "slice": label,
            "metric": names,
            "num_queries": both.sum(axis=0),
            "a": mean_a,
            "b": mean_b,
            "difference": differences.estimate_M,
            **pd.DataFrame(figures(differences, OF_DIFFERENCES))[["low", "high"]].astype(float),
            "p": sign_flip_p(difference_QM, group_Q, stratum_Q=stratum_Q, seed=seed),
            "p_holm": np.nan,
            # d_z is defined over queries, not over means of categories
            "effect": np.nan if over else effect_size(difference_QM),
            "minimum_detectable": minimum_detectable(differences.standard_error_M),
        }
    )
    # drop means over members that some member does not define
    return table[np.isfinite(table["difference"])]


def _warnings(a: Evaluation, b: Evaluation) -> list[str]:
    incidental = {
        key: pair
        for key, pair in differences(a.results, b.results).items()
        if key.startswith(INCIDENTAL) or (key.startswith("plugins.") and None not in pair)
    }
    out = warnings_of([replace(run, label=str(run.directory)) for run in (a, b)])
    if incidental:
        changes = "; ".join(what_differs(incidental))
        out.append(f"a and b also differ in settings that are not being compared: {changes}")
    return out


def _metrics(requested: tuple[str, ...], a: Evaluation, frame_b: pd.DataFrame) -> list[str]:
    known = [name for name in a.results.micro if name in a.per_query and name in frame_b]
    unasked = of_kinds(known) if requested == DEFAULT_METRICS else []
    names = known if requested == ("all",) else list(dict.fromkeys([*requested, *unasked]))
    one_of("metric", names, known)
    return names


def _about(run: Evaluation) -> dict[str, Any]:
    keys = ("checkpoint", "checkpoint_hash", "query_mode", "query_modality", "run", "tag")
    recorded = {key: run.results.look_up([key]) for key in keys}
    return {"path": str(run.directory)} | {key: it for key, it in recorded.items() if it is not None}


def _heading(a: Evaluation, b: Evaluation) -> str:
    head = [f"{a.results.set.name}: differences are a - b, in percentage points; 95 % intervals over groups"]
    for letter, run in (("a", a), ("b", b)):
        made = run.results
        words = [made.query_mode, made.query_modality, (made.checkpoint_hash or "")[:12]]
        head.append(f"{letter} = {run.directory} ({', '.join(filter(None, words)) or made.tag})")
    changes = "; ".join(what_differs(differences(a.results, b.results)))
    head.append(f"a and b differ in {changes or 'nothing: they are two measurements of the same thing'}")
    return "\n".join(head)


def _formatted(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "slice": row["slice"],
            "n": row["num_queries"],
            "metric": row["metric"],
            "a": f"{100 * row['a']:.2f}",
            "b": f"{100 * row['b']:.2f}",
            "a - b": f"{100 * row['difference']:+.2f}",
            "interval": in_words(row["low"], row["high"], "+.2f"),
            "p": f"{row['p']:.4f}",
            "p Holm": "" if row["p_holm"] is None else f"{row['p_holm']:.4f}",
            "effect": "" if row["effect"] is None else f"{row['effect']:+.2f}",
            "detectable": "–"
            if row["minimum_detectable"] is None
            else f"{100 * row['minimum_detectable']:.2f}",
        }
        for row in rows.to_dict("records")
    )
