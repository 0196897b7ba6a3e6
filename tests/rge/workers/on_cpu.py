"""What lets a test's processes run every back end without a GPU. Import it before anything makes an `Accelerator`.

accelerate runs DDP where FSDP is asked for and there is no GPU; told that gloo's processes are GPUs, it runs its FSDP2
path, and PyTorch shards on CPU.
"""

import functools
import os

import accelerate.state
import torch
import torch.distributed
from accelerate.utils import DistributedType

torch.set_num_threads(1)

_prepare_backend = accelerate.state.PartialState._prepare_backend


def _as_if_on_gpus(self, *args, **kwargs):
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return _prepare_backend(self, *args, **kwargs)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return "gloo", DistributedType.MULTI_GPU


def allow_fsdp2() -> None:
    """Let accelerate's FSDP2 run here; without this call it is what users get."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    accelerate.state.PartialState._prepare_backend = _as_if_on_gpus


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "broadcast", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip
sent = {"messages": 0}


def count_messages() -> None:
    """Count collectives in `sent`, whoever calls them."""

    def counted(collective):
        def call(*args, **kwargs):
            sent["messages"] += 1
            return collective(*args, **kwargs)

        return call

    for name in filter(functools.partial(hasattr, torch.distributed), COLLECTIVES):
        setattr(torch.distributed, name, counted(getattr(torch.distributed, name)))
