"""Embed queries and candidates shard by shard; NaN and constant embeddings are errors.

What a cache of shards lacks is encoded, by one process or by several that share its directory (`eval.embedding.processes`): every
process walks over all items in the same order and embeds every n-th shard. A shard does not depend on who makes it, so
the files and the numbers are those of a single process.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np

from eval.embedding.processes import ALONE, ProcessGroup
from eval.embedding.shards import Cache, covered, write_shard
from rge.checkpoints.settings import Settings
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.common.schema import Encoded, Item

Side = Literal["query", "candidate"]
SHARD_BATCHES = 8
"""Batches in a shard, which is what a kill can cost at most, and the window within which `rge.embedder` sorts by length."""
POLL_S = 0.2
"""How often the first process looks for the others' last shards."""
BLOCK_ROWS = 1 << 16
"""Rows of a pool that are looked at in one go, where it may be larger than memory."""
COLLAPSED = 1e-6
"""Embeddings whose mean cosine is within this of 1 are one point to float32 search."""
NO_BAR = partial(progress_bar, disable=True)
"""The progress bar of all processes but the first."""


class Embeds(Protocol):
    """What `eval` needs of `rge.embedder.Embedder`."""

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
    ) -> Self:
        """An embedder on the same model that asks otherwise, see `rge.embedder.Embedder.with_`."""

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
    progress: Callable[..., Any] = progress_bar,
    process_group: ProcessGroup = ALONE,
) -> None:
    """Encode what a cache lacks; when this returns, every process finds it complete.

    Args:
        encoder: see `Embeds`.
        items: ``cache.num_items`` items, read once and in order; pictures may be read lazily.
        cache: of exactly these items.
        side: query or candidate.
        mode: reasoning or direct.
        batch_size: items embedded at once; the same in all processes.
        seed: of sampled rationales; each item's own seed comes from it and the item's id, so that neither the batch
            size nor a resumption changes what is sampled. None for greedy decoding.
        progress: like `rge.common.commands.progress_bar`; the first process counts what all have done.
        process_group: the processes that share the work.

    Raises:
        UserError: an embedding is not finite or not of unit norm.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    # As the first process saw it: a shard that another one has just written must not change who makes the next.
    done = process_group.once(lambda: covered(cache))
    name = f"{side}, {mode}"
    counted = int(done.sum())
    with (progress if process_group.is_first else NO_BAR)(
        total=cache.num_items, initial=counted, desc=f"{name:>17}", unit="item"
    ) as bar:

        def count(num: int) -> None:
            nonlocal counted
            counted += num
            bar.update(num)

        def count_all() -> None:
            if (
                process_group.size > 1
                and process_group.is_first
                and (more := int(covered(cache).sum()) - counted) > 0
            ):
                count(more)

        for number, (start, batch) in enumerate(_missing(items, done, SHARD_BATCHES * batch_size)):
            if number % process_group.size != process_group.rank:
                continue
            ids = [item.id for item in batch]
            encoded = encoder.encode(
                batch, side=side, mode=mode, batch_size=batch_size, seeds=_seeds(seed, ids), on_progress=count
            )
            check_embeddings(encoded.embeddings, ids, side)
            write_shard(cache, start, encoded)
            count_all()
        while process_group.size > 1 and process_group.is_first and not covered(cache).all():
            time.sleep(POLL_S)  # a process that dies is the launcher's to notice; it then ends this one
            count_all()
    process_group.once(lambda: None)


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


def cut(embeddings_ND: np.ndarray, dims: int | None) -> np.ndarray:
    """The first `dims` components of every embedding, at unit norm again; None leaves them whole.

    Raises:
        UserError: fewer than one or more than there are, or nothing left of an embedding.
    """
    if dims is None:
        return embeddings_ND
    full = embeddings_ND.shape[1]
    if not 1 <= dims <= full:
        raise UserError(f"embedding_dims must be between 1 and the embedding's {full}, got {dims}")
    part = embeddings_ND[:, :dims]
    norm_N1 = np.linalg.norm(part, axis=1, keepdims=True)
    if not (norm_N1 > 0).all():
        raise UserError(
            f"embedding_dims={dims} leaves nothing of {int((norm_N1 == 0).sum())} embeddings; take more"
        )
    return part / norm_N1


def mean_cosine(embeddings_ND: np.ndarray) -> float:
    """Mean cosine over all pairs of different items: 0 for spread-out embeddings, 1 for collapsed ones."""
    num = len(embeddings_ND)
    if num < 2:
        return 0.0
    return _mean_cosine(sum(embeddings_ND[rows].sum(axis=0, dtype=np.float64) for rows in _blocks(num)), num)


def check_collapse(embeddings_ND: np.ndarray, contents: Sequence[str], side: str) -> None:
    """Refuse embeddings that are all the same although the items differ: any ranking by them is an order of ids.

    ``contents``: content digest of each item; items that show the same may share an embedding.

    Raises:
        UserError: all different items lie in one point.
    """
    first = {content: row for row, content in reversed(list(enumerate(contents)))}
    rows = np.array(sorted(first.values()), np.int64)
    total = sum(embeddings_ND[rows[part]].sum(axis=0, dtype=np.float64) for part in _blocks(len(rows)))
    if len(rows) > 1 and 1.0 - _mean_cosine(total, len(rows)) < COLLAPSED:
        raise UserError(
            f"all {len(rows)} different items of side {side} have the same embedding (mean cosine within {COLLAPSED} "
            "of 1): the checkpoint has collapsed. Train with a lower learning rate or a higher temperature, or start "
            "from a longer cold start; nothing here can be ranked"
        )


def _blocks(num: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ROWS) for start in range(0, num, BLOCK_ROWS))


def _mean_cosine(sum_D: Any, num: int) -> float:
    return (float(np.square(sum_D).sum()) - num) / (num * (num - 1))


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


def _seeds(seed: int | None, ids: Sequence[str]) -> list[int] | None:
    if seed is None:
        return None
    return [int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:4]) for name in ids]
