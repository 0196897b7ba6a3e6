"""`rge index`: make an index of a folder or a table, or bring one up to date.

    rge index photos out=gallery checkpoint=demo
    rge index photos out=gallery                  # later: only what is new, changed or gone
    rge index photos out=gallery watch=true       # the same whenever something changes, until Ctrl-C

What is embedded is written every few hundred items, so a command that was stopped goes on where it was.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.options import IndexOptions
from rge.index.sources import Source, read_source

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.reading import Prepared, Reader, Unreadable
    from rge.index.store import Index, Row

WATCH_S = 2.0
"""Between two looks at what is watched; a file that is still written is left until it is the same twice."""


def main(words: list[str]) -> int:
    """Run the command."""
    asked = parse_options(IndexOptions, positional(words, "src"), "rge index FOLDER")
    if asked.watch and asked.remove:
        raise UserError(
            "watch=true keeps an index up to date, remove=true takes a source out of it: give one of them"
        )
    from rge.index.store import writing

    if asked.remove:
        with writing(asked.out):
            return take_out(asked)
    with writing(asked.out):
        source = read_source(asked.src, id=asked.id, text=asked.text, image=asked.image)
        _unreadable(asked, source).check()
        index, reader = opened(asked)
        update(asked, source, index, reader)
    if asked.watch:
        watch(asked, source, index, reader)
    return 0


def take_out(asked: IndexOptions) -> int:
    """Remove a source, which may be gone."""
    from rge.index.store import Index, SearchIndexError

    index = Index.open(asked.out)
    name, held = os.path.abspath(asked.src.expanduser()), index.sources()
    if name not in held:
        raise SearchIndexError(
            f"{asked.out} holds nothing of {name}; it holds: {', '.join(held) or 'nothing'}"
        )
    index.remove(name)
    index.refresh(asked.ann_from)
    print(f"{asked.out}: {held[name]} items of {name} removed, {len(index)} left")  # noqa: T201
    return 0


def _unreadable(asked: IndexOptions, source: Source) -> "Unreadable":
    from rge.index.reading import Unreadable

    return Unreadable(len(source.entries) + len(source.faults), asked.max_unreadable, dict(source.faults))


def update(asked: IndexOptions, source: Source, index: "Index", reader: "Reader") -> None:
    """Embed what is new or changed, and remove what is gone."""
    from rge.index.store import DEPTH

    unreadable = _unreadable(asked, source)
    try:
        unreadable.check()
        told = bring_up_to_date(index, source, reader, unreadable)
    finally:
        unreadable.write(asked.unreadable)
    measured = index.refresh(asked.ann_from)
    if unreadable.faults:
        count = f"{len(unreadable.faults)} of {unreadable.total} items are unreadable and not in the index"
        if source.unseen:
            count += ", but for what it held of them and of what lies below them"
        print(f"{count}:\n{unreadable.listed()}", file=sys.stderr)  # noqa: T201
    passed = f", {source.passed_over} other files passed over" if source.passed_over else ""
    print(f"{asked.out}: {told}; {len(index)} items{passed}", flush=True)  # noqa: T201
    if measured is None:
        print("search is exact", flush=True)  # noqa: T201
    else:
        print(  # noqa: T201
            f"search is approximate: recall@{DEPTH} {measured.recall:.3f} against exact search over {measured.queries} rows, "
            f"{measured.ann_ms:.1f} ms instead of {measured.exact_ms:.1f}; exact=true passes it by",
            flush=True,
        )


def watch(asked: IndexOptions, source: Source, index: "Index", reader: "Reader") -> NoReturn:
    """Look again every `WATCH_S` seconds until a signal ends it; files that still change are left to be finished."""
    from rge.index.store import writing

    def stamps(source: Source) -> dict[str, str]:
        return {entry.id: entry.stamp for entry in source.entries} | source.faults

    done = before = stamps(source)
    said = ""
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
            before, said = now, ""
        except UserError as error:  # a disk that is not mounted, another writer: perhaps better next time
            if str(error) != said:
                print(f"error: {error}; still watching", file=sys.stderr, flush=True)  # noqa: T201
            said = str(error)


def opened(asked: IndexOptions) -> "tuple[Index, Reader]":
    """The index, made where there is none, and what embeds as it was made."""
    index, embedder = _with_checkpoint(asked)
    from rge.index.reading import Reader

    reader = Reader(
        embedder,
        dimensions=index.about["dimensions"],
        batch_size=asked.batch_size,
        thumbnail_px=asked.thumbnail_px,
        captions=index.about["captions"] == "embed",
    )
    return index, reader


def _with_checkpoint(asked: IndexOptions) -> "tuple[Index, Embedder]":
    from rge.embedder import Embedder
    from rge.index.store import Index, SearchIndexError

    if not Index.exists(asked.out):
        if asked.checkpoint is None:
            raise SearchIndexError(f"there is no index at {asked.out} yet: give checkpoint=... to make one")
        embedder = Embedder.from_pretrained(asked.checkpoint)
        embedder.check_dimensions(asked.dimensions)
        index = Index.create(
            asked.out,
            checkpoint=remembered(asked.checkpoint),
            checkpoint_hash=embedder.checkpoint_hash,
            dimensions=asked.dimensions or embedder.size,
            captions=asked.captions or "show",
        )
        return index, embedder
    index = Index.open(asked.out)
    for key in ("captions", "dimensions"):
        wanted, has = getattr(asked, key), index.about[key]
        if wanted not in (None, has):
            raise SearchIndexError(
                f"{asked.out} was made with {key}={has}, not {wanted}: leave it out, or make another index"
            )
    checkpoint = asked.checkpoint or index.about["checkpoint"]
    embedder = Embedder.from_pretrained(checkpoint)
    index.check(checkpoint, embedder.checkpoint_hash)
    return index, embedder


def remembered(checkpoint: str) -> str:
    """A checkpoint as an index keeps its name: a directory by its whole path, so that it is found from elsewhere too."""
    path = Path(checkpoint).expanduser()
    return str(path.resolve()) if path.is_dir() else checkpoint


def bring_up_to_date(index: "Index", source: Source, reader: "Reader", unreadable: "Unreadable") -> str:
    """Make the index hold what the source holds.

    Args:
        index: to change.
        source: as it is now.
        reader: embeds as the index was made.
        unreadable: what cannot be read is noted there, and leaves the index.

    Returns:
        What was done, in words.
    """
    from tqdm import tqdm

    known = index.known(source.name)
    missing = known.keys() - {entry.id for entry in source.entries}
    kept = {name for name in missing if source.may_hold(name)}
    todo = [entry for entry in source.entries if known.get(entry.id, ("",))[0] != entry.stamp]
    held = index.digests() if todo else set()
    if todo:
        index.declare(entry.metadata for entry in source.entries)
    added = changed = again = unfit = 0
    with tqdm(total=len(todo), unit="item", disable=not sys.stderr.isatty()) as bar:
        for window in reader.read(todo, unreadable, held):
            there = [one for one in window if one is not None]
            vectors = index.vectors_of({one.content.digest for one in there} & held)
            fresh = {one.content.digest: one for one in there if one.content.digest not in vectors}
            again += sum(
                one.content.digest in vectors and one.content.digest != known.get(one.entry.id, ("", ""))[1]
                for one in there
            )
            vectors |= {one.content.digest: one.vector for one in reader.vectors(list(fresh.values()))}
            unfit += index.put([_row(source, one, vectors[one.content.digest]) for one in there])
            held |= fresh.keys()
            added += sum(one.entry.id not in known for one in there)
            changed += sum(
                one.content.digest != known.get(one.entry.id, ("", one.content.digest))[1] for one in there
            )
            bar.update(len(window))
    lost = known.keys() & unreadable.faults.keys() - kept
    index.remove(
        source.name, (missing - kept) | lost
    )  # what cannot be read any more is not what was embedded
    unchanged = len(known) - len(missing) - len(lost - missing) - changed
    told = f"{added} added, {changed} changed, {len((missing - kept) | lost)} removed, {unchanged} unchanged"
    if again:
        told += f", {again} not embedded again: the index knows their content"
    if unfit:
        told += f", {unfit} values of other types than their column's, which where= does not see"
    return told + (f", {len(kept)} kept that lie where nothing can be read" if kept else "")


def _row(source: Source, one: "Prepared", vector: np.ndarray) -> "Row":
    from rge.index.store import Row

    entry, content = one.entry, one.content
    return Row(
        source.name,
        entry.id,
        entry.stamp,
        content.digest,
        vector,
        content.text,
        entry.image,
        content.facts | entry.metadata,
        content.thumbnail,
    )


if __name__ == "__main__":
    start(main)
