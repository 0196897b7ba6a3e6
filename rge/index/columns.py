"""Values of a table's other columns that conditions can compare."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from typing import Any

LARGEST_INTEGER = (1 << 64) - 1
EXACT = 1 << 53
"""Below this, a float and other programs' numbers hold every integer."""


def texts_as_numbers(rows: Sequence[dict[str, Any]]) -> None:
    """Turn columns of texts into numbers where writing each number gives its text back, and no two texts the same number.

    All others are codes, such as the versions 1.1 and 1.10 or the article numbers 007 and 12e4.
    """
    for name, texts in _columns(rows):
        numbers = {text: _number(text) for text in set(texts)}
        if None not in numbers.values() and len(set(numbers.values())) == len(numbers):
            _replace(rows, name, numbers.__getitem__)


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with suppress(ValueError):
            number: int | float = kind(text)
            if str(number) == text and abs(number) < EXACT:  # neither NaN nor an infinity
                return number
    return None


def make_comparable(rows: Sequence[dict[str, Any]]) -> None:
    """Turn decimals into integers or floats, where these are equal to all of them, else into texts; durations into seconds."""
    for name, values in _columns(rows):
        if any(isinstance(value, timedelta) for value in values):
            _replace(
                rows, name, lambda value: value.total_seconds() if isinstance(value, timedelta) else value
            )
        elif any(isinstance(value, Decimal) for value in values):
            decimals = [value for value in values if isinstance(value, Decimal)]
            if all(
                value == value.to_integral_value() and abs(value) <= LARGEST_INTEGER for value in decimals
            ):
                kind: type = int
            else:
                kind = float if all(Decimal(repr(float(value))) == value for value in decimals) else str
            _replace(rows, name, lambda value: kind(value) if isinstance(value, Decimal) else value)  # noqa: B023


def _columns(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The values of each column, without missing ones."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = ((name, [row[name] for row in rows if row.get(name) is not None]) for name in names)
    return [(name, values) for name, values in columns if values]


def _replace(rows: Sequence[dict[str, Any]], name: str, change: Any) -> None:
    for row in rows:
        if row.get(name) is not None:
            row[name] = change(row[name])
