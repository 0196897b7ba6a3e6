"""Tables passed between the stages: Parquet, in parts, with schemas checked on reading."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.files import replacing

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
        "queries": {
            "query_id": _S, "image_id": _S, "category": _S, "query": _S, "target_desc": _S, "reasoning": _S,
            "input_desc": _S, "key": _S,
        },
        "valid": {"query_id": _S, "reasoning": _S, "input_desc": _S, "key": _S},
        "rejected": {"id": _S, "reason": _S, "detail": _S, "key": _S},
        "triplets": {
            "query_id": _S, "candidate_id": _S, "position": _I, "image_rank": _I, "caption_rank": _I,
            "found_by": pa.list_(_S),
        },
        "judgements": {
            "query_id": _S, "candidate_id": _S, "judge": _S, "sample": _I, "verdict": _S, "reasoning": _S, "key": _S,
        },
        "decided": {"query_id": _S, "candidate_id": _S, "majority": _S, "confidence": _F, "negativeness": _F, "state": _S},
        "doubted": {"id": _S},
        "pool": {"id": _S},
        "shortcuts": {
            "query_id": _S, "category": _S, "split": _S, "probe": _S, "rank": _I, "num_right": _I, "num_ranked": _I,
        },
        "splits": {"query_id": _S, "tsr": pa.float64(), "split": _S, "overlaps": pa.bool_()},
    }.items()
}  # fmt: skip


OUT = "{out}/"
"""Start of the ``ref`` of a picture in the run's own folder, which may be moved."""


def _schema_name(path: Path) -> str:
    """The schema of a table has the name of its file, or of its folder if it is in parts; ``images-1`` is one of ``images``."""
    table = path.parent if path.name.startswith("part-") else path
    return table.name.removesuffix(".parquet").partition("-")[0]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table of the run atomically."""
    write_stream(path, SCHEMAS[_schema_name(path)], rows)


def write_stream(
    path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]], rows_a_group: int = 20_000
) -> None:
    """Write a table atomically, of which only one row group is in memory at a time."""
    left = iter(rows)
    with replacing(path) as waiting, pq.ParquetWriter(waiting, schema, compression="zstd") as out:
        while group := list(islice(left, rows_a_group)):
            out.write_table(pa.Table.from_pylist(group, schema=schema))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table atomically."""
    with replacing(path) as waiting:
        pq.write_table(table, waiting, compression="zstd")


def parts(folder: Path) -> Iterator[pa.Table]:
    """Read the parts of a table in order, one at a time."""
    return map(read_table, sorted(folder.glob("part-*.parquet")))


def num_rows(folder: Path) -> int:
    """Number of rows of a table in parts, from their footers."""
    return sum(pq.ParquetFile(path).metadata.num_rows for path in folder.glob("part-*.parquet"))


def read_table(path: Path) -> pa.Table:
    """Read a file, or all parts in a folder in order. Raises `UserError`: it is missing, corrupt, or has other columns."""
    name = _schema_name(path)
    if path.is_dir():
        return pa.concat_tables([SCHEMAS[name].empty_table(), *parts(path)])
    if not path.exists():
        raise UserError("it does not exist: finish the run first (python -m data_prep rmir)", path)
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"it cannot be read: {error}", path) from None
    if not table.schema.equals(SCHEMAS[name]):
        raise UserError(
            f"expected the schema {name}:\n{SCHEMAS[name]}\ngot:\n{table.schema}", path, kind="schema"
        )
    return table


class Rows(Sequence[dict[str, Any]]):
    """Rows of a table as dicts, each made when it is asked for: all at once would take several times the table's memory.

    A ``ref`` in the run's own folder, `out`, is made a path.
    """

    def __init__(self, table: pa.Table, out: Path):
        self.table, self.out = table, out

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> "Rows": ...
    def __getitem__(self, place: int | slice) -> "dict[str, Any] | Rows":
        if isinstance(place, slice):
            return Rows(self.table[place], self.out)
        [row] = self.table.take([range(len(self))[place]]).to_pylist()
        return self._placed(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from map(self._placed, batch.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.table.equals(other.table) and self.out == other.out

    __hash__ = None  # type: ignore[assignment]  # tables are compared by their content

    def having(self, column: str, *, filled: bool = True) -> "Rows":
        """The rows that have a text in a column, or those that have none."""
        has = pc.fill_null(pc.not_equal(self.table[column], ""), False)
        return Rows(self.table.filter(has if filled else pc.invert(has)), self.out)

    def among(self, column: str, values: pa.ChunkedArray) -> "Rows":
        """The rows that have one of these values in a column, in order."""
        return Rows(self.table.filter(pc.is_in(self.table[column], value_set=values)), self.out)

    def _placed(self, row: dict[str, Any]) -> dict[str, Any]:
        if (row.get("ref") or "").startswith(OUT):
            row["ref"] = str(self.out / row["ref"].removeprefix(OUT))
        return row


class RowsBy(Mapping[str, dict[str, Any]]):
    """`Rows` by the values of a column."""

    def __init__(self, key: str, rows: Rows):
        self.rows = Rows(rows.table.combine_chunks(), rows.out)  # where a row is found at once
        self._places = {name: place for place, name in enumerate(rows.table[key].to_pylist())}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[self._places[name]]


def stage_rows(out: Path, stage: str, table: str) -> Rows:
    """Rows of a table that a finished stage of the run in `out` wrote, in one file or in parts."""
    path = out / stage / table
    return Rows(read_table(path if path.is_dir() else path.with_name(f"{table}.parquet")), out)


def stage_rows_by(key: str, out: Path, stage: str, table: str) -> RowsBy:
    """`stage_rows` by the values of a column."""
    return RowsBy(key, stage_rows(out, stage, table))
