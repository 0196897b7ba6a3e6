"""Embed the entries of a source, a window at a time: pictures are read by threads while the window before is embedded."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.index.sources import Content, Entry, load

SHOWN = 20
"""Unreadable items that are printed."""
WINDOW = 4
"""Batches that are read, sorted by length and embedded together."""


class UnreadableError(UserError):
    """More of a source is unreadable than may be."""


@dataclass
class Unreadable:
    """What could not be read of `total` items, and why, by name.

    Args:
        total: items there are, unreadable ones included.
        most: share that may be unreadable.
        faults: those that are known before anything is opened.
    """

    total: int
    most: float
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: object) -> None:
        """Note one.

        Raises:
            UnreadableError: these are more than may be.
        """
        self.faults[name] = " ".join(str(reason).split())
        self.check()

    def check(self) -> None:
        """Raise `UnreadableError` where there are more than may be."""
        if len(self.faults) > self.most * self.total:
            raise UnreadableError(
                f"{len(self.faults)} of {self.total} items are unreadable so far, more than max_unreadable={self.most:g}:\n"
                + self.listed()
            )

    def listed(self) -> str:
        """The first of them, a line each."""
        lines = [f"  {name}: {reason}" for name, reason in list(self.faults.items())[:SHOWN]]
        if len(self.faults) > SHOWN:
            lines.append(f"  and {len(self.faults) - SHOWN} more; unreadable=FILE lists all")
        return "\n".join(lines)

    def write(self, path: Path | None) -> None:
        """All of them to a file, if one is named."""
        if path is not None:
            write_text(path, "".join(f"{name}\t{reason}\n" for name, reason in self.faults.items()))


@dataclass(frozen=True, slots=True)
class Embedded:
    """An entry with its embedding.

    Attributes:
        entry: as it was listed.
        content: as it was read.
        vector: (D,) float32, unit norm.
        rationale: what was written, empty in direct mode.
    """

    entry: Entry
    content: Content
    vector: np.ndarray
    rationale: str


class Reader:
    """Embeds entries with one checkpoint in one way.

    Args:
        embedder: the checkpoint.
        side: what the items are.
        mode: with a rationale or without; None as the side has it.
        instruction: put before queries.
        dimensions: components kept; None for all.
        batch_size: rows a forward.
        thumbnail_px: of the small copies; 0 for none.
        captions: embed a picture together with its text.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        side: Literal["query", "document"] = "document",
        mode: Literal["reasoning", "direct"] | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        batch_size: int = 64,
        thumbnail_px: int = 0,
        captions: bool = True,
    ):
        self.embedder, self.side = embedder, side
        self.options: dict[str, Any] = {"dimensions": dimensions, "batch_size": batch_size}
        if mode is not None:
            self.options["mode"] = mode
        if side == "query":
            self.options["instruction"] = instruction
        self.batch_size, self.thumbnail_px, self.captions = batch_size, thumbnail_px, captions

    def read(self, entries: Iterable[Entry], unreadable: Unreadable) -> Iterator[list[Content | None]]:
        """Contents of the entries, a window at a time; None where one is unreadable, which is noted."""
        windows = _windows(entries, WINDOW * self.batch_size)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            waiting: list[tuple[Entry, Future[Content]]] | None = None
            for window in chain(windows, [[]]):
                coming = [
                    (entry, pool.submit(load, entry, self.thumbnail_px, self.captions)) for entry in window
                ]
                if waiting is not None:
                    try:
                        yield [_result(entry, future, unreadable) for entry, future in waiting]
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise
                waiting = coming

    def embed(self, entries: Sequence[Entry], unreadable: Unreadable) -> Iterator[list[Embedded]]:
        """Embed entries, a window at a time, in their order; unreadable ones are left out and noted."""
        place = 0
        for window in self.read(entries, unreadable):
            chosen = [
                (entry, content)
                for entry, content in zip(entries[place : place + len(window)], window, strict=True)
                if content is not None
            ]
            place += len(window)
            yield self.vectors(chosen, unreadable)

    def vectors(self, chosen: Sequence[tuple[Entry, Content]], unreadable: Unreadable) -> list[Embedded]:
        """Embed what has been read. One that the checkpoint cannot take (a picture a pixel high) is left out and noted."""
        if not chosen:
            return []
        try:
            return self._together(chosen)
        except ValueError:
            fit = []
            for entry, content in chosen:
                texts, images = self._arguments([content])
                item = Item(entry.id, texts[0], (images[0],) if images[0] is not None else ())
                try:
                    self.embedder.builder.build(item, "query" if self.side == "query" else "candidate")
                    fit.append((entry, content))
                except ValueError as error:
                    unreadable.add(entry.id, _named(error, entry, content))
            if len(fit) == len(chosen):
                raise  # it was not the items
        return self._together(fit) if fit else []

    def _arguments(self, contents: Sequence[Content]) -> tuple[list[str | None], list[bytes | None]]:
        texts = [one.text if one.data is None or self.captions else None for one in contents]
        return texts, [one.data for one in contents]

    def _together(self, chosen: Sequence[tuple[Entry, Content]]) -> list[Embedded]:
        texts, images = self._arguments([content for _, content in chosen])
        encode = self.embedder.encode_query if self.side == "query" else self.embedder.encode_document
        vector_ND, rationales = encode(texts, images, return_rationales=True, progress=False, **self.options)
        if not np.isfinite(vector_ND).all():
            raise UserError(f"{self.embedder.checkpoint} gives embeddings that are not finite: it is damaged")
        return [
            Embedded(entry, content, vector_D, rationale)
            for (entry, content), vector_D, rationale in zip(chosen, vector_ND, rationales, strict=True)
        ]


def _windows(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    left = iter(entries)
    while window := list(islice(left, size)):
        yield window


def _result(entry: Entry, future: "Future[Content]", unreadable: Unreadable) -> Content | None:
    try:
        return future.result()
    except UserError as error:
        unreadable.add(entry.id, error)
        return None


def _named(error: ValueError, entry: Entry, content: Content) -> str:
    return str(error).replace(f"<{len(content.data or b'')} bytes>", str(entry.image))
