"""One run per folder: a lock on ``<folder>/.lock`` that the kernel releases when the process ends.

It is a POSIX record lock: ``flock`` would live on in every forked data worker. It holds between containers that share the
folder, and over NFS between machines.
"""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rge.common.errors import UserError

LOCK = ".lock"


class InUseError(UserError):
    """Another run uses the folder; the message names it."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; InUseError names another process that holds it, its machine and since when.

    Not reentrant: a process does not lock itself out, and the first to leave frees the lock. OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InUseError(
                    f"{folder} is in use by {_holder(path)}: wait for it, end it, or give another out= (if its machine "
                    f"is gone for good, delete {path})"
                ) from None
            # Some network file systems are mounted without locks, and no other disk is available.
            message = f"the file system of {folder} has no locks ({error.strerror}): a second run in it cannot be detected"
            print(f"warning: {message}", file=sys.stderr)  # noqa: T201
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        file.flush()
        yield


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet
