"""Training logs (``metrics.jsonl``) as charts: the stages of one run end to end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.pages.charts import line_chart
from eval.pages.wording import number
from rge.common.errors import UserError
from rge.common.files import read_json_lines

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
    table = read_training_logs(paths)
    stages = table["stage"].unique().tolist()
    losses = sorted(key for key in table if key.startswith("loss") and key not in CURVE_NAMES)
    charts = []
    for key in (*filter(table.__contains__, CURVE_NAMES), *losses):
        name, percent = CURVE_NAMES.get(key, (key.replace("_", " ").capitalize(), False))
        points = table[["step", "stage"]].assign(value=table[key] * (100 if percent else 1)).dropna()
        unit = "%" if percent else ""
        last = f"ends at {number(points['value'].iloc[-1])}{unit}"
        charts.append(
            {"name": name, "last": last, "svg": line_chart(points, stages=stages, name=name, unit=unit)}
        )
    return charts


def read_training_logs(paths: Sequence[Path]) -> pd.DataFrame:
    """The lines of the ``metrics.jsonl`` of a run's stages as one table, in which every stage continues the steps."""
    tables: dict[str, pd.DataFrame] = {}
    end = 0
    for path in paths:
        table = pd.DataFrame(read_json_lines(path))
        if not {"stage", "step"} <= set(table):
            raise UserError(f"training log {path} does not exist, or has no lines with stage and step")
        stage = str(table["stage"].iloc[0])
        if stage in tables:
            raise UserError(
                f"training log {path} repeats a stage of an earlier one: log= takes the stages of one run"
            )
        tables[stage] = table.assign(step=table["step"] + end, stage=stage.replace("_", " "))
        end = tables[stage]["step"].max()
    return pd.concat(tables.values(), ignore_index=True)
