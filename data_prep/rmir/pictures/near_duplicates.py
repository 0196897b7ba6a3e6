"""Near-duplicates by perceptual hash: pictures that differ only in size, compression or slight noise.

The hash is the usual DCT hash (32 x 32 grey pixels, the 8 x 8 lowest frequencies compared with their median): 64 bits,
identical to those of the ImageHash library, which would pull in SciPy and PyWavelets.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

SIDE_PX, NUM_LOW = 32, 8
NUM_BITS = NUM_LOW * NUM_LOW
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
    repeats: dict[str, str] = {}  # hashes that are not kept, and the kept ones that they repeat
    for later, earlier in sorted((later, earlier) for earlier, later in _near_pairs(distinct, max_distance)):
        if distinct[earlier] not in repeats:
            repeats.setdefault(distinct[later], distinct[earlier])
    of = [first[repeats.get(name, name)] for name in hashes]
    return [None if other == row else other for row, other in enumerate(of)]


def num_repeats(hashes: Sequence[str], others: Sequence[str], max_distance: int) -> int:
    """Number of pictures whose hash is within the distance of any of the others' hashes, whether these repeat each other or not."""
    distinct = list(dict.fromkeys([*others, *hashes]))
    repeats = set(others)
    # The others are first, and so the earlier one of a pair.
    near = {distinct[b] for a, b in _near_pairs(distinct, max_distance) if distinct[a] in repeats}
    return sum(name in repeats or name in near for name in hashes)


def _near_pairs(hashes: Sequence[str], max_distance: int) -> set[tuple[int, int]]:
    """Pairs of rows within the distance, the earlier first."""
    import faiss

    if not hashes:
        return set()
    bits_NB = np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint8).reshape(-1, 8)
    # Pigeonhole principle: near hashes agree in at least one of max_distance + 1 bands, so exact lookups of bands suffice.
    num_bands = max_distance + 1
    index = faiss.IndexBinaryMultiHash(NUM_BITS, num_bands, NUM_BITS // num_bands)
    index.add(bits_NB)
    limits, _, found = index.range_search(bits_NB, max_distance + 1)
    rows = np.repeat(np.arange(len(bits_NB)), (limits[1:] - limits[:-1]).astype(np.int64))
    return {(row, other) for row, other in zip(rows.tolist(), found.tolist(), strict=True) if row < other}
