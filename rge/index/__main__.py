"""`rge index`: build or update an index of a folder or a table.

    rge index photos out=gallery checkpoint=demo
    rge index photos out=gallery                  # later: embeds only what is new or changed
    rge index photos out=gallery watch=true       # the same whenever something changes, until Ctrl-C

Embeddings are written every few seconds, so a stopped command continues where it was.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rge.common.commands import progress_bar, start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.blocks import Finished
from rge.index.options import IndexOptions
from rge.index.rows import Row, as_block, of_block
from rge.index.sources import Entry, Source, Unreadable, source_name, source_of
from rge.index.store import DEPTH, NUM_QUERIES, Index, SearchIndexError, writing
from rge.tables.stores import is_stored

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
        ).about("watch", "remove")
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
    name, sources = source_name(options.src), index.sources()
    if name not in sources:
        raise SearchIndexError(
            f"it contains nothing from it, but {', '.join(sources) or 'nothing'}", options.out, key=name
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
        batch_tokens=options.batch_tokens,
        thumbnail_px=options.thumbnail_px,
        captions=index.about["captions"] == "embed",
        max_file_pixels=options.max_file_pixels,
    )
    return index, reader


def _create(options: IndexOptions) -> "tuple[Index, Embedder]":
    from rge.embedder import Embedder

    if options.checkpoint is None:
        raise SearchIndexError(
            "there is no index yet: give checkpoint=... to make one", options.out, key="checkpoint"
        )
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
    # When files are renamed in turn (a to b, b to c), a row is replaced before the next needs its vector.
    at_start = index.as_of_now()
    index.declare(entry.metadata for entry in source.entries)
    # What a command with engine=ray has finished is taken up by one without, unless that would need a package more.
    finished = None
    if options.engine == "ray" or not is_stored(options.out):
        finished = Finished(f"{options.out.rstrip('/')}.parts")
    if options.engine == "ray" or finished:
        assert finished is not None
        finished.start(index.about | {"src": source.name, "thumbnail_px": options.thumbnail_px})
    blocks = [todo] if finished is None else finished.left(todo, options.batch_size)
    left = list(chain.from_iterable(blocks))
    with progress_bar(total=len(todo), initial=len(todo) - len(left), unit="item") as bar:
        if options.engine == "ray":
            from rge.distributed.ray_data import mapped

            assert finished is not None
            work = partial(_worker, options, source.name, finished.folder, len(left))
            for count, faults in mapped(work, blocks, address=options.address):
                for name, reason in faults.items():
                    unreadable.add(name, reason)
                unreadable.check()
                bar.update(count)
        else:
            with _Commits(index, known) as commits:
                for window in reader.windows(left, unreadable, at_start.digests(len(left))):
                    found = list(_rows_of(window, source.name, at_start, commits.vectors_of))
                    for row, was_known in found:
                        _count(counts, known, row.id, row.digest, was_known)
                    commits.add(row for row, _ in found)
                    bar.update(window.count)
            counts["unfit"] += commits.unfit
    if finished is not None:
        _commit(index, finished, source, todo, known, counts)
    return counts


def _rows_of(
    window: "Window", source: str, at_start: Index, earlier: "Callable[[set[str]], dict[str, np.ndarray]]"
) -> Iterator[tuple[Row, bool]]:
    """Rows of a window, and whether their content was known; `earlier` looks up vectors that came since the start."""
    known = {item.content.digest for item in window.items} - window.vectors.keys()
    vectors = at_start.vectors_of(known)
    vectors |= earlier(known - vectors.keys())
    vectors |= window.vectors
    for item in window.items:
        digest = item.content.digest
        yield Row.of(source, item.entry, item.content, vectors[digest]), digest in known


def _count(
    counts: Counter[str], known: dict[str, tuple[str, str]], id: str, digest: str, was_known: bool
) -> None:
    before = known.get(id, ("", None))[1]
    counts["added"] += before is None
    counts["changed"] += before not in (None, digest)
    counts["again"] += was_known and digest != before


def _worker(
    options: IndexOptions, source: str, folder: str, num_left: int
) -> "Callable[[Sequence[Entry]], tuple[int, dict[str, str]]]":
    """Embeds a block and writes its rows; returns the number of its items, and those that are unreadable.

    The index exists already, and does not change before all blocks are finished. Contents that are in several blocks are embedded in each.
    """
    index, reader = opened(options)
    index, finished = index.as_of_now(), Finished(folder)
    digests = index.digests(num_left)

    def work(entries: "Sequence[Entry]") -> tuple[int, dict[str, str]]:
        unreadable = Unreadable(len(entries), 1.0)  # the share of all counts
        vectors: dict[str, np.ndarray] = {}
        found: list[tuple[Row, bool]] = []
        for window in reader.windows(entries, unreadable, digests.copy()):
            vectors.update(window.vectors)
            found += _rows_of(window, source, index, lambda digests: {one: vectors[one] for one in digests})
        if found:
            finished.write(as_block(found))
        return len(entries), unreadable.faults

    return work


def _commit(
    index: Index,
    finished: Finished,
    source: Source,
    todo: Sequence[Entry],
    known: dict[str, tuple[str, str]],
    counts: Counter[str],
) -> None:
    """Put the rows of finished blocks into the index, the new ones by one commit, the changed ones by another; remove the blocks."""

    def batches(entries: Sequence[Entry]) -> Iterator[list[Row]]:
        for table in finished.tables(entries):
            found = list(of_block(table, source.name))
            for row, was_known in found:
                _count(counts, known, row.id, row.digest, was_known)
            yield [row for row, _ in found]

    for is_new in (True, False) if finished else ():
        some = [entry for entry in todo if (entry.id not in known) is is_new]
        counts["unfit"] += index.put_all(batches(some), new=is_new)
    finished.remove()


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
