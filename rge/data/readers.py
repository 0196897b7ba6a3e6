"""Open a recipe's sources: a file, a data set of the library `datasets`, or a registered source."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import PictureIndex
from rge.common.registry import Registry
from rge.config import RecordsConfig, SourceConfig
from rge.data.rows import ArrowRows, Columns, RowRecords, Rows, drop_image_bytes, parsed
from rge.data.sources import RecordError, RecordFile, Records
from rge.data.streams import Stream

DataSource = Callable[..., Rows]
"""Called with the source's `options`; returns rows: a list, or anything with a length and ``[number]``. A row maps names of the
record's fields, or of columns that `columns` maps, to values; a picture is encoded bytes or a path."""

DATA_SOURCES: Registry[DataSource] = Registry("data source", "rge.data_sources")
"""By the name that a source's ``type`` gives."""

SHARDS = 256
"""Shards of a local data set read as a stream: enough for each worker of many processes."""


def register_data_source(name: str) -> Callable[[DataSource], DataSource]:
    """Decorator: ``{type: NAME, options: {...}}`` as a source reads what the function returns."""
    return lambda source: DATA_SOURCES.add(name, source)


def open_records(
    config: RecordsConfig,
    *,
    need_rationale: bool = False,
    pictures: PictureIndex | None = None,
    progress: bool = False,
    on_bad: str = "stop",
    first: int | None = None,
    seed: int = 0,
    notes: Path | None = None,
) -> Records:
    """Open a source and check its records; a stream's are checked as they are read.

    Args:
        config: the source.
        need_rationale: every positive must have an oracle rationale.
        pictures: checks that each picture exists; None: not checked.
        progress: show a progress bar while checking.
        on_bad: ``stop`` raises if records break the format; ``skip`` leaves them out.
        first: of a stream, read only this number of records, as a fixed set.
        seed: of a stream's order.
        notes: see `rge.data.streams.Stream`.

    Raises:
        RecordError: it is missing or unreadable, or has records that break the format.
    """
    checks: dict[str, Any] = {
        "need_rationale": need_rationale, "pictures": pictures, "progress": progress, "on_bad": on_bad
    }  # fmt: skip
    if config.path is not None:
        return RecordFile(config.path, **checks)
    if config.type is not None:
        return RowRecords(config, _open_registered, **checks)
    if not config.streaming:
        return RowRecords(config, _open_dataset, **checks)
    if first is not None:
        return RowRecords(config, _First(first), **checks)
    assert isinstance(config, SourceConfig)
    return Stream(
        config, _open_stream, need_rationale=need_rationale, pictures=pictures, seed=seed, notes=notes
    )


def some_records(config: RecordsConfig, most: int) -> Iterator[dict[str, Any]]:
    """Records of a data set or a registered source, without pictures, evenly spread; of a stream the first ones."""
    if config.streaming:
        rows, columns, _ = _First(most, without_pictures=True)(config)
    else:
        rows, columns, _ = (_open_registered if config.type is not None else _open_dataset)(config)
    count = len(rows)
    for number in (count * place // most for place in range(most)) if count > most else range(count):
        row = rows.without_pictures(number, number + 1)[0] if isinstance(rows, ArrowRows) else rows[number]
        record, _ = parsed(columns, row, number)
        if record is not None:
            yield record.model_dump(include={"source", "category", "instruction"})


def _open_registered(config: RecordsConfig) -> tuple[Rows, Columns, Path]:
    assert config.type is not None
    source = DATA_SOURCES[config.type]
    try:
        rows = source(**config.options)
        number = len(rows)
    except UserError as error:
        raise RecordError(f"data source {config.label}: {error}") from error
    except Exception as error:  # a user's code may raise anything
        raise RecordError(f"data source {config.label}: {type(error).__name__}: {error}") from error
    return _Guarded(rows, number, config.label), Columns(config, None), Path()


class _Guarded:
    """Rows of a registered source; its exceptions become errors that name the source."""

    def __init__(self, rows: Rows, number: int, label: str):
        self._rows, self._number, self._label = rows, number, label

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            row = self._rows[index]
        except Exception as error:  # a user's code may raise anything
            raise RecordError(
                f"data source {self._label}, row {index}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(row, Mapping):
            raise RecordError(
                f"data source {self._label}, row {index}: a row is a mapping of names to values, got {type(row).__name__}"
            )
        return row


def _open_dataset(config: RecordsConfig) -> tuple[Rows, Columns, Path]:
    dataset, folder = load(config)
    columns = Columns(config, dataset.column_names)
    return ArrowRows(dataset, columns.used or []), columns, folder


class _First:
    """Opens the first rows of a stream as a list; optionally with `PRESENT` instead of picture bytes."""

    def __init__(self, count: int, without_pictures: bool = False):
        self.count, self.without_pictures = count, without_pictures

    def __call__(self, config: RecordsConfig) -> tuple[Rows, Columns, Path]:
        stream, columns, folder = _open_stream(config)
        found: list[Mapping[str, Any]] = []
        for table in stream.iter(batch_size=min(self.count, 64)):
            kept = table.slice(0, self.count - len(found))
            found += (drop_image_bytes(kept) if self.without_pictures else kept).to_pylist()
            if len(found) == self.count:
                break
        return found, columns, folder


def _open_stream(config: RecordsConfig) -> tuple[Any, Columns, Path]:
    """The stream as tables, how its rows become records, and the folder that paths of pictures are relative to."""
    dataset, folder = load(config)
    names = dataset.column_names
    if names is None:  # not known before the first row
        names = list(next(iter(dataset.take(1)), {}))
    columns = Columns(config, names)
    return dataset.select_columns(columns.used).with_format("arrow"), columns, folder


def load(config: RecordsConfig) -> tuple[Any, Path]:
    """Load a data set with the library `datasets`.

    Returns:
        A ``datasets.Dataset``, or an ``IterableDataset`` for a stream; the folder that paths of pictures are relative to.

    Raises:
        RecordError: it cannot be loaded; says why and what to do.
    """
    import datasets  # takes a second, and training on files does not need it

    assert config.dataset is not None
    datasets.disable_progress_bars()  # we show our own
    folder = find_shipped(config.dataset)
    local = folder.is_dir()
    try:
        if local and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _saved(config, folder), folder
        found = datasets.load_dataset(
            str(folder) if local else config.dataset,
            config.name,
            data_files=_tables_beside_pictures(folder, config) if local else None,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
    except RecordError:
        raise
    except Exception as error:  # the library raises what its readers, and the network's, run into
        raise RecordError(_load_failure(config, local, error)) from error
    return found, folder if local else Path()


def _tables_beside_pictures(folder: Path, config: RecordsConfig) -> dict[str, list[str]] | None:
    """Tables in a folder that the library, which goes by the most frequent ending, would read as one of pictures alone."""
    import datasets

    if datasets.load_dataset_builder(str(folder), config.name).name != "imagefolder":
        return None
    found = (path for path in folder.rglob("*") if path.suffix in (".parquet", ".jsonl"))
    tables = sorted(str(path.relative_to(folder)) for path in found if path.stem != "metadata")
    return {config.split: tables} if tables else None


def _saved(config: RecordsConfig, folder: Path) -> Any:
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise RecordError(f"data set {folder} has no split {config.split!r}; it has {', '.join(found)}")
        found = found[config.split]
    elif found.split is not None and str(found.split) != config.split:
        raise RecordError(
            f"data set {folder} is the split {str(found.split)!r}, but {config.split!r} was requested"
        )
    for name in ("name", "revision"):
        if getattr(config, name) is not None:
            raise RecordError(
                f"data set {folder} was saved by save_to_disk, which does not support {name}: leave it out"
            )
    return (
        found.to_iterable_dataset(num_shards=max(1, min(SHARDS, len(found)))) if config.streaming else found
    )


def _load_failure(config: RecordsConfig, local: bool, error: Exception) -> str:
    text = f"data set {config.label} cannot be loaded: {error or type(error).__name__}"
    if local:
        return f"{text} (a folder must hold Parquet or JSON lines, or what save_to_disk wrote)"
    if config.dataset is not None and find_shipped(config.dataset).is_file():
        return f"data set {config.label} is a file: give its folder, or JSON lines as path:"
    if config.dataset is not None and (
        config.dataset.count("/") > 1 or config.dataset.startswith((".", "/", "~"))
    ):
        return f"data set {config.dataset}: there is no such folder"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "0") not in ("0", ""):
            return (
                f"data set {config.label} is neither a folder nor in this machine's cache, and {name} keeps it from being "
                f"fetched: unset that, or give a folder that holds it ({type(error).__name__})"
            )
    return f"{text}; is it a missing folder, or a hub name that needs `hf auth login`?"
