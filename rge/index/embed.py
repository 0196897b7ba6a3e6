"""`rge embed`: embed a folder or a table into one Parquet file; resumable.

    rge embed photos out=photos.parquet checkpoint=demo

Finished blocks are kept in ``OUT.parts``; the last step merges them and removes that folder.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.commands import progress_bar, start
from rge.common.errors import UserError
from rge.common.files import held, replacing
from rge.common.options import parse_options, positional
from rge.index.blocks import Finished
from rge.index.options import EmbedOptions
from rge.index.sources import Entry, Source, Unreadable, source_of

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.reading import Embedded, Reader

PART_ROWS = 4096
"""Rows of a finished block of one process: what a kill costs at most."""
SETTINGS = ("side", "mode", "instruction", "dimensions")
"""Arguments of `Reader`."""


def main(words: list[str]) -> int:
    """Run the command."""
    options = parse_options(EmbedOptions, positional(words, "src"), "rge embed FOLDER")
    if options.out.suffix != ".parquet":
        raise UserError("it must end in .parquet", options.out, key="out", kind="format")
    if options.out.exists():
        raise UserError("it already exists: delete it, or give another", options.out, key="out")
    if options.side == "document" and options.instruction is not None:
        raise UserError("it only applies to queries: set side=query", key="instruction")
    source = source_of(options)
    parts = options.out.with_name(options.out.name + ".parts")
    with held(parts):
        return embed(options, source, Finished(parts))


def embed(options: EmbedOptions, source: Source, finished: Finished) -> int:
    """Embed what no finished block contains yet, then merge the blocks."""
    from rge.embedder import Embedder

    embedder = Embedder.from_pretrained(options.checkpoint, base=options.base).for_task(options.task)
    embedder.check_dimensions(options.dimensions)
    settings = {key: getattr(options, key) for key in SETTINGS}
    checkpoint = {"checkpoint": options.checkpoint, "checkpoint_hash": embedder.checkpoint_hash}
    about = checkpoint | settings | {"task": options.task, "src": source.name}
    finished.start(about)
    with Unreadable.noted(source, options) as unreadable:
        reader = _reader(options, embedder)
        _embed_missing(options, reader, source, finished, unreadable)
    unreadable.report()
    if source.skipped:
        print(f"skipped: {source.skipped}", file=sys.stderr)  # noqa: T201
    size = options.dimensions or embedder.size
    fields = {"id": pa.string(), "vector": pa.list_(pa.float32(), size), "rationale": pa.string()}
    if reader.mode == "direct":
        del fields["rationale"]
    schema = pa.schema(fields, metadata={"rge": json.dumps(about)})
    rows = _merge(options.out, finished, source, schema)
    assert rows == sum(entry.id not in unreadable.faults for entry in source.entries)
    finished.remove()
    print(f"written: {options.out}, {rows} vectors of {size}")  # noqa: T201
    return 0


def _reader(options: EmbedOptions, embedder: "Embedder") -> "Reader":
    from rge.index.reading import Reader

    settings: dict[str, Any] = {key: getattr(options, key) for key in SETTINGS}
    return Reader(
        embedder, batch_size=options.batch_size, batch_tokens=options.batch_tokens,
        max_file_pixels=options.max_file_pixels, **settings,
    )  # fmt: skip


def _embed_missing(
    options: EmbedOptions, reader: "Reader", source: Source, finished: Finished, unreadable: Unreadable
) -> None:
    blocks = finished.left(source.entries, options.batch_size)
    done = len(source.entries) - sum(map(len, blocks))
    if done:
        print(f"{done} of {unreadable.total} items were embedded before", file=sys.stderr)  # noqa: T201
    with progress_bar(total=unreadable.total, initial=done, unit="item") as bar:
        if options.engine == "ray":
            from rge.distributed.ray_data import mapped

            work = partial(_worker, options, finished.folder)
            for count, faults in mapped(work, blocks, address=options.address):
                for name, reason in faults.items():
                    unreadable.add(name, reason)
                unreadable.check()
                bar.update(count)
            return
        pending: list[Embedded] = []
        try:
            for window in reader.embed(list(chain.from_iterable(blocks)), unreadable):
                pending += window
                bar.update(len(window))
                if len(pending) >= PART_ROWS:
                    finished.write(_table(pending))
                    pending = []
        finally:
            if pending:  # after Ctrl-C and after an error too
                finished.write(_table(pending))


def _worker(options: EmbedOptions, folder: str) -> Callable[[Sequence[Entry]], tuple[int, dict[str, str]]]:
    """Embeds a block and writes it; returns the number of its items, and those that are unreadable."""
    from rge.embedder import Embedder

    embedder = Embedder.from_pretrained(options.checkpoint, base=options.base).for_task(options.task)
    reader, finished = _reader(options, embedder), Finished(folder)

    def work(entries: Sequence[Entry]) -> tuple[int, dict[str, str]]:
        unreadable = Unreadable(len(entries), 1.0)  # the share of all counts
        rows = [row for window in reader.embed(entries, unreadable) for row in window]
        if rows:
            finished.write(_table(rows))
        return len(entries), unreadable.faults

    return work


def _table(rows: "Sequence[Embedded]") -> pa.Table:
    vectors = pa.array(np.concatenate([row.vector for row in rows]), pa.float32())
    return pa.table(
        {
            "id": pa.array([row.entry.id for row in rows], pa.string()),
            "stamp": pa.array([row.entry.stamp for row in rows], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, len(rows[0].vector)),
            "rationale": pa.array([row.rationale or None for row in rows], pa.string()),
        }
    )


def _merge(out: Path, finished: Finished, source: Source, schema: pa.Schema) -> int:
    """Merge all blocks into one file, without rows whose item has changed or gone since; returns the number of rows."""
    rows = 0
    with replacing(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for table in finished.tables(source.entries):
            writer.write_table(table.select(schema.names).cast(schema))
            rows += len(table)
        if not rows:
            raise UserError("nothing was embedded: no item is readable", source.name, kind="empty")
    return rows


if __name__ == "__main__":
    start(main)
