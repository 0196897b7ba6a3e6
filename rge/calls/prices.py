"""Prices of models by name, and the confirmation before the first paid call."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from rge.calls.model_config import OPENAI, WITHOUT_BATCHES, ModelConfig
from rge.common.errors import UserError
from rge.common.options import NotNegative, Share, build, read_yaml

TABLE = Path(__file__).with_name("prices.yaml")
ADDRESSES = (OPENAI, *WITHOUT_BATCHES)
"""Endpoints to which the shipped prices apply."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """A row of the table; see the fields of the same names in `ModelConfig`."""

    input_price: NotNegative
    output_price: NotNegative
    cached_price: NotNegative | None = None
    batch_price: Share | None = None


def fill_prices(models: Mapping[str, ModelConfig], table: Path | None = None) -> dict[str, ModelConfig]:
    """Fill in missing prices, by `ModelConfig.name`, from a table; None: the shipped one, for the providers' own addresses only.

    Raises:
        UserError: the table cannot be read.
    """
    path = table or TABLE
    rows = read_yaml(path)
    filled = dict(models)
    for label, model in models.items():
        shipped = model.address in ADDRESSES
        if model.name not in rows or model.has_price() or not (shipped or table):
            continue
        row = build(Prices, [(f"{path}: {model.name}: ", rows[model.name])])
        given = {key: value for key, value in dataclasses.asdict(row).items() if getattr(model, key) is None}
        filled[label] = dataclasses.replace(model, **given)
    return filled


def confirm(estimate: str, *, yes: bool) -> None:
    """Print a cost estimate, and ask for confirmation on a terminal unless ``yes``. Raises `UserError`: the user declined."""
    sys.stderr.write(f"{estimate}\n")
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    sys.stderr.write("Continue? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # "": Ctrl-D
        raise UserError(
            "cancelled before any call was made; pass yes=true to skip the confirmation", kind="cancelled"
        )
