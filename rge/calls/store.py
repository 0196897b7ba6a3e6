"""The cache of answers and the ledger of attempts, in one append-only SQLite file.

In WAL mode several processes may write at once and a commit survives a kill (a power cut may cost the last few answers, never
the file); the file must be on a local disk. An attempt is entered before it is sent, at the most it may cost: so a budget holds
across processes, and what was in flight during a kill stays in the ledger, marked as an estimate.
"""

import fcntl
import hashlib
import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rge.calls.model_config import Learnt
from rge.common.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, raw BLOB NOT NULL, input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, cost REAL NOT NULL, seconds REAL NOT NULL,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS failures (
    key TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL, raw BLOB,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS rejections (
    key TEXT NOT NULL, sent_by TEXT NOT NULL, message TEXT NOT NULL, raw BLOB,
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
_WAIT_S = 60.0
"""How long one process waits for another's lock."""
_LEAST_GUESS = 100
"""Tokens below which an estimate says nothing: what a chat template adds would count as many times as much."""
_AT_ONCE = 500
"""Keys of one query; SQLite's default allows 999."""


class StoreError(UserError):
    """The file of answers cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer with its price."""

    raw: bytes  # the body of the server's answer, byte for byte
    input_tokens: int  # as billed
    output_tokens: int  # as billed
    cost: float  # in the currency of the prices
    seconds: float  # from sending to the whole answer


@dataclass(frozen=True, slots=True)
class Spending:
    """What was paid at one endpoint."""

    endpoint: str  # name and address
    calls: int  # that were answered
    input_tokens: int  # of these, as billed; those from the provider's prompt cache among them
    cached_tokens: int  # from its prompt cache
    output_tokens: int  # as billed
    cost: float  # of the answered calls
    # Attempts without an answer that may be billed all the same: timed out, cut off, or under way when the process ended.
    lost_calls: int
    lost_cost: float  # of these at most, estimated
    batch_calls: int = 0  # of the answered ones, those in a batch


@dataclass(slots=True)
class BatchRow:
    """A batch that was begun and not settled yet."""

    label: str  # ours; what it sends carries it
    began: float  # when, in seconds since 1970
    file: str | None  # the provider's name of the requests that were sent up for it
    id: str | None  # the provider's name of the batch; None: it is not known whether it was accepted
    calls: dict[int, tuple[str, int]]  # key and attempt of each of its calls, by their number


class AnswerStore:
    """The file of answers, for several threads and processes; without a path one that ends with this object.

    Raises:
        StoreError: it is no such file, or cannot be opened.
    """

    def __init__(self, path: str | Path | None):
        self.path = Path(path) if path is not None else None
        self._lock = threading.RLock()
        self._batches: IO[str] | None = None
        try:
            if self.path is None:
                self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._db = _open(self.path)
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.DatabaseError) as error:
            raise StoreError(f"{path} cannot be used as the file of answers: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # -------------------------------------------------------------------------------------------------------- answers

    def get(self, key: str) -> Kept | None:
        """The answer kept under a key."""
        row = self._one(
            "SELECT raw, input_tokens, output_tokens, cost, seconds FROM replies WHERE key = ?", key
        )
        return Kept(*row) if row else None

    def num_replies(self) -> int:
        """How many answers are kept."""
        return self._one("SELECT count(*) FROM replies")[0]

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> Any:
        return next(iter(self._all(query, *values)), None)

    def get_values(self, keys: Sequence[str]) -> dict[str, Any]:
        """What was kept by `put_values`, by key, where there is any."""
        found = {}
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            marks = ",".join("?" * len(part))
            rows = self._all(f"SELECT key, raw FROM replies WHERE key IN ({marks})", *part)
            found.update({key: json.loads(raw) for key, raw in rows})
        return found

    def put_values(self, values: Mapping[str, Any]) -> None:
        """Keep JSON values that cost nothing here, such as scores of a local model; see `put`."""
        rows = [(key, json.dumps(value).encode()) for key, value in values.items()]
        with self._writing("answers"):
            self._db.executemany(
                "INSERT OR IGNORE INTO replies VALUES (?, '', ?, 0, 0, 0, 0, CURRENT_TIMESTAMP)", rows
            )

    # --------------------------------------------------------------------------------------------------------- ledger

    def begin(
        self,
        endpoint: str,
        key: str,
        tokens: tuple[int, int],
        worst: float,
        budget: float | None,
        *,
        total: float | None = None,
    ) -> int | None:
        """Enter an attempt before it is sent, at the most it may cost; None, and nothing is entered, where a budget does not allow it."""
        with self._writing("an attempt"):
            if worst > self.room(endpoint, budget, total):
                return None
            return self._begin(endpoint, key, tokens, worst)

    def put(
        self,
        attempt: int,
        key: str,
        model: str,
        kept: Kept,
        cached_tokens: int = 0,
        *,
        guess: tuple[int, int, bool] | None = None,
    ) -> None:
        """Keep the answer to an attempt and enter its price; on return it is safe from the death of the process.

        Where another process kept an answer to the same key in the meantime, its answer stays and both are paid. From
        ``guess`` (estimated tokens of input and output, and whether pictures were shown) `learnt` is told.
        """
        with self._writing("an answer"):
            self._db.execute(
                "INSERT OR IGNORE INTO replies (key, model, raw, input_tokens, output_tokens, cost, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (key, model, kept.raw, kept.input_tokens, kept.output_tokens, kept.cost, kept.seconds),
            )
            self._db.execute(
                "UPDATE attempts SET state = 'answered', input_tokens = ?, cached_tokens = ?, output_tokens = ?, cost = ?"
                " WHERE id = ?",
                (kept.input_tokens, cached_tokens, kept.output_tokens, kept.cost, attempt),
            )
            self._db.execute(_SPEND, (attempt,))
            if guess is not None:
                given, answered, pictures = max(guess[0], _LEAST_GUESS), max(guess[1], 1), guess[2]
                ratios = kept.input_tokens / given, kept.output_tokens / answered
                self._db.execute(_LEARN, (attempt, pictures, given, kept.input_tokens, *ratios))

    def learnt(self, endpoint: str, pictures: bool) -> Learnt:
        """What bills say about estimates of calls with pictures, or without."""
        row = self._one(
            "SELECT calls, billed / guessed, max(1, most_input), max(1, most_output) FROM bills"
            " WHERE endpoint = ? AND pictures = ?",
            endpoint,
            pictures,
        )
        return Learnt(*row) if row else Learnt()

    def settle(self, attempt: int, *, billed: bool) -> None:
        """End an attempt without an answer: it stays at the most it may cost if the provider may have billed it, else it goes."""
        with self._writing("an attempt"):
            self._settle(attempt, billed)

    # -------------------------------------------------------------------------------------------------------- batches

    def hold_batches(self) -> None:
        """Keep the batches of this file for this object, until it is closed or the process ends.

        Raises:
            StoreError: another one has them.
        """
        if self.path is None or self._batches is not None:
            return
        try:
            self._batches = locked(self.path.with_name(f"{self.path.name}.batches"))
        except UserError:
            raise StoreError(
                f"another process waits for batches of {self.path}; wait for it, or end it"
            ) from None

    def begin_batch(
        self,
        label: str,
        endpoint: str,
        began: float,
        calls: Sequence[tuple[str, tuple[int, int], float]],
        budget: float | None,
        *,
        total: float | None = None,
    ) -> int:
        """Enter a batch, by a label, before it is sent: an attempt of each of its calls (key, tokens and greatest cost), see `begin`.

        Returns:
            How many of the calls, from the first on, the budgets allow; those are entered.
        """
        with self._writing("a batch"):
            room, number = self.room(endpoint, budget, total), 0
            for key, tokens, worst in calls:
                if worst > room:
                    break
                attempt = self._begin(endpoint, key, tokens, worst)
                self._db.execute("INSERT INTO batch_calls VALUES (?, ?, ?, ?)", (label, number, key, attempt))
                room, number = room - worst, number + 1
            if number:
                self._db.execute(
                    "INSERT INTO batches (label, endpoint, state, began) VALUES (?, ?, 'open', ?)",
                    (label, endpoint, began),
                )
            return number

    def note_batch(self, label: str, *, file: str | None = None, id: str | None = None) -> None:
        """Note the provider's names of a batch as soon as they are known; None leaves what is there."""
        with self._writing("a batch"):
            self._db.execute(
                "UPDATE batches SET file = coalesce(?, file), id = coalesce(?, id) WHERE label = ?",
                (file, id, label),
            )

    def open_batches(self, endpoint: str) -> list[BatchRow]:
        """Batches of an endpoint that are not settled, the oldest first, with the calls that are not."""
        rows = self._all(
            "SELECT label, began, file, id FROM batches WHERE endpoint = ? AND state = 'open' ORDER BY began",
            endpoint,
        )
        return [BatchRow(label, began, file, id, self.batch_calls(label)) for label, began, file, id in rows]

    def batch_calls(self, label: str) -> dict[int, tuple[str, int]]:
        """Key and attempt of the calls of a batch that are not settled, by their number."""
        rows = self._all(
            "SELECT number, batch_calls.key, attempt FROM batch_calls JOIN attempts ON attempts.id = attempt"
            " WHERE label = ? AND state = 'under way'",
            label,
        )
        return {number: (key, attempt) for number, key, attempt in rows}

    def expected(self, attempt: int) -> tuple[int, int]:
        """Tokens of input and output at most, of an attempt under way."""
        return self._one("SELECT input_tokens, output_tokens FROM attempts WHERE id = ?", attempt)

    def settle_batch(self, label: str, *, billed: bool) -> None:
        """A batch from which nothing more comes: calls without an answer are lost, or, if they are not billed, free."""
        with self._writing("a batch"):
            for _, attempt in self.batch_calls(label).values():
                self._settle(attempt, billed)
            self._db.execute("UPDATE batches SET state = 'settled' WHERE label = ?", (label,))

    def _settle(self, attempt: int, billed: bool) -> None:
        if billed:
            self._db.execute("UPDATE attempts SET state = 'lost' WHERE id = ?", (attempt,))
            self._db.execute(_SPEND, (attempt,))
        else:  # its number may be given to another one
            self._db.execute("DELETE FROM attempts WHERE id = ?", (attempt,))
            self._db.execute("DELETE FROM batch_calls WHERE attempt = ?", (attempt,))

    # ------------------------------------------------------------------------------------------------------- failures

    def fail(self, key: str, model: str, kind: str, message: str, raw: str | None) -> None:
        """Note a call that gave nothing to keep; it is asked again by the next run."""
        with self._writing("a failure"):
            self._db.execute(
                "INSERT INTO failures (key, model, kind, message, raw) VALUES (?, ?, ?, ?, ?)",
                (key, model, kind, message, raw),
            )

    def reject(self, key: str, sent_by: str, message: str, raw: str | None) -> None:
        """Keep that an endpoint cannot take a request; it is not sent there again with the same settings."""
        with self._writing("a rejection"):
            self._db.execute(
                "INSERT OR IGNORE INTO rejections (key, sent_by, message, raw) VALUES (?, ?, ?, ?)",
                (key, sent_by, message, raw),
            )

    def rejection(self, key: str, sent_by: str) -> str | None:
        """Why an endpoint cannot take a request; None where it may."""
        row = self._one("SELECT message FROM rejections WHERE key = ? AND sent_by = ?", key, sent_by)
        return row[0] if row else None

    def forget_rejections(self, keys: Iterable[str]) -> None:
        """Send these again: an endpoint that took nothing at all may have been set up wrongly."""
        with self._writing("a rejection"):
            self._db.executemany("DELETE FROM rejections WHERE key = ?", [(key,) for key in keys])

    def spent(self, endpoint: str | None) -> float:
        """What an endpoint, or all of them (None), has cost over all runs and processes; what is under way counts at most."""
        return self._one(_SPENT, endpoint)[0]

    def ledger(self) -> list[Spending]:
        """What was paid, by endpoint."""
        return [Spending(*row) for row in self._all(_LEDGER)]

    def total_cost(self) -> float:
        """Of all answered calls so far."""
        return sum(one.cost for one in self.ledger())

    def room(self, endpoint: str, budget: float | None, total: float | None) -> float:
        """What the next call may cost at most, by a budget of its endpoint and one of all together; infinity without any."""
        limits = ((endpoint, budget), (None, total))
        return min((limit - self.spent(of) for of, limit in limits if limit is not None), default=math.inf)

    def _begin(self, endpoint: str, key: str, tokens: tuple[int, int], worst: float) -> int:
        found = self._db.execute(
            "INSERT INTO attempts (endpoint, key, state, input_tokens, output_tokens, cost)"
            " VALUES (?, ?, 'under way', ?, ?, ?)",
            (endpoint, key, *tokens, worst),
        )
        assert found.lastrowid is not None
        return found.lastrowid

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                raise StoreError(
                    f"{self.path}: {what} could not be kept ({error}); nothing more is asked. Make room and run the "
                    "same command again"
                ) from None
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def _open(path: Path) -> sqlite3.Connection:
    """Open or make a file in write-ahead mode and autocommit.

    Raises:
        sqlite3.DatabaseError: it is no SQLite file, cannot be opened, or stays locked for `_WAIT_S`.
    """
    connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            return connection
        except sqlite3.DatabaseError as error:
            # SQLite waits for every other lock on its own. Of two that switch a new file over at once it refuses one on
            # the spot: each holds a read lock that the other's switch would have to wait for.
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(0.02)


def locked(path: Path) -> IO[str]:
    """Open a lock file, and hold it until it is closed or the process ends.

    Raises:
        UserError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"another process works in {path.parent}; wait for it, or give another out="
        ) from None
    return file


def key_of(*parts: Any) -> str:
    """Sha256 over JSON values, hexadecimal: a key for `AnswerStore.put_values`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
