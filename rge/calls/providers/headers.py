"""Parse rate limits from response headers."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def remaining(headers: Mapping[str, str], kind: str) -> tuple[int | None, float | None]:
    """What is left of an allowance, and in how many seconds it is whole again; None where headers do not say.

    Args:
        headers: of an answer, such as ``x-ratelimit-remaining-requests: 0`` and ``x-ratelimit-reset-requests: 6m0s``.
        kind: requests or tokens.
    """
    left = headers.get(f"x-ratelimit-remaining-{kind}", "")
    return (int(left) if left.isdigit() else None), seconds(headers.get(f"x-ratelimit-reset-{kind}"))


def seconds(text: str | None) -> float | None:
    """Seconds of a header: "1.5", "6m0s", "20ms", or a time (of HTTP or ISO 8601); None where it is none of them."""
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?(ms|h|m|s))+", text):
        units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
        return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text))
    try:
        at = parsedate_to_datetime(text) if "," in text else datetime.fromisoformat(text)
    except ValueError:
        return None
    return max((at - datetime.now(UTC)).total_seconds(), 0.0) if at.tzinfo else None
