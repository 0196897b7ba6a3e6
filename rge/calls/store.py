"""The cache of answers and the ledger of attempts, in one append-only SQLite file.

In WAL mode several processes can write, and commits survive a kill (a power cut may lose the last few answers, but never
corrupts the file). The file must be on a local disk. Attempts enter the ledger at their maximum cost before they are sent: so
budgets hold across processes, and after a kill the attempts in flight stay in the ledger as estimates.
"""

import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rge.calls.model_config import BillingStats
from rge.calls.wire.replies import Usage, lack
from rge.common.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, raw BLOB NOT NULL, input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, cost REAL NOT NULL, seconds REAL NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS rejections (
    key TEXT NOT NULL, sent_by TEXT NOT NULL, message TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (key, sent_by));
CREATE TABLE IF NOT EXISTS bills (
    endpoint TEXT NOT NULL, pictures INTEGER NOT NULL, calls INTEGER NOT NULL, guessed REAL NOT NULL, billed REAL NOT NULL,
    most_input REAL NOT NULL, most_output REAL NOT NULL, PRIMARY KEY (endpoint, pictures));
CREATE TABLE IF NOT EXISTS attempts (
    id INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL, cost REAL NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE INDEX IF NOT EXISTS attempts_under_way ON attempts (endpoint) WHERE state = 'under way';
CREATE TABLE IF NOT EXISTS spending (
    endpoint TEXT NOT NULL, estimated INTEGER NOT NULL, calls INTEGER NOT NULL, input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, cost REAL NOT NULL, PRIMARY KEY (endpoint, estimated));
CREATE TABLE IF NOT EXISTS batches (
    label TEXT PRIMARY KEY, endpoint TEXT NOT NULL, state TEXT NOT NULL, file TEXT, id TEXT, began REAL NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS batch_calls (
    label TEXT NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, attempt INTEGER NOT NULL, PRIMARY KEY (label, number));
CREATE INDEX IF NOT EXISTS batch_calls_by_attempt ON batch_calls (attempt);
CREATE TRIGGER IF NOT EXISTS batch_calls_go AFTER DELETE ON attempts
    BEGIN DELETE FROM batch_calls WHERE attempt = old.id; END;
CREATE TRIGGER IF NOT EXISTS replies_stay BEFORE UPDATE ON replies
    BEGIN SELECT RAISE(ABORT, 'an answer is never changed'); END;
CREATE TRIGGER IF NOT EXISTS replies_remain BEFORE DELETE ON replies
    BEGIN SELECT RAISE(ABORT, 'an answer is never deleted'); END;
"""
_SPEND = """
INSERT INTO spending SELECT endpoint, state != 'answered', 1, input_tokens, cached_tokens, output_tokens, cost
    FROM attempts WHERE id = ?
    ON CONFLICT (endpoint, estimated) DO UPDATE SET calls = calls + 1, input_tokens = input_tokens + excluded.input_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens,
    cost = cost + excluded.cost
"""
_SPENT = """
SELECT (SELECT total(cost) FROM spending WHERE ?1 IS NULL OR endpoint = ?1)
    + (SELECT total(cost) FROM attempts WHERE state = 'under way' AND (?1 IS NULL OR endpoint = ?1))
"""
_LEDGER = """
SELECT endpoint, sum(calls * (1 - estimated)), sum(input_tokens * (1 - estimated)), sum(cached_tokens * (1 - estimated)),
    sum(output_tokens * (1 - estimated)), total(cost * (1 - estimated)), sum(calls * estimated), total(cost * estimated),
    (SELECT count(*) FROM batch_calls JOIN attempts ON attempts.id = attempt
        WHERE state = 'answered' AND attempts.endpoint = paid.endpoint)
    FROM (SELECT * FROM spending UNION ALL SELECT endpoint, 1, count(*), 0, 0, 0, total(cost) FROM attempts
        WHERE state = 'under way' GROUP BY endpoint) AS paid GROUP BY endpoint ORDER BY endpoint
"""
_LEARN = """
INSERT INTO bills VALUES ((SELECT endpoint FROM attempts WHERE id = ?), ?, 1, ?, ?, ?, ?) ON CONFLICT (endpoint, pictures) DO UPDATE SET calls = calls + 1,
    guessed = guessed + excluded.guessed, billed = billed + excluded.billed,
    most_input = max(most_input, excluded.most_input), most_output = max(most_output, excluded.most_output)
"""
Budgets = Mapping[str | None, float]
"""Caps on the total cost by endpoint; None: of all endpoints together."""
_WAIT_S = 60.0
"""How long to wait for another process's lock."""
_MIN_ESTIMATE = 100
"""Floor of token estimates in billing ratios: for very short prompts, the chat template would dominate."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Ledger of one endpoint."""

    endpoint: str  # name and address
    calls: int  # answered calls
    input_tokens: int  # of these, as billed, including cached ones
    cached_tokens: int  # read from the provider's prompt cache
    output_tokens: int  # as billed
    cost: float  # of the answered calls
    # Attempts without an answer that may be billed: lost (timed out, cut off, the process was killed), or in flight.
    lost_calls: int
    lost_cost: float  # their estimated maximum cost
    batch_calls: int  # answered calls made in batches


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has no answer yet."""

    key: str  # of the call
    number: int  # in the ledger
    tokens: tuple[int, int]  # estimated input and maximum output tokens


@dataclass(slots=True)
class BatchRow:
    """A batch whose results are not stored yet."""

    label: str  # our own name for it
    began: float  # Unix time
    file: str | None = None  # the provider's id of the uploaded requests
    id: str | None = None  # the provider's id of the batch; None: unknown whether it was created
    calls: dict[str, Attempt] = field(default_factory=dict)  # by their ``custom_id``
    status: str = "submitted"  # the provider's, when last seen; not stored
    submitted_alone: bool = False  # no other batch was in flight when it was submitted; not stored


class AnswerStore:
    """The answer store, for any number of processes, in each by one thread at a time; temporary without a path.

    With `read_only`, the file must exist, and nothing can be added; its folder may be one that can only be read.

    Raises `UserError`: it cannot be opened.
    """

    def __init__(self, path: str | Path | None, *, read_only: bool = False):
        self.path = Path(path) if path is not None else None
        try:
            if self.path is not None and read_only:
                self._db = _open_to_read(self.path)
                return
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _open(self.path or "")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.DatabaseError) as error:
            raise UserError(f"it cannot be used as an answer store: {error}", path) from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # -------------------------------------------------------------------------------------------------------- answers

    def get(self, key: str) -> bytes | None:
        """The answer stored under a key, byte for byte; or None."""
        return self._value("SELECT raw FROM replies WHERE key = ?", key)

    def num_replies(self) -> int:
        """Number of stored answers."""
        return self._value("SELECT count(*) FROM replies")

    def _value(self, query: str, *values: Any) -> Any:
        """The first column of the first row; None: no row."""
        row = self._db.execute(query, values).fetchone()
        return row and row[0]

    def get_values(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values stored by `put_values` under these keys, as far as they exist."""
        query = "SELECT key, raw FROM replies WHERE key IN (SELECT value FROM json_each(?))"
        return {key: json.loads(raw) for key, raw in self._db.execute(query, (json.dumps(list(keys)),))}

    def put_values(self, values: Mapping[str, Any]) -> None:
        """Store JSON values computed for free, such as scores of a local model."""
        rows = [(key, json.dumps(value).encode()) for key, value in values.items()]
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO replies VALUES (?, '', ?, 0, 0, 0, 0, CURRENT_TIMESTAMP)", rows
            )

    # --------------------------------------------------------------------------------------------------------- ledger

    def begin_attempt(
        self, endpoint: str, key: str, tokens: tuple[int, int], max_cost: float, budgets: Budgets
    ) -> int | None:
        """Enter an attempt at its maximum cost, before it is sent. Returns its number, or None if it exceeds a budget."""
        with self._transaction():
            if max_cost > self.remaining(budgets):
                return None
            return self._insert_attempt(endpoint, key, tokens, max_cost)

    def put(
        self,
        attempt: int,
        key: str,
        model: str,
        raw: bytes,
        usage: Usage,
        cost: float,
        seconds: float,
        estimate: tuple[int, int, bool] | None = None,
    ) -> None:
        """Store the answer to an attempt and enter its cost; on return it survives a kill of the process.

        If another process has stored an answer under the same key, that one stays and both are paid; but one without content, which
        answers nothing, is replaced. ``seconds`` are from sending to the complete response, 0 for a batch; ``estimate``: see `pay`.
        """
        with self._transaction():
            stored = self.get(key)
            # REPLACE, unlike DELETE, runs no trigger.
            verb = "IGNORE" if stored is None or lack(stored) is None else "REPLACE"
            self._db.execute(
                f"INSERT OR {verb} INTO replies (key, model, raw, input_tokens, output_tokens, cost, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (key, model, raw, usage.input_tokens, usage.output_tokens, cost, seconds),
            )
            self.pay(attempt, usage, cost, estimate)

    def pay(
        self, attempt: int, usage: Usage, cost: float, estimate: tuple[int, int, bool] | None = None
    ) -> None:
        """Enter the cost of an attempt that was answered.

        ``estimate`` (estimated input and output tokens, whether there were pictures) updates `billing_stats`.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE attempts SET state = 'answered', input_tokens = ?, cached_tokens = ?, output_tokens = ?, cost = ?"
                " WHERE id = ?",
                (usage.input_tokens, usage.cached, usage.output_tokens, cost, attempt),
            )
            self._db.execute(_SPEND, (attempt,))
            if estimate is not None:
                num_input, num_output = max(estimate[0], _MIN_ESTIMATE), max(estimate[1], 1)
                ratios = usage.input_tokens / num_input, usage.output_tokens / num_output
                self._db.execute(_LEARN, (attempt, estimate[2], num_input, usage.input_tokens, *ratios))

    def billing_stats(self, endpoint: str, pictures: bool) -> BillingStats:
        """How bills compare with estimates, for calls with or without pictures."""
        row = self._db.execute(
            "SELECT calls, billed / guessed, max(1, most_input), max(1, most_output) FROM bills"
            " WHERE endpoint = ? AND pictures = ?",
            (endpoint, pictures),
        ).fetchone()
        return BillingStats(*row or ())

    def end_attempt(self, attempt: int, *, billed: bool) -> None:
        """End an attempt without an answer: keep it at its maximum cost if the provider may bill it, else delete it."""
        with self._transaction():
            if billed:
                self._db.execute("UPDATE attempts SET state = 'lost' WHERE id = ?", (attempt,))
                self._db.execute(_SPEND, (attempt,))
            else:
                self._db.execute("DELETE FROM attempts WHERE id = ?", (attempt,))

    # -------------------------------------------------------------------------------------------------------- batches

    def begin_batch(
        self,
        row: BatchRow,
        endpoint: str,
        calls: Sequence[tuple[str, tuple[int, int], float]],
        budgets: Budgets,
    ) -> int:
        """Enter a new batch and an attempt for each of its calls (key, tokens, maximum cost), before anything is sent.

        Returns:
            How many calls, from the first on, fit the budgets; these are entered, also in the row.
        """
        with self._transaction():
            budget_left = self.remaining(budgets)
            for number, (key, tokens, max_cost) in enumerate(calls):
                if max_cost > budget_left:
                    break
                budget_left -= max_cost
                attempt = self._insert_attempt(endpoint, key, tokens, max_cost)
                row.calls[f"{row.label}-{number}"] = Attempt(key, attempt, tokens)
                self._db.execute(
                    "INSERT INTO batch_calls VALUES (?, ?, ?, ?)", (row.label, number, key, attempt)
                )
            if row.calls:
                self._db.execute(
                    "INSERT INTO batches (label, endpoint, state, began) VALUES (?, ?, 'open', ?)",
                    (row.label, endpoint, row.began),
                )
        return len(row.calls)

    def save_batch(self, row: BatchRow) -> None:
        """Record the provider's ids of a batch."""
        with self._transaction():
            self._db.execute(
                "UPDATE batches SET file = ?, id = ? WHERE label = ?", (row.file, row.id, row.label)
            )

    def open_batches(self, endpoint: str) -> list[BatchRow]:
        """Batches of an endpoint that are not closed, with their calls without a result; oldest first."""
        rows = self._db.execute(
            "SELECT label, began, file, id FROM batches WHERE endpoint = ? AND state = 'open' ORDER BY began",
            (endpoint,),
        ).fetchall()
        return [BatchRow(label, began, file, id, self.batch_calls(label)) for label, began, file, id in rows]

    def batch_calls(self, label: str) -> dict[str, Attempt]:
        """The calls of a batch without a result, by their ``custom_id``."""
        rows = self._db.execute(
            "SELECT number, batch_calls.key, attempt, input_tokens, output_tokens FROM batch_calls"
            " JOIN attempts ON attempts.id = attempt WHERE label = ? AND state = 'under way'",
            (label,),
        ).fetchall()
        return {
            f"{label}-{number}": Attempt(key, attempt, (num_input, num_output))
            for number, key, attempt, num_input, num_output in rows
        }

    def close_batch(self, label: str, *, billed: bool) -> None:
        """Close a batch; its calls without a result end as `end_attempt` says."""
        with self._transaction():
            for call in self.batch_calls(label).values():
                self.end_attempt(call.number, billed=billed)
            self._db.execute("UPDATE batches SET state = 'settled' WHERE label = ?", (label,))

    # ----------------------------------------------------------------------------------------------------- rejections

    def record_rejection(self, key: str, sent_by: str, message: str) -> None:
        """Record that an endpoint rejects a request, so that it is not sent again with the same settings."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO rejections (key, sent_by, message) VALUES (?, ?, ?)",
                (key, sent_by, message),
            )

    def rejection(self, key: str, sent_by: str) -> str | None:
        """Why an endpoint rejects a request; None if no rejection is recorded."""
        return self._value("SELECT message FROM rejections WHERE key = ? AND sent_by = ?", key, sent_by)

    def forget_rejections(self, keys: Iterable[str]) -> None:
        """Forget these rejections, so that the requests are sent again."""
        with self._transaction():
            self._db.executemany("DELETE FROM rejections WHERE key = ?", [(key,) for key in keys])

    def spent(self, endpoint: str | None) -> float:
        """Cost of an endpoint (None: all) over all runs and processes; attempts in flight count at their maximum."""
        return self._value(_SPENT, endpoint)

    def ledger(self) -> list[Spending]:
        """The ledger by endpoint."""
        return [Spending(*row) for row in self._db.execute(_LEDGER)]

    def remaining(self, budgets: Budgets) -> float:
        """What is left of the tightest budget; infinity without one."""
        return min((budget - self.spent(endpoint) for endpoint, budget in budgets.items()), default=math.inf)

    def _insert_attempt(self, endpoint: str, key: str, tokens: tuple[int, int], max_cost: float) -> int:
        query = "INSERT INTO attempts (endpoint, key, state, input_tokens, output_tokens, cost) VALUES (?, ?, 'under way', ?, ?, ?)"
        number = self._db.execute(query, (endpoint, key, *tokens, max_cost)).lastrowid
        assert number is not None
        return number

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._db.in_transaction:  # part of another one
            yield
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"it cannot be written ({error}), so calls stop here: free up disk space and run the same command again",
                self.path,
            ) from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _open(path: Path | str) -> sqlite3.Connection:
    """Open or create a database ("": a temporary one) in WAL mode with autocommit, waiting up to `_WAIT_S` for locks."""
    connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            return connection
        except sqlite3.DatabaseError as error:
            # SQLite waits for all other locks by itself, but if two processes switch a new file to WAL at once, one fails
            # immediately, since each holds a read lock that the other waits for.
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(0.02)


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Open a database of any process's without writing to it.

    In WAL mode, SQLite writes files beside it even to read it, unless they are there or the database is said not to change. It
    does not change where this process cannot create them and nobody else has: the last process that wrote took them away.
    """
    for more in ("", "&immutable=1"):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro{more}",
            uri=True, timeout=_WAIT_S, isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        try:
            connection.execute("SELECT count(*) FROM replies")
            return connection
        except sqlite3.OperationalError:
            connection.close()
            if more or Path(f"{path}-wal").exists():
                raise
    raise AssertionError("the second way returns or raises")


def value_key(*parts: Any) -> str:
    """SHA-256 over JSON values, in hex: a key for `AnswerStore.put_values`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
