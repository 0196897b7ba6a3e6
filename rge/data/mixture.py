"""The records of each step, a pure function of seed and step, for any number of processes."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Draw:
    """One record of a batch."""

    source: int  # number of the source
    index: int  # number of the record in it
    seed: int  # of everything random about it in this step: drawn positive, augmentation, sampling


class Mixture:
    """The records of each step's global batch.

    Every source is read in a new random order each epoch. Its share of the batches follows its weight, exact over time:
    of n records drawn so far, a source with share s has s * n, up to rounding by one record per source (with share 0.3 of 8
    it gets 2 or 3 records per step, seldom one more or less, 2.4 on average).

    A batch consists of equal sub-batches, and the records of each come from one group of sources. Groups take turns by the sum
    of their sources' weights, with the same exactness, in rounds that are long enough for all of them. The turns of a group are
    spread evenly over a round, from a random beginning; so the order, and which groups share a step, change with every round.

    Args:
        sizes: records of each source; None for a stream, whose draws are numbered consecutively.
        batch_size: records per step over all processes, a multiple of `sub_batches`.
        groups: number of each source's group; None: all are in one.
        sub_batches: sub-batches of a step.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        *,
        groups: Sequence[int] | None = None,
        sub_batches: int = 1,
    ):
        assert batch_size % sub_batches == 0, "refused before training, see `rge.data.collate.problems`"
        self.sizes, self.batch_size, self.seed = list(sizes), batch_size, seed
        self.sub_batches = sub_batches
        share = np.array(weights, dtype=np.float64)
        self.share = share / share.sum()
        of_source = [0] * len(self.sizes) if groups is None else list(groups)
        self.members = [
            [source for source, group in enumerate(of_source) if group == one]
            for one in dict.fromkeys(of_source)
        ]
        self.of_group = [float(self.share[group].sum()) for group in self.members]
        least = min(share for share in self.of_group if share > 0)
        self.round = sub_batches * math.ceil(min(1 / least - 1e-6, LONGEST_ROUND) / sub_batches)
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._rounds: dict[int, np.ndarray] = {}

    @property
    def num_records(self) -> int:
        """Records of all sources but streams."""
        return sum(size for size in self.sizes if size is not None)

    def batch(self, step: int) -> list[Draw]:
        """The global batch of a step, `batch_size` draws, sources interleaved at random."""
        before, after = self.drawn_before(step), self.drawn_before(step + 1)
        draws = [
            (source, count if size is None else self._index(source, *divmod(count, size)))
            for source, size in enumerate(self.sizes)
            for count in range(before[source], after[source])
        ]
        generator = np.random.default_rng([self.seed, 1, step])
        seeds = generator.integers(0, 2**63, size=self.batch_size)
        mixed = generator.permutation(self.batch_size)
        return [Draw(draws[place][0], draws[place][1], int(seeds[place])) for place in mixed]

    def drawn_before(self, step: int) -> list[int]:
        """Records drawn from each source before a step."""
        turns = self._turns(step * self.sub_batches)
        drawn = [0] * len(self.sizes)
        for group, count in zip(self.members, turns, strict=True):
            total = count * (self.batch_size // self.sub_batches)
            for source, number in zip(group, _divided(total, self.share[group]), strict=True):
                drawn[source] = number
        return drawn

    def most_at_once(self, source: int) -> float:
        """Records of a source in a step that holds as many of its group's sub-batches as any."""
        group = next(group for group in self.members if source in group)
        of_group = self.of_group[self.members.index(group)]
        num_sub_batches = math.ceil(self.sub_batches * of_group - 1e-6)
        return num_sub_batches * self.batch_size / self.sub_batches * self.share[source] / of_group

    def _turns(self, count: int) -> list[int]:
        """Sub-batches of each group among the first `count`."""
        if len(self.members) == 1:
            return [count]
        number, rest = divmod(count, self.round)
        turns = _divided(number * self.round, self.of_group)
        if rest:
            begun = np.bincount(self._round(number)[:rest], minlength=len(turns))
            turns = [turn + more for turn, more in zip(turns, begun.tolist(), strict=True)]
        return turns

    def _round(self, number: int) -> np.ndarray:
        """(round,) groups in their order."""
        if number not in self._rounds:
            if len(self._rounds) > 4:
                self._rounds.clear()
            ends = (_divided((number + more) * self.round, self.of_group) for more in (0, 1))
            counts = [stop - start for start, stop in zip(*ends, strict=True)]
            begins = np.random.default_rng([self.seed, 2, number]).random(len(counts))
            places = [
                (np.arange(each) + begin) / each for each, begin in zip(counts, begins, strict=True) if each
            ]
            groups = np.repeat(np.arange(len(counts)), counts)
            self._rounds[number] = groups[np.argsort(np.concatenate(places), kind="stable")]
        return self._rounds[number]

    def _index(self, source: int, epoch: int, place: int) -> int:
        size = self.sizes[source]
        assert size is not None
        if size > LARGE:
            return permuted(place, size, f"{self.seed} {source} {epoch}")
        key = (source, epoch)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.sizes):
                self._orders.clear()
            self._orders[key] = np.random.default_rng([self.seed, 0, source, epoch]).permutation(size)
        return int(self._orders[key][place])


def _divided(total: int, shares: Sequence[float]) -> list[int]:
    """Integers that sum to the total, by shares, none of which falls when the total grows.

    A share is taken of what those before it leave. Differences of rounded cumulative shares would sometimes draw a negative
    number from a small source.
    """
    counts, left, share_left = [], total, float(sum(shares))
    for share in shares[:-1]:
        counts.append(math.floor(left * share / share_left + 1e-6))
        left, share_left = left - counts[-1], share_left - share
    return [*counts, left]


LONGEST_ROUND = 1 << 12
"""Sub-batches of a round, even if there are groups whose share is smaller."""

LARGE = 1 << 22
"""Number of records above which an epoch's order is computed on demand instead of stored, 8 bytes per record."""


def permuted(place: int, size: int, key: str) -> int:
    """Position of an index in a pseudo-random permutation of `size`, without materialising it.

    A Feistel network of four rounds permutes the numbers of 2k bits. Results beyond the size are permuted again; that takes
    fewer than four passes on average.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half | right
        if place < size:
            return place
