"""The candidates of a pool that is not the records' own file."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from rge.common.errors import UserError
from rge.common.schema import Target
from rge.data.sources import RecordFile
from rge.tables.pictures import find, picture_rows

CORPUS = "corpus.parquet"
READ_ROWS = 64
"""Rows read at a time, since a row group of pictures can be gigabytes large."""


def pool_targets(path: Path) -> Iterator[Target]:
    """The candidates of training records, of a retrieval set or its table, or of a folder of pictures.

    A table's picture is referenced as ``corpus.parquet#id``. Raises `UserError`: there is nothing of these.
    """
    if (path / CORPUS).is_file():
        return _of_table(path / CORPUS)
    if path.suffix.lower() == ".parquet" and path.is_file():
        return _of_table(path)
    if path.is_dir():
        return _of_folder(path)
    records = RecordFile(path)
    every = (records[number] for number in range(len(records)))
    return chain.from_iterable((*record.positives, *record.negatives) for record in every)


def _of_folder(path: Path) -> Iterator[Target]:
    files = find(str(path))
    if files.kind != "folder":
        raise UserError(
            "it is neither training records, a retrieval set, a table with id and image, nor a folder of pictures",
            path,
            key="pool",
        )
    count = 0
    for row in picture_rows(files, pictures=False):
        image = Path(row.cells["image"])
        yield Target(
            id=image.relative_to(path).as_posix() if image.is_relative_to(path) else image.name,
            image=str(image),
        )
        count += 1
    if not count:
        raise UserError("it has no pictures", path, key="pool")


def _of_table(path: Path) -> Iterator[Target]:
    file = pq.ParquetFile(path)
    columns = [name for name in ("id", "text", "image") if name in file.schema_arrow.names]
    if "id" not in columns or len(columns) < 2:
        raise UserError(
            f"it needs a column id, and text, image or both; it has {', '.join(file.schema_arrow.names)}",
            path,
            key="pool",
        )
    for batch in file.iter_batches(READ_ROWS, columns=columns):
        ids = batch.column("id").to_pylist()
        texts = batch.column("text").to_pylist() if "text" in columns else [None] * len(ids)
        has_picture = (
            batch.column("image").is_valid().to_pylist() if "image" in columns else [False] * len(ids)
        )
        for name, text, pictured in zip(ids, texts, has_picture, strict=True):
            yield Target(id=str(name), text=text or None, image=f"{path}#{name}" if pictured else None)
