"""Embed a source window by window, while threads prepare the next."""

import math
import os
import time
import warnings
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.modes import Mode
from rge.common.parts import ImagePart, content_of
from rge.common.schema import Item, check_finite
from rge.embedder import Embedder, one_ahead
from rge.index.blocks import WINDOW
from rge.index.sources import Content, Entry, Unreadable, load
from rge.model.prompts import Prompt

if TYPE_CHECKING:
    from rge.index.store import Digests


COUNTING_S = 60.0
"""Seconds to look for further unreadable items once there are too many."""
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An entry that has been read: its content without the picture's bytes, and its prompt; None if its vector is known."""

    entry: Entry
    content: Content
    prompt: Prompt | None


@dataclass(frozen=True, slots=True)
class Embedded:
    """An entry with its embedding (D,), unit norm, and its rationale, empty in direct mode."""

    entry: Entry
    content: Content
    vector: np.ndarray
    rationale: str


@dataclass(frozen=True, slots=True)
class Window:
    """Some entries, with what embedding them gave."""

    count: int  # with unreadable ones
    items: list[Prepared]  # those that were read, without their prompts
    vectors: dict[str, np.ndarray]  # by digest, of contents that were not known


class Reader:
    """Embeds entries with one checkpoint and fixed settings.

    `dimensions` are the components kept, None: all. With `captions`, a picture is embedded together with its text.
    `max_file_pixels` is as for `load_image`.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        side: Literal["query", "document"] = "document",
        mode: Mode | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        batch_size: int = 64,
        batch_tokens: int | None = None,
        thumbnail_px: int = 0,
        captions: bool = True,
        max_file_pixels: int | None = None,
    ):
        self.embedder, self.side, self.dimensions = (
            embedder.with_(batch_tokens=batch_tokens),
            side,
            dimensions,
        )
        self.mode = mode or (embedder.query_mode if side == "query" else "direct")
        self.instruction = None
        if side == "query":
            self.instruction, warning = embedder.instruction_for(instruction)
            if warning:
                warnings.warn(warning, stacklevel=2)
        self.batch_size, self.thumbnail_px, self.captions = batch_size, thumbnail_px, captions
        self.max_file_pixels = max_file_pixels

    def read(
        self, entries: Iterable[Entry], unreadable: Unreadable, known: Container[str] = ()
    ) -> Iterator[list[Prepared | None]]:
        """Read entries and make their prompts, a window at a time and one window ahead.

        An entry that cannot be read or embedded (a picture one pixel high) goes into `unreadable`, and None is yielded for it.
        If these are too many, the rest is read too, for `COUNTING_S` seconds, so that the error has all of them. Contents whose digest is `known` get no prompt.
        """
        remaining = iter(entries)
        windows = iter(lambda: tuple(islice(remaining, WINDOW * self.batch_size)), ())
        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            parts = (part for window in windows for part in self._read(window, pool, unreadable, known))
            try:
                until = math.inf
                for found in one_ahead(parts):
                    if not unreadable.too_many:
                        yield found
                        continue
                    until = min(until, time.monotonic() + COUNTING_S)
                    if time.monotonic() >= until:
                        break
                else:
                    until = math.inf
                unreadable.check(all_read=until == math.inf)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _read(
        self,
        window: Sequence[Entry],
        pool: ThreadPoolExecutor,
        unreadable: Unreadable,
        known: Container[str],
    ) -> Iterator[list[Prepared | None]]:
        """A window, in parts if its prompts have more tokens than `Embedder.fills_window` allows.

        What ends a part does not depend on the number of threads, which are few entries ahead.
        """
        waiting: deque[tuple[Entry, Future[Prepared]]] = deque()
        todo, part, num_tokens = iter(window), list[Prepared | None](), 0

        def submit(count: int) -> None:
            waiting.extend((entry, pool.submit(self._prepare, entry, known)) for entry in islice(todo, count))

        submit(THREADS)
        while waiting:
            part.append(found := _result(*waiting.popleft(), unreadable))
            submit(1)
            num_tokens += len(found.prompt) if found is not None and found.prompt is not None else 0
            if not waiting or self.embedder.fills_window(num_tokens):
                yield part
                part, num_tokens = [], 0

    def embed(self, entries: Sequence[Entry], unreadable: Unreadable) -> Iterator[list[Embedded]]:
        """Embed entries, a window at a time, in their order; unreadable ones are left out and noted."""
        for window in self.read(entries, unreadable):
            yield self.vectors([item for item in window if item is not None])

    def windows(self, entries: Iterable[Entry], unreadable: Unreadable, known: "Digests") -> Iterator[Window]:
        """Embed the contents that are not known yet, each once, a window at a time; they are known from then on."""
        for window in self.read(entries, unreadable, known):
            items = [item for item in window if item is not None]
            by_digest = {item.content.digest: item for item in items}
            fresh = self.vectors([item for digest, item in by_digest.items() if digest not in known])
            known.update(by_digest)
            plain = [replace(item, prompt=None) for item in items]
            yield Window(len(window), plain, {item.content.digest: item.vector for item in fresh})

    def vectors(self, prepared: Sequence[Prepared]) -> list[Embedded]:
        """Embed entries that have a prompt."""
        if not prepared:
            return []
        prompts = [item.prompt for item in prepared if item.prompt is not None]
        assert len(prompts) == len(prepared)
        self.embedder.warn_of_truncation(prompts)
        encoded = self.embedder.encode_prompts(prompts, mode=self.mode, batch_size=self.batch_size)
        found_ND = check_finite(encoded.embeddings, str(self.embedder.checkpoint))
        vector_ND = self.embedder.cut(found_ND, self.dimensions)
        return [
            Embedded(item.entry, item.content, vector_D, rationale)
            for item, vector_D, rationale in zip(prepared, vector_ND, encoded.rationales, strict=True)
        ]

    def _prepare(self, entry: Entry, known: Container[str]) -> Prepared:
        content = load(entry, self.thumbnail_px, self.captions, self.max_file_pixels)
        without_bytes = replace(content, data=None, part=None)
        if content.digest in known:
            return Prepared(entry, without_bytes, None)
        try:
            shown = [] if content.part is None else [content.part]
            if content.data is not None:
                image = load_image(content.data, max_file_pixels=self.max_file_pixels)
                shown = [ImagePart(image)]  # type: ignore[arg-type]
            text = content.text if not shown or self.captions else None
            item = Item(entry.id, (*shown, *content_of(text)), self.instruction)
            prompt = self.embedder.prompt(item, "query" if self.side == "query" else "candidate")
        except ValueError as error:
            message = str(error).replace(f"<{len(content.data or b'')} bytes>", str(entry.image))
            raise UserError(message) from error
        return Prepared(entry, without_bytes, prompt)


def _result(entry: Entry, future: Future[Prepared], unreadable: Unreadable) -> Prepared | None:
    try:
        return future.result()
    except UserError as error:
        unreadable.add(entry.id, error)
        return None
