"""Prices of models by name, and the confirmation before the first paid call."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.options import build, read_yaml

TABLE = Path(__file__).with_name("prices.yaml")
ADDRESSES = (None, "https://api.anthropic.com/v1", "https://generativelanguage.googleapis.com/v1beta/openai")
"""Of the providers whose prices these are; None is OpenAI's."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """A row of the table; see the keys of the same names in `ModelConfig`."""

    input_price: float
    output_price: float
    cached_price: float | None = None
    batch_price: float | None = None


def priced(models: Mapping[str, ModelConfig], table: Path | None = None) -> dict[str, ModelConfig]:
    """The models with prices of the table, where their settings give none.

    Args:
        models: by any name; the table goes by `ModelConfig.name`.
        table: None: the shipped one, for the providers' own addresses only: what else serves a model has its own prices.

    Raises:
        UserError: the table cannot be read.
    """
    path = table or TABLE
    rows = read_yaml(path)
    found = dict(models)
    for label, model in models.items():
        own = (model.base_url and model.base_url.rstrip("/")) in ADDRESSES
        has_prices = (model.input_price, model.output_price) != (None, None)
        if model.name not in rows or has_prices or not (own or table):
            continue
        row = build(Prices, [(f"{path}: {model.name}: ", rows[model.name])])
        given = {key: value for key, value in dataclasses.asdict(row).items() if value is not None}
        found[label] = dataclasses.replace(model, **given)
    return found


def confirm(estimate: str, *, yes: bool) -> None:
    """Print an estimate of what is about to be paid, and ask on a terminal, but for ``yes``.

    Raises:
        UserError: the answer is no.
    """
    sys.stderr.write(f"{estimate}\n")
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    sys.stderr.write("Go on? [y/N] ")
    if input().strip().lower() not in ("y", "yes"):
        raise UserError("stopped before anything was asked; yes=true continues without the question")
