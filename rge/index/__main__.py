"""`rge index`: make an index of a folder or a table, or bring one up to date.

    rge index photos out=gallery checkpoint=demo
    rge index photos out=gallery                  # later: only what is new, changed or gone

What is embedded is written every few hundred items, so a command that was stopped goes on where it was.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rge.common.commands import start
from rge.common.options import parse_options, positional
from rge.index.options import IndexOptions
from rge.index.sources import Content, Entry, Source, read_source

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.reading import Reader, Unreadable
    from rge.index.store import Index, Row


def main(words: list[str]) -> int:
    """Run the command."""
    asked = parse_options(IndexOptions, positional(words, "src"), "rge index FOLDER")
    from rge.index.store import writing

    with writing(asked.out):
        return take_out(asked) if asked.remove else update(asked)


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


def update(asked: IndexOptions) -> int:
    """Embed what is new or changed, and remove what is gone."""
    source = read_source(asked.src, id=asked.id, text=asked.text, image=asked.image)
    from rge.index.reading import Reader, Unreadable
    from rge.index.store import DEPTH

    unreadable = Unreadable(
        len(source.entries) + len(source.faults), asked.max_unreadable, dict(source.faults)
    )
    unreadable.check()
    index, embedder = opened(asked)
    reader = Reader(
        embedder,
        dimensions=index.about["dimensions"],
        batch_size=asked.batch_size,
        thumbnail_px=asked.thumbnail_px,
        captions=index.about["captions"] == "embed",
    )
    try:
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
    print(f"{asked.out}: {told}; {len(index)} items{passed}")  # noqa: T201
    if measured is None:
        print("search is exact")  # noqa: T201
    else:
        print(  # noqa: T201
            f"search is approximate: recall@{DEPTH} {measured.recall:.3f} against exact search over {measured.queries} rows, "
            f"{measured.ann_ms:.1f} ms instead of {measured.exact_ms:.1f}; exact=true passes it by"
        )
    return 0


def opened(asked: IndexOptions) -> "tuple[Index, Embedder]":
    """The index, made where there is none, and the checkpoint it was or will be made with."""
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
    gone = missing - kept
    index.remove(source.name, gone)
    todo = [entry for entry in source.entries if known.get(entry.id, ("",))[0] != entry.stamp]
    added = changed = place = 0
    lost: set[str] = set()
    with tqdm(total=len(todo), unit="item", disable=not sys.stderr.isatty()) as bar:
        for window in reader.read(todo, unreadable):
            entries = todo[place : place + len(window)]
            place += len(window)
            there = [
                (entry, content)
                for entry, content in zip(entries, window, strict=True)
                if content is not None
            ]
            same = [pair for pair in there if known.get(pair[0].id, ("", ""))[1] == pair[1].digest]
            vectors = index.vectors(source.name, [entry.id for entry, _ in same])
            rows = [_row(source, entry, content, vectors[entry.id]) for entry, content in same]
            fresh = [(entry, content) for entry, content in there if entry.id not in vectors]
            for one in reader.vectors(fresh, unreadable):
                rows.append(_row(source, one.entry, one.content, one.vector))
                added, changed = added + (one.entry.id not in known), changed + (one.entry.id in known)
            index.put(rows)
            lost |= {entry.id for entry in entries} - {row.id for row in rows}
            bar.update(len(window))
    lost &= known.keys()
    index.remove(source.name, lost)  # what cannot be read any more is not what was embedded
    unchanged = len(known) - len(missing) - len(lost) - changed
    told = f"{added} added, {changed} changed, {len(gone) + len(lost)} removed, {unchanged} unchanged"
    return told + (f", {len(kept)} kept that lie where nothing can be read" if kept else "")


def _row(source: Source, entry: Entry, content: Content, vector: np.ndarray) -> "Row":
    from rge.index.store import Row

    return Row(
        source.name,
        entry.id,
        entry.stamp,
        content.digest,
        vector,
        content.text,
        entry.image,
        entry.metadata,
        content.thumbnail,
    )


if __name__ == "__main__":
    start(main)
