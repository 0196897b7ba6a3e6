"""What models answered, kept under a hash of what they were asked, in one SQLite file: nothing is paid for twice.

In WAL mode a commit survives the death of the process, and several processes may write. The file must lie on a local
disk.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rge.common.errors import UserError
from rge.common.write_ahead_log import open_wal

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_AT_ONCE = 500
"""Keys of one query; SQLite's default allows 999."""


class Answers:
    """The file; may be used from several threads.

    Args:
        path: of the file; made if missing.

    Raises:
        UserError: it cannot be used.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = open_wal(path, any_thread=True)
            self._db.execute(_SCHEMA)
        except (OSError, sqlite3.DatabaseError) as error:
            raise UserError(f"{path} cannot be used as the file of answers: {error}") from None

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Those answers that are kept, by key."""
        found = {}
        with self._lock:
            for start in range(0, len(keys), _AT_ONCE):
                part = list(keys[start : start + _AT_ONCE])
                marks = ",".join("?" * len(part))
                rows = self._db.execute(f"SELECT key, value FROM answers WHERE key IN ({marks})", part)
                found.update({key: json.loads(value) for key, value in rows})
        return found

    def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers; on return they survive the death of the process.

        Raises:
            UserError: the disk is full, or the file is lost.
        """
        rows = [(key, json.dumps(value)) for key, value in answers.items()]
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
                self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise UserError(
                f"{self.path}: answers could not be kept ({error}); make room and run the same command again"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def key_of(*parts: Any) -> str:
    """Sha256 over JSON values, hexadecimal."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
