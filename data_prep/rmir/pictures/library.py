"""The pictures to start from: list them, look into each, and say why one is left out."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.frames import absolute, daft_frame, from_daft
from data_prep.rmir.pictures.download import is_address
from data_prep.rmir.pictures.filters import load_filter, unwanted
from data_prep.rmir.pictures.near_duplicates import phash
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, picture_bytes

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
DUPLICATE, NEAR_DUPLICATE, TOO_SMALL = "same bytes as another picture", "near-duplicate", "too small"


class LibraryError(UserError):
    """The library cannot be listed; the message names file, row and mend."""


def list_library(config: LibraryConfig) -> list[dict[str, Any]]:
    """Every picture as ``id``, ``ref`` (see `rge.common.images`; or a web address) and ``caption`` (or None), in a fixed order.

    Raises:
        LibraryError: no such library, missing columns, ids that are missing or occur twice, no picture at all.
    """
    path = Path(config.path or "")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        stems = Counter(file.with_suffix("") for file in files)

        def name(file: Path) -> str:
            # `a.jpg` beside `a.png`: both keep their ending, so that neither's id depends on which comes first.
            kept = file if stems[file.with_suffix("")] > 1 else file.with_suffix("")
            return kept.relative_to(path).as_posix()

        rows: list[dict[str, Any]] = [{"id": name(file), "ref": str(file), "caption": None} for file in files]
    elif path.is_file():
        rows = list(_table_rows(path, config))
    else:
        raise LibraryError(f"library.path {config.path} does not exist")
    if not rows:
        raise LibraryError(f"library.path {config.path} holds no picture ({', '.join(SUFFIXES)})")
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise LibraryError(f"library.path {config.path}: the id {row['id']!r} occurs twice")
        seen.add(row["id"])
    return rows


def origins_of(config: LibraryConfig, wanted: Collection[str]) -> dict[str, dict[str, str]]:
    """Source, author and licence of some pictures, by id, as far as the library is a table that says so.

    Args:
        config: names the columns.
        wanted: ids.
    """
    named = {"source": config.source_column, "author": config.author_column, "licence": config.licence_column}
    path = Path(config.path or "")
    if not path.is_file():
        return {}
    if path.suffix == ".parquet":
        there = pq.read_schema(path).names
        columns = [config.id_column, *(column for column in named.values() if column in there)]
        rows = pq.read_table(path, columns=columns).to_pylist()
    else:
        rows = _plain_rows(path)
    return {
        str(row[config.id_column]): {
            key: str(row[column]) for key, column in named.items() if row.get(column)
        }
        for row in rows
        if str(row.get(config.id_column)) in wanted
    }


def _plain_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise LibraryError(f"{path}:{number} is not JSON: {error}") from None
        return rows
    if path.suffix in (".csv", ".tsv"):
        with path.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ","))
    raise LibraryError(f"library.path {path} must be a folder, or .parquet, .csv, .tsv or .jsonl")


def _table_rows(path: Path, config: LibraryConfig) -> Iterator[dict[str, Any]]:
    # Pictures inside a Parquet table are referred to, never copied into memory.
    columns = [config.id_column, config.image_column]
    inside = False
    if path.suffix == ".parquet":
        schema = pq.read_schema(path)
        inside = config.image_column in schema.names and not pa.types.is_string(
            schema.field(config.image_column).type
        )
        wanted = [config.id_column] if inside else columns
        if config.caption_column is not None and config.caption_column in schema.names:
            wanted = [*wanted, config.caption_column]
        if missing := set(columns) - set(schema.names):
            raise LibraryError(
                f"{path}: no column {', '.join(sorted(missing))} (there are: {', '.join(schema.names)})"
            )
        if inside and (config.id_column, config.image_column) != ("id", "image"):
            raise LibraryError(
                f"{path}: encoded pictures must be in a column image, with their ids in a column id"
            )
        rows = pq.read_table(path, columns=wanted).to_pylist()
    else:
        rows = _plain_rows(path)
    for number, row in enumerate(rows, start=1):
        for column in columns[: 1 if inside else 2]:
            if not row.get(column):
                raise LibraryError(
                    f"{path}: row {number} has no {column} (library.id_column, library.image_column)"
                )
        name, caption = str(row[config.id_column]), row.get(config.caption_column or "")
        if inside:
            ref = f"{path}#{name}"
        elif is_address(str(row[config.image_column])):
            ref = str(row[config.image_column])
        elif "://" in str(row[config.image_column]):
            scheme = str(row[config.image_column]).partition("://")[0]
            raise LibraryError(
                f"{path}: row {number}: {scheme}:// is not http:// or https://; download the pictures first"
            )
        else:
            ref = str(path.parent / str(row[config.image_column]))
        yield {"id": name, "ref": ref, "caption": str(caption).strip() or None if caption else None}


def inspect(rows: list[dict[str, Any]], config: LibraryConfig, runner: str = "native") -> pa.Table:
    """Decode each picture once (on all cores, by Daft) and note its hash and size, or why it is left out.

    Args:
        rows: of `list_library`.
        config: limits.
        runner: of Daft.

    Returns:
        The table ``inspected``; ``reason`` is null for a good picture.
    """
    from daft import DataType, col

    kind = DataType.struct(
        {
            "sha256": DataType.string(),
            "width": DataType.int32(),
            "height": DataType.int32(),
            "phash": DataType.string(),
            "reason": DataType.string(),
        }
    )
    given = pa.table(
        {name: pa.array([row[name] for row in rows], pa.string()) for name in ("id", "ref", "caption")}
        | {"row": pa.array(range(len(rows)), pa.int64()), "file": absolute(row["ref"] for row in rows)}
    )
    smallest, filters = config.min_side_px, tuple(config.filters)
    for name in filters:
        load_filter(name)  # what is missing is said before a picture is opened
    frame = daft_frame(given, runner).with_column(
        "found", col("file").apply(lambda file: look(file, smallest, filters), return_dtype=kind)
    )
    for name in ("sha256", "width", "height", "phash", "reason"):
        frame = frame.with_column(name, col("found")[name])
    return from_daft(frame, "inspected", order="row")


def look(ref: str, min_side_px: int, filters: Sequence[str] = ()) -> dict[str, Any]:
    """Hashes and size of a picture, or the reason to leave it out; `filters` as of `load_filter`."""
    found: dict[str, Any] = {"sha256": None, "width": None, "height": None, "phash": None, "reason": None}
    try:
        data = picture_bytes(ref)
    except ImageError:
        return {**found, "reason": "missing"}
    try:
        image = load_image(data)
    except ImageError as error:
        reasons = {"frames": "animated", "decompression bomb": "huge", "truncated": "truncated"}
        reason = next((name for words, name in reasons.items() if words in str(error)), "unreadable")
        return {**found, "reason": reason}
    found |= {"sha256": hashlib.sha256(data).hexdigest(), "width": image.width, "height": image.height}
    found["phash"] = phash(image)
    return {**found, "reason": TOO_SMALL if min(image.size) < min_side_px else unwanted(image, filters)}
