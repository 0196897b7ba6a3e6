"""Download pictures by URL, with retries, limited concurrency, atomic writes and a reason for each failure."""

import asyncio
import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from data_prep.rmir.config import DownloadConfig
from rge.common.commands import progress_bar
from rge.common.errors import UserError, ungrouped
from rge.common.files import FileError, write_bytes
from rge.common.images import WEB

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
NO_ANSWER, NO_CONNECTION = "no answer in time", "no connection"
OUTAGE = {NO_ANSWER, NO_CONNECTION, *(f"HTTP {status}" for status in TRANSIENT)}
"""Reasons that may pass."""


class _DownloadFailed(Exception):
    def __init__(self, reason: str, *, retry: bool = False):
        super().__init__(reason)
        self.retry = retry


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
) -> dict[str, str]:
    """Download the pictures that the folder lacks; returns why any failed, by URL. Raises `FileError`: the disk is full."""
    todo = [url for url in dict.fromkeys(urls) if not local_path(url, folder).is_file()]
    return asyncio.run(_fetch_all(todo, folder, config, progress)) if todo else {}


async def _fetch_all(todo: list[str], folder: Path, config: DownloadConfig, progress: bool) -> dict[str, str]:
    limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
    lost: dict[str, str] = {}
    queue = iter(todo)
    bar = progress_bar(total=len(todo), desc="download", disable=not progress)
    client = httpx.AsyncClient(limits=limits, follow_redirects=True, timeout=config.timeout_s)

    async def worker() -> None:
        for url in queue:
            try:
                await _fetch_one(client, url, local_path(url, folder), config)
            except _DownloadFailed as error:
                lost[url] = str(error)
            bar.update()

    with bar, ungrouped(FileError):
        async with client, asyncio.TaskGroup() as group:
            for _ in range(min(config.concurrency, len(todo))):
                group.create_task(worker())
    return lost


async def _fetch_one(client: httpx.AsyncClient, url: str, path: Path, config: DownloadConfig) -> None:
    for attempt in range(config.max_retries + 1):
        try:
            data = await _get(client, url, config)
            write_bytes(path, data)
            return
        except _DownloadFailed as error:
            if not error.retry or attempt == config.max_retries:
                raise
        await asyncio.sleep(config.backoff_s * 2**attempt * random.random())


async def _get(client: httpx.AsyncClient, url: str, config: DownloadConfig) -> bytes:
    try:
        if (httpx.URL(url).port or 0) > 65535:
            raise httpx.InvalidURL("no such port")
        async with asyncio.timeout(config.timeout_s), client.stream("GET", url) as answer:
            if answer.status_code in TRANSIENT:
                raise _DownloadFailed(f"HTTP {answer.status_code}", retry=True)
            if answer.status_code != 200:
                raise _DownloadFailed(f"HTTP {answer.status_code}")
            if answer.headers.get("content-type", "").startswith("text/"):
                raise _DownloadFailed("a text, not a picture")
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > config.max_bytes:
                    raise _DownloadFailed(f"over {config.max_bytes:,} bytes")
            return bytes(data)
    except (TimeoutError, httpx.TimeoutException):
        raise _DownloadFailed(NO_ANSWER, retry=True) from None
    except httpx.TransportError:
        raise _DownloadFailed(NO_CONNECTION, retry=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):  # the last from host names
        raise _DownloadFailed("not a working address") from None


def resolve(
    rows: list[dict[str, Any]], folder: Path, config: DownloadConfig, *, progress: bool = False
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Download the pictures of rows of `data_prep.rmir.pictures.library.Library.rows` that are at addresses.

    Returns:
        The rows with file paths instead of URLs, and the reason for each failure, by row id.

    Raises:
        UserError: no row has a picture, for reasons that may pass: an outage must not count as the loss of all.
    """
    urls = [row["ref"] for row in rows if is_address(row["ref"])]
    lost = fetch(urls, folder, config, progress=progress)
    if all(lost.get(row["ref"]) in OUTAGE or _in_store(row) for row in rows):
        ref = rows[0]["ref"]
        reason = f": {lost[ref]}" if ref in lost else ""
        raise UserError(
            f"none of {len(rows):,} pictures can be read, such as {without_secrets(ref)}{reason}. Run the same command again when "
            "they can be reached; take those that are gone for good out of the library"
        )
    refs = {url: without_secrets(url) if url in lost else str(local_path(url, folder)) for url in urls}
    failed = {row["id"]: f"download: {lost[row['ref']]}" for row in rows if row["ref"] in lost}
    return [row | {"ref": refs.get(row["ref"], row["ref"])} for row in rows], failed


def _in_store(row: dict[str, Any]) -> bool:
    """Whether a row's picture is in an object store that did not give it, see `data_prep.rmir.pictures.library.fetched`."""
    return row["ref"] is not None and "://" in row["ref"] and not is_address(row["ref"])
