"""Open a recipe's sources: a file, a data set of the library `datasets`, or a registered source."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import json

from rge.common.errors import Fault, UserError
from rge.common.files import find_shipped, pointer_note
from rge.common.registry import Registry
from rge.common.schema import Record
from rge.data.config import JSON_FILES, OTHER_FILES, RecordsConfig, SourceConfig
from rge.data.rows import (
    ArrowRows,
    Columns,
    Opened,
    RowRecords,
    common_type,
    drop_image_bytes,
    parsed,
    rows_of,
)
from rge.data.sources import Checks, RecordError, RecordFile, Records, parsed_line, strip_bom
from rge.data.streams import Stream
from rge.tables.listing import visible_files
from rge.tables.rows import TableFormat, table_rows

DataSource = Callable[..., Any]
"""Called with the source's `options`; returns rows: a list, or anything with a length and ``[number]``. A row maps names of the
record's fields, or of columns that `columns` maps, to values; a picture is encoded bytes or a path."""

DATA_SOURCES: Registry[DataSource] = Registry("data source", "rge.data_sources")
"""By the name that a source's ``type`` gives."""

register_data_source = DATA_SOURCES.register
"""Decorator: ``{type: NAME, options: {...}}`` as a source reads what the function returns."""

JSON_BYTES = 16 << 20
"""Bytes of JSON lines whose columns are looked at together."""

SHARDS = 256
"""Shards of a local data set read as a stream: enough for each worker of many processes."""


def open_records(
    config: RecordsConfig,
    *,
    first: int | None = None,
    seed: int = 0,
    notes: Path | None = None,
    **checks: Unpack[Checks],
) -> Records:
    """Open a source and check its records; a stream's are checked as they are read.

    With `first`, only this number of a stream's records is read, as a fixed set; `seed` and `notes` are those of
    `rge.data.streams.Stream`. A source that is missing or unreadable, or has records that break the format, is a `RecordError`.
    """
    if config.lines is not None:
        return RecordFile(config.lines, **checks)
    if not config.streaming or first is not None:
        return RowRecords(config, partial(_open_rows, first=first), **checks)
    assert isinstance(config, SourceConfig)
    return Stream(config, _open_stream, seed=seed, notes=notes, **checks)


def some_records(config: RecordsConfig, most: int) -> Iterator[Record]:
    """Records without pictures, evenly spread (in a large file, by byte offset); of a stream the first ones.

    Those that break the format are left out.
    """
    if config.lines is not None:
        path = find_shipped(config.lines)
        found = [parsed_line(line, path.name, 0)[0] for line in _some_lines(path, most)]
    else:
        rows, columns, _ = _open_rows(config, most, without_pictures=True)
        count = len(rows)
        numbers = [count * place // most for place in range(most)] if count > most else range(count)
        bare = rows.without_pictures if isinstance(rows, ArrowRows) else lambda start, _: [rows[start]]
        found = [parsed(columns, bare(number, number + 1)[0], number)[0] for number in numbers]
    return (record for record in found if record is not None)


def _some_lines(path: Path, most: int) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as lines:
        if size < 16 << 20:
            yield from map(strip_bom, lines)
            return
        for number in range(most):
            lines.seek(size * number // most)
            if number:
                lines.readline()  # skip the rest of the current record
            yield strip_bom(lines.readline())


def _open_rows(config: RecordsConfig, first: int | None = None, *, without_pictures: bool = False) -> Opened:
    """A source's rows; of a stream the first ones, optionally with `PRESENT` in place of pictures' bytes."""
    if config.type is not None:
        rows = _Guarded(DATA_SOURCES[config.type], config)
        return rows, Columns(config, None), Path()
    if not config.streaming:
        dataset, folder = load(config)
        columns = Columns(config, dataset.column_names, dataset.features)
        return ArrowRows(dataset, columns.used or []), columns, folder
    assert first is not None
    stream, columns, folder = _open_stream(config)
    found: list[Mapping[str, Any]] = []
    for table in stream.iter(batch_size=min(first, 64)):
        kept = table.slice(0, first - len(found))
        found += rows_of(drop_image_bytes(kept) if without_pictures else kept)
        if len(found) == first:
            break
    return found, columns, folder


class _Guarded:
    """Rows of a registered source; its exceptions become errors that name the source."""

    def __init__(self, source: DataSource, config: RecordsConfig):
        self._name = f"data source {config.label}"
        with _explained(self._name):
            self._rows = source(**config.options)
            self._number = len(self._rows)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with _explained(self._name, f"row {index}"):
            return self._rows[index]


@contextmanager
def _explained(source: str, place: str | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a user's code may raise anything
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise RecordError(f"{kind}{error}", source, place) from error


def _open_stream(config: RecordsConfig) -> Opened:
    """A stream of tables."""
    dataset, folder = load(config)
    names = dataset.column_names
    if names is None:  # not known before the first row
        names = list(next(iter(dataset.take(1)), {}))
    columns = Columns(config, names, dataset.features)
    return dataset.select_columns(columns.used).with_format("arrow"), columns, folder


def load(config: RecordsConfig) -> tuple[Any, Path]:
    """Load a ``datasets.Dataset``, or an ``IterableDataset`` for a stream, and the folder that paths of pictures are relative to.

    RecordError: it cannot be loaded; says why and what to do.
    """
    import datasets  # takes a second, and training on files does not need it

    named = config.dataset or config.path
    assert named is not None
    datasets.disable_progress_bars()  # we show our own
    # Absolute, since the library takes "json" or "parquet" for a reader of all such files below the working directory.
    folder = find_shipped(Path(named).expanduser()).absolute()
    if folder.is_file():
        return _of_file(config, folder), folder.parent
    local = folder.is_dir()
    if not local and not _HUB_NAME.fullmatch(named):
        raise RecordError(f"there is no file or folder {folder}", config.label, kind="missing")
    if not local and named.isidentifier() and find_spec(f"datasets.packaged_modules.{named}"):
        raise RecordError(
            f"there is no folder {folder}, and {named} is a format, not a name on the hub",
            config.label,
            kind="missing",
        )
    try:
        if local and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _saved(config, folder), folder
        files, features = _local_files(folder, config) if local else (None, None)
        found = datasets.load_dataset(
            str(folder) if local else named,
            config.subset,
            data_files=files,
            features=features,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
    except RecordError:
        raise
    except Exception as error:  # the library raises what its readers, and the network's, run into
        fix = "a folder must hold Parquet or JSON lines, or what save_to_disk wrote"
        if not local:
            fix = (
                "there is no such folder or file. If it is a name on the hub, it may need `hf auth login`, or HF_HUB_OFFLINE or "
                "HF_DATASETS_OFFLINE is set and it is not in this machine's cache"
            )
        kind = "unreadable" if local else "unknown"
        raise RecordError(f"it cannot be loaded: {_reason(error)}; {fix}", config.label, kind=kind) from error
    return found, folder if local else Path()


_HUB_NAME = re.compile(
    r"(?!.*\.(parquet|csv|tsv|jsonl?|gz|xz|zst|bz2|zip|arrow)$)\w[\w.-]*(/[\w.-]+)?", re.IGNORECASE
)
"""A name that may be asked for on the hub; anything else is a path, which nobody else needs to know."""


def _of_file(config: RecordsConfig, file: Path) -> Any:
    """One file as a data set.

    RecordError: it is of another format, or unreadable.
    """
    import datasets

    if config.subset is not None or config.revision is not None:
        raise RecordError("it is a file: leave out subset and revision", file).about("subset", "revision")
    name = file.name.lower()
    try:
        if name.endswith((".csv", ".tsv")):
            # The library's reader would turn the id 007 into 7, and the answer "None" into nothing.
            table = datasets.Dataset.from_list(list(table_rows(file, form=TableFormat(config.quoting))))
            return table.to_iterable_dataset() if config.streaming else table
        kind = "parquet" if name.endswith(".parquet") else "json"
        if not _rows_in(file):
            raise RecordError("it has no rows", file, kind="empty")
        if kind == "json" and not name.endswith((*JSON_FILES, *OTHER_FILES)):
            raise RecordError(
                f"it has an ending that says nothing: rename it, to one of {', '.join((*JSON_FILES, *OTHER_FILES))}",
                file,
                kind="ending",
            )
        if name.endswith(".zst") and find_spec("zstandard") is None:
            raise RecordError(
                "it needs a package that is not installed: pip install zstandard", file, kind="package"
            )
        features = None
        if kind == "json":
            parts = _schemas_of_json(str(file), whole=not config.streaming)
            features = _common_features(((str(file), part) for part in parts), config)
        return datasets.load_dataset(
            kind,
            data_files={config.split: [str(file)]},
            features=features,
            split=config.split,
            streaming=config.streaming,
        )
    except UserError as error:
        raise RecordError.caused_by(error) from error
    except Exception as error:  # the library raises what its readers run into
        raise RecordError(f"it cannot be read: {_reason(error)}", file, kind="unreadable") from error


def _reason(error: Exception) -> str:
    """Why a data set cannot be loaded, which the library hides behind a message of its own."""
    import datasets

    says_why = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
    return str(says_why or error) or type(error).__name__


def _local_files(folder: Path, config: RecordsConfig) -> tuple[dict[str, list[str]] | None, Any]:
    """Files of a folder and their common columns, each None if the library's own choice will do.

    The library goes by the most frequent ending, and would read tables beside many pictures as a folder of pictures alone. It
    takes the columns of the first file for those of all.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder), config.subset)
    part = config.split.partition("[")[0]
    files = None
    if builder.name == "imagefolder":
        every = (Path(place, name) for place, names in visible_files(folder) for name in names)
        found = (path for path in every if path.suffix in (".parquet", ".jsonl") and path.stem != "metadata")
        if not (tables := sorted(str(path.relative_to(folder)) for path in found)):
            return None, None
        files = {config.split: tables}
        builder = datasets.load_dataset_builder(str(folder), config.subset, data_files=files)
    shards = (builder.config.data_files or {}).get(part, [])
    if builder.name == "parquet" and (filled := [path for path in shards if _rows_in(path)]) != shards:
        if not filled:
            raise RecordError("it has no rows", config.label, kind="empty")
        shards = filled
        files = {part: [str(Path(path).relative_to(folder)) for path in filled]}
    if builder.name not in ("parquet", "json") or builder.info.features is not None:
        return files, None
    # A JSON file is looked through, since its columns stand nowhere; of a stream's, only the beginning.
    whole = not config.streaming
    schemas = (
        (path, schema)
        for path in map(str, shards)
        for schema in ([pq.read_schema(path)] if builder.name == "parquet" else _schemas_of_json(path, whole))
    )
    return files, _common_features(schemas, config)


def _rows_in(path: str | Path) -> int:
    """Rows of a Parquet file, of which the library reads none without; bytes of another file. RecordError: it is unreadable."""
    try:
        is_parquet = str(path).lower().endswith(".parquet")
        return pq.read_metadata(path).num_rows if is_parquet else Path(path).stat().st_size
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordError(
            f"it cannot be read: {error}{pointer_note(path)}", path, kind="unreadable"
        ) from error


def _schemas_of_json(path: str, whole: bool) -> Iterator[pa.Schema]:
    """Columns of each part of a file of JSON lines; none of a part that is not JSON lines, which the library explains."""
    with pa.input_stream(path, compression="detect") as file, io.BufferedReader(file) as lines:
        while part := lines.read(JSON_BYTES):
            part += lines.readline()
            try:
                options = json.ReadOptions(block_size=len(part))
                yield json.read_json(io.BytesIO(strip_bom(part)), options).schema
            except pa.ArrowInvalid:
                return
            if not whole:
                return


def _common_features(schemas: Iterable[tuple[str, pa.Schema]], config: RecordsConfig) -> Any:
    """The columns (``datasets.Features``) into which all files can be read; None if they are the same everywhere.

    RecordError: names a column, and two files in which it has types that do not go together.
    """
    import datasets

    kinds: dict[str, pa.DataType] = {}
    first_in: dict[str, str] = {}
    known: dict[
        str, list[tuple[pa.DataType, Any]]
    ] = {}  # features that say more than their type, such as pictures
    versions: list[pa.Schema] = []
    for path, schema in schemas:
        if any(schema.equals(version, check_metadata=True) for version in versions):
            continue
        versions.append(schema)
        features = datasets.Features.from_arrow_schema(schema)
        for field in schema:
            known.setdefault(field.name, []).append((field.type, features[field.name]))
            try:
                kinds[field.name] = common_type(kinds.get(field.name, field.type), field.type, field.name)
            except ValueError as error:
                raise RecordError(
                    f"{error} ({first_in[field.name]} and {path}); write both alike",
                    config.label,
                    path,
                    field.name,
                ) from None
            if not pa.types.is_null(field.type):
                first_in.setdefault(field.name, path)
    if all(schema.equals(versions[0]) for schema in versions):
        return None
    plain = datasets.Features.from_arrow_schema(pa.schema(list(kinds.items())))
    same = {
        name: next((one for type_, one in known[name] if type_ == kind), None) for name, kind in kinds.items()
    }
    return datasets.Features({name: same[name] or plain[name] for name in kinds})


def _saved(config: RecordsConfig, folder: Path) -> Any:
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise RecordError(f"it has no split {config.split!r}; it has {', '.join(found)}", folder).about(
                Fault("choice", "split", tuple(found))
            )
        found = found[config.split]
    elif found.split is not None and str(found.split) != config.split:
        raise RecordError(f"it is the split {str(found.split)!r}, not {config.split!r}", folder).about(
            "split"
        )
    if config.subset is not None or config.revision is not None:
        raise RecordError("it was saved by save_to_disk: leave out subset and revision", folder).about(
            "subset", "revision"
        )
    shards = max(1, min(SHARDS, len(found)))
    return found.to_iterable_dataset(num_shards=shards) if config.streaming else found
