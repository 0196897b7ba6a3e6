"""Tables between the stages: Parquet, in parts, with a schema that is checked when written and when read."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.files import replacing

# Read when daft is imported: it would tell its makers of every run, and draw over our progress bars.
for _switch in ("DAFT_ANALYTICS_ENABLED", "DAFT_PROGRESS_BAR"):
    os.environ.setdefault(_switch, "0")
os.environ.setdefault("DO_NOT_TRACK", "true")

PARTS_A_CORE, ROWS_A_PART = 4, 32
"""How a table is cut for a Ray cluster: so many parts a core, but none of fewer rows than this."""

_S, _I, _F = pa.string(), pa.int32(), pa.float32()

SCHEMAS: dict[str, pa.Schema] = {
    name: pa.schema(list(columns.items()))
    for name, columns in {
        "inspected": {
            "id": _S, "ref": _S, "caption": _S, "stamp": _S, "sha256": _S, "width": _I, "height": _I, "phash": _S,
            "reason": _S,
        },
        "images": {
            "id": _S, "ref": _S, "caption": _S, "sha256": _S, "width": _I, "height": _I, "phash": _S, "cluster": _I,
        },
        "captions": {"id": _S, "caption": _S, "key": _S},
        "generated": {
            "query_id": _S, "image_id": _S, "category": _S, "query": _S, "target_desc": _S, "reasoning": _S,
            "input_desc": _S, "key": _S,
        },
        "filtered": {"query_id": _S, "reasoning": _S, "input_desc": _S, "key": _S},
        "rejected": {"id": _S, "reason": _S, "detail": _S, "key": _S},
        "triplets": {
            "query_id": _S, "candidate_id": _S, "position": _I, "image_rank": _I, "caption_rank": _I,
            "found_by": pa.list_(_S),
        },
        "judgements": {
            "query_id": _S, "candidate_id": _S, "judge": _S, "sample": _I, "verdict": _S, "reasoning": _S, "key": _S,
        },
        "decided": {"query_id": _S, "candidate_id": _S, "majority": _S, "confidence": _F, "negativeness": _F, "state": _S},
        "pool": {"id": _S},
        "shortcuts": {
            "query_id": _S, "category": _S, "split": _S, "probe": _S, "rank": _I, "num_right": _I, "num_ranked": _I,
        },
        "splits": {"query_id": _S, "tsr": pa.float64(), "split": _S, "overlaps": pa.bool_()},
    }.items()
}  # fmt: skip


class TableError(UserError):
    """A table of a stage is not what the next stage needs; the message names file and column."""


def write_rows(path: Path, name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table under another name and rename it, so that a file that exists is whole.

    Raises:
        TableError: the rows do not fit the schema.
        FileError: the disk is full.
    """
    rows = list(rows)
    if rows and (wrong := set(rows[0]) ^ set(SCHEMAS[name].names)):
        raise TableError(f"{path}: columns {sorted(wrong)} are missing from, or not in, the schema {name}")
    write_table(path, pa.Table.from_pylist(rows, schema=SCHEMAS[name]))


@contextmanager
def writing(path: Path, name: str) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Write a table some rows at a time, by what is yielded; the file is there when the block ends well."""
    with replacing(path) as waiting, pq.ParquetWriter(waiting, SCHEMAS[name], compression="zstd") as out:
        yield lambda rows: out.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[name]))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table atomically.

    Raises:
        FileError: it cannot be written.
    """
    with replacing(path) as waiting:
        pq.write_table(table, waiting, compression="zstd")


def read_table(path: Path, name: str) -> pa.Table:
    """Read a file, or all parts in a folder in order, and check the schema.

    Raises:
        TableError: it is missing, broken, or has other columns.
    """
    parts = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    if not parts:
        return SCHEMAS[name].empty_table()
    return pa.concat_tables([_checked(part, name, pq.read_table) for part in parts])


def _checked(part: Path, name: str, read: Callable[[Path], Any]) -> Any:
    try:
        found = read(part)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableError(f"{part} cannot be read: {error}") from None
    schema = getattr(found, "schema", found)
    if not schema.equals(SCHEMAS[name]):
        raise TableError(f"{part}: expected the schema {name}:\n{SCHEMAS[name]}\ngot:\n{schema}")
    return found


def scan(path: Path, name: str, columns: Sequence[str], runner: str) -> Any:
    """Some columns of all parts in a folder as a Daft DataFrame, read when they are needed and not all at once.

    Raises:
        TableError: a part is broken, or has other columns.
    """
    import daft

    _choose_runner(runner)
    parts = sorted(path.glob("part-*.parquet"))
    for part in parts:
        _checked(part, name, pq.read_schema)
    return daft.read_parquet(absolute(map(str, parts))).select(*columns)


def read_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows of `read_table` as dicts."""
    return read_table(path, name).to_pylist()


def daft_frame(table: pa.Table, runner: str):
    """A table as a Daft DataFrame, on this machine or on a Ray cluster."""
    import daft

    _choose_runner(runner)
    frame = daft.from_arrow(table)
    if runner == "ray" and table.num_rows:
        # A table comes as one part, which one worker would do alone.
        parts = min(cluster_size("CPU") * PARTS_A_CORE, -(-table.num_rows // ROWS_A_PART))
        frame = frame.into_partitions(max(1, parts))
    return frame


def cluster_size(resource: str) -> int:
    """How many CPU, GPU or node (resource) the Ray cluster in use has."""
    import ray

    if resource == "node":
        return sum(node["Alive"] for node in ray.nodes())
    return int(ray.cluster_resources().get(resource, 0))


def absolute(refs: Iterable[str]) -> list[str]:
    """Paths (``FILE`` or ``FILE#ID``, see `rge.common.images`) that mean the same in a worker's folder as in ours."""
    return [os.path.join(os.getcwd(), ref) for ref in refs]


@cache
def _choose_runner(runner: str) -> None:
    if runner == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("runner=ray needs Ray: pip install -e '.[ray]', on every node of the cluster")
    import daft

    try:
        daft.set_runner_ray() if runner == "ray" else daft.set_runner_native()
    except daft.exceptions.DaftCoreException as error:
        # Daft allows this once a process; a program that uses Daft itself may have chosen before.
        if "more than once" not in str(error):
            raise
        if (chosen := daft.get_or_infer_runner_type()) != runner:
            raise UserError(
                f"runner={runner}: Daft's runner of this process is {chosen} already, and it can be chosen once only"
            ) from None


def unpacked(frame, names: Iterable[str]):
    """A Daft DataFrame with fields of its column ``found`` as columns."""
    import daft

    for name in names:
        frame = frame.with_column(name, daft.col("found")[name])
    return frame


def from_daft(frame, name: str, order: str | None = None) -> pa.Table:
    """A Daft DataFrame as a table of a schema, sorted by a further column where workers may finish in any order."""
    columns = SCHEMAS[name].names
    table = frame.select(*columns, *([order] if order else [])).to_arrow()
    return (table.sort_by(order).select(columns) if order else table).cast(SCHEMAS[name])
