"""Many tensors to a device by one copy: the same values, types and shapes, from one pinned buffer."""

from dataclasses import dataclass

import torch
from fake_gpu import DEVICE, FakeGpu, OnGpu

from rge.distributed.transfer import ALIGNMENT, moved


@dataclass(frozen=True)
class Part:
    """What is moved."""

    lengths: tuple[int, ...]
    place: torch.Tensor


def test_values_types_and_shapes_stay_and_one_buffer_is_copied():
    tree = {
        "a": Part((3, 4), torch.arange(6).reshape(2, 3).T),
        "b": [torch.tensor([True, False, True]), torch.empty(0, 3, dtype=torch.long), None],
        "c": (torch.tensor([1.5, -2.5]).expand(2, 2), torch.tensor(7, dtype=torch.int32)),
    }
    here = moved(tree, "cpu")
    with FakeGpu() as gpu:
        there = moved(tree, DEVICE)
        assert (gpu.copies["-"], gpu.unpinned["-"], gpu.of(gpu.waits, "-")) == (1, 0, 0)
        moved(tree["a"].place.to(DEVICE, non_blocking=True).cpu(), "cpu")
        assert (gpu.copies["-"], gpu.unpinned["-"]) == (2, 1)
        for found in (here, there):
            assert (found["a"].lengths, found["b"][2]) == ((3, 4), None)
            pairs = [(found["a"].place, tree["a"].place), *zip(found["b"][:2], tree["b"][:2], strict=True)]
            for one, expected in (*pairs, *zip(found["c"], tree["c"], strict=True)):
                assert isinstance(one, OnGpu) == (found is there)
                assert one.dtype == expected.dtype
                assert torch.equal(one.cpu(), expected)
    assert here["a"].place.untyped_storage().data_ptr() == here["c"][1].untyped_storage().data_ptr()
    assert here["c"][1].data_ptr() % ALIGNMENT == here["a"].place.data_ptr() % ALIGNMENT
