"""Rows of an index: from items to Arrow columns, and from these to hits."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rge.common.errors import UserError
from rge.common.images import WEB, is_there
from rge.content.references import PDF, named
from rge.content.video import SUFFIXES as VIDEO_SUFFIXES
from rge.index.columns import LARGEST_INTEGER
from rge.index.sources import Content, Entry, composed
from rge.tables.pictures import SUFFIXES

COLUMNS = {
    "key": pa.string(),
    "source": pa.string(),
    "id": pa.string(),
    "stamp": pa.string(),
    "digest": pa.string(),
    "text": pa.string(),
    "image": pa.string(),
    "metadata": pa.string(),
    "thumbnail": pa.binary(),
}
PRIVATE = frozenset(
    {"key", "source", "stamp", "digest", "image", "metadata", "thumbnail", "vector", "words"}
    | {"_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version"}
    | {"_distance", "_score", "_relevance_score"}
)
"""Columns that are not offered to `where`: searches must not reveal where files are on this machine. The last eight are LanceDB's own."""
EXIF = {
    "taken": pa.string(), "year": pa.int64(), "month": pa.int64(), "latitude": pa.float64(), "longitude": pa.float64(),
    "album": pa.string(),
}  # fmt: skip
_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types whose values JSON returns as they were."""
_dumps = json.JSONEncoder(ensure_ascii=False).encode
_ARROW: dict[type, pa.DataType] = {bool: pa.bool_(), float: pa.float64()}
_INTEGERS = {pa.int64(): (-1 << 63, (1 << 63) - 1), pa.uint64(): (0, LARGEST_INTEGER)}
HIT_COLUMNS = ("source", "id", "text", "image", "metadata", "thumbnail")


@dataclass(frozen=True, slots=True)
class Row:
    """One item."""

    source: str  # absolute path of the folder or table it came from
    id: str  # unique within the source
    stamp: str  # of `rge.index.sources.Entry`
    digest: str  # of `rge.index.sources.Content`, to which the vector belongs
    vector: np.ndarray  # (D,) float32, unit norm
    text: str | None = None  # caption or text
    image: str | None = None  # path of the picture, ``library.parquet#row`` or a web address
    # A table's other columns, a file's album (folder), and facts from the picture's EXIF.
    metadata: dict[str, Any] | None = None
    thumbnail: bytes | None = None  # WebP

    @property
    def key(self) -> str:
        """A digest of source and id, so that one index finds the row."""
        return row_key(self.source, self.id)

    @classmethod
    def of(cls, source: str, entry: Entry, content: Content, vector: np.ndarray) -> "Row":
        """The row of an entry that has been read and embedded."""
        metadata = content.facts | entry.metadata
        names = source, entry.id, entry.stamp, content.digest
        return cls(*names, vector, content.text, entry.image, metadata, content.thumbnail)


@dataclass(frozen=True, slots=True)
class Hit:
    """One search result; see `Row`."""

    source: str
    id: str
    score: float  # cosine similarity, float32
    text: str | None
    image: str | None
    metadata: dict[str, Any]
    gone: bool  # the picture is no longer where it was when it was indexed
    thumbnail: bytes | None = None

    def as_json(self) -> dict[str, Any]:
        """For answers that leave this machine: without its paths; `id` is a picture's name within the indexed folder."""
        return {
            "id": self.id,
            "score": self.score,
            "text": self.text,
            "metadata": self.metadata,
            "url": self.image if (self.image or "").startswith(WEB) else None,
            "gone": self.gone,
            "source": Path(self.source).name,
        }


def row_key(source: str, id: str) -> str:
    """The key of a row, 32 hexadecimal digits."""
    return hashlib.blake2b(f"{source}\0{id}".encode(), digest_size=16).hexdigest()


def new_schema(about: dict[str, Any]) -> pa.Schema:
    """The columns of an empty index."""
    fields = [pa.field(name, kind) for name, kind in {**COLUMNS, **EXIF, "words": pa.string()}.items()]
    fields.append(pa.field("vector", pa.list_(pa.float32(), about["dimensions"])))
    return pa.schema(fields, metadata={"rge": json.dumps(about)})


def metadata_fields(metadata: Iterable[dict[str, Any]]) -> list[pa.Field]:
    """A column for every metadata key whose values are numbers, texts or booleans; two keys for one column are a `UserError`."""
    types: dict[str, set[type]] = {}
    integers: dict[str, tuple[int, int]] = {}  # least and greatest
    keys: dict[str, str] = {}
    for row in metadata:
        for name, value in row.items():
            if value is not None and not isinstance(value, list | dict | tuple | bytes):
                column = column_name(name)
                if (other := keys.setdefault(column, name)) != name:
                    raise UserError(
                        f"where= would know both it and {other!r} as {column}: rename one of these columns",
                        key=name,
                    )
                types.setdefault(column, set()).add(type(value))
                if type(value) is int:
                    bounds = integers.get(column, (value, value))
                    integers[column] = min(value, *bounds), max(value, *bounds)
    return [pa.field(name, _common(kinds, integers.get(name, ()))) for name, kinds in types.items()]


def as_table(rows: Sequence[Row], vector_ND: np.ndarray, schema: pa.Schema) -> tuple[pa.Table, int]:
    """Rows as a table, and the number of metadata values that do not fit the type of their column and are left out of it."""
    metadata, texts = zip(*(_as_json(row.metadata) for row in rows), strict=True)
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    columns |= {
        "metadata": texts,
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vector_ND.ravel()), vector_ND.shape[1]),
        "words": [_words(row) for row in rows],
    }
    spelt = {name.lower(): name for name in schema.names} | {name: name for name in schema.names}
    column_of: dict[str, str | None] = {}
    values: dict[str, list[Any]] = {}
    for number, row in enumerate(metadata):
        for name, value in row.items():
            if name not in column_of:
                column = column_name(name)
                column_of[name] = spelt.get(column) or spelt.get(column.lower())
            # An empty cell `Year` does not replace the year that the picture itself tells.
            if value is not None and (found := column_of[name]) is not None:
                if found not in values:
                    values[found] = [None] * len(rows)
                values[found][number] = value
    unfit = 0
    for field in schema:
        if field.name in values and field.name not in columns:
            columns[field.name] = fitting = [_fitting(value, field.type) for value in values[field.name]]
            unfit += fitting.count(None) - values[field.name].count(None)
        elif field.name not in columns:
            columns[field.name] = pa.nulls(len(rows), field.type)
    return pa.table(columns, schema=schema), unfit


BLOCK = pa.schema(
    [(name, kind) for name, kind in COLUMNS.items() if name not in ("key", "source")]
    + [("vector", pa.list_(pa.float32())), ("was_known", pa.bool_())]
)
"""Columns of a finished block (`rge.index.blocks`), which do not depend on those of the index."""


def as_block(found: Sequence[tuple[Row, bool]]) -> pa.Table:
    """Rows of one source, and whether their contents were known, as a finished block."""
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name, None) for row, _ in found] for name in BLOCK.names
    }
    columns["metadata"] = [_as_json(row.metadata)[1] for row, _ in found]
    columns["was_known"] = [was_known for _, was_known in found]
    return pa.table(columns, schema=BLOCK)


def of_block(block: pa.Table, source: str) -> Iterator[tuple[Row, bool]]:
    """What `as_block` was given."""
    vectors = block["vector"].combine_chunks().flatten().to_numpy().reshape(len(block), -1)
    for row, vector_D in zip(block.drop_columns("vector").to_pylist(), vectors, strict=True):
        was_known, metadata = row.pop("was_known"), row.pop("metadata")
        yield (
            Row(source, **row, vector=vector_D, metadata=json.loads(metadata) if metadata else None),
            was_known,
        )


def _as_json(metadata: dict[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """Metadata as JSON can hold it, and as JSON; None if there is none."""
    if not metadata:
        return {}, None
    if {*map(type, metadata)} == {str} and {*map(type, metadata.values())} <= _PLAIN:
        text = _dumps(metadata)
        if "NaN" not in text and "Infinity" not in text:
            return metadata, text
    # Values that JSON has no form for become texts; pictures in other columns are left out.
    plain = _finite(
        json.dumps(metadata, default=lambda value: None if isinstance(value, bytes) else str(value))
    )
    return plain, _dumps(plain)


def column_name(name: str) -> str:
    """The column of a metadata key: a word that needs no quotes in a condition."""
    plain = re.sub(r"\W", "_", name)
    if not plain or plain[0].isdigit():
        return f"_{plain}"
    return f"{plain}_" if plain.lower() in PRIVATE | {"id", "text"} else plain


def _common(kinds: set[type], integers: Sequence[int]) -> pa.DataType:
    if kinds == {int}:
        least, most = min(integers), max(integers)
        return next(
            (kind for kind, (low, high) in _INTEGERS.items() if low <= least and most <= high), pa.string()
        )
    if kinds == {int, float}:
        return pa.float64()
    return _ARROW.get(kinds.pop(), pa.string()) if len(kinds) == 1 else pa.string()


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """A metadata value for its column; None if it does not fit."""
    if isinstance(value, list | dict | None):
        return None
    if kind == pa.string():
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) or isinstance(value, bool) != (kind == pa.bool_()):
        return None
    if kind in (pa.bool_(), pa.float64()):
        return value if kind == pa.bool_() else float(value)
    low, high = _INTEGERS[kind]
    return int(value) if value == int(value) and low <= value <= high else None


def _words(row: Row) -> str:
    values = [value for value in (row.metadata or {}).values() if isinstance(value, str)]
    return composed(" ".join([row.text or "", re.sub(r"[\W_]+", " ", composed(row.id)), *values]))


def typed_name(id: str, words: str) -> int:
    """How many words of an item's file name, or path, were typed; 0 if it was not typed as a name.

    It was if all of `words` is the name, with or without its ending, or if they contain the name with its ending, or without it where it
    has letters and digits or several numbers, as in ``IMG_2034`` (a picture ``a.jpg`` is not meant by "a padlock"). Case,
    separators and the composition of accents do not matter.
    """
    typed = _split(words)
    path, ending = os.path.splitext(named(id).file)
    if ending.lower() not in (*SUFFIXES, *VIDEO_SUFFIXES, PDF, ".txt"):
        path, ending = id, ""
    best = 0
    for stem in (path, path.rpartition("/")[2]):
        short, full = _split(stem), _split(stem + ending)
        if not short:
            continue
        is_code = any(map(str.isdigit, "".join(short))) and not (len(short) == 1 and short[0].isdigit())
        if typed in (short, full):
            best = max(best, len(full))
        elif (ending and _contains(typed, full)) or (is_code and _contains(typed, short)):
            best = max(best, len(short))
    return best


def _split(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", composed(text).casefold())


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[at : at + len(part)] == part for at in range(len(words) - len(part) + 1))


def matrix(rows: pa.Table) -> np.ndarray:
    """The vectors, (N, D)."""
    column = rows["vector"].combine_chunks()
    if not len(column):
        return np.empty((0, 0), np.float32)
    return column.flatten().to_numpy().reshape(len(column), -1)


def hits_of(rows: pa.Table, query_D: np.ndarray, k: int) -> list[Hit]:
    """Rows as hits, best first, scored by the stored vectors: each of Lance's kernels rounds distances differently."""
    scores = [float(query_D @ vector_D) for vector_D in matrix(rows)]
    scored = list(zip(scores, rows.drop_columns(["vector"]).to_pylist(), strict=True))
    scored.sort(key=lambda pair: (-pair[0], pair[1]["source"], pair[1]["id"]))
    return [_hit(score, row) for score, row in scored[:k]]


def _hit(score: float, row: dict[str, Any]) -> Hit:
    image = row["image"]
    # What is elsewhere, or in a Lance table, is not looked up.
    gone = bool(image) and not re.search(r"://|\.lance#", image) and not is_there(named(image).file)
    metadata = _finite(row["metadata"]) if row["metadata"] else {}
    return Hit(row["source"], row["id"], score, row["text"], image, metadata, gone, row.get("thumbnail"))


def _finite(text: str) -> dict[str, Any]:
    """Parse a JSON object, with None for NaN and infinities, which Python writes but other programs cannot read."""
    value: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return value
