"""`rge index`: build or update an index of a folder or a table.

    rge index photos out=gallery checkpoint=demo
    rge index photos out=gallery                  # later: embeds only what is new or changed
    rge index photos out=gallery watch=true       # the same whenever something changes, until Ctrl-C

Embeddings are written every few hundred items, so a stopped command continues where it was.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.options import IndexOptions
from rge.index.sources import Source, read_source
from rge.index.store import DEPTH, Index, SearchIndexError, writing

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.reading import Reader, Unreadable

WATCH_S = 2.0
"""Between two listings of a watched source; a file that is being written is left alone until two listings agree."""


def main(words: list[str]) -> int:
    """Run the command."""
    asked = parse_options(IndexOptions, positional(words, "src"), "rge index FOLDER")
    if asked.watch and asked.remove:
        raise UserError(
            "watch=true keeps an index up to date, remove=true takes a source out of it: give one of them"
        )
    with writing(asked.out):
        if asked.remove:
            return remove_source(asked)
        from rge.index.reading import Unreadable  # after --help, which needs no torch

        source = read_source(asked.src, id=asked.id, text=asked.text, image=asked.image)
        Unreadable.of(source, asked).check()
        index, reader = opened(asked)
        update(asked, source, index, reader)
    if asked.watch:
        watch(asked, source, index, reader)
    return 0


def remove_source(asked: IndexOptions) -> int:
    """Remove a source, even if it no longer exists."""
    index = Index.open(asked.out)
    name, held = os.path.abspath(asked.src.expanduser()), index.sources()
    if name not in held:
        raise SearchIndexError(
            f"{asked.out} contains nothing from {name}; it contains: {', '.join(held) or 'nothing'}"
        )
    index.remove(name)
    index.refresh(asked.ann_from)
    print(f"{asked.out}: {held[name]} items of {name} removed, {len(index)} left")  # noqa: T201
    return 0


def update(asked: IndexOptions, source: Source, index: Index, reader: "Reader") -> None:
    """Embed new and changed items, and remove deleted ones."""
    from rge.index.reading import Unreadable

    unreadable = Unreadable.of(source, asked)
    try:
        unreadable.check()
        told = update_index(index, source, reader, unreadable)
    finally:
        unreadable.write(asked.unreadable)
    measured = index.refresh(asked.ann_from)
    kept = ", except those indexed before and everything below unreadable folders" if source.unseen else ""
    unreadable.report(f" and not in the index{kept}")
    passed = f", {source.num_skipped} other files skipped" if source.num_skipped else ""
    print(f"{asked.out}: {told}; {len(index)} items{passed}", flush=True)  # noqa: T201
    search = "search is exact"
    if measured is not None:
        search = (
            f"search is approximate: recall@{DEPTH} {measured.recall:.3f} against exact search over {measured.queries} rows, "
            f"{measured.ann_ms:.1f} ms instead of {measured.exact_ms:.1f}; exact=true bypasses it"
        )
    print(search, flush=True)  # noqa: T201


def watch(asked: IndexOptions, source: Source, index: Index, reader: "Reader") -> NoReturn:
    """Update every `WATCH_S` seconds once the source has changed and stopped changing, until a signal ends it."""

    def stamps(source: Source) -> dict[str, str]:
        return {entry.id: entry.stamp for entry in source.entries} | source.faults

    done = before = stamps(source)
    reported = ""
    print(f"watching {asked.src}; Ctrl-C ends it", flush=True)  # noqa: T201
    while True:
        time.sleep(WATCH_S)
        try:
            source = read_source(asked.src, id=asked.id, text=asked.text, image=asked.image)
            now = stamps(source)
            if now != done and now == before:
                with writing(asked.out):
                    update(asked, source, index, reader)
                done = now
            before, reported = now, ""
        except UserError as error:  # a disk that is not mounted, another writer: retried
            if str(error) != reported:
                print(f"error: {error}; still watching", file=sys.stderr, flush=True)  # noqa: T201
            reported = str(error)


def opened(asked: IndexOptions) -> "tuple[Index, Reader]":
    """The index, created if it does not exist, and a reader that embeds as it was made."""
    from rge.index.reading import Reader

    index, embedder = _open(asked) if Index.exists(asked.out) else _create(asked)
    reader = Reader(
        embedder,
        dimensions=index.about["dimensions"],
        batch_size=asked.batch_size,
        thumbnail_px=asked.thumbnail_px,
        captions=index.about["captions"] == "embed",
    )
    return index, reader


def _create(asked: IndexOptions) -> "tuple[Index, Embedder]":
    from rge.embedder import Embedder

    if asked.checkpoint is None:
        raise SearchIndexError(f"there is no index at {asked.out} yet: give checkpoint=... to make one")
    embedder = Embedder.from_pretrained(asked.checkpoint, base=asked.base)
    embedder.check_dimensions(asked.dimensions)
    folder = Path(asked.checkpoint).expanduser()
    index = Index.create(
        asked.out,
        checkpoint=str(folder.resolve()) if folder.is_dir() else asked.checkpoint,  # found from elsewhere too
        checkpoint_hash=embedder.checkpoint_hash,
        dimensions=asked.dimensions or embedder.size,
        captions=asked.captions or "show",
    )
    return index, embedder


def _open(asked: IndexOptions) -> "tuple[Index, Embedder]":
    index = Index.open(asked.out)
    for key in ("captions", "dimensions"):
        wanted, has = getattr(asked, key), index.about[key]
        if wanted not in (None, has):
            raise SearchIndexError(
                f"{asked.out} was made with {key}={has}, not {wanted}: leave it out, or make another index"
            )
    return index, index.embedder(asked.checkpoint, asked.base)


def update_index(index: Index, source: Source, reader: "Reader", unreadable: "Unreadable") -> str:
    """Bring the index up to date with the source.

    Returns:
        What was done, in words.
    """
    known = index.known(source.name)
    counts = _embed(index, source, reader, unreadable, known)
    missing = known.keys() - {entry.id for entry in source.entries}
    kept = {name for name in missing if source.may_hold(name)}
    gone = missing | known.keys() & unreadable.faults.keys()
    index.remove(source.name, gone - kept)
    told = (
        f"{counts['added']} added, {counts['changed']} changed, {len(gone - kept)} removed, "
        f"{len(known) - len(gone) - counts['changed']} unchanged"
    )
    for count, what in (
        (counts["again"], "not embedded again: their content is already in the index"),
        (counts["unfit"], "values whose type differs from their column's, which where= ignores"),
        (len(kept), "kept although their folder cannot be read"),
    ):
        told += f", {count} {what}" if count else ""
    return told


def _embed(
    index: Index,
    source: Source,
    reader: "Reader",
    unreadable: "Unreadable",
    known: dict[str, tuple[str, str]],
) -> Counter[str]:
    """Put new and changed entries into the index; content that it already has is not embedded again."""
    from rge.index.reading import row_of

    counts = Counter[str]()
    todo = [entry for entry in source.entries if known.get(entry.id, ("",))[0] != entry.stamp]
    if not todo:
        return counts
    held = index.digests()
    index.declare(entry.metadata for entry in source.entries)
    with tqdm(total=len(todo), unit="item", disable=not sys.stderr.isatty()) as bar:
        for window in reader.read(todo, unreadable, held):
            readable = {one.entry.id: one for one in window if one is not None}
            by_digest = {one.content.digest: one for one in readable.values()}
            vectors = index.vectors_of(by_digest.keys() & held)
            for name, one in readable.items():
                digest, before = one.content.digest, known.get(name, ("", None))[1]
                counts["added"] += before is None
                counts["changed"] += before not in (None, digest)
                counts["again"] += digest in vectors and digest != before
            fresh = reader.vectors([one for digest, one in by_digest.items() if digest not in vectors])
            vectors |= {one.content.digest: one.vector for one in fresh}
            held |= by_digest.keys()
            rows = [
                row_of(source, one.entry, one.content, vectors[one.content.digest])
                for one in readable.values()
            ]
            counts["unfit"] += index.put(rows)
            bar.update(len(window))
    return counts


if __name__ == "__main__":
    start(main)
