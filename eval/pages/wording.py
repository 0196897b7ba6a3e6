"""Formatting of numbers and names on pages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

LONG_QUESTION, LONG_RATIONALE = 260, 420
"""Number of characters above which a text is folded."""
_SLICE_WORDS = {"seen": "Seen pairs", "held_out": "Held\u2011out pairs"}


def percent(value: float, like: float | None = None) -> str:
    """A fraction in per cent, without the % sign: one decimal, two below one per cent, with a true minus sign.

    ``like``: value whose number of decimals is used, for the bounds of its interval.
    """
    size = abs(value if like is None else like)
    digits = 2 if 0 < size < 0.00995 else 1
    return f"{100 * value:.{digits}f}".replace("-", "\u2212")


def signed(value: float, plus: str = "+") -> str:
    """A difference in percentage points, one decimal, with a true minus sign or ``plus``."""
    return f"{plus if value >= 0 else ''}{100 * value:.1f}".replace("-", "\u2212")


def cut_at(text: str, limit: int) -> int:
    """Position to fold a text longer than ``limit`` characters: the last space before it, if one is near."""
    space = text.rfind(" ", limit - 60, limit)
    return space if space > 0 else limit


def slice_label(name: str) -> str:
    """Heading of a slice."""
    words = name.replace("_", " ")
    return _SLICE_WORDS.get(name, words[:1].upper() + words[1:])


def slice_order(name: str) -> tuple[int, str]:
    """Sort key of slices: seen, held-out, then others by name."""
    known = list(_SLICE_WORDS)
    return (known.index(name) if name in known else len(known), name)


def tag(column: str, value: str) -> str:
    """Label of a value of a query column."""
    words = value.replace("held_out", "held-out").replace("_", " ")
    return f"{words} pair" if column == "pair" else words


def number(value: float) -> str:
    """Format a number with three significant digits, without an exponent between 0.001 and a million."""
    if value == 0:
        return "0"  # also for -0.0
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Scale:
    """Maps values to positions on a track, in per cent of its length."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float | None]) -> "Scale":
        """From the lowest to the highest value, zero included."""
        known = [value for value in values if value is not None]
        return cls(min([*known, 0.0]), max([*known, 1e-9]))

    def at(self, value: float) -> float:
        """Distance from the left end."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)
