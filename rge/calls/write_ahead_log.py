"""SQLite files that several processes write to and that survive a kill (write-ahead log)."""

import sqlite3
import time
from pathlib import Path

WAIT_S = 60.0
"""How long one process waits for another's lock."""
_AGAIN_S = 0.02


def open_wal(path: Path, *, any_thread: bool = False) -> sqlite3.Connection:
    """Open or make a file on a local disk in write-ahead mode, in autocommit mode.

    Raises:
        sqlite3.DatabaseError: it is no SQLite file, cannot be opened, or stays locked for `WAIT_S`.
    """
    connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=not any_thread)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return connection
        except sqlite3.DatabaseError as error:
            # SQLite waits for every other lock on its own. Of two that switch a new file over at once it refuses one on
            # the spot: each holds a read lock that the other's switch would have to wait for.
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(_AGAIN_S)
