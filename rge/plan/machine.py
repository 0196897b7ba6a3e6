"""What a run needs from its machine: open files, shared memory, disk."""

import functools
import math
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from timeit import repeat

import torch
from accelerate import Accelerator

from rge.config import Recipe
from rge.distributed import collectives as dist
from rge.model.hub_model import HubModel
from rge.plan.costs import DTYPE_BYTES, GIB, NCCL_GIB, OPTIMIZER_STATES, descriptors, num_parameters

SHARED_MEMORY = "/dev/shm"
_CGROUP = Path("/sys/fs/cgroup")


def problems(num_workers: int) -> Iterator[str]:
    """Too few open files for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, here = descriptors(num_workers), 0
    with suppress(OSError):  # not Linux
        here = len(os.listdir("/proc/self/fd"))
    if soft != resource.RLIM_INFINITY and soft - here < needed:
        yield (
            f"a process may open {soft} files (hard limit {hard}), has {here} open, and may need {needed} more: raise it "
            "with `ulimit -n`, or in the container's or the service's settings; or lower data.num_workers"
        )


def warnings(accelerator: Accelerator) -> Iterator[str]:
    """Too little shared memory for NCCL; nothing else needs it, since batches go through pipes."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if accelerator.device.type == "cuda" and processes > 1:
        free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0
        if free < NCCL_GIB * GIB:
            yield (
                f"warning: {SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, and NCCL's guide asks for {NCCL_GIB:g} GiB "
                f"for {processes} processes: they will fail to start if their GPUs cannot reach one another directly. In a "
                "container, raise it (docker run --shm-size=1g)"
            )


def disk_problems(
    recipe: Recipe, num_steps: Mapping[str, int], model: HubModel, accelerator: Accelerator
) -> Iterator[str]:
    """Too little disk space for what the open stages keep."""
    out = Path(recipe.out)
    needed = bytes_to_keep(recipe, num_steps, model, dist.is_sharded(accelerator))
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    files = (path for name in num_steps for path in (out / name).rglob("*") if path.is_file())
    used = sum(path.stat().st_size for path in files)
    if needed > free + used:
        yield (
            f"{out} will hold up to {needed / GIB:,.1f} GiB of states and checkpoints, and its disk has "
            f"{free / GIB:,.1f} GiB free: free some, set out= to another disk, or lower train.keep_last "
            f"({recipe.train.keep_last}) or validation.keep_best ({recipe.validation.keep_best})"
        )


def bytes_to_keep(recipe: Recipe, num_steps: Mapping[str, int], model: HubModel, sharded: bool) -> float:
    """Maximum size of what a run's open stages save.

    A state has trained weights and optimizer states in float32, and under ZeRO or FSDP2 all weights besides. While a state is
    written there is one more than `train.keep_last`.
    """
    parameters, trained = num_parameters(model, recipe.model)
    state = trained * 4 * (1 + OPTIMIZER_STATES[recipe.optim.name])
    whole = parameters * DTYPE_BYTES[recipe.model.dtype]
    checkpoint = trained * DTYPE_BYTES[recipe.model.dtype] if recipe.export.adapters_only else whole
    if sharded:
        state += whole
    best = recipe.validation.keep_best + 1 if recipe.validation.sources and recipe.validation.keep_best else 0
    total = 0.0
    for steps in num_steps.values():
        saves = -(-steps // recipe.train.save_every)
        total += min(recipe.train.keep_last + 1, saves) * state + (1 + best) * checkpoint
    return total


def main_memory() -> float:
    """Bytes of main memory that are free, within the limits of the process's control groups (versions 1 and 2)."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for group, (most, now, cache) in _groups():
        with suppress(OSError, ValueError):  # "max" is no number
            limit, used = (int((group / name).read_text()) for name in (most, now))
            pairs = map(str.split, (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, and make room for whatever needs it.
            cached = sum(int(size) for name, size in pairs if name in cache)
            free = min(free, limit - used + cached)
    return max(float(free), 0.0)


def _groups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Folders of this process's control groups of memory and of all above them, with the names of their figures.

    A container sees its own group as the root; a job of Slurm's or systemd's is in a group below it.
    """
    version_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
    version_1 = (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    )
    mine = {"": "/", "memory": "/"}
    with suppress(OSError):
        lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        mine |= {controllers: path for _, controllers, path in lines if controllers in mine}
    for root, path, names in (
        (_CGROUP, mine[""], version_2),
        (_CGROUP / "memory", mine["memory"], version_1),
    ):
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield group, names


@functools.cache
def cpu_speed(dtype: str) -> tuple[float, float]:
    """TFLOP/s of a matrix product and TB/s of a copy with torch's number of threads: the best of many tries in a second.

    Tries are short, so that other processes leave some undisturbed, and alternate, so that both kinds use the whole second.
    """
    side = 512
    factor, product = (torch.ones(side, side, dtype=getattr(torch, dtype)) for _ in range(2))
    words, copy = (torch.ones(1 << 24) for _ in range(2))  # 64 MiB, more than caches hold

    product_s, copy_s, end = [math.inf], [math.inf], time.perf_counter() + 1.0
    while len(copy_s) == 1 or time.perf_counter() < end:
        # Three, since the copy has evicted the factors from the cache.
        product_s += repeat(lambda: torch.mm(factor, factor, out=product), number=1, repeat=3)
        copy_s += repeat(lambda: copy.copy_(words), number=1, repeat=1)
    return 2 * side**3 / min(product_s) / 1e12, 2 * words.nbytes / min(copy_s) / 1e12
