"""Cached embeddings and rationales, in crash-safe shards under content-derived keys.

A cache is a directory of Parquet shards, each renamed into place when complete. Its name is a hash of everything that
determines the embeddings (`cache_key`), so a stale cache is never used. A shard's name contains its range of rows, so a
resumed run may use another batch size.

Every row also has its content hash. Since an embedding depends on nothing else of a set, a changed or different set reuses
rows of the same encoder (`adopt`), and no rationale is written twice.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import remove_left_over, write_bytes
from rge.common.schema import Encoded

FORMAT = 2
"""Version of the shard format; part of the key."""
ABOUT = "about.json"
COLUMNS = {
    "rationale": ("rationales", pa.string()),
    "num_rationale_tokens": ("num_rationale_tokens", pa.int64()),
    "stop_reason": ("stop_reasons", pa.string()),
    "generate_ms": ("generate_ms", pa.float64()),
    "embed_ms": ("embed_ms", pa.float64()),
}
"""Column of a shard, beside embedding and content -> attribute of `Encoded`, and type."""
ADOPTED_ROWS = 4096
"""Rows per shard of adopted rows."""
ADOPTED_MB = 512
"""Embeddings of adopted rows above this size are put in order on the disk."""


@dataclass(frozen=True)
class Cache:
    """The directory of the shards of one side and condition; ``names`` are the content hashes of its rows when complete."""

    path: Path
    names: Sequence[str]


def encoder_key(*, checkpoint_hash: str, settings: dict[str, Any], side: str, mode: str) -> str:
    """Hash of everything that determines an item's embedding except the item, 64 hexadecimal digits."""
    words = json.dumps(settings, sort_keys=True, default=str)
    return _hash([str(FORMAT), checkpoint_hash, words, side, mode])


def cache_key(encoder: str, *, modality: str, fingerprint: str, contents: Iterable[str]) -> str:
    """Hash of everything that determines a side's embeddings, 64 hexadecimal digits."""
    return _hash([encoder, modality, fingerprint, *contents])


def open_cache(cache: Cache, *, encoder: str, **about: Any) -> None:
    """Create or reopen a cache and describe it; call it in one process only.

    ``encoder``: see `encoder_key`; a new cache reuses rows of caches beside it with the same one.
    """
    cache.path.mkdir(parents=True, exist_ok=True)
    remove_left_over(cache.path)
    if not shards_of(cache):
        adopt(cache, encoder)
    describe(cache, **about, encoder=encoder)


def describe(cache: Cache, **about: Any) -> None:
    """Write or extend the description next to the shards."""
    text = json.dumps(_about(cache.path) | about, indent=1, default=str)
    write_bytes(cache.path / ABOUT, text.encode())


def caches_in(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders and descriptions of all caches."""
    for path in sorted(root.glob(f"*/{ABOUT}")):
        yield path.parent, _about(path.parent)


def adopt(cache: Cache, encoder: str) -> None:
    """Copy rows with the same content from other caches of the same encoder."""
    source: dict[str, tuple[Path, int]] = {}
    for folder, about in caches_in(cache.path.parent):
        if folder == cache.path or about.get("encoder") != encoder:
            continue
        for path in sorted(folder.glob("*.parquet")):
            for index, name in enumerate(_read(path, ("content",))["content"].to_pylist()):
                source.setdefault(name, (path, index))
    rows = np.array([row for row, name in enumerate(cache.names) if name in source], np.int64)
    if not len(rows):
        return
    embeddings_ND, others = _gathered(cache, [source[cache.names[row]] for row in rows])
    for stretch in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
        for part in np.split(stretch, range(ADOPTED_ROWS, len(stretch), ADOPTED_ROWS)):
            at, num = int(part[0]), len(part)
            flat = pa.array(embeddings_ND[at : at + num].ravel(), pa.float32())
            cells = pa.FixedSizeListArray.from_arrays(flat, embeddings_ND.shape[1])
            table = others.slice(at, num).combine_chunks().add_column(0, "embedding", cells)
            _write_table(cache.path, int(rows[at]), table)


def _gathered(cache: Cache, places: Sequence[tuple[Path, int]]) -> tuple[np.ndarray, pa.Table]:
    """Embeddings (N, D) and the other columns of rows in shards, in the order of `places`; reads each shard once."""
    wanted: dict[Path, list[tuple[int, int]]] = {}
    for target, (path, index) in enumerate(places):
        wanted.setdefault(path, []).append((index, target))
    embeddings_ND: np.ndarray | None = None
    others, targets = [], []
    for path, pairs in progress_bar(wanted.items(), desc="known rows", unit="shard", delay=2):
        index_K, target_K = np.array(pairs).T
        table = _read(path).take(index_K)
        part_KD = _embedding_rows(table)
        if embeddings_ND is None:
            embeddings_ND = _allocate(cache.path, (len(places), part_KD.shape[1]), ADOPTED_MB)
        embeddings_ND[target_K] = part_KD
        others.append(table.drop_columns("embedding"))
        targets.append(target_K)
    assert embeddings_ND is not None
    return embeddings_ND, pa.concat_tables(others).take(np.argsort(np.concatenate(targets)))


def shards_of(cache: Cache) -> list[tuple[int, int]]:
    """(start, stop) row ranges of all complete shards, ascending."""
    stems = (path.stem.partition("-") for path in cache.path.glob("*.parquet"))
    return sorted((int(start), int(stop)) for start, _, stop in stems)


def covered(cache: Cache) -> np.ndarray:
    """Mask of the rows that are in some shard, (N,) bool."""
    done = np.zeros(len(cache.names), bool)
    for start, stop in shards_of(cache):
        done[start:stop] = True
    return done


def write_shard(folder: Path, start: int, names: Sequence[str], encoded: Encoded) -> None:
    """Write rows from ``start`` on durably; ``names`` are their content hashes."""
    dim = encoded.embeddings.shape[1]
    flat = pa.array(encoded.embeddings.ravel(), pa.float32())
    columns = {"embedding": pa.FixedSizeListArray.from_arrays(flat, dim)}
    columns |= {name: pa.array(getattr(encoded, field), kind) for name, (field, kind) in COLUMNS.items()}
    columns["content"] = pa.array(names, pa.string())
    _write_table(folder, start, pa.table(columns))


def read(cache: Cache) -> Encoded:
    """Read a complete cache, rows in item order; a UserError if a shard is damaged, or rows are missing."""
    table = pa.concat_tables([table for _, _, table in _parts(cache)]).combine_chunks()
    columns: dict[str, Any] = {
        field: table[name].to_pylist() if kind == pa.string() else table[name].to_numpy()
        for name, (field, kind) in COLUMNS.items()
    }
    return Encoded(embeddings=np.ascontiguousarray(_embedding_rows(table)), **columns)


def read_embeddings(cache: Cache, place: np.ndarray, memory_mb: float) -> np.ndarray:
    """Embeddings of a complete cache, (N, D) float32; ``place``: target row of each row.

    Arrays above ``memory_mb`` become a memory map of an anonymous file in the cache's directory. A UserError as in
    `read`, or if the disk is full.
    """
    out: np.ndarray | None = None
    for start, stop, table in _parts(cache, ("embedding",)):
        part = _embedding_rows(table)
        if out is None:
            out = _allocate(cache.path, (len(cache.names), part.shape[1]), memory_mb)
        out[place[start:stop]] = part
    assert out is not None
    return out


def _hash(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part.encode())}:".encode() + part.encode())  # lengths delimit the parts
    return digest.hexdigest()


def _about(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # a run was killed while opening the cache, so it has no rows to reuse


def _allocate(folder: Path, shape: tuple[int, int], memory_mb: float) -> np.ndarray:
    size = shape[0] * shape[1] * 4
    if size <= memory_mb * 2**20:
        return np.empty(shape, np.float32)
    try:
        file = tempfile.TemporaryFile(dir=folder)  # lives as long as the map does
        os.posix_fallocate(file.fileno(), 0, size)  # report a full disk now, not as SIGBUS later
    except OSError as error:
        raise UserError(
            f"embeddings of {shape[0]} items take {size / 2**30:.1f} GB, more than memory_mb={memory_mb:g}, and do not fit "
            f"in {folder} ({error.strerror}): free some space, choose another cache=, or raise memory_mb"
        ).about("memory_mb", "cache") from None
    return np.memmap(file, np.float32, mode="r+", shape=shape)


def _parts(cache: Cache, columns: tuple[str, ...] | None = None) -> Iterator[tuple[int, int, pa.Table]]:
    """Yield (start, stop, table) for all rows in order, each row once."""
    row = 0
    for start, stop in shards_of(cache):
        path = cache.path / _name(start, stop)
        table = _read(path, columns)
        if (num := len(table)) != stop - start:
            raise UserError(f"it holds {num} rows instead of {stop - start}: delete it and run again", path)
        if start > row:
            raise UserError(f"rows {row} to {start} are missing: run again", cache.path)
        if stop > row:  # concurrent runs may have written overlapping shards
            yield row, stop, table.slice(row - start)
            row = stop
    if row != len(cache.names):
        raise UserError(f"rows {row} to {len(cache.names)} are missing: run again", cache.path)


def _read(path: Path, columns: tuple[str, ...] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise UserError(f"the shard cannot be read ({error}): delete it and run again", path) from None


def _name(start: int, stop: int) -> str:
    return f"{start:09d}-{stop:09d}.parquet"


def _write_table(folder: Path, start: int, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    write_bytes(folder / _name(start, start + len(table)), sink.getvalue().to_pybytes())


def _embedding_rows(table: pa.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)
