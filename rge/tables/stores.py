"""Files in object stores (``s3://``, ``gs://`` and all others that fsspec knows), and rows of Lance tables.

Every failure is one `StoreError`, and none takes longer than `WAIT_S` to be noticed.
"""

import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rge.common.commands import in_thread
from rge.common.images import WEB
from rge.tables.errors import TableError, reason

T = TypeVar("T")
WAIT_S, LISTING_S = 60.0, 1800.0
"""How long a store may take for one answer, and to list a folder."""
LANCE = ".lance"
ROWS = 64
"""Rows of a Lance table that are read at once, since they may hold pictures."""
PREFIX = "rge-copies-"
KINDS: dict[str, tuple[str | int, ...]] = {
    "credentials": (
        "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError", "RefreshError",
        "ClientAuthenticationError", "AuthenticationException", "LogonFailure",
        "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthenticationFailed", 401,
    ),
    "denied": (
        "AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch", "InsufficientAccountPermissions", 403,
    ),
    "missing": (404, 410),
}  # fmt: skip
"""Types of botocore, google-auth, azure-core, paramiko and smbprotocol, codes of S3 and Azure, and HTTP statuses."""
WORDS = {
    "protocol not known": "package", "credential": "credentials", "accessdenied": "denied", "forbidden": "denied",
    "nosuchbucket": "missing", "not found": "missing",
}  # fmt: skip
"""Of errors without a type."""
COPIES, COPIES_BYTES = 16, 4 << 30
"""Local copies of a store's tables and documents that stay: at least so many, and more up to this size."""


class StoreError(TableError):
    """An object store, or a Lance table, cannot be read.

    `kind` says why: package, credentials, denied, missing, silent or other.
    """


def is_stored(address: object) -> bool:
    """Whether something is elsewhere than in files of this machine and on the web."""
    return isinstance(address, str) and "://" in address and not address.lower().startswith(WEB)


def open_store(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path there."""
    return _within_time(address, lambda: fsspec.core.url_to_fs(address))


def exists(address: str) -> bool:
    """Whether there is a file or a folder; this is where wrong credentials show."""
    fs, path = open_store(address)
    return _within_time(address, lambda: fs.exists(path) or bool(fs.ls(path)))


def listed(address: str, files: Callable[[], Iterator[T]]) -> list[T]:
    """What a listing of a folder there yields."""
    return _within_time(address, lambda: list(files()), LISTING_S)


def read(address: str) -> bytes:
    """The bytes of a file."""
    fs, path = open_store(address)
    data: bytes = _within_time(address, lambda: fs.cat_file(path))
    return data


def local_copy(address: str) -> str:
    """A file's path on this machine: itself, or a copy that stays while few others are asked for."""
    return _COPIES.path(address) if is_stored(address) else address


class _Copies:
    """Local copies, the last used ones; they are deleted with this process."""

    def __init__(self) -> None:
        self._lock, self._path_of, self._folder = threading.Lock(), OrderedDict[str, str](), ""

    def path(self, address: str) -> str:
        with self._lock:
            if not self._folder:
                _remove_left_over()
                self._folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            if address not in self._path_of:
                place = os.path.join(tempfile.mkdtemp(dir=self._folder), os.path.basename(address))
                fs, path = open_store(address)
                _within_time(address, lambda: fs.get_file(path, place), LISTING_S)
                self._path_of[address] = place
                self._shrink()
            self._path_of.move_to_end(address)
            return self._path_of[address]

    def _shrink(self) -> None:
        sizes = {address: os.path.getsize(path) for address, path in self._path_of.items()}
        for address, size in sizes.items():
            if len(self._path_of) <= COPIES or sum(sizes[one] for one in self._path_of) - size < COPIES_BYTES:
                return
            shutil.rmtree(os.path.dirname(self._path_of.pop(address)), ignore_errors=True)


def _remove_left_over() -> None:
    """Delete the copies of processes that were killed, as Ray ends its actors."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # not ours, or of another user


_COPIES = _Copies()


def _within_time(address: str, call: Callable[[], T], limit_s: float | None = None) -> T:
    """What a call to a store returns; every file system raises its own errors."""
    limit_s = WAIT_S if limit_s is None else limit_s
    answer = in_thread(call)
    try:
        error = answer.exception(limit_s)
    except TimeoutError:
        raise StoreError(
            f"no answer for {limit_s:.0f} s: check the address and the network", address, kind="silent"
        ) from None
    if isinstance(error, TableError | KeyboardInterrupt | SystemExit):
        raise error
    if error is not None:
        raise _named(address, error) from error
    return answer.result()


def _named(address: str, error: BaseException) -> StoreError:
    kind, why = _kind(address, error), reason(error)
    words = {
        "package": f"needs a package that is not installed: pip install -e '.[stores]' ({why})",
        "credentials": "no valid credentials: set those of the store, such as AWS_PROFILE, AWS_ACCESS_KEY_ID or "
        f"GOOGLE_APPLICATION_CREDENTIALS ({why})",
        "denied": f"access is denied ({why})",
        "missing": "does not exist: check the bucket and the path",
        "other": f"cannot be read: {why}",
    }
    return StoreError(words[kind], address, kind=kind)


def _kind(address: str, error: BaseException) -> str:
    """What went wrong, by type, status or code; by words only where there is none, as in errors of Lance and gcsfs."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and len(chain) < 8:
        chain.append(at)
        at = at.__cause__ or at.__context__
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, ImportError):
        return "package"
    # A code says more than the type, and both more than the status: Azure answers 403 to wrong keys, too.
    for one in chain:
        for word in (_code(one), *(kind.__name__ for kind in type(one).__mro__), _status(one)):
            for kind, words in KINDS.items():
                if word in words:
                    return kind
    if isinstance(error, PermissionError):
        return "denied"
    # A path may hold any of these words.
    text = " ".join(f"{type(one).__name__} {one}" for one in chain)
    text = text.replace(address.partition("://")[2], "").lower()
    return next((kind for word, kind in WORDS.items() if word in text), "other")


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer: of Azure's clients, aiohttp, gcsfs, or requests and the hub."""
    response = getattr(error, "response", None)
    given = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    return next(
        (one for one in (*given, getattr(response, "status_code", None)) if isinstance(one, int)), None
    )


def _code(error: BaseException) -> str | None:
    """The store's own code of an error: of botocore, or of Azure's clients."""
    response, code = getattr(error, "response", None), getattr(error, "error_code", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
    code = getattr(code, "value", code)
    return code if isinstance(code, str) else None


def missing(address: str) -> StoreError:
    """The error of an address at which there is nothing."""
    return _named(address, FileNotFoundError())


# --------------------------------------------------------------------------------------------------------------- Lance


def is_lance(address: str) -> bool:
    """Whether an address is that of a Lance table: a folder whose name ends in ``.lance``."""
    return address.rstrip("/").endswith(LANCE) and (
        is_stored(address) or os.path.isdir(os.path.join(address, "_versions"))
    )


def lance_rows(address: str) -> Iterator[dict[str, Any]]:
    """All rows of a Lance table, in its order."""
    table = _lance(address)
    batches = _within_time(address, lambda: iter(table.search().to_batches(ROWS)))
    while (batch := _within_time(address, lambda: next(batches, None))) is not None:
        yield from batch.to_pylist()


def lance_columns(address: str) -> list[str]:
    """The names of a Lance table's columns."""
    names: list[str] = _lance(address).schema.names
    return names


def lance_cell(address: str, id: str, column: str) -> Any:
    """A cell of the row with an id in the column ``id``."""
    table = _lance(address)
    rows = _rows_by_id(address, table.version)
    if id not in rows:
        raise StoreError(f"there is no such row, of {len(rows)}", address, f"row {id!r}", kind="missing")
    found = _within_time(address, lambda: table.take_row_ids([rows[id]]).select([column]).to_arrow())
    if not len(found):
        raise StoreError("it has been deleted meanwhile", address, f"row {id!r}", kind="missing")
    return found[column][0].as_py()


@lru_cache(maxsize=4)
def _rows_by_id(address: str, _version: int) -> dict[str, int]:
    """Lance's own row ids, by the column ``id``."""
    query = _lance(address).search().select(["id"]).with_row_id(True)
    found = _within_time(address, query.to_arrow, LISTING_S)
    return dict(zip(map(str, found["id"].to_pylist()), found["_rowid"].to_pylist(), strict=True))


@lru_cache(maxsize=4)
def _lance(address: str) -> Any:
    try:
        import lancedb
    except ImportError:
        raise StoreError(
            "it needs LanceDB, which is not installed: pip install -e '.[search]'", address, kind="package"
        ) from None
    folder, _, name = address.rstrip("/").rpartition("/")
    folder = folder or ("/" if address[0] == "/" else ".")
    # With an interval of none, the rows of a table that grows are seen.
    return _within_time(
        address,
        lambda: lancedb.connect(folder, read_consistency_interval=timedelta(0)).open_table(
            name.removesuffix(LANCE)
        ),
    )
