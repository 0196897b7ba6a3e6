"""Training logs (``metrics.jsonl``) as curves: the stages of one run end to end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from eval.pages.charts import Band, line_chart
from eval.pages.evaluations import check_finite
from eval.pages.wording import number
from rge.common.errors import UserError
from rge.tables.rows import json_object, reading

CURVE_NAMES = {
    "loss": ("Loss", False),
    "loss_lm": ("Rationale loss (nats per token)", False),
    "loss_contrastive": ("Contrastive loss (nats)", False),
    "hit_at_1": ("In-batch hit@1", True),
    "forced_rate": ("Forced stops", True),
    "rationale_tokens_mean": ("Rationale length (tokens)", False),
}
"""Keys of ``metrics.jsonl`` with charts, in order: title, and whether values are shown in per cent."""


def curves_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Charts of training logs for a page."""
    if not paths:
        return []
    training, charts = read_training_logs(paths), []
    keys = [key for key in CURVE_NAMES if key in training.curves]
    for key in (*keys, *sorted(set(training.curves) - set(keys))):
        name, percent = CURVE_NAMES.get(key, (key.replace("_", " ").capitalize(), False))
        steps, values = training.curves[key]
        last = f"ends at {number(values[-1] * (100 if percent else 1))}{'%' if percent else ''}"
        svg = line_chart(steps, values, name=name, bands=training.stages, percent=percent)
        charts.append({"name": name, "last": last, "svg": svg})
    return charts


@dataclass
class Training:
    """Curves of one run: key -> (steps, values), and the stages on the same step axis."""

    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    stages: list[Band] = field(default_factory=list)


def read_training_logs(paths: Sequence[Path]) -> Training:
    """Read the ``metrics.jsonl`` files of one run, stage by stage: JSON lines with ``step``, any curves, and ``stage``.

    A stage that restarts its step count continues the axis; a repeated step within a stage (a resumed run) replaces the
    earlier one.
    """
    entries: list[dict[str, Any]] = []
    for path in paths:
        log = _read_log(path)
        if {entry.get("stage") for entry in entries} & {entry.get("stage") for entry in log}:
            raise UserError(
                f"training log {path} repeats a stage of an earlier one: log= takes the stages of one run"
            )
        entries += log
    training, parts = Training(), []
    offset = end = 0.0
    for stage, rows in groupby(entries, key=lambda entry: str(entry.get("stage") or "")):
        table = pd.DataFrame(rows)
        offset = end if table["step"].iloc[0] + offset <= end else offset
        parts.append(table.set_index(table["step"] + offset))
        start, end = end, float(max(end, parts[-1].index.max()))
        training.stages.append(Band(stage.replace("_", " "), start, end))
    whole = pd.concat(parts)
    for key in filter(_is_curve, whole):
        points = whole[key].dropna().astype(float).groupby(level=0).last()  # a repeated step replaces
        if len(points):
            training.curves[key] = (points.index.tolist(), points.tolist())
    return training


def _read_log(path: Path) -> list[dict[str, Any]]:
    with reading(str(path)):
        complete = path.read_text(encoding="utf-8").rpartition("\n")[0]  # a job may be writing the last line
    lines = enumerate(complete.splitlines(), start=1)
    entries = [_entry(line, f"{path}, line {place}") for place, line in lines if line.strip()]
    if not entries:
        raise UserError(f"training log {path} is empty")
    return entries


def _entry(line: str, where: str) -> dict[str, Any]:
    """A line of a log; plotted values must be finite or None."""
    entry = json_object(where, line)
    if "step" not in entry:
        raise UserError(f"{where} has no step: {line[:80]}")
    for key in ("step", *filter(_is_curve, entry)):
        if entry[key] is not None:
            check_finite(entry[key], f"{where}: {key}")
    return entry


def _is_curve(key: str) -> bool:
    return key in CURVE_NAMES or key.startswith("loss")
