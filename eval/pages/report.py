"""One HTML page from finished evaluations: figures with intervals, training curves, and examples with pictures.

    rge eval report runs=[LABEL:]DIR[,DIR...] out=FILE [log=FILE,...]

evaluation directories --evaluations--> Evaluation --tables, examples, training logs--> context
  --templates/report.html.j2--> one file: no network, every picture in it once, readable without script

Anything that would be misleading raises a `UserError` that names the directory and the fix: incomplete evaluations, figures
of different sets, numbers that are not finite, missing pictures.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.pages import tables
from eval.pages.charts import budget_on_page, line_chart
from eval.pages.evaluations import (
    BUDGET,
    Evaluation,
    check_one_set,
    compared,
    featured,
    read_evaluations,
    set_of,
    warnings_of,
)
from eval.pages.examples import Gallery, cards_of
from eval.pages.single_file import write_page
from eval.pages.wording import number, slice_label, slice_order
from eval.scoring.metrics import metric_words
from rge.common.errors import UserError
from rge.common.files import read_json, read_json_lines
from rge.common.options import one_of
from rge.common.registry import PluginOptions
from rge.tables.errors import reading

CURVE_NAMES = {
    "loss": ("Loss", False),
    "loss_lm": ("Rationale loss (nats per token)", False),
    "loss_contrastive": ("Contrastive loss (nats)", False),
    "hit_at_1": ("In-batch hit@1", True),
    "forced_rate": ("Forced stops", True),
    "rationale_tokens_mean": ("Rationale length (tokens)", False),
}
"""Keys of ``metrics.jsonl`` with charts, in order: title, and whether values are shown in per cent."""


@dataclass
class ReportOptions(PluginOptions):
    """Write one HTML page from finished evaluations."""

    runs: tuple[str, ...]
    """Evaluation directories, or directories that contain them. LABEL:DIR names the row of another
    checkpoint."""
    out: Path
    """The HTML file to write."""
    log: tuple[str, ...] = ()
    """``metrics.jsonl`` of each stage of the training run, in order."""
    metric: str = "recall@1"
    """Metric of the main table."""
    examples: int = 48
    """Number of queries shown with pictures."""
    set: Path | None = None
    """Current location of the retrieval set; null: as in results.json."""


def report(options: ReportOptions) -> Path:
    """``rge eval report``: write the page of evaluations of one set, or of the output of `budget`; print and return its path.

    The output is deterministic: examples are drawn by a hash of the query id, and the page has no dates.
    """
    runs = [word for word in options.runs if word]
    if not runs:
        raise UserError("it must name at least one evaluation directory", key="runs")
    metric, budget = options.metric, read_json(Path(runs[0]) / BUDGET) if len(runs) == 1 else None
    evaluations = read_evaluations(runs)
    if of_suite := next((one for one in evaluations if one.results.suite), None):
        raise UserError(
            "it is the mean of a suite, and a page shows one set: name a member's evaluation, members/NAME, or"
            " compare two suites with `rge eval compare`",
            of_suite.directory,
            kind="suite",
        )
    check_one_set(evaluations)
    main = featured(evaluations)
    one_of("metric", [metric], tuple(main.results.micro))
    rows = compared(evaluations)
    gallery = Gallery()
    loaded = set_of(main, options.set)
    examples = cards_of(rows, main, loaded, metric, options.examples, gallery)
    table, other_tables = tables.main_table(rows, main, metric, tables.random_floors(main, loaded, metric))
    notes = loaded.meta.get("slice_notes", {}).get(table.by, {})
    content = dict(
        title=f"Retrieval on {main.results.set.name}",
        set=main.results.set,
        profile=main.results.profile,
        metric=metric,
        metric_words=metric_words(metric),
        verdict=tables.verdict_of(rows, main, metric),
        main_table=table,
        other_tables=other_tables,
        ceiling=tables.ceiling_of(main, metric),
        metrics_table=tables.metrics_table(evaluations, main),
        health=tables.cost_and_ties(evaluations, metric),
        warnings=warnings_of(evaluations),
        slice_notes=[(slice_label(name), notes[name]) for name in sorted(notes, key=slice_order)],
        examples=examples,
        pictures=gallery.pictures,
        curves=curves_of([Path(name) for name in options.log if name]),
        budget=None if budget is None else budget_on_page(budget),
        provenance=provenance_of(evaluations),
        max_slices=tables.MAX_MAIN_SLICES,
    )
    path = write_page(options.out, "report.html.j2", ["report.css"], content)
    print(path)
    return path


def curves_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Charts of training logs for a page."""
    if not paths:
        return []
    table = read_training_logs(paths)
    stages = table["stage"].unique().tolist()
    charts = []
    for key in (*CURVE_NAMES, *sorted(set(filter(_is_curve, table)) - set(CURVE_NAMES))):
        name, percent = CURVE_NAMES.get(key, (key.replace("_", " ").capitalize(), False))
        unit, scale = ("%", 100) if percent else ("", 1)
        points = table[["step", "stage"]].assign(value=table.get(key)).dropna()
        if len(points):
            points["value"] = points["value"].astype(float) * scale
            last = f"ends at {number(points['value'].iloc[-1])}{unit}"
            svg = line_chart(points, stages=stages, name=name, unit=unit)
            charts.append({"name": name, "last": last, "svg": svg})
        if len(points := _by_source(table, key)):
            points["value"] *= scale
            last = ", ".join(
                f"{source} {number(own['value'].iloc[-1])}{unit}" for source, own in points.groupby("stage")
            )
            names = points["stage"].unique().tolist()
            svg = line_chart(points, stages=names, name=name, unit=unit)
            charts.append({"name": f"{name}, by source", "last": f"ends at: {last}", "svg": svg})
    return charts


def _by_source(table: pd.DataFrame, key: str) -> pd.DataFrame:
    """A figure's points by source, each of which is one line: as ``stage`` its name, without folders."""
    found = table[["step"]].assign(of=table.get(f"{key}_by_source")).dropna()
    rows = [
        {"step": step, "stage": Path(source).name, "value": float(value)}
        for step, of in zip(found["step"], found["of"], strict=True)
        for source, value in of.items()
    ]
    return pd.DataFrame(rows)


def read_training_logs(paths: Sequence[Path]) -> pd.DataFrame:
    """The lines of the ``metrics.jsonl`` of a run's stages as one table, in which every stage continues the steps."""
    tables: dict[str, pd.DataFrame] = {}
    end = 0
    for path in paths:
        with reading(str(path)):
            rows = read_json_lines(path)
        for row in rows:
            _check_row(path, row)
        table = pd.DataFrame(rows)
        if not {"stage", "step"} <= set(table):
            raise UserError("the training log does not exist, or has no lines with stage and step", path)
        stage = str(table["stage"].iloc[0])
        if stage in tables:
            raise UserError(
                "the log repeats a stage of an earlier one: log= takes the stages of one run", path, key=stage
            )
        tables[stage] = table.assign(step=table["step"] + end, stage=stage.replace("_", " "))
        end = tables[stage]["step"].max()
    return pd.concat(tables.values(), ignore_index=True)


def _check_row(path: Path, row: Any) -> None:
    if not isinstance(row, dict):
        raise UserError(f"a line is no JSON object: {row!r}", path, kind="JSON")
    for key in ("step", *filter(_is_curve, row)):
        value = row.get(key)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise UserError(f"it must be a number, got {value!r}", path, f"step {row.get('step')}", key)


def _is_curve(key: str) -> bool:
    return key in CURVE_NAMES or (key.startswith("loss") and not key.endswith("_by_source"))


def provenance_of(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Of every evaluation: its label, the command that reproduces it, and everything recorded except figures, as JSON."""
    figures = {"again", "set", "micro", "macro", "ties", "rationale", "random"}
    shown = []
    for one in evaluations:
        recorded = {
            key: _without_paths(value)
            for key, value in one.results.as_json().items()
            if key not in figures and not key.startswith("by_")
        }
        text = json.dumps(recorded, indent=1, ensure_ascii=False, default=str)
        shown.append({"label": one.label, "command": _command(one), "recorded": text})
    return shown


def _command(evaluation: Evaluation) -> str | None:
    """The command that reproduces this evaluation, except out=; None if it was not recorded."""
    again = evaluation.results.again
    if again is None:
        return None

    def as_word(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(as_word, value)) or "[]"
        return _local(value) if isinstance(value, str) else json.dumps(value)

    words = [f"{key}={as_word(value)}" for key, value in again.options.items()]
    return shlex.join(["rge", "eval", again.command, *words])


def _without_paths(value: Any) -> Any:
    """Replace absolute paths by relative ones, since a page may be shared."""
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
