"""Near-duplicates against a plain loop over all pairs, on hashes of one scene, spread ones, and both."""

import numpy as np
import pytest

from rge.content import near_duplicates as module
from rge.content.near_duplicates import near_duplicates, num_repeats


def hashes_of(scene, spread, seed):
    """Hashes that differ in some bits of one, and random ones, in mixed order."""
    rng = np.random.default_rng(seed)
    bits = np.tile(np.random.default_rng(0).integers(0, 2, 64, dtype=np.uint8), (scene, 1))
    bits[:, :20] ^= rng.random((scene, 20)) < 0.3
    bits = np.concatenate([bits, rng.integers(0, 2, (spread, 64), dtype=np.uint8)])
    return [row.tobytes().hex() for row in np.packbits(bits[rng.permutation(len(bits))], axis=1)]


def distance(one, other):
    return (int(one, 16) ^ int(other, 16)).bit_count()


@pytest.mark.parametrize("max_distance", [0, 1, 4, 9, 16])
@pytest.mark.parametrize(("scene", "spread"), [(150, 0), (0, 100), (90, 60), (1, 0), (0, 0)])
def test_equal_to_all_pairs(max_distance, scene, spread, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ROWS", 16)
    hashes, others = hashes_of(scene, spread, 1), hashes_of(scene // 3, spread // 3, 2)
    expected: list[int | None] = []
    for row, name in enumerate(hashes):
        kept = (at for at in range(row) if expected[at] is None)
        expected.append(next((at for at in kept if distance(hashes[at], name) <= max_distance), None))
    assert near_duplicates(hashes, max_distance) == expected
    near = [any(distance(name, other) <= max_distance for other in others) for name in hashes]
    assert num_repeats(hashes, others, max_distance) == sum(near)


def test_pictures_of_one_scene_are_compared_with_the_few_that_are_kept(monkeypatch):
    """Comparing all pairs took time growing by n^1.6, and memory for all of them."""
    added, real = [], module._Near.add
    monkeypatch.setattr(module._Near, "add", lambda self, bits: added.append(len(bits)) or real(self, bits))
    found = near_duplicates(hashes_of(3000, 0, 1), 4)
    assert sum(added[1::2]) == found.count(None) < 300
