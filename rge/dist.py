"""Everything that talks to other processes; the only file that imports torch.distributed.

Shape suffixes: N = rows of this rank, C = rows of all ranks, D = embedding size.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed
import torch.distributed.nn.functional as differentiable
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn

from rge.config import LogConfig, TrainConfig

if TYPE_CHECKING:
    from rge.rollout import Rationale  # only its fields are read; at run time the import would be circular

T = TypeVar("T")


class LaunchError(RuntimeError):
    """The launcher started something else than was asked for."""


def check_launch(accelerator: Accelerator, num_processes: int | None, distributed_type: str | None) -> None:
    """Compare what runs with what was asked for.

    Several launches start one process, or let each of several believe that it is alone, without a word; training
    would go on with a fraction of the batch.

    Raises:
        LaunchError: names what runs, what was asked, and a launch that works.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    running = accelerator.num_processes
    if launched != running:
        raise LaunchError(
            f"the launcher started {launched} processes, but each sees {running}: the back end was not initialised "
            "(on CPU, set ACCELERATE_USE_CPU=true or use a config file with use_cpu: true)"
        )
    if num_processes is not None and num_processes != running:
        raise LaunchError(
            f"train.num_processes={num_processes}, but {running} run; pass the number to accelerate launch as well "
            "(`accelerate launch --cpu --num_processes 2` starts one process: use --multi_gpu with ACCELERATE_USE_CPU=true)"
        )
    if distributed_type is not None and distributed_type != accelerator.distributed_type.value:
        raise LaunchError(
            f"train.distributed_type={distributed_type}, but {accelerator.distributed_type.value} runs; "
            "see recipes/accelerate for configs that select it"
        )


def gather_sizes(num_rows: int, device: torch.device) -> list[int]:
    """Number of rows of every rank."""
    if not _initialized():
        return [num_rows]
    sizes = [
        torch.zeros(1, dtype=torch.long, device=device) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather(sizes, torch.tensor([num_rows], device=device))
    return [int(size) for size in sizes]


def gather_rows(rows_ND: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows of all ranks, in rank order, with gradient: (C, D).

    A rank's gradient is the sum of what all ranks' losses send back to its rows. Together with a loss over *local*
    queries divided by the global count and multiplied by the world size, the mean that DDP takes is exactly the
    single-process gradient.

    Args:
        rows_ND: this rank's rows; ranks may differ in number.
        sizes: from `gather_sizes`.
    """
    if not _initialized():
        return rows_ND
    longest = max(sizes)
    padded = torch.cat([rows_ND, rows_ND.new_zeros(longest - rows_ND.shape[0], *rows_ND.shape[1:])])
    if rows_ND.requires_grad:
        with warnings.catch_warnings():
            # Deprecated in favour of a function that is still private; the gradient is what a test here pins.
            warnings.simplefilter("ignore", FutureWarning)
            parts = differentiable.all_gather(padded.contiguous())
    else:
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Sums over all ranks, in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if _initialized():
        torch.distributed.all_reduce(total)
    return total.tolist()


def from_main(value: Any) -> Any:
    """The main process's value on every process, anything that can be pickled; the others' argument is ignored."""
    if not _initialized():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every process's value, in rank order; for small things."""
    if not _initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether a process holds a part of each parameter only: ZeRO-3 and FSDP."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.distributed_type == DistributedType.FSDP or (
        plugin is not None and plugin.zero_stage == 3
    )


def world_size() -> int:
    """Number of processes."""
    return torch.distributed.get_world_size() if _initialized() else 1


def rank() -> int:
    """Number of this process."""
    return torch.distributed.get_rank() if _initialized() else 0


def join_workers() -> tuple[int, int]:
    """Join the processes that a launcher started, for work that shares nothing but files and short messages.

    The group is gloo's whatever the devices, and waits as long as it takes: one process may be hours ahead of another.

    Returns:
        (rank, number of processes). The current GPU, where there is one, is that of the local rank.

    Raises:
        LaunchError: the launcher did not say how they find each other, or they do not.
    """
    if not _initialized():
        try:
            torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
        except (ValueError, RuntimeError) as error:
            raise LaunchError(
                f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, but the processes do not find each other ({error}): "
                "start them with accelerate launch or torchrun"
            ) from error
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return rank(), world_size()


def from_first(value: T | None) -> T:
    """Rank 0's value on every rank; the others' is ignored. It must pickle."""
    box = [value]
    if _initialized():
        torch.distributed.broadcast_object_list(box)
    return box[0]  # type: ignore[return-value]


def close() -> None:
    """Leave the process group, if there is one."""
    if _initialized():
        torch.distributed.destroy_process_group()


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def make_accelerator(train: TrainConfig, log: LogConfig) -> Accelerator:
    """The process group and mixed-precision settings that the launcher asked for."""
    use_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    handlers = []
    if use_deepspeed and not torch.cuda.is_available():
        # Without a back end named, DeepSpeed on CPU leaves each rank alone, in silence.
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
    # Several processes without a GPU: unless told so, accelerate leaves each of them alone, in silence.
    on_cpu = not use_deepspeed and not torch.accelerator.is_available()
    return Accelerator(
        cpu=on_cpu,
        log_with=log.trackers or None,
        kwargs_handlers=handlers,
        step_scheduler_with_optimizer=False,
    )


def prepare(
    accelerator: Accelerator, embedder: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap model and optimizer for the back end."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # No data loader is prepared, so DeepSpeed cannot infer this; nothing depends on the number.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
    return accelerator.prepare(embedder, optimizer)


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Backward passes inside add to the gradients and nothing else: more of the same step is to come."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        with accelerator.no_sync(model):
            yield
        return
    # Under DeepSpeed accelerate's no_sync does nothing, and each backward would clip, step and clear.
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)


def optimizer_step(accelerator: Accelerator, model: nn.Module, optimizer, max_grad_norm: float) -> float:
    """Clip, step, and clear the gradients.

    Returns:
        The gradient's global norm before clipping.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Clipping and step happened inside backward.
        norm = float(model.get_global_grad_norm())
        optimizer.zero_grad()
        return norm
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether no process holds weights and optimizer state whole, so that saving is the back end's own business."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def full_weights(accelerator: Accelerator, model: nn.Module, embedder: nn.Module) -> dict[str, Tensor] | None:
    """Unsharded weights of ``embedder.model`` where the back end shards them, else None."""
    if accelerator.num_processes == 1:
        return None
    prefix = "model."
    weights = accelerator.get_state_dict(model)
    return (
        {name.removeprefix(prefix): value for name, value in weights.items()} if weights is not None else None
    )


def rollout_report(
    rationales: "Sequence[Rationale] | None", seconds: float, device: torch.device
) -> dict[str, float]:
    """Share of forced stops, mean length and speed of a step's rationales over all ranks.

    Lengths are of what the step was trained with, reused rationales included; speed is of what was written in it.
    """
    if rationales is None:
        return {}
    reasoned = [rationale for rationale in rationales if not rationale.direct]
    new = [rationale for rationale in reasoned if not rationale.age]
    local = [
        len(rationales),
        len(reasoned),
        sum(len(rationale.ids) for rationale in reasoned),
        sum(rationale.forced for rationale in reasoned),
        sum(rationale.age for rationale in reasoned),
        sum(len(rationale.ids) for rationale in new),
    ]
    count, num_reasoned, tokens, forced, age, new_tokens = sum_over_ranks(local, device)
    return {
        "forced_rate": forced / max(num_reasoned, 1),
        "rationale_tokens_mean": tokens / max(num_reasoned, 1),
        "rationale_age_mean": age / max(num_reasoned, 1),
        "direct_rate": 1 - num_reasoned / count,
        "tokens_per_s": new_tokens / max(seconds, 1e-9),
    }
