"""Every answer ever paid for, in one append-only SQLite file.

Why SQLite and not a JSON-lines file: several processes may write at once, a killed one leaves no half line, and a key is
looked up without reading the file. In WAL mode a commit survives the death of the process (a power cut may cost the
last few answers, never the file). Triggers refuse changing or deleting an answer. Like every file of SQLite in WAL mode
it must lie on a local disk, not on a network file system.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError
from rge.common.write_ahead_log import open_wal

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, raw TEXT NOT NULL, input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, cost REAL NOT NULL, seconds REAL NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS failures (
    key TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL, raw TEXT,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS ledger (
    model TEXT PRIMARY KEY, calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    cost REAL NOT NULL);
CREATE TRIGGER IF NOT EXISTS replies_stay BEFORE UPDATE ON replies
    BEGIN SELECT RAISE(ABORT, 'an answer is never changed'); END;
CREATE TRIGGER IF NOT EXISTS replies_remain BEFORE DELETE ON replies
    BEGIN SELECT RAISE(ABORT, 'an answer is never deleted'); END;
"""
_ENTER = """
INSERT INTO ledger VALUES (?, 1, ?, ?, ?) ON CONFLICT (model) DO UPDATE SET calls = calls + 1,
    input_tokens = input_tokens + excluded.input_tokens, output_tokens = output_tokens + excluded.output_tokens,
    cost = cost + excluded.cost
"""


class CacheError(UserError):
    """The file of answers cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer with its price.

    Attributes:
        raw: the body of the server's answer, unchanged (secrets masked).
        input_tokens: as billed.
        output_tokens: as billed.
        cost: in the currency of the prices.
        seconds: from sending to the whole answer.
    """

    raw: str
    input_tokens: int
    output_tokens: int
    cost: float
    seconds: float


class ReplyCache:
    """The file of answers.

    Args:
        path: of the file; made if missing.

    Raises:
        CacheError: it is no such file, or cannot be opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = open_wal(self.path)
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise CacheError(f"{self.path} cannot be used as the file of answers: {error}") from None

    def get(self, key: str) -> Kept | None:
        """The answer kept under a key."""
        row = self._db.execute(
            "SELECT raw, input_tokens, output_tokens, cost, seconds FROM replies WHERE key = ?", (key,)
        ).fetchone()
        return Kept(*row) if row else None

    def put(self, key: str, model: str, kept: Kept) -> None:
        """Keep an answer and enter its price; on return it is safe from the death of the process.

        Where another process kept an answer to the same key in the meantime, its answer stays and both are paid.

        Raises:
            CacheError: the disk is full, or the file is lost.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR IGNORE INTO replies (key, model, raw, input_tokens, output_tokens, cost, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (key, model, kept.raw, kept.input_tokens, kept.output_tokens, kept.cost, kept.seconds),
            )
            self._db.execute(_ENTER, (model, kept.input_tokens, kept.output_tokens, kept.cost))
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise CacheError(
                f"{self.path}: an answer could not be kept ({error}); nothing more is asked. Make room and run the "
                "same command again"
            ) from None

    def fail(self, key: str, model: str, kind: str, message: str, raw: str | None) -> None:
        """Note a call that gave nothing to keep; it is asked again by the next run."""
        try:
            self._db.execute(
                "INSERT INTO failures (key, model, kind, message, raw) VALUES (?, ?, ?, ?, ?)",
                (key, model, kind, message, raw),
            )
        except sqlite3.DatabaseError as error:
            raise CacheError(f"{self.path}: a failure could not be noted ({error})") from None

    def spent(self, model: str) -> float:
        """What a model has cost so far, over all runs and processes."""
        row = self._db.execute("SELECT cost FROM ledger WHERE model = ?", (model,)).fetchone()
        return row[0] if row else 0.0

    def ledger(self) -> dict[str, dict[str, float]]:
        """Per model: calls, input_tokens, output_tokens, cost."""
        rows = self._db.execute(
            "SELECT model, calls, input_tokens, output_tokens, cost FROM ledger ORDER BY model"
        )
        names = ("calls", "input_tokens", "output_tokens", "cost")
        return {model: dict(zip(names, figures, strict=True)) for model, *figures in rows}

    def num_replies(self) -> int:
        """How many answers are kept."""
        return self._db.execute("SELECT count(*) FROM replies").fetchone()[0]

    def failures(self) -> list[tuple[str, str]]:
        """(kind, message) of every failed call, oldest first."""
        return self._db.execute("SELECT kind, message FROM failures ORDER BY rowid").fetchall()

    def close(self) -> None:
        """Close the file."""
        self._db.close()
