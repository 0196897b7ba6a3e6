"""Embed a source window by window, while threads prepare the next."""

import os
import sys
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.images import load_image
from rge.common.modes import Mode
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.index.options import Reading
from rge.index.sources import Content, Entry, Source, load
from rge.index.store import Row
from rge.model.prompts import Prompt

SHOWN = 20
"""Unreadable items that are printed."""
WINDOW = 4
"""Batches that are read, sorted by length and embedded together."""


@dataclass
class Unreadable:
    """Unreadable items out of `total`, with the reason, by name; `most` is the share allowed."""

    total: int
    most: float
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, asked: Reading) -> "Unreadable":
        """Of a source, as its listing shows it."""
        return cls(len(source.entries) + len(source.faults), asked.max_unreadable, dict(source.faults))

    def add(self, name: str, reason: object) -> None:
        """Record one; raises as `check` does."""
        self.faults[name] = " ".join(str(reason).split())
        self.check()

    def check(self) -> None:
        """Raise `UserError` if there are more than allowed."""
        if len(self.faults) > self.most * self.total:
            raise UserError(
                f"{len(self.faults)} of {self.total} items are unreadable so far, more than max_unreadable={self.most:g}:\n"
                + self.listed()
            )

    def listed(self) -> str:
        """The first of them, one line each."""
        lines = [f"  {name}: {reason}" for name, reason in list(self.faults.items())[:SHOWN]]
        if len(self.faults) > SHOWN:
            lines.append(f"  and {len(self.faults) - SHOWN} more; unreadable=FILE lists all")
        return "\n".join(lines)

    def report(self, what: str = "") -> None:
        """Print how many there are, and the first of them."""
        if self.faults:
            count = f"{len(self.faults)} of {self.total} items are unreadable{what}"
            print(f"{count}:\n{self.listed()}", file=sys.stderr)  # noqa: T201

    def write(self, path: Path | None) -> None:
        """All of them to a file, if one is named."""
        if path is not None:
            write_text(path, "".join(f"{name}\t{reason}\n" for name, reason in self.faults.items()))


@dataclass(frozen=True, slots=True)
class Prepared:
    """An entry that has been read: its content without the picture's bytes, and what is embedded; None where that is known."""

    entry: Entry
    content: Content
    prompt: Prompt | None


@dataclass(frozen=True, slots=True)
class Embedded:
    """An entry with its embedding (D,), unit norm, and what was written, empty in direct mode."""

    entry: Entry
    content: Content
    vector: np.ndarray
    rationale: str


class Reader:
    """Embeds entries with one checkpoint and fixed settings.

    Args:
        embedder: the checkpoint.
        side: whether the items are documents or queries.
        mode: with a rationale or without; None as the side has it.
        instruction: put before queries.
        dimensions: components kept; None for all.
        batch_size: rows per forward.
        thumbnail_px: of the small copies; 0 for none.
        captions: embed a picture together with its text.
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
        thumbnail_px: int = 0,
        captions: bool = True,
    ):
        self.embedder, self.side, self.dimensions = embedder, side, dimensions
        self.mode = mode or (embedder.query_mode if side == "query" else "direct")
        self.instruction = None
        if side == "query":
            self.instruction, warning = embedder.instruction_for(instruction)
            if warning:
                warnings.warn(warning, stacklevel=2)
        self.batch_size, self.thumbnail_px, self.captions = batch_size, thumbnail_px, captions

    def read(
        self, entries: Iterable[Entry], unreadable: Unreadable, known: Container[str] = ()
    ) -> Iterator[list[Prepared | None]]:
        """Read entries and make their prompts, a window at a time and one window ahead.

        What cannot be read or embedded (a picture a pixel high) is noted in `unreadable` and is None. Contents whose digest is
        `known` get no prompt.
        """
        windows = _windows(entries, WINDOW * self.batch_size)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            waiting: list[tuple[Entry, Future[Prepared]]] = []
            try:
                for window in chain(windows, [()]):
                    coming = [(entry, pool.submit(self._prepare, entry, known)) for entry in window]
                    if waiting:
                        yield [_result(*one, unreadable) for one in waiting]
                    waiting = coming
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def embed(self, entries: Sequence[Entry], unreadable: Unreadable) -> Iterator[list[Embedded]]:
        """Embed entries, a window at a time, in their order; unreadable ones are left out and noted."""
        for window in self.read(entries, unreadable):
            yield self.vectors([one for one in window if one is not None])

    def vectors(self, prepared: Sequence[Prepared]) -> list[Embedded]:
        """Embed what has been prepared."""
        prompts = [one.prompt for one in prepared if one.prompt is not None]
        assert len(prompts) == len(prepared)
        if not prompts:
            return []
        self.embedder.warn_of_truncation(prompts)
        found = self.embedder.encode_prompts(prompts, mode=self.mode, batch_size=self.batch_size)
        if not np.isfinite(found.embeddings).all():
            raise UserError(f"{self.embedder.checkpoint} gives embeddings that are not finite: it is damaged")
        vector_ND = self.embedder.cut(found.embeddings, self.dimensions)
        return [
            Embedded(one.entry, one.content, vector_D, rationale)
            for one, vector_D, rationale in zip(prepared, vector_ND, found.rationales, strict=True)
        ]

    def _prepare(self, entry: Entry, known: Container[str]) -> Prepared:
        content = load(entry, self.thumbnail_px, self.captions)
        without_bytes = replace(content, data=None)
        if content.digest in known:
            return Prepared(entry, without_bytes, None)
        try:
            images = [] if content.data is None else [load_image(content.data)]
            text = content.text if content.data is None or self.captions else None
            item = Item(entry.id, text, tuple(images), self.instruction)  # type: ignore[arg-type]
            prompt = self.embedder.prompt(item, "query" if self.side == "query" else "candidate", images)
        except ValueError as error:
            message = str(error).replace(f"<{len(content.data or b'')} bytes>", str(entry.image))
            raise UserError(message) from error
        return Prepared(entry, without_bytes, prompt)


def row_of(source: Source, entry: Entry, content: Content, vector: np.ndarray) -> Row:
    """An entry as an index keeps it."""
    return Row(
        source.name,
        entry.id,
        entry.stamp,
        content.digest,
        vector,
        text=content.text,
        image=entry.image,
        metadata=content.facts | entry.metadata,
        thumbnail=content.thumbnail,
    )


def _windows(entries: Iterable[Entry], size: int) -> Iterator[tuple[Entry, ...]]:
    left = iter(entries)
    while window := tuple(islice(left, size)):
        yield window


def _result(entry: Entry, future: Future[Prepared], unreadable: Unreadable) -> Prepared | None:
    try:
        return future.result()
    except UserError as error:
        unreadable.add(entry.id, error)
        return None
