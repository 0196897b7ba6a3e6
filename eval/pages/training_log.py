"""Training logs (``metrics.jsonl``) as curves: stages of one run end to end, or several runs side by side."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from eval.pages.charts import Band, Series, line_chart
from eval.pages.evaluations import check_finite
from eval.pages.wording import number
from rge.common.errors import UserError

CURVE_NAMES = {
    "loss": ("Loss", False),
    "loss_lm": ("Rationale loss (nats per token)", False),
    "loss_contrastive": ("Contrastive loss (nats)", False),
    "hit_at_1": ("In-batch hit@1", True),
    "forced_rate": ("Forced stops", True),
    "rationale_tokens_mean": ("Rationale length (tokens)", False),
}
"""Keys of ``metrics.jsonl`` with charts, in order: title, and whether values are shown in per cent."""


def curves_of(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Charts of training logs for a page; None without logs."""
    if not paths:
        return None
    runs = read_training_logs(paths)
    keys = list(dict.fromkeys(key for run in runs for key in run.curves))
    keys = [key for key in CURVE_NAMES if key in keys] + sorted(set(keys) - set(CURVE_NAMES))
    return {
        "charts": [_chart(key, runs) for key in keys],
        "labels": [run.label for run in runs] if len(runs) > 1 else [],
    }


def _chart(key: str, runs: Sequence["Training"]) -> dict[str, Any]:
    name, percent = CURVE_NAMES.get(key, (key.replace("_", " ").capitalize(), False))
    series = [Series(run.label, *run.curves[key]) for run in runs if key in run.curves]
    last = ""
    if len(series) == 1:
        last = f"ends at {number(series[0].y[-1] * (100 if percent else 1))}{'%' if percent else ''}"
    bands = runs[0].stages if len(runs) == 1 else []
    return {"name": name, "last": last, "svg": line_chart(series, name=name, bands=bands, percent=percent)}


@dataclass
class Training:
    """Curves of one run: key -> (steps, values), and the stages on the same step axis."""

    label: str
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    stages: list[Band] = field(default_factory=list)


def read_training_logs(paths: Sequence[Path]) -> list[Training]:
    """Read ``metrics.jsonl`` files: JSON lines with ``step``, any curves, and ``stage`` if the run has several.

    Files without a common stage are stages of one run and are concatenated in the given order; otherwise each file is a
    separate run. A stage that restarts its step count continues the axis; a repeated step within a stage (a resumed run)
    replaces the earlier one.

    Raises:
        UserError: a file is missing or empty, a line is not a JSON object with a step, or a value is not finite.
    """
    logs = {path: _read_log(path) for path in paths}
    stages = [stage for entries in logs.values() for stage in {entry.get("stage") for entry in entries}]
    if len(logs) > 1 and None not in stages and len(stages) == len(set(stages)):
        return [_training("", list(chain(*logs.values())))]
    return list(map(_training, _short_names(list(logs)), logs.values()))


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"training log {path} cannot be read: {error.strerror or error}") from error
    entries, lines = [], content.splitlines()
    for place, line in enumerate(lines, start=1):
        try:
            entries += [_entry(line, f"{path}:{place}")] if line.strip() else []
        except json.JSONDecodeError as error:
            # the last line of a killed or running job may be incomplete
            if place < len(lines) or content.endswith("\n"):
                raise UserError(f"{path}:{place} is not JSON: {error}") from error
    if not entries:
        raise UserError(f"training log {path} is empty")
    return entries


def _entry(line: str, where: str) -> dict[str, Any]:
    """Parse one step's entry; plotted values must be finite or None."""
    entry = json.loads(line)
    if not isinstance(entry, dict) or "step" not in entry:
        raise UserError(f"{where} must be a JSON object with a step, got {line[:80]}")
    for key in ("step", *filter(_is_curve, entry)):
        if entry[key] is not None:
            check_finite(entry[key], f"{where}: {key}")
    return entry


def _is_curve(key: str) -> bool:
    return key in CURVE_NAMES or key.startswith("loss")


def _training(label: str, entries: Sequence[Mapping[str, Any]]) -> Training:
    training = Training(label)
    values: dict[str, dict[float, float]] = defaultdict(dict)
    offset, last, stage = 0.0, 0.0, object()
    for entry in entries:
        if entry.get("stage") != stage:
            stage = entry.get("stage")
            if entry["step"] + offset <= last:
                offset = last
            training.stages.append(Band(str(stage or "").replace("_", " "), last, last))
        x = entry["step"] + offset
        last = max(last, x)
        training.stages[-1] = replace(training.stages[-1], end=last)
        for key in filter(_is_curve, entry):
            if entry[key] is not None:
                values[key][x] = float(entry[key])
    for key, points in values.items():
        steps = sorted(points)
        training.curves[key] = (steps, [points[step] for step in steps])
    return training


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Paths without their common parts, as labels."""
    all_parts = [path.with_suffix("").parts for path in paths]
    if len(paths) < 2:
        return [""]
    labels = [
        "/".join(p for i, p in enumerate(parts) if any(other[i : i + 1] != (p,) for other in all_parts))
        for parts in all_parts
    ]
    return [label or str(path) for label, path in zip(labels, paths, strict=True)]
