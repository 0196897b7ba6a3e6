"""`rge embed`: a folder or a table of pictures and texts to one Parquet file, resumable.

    rge embed checkpoint=demo src=photos out=photos.parquet

What is finished stands in ``OUT.parts``; the last step puts it together and removes that folder.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rge.checkpoints.run_lock import InUseError, held
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import replacing, write_json
from rge.common.options import parse_options
from rge.index.options import EmbedOptions
from rge.index.sources import Source, read_source

PART_ROWS = 4096
"""Rows of a finished part: what a kill costs at most."""
ABOUT = "about.json"


class EmbedError(UserError):
    """Vectors cannot be written as asked; the message says what to do."""


def main(words: list[str]) -> int:
    """Run the command."""
    asked = parse_options(EmbedOptions, words, "rge embed")
    if asked.out.suffix != ".parquet":
        raise EmbedError(f"out={asked.out} must end in .parquet")
    if asked.out.exists():
        raise EmbedError(f"{asked.out} is there already: delete it, or give another out=")
    if asked.side == "document" and asked.instruction is not None:
        raise EmbedError("instruction= goes before queries: side=query")
    source = read_source(asked.src, id=asked.id, text=asked.text, image=asked.image)
    parts = asked.out.with_name(asked.out.name + ".parts")
    with ExitStack() as stack:
        try:
            stack.enter_context(held(parts))
        except InUseError as error:
            raise EmbedError(str(error)) from None
        return embed(asked, source, parts)


def embed(asked: EmbedOptions, source: Source, parts: Path) -> int:
    """Embed what no part holds yet, then put the parts together."""
    from tqdm import tqdm

    from rge.embedder import Embedder
    from rge.index.reading import Reader, Unreadable

    embedder = Embedder.from_pretrained(asked.checkpoint)
    embedder.check_dimensions(asked.dimensions)
    reader = Reader(
        embedder,
        side=asked.side,
        mode=asked.mode,
        instruction=asked.instruction,
        dimensions=asked.dimensions,
        batch_size=asked.batch_size,
    )
    about = {
        "checkpoint": asked.checkpoint,
        "checkpoint_hash": embedder.checkpoint_hash,
        **{key: asdict(asked)[key] for key in ("side", "mode", "instruction", "dimensions")},
        "src": source.name,
    }
    _same(parts, about)
    current = {entry.id: entry.stamp for entry in source.entries}
    done = {name for name, _, stamp in _finished(parts) if current.get(name) == stamp}
    todo = [entry for entry in source.entries if entry.id not in done]
    total = len(source.entries) + len(source.faults)
    unreadable = Unreadable(total, asked.max_unreadable, dict(source.faults))
    unreadable.check()
    if done:
        print(f"{len(done)} of {total} items were embedded before", file=sys.stderr)  # noqa: T201
    held_back: list[Any] = []
    number = max((int(path.stem) for path in parts.glob("*.parquet")), default=-1) + 1
    try:
        with tqdm(total=total, initial=len(done), unit="item", disable=not sys.stderr.isatty()) as bar:
            for window in reader.embed(todo, unreadable):
                held_back += window
                bar.update(len(window))
                if len(held_back) >= PART_ROWS:
                    number = _write(parts, number, held_back)
                    held_back = []
    finally:
        _write(parts, number, held_back)  # after Ctrl-C and after an error too
        unreadable.write(asked.unreadable)
    rows = _together(asked.out, parts, current, about)
    shutil.rmtree(parts)
    if unreadable.faults:
        count = f"{len(unreadable.faults)} of {total} items are unreadable"
        print(f"{count}:\n{unreadable.listed()}", file=sys.stderr)  # noqa: T201
    print(f"written: {asked.out}, {rows} vectors of {asked.dimensions or embedder.size}")  # noqa: T201
    return 0


def _same(parts: Path, about: dict[str, Any]) -> None:
    """Raise where other vectors than these were begun."""
    path = parts / ABOUT
    if not path.exists():
        write_json(path, about)
        return
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        begun = {}
    differs = [key for key, value in about.items() if begun.get(key) != value and key != "checkpoint"]
    if differs:
        shown = ", ".join(f"{key}: {begun.get(key)!r}, now {about[key]!r}" for key in differs)
        raise EmbedError(
            f"{parts} was begun otherwise ({shown}): go on as it was begun, delete it, or give another out="
        )


def _finished(parts: Path) -> Iterator[tuple[str, Path, str]]:
    """Name, part and stamp of every row that is embedded."""
    for path in sorted(parts.glob("*.parquet")):
        table = pq.read_table(path, columns=["id", "stamp"])
        for name, stamp in zip(table["id"].to_pylist(), table["stamp"].to_pylist(), strict=True):
            yield name, path, stamp


def _write(parts: Path, number: int, rows: list[Any]) -> int:
    if not rows:
        return number
    size = len(rows[0].vector)
    table = pa.table(
        {
            "id": pa.array([row.entry.id for row in rows], pa.string()),
            "stamp": pa.array([row.entry.stamp for row in rows], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.concatenate([row.vector for row in rows]), pa.float32()), size
            ),
            "rationale": pa.array([row.rationale or None for row in rows], pa.string()),
        }
    )
    with replacing(parts / f"{number:06d}.parquet") as waiting:
        pq.write_table(table, waiting)
    return number + 1


def _together(out: Path, parts: Path, current: dict[str, str], about: dict[str, Any]) -> int:
    """One file of all parts, without rows whose item has changed or gone since."""
    last = {name: path for name, path, stamp in _finished(parts) if current.get(name) == stamp}
    if not last:
        raise EmbedError("nothing was embedded: no item of the source is readable")
    paths = sorted(parts.glob("*.parquet"))
    reasons = any(pq.read_table(path, columns=["rationale"])["rationale"].null_count < pq.read_metadata(path).num_rows
                  for path in paths)  # fmt: skip
    columns = ["id", "vector", *(["rationale"] if reasons else [])]
    schema = pq.read_schema(paths[0])
    schema = pa.schema([schema.field(name) for name in columns], metadata={"rge": json.dumps(about)})
    rows = 0
    with replacing(out) as waiting, pq.ParquetWriter(waiting, schema) as writer:
        for path in paths:
            table = pq.read_table(path)
            keep = [
                last.get(name) == path and current[name] == stamp
                for name, stamp in zip(table["id"].to_pylist(), table["stamp"].to_pylist(), strict=True)
            ]
            kept = table.filter(pa.array(keep)).select(columns).cast(schema)
            writer.write_table(kept)
            rows += len(kept)
    return rows


if __name__ == "__main__":
    start(main)
