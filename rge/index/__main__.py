"""`rge index`: build or update an index of a folder or a table.

    rge index photos out=gallery checkpoint=demo
    rge index photos out=gallery                  # later: embeds only what is new or changed
    rge index photos out=gallery watch=true       # the same whenever something changes, until Ctrl-C

Embeddings are written every few seconds, so a stopped command continues where it was.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rge.common.commands import progress_bar, start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.options import IndexOptions, blocks_of, on_any_machine
from rge.index.rows import Row
from rge.index.sources import Entry, Source, Unreadable, source_of
from rge.index.store import DEPTH, NUM_QUERIES, Index, SearchIndexError, writing

if TYPE_CHECKING:
    import numpy as np

    from rge.embedder import Embedder
    from rge.index.reading import Reader, Window

WATCH_S = 2.0
"""Seconds between two listings of a watched source; a file that is still growing waits until two listings agree."""

COMMIT_ROWS, COMMIT_S = 4096, 10.0
"""Rows that wait for a commit, and how long, at most: many small commits slow an index down."""


def main(words: list[str]) -> int:
    """Run the command."""
    options = parse_options(IndexOptions, positional(words, "src"), "rge index FOLDER")
    if options.watch and options.remove:
        raise UserError(
            "watch=true keeps an index up to date, remove=true takes a source out of it: give one of them"
        )
    if options.engine == "ray":
        on_any_machine(options)
    with writing(options.out):
        if options.remove:
            return remove_source(options)
        source = source_of(options)
        with Unreadable.noted(source, options):  # refuses a bad source before the model is loaded
            index, reader = opened(options)
        update(options, source, index, reader)
    if options.watch:
        watch(options, source, index, reader)
    return 0


def remove_source(options: IndexOptions) -> int:
    """Remove a source, even if it no longer exists."""
    index = Index.open(options.out)
    name, sources = os.path.abspath(options.src.expanduser()), index.sources()
    if name not in sources:
        raise SearchIndexError(
            f"{options.out} contains nothing from {name}; it contains: {', '.join(sources) or 'nothing'}"
        )
    index.remove(name)
    index.refresh(options.ann_from)
    print(f"{options.out}: {sources[name]} items of {name} removed, {len(index)} left")  # noqa: T201
    return 0


def update(options: IndexOptions, source: Source, index: Index, reader: "Reader") -> None:
    """Embed new and changed items, remove deleted ones, and print what changed."""
    known = index.known(source.name)
    with Unreadable.noted(source, options) as unreadable:
        counts = _embed(index, source, reader, unreadable, known, options)
    missing = known.keys() - {entry.id for entry in source.entries}
    kept = {name for name in missing if source.may_hold(name)}
    gone = missing | known.keys() & unreadable.faults.keys()
    index.remove(source.name, gone - kept)
    recall = index.refresh(options.ann_from)
    but = ", except those indexed before and everything below unreadable folders" if source.unseen else ""
    unreadable.report(f" and not in the index{but}")
    changes = (
        f"{counts['added']} added, {counts['changed']} changed, {len(gone - kept)} removed, "
        f"{len(known) - len(gone) - counts['changed']} unchanged"
    )
    for count, what in (
        (counts["again"], "not embedded again: their content is already in the index"),
        (counts["unfit"], "values whose type differs from their column's, which where= ignores"),
        (len(kept), "kept although their folder cannot be read"),
    ):
        changes += f", {count} {what}" if count else ""
    print(f"{options.out}: {changes}; {len(index)} items", flush=True)  # noqa: T201
    if source.skipped:
        print(f"skipped: {source.skipped}", flush=True)  # noqa: T201
    search = "search is exact"
    if recall is not None:
        search = (
            f"search is approximate: recall@{DEPTH} {recall:.3f} against exact search over {min(NUM_QUERIES, len(index))} rows; "
            "exact=true bypasses it"
        )
    print(search, flush=True)  # noqa: T201


def watch(options: IndexOptions, source: Source, index: Index, reader: "Reader") -> NoReturn:
    """Check the source every `WATCH_S` seconds and update once it has stopped changing, until a signal ends it."""

    def stamps(source: Source) -> dict[str, str]:
        return {entry.id: entry.stamp for entry in source.entries} | source.faults

    done = before = stamps(source)
    reported = ""
    print(f"watching {options.src}; Ctrl-C ends it", flush=True)  # noqa: T201
    while True:
        time.sleep(WATCH_S)
        try:
            source = source_of(options)
            now = stamps(source)
            if now != done and now == before:
                with writing(options.out):
                    if Index.open(options.out).about != index.about:
                        sys.exit(f"error: {options.out} was re-created: start this command again")
                    update(options, source, index, reader)
                done = now
            before, reported = now, ""
        except UserError as error:  # a disk that is not mounted, another writer: retried
            if str(error) != reported:
                print(f"error: {error}; still watching", file=sys.stderr, flush=True)  # noqa: T201
            reported = str(error)


def opened(options: IndexOptions) -> "tuple[Index, Reader]":
    """The index, created if it does not exist, and a reader with its settings."""
    from rge.index.reading import Reader

    if Index.exists(options.out):
        index = Index.open(options.out)
        index.check_made_with(captions=options.captions, dimensions=options.dimensions, task=options.task)
        embedder = index.embedder(options.checkpoint, options.base)
    else:
        index, embedder = _create(options)
    reader = Reader(
        embedder,
        dimensions=index.about["dimensions"],
        batch_size=options.batch_size,
        thumbnail_px=options.thumbnail_px,
        captions=index.about["captions"] == "embed",
        max_file_pixels=options.max_file_pixels,
    )
    return index, reader


def _create(options: IndexOptions) -> "tuple[Index, Embedder]":
    from rge.embedder import Embedder

    if options.checkpoint is None:
        raise SearchIndexError(f"there is no index at {options.out} yet: give checkpoint=... to make one")
    embedder = Embedder.from_pretrained(options.checkpoint, base=options.base).for_task(options.task)
    embedder.check_dimensions(options.dimensions)
    folder = Path(options.checkpoint).expanduser()
    index = Index.create(
        options.out,
        # A folder's absolute path can be found from elsewhere too.
        checkpoint=str(folder.resolve()) if folder.is_dir() else options.checkpoint,
        checkpoint_hash=embedder.checkpoint_hash,
        dimensions=options.dimensions or embedder.size,
        captions=options.captions or "show",
        task=options.task,
    )
    return index, embedder


def _embed(
    index: Index,
    source: Source,
    reader: "Reader",
    unreadable: Unreadable,
    known: dict[str, tuple[str, str]],
    options: IndexOptions,
) -> Counter[str]:
    """Put new and changed entries into the index; content that it already has is not embedded again."""
    counts = Counter[str]()
    todo = [entry for entry in source.entries if known.get(entry.id, ("",))[0] != entry.stamp]
    if not todo:
        return counts
    at_start = index.as_of_now()
    index.declare(entry.metadata for entry in source.entries)
    if options.engine == "ray":
        windows = _on_cluster(options, todo, unreadable)
    else:
        windows = reader.windows(todo, unreadable, at_start.digests(len(todo)))
    with progress_bar(total=len(todo), unit="item") as bar, _Commits(index, known) as commits:
        for window in windows:
            known_before = {item.content.digest for item in window.items} - window.vectors.keys()
            # Of the index at the start: when files are renamed in turn (a to b, b to c), a row is replaced before the next needs its vector.
            vectors = at_start.vectors_of(known_before)
            vectors |= commits.vectors_of(known_before - vectors.keys())
            vectors |= window.vectors
            for item in window.items:
                digest, before = item.content.digest, known.get(item.entry.id, ("", None))[1]
                counts["added"] += before is None
                counts["changed"] += before not in (None, digest)
                counts["again"] += digest in known_before and digest != before
            commits.add(
                Row.of(source, item.entry, item.content, vectors[item.content.digest])
                for item in window.items
            )
            bar.update(window.count)
    counts["unfit"] += commits.unfit
    return counts


def _on_cluster(options: IndexOptions, todo: Sequence[Entry], unreadable: Unreadable) -> "Iterator[Window]":
    """As `Reader.windows`, by Ray's actors; contents that are in several blocks are embedded in each."""
    from rge.distributed.ray_data import mapped

    blocks = list(blocks_of(todo, options.batch_size))
    for windows, faults in mapped(partial(_worker, options), blocks, address=options.address):
        for name, reason in faults.items():
            unreadable.add(name, reason)
        yield from windows


def _worker(options: IndexOptions) -> "Callable[[Sequence[Entry]], tuple[list[Window], dict[str, str]]]":
    """Embeds a block; the index exists already."""
    index, reader = opened(options)
    digests = index.as_of_now().digests(0)

    def work(entries: Sequence[Entry]) -> "tuple[list[Window], dict[str, str]]":
        unreadable = Unreadable(len(entries), 1.0)  # the share of all counts
        return list(reader.windows(entries, unreadable, digests)), unreadable.faults

    return work


class _Commits:
    """Rows on their way into an index, committed `COMMIT_ROWS` at a time, after `COMMIT_S`, and at the end, whatever ends it."""

    def __init__(self, index: Index, known: Container[str]):
        self._index, self._known, self._rows, self._since = index, known, list[Row](), time.monotonic()
        self.unfit = 0

    def __enter__(self) -> "_Commits":
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()

    def add(self, rows: Iterable[Row]) -> None:
        self._rows += rows
        if len(self._rows) >= COMMIT_ROWS or time.monotonic() - self._since > COMMIT_S:
            self.commit()

    def commit(self) -> None:
        rows, self._rows = self._rows, []
        for is_new in (True, False):
            some = [row for row in rows if (row.id not in self._known) is is_new]
            self.unfit += self._index.put(some, new=is_new)
        self._since = time.monotonic()

    def vectors_of(self, digests: AbstractSet[str]) -> "dict[str, np.ndarray]":
        """Vectors of contents that were added, by digest."""
        vectors = {row.digest: row.vector for row in self._rows if row.digest in digests}
        return vectors | self._index.vectors_of(digests - vectors.keys())


if __name__ == "__main__":
    start(main)
