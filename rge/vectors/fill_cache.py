"""Embed queries and candidates shard by shard; NaN and constant embeddings are errors.

Missing shards are encoded by one process or by several that share the cache directory (`rge.vectors.processes`):
every process iterates over all items in the same order and embeds every n-th shard, so files and figures are those of
one process.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np

from rge.checkpoints.settings import Settings
from rge.common.commands import progress_bar
from rge.common.errors import Fault, UserError
from rge.common.images import ImageError, load_image
from rge.common.modes import Mode
from rge.common.schema import Encoded, Item
from rge.identity.run_identity import Identity, joined, software_of
from rge.vectors.processes import ALONE, ProcessGroup
from rge.vectors.shards import Cache, covered, write_shard

Side = Literal["query", "candidate"]
ROOMS = ("rge",)
"""Our packages whose loaded modules embeddings depend on; user modules and plugins always count."""
SHARD_BATCHES = 8
"""Batches per shard: the most that a kill can lose, and the window in which `rge.embedder` sorts by length."""
SHARDS_AHEAD = 16
"""Shards per device of a cluster that wait, with the pictures that their items hold."""
POLL_S = 0.2
"""Interval at which the first process checks for the others' last shards."""
BLOCK_ROWS = 1 << 16
"""Rows processed at once, since a pool may be larger than memory."""
COLLAPSED = 1e-6
"""Embeddings whose mean cosine is this close to 1 are indistinguishable for float32 search."""


@dataclass(frozen=True)
class Cluster:
    """Devices of a Ray cluster, and how each loads the embedder."""

    load: Callable[[], "Embeds"]
    address: str | None  # see `rge.distributed.ray_data.mapped`


class Embeds(Protocol):
    """The part of `rge.embedder.Embedder` that `eval` uses."""

    checkpoint: Path
    checkpoint_hash: str
    settings: Settings

    def with_(
        self,
        *,
        exact: bool | None = ...,
        profile: str | None = ...,
        temperature: float | None = ...,
        min_new_tokens: int | None = ...,
        max_rationale_tokens: int | None = ...,
        batch_tokens: int | None = ...,
    ) -> Self:
        """An embedder with the same model and other settings, see `rge.embedder.Embedder.with_`."""

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


def fill(
    encoder: Embeds,
    items: Iterable[Item],
    cache: Cache,
    *,
    side: Side,
    mode: Mode,
    batch_size: int,
    seed: int | None = None,
    process_group: ProcessGroup = ALONE,
    cluster: Cluster | None = None,
) -> Identity | None:
    """Encode missing shards; on return the cache is complete for every process.

    ``items``: those of the cache, iterated over once; pictures may be read lazily. ``batch_size``: the same in all
    processes. ``seed``: of sampled rationales (None: greedy); each item's seed is derived from it and the item's id, so
    that neither batch size nor resuming changes the samples. The first process shows the progress of all. `cluster`
    embeds in place of this process; the software that its devices used is returned. A `UserError` if an embedding is not
    finite or not of unit norm, a picture cannot be decoded, or an item is empty or too long.
    """
    # The first process decides what is missing, so that a shard just written by another does not shift the assignment.
    done = process_group.once(lambda: covered(cache))
    name, first = f"{side}, {mode}", process_group.is_first
    bar = progress_bar(
        total=len(cache.names), initial=int(done.sum()), desc=f"{name:>17}", unit="item", disable=not first
    )
    counts_all = process_group.size > 1 and first
    missing = _missing(items, done, SHARD_BATCHES * batch_size)
    embed = _Shards(side, mode, batch_size, seed)

    def count_all() -> None:
        if counts_all:
            bar.update(max(int(covered(cache).sum()) - bar.n, 0))

    if cluster is not None and process_group.size > 1:
        raise UserError("engine=ray uses all devices by itself: start the command without a launcher").about(
            "engine"
        )
    with bar:
        if cluster is not None:
            from rge.distributed.ray_data import mapped

            shards = (
                (cache.path, start, cache.names[start : start + len(batch)], batch)
                for start, batch in missing
            )
            work = partial(_on_device, embed, cluster.load)
            made_with: Identity | None = None
            for count, software in mapped(work, shards, address=cluster.address, ahead=SHARDS_AHEAD):
                made_with = joined(made_with, software) if software else made_with
                bar.update(count)
            return made_with
        for number, (start, batch) in enumerate(missing):
            if number % process_group.size != process_group.rank:
                continue
            encoded = embed(encoder, batch, bar.update)
            write_shard(cache.path, start, cache.names[start : start + len(batch)], encoded)
            count_all()
        while counts_all and not covered(cache).all():
            time.sleep(POLL_S)  # if a process dies, the launcher stops this one
            count_all()
    process_group.once(lambda: None)
    return None


@dataclass(frozen=True)
class _Shards:
    """Embeds the items of a shard."""

    side: Side
    mode: Mode
    batch_size: int
    seed: int | None

    def __call__(
        self, encoder: Embeds, batch: Sequence[Item], on_progress: Callable[[int], object] | None = None
    ) -> Encoded:
        ids = [item.id for item in batch]
        try:
            encoded = encoder.encode(
                batch,
                side=self.side,
                mode=self.mode,
                batch_size=self.batch_size,
                seeds=_seeds(self.seed, ids),
                on_progress=on_progress,
            )
        except ImageError as error:
            raise _named(error, batch, self.side) from None
        check_embeddings(encoded.embeddings, ids, self.side)
        return encoded


def _on_device(
    embed: _Shards, load: Callable[[], Embeds]
) -> Callable[[tuple[Any, ...]], tuple[int, Identity | None]]:
    """Embeds the items of a shard and writes it; returns their number, and the software if more of it was loaded."""
    encoder, num_modules = load(), 0

    def work(shard: tuple[Path, int, Sequence[str], Sequence[Item]]) -> tuple[int, Identity | None]:
        nonlocal num_modules
        folder, start, names, batch = shard
        write_shard(folder, start, names, embed(encoder, batch))
        if num_modules == len(sys.modules):
            return len(batch), None
        num_modules = len(sys.modules)
        return len(batch), software_of(ROOMS)

    return work


def _named(error: ImageError, batch: Sequence[Item], side: Side) -> UserError:
    """The error with the id of the first item that causes it, since a set's pictures are mostly bytes without a name."""
    for item in batch:
        try:
            list(map(load_image, item.pictures))
        except ImageError as of_item:
            named = f"{of_item} (rge eval check set=DIR lists all such pictures)"
            return UserError(named, place=f"{side} {item.id!r}", kind=of_item.kind)
    return error


def check_embeddings(embeddings_ND: np.ndarray, ids: Sequence[str], side: str) -> None:
    """Raise a `UserError` for embeddings that are not finite unit vectors."""
    shape, dtype = embeddings_ND.shape, embeddings_ND.dtype
    if len(shape) != 2 or shape[0] != len(ids) or dtype != np.float32:
        raise UserError(
            f"encoder must return ({len(ids)}, D) float32 embeddings, got {shape} {dtype}", kind="shape"
        )
    norm_N = np.linalg.norm(embeddings_ND, axis=1)
    bad = np.flatnonzero(~(np.abs(norm_N - 1) <= 1e-3))  # also NaN
    if len(bad):
        raise UserError(
            f"its embedding must have norm 1, got {norm_N[bad[0]]:.6g}, as do {len(bad) - 1} more in this shard. If it is NaN or "
            "infinite, try dtype=float32; if that does not help, the checkpoint has diverged: evaluate an earlier one",
            place=f"{side} {ids[bad[0]]!r}",
        )


def cut(embeddings_ND: np.ndarray, dims: int | None) -> np.ndarray:
    """Truncate embeddings to `dims` components and renormalise them; None: no truncation."""
    if dims is None:
        return embeddings_ND
    full = embeddings_ND.shape[1]
    if not 1 <= dims <= full:
        raise UserError(f"embedding_dims must be between 1 and the embedding's {full}, got {dims}").about(
            Fault("range", "embedding_dims")
        )
    part = embeddings_ND[:, :dims]
    norm_N1 = np.linalg.norm(part, axis=1, keepdims=True)
    if not (norm_N1 > 0).all():
        num = int((norm_N1 == 0).sum())
        raise UserError(
            f"embedding_dims={dims} truncates {num} embeddings to zero; use more dimensions"
        ).about("embedding_dims")
    return part / norm_N1


def mean_cosine(embeddings_ND: np.ndarray, rows_K: np.ndarray | None = None) -> float:
    """Mean cosine over all pairs of rows (None: all): 0 for spread-out embeddings, 1 for collapsed ones."""
    rows_K = np.arange(len(embeddings_ND)) if rows_K is None else rows_K
    num = len(rows_K)
    if num < 2:
        return 0.0
    blocks = (rows_K[start : start + BLOCK_ROWS] for start in range(0, num, BLOCK_ROWS))
    total_D = np.sum([embeddings_ND[block].sum(axis=0, dtype=np.float64) for block in blocks], axis=0)
    return (float(np.square(total_D).sum()) - num) / (num * (num - 1))


def check_collapse(embeddings_ND: np.ndarray, contents: Sequence[str], side: str) -> None:
    """Raise a `UserError` if all different items have the same embedding, which cannot rank anything.

    ``contents``: content hash of each item; items with equal content may share an embedding.
    """
    first = {content: row for row, content in reversed(list(enumerate(contents)))}
    rows = np.array(sorted(first.values()), np.int64)
    if len(rows) > 1 and 1.0 - mean_cosine(embeddings_ND, rows) < COLLAPSED:
        raise UserError(
            f"all {len(rows)} different items of side {side} have the same embedding (mean cosine within {COLLAPSED} of "
            "1): the checkpoint has collapsed. Train with a lower learning rate, a higher temperature or a longer cold start",
            kind="collapsed",
        )


def _missing(items: Iterable[Item], done: np.ndarray, most: int) -> Iterator[tuple[int, list[Item]]]:
    """Yield runs of consecutive items missing from the shards, at most ``most`` long, with their first row."""
    rows = enumerate(zip(done.tolist(), items, strict=True))
    for is_done, run in groupby(rows, key=lambda row: row[1][0]):
        while not is_done and (part := list(islice(run, most))):
            yield part[0][0], [item for _, (_, item) in part]


def _seeds(seed: int | None, ids: Sequence[str]) -> list[int] | None:
    if seed is None:
        return None
    return [int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:4]) for name in ids]
