"""Encode queries and candidates in shards that survive a kill, and refuse embeddings that cannot be ranked.

A cache is a directory of Parquet shards, each renamed into place when complete. Its name is a hash of everything that
determines the embeddings (`cache_key`): checkpoint, settings, side, mode, modality, retrieval set and the bytes of
every text and picture. A cache of anything else has another name, so a stale one is never even opened. Which rows a
shard holds stands in its name, so a resumed run may use another batch size.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from eval.options import UserError
from rge.schema import Encoded, Item

Side = Literal["query", "candidate"]
Mode = Literal["reasoning", "direct"]
FORMAT = 1
"""Of the shards; part of the key, so that a new format never meets an old shard."""
SHARD_BATCHES = 8
"""Batches in a shard, which is what a kill can cost at most, and the window within which `rge.encode` sorts by length."""
COLLAPSED = 1e-6
"""Embeddings whose mean cosine is within this of 1 are one point to float32 search."""


class Embeds(Protocol):
    """What `eval` needs of `rge.encode.Encoder`."""

    checkpoint: Path
    checkpoint_hash: str
    settings: dict[str, Any]

    def encode(
        self,
        items: Sequence[Item],
        *,
        side: Side,
        mode: Mode,
        batch_size: int = ...,
        seeds: Sequence[int] | None = ...,
        on_progress: Callable[[int], object] | None = ...,
    ) -> Encoded:
        """Embed items, rows in their order."""


@dataclass(frozen=True)
class Cache:
    """Where the shards of one side in one condition are kept.

    Attributes:
        path: the directory; it exists.
        num_items: rows that all shards together hold.
    """

    path: Path
    num_items: int


def cache_key(
    *, checkpoint_hash: str, settings: dict[str, Any], side: str, mode: str, modality: str, fingerprint: str, contents: Iterable[str]
) -> str:  # fmt: skip
    """Name of everything that determines a side's embeddings, 64 hexadecimal digits.

    Args:
        checkpoint_hash: of the weights, tokenizer and configuration.
        settings: prompt profile, pixel limits, generation settings, dtype.
        side: query or candidate.
        mode: reasoning or direct.
        modality: both, text or image.
        fingerprint: of the retrieval set.
        contents: content digest of every item, in order.
    """
    digest = hashlib.sha256()
    settings_text = json.dumps(settings, sort_keys=True, default=str)
    for part in (str(FORMAT), checkpoint_hash, settings_text, side, mode, modality, fingerprint, *contents):
        digest.update(f"{len(part.encode())}:".encode() + part.encode())  # lengths keep the parts apart
    return digest.hexdigest()


def open_cache(root: Path, key: str, num_items: int, describe: dict[str, Any]) -> Cache:
    """Create or reopen the cache of a key.

    Args:
        root: directory of all caches.
        key: see `cache_key`.
        num_items: rows of the side.
        describe: written beside the shards for people who wonder what they are.
    """
    path = root / f"{describe['side']}-{describe['mode']}-{describe['modality']}-{key[:20]}"
    path.mkdir(parents=True, exist_ok=True)
    for left_over in path.glob("*.tmp"):  # of a killed run
        left_over.unlink(missing_ok=True)
    write_atomically(path / "about.json", json.dumps(describe | {"key": key}, indent=2, default=str).encode())
    return Cache(path, num_items)


def encode_side(
    encoder: Embeds,
    items: Iterable[Item],
    cache: Cache,
    *,
    side: Side,
    mode: Mode,
    batch_size: int,
    seed: int | None = None,
    progress: Callable[..., Any] = tqdm,
) -> Encoded:
    """Encode what the cache lacks, shard by shard, and return everything.

    Args:
        encoder: see `Embeds`.
        items: ``cache.num_items`` items, read once and in order; pictures may be read lazily.
        cache: of exactly these items.
        side: query or candidate.
        mode: reasoning or direct.
        batch_size: items embedded at once.
        seed: of sampled rationales; each item's own seed comes from it and the item's id, so that neither the batch
            size nor a resumption changes what is sampled. None for greedy decoding.
        progress: like `tqdm.tqdm`.

    Returns:
        Embeddings and rationales of all items, rows in their order.

    Raises:
        UserError: an embedding is not finite or not of unit norm, or a shard cannot be read.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    done = np.zeros(cache.num_items, bool)
    for start, stop in _shards(cache):
        done[start:stop] = True
    name = f"{side}, {mode}"
    with progress(total=cache.num_items, initial=int(done.sum()), desc=f"{name:>17}", unit="item") as bar:
        for start, batch in _missing(items, done, SHARD_BATCHES * batch_size):
            seeds = None if seed is None else [_item_seed(seed, item.id) for item in batch]
            encoded = encoder.encode(
                batch, side=side, mode=mode, batch_size=batch_size, seeds=seeds, on_progress=bar.update
            )
            check_embeddings(encoded.embeddings, [item.id for item in batch], side)
            _write_shard(cache, start, encoded)
    return _read_shards(cache)


def check_embeddings(embeddings_ND: np.ndarray, ids: Sequence[str], side: str) -> None:
    """Refuse embeddings that are not finite unit vectors.

    Raises:
        UserError: naming the first id and what to do.
    """
    if embeddings_ND.ndim != 2 or len(embeddings_ND) != len(ids) or embeddings_ND.dtype != np.float32:
        raise UserError(
            f"encoder must return ({len(ids)}, D) float32 embeddings, got {embeddings_ND.shape} {embeddings_ND.dtype}"
        )
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise UserError(
            f"embedding of {side} {ids[bad[0]]!r} holds NaN or infinity, and {len(bad) - 1} more in this shard do: try "
            "dtype=float32; if it stays, the checkpoint has diverged and an earlier one has to be evaluated"
        )
    norm_N = np.linalg.norm(embeddings_ND, axis=1)
    bad = np.flatnonzero(np.abs(norm_N - 1) > 1e-3)
    if len(bad):
        raise UserError(f"embedding of {side} {ids[bad[0]]!r} must have norm 1, got {norm_N[bad[0]]:.6g}")


def mean_cosine(embeddings_ND: np.ndarray) -> float:
    """Mean cosine over all pairs of different items: 0 for spread-out embeddings, 1 for collapsed ones.

    Args:
        embeddings_ND: unit norm; fewer than two rows give 0.
    """
    num = len(embeddings_ND)
    if num < 2:
        return 0.0
    total = float(np.square(embeddings_ND.sum(axis=0, dtype=np.float64)).sum())
    return (total - num) / (num * (num - 1))


def check_collapse(embeddings_ND: np.ndarray, contents: Sequence[str], side: str) -> None:
    """Refuse embeddings that are all the same although the items differ: any ranking by them is an order of ids.

    Args:
        embeddings_ND: unit norm.
        contents: content digest of each item; items that show the same may share an embedding.
        side: query or candidate, for the message.

    Raises:
        UserError: all different items lie in one point.
    """
    first = {content: row for row, content in reversed(list(enumerate(contents)))}
    distinct = embeddings_ND[sorted(first.values())]
    if len(distinct) > 1 and 1.0 - mean_cosine(distinct) < COLLAPSED:
        raise UserError(
            f"all {len(distinct)} different items of side {side} have the same embedding (mean cosine within {COLLAPSED} "
            "of 1): the checkpoint has collapsed. Train with a lower learning rate or a higher temperature, or start "
            "from a longer cold start; nothing here can be ranked"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it: whoever sees the name sees all of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _missing(items: Iterable[Item], done: np.ndarray, most: int) -> Iterator[tuple[int, list[Item]]]:
    """Stretches of items that no shard holds, at most ``most`` long, each with its first row."""
    stretch: list[Item] = []
    row = -1
    for row, item in enumerate(items):  # noqa: B007  # the last row is needed below
        if not done[row]:
            stretch.append(item)
        if stretch and (done[row] or len(stretch) == most):
            yield row + (not done[row]) - len(stretch), stretch
            stretch = []
    if row + 1 != len(done):
        raise ValueError(f"the cache was opened for {len(done)} items, got {row + 1}")
    if stretch:
        yield row + 1 - len(stretch), stretch


def _item_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:4])


def _shards(cache: Cache) -> list[tuple[int, int]]:
    found = []
    for path in cache.path.glob("*.parquet"):
        start, stop = map(int, path.stem.split("-"))
        found.append((start, stop))
    return sorted(found)


def _write_shard(cache: Cache, start: int, encoded: Encoded) -> None:
    num, dim = encoded.embeddings.shape
    table = pa.table(
        {
            "embedding": pa.FixedSizeListArray.from_arrays(
                pa.array(encoded.embeddings.ravel(), pa.float32()), dim
            ),
            "rationale": pa.array(encoded.rationales, pa.string()),
            "num_rationale_tokens": pa.array(encoded.num_rationale_tokens, pa.int64()),
            "stop_reason": pa.array(encoded.stop_reasons, pa.string()),
            "generate_ms": pa.array(encoded.generate_ms, pa.float64()),
            "embed_ms": pa.array(encoded.embed_ms, pa.float64()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    write_atomically(cache.path / f"{start:09d}-{start + num:09d}.parquet", sink.getvalue().to_pybytes())


def _read_shards(cache: Cache) -> Encoded:
    parts: list[Encoded] = []
    row = 0
    embeddings: np.ndarray | None = None
    for start, stop in _shards(cache):
        path = cache.path / f"{start:09d}-{stop:09d}.parquet"
        try:
            table = pq.read_table(path)
            part = _embedding_rows(table)
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise UserError(f"shard {path} cannot be read ({error}): delete it and run again") from None
        if len(part) != stop - start:
            raise UserError(
                f"shard {path} holds {len(part)} rows instead of {stop - start}: delete it and run again"
            )
        if start > row:
            raise UserError(f"rows {row} to {start} are missing from {cache.path}: run again")
        if embeddings is None:
            embeddings = np.empty((cache.num_items, part.shape[1]), np.float32)
        new = slice(row - start, stop - start)  # two runs at once may have written overlapping shards
        if stop <= row:
            continue
        embeddings[row:stop] = part[new]
        parts.append(
            Encoded(
                embeddings=embeddings[row:stop],
                rationales=table["rationale"].to_pylist()[new],
                num_rationale_tokens=table["num_rationale_tokens"].to_numpy()[new],
                stop_reasons=table["stop_reason"].to_pylist()[new],
                generate_ms=table["generate_ms"].to_numpy()[new],
                embed_ms=table["embed_ms"].to_numpy()[new],
            )
        )
        row = stop
    if embeddings is None or row != cache.num_items:
        raise UserError(f"rows {row} to {cache.num_items} are missing from {cache.path}: run again")
    return Encoded(
        embeddings=embeddings,
        rationales=[text for part in parts for text in part.rationales],
        num_rationale_tokens=np.concatenate([part.num_rationale_tokens for part in parts]),
        stop_reasons=[reason for part in parts for reason in part.stop_reasons],
        generate_ms=np.concatenate([part.generate_ms for part in parts]),
        embed_ms=np.concatenate([part.embed_ms for part in parts]),
    )


def _embedding_rows(table: pa.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)
