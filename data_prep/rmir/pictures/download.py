"""Download pictures by URL, with retries, atomic writes and a reason for each failure."""

import hashlib
import random
import threading
import time
from pathlib import Path

import httpx

from rge.common.files import write_bytes
from rge.common.images import WEB, ImageError, fetch_picture

MAX_RETRIES, BACKOFF_S = 3, 1.0
"""Attempts after the first; and the upper bound of the first wait, which doubles with every attempt."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class DownloadFailed(Exception):
    """Why a picture cannot be downloaded; the message is the same for all pictures with the same problem."""


def is_address(ref: str | None) -> bool:
    """Whether a reference is a web address."""
    return ref is not None and ref.startswith(WEB)


def local_path(url: str, folder: Path) -> Path:
    """Path of a downloaded picture, derived from its URL alone."""
    name = hashlib.sha256(url.encode()).hexdigest()[:32]
    return folder / name[:2] / name


def without_secrets(url: str) -> str:
    """The URL without credentials and query, which may contain a signature."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))


def download(url: str, folder: Path) -> Path:
    """Download a picture unless the folder has it, and return its path. Raises `DownloadFailed`, or `FileError`: the disk is full."""
    path = local_path(url, folder)
    for attempt in range(MAX_RETRIES + 1):
        if path.is_file():
            break
        try:
            # Under a name of its own first: another thread may download the same URL.
            own = path.with_name(f"{path.name}-{threading.get_ident()}")
            write_bytes(own, fetch_picture(url))
            own.replace(path)
        except ImageError as error:
            if attempt == MAX_RETRIES or not _may_pass(error.__cause__):
                raise DownloadFailed(f"download: {_reason(error.__cause__)}") from None
            time.sleep(BACKOFF_S * 2**attempt * random.random())
    return path


def _may_pass(cause: BaseException | None) -> bool:
    if isinstance(cause, httpx.HTTPStatusError):
        return cause.response.status_code in TRANSIENT
    return isinstance(cause, httpx.TransportError) and not isinstance(cause, httpx.UnsupportedProtocol)


def _reason(cause: BaseException | None) -> str:
    if isinstance(cause, httpx.HTTPStatusError):
        return f"HTTP {cause.response.status_code}"
    if isinstance(cause, httpx.TransportError):
        return "no answer in time" if isinstance(cause, httpx.TimeoutException) else "no connection"
    return "too large, or too slow" if cause is None else "not a working address"
