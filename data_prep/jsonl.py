"""Training records as JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rge.common.files import write_text
from rge.common.schema import Record


def json_line(record: Record | dict[str, Any]) -> str:
    """One line, without fields that are None or have their default."""
    row = record if isinstance(record, dict) else record.model_dump(exclude_none=True, exclude_defaults=True)
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write records atomically."""
    write_text(path, "".join(map(json_line, records)))
