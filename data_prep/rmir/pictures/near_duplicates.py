"""Near-duplicates by perceptual hash: pictures that differ only in size, compression or a little noise.

The hash is the usual DCT hash (32 x 32 grey pixels, the 8 x 8 lowest frequencies, above or below their median): 64 bits,
the same as those of the library ImageHash, which would bring SciPy and PyWavelets for these few lines.
"""

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
    # Rounded, so that the frequencies of an even surface are zero and not noise of the last digits.
    low = np.round(_COSINES @ np.asarray(grey, dtype=np.float64) @ _COSINES.T, 6)
    return np.packbits(low > np.median(low)).tobytes().hex()


def near_duplicates(hashes: list[str], max_distance: int) -> list[int | None]:
    """For each picture, the earlier picture that it repeats, or None.

    A picture is compared with the earlier ones that stay, so a chain of small changes does not swallow all its links.

    Args:
        hashes: of `phash`, in the order in which pictures are preferred.
        max_distance: bits that may differ; 0 finds equal hashes only.

    Returns:
        Row of the first earlier picture that stays and is near, a list as long as `hashes`.
    """
    first: dict[str, int] = {}
    found: list[int | None] = [None] * len(hashes)
    for row, name in enumerate(hashes):
        if first.setdefault(name, row) != row:
            found[row] = first[name]
    rows = np.array(sorted(first.values()), dtype=np.int64)
    if max_distance == 0 or len(rows) < 2:
        return found
    bits = np.frombuffer(bytes.fromhex("".join(hashes[row] for row in rows)), dtype=np.uint8).reshape(-1, 8)
    near: dict[int, list[int]] = {}
    for earlier, later in _near_pairs(bits, max_distance):
        near.setdefault(int(later), []).append(int(earlier))
    gone: set[int] = set()
    for later in sorted(near):
        stays = [earlier for earlier in sorted(near[later]) if earlier not in gone]
        if stays:
            gone.add(later)
            found[int(rows[later])] = int(rows[stays[0]])
    # Copies of a hash follow the picture that their own original follows.
    return [found[target] if target is not None and found[target] is not None else target for target in found]


def _near_pairs(bits_NB: np.ndarray, max_distance: int) -> set[tuple[int, int]]:
    """Rows that differ in so few bits, the earlier first."""
    import faiss

    # Pigeonhole: two near ones share one of max_distance + 1 bands of the hash, so each band is looked up as it is.
    num_bands = max_distance + 1
    index = faiss.IndexBinaryMultiHash(NUM_BITS, num_bands, NUM_BITS // num_bands)
    index.add(bits_NB)
    limits, _, found = index.range_search(bits_NB, max_distance + 1)
    rows = np.repeat(np.arange(len(bits_NB)), (limits[1:] - limits[:-1]).astype(np.int64))
    return {(row, other) for row, other in zip(rows.tolist(), found.tolist(), strict=True) if row < other}
