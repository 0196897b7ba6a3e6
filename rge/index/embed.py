"""`rge embed`: embed a folder or a table into one Parquet file; resumable.

    rge embed photos out=photos.parquet checkpoint=demo

Finished rows are kept in ``OUT.parts``; the last step merges them and removes that folder.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.commands import progress_bar, start
from rge.common.errors import UserError
from rge.common.files import held, read_json, replacing, write_json
from rge.common.options import parse_options, positional
from rge.index.options import EmbedOptions, blocks_of, on_any_machine
from rge.index.sources import Entry, Source, Unreadable, source_of

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.reading import Embedded, Reader

PART_ROWS = 4096
"""Rows of a finished part: what a kill costs at most."""
ABOUT = "about.json"
SETTINGS = ("side", "mode", "instruction", "dimensions")
"""Arguments of `Reader`."""


def main(words: list[str]) -> int:
    """Run the command."""
    options = parse_options(EmbedOptions, positional(words, "src"), "rge embed FOLDER")
    if options.out.suffix != ".parquet":
        raise UserError(f"out={options.out} must end in .parquet")
    if options.out.exists():
        raise UserError(f"{options.out} already exists: delete it, or give another out=")
    if options.side == "document" and options.instruction is not None:
        raise UserError("instruction= only applies to queries: set side=query")
    if options.engine == "ray":
        on_any_machine(options)
    source = source_of(options)
    parts = options.out.with_name(options.out.name + ".parts")
    with held(parts):
        return embed(options, source, parts)


def embed(options: EmbedOptions, source: Source, parts: Path) -> int:
    """Embed what no part contains yet, then merge the parts."""
    from rge.embedder import Embedder

    embedder = Embedder.from_pretrained(options.checkpoint, base=options.base).for_task(options.task)
    embedder.check_dimensions(options.dimensions)
    settings = {key: getattr(options, key) for key in SETTINGS}
    checkpoint = {"checkpoint": options.checkpoint, "checkpoint_hash": embedder.checkpoint_hash}
    about = checkpoint | settings | {"task": options.task, "src": source.name}
    _check_same_settings(parts, about)
    with Unreadable.noted(source, options) as unreadable:
        reader = _reader(options, embedder)
        _embed_missing(options, reader, source, parts, unreadable)
    unreadable.report()
    if source.skipped:
        print(f"skipped: {source.skipped}", file=sys.stderr)  # noqa: T201
    size = options.dimensions or embedder.size
    fields = {"id": pa.string(), "vector": pa.list_(pa.float32(), size), "rationale": pa.string()}
    if reader.mode == "direct":
        del fields["rationale"]
    rows = _merge_parts(options.out, parts, source, pa.schema(fields, metadata={"rge": json.dumps(about)}))
    shutil.rmtree(parts)
    print(f"written: {options.out}, {rows} vectors of {size}")  # noqa: T201
    return 0


def _reader(options: EmbedOptions, embedder: "Embedder") -> "Reader":
    from rge.index.reading import Reader

    settings: dict[str, Any] = {key: getattr(options, key) for key in SETTINGS}
    return Reader(
        embedder, batch_size=options.batch_size, max_file_pixels=options.max_file_pixels, **settings
    )


def _check_same_settings(parts: Path, about: dict[str, Any]) -> None:
    """Refuse to continue a command that has embedded something with other settings."""
    before = read_json(parts / ABOUT)
    if before is None or not any(parts.glob("*.parquet")):
        write_json(parts / ABOUT, about)
        return
    differs = [key for key, value in about.items() if before.get(key) != value and key != "checkpoint"]
    if differs:
        changes = ", ".join(f"{key}: {before.get(key)!r}, now {about[key]!r}" for key in differs)
        raise UserError(
            f"{parts} was started with other settings ({changes}): continue with the same settings, delete it, or give another out="
        )


def _embed_missing(
    options: EmbedOptions, reader: "Reader", source: Source, parts: Path, unreadable: Unreadable
) -> None:
    current = {(entry.id, entry.stamp) for entry in source.entries}
    finished = sorted(parts.glob("*.parquet"))
    keys = (key for path in finished for key in _keys(pq.read_table(path, columns=["id", "stamp"])))
    done = {name for name, stamp in keys if (name, stamp) in current}
    if done:
        print(f"{len(done)} of {unreadable.total} items were embedded before", file=sys.stderr)  # noqa: T201
    todo = [entry for entry in source.entries if entry.id not in done]
    numbers = count(int(finished[-1].stem) + 1 if finished else 0)
    if options.engine == "ray":
        # Blocks of all items: what was embedded before does not change which others the rest is embedded with.
        blocks = [
            [entry for entry in block if entry.id not in done]
            for block in blocks_of(source.entries, options.batch_size)
        ]
        _embed_on_cluster(options, [block for block in blocks if block], parts, next(numbers), unreadable)
        return
    pending: list[Embedded] = []
    try:
        with progress_bar(total=unreadable.total, initial=len(done), unit="item") as bar:
            for window in reader.embed(todo, unreadable):
                pending += window
                bar.update(len(window))
                if len(pending) >= PART_ROWS:
                    _write(parts / f"{next(numbers):06d}.parquet", pending)
                    pending = []
    finally:
        if pending:  # after Ctrl-C and after an error too
            _write(parts / f"{next(numbers):06d}.parquet", pending)


def _embed_on_cluster(
    options: EmbedOptions, blocks: Sequence[Sequence[Entry]], parts: Path, first: int, unreadable: Unreadable
) -> None:
    """Have each block embedded and written as a part, the next after the first number on, by one of Ray's actors."""
    from rge.distributed.ray_data import mapped

    num_todo = sum(map(len, blocks))
    with progress_bar(total=unreadable.total, initial=unreadable.total - num_todo, unit="item") as bar:
        jobs = [(parts / f"{number:06d}.parquet", block) for number, block in enumerate(blocks, start=first)]
        for num_done, faults in mapped(partial(_worker, options), jobs, address=options.address):
            for name, reason in faults.items():
                unreadable.add(name, reason)
            bar.update(num_done)


def _worker(options: EmbedOptions) -> Callable[[tuple[Path, Sequence[Entry]]], tuple[int, dict[str, str]]]:
    """Embeds a block and writes it; returns the number of its items, and those that are unreadable."""
    from rge.embedder import Embedder

    embedder = Embedder.from_pretrained(options.checkpoint, base=options.base).for_task(options.task)
    reader = _reader(options, embedder)

    def work(job: tuple[Path, Sequence[Entry]]) -> tuple[int, dict[str, str]]:
        path, entries = job
        unreadable = Unreadable(len(entries), 1.0)  # the share of all counts
        rows = [row for window in reader.embed(entries, unreadable) for row in window]
        if rows:
            _write(path, rows)
        return len(entries), unreadable.faults

    return work


def _keys(part: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(part["id"].to_pylist(), part["stamp"].to_pylist(), strict=True)


def _write(path: Path, rows: "Sequence[Embedded]") -> None:
    vectors = pa.array(np.concatenate([row.vector for row in rows]), pa.float32())
    table = pa.table(
        {
            "id": pa.array([row.entry.id for row in rows], pa.string()),
            "stamp": pa.array([row.entry.stamp for row in rows], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, len(rows[0].vector)),
            "rationale": pa.array([row.rationale or None for row in rows], pa.string()),
        }
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _merge_parts(out: Path, parts: Path, source: Source, schema: pa.Schema) -> int:
    """Merge all parts into one file, without rows whose item has changed or gone since; returns the number of rows."""
    current = {(entry.id, entry.stamp) for entry in source.entries}
    rows = 0
    with replacing(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for path in sorted(parts.glob("*.parquet")):
            table = pq.read_table(path)
            kept = table.filter(pa.array([key in current for key in _keys(table)], pa.bool_()))
            writer.write_table(kept.select(schema.names).cast(schema))
            rows += len(kept)
        if not rows:
            raise UserError("nothing was embedded: no item of the source is readable")
    return rows


if __name__ == "__main__":
    start(main)
