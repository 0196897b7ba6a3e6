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
_PAIRS_AT_ONCE = 1 << 22


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
    # Pigeonhole: of max_distance + 1 bands of the hash, two near ones share at least one band whole.
    pairs: set[tuple[int, int]] = set()
    planes = np.unpackbits(bits_NB, axis=1)
    words = bits_NB.copy().view(np.uint64)[:, 0]
    for band in np.array_split(np.arange(NUM_BITS), min(max_distance + 1, NUM_BITS)):
        keys = planes[:, band].astype(np.uint64) @ (np.uint64(1) << np.arange(len(band), dtype=np.uint64))
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.r_[True, keys[order][1:] != keys[order][:-1]])
        for group in np.split(order, starts[1:]):
            step = max(1, _PAIRS_AT_ONCE // len(group))
            for at in range(0, len(group) if len(group) > 1 else 0, step):
                part = group[at : at + step]
                distance = np.bitwise_count(words[part][:, None] ^ words[group][None])
                left, right = np.nonzero(distance <= max_distance)
                close = part[left] < group[right]
                pairs.update(zip(part[left][close].tolist(), group[right][close].tolist(), strict=True))
    return pairs
