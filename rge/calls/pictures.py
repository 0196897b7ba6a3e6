"""Prepare pictures for a request: metadata removed, upright, scaled down.

A photograph of twelve megapixels takes a second to decode and encode. In the event loop that would block all calls, and
some would time out through no fault of the endpoint.
"""

import asyncio
import base64
import io
import multiprocessing
import os
import signal
import threading
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from PIL import Image

from rge.calls.request import Picture
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, picture_bytes
from rge.common.picture_metadata import without_metadata
from rge.common.schema import ImageRef

SENDABLE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every server reads; a picture of another format, or too large, is sent as JPEG."""
JPEG_QUALITY = 90
KEPT_BYTES = 64 * 2**20
"""Of encoded pictures that are kept, the last used ones: one picture is judged a hundred times."""
MAX_PROCESSES = 8


def sendable(ref: ImageRef, max_side_px: int) -> tuple[str, bytes]:
    """Media type and bytes of a picture as it is sent: pixels and nothing else.

    Returns:
        The file without its metadata where every server can read it, else a JPEG of it.

    Raises:
        ImageError: it cannot be read or decoded.
    """
    data = picture_bytes(ref)
    return _as_it_is(data, max_side_px) or _encoded(data, max_side_px)


def _as_it_is(data: bytes, max_side_px: int) -> tuple[str, bytes] | None:
    # None where its pixels must be touched, which takes long.
    try:
        with Image.open(io.BytesIO(data)) as header:
            kind, mode, longest = header.format, header.mode, max(header.size)
            upright = header.getexif().get(0x0112, 1) in (0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # decoding it says what is wrong
    if kind not in SENDABLE or mode not in ("RGB", "RGBA", "L", "P") or longest > max_side_px or not upright:
        return None
    return SENDABLE[kind], without_metadata(data)


def _encoded(data: bytes, max_side_px: int) -> tuple[str, bytes]:
    image = load_image(data)
    image.thumbnail((max_side_px, max_side_px), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY)
    return "image/jpeg", out.getvalue()


def encoded(data: bytes) -> str:
    """Base64."""
    return base64.b64encode(data).decode()


class Pictures:
    """Prepares pictures beside the calls, as a context manager; keeps the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Picture, asyncio.Task[tuple[str, str]]] = OrderedDict()
        self._num_bytes = 0
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pictures":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, picture: Picture) -> tuple[str, str]:
        """Media type and base64 of a picture.

        Raises:
            ImageError: it cannot be read or decoded.
            UserError: the processes that prepare pictures have died.
        """
        task = self._kept.get(picture)
        if task is None:
            task = self._kept[picture] = asyncio.create_task(self._prepare(picture))
        self._kept.move_to_end(picture)
        # Shielded: one of several calls that wait for it may be cancelled.
        found = await asyncio.shield(task)
        while self._num_bytes > KEPT_BYTES and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            if not self._kept[oldest].done():
                break
            gone = self._kept.pop(oldest)
            self._num_bytes -= len(gone.result()[1]) if gone.exception() is None else 0
        return found

    async def _prepare(self, picture: Picture) -> tuple[str, str]:
        # A thread reads, for a disk may be slow; pictures that need no scaling are handled there as well.
        data = await asyncio.to_thread(picture_bytes, picture.ref)
        found = await asyncio.to_thread(_as_it_is, data, picture.max_side_px)
        if found is None:
            try:
                if self._pool is None:
                    self._pool = _pool()
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._pool, _encoded, data, picture.max_side_px)
            except BrokenProcessPool:
                raise UserError(
                    "a process that prepares pictures has died (out of memory, or started from a script without "
                    'if __name__ == "__main__"); what was answered is kept, the same command continues'
                ) from None
            except ImageError as error:
                name = picture.ref if isinstance(picture.ref, str) else f"<{len(data)} bytes>"
                raise ImageError(str(error).replace(f"<{len(data)} bytes>", str(name))) from None
        coded = encoded(found[1])
        self._num_bytes += len(coded)
        return found[0], coded


def _pool() -> ProcessPoolExecutor:
    # Not by fork: threads are running, and torch may be loaded.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(cores, MAX_PROCESSES), mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    # Ctrl-C is handled by the parent; when it is killed, its workers have to notice on their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
