"""Download pictures by URL, with retries, limited concurrency, atomic writes and a reason for each failure."""

import asyncio
import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from data_prep.rmir.config import DownloadConfig
from rge.calls.pace import backoff
from rge.common.commands import progress_bar
from rge.common.errors import UserError, ungrouped
from rge.common.files import FileError, write_bytes
from rge.common.images import WEB
from rge.web.client import make_client

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
MAX_BACKOFF_S = 60.0
"""Longest wait before the next attempt."""
OUTAGE_OF = 20
"""Fewer pictures that cannot be reached are dead links, not an outage."""
LOST = "lost"
"""Key of a row whose picture could not be fetched; the value is a `Lost`."""


class Lost(Exception):
    """Why a picture could not be downloaded, and whether another try may succeed."""

    def __init__(self, reason: str, *, may_pass: bool = False):
        super().__init__(reason)
        self.may_pass = may_pass


def is_address(ref: str | None) -> bool:
    """Whether a reference is a web address."""
    return ref is not None and ref.startswith(WEB)


def local_path(url: str, folder: Path) -> Path:
    """Path of a downloaded picture, derived from its URL alone."""
    name = hashlib.sha256(url.encode()).hexdigest()[:32]
    return folder / name[:2] / name


def without_secrets(url: str) -> str:
    """The URL without credentials and query, which may contain a signature."""
    try:
        return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx.InvalidURL, UnicodeError):
        scheme, _, rest = re.split("[?#]", url)[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def fetch(
    urls: Sequence[str], folder: Path, config: DownloadConfig, *, progress: bool = False
) -> dict[str, Lost]:
    """Download the pictures that the folder lacks; returns why any failed, by URL. Raises `FileError`: the disk is full."""
    todo = [url for url in dict.fromkeys(urls) if not local_path(url, folder).is_file()]
    return asyncio.run(_fetch_all(todo, folder, config, progress)) if todo else {}


async def _fetch_all(
    todo: list[str], folder: Path, config: DownloadConfig, progress: bool
) -> dict[str, Lost]:
    limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
    lost: dict[str, Lost] = {}
    queue = iter(todo)
    bar = progress_bar(total=len(todo), desc="download", disable=not progress)
    client = make_client(httpx.AsyncClient, limits=limits, follow_redirects=True, timeout=config.timeout_s)

    async def worker() -> None:
        for url in queue:
            try:
                await _fetch_one(client, url, local_path(url, folder), config)
            except Lost as error:
                lost[url] = Lost(
                    str(error), may_pass=error.may_pass
                )  # without the traceback, which holds the data
            bar.update()

    with bar, ungrouped(FileError):
        async with client, asyncio.TaskGroup() as group:
            for _ in range(min(config.concurrency, len(todo))):
                group.create_task(worker())
    return lost


async def _fetch_one(client: httpx.AsyncClient, url: str, path: Path, config: DownloadConfig) -> None:
    for attempt in range(config.max_retries + 1):
        try:
            return write_bytes(path, await _get(client, url, config))
        except Lost as error:
            if not error.may_pass or attempt == config.max_retries:
                raise
        await asyncio.sleep(backoff(attempt, config.backoff_s, MAX_BACKOFF_S) * random.random())


async def _get(client: httpx.AsyncClient, url: str, config: DownloadConfig) -> bytes:
    try:
        if (httpx.URL(url).port or 0) > 65535:
            raise httpx.InvalidURL("no such port")
        async with asyncio.timeout(config.timeout_s), client.stream("GET", url) as answer:
            if answer.status_code != 200:
                raise Lost(f"HTTP {answer.status_code}", may_pass=answer.status_code in TRANSIENT)
            if answer.headers.get("content-type", "").startswith("text/"):
                raise Lost("a text, not a picture")
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > config.max_bytes:
                    raise Lost(f"over {config.max_bytes:,} bytes")
            return bytes(data)
    except (TimeoutError, httpx.TimeoutException):
        raise Lost("no answer in time", may_pass=True) from None
    except httpx.TransportError:
        raise Lost("no connection", may_pass=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):  # the last from host names
        raise Lost("not a working address") from None


@dataclass
class Reached:
    """Whether the pictures of a library can be reached: what its blocks say in one command."""

    enough: int
    """An outage is at least so many pictures."""
    unread: int = 0
    """Pictures lost for reasons that may pass."""
    some: bool = False
    """A picture came, or is lost for good."""

    def note(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add a block; `UserError` if all pictures so far are lost for reasons that may pass, and they are `enough`."""
        unread = [row for row in rows if LOST in row and row[LOST].may_pass]
        self.unread += len(unread)
        self.some = self.some or len(unread) < len(rows)
        if not self.some and self.unread >= self.enough:
            raise UserError(
                f"none of {self.unread:,} pictures can be read, such as this one: {unread[0][LOST]}. Run the same command again "
                "when they can be reached; if they are gone for good, on_unanswered=proceed goes on without them",
                without_secrets(unread[0]["ref"]),
            ).about("on_unanswered")


def resolve(
    rows: Sequence[dict[str, Any]], folder: Path, config: DownloadConfig, *, progress: bool
) -> list[dict[str, Any]]:
    """Rows of `data_prep.rmir.pictures.library.Library.rows` with files instead of addresses, or `LOST` and no secrets."""
    lost = fetch([row["ref"] for row in rows if is_address(row["ref"])], folder, config, progress=progress)
    found = []
    for row in rows:
        if (url := row["ref"]) in lost:
            row = row | {"ref": without_secrets(url), LOST: lost[url]}
        elif is_address(url):
            row = row | {"ref": str(local_path(url, folder))}
        found.append(row)
    return found
