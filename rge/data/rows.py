"""Training records from the rows of a data set: maps columns to fields.

A data set is Arrow tables; rows are read without decoding pictures, and checking does not even read the pictures' bytes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from rge.common.commands import progress_bar
from rge.common.errors import did_you_mean
from rge.common.schema import Positive, QueryPart, Record, Target
from rge.data.config import RecordsConfig
from rge.data.sources import (
    PRESENT,
    Checks,
    Parsed,
    RecordError,
    Records,
    Scanned,
    StoredRecords,
    as_contents,
    as_list,
    names_of,
    parsed_fields,
    texts_of,
    with_defaults,
    without_nulls,
)
from rge.tables.rows import Cells

AT_ONCE = 1024
"""Rows checked together."""

_PARTS: dict[str, type[QueryPart] | type[Target]] = {
    "query": QueryPart,
    "positives": Positive,
    "negatives": Target,
}
FIELDS = {*Record.model_fields, *(f"{part}.{leaf}" for part in _PARTS for leaf in _PARTS[part].model_fields)}
"""Fields that ``columns`` can map."""


class ArrowRows:
    """A data set of the library `datasets`, as rows."""

    def __init__(self, dataset: Any, columns: Sequence[str]):
        self._dataset = dataset.select_columns(list(columns)).with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return rows_of(self._dataset[index])[0]

    def without_pictures(self, start: int, stop: int) -> list[Cells]:
        """Rows with `PRESENT` in place of pictures' bytes."""
        return rows_of(drop_image_bytes(self._dataset[start:stop]))


def rows_of(table: pa.Table) -> list[Cells]:
    """The rows of a table; JSON in them is parsed, since the library keeps objects with different fields as such."""
    rows: list[Cells] = table.to_pylist()
    for column in table.schema:
        if _has_json(column.type):
            for row in rows:
                row[column.name] = _parsed_json(row[column.name], column.type)
    return rows


def _has_json(kind: pa.DataType) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return isinstance(kind, pa.JsonType) or any(map(_has_json, inner))


def _parsed_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if _is_list(kind):
        return [_parsed_json(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        return {field.name: _parsed_json(value[field.name], field.type) for field in kind}
    return value


def common_type(one: pa.DataType, other: pa.DataType, name: str) -> pa.DataType:
    """The type that values of both can be read as; a ValueError names the column, or the part of it, if there is none.

    Nothing goes with anything, a number with a wider one, a number with text as text; objects have the fields of both.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            inner = fields.get(field.name, field.type)
            fields[field.name] = common_type(inner, field.type, f"{name}.{field.name}")
        return pa.struct(list(fields.items()))
    if _is_list(one) and _is_list(other):
        return pa.list_(common_type(one.value_type, other.value_type, name))
    for text, number in ((one, other), (other, one)):
        if (pa.types.is_string(text) or pa.types.is_large_string(text)) and (
            pa.types.is_integer(number) or pa.types.is_floating(number)
        ):
            return text
    try:
        schemas = [pa.schema([(name, kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        raise ValueError(f"column {name} has the types {_shortened(one)} and {_shortened(other)}") from None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _shortened(kind: pa.DataType, most: int = 60) -> str:
    text = str(kind)
    return text if len(text) <= most else f"{text[:most]}..."


def drop_image_bytes(table: pa.Table) -> pa.Table:
    """The table with `PRESENT` in place of pictures' bytes, which are not read."""
    if not table.num_rows:
        return table
    columns = ([_without_bytes(chunk) for chunk in column.chunks] for column in table.columns)
    return pa.table(dict(zip(table.column_names, map(pa.chunked_array, columns), strict=True)))


def _without_bytes(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_struct(kind) and (names := {field.name for field in kind}) & {"bytes", "path"}:
        path = pc.struct_field(array, "path") if "path" in names else pa.nulls(len(array))
        if "bytes" not in names:
            return path
        return pc.if_else(
            _has_bytes(pc.struct_field(array, "bytes")), pa.scalar(PRESENT), path.cast(pa.string())
        )
    if _is_binary(kind) or _is_byte_list(kind):
        return pc.if_else(_has_bytes(array), pa.scalar(PRESENT), pa.scalar(None, pa.string()))
    if _is_list(kind):
        # `flatten` drops values hidden by null rows and slices, so offsets follow from the lengths.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
        return pa.ListArray.from_arrays(offsets, _without_bytes(array.flatten()), mask=pc.is_null(array))
    if pa.types.is_struct(kind):
        parts = [_without_bytes(pc.struct_field(array, field.name)) for field in kind]
        return pa.StructArray.from_arrays(parts, [field.name for field in kind], mask=pc.is_null(array))
    return array


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_byte_list(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type in (
        pa.uint8(),
        pa.int8(),
    )


def _has_bytes(array: pa.Array) -> pa.Array:
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):  # integers
        return pc.greater(pc.fill_null(pc.list_value_length(array), 0), 0)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):  # base64
        return pc.greater(pc.fill_null(pc.utf8_length(array), 0), 0)
    if not _is_binary(array.type):  # null, where no row has any
        return pc.is_valid(array)
    return pc.greater(pc.fill_null(pc.binary_length(array.cast(pa.large_binary())), 0), 0)


class Columns:
    """Maps rows to records; a field or a column that does not exist is a `RecordError`.

    `there` are the columns of the source, None if known only by row; `used` those that are read, None for all, each of which must
    be mapped. `features` are their types in the library `datasets`, which have the names of numbered classes.
    """

    def __init__(
        self, config: RecordsConfig, there: Sequence[str] | None, features: Mapping[str, Any] | None = None
    ):
        self.config = config
        self._classes = {name: kind for name, kind in (features or {}).items() if _has_classes(kind)}
        own = {name: name for name in there or () if "." in name and name in FIELDS}
        self.columns = own | config.columns
        theirs_all = self.columns.values()
        self._mapped = {*theirs_all, *(theirs.split(".")[0] for theirs in theirs_all)}
        for ours, theirs in self.columns.items():
            if ours not in FIELDS:
                raise RecordError(
                    f"a record has no such field{did_you_mean(ours, FIELDS)}", config.label, "columns", ours
                )
            if there is not None and theirs.split(".")[0] not in there and theirs not in there:
                raise RecordError(
                    f"it is mapped to {theirs!r}, which is not one of its columns: {', '.join(there)}"
                    f"{did_you_mean(theirs, there)}",
                    config.label,
                    "columns",
                    ours,
                    "unmapped",
                )
        self.used = None
        if there is not None:
            self.used = [name for name in there if name in self._mapped or name in Record.model_fields]
            missing = [
                part for part in ("query", "positives")
                if part not in self.used and not any(ours.split(".")[0] == part for ours in self.columns)
            ]  # fmt: skip
            if missing:
                raise RecordError(
                    f"it has no column {' and none '.join(missing)}, and `columns` maps none to it: it has {', '.join(there)}; map "
                    "them, for example columns: {query.text: question, positives.text: answer}",
                    config.label,
                ).about(*missing)

    def record(self, row: Mapping[str, Any], number: int | str) -> dict[str, Any]:
        """A row as the fields of a record, with defaults for id, group, source and split; ValueError if it cannot be one."""
        if not isinstance(row, Mapping):
            raise ValueError(f"a row is a mapping of names to values, got {type(row).__name__}")
        if self.used is None and (unknown := row.keys() - Record.model_fields.keys() - self._mapped):
            name = sorted(unknown)[0]
            raise ValueError(f"{name}: a record has no such field{did_you_mean(name, Record.model_fields)}")
        row = {name: _with_class_names(value, self._classes.get(name)) for name, value in row.items()}
        found = {name: without_nulls(row[name]) for name in Record.model_fields if row.get(name) is not None}
        lists: dict[str, dict[str, list[Any]]] = {}
        for ours, theirs in self.columns.items():
            value = without_nulls(_get_path(row, theirs))
            part, _, leaf = ours.partition(".")
            if not leaf:
                found.pop(part, None)
                if value is not None:
                    found[part] = value
            elif part != "query":
                leaves = lists.setdefault(part, {})
                if value is not None:
                    leaves[leaf] = as_contents(value) if leaf == "content" else as_list(value)
            elif value is not None:
                found[part] = self._fields_of_query(found.get(part, {})) | {leaf: value}
        for part, leaves in lists.items():
            found[part] = _zip_leaves(part, found.get(part), leaves)
        return with_defaults(found, self.config.title, self.config.split, number)

    def _fields_of_query(self, query: Any) -> dict[str, Any]:
        """Fields of a column `query`; none if it is the text alone, and another column is mapped to that."""
        if isinstance(query, dict):
            return _known(query, QueryPart)
        if "query.text" not in self.columns:
            raise ValueError(
                f"query: must have text or images, got {type(query).__name__}; map it, for example query.text: query"
            )
        return {}


def _inner_types(kind: Any) -> Mapping[str, Any] | Any:
    """The types of a struct's fields, or of a list's values; None of anything else."""
    if isinstance(kind, Mapping):
        return kind
    return kind[0] if isinstance(kind, list) else getattr(kind, "feature", None)


def _has_classes(kind: Any) -> bool:
    inner = _inner_types(kind)
    if isinstance(inner, Mapping):
        return any(map(_has_classes, inner.values()))
    return hasattr(kind, "int2str") or (inner is not None and _has_classes(inner))


def _with_class_names(value: Any, kind: Any) -> Any:
    """A value in which the numbers of classes (the library's ``ClassLabel``) are their names; -1 means none."""
    if value is None or kind is None:
        return value
    if hasattr(kind, "int2str"):
        return None if value == -1 else kind.int2str(value)
    inner = _inner_types(kind)
    if isinstance(value, list):
        return [_with_class_names(one, inner) for one in value]
    if isinstance(value, Mapping) and isinstance(inner, Mapping):
        return {name: _with_class_names(one, inner.get(name)) for name, one in value.items()}
    return value


def _get_path(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    first, *rest = path.split(".")
    value = row.get(first)
    for part in rest:
        if isinstance(value, list):
            value = [one.get(part) if isinstance(one, Mapping) else None for one in value]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _known(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in model.model_fields}


def _zip_leaves(part: str, targets: Any, leaves: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """``{text: [a, b], image: [c, d]}`` as ``[{text: a, image: c}, {text: b, image: d}]``, without what is empty.

    Leaves without text, image and content are added to `targets`, a column of that name.
    """
    has_targets = isinstance(targets, list) and all(isinstance(target, dict) for target in targets)
    if has_targets and not leaves.keys() & {"text", "image", "content"}:
        known = [_known(target, Positive if part == "positives" else Target) for target in targets]
        names = dict.fromkeys(name for target in known for name in target)
        leaves = {name: [target.get(name) for target in known] for name in names} | dict(leaves)
    lengths = {f"{part}.{leaf}": len(values) for leaf, values in leaves.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{part}: columns of different lengths ({shown})")
    rows = [
        {leaf: value for leaf, value in zip(leaves, values, strict=True) if value is not None and value != ""}
        for values in zip(*leaves.values(), strict=True)
    ]
    return [row for row in rows if row.keys() & {"text", "image", "content"}]


Opened = tuple[Any, Columns, Path]
"""Rows by number or a stream, how rows become records, and the folder that paths of pictures are relative to."""


class Reopened(Records):
    """Records of a data set that `open_source` opens, again in each process that they are sent to."""

    def __init__(self, config: RecordsConfig, open_source: Callable[[RecordsConfig], Opened]):
        self.config, self._open_source = config, open_source

    @cached_property
    def opened(self) -> Opened:
        """The data set in this process."""
        return self._open_source(self.config)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the data set."""
        return {name: value for name, value in vars(self).items() if name != "opened"}


class RowRecords(Reopened, StoredRecords):
    """Records of a table, by number."""

    unit, empty = "row", "the source is empty"
    extent = {"read": "all but the bytes of pictures"}

    def __init__(
        self, config: RecordsConfig, open_source: Callable[[RecordsConfig], Opened], **checks: Unpack[Checks]
    ):
        Reopened.__init__(self, config, open_source)
        self.folder = self.opened[2]
        StoredRecords.__init__(self, config.label, **checks)

    def _scan(self, sha256: Any, progress: bool = False) -> Iterator[Scanned]:
        rows, columns, _ = self.opened
        hidden = not progress or len(rows) < 1_000_000
        with progress_bar(total=len(rows), desc=f"checking {self.name}", disable=hidden) as bar:
            for start in range(0, len(rows), AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, len(rows)))
                part: Iterable[Mapping[str, Any]] = map(rows.__getitem__, numbers)
                if isinstance(rows, ArrowRows):
                    part = rows.without_pictures(start, numbers.stop)
                for number, row in zip(numbers, part, strict=True):
                    record, problems = parsed(columns, row, number)
                    if record is not None and PRESENT in (*texts_of(record), *names_of(record)):
                        problems = ["a text is stored as bytes: cast its column to text"]
                    sha256.update(repr(None if problems else record).encode(errors="backslashreplace"))
                    yield Scanned(number, number, record, problems)
                bar.update(len(numbers))

    def _read(self, place: int) -> Parsed:
        rows, columns, folder = self.opened
        return parsed(columns, rows[place], place, folder)


def parsed(columns: Columns, row: Mapping[str, Any], number: int | str, folder: Path | None = None) -> Parsed:
    """A row's record, its pictures joined to `folder`."""
    try:
        fields = columns.record(row, number)
    except ValueError as error:
        return None, [str(error)]
    return parsed_fields(fields, folder)
