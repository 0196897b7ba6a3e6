"""Near-duplicates by perceptual hash: pictures that differ only in size, compression or slight noise.

The hash is the usual DCT hash (32 x 32 grey pixels, the 8 x 8 lowest frequencies compared with their median): 64 bits,
identical to those of the ImageHash library, which would pull in SciPy and PyWavelets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

SIDE_PX, NUM_LOW = 32, 8
NUM_BITS = NUM_LOW * NUM_LOW
BLOCK_ROWS = 1024
"""Hashes that are compared with all kept ones, and then with each other."""
LEAST_BAND = 8
"""Bits of a band from which looking it up is faster than comparing with every hash."""
_COSINES = 2 * np.cos(
    np.pi * np.arange(NUM_LOW)[:, None] * (2 * np.arange(SIDE_PX)[None] + 1) / (2 * SIDE_PX)
)


def phash(image: Image.Image) -> str:
    """Perceptual hash of a picture: 64 bits as 16 hexadecimal digits."""
    grey = image.convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    # Rounding makes the frequencies of a uniform surface exactly zero instead of numerical noise.
    low = np.round(_COSINES @ np.asarray(grey, dtype=np.float64) @ _COSINES.T, 6)
    return np.packbits(low > np.median(low)).tobytes().hex()


def near_duplicates(hashes: Sequence[str], max_distance: int) -> list[int | None]:
    """For each picture, the row of its first near-duplicate among the earlier pictures that are kept, or None.

    Comparing only with kept pictures keeps a chain of small changes from being removed as a whole.

    Args:
        hashes: results of `phash`, preferred pictures first.
        max_distance: bits that may differ; 0 finds equal hashes only.
    """
    first = {name: row for row, name in reversed(list(enumerate(hashes)))}
    distinct = sorted(first, key=first.__getitem__)
    repeats = _repeats(distinct, max_distance)
    of = [first[distinct[repeats.get(place, place)]] for place in map(_places(distinct), hashes)]
    return [None if other == row else other for row, other in enumerate(of)]


def num_repeats(hashes: Sequence[str], others: Sequence[str], max_distance: int) -> int:
    """Number of pictures whose hash is within the distance of any of the others' hashes, whether these repeat each other or not."""
    of_others = list(dict.fromkeys(others))
    found = set(of_others)
    todo = [name for name in dict.fromkeys(hashes) if name not in found]
    # Of many pictures of one scene, most are near one of the few that do not repeat each other.
    repeats = _repeats(of_others, max_distance)
    few = [name for place, name in enumerate(of_others) if place not in repeats]
    for some in (few, of_others):
        index = _Near(max_distance)
        index.add(_bits(some))
        for at in range(0, len(todo), BLOCK_ROWS):
            row, _ = index.pairs(_bits(todo[at : at + BLOCK_ROWS]))
            found.update(todo[at + place] for place in np.unique(row).tolist())
        todo = [name for name in todo if name not in found]
    return sum(name in found for name in hashes)


def _places(distinct: Sequence[str]) -> Callable[[str], int]:
    return {name: place for place, name in enumerate(distinct)}.__getitem__


def _repeats(distinct: Sequence[str], max_distance: int) -> dict[int, int]:
    """Places of hashes that are not kept, and the first kept one that each is near.

    Comparing with kept hashes alone takes time in proportion to their number: pictures of one scene are all near each other, but
    only a few of them are kept.
    """
    bits_NB, repeats = _bits(distinct), dict[int, int]()
    index, kept = _Near(max_distance), np.empty(0, np.int64)
    for start in range(0, len(distinct), BLOCK_ROWS):
        block = bits_NB[start : start + BLOCK_ROWS]
        row, place = index.pairs(block)
        for at, other in zip((row + start).tolist(), kept[place].tolist(), strict=True):
            repeats[at] = min(other, repeats.get(at, other))
        left = np.array([at for at in range(start, start + len(block)) if at not in repeats], np.int64)
        among = _Near(max_distance, is_small=True)
        among.add(bits_NB[left])
        row, place = among.pairs(bits_NB[left])
        later, earlier = left[row[place < row]], left[place[place < row]]
        order = np.lexsort((earlier, later))
        for at, other in zip(later[order].tolist(), earlier[order].tolist(), strict=True):
            if other not in repeats:
                repeats.setdefault(at, other)
        new = np.array([at for at in left.tolist() if at not in repeats], np.int64)
        index.add(bits_NB[new])
        kept = np.append(kept, new)
    return repeats


class _Near:
    """Hashes (N, 8), found by those within a distance."""

    def __init__(self, max_distance: int, *, is_small: bool = False):
        import faiss

        self.max_distance = max_distance
        # Pigeonhole principle: near hashes agree in at least one of max_distance + 1 bands, so exact lookups of bands suffice.
        num_bands = max_distance + 1
        width = NUM_BITS // num_bands
        if is_small or width < LEAST_BAND:
            self._index: Any = faiss.IndexBinaryFlat(NUM_BITS)
        else:
            self._index = faiss.IndexBinaryMultiHash(NUM_BITS, num_bands, width)

    def add(self, bits_NB: np.ndarray) -> None:
        if len(bits_NB):
            self._index.add(bits_NB)

    def pairs(self, bits_MB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of these hashes, and places of the added ones that they are near."""
        if not len(bits_MB) or not self._index.ntotal:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        limits, _, found = self._index.range_search(bits_MB, self.max_distance + 1)
        count = (limits[1:] - limits[:-1]).astype(np.int64)
        return np.repeat(np.arange(len(bits_MB)), count), found.astype(np.int64)


def _bits(hashes: Sequence[str]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint8).reshape(-1, NUM_BITS // 8)
