"""All communication between processes, gradient clipping and model wrapping (DDP, DeepSpeed, FSDP); the only import of torch.distributed.

Shape suffixes: N = rows of this rank, C = rows of all ranks, D = embedding size.
"""

import math
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.nn.functional as differentiable
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rge.common.errors import UserError


class LaunchError(UserError):
    """The launch does not match the recipe or the request."""


def gather_sizes(num_rows: int, device: torch.device) -> list[int]:
    """Number of rows of every rank."""
    if not _initialized():
        return [num_rows]
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world_size())]
    torch.distributed.all_gather(sizes, torch.tensor([num_rows], device=device))
    return [int(size) for size in sizes]


def gather_rows(rows_ND: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows of all ranks, in rank order, with gradient: (C, D); ranks may differ in number of rows (`gather_sizes`).

    A rank's gradient is the sum of what all ranks' losses send back to its rows. Together with a loss over *local*
    queries divided by the global count and multiplied by the world size, the mean that DDP takes is exactly the
    single-process gradient.
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
    if not _initialized():
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def from_main(value: Any) -> Any:
    """Broadcast the main process's picklable value; other processes' arguments are ignored."""
    box = [value]
    if _initialized():
        torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Gather a small value from every process, in rank order. Threads other than training's need a `background_group`."""
    if not _initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether each process holds only a shard of each parameter (ZeRO-3, FSDP)."""
    return accelerator.distributed_type == DistributedType.FSDP or is_zero3(accelerator)


def is_zero3(accelerator: Accelerator) -> bool:
    """Whether parameters are sharded from loading on (ZeRO-3)."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def world_size() -> int:
    """Number of processes."""
    return torch.distributed.get_world_size() if _initialized() else 1


def rank() -> int:
    """Number of this process."""
    return torch.distributed.get_rank() if _initialized() else 0


def join_workers() -> tuple[int, int]:
    """Initialise a process group for work that shares only files and short messages.

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


def connect_to_store() -> torch.distributed.Store:
    """A connection of its own to the key-value store that the processes found each other with.

    Keys are those of this attempt: torchrun can start processes that died again, on the same store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"rge/attempt_{attempt}", store)


def is_connection_loss(error: BaseException) -> bool:
    """Whether an error merely reports that another process is unreachable."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def ensure_group() -> None:
    """Create a single-process group if there is none; some libraries require one.

    It needs no port: one from the environment may be another run's.
    """
    if not _initialized():
        back_end = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(
            back_end, store=torch.distributed.HashStore(), rank=0, world_size=1
        )


def background_group() -> Any:
    """A group of all processes for threads, whose exchanges must not meet training's; all processes call it.

    It is gloo's whatever the devices, and waits for the slowest disk.
    """
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))


@contextmanager
def writes_deferred(accelerator: Accelerator, group: Any) -> Iterator[list[Callable[[], None]]]:
    """Inside, ``accelerator.save_state`` copies this process's shard of weights and optimizer state to main memory.

    Small files, such as random states, are written at once; so are whole weights (FSDP's FULL_STATE_DICT), and everything
    where the launch configures a checkpoint writer of DeepSpeed's.

    Args:
        accelerator: of a sharded back end.
        group: of `background_group`.

    Yields:
        The writes, filled when the block ends: calling them all in order, on all processes, writes the files. They raise
        OSError if the disk is full.
    """
    writes: list[Callable[[], None]] = []
    with ExitStack() as deferred:
        if accelerator.distributed_type == DistributedType.FSDP:
            deferred.enter_context(_checkpoints_deferred(writes, group))
        else:
            for model in accelerator._models:
                deferred.enter_context(_engine_deferred(writes, model.checkpoint_engine))
        yield writes


@contextmanager
def _engine_deferred(writes: list[Callable[[], None]], engine: Any) -> Iterator[None]:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    if type(engine) is not TorchCheckpointEngine:
        yield
        return
    write = engine.save

    def save(state_dict: Any, path: str) -> None:
        writes.append(partial(write, _in_main_memory(state_dict), path))

    # Else DeepSpeed copies the weights into main memory once more.
    engine.save, engine.preserves_storage_sharing = save, lambda: False
    try:
        yield
    finally:
        del engine.save, engine.preserves_storage_sharing


@contextmanager
def _checkpoints_deferred(writes: list[Callable[[], None]], group: Any) -> Iterator[None]:
    from torch.distributed import checkpoint

    write = checkpoint.save

    def finish(**given: Any) -> None:
        try:
            write(**given, process_group=group)
        except checkpoint.CheckpointException as error:  # a BaseException that does not say why
            reasons = (f"process {rank}: {reason}" for rank, (reason, _) in error.failures.items())
            raise OSError("; ".join(reasons)) from error

    def save(state_dict: Any, **given: Any) -> None:
        writes.append(partial(finish, state_dict=_in_main_memory(state_dict), **given))

    checkpoint.save = save
    try:
        yield
    finally:
        checkpoint.save = write


def _in_main_memory(state: Any) -> Any:
    """Copy a nested state to main memory, preserving shared storage."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    try:
        return stager.stage(state)
    finally:
        stager.close()  # else it keeps the copy for its next use


def close() -> None:
    """Leave the process group, if there is one."""
    if _initialized():
        torch.distributed.destroy_process_group()


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def let_deepspeed_build() -> None:
    """Let DeepSpeed compile in a virtual environment whose path has a space, and on CPU not at all.

    What it compiles (its own optimizer, where a launch config puts the states into main memory) is linked by a shell
    command in which torch's folder stands unquoted. On CPU it would spend a minute on shared-memory collectives, which
    gloo does without.
    """
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))
    if not torch.accelerator.is_available():
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prepare(
    accelerator: Accelerator, embedder: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap model and optimizer for the back end, with float32 master weights.

    At a learning rate of 2e-5 a bfloat16 weight would hardly ever move: its spacing is 0.4 to 0.8 % of its size. ZeRO
    makes float32 copies itself, in shares; elsewhere the weights become float32, and forwards run under autocast.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        for parameter in embedder.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    else:
        # No data loader is prepared, so DeepSpeed cannot infer this; nothing depends on the number.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        # Unset, accelerate clips at 1.0 here and not at all elsewhere.
        plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
        # Else there is nothing to export under ZeRO-3. Asked for here, since a run that cannot be exported is of no use.
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if auto := [key for key, value in zero.items() if value == "auto"]:
            # Accelerate fills these in for models of transformers alone, by the same rule.
            model: Any = embedder.model
            hidden = model.config.get_text_config().hidden_size
            sizes = {
                "reduce_bucket_size": hidden**2,
                "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
                "stage3_param_persistence_threshold": 10 * hidden,
            }
            for key in auto:
                if key in sizes:
                    zero[key] = sizes[key]
    return accelerator.prepare(embedder, optimizer)


@contextmanager
def whole(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gather full parameters for reading, or for equal changes on all processes, under ZeRO-3."""
    # A tied matrix is one parameter, however often it is named.
    shared = list(
        {id(parameter): parameter for parameter in parameters if hasattr(parameter, "ds_id")}.values()
    )
    if not shared:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0):
        yield


@contextmanager
def whole_model(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Gather all parameters on every process, for forwards without gradient that bypass `model`.

    ZeRO-3 and FSDP2 gather a layer's parameters in hooks around its forward and drop them again. Writing a rationale
    that way gathers the model once a token, and hangs as soon as one process writes a token more than another. Here
    all of it is gathered once, in the same order everywhere; inside, the hooks are off, so nothing is sent at all and
    processes may differ in the number, length and kind of their forwards. A process holds the whole model meanwhile.
    """
    import torch.distributed.fsdp

    sharded = [module for module in model.modules() if isinstance(module, torch.distributed.fsdp.FSDPModule)]
    parameters = list(model.parameters())
    if sharded:
        for module in sharded:
            module.unshard()
        try:
            with _without_hooks(model):
                yield
        finally:
            for module in sharded:
                module.reshard()
    elif any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters), _without_hooks(model):
            yield
    else:
        # What mixed precision does to the wrapped forward.
        with accelerator.autocast():
            yield


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Takes the back end's hooks off and puts them back; hooks of others, such as the ``<emb>`` row's, stay."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    kept = [(module, name, getattr(module, name)) for module in model.modules() for name in names]
    try:
        for module, name, hooks in kept:
            others = [(key, hook) for key, hook in hooks.items() if not _of_back_end(hook)]
            setattr(module, name, type(hooks)(others))
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)


def _of_back_end(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("deepspeed.", "torch.distributed.fsdp."))


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without synchronising: more backward passes of the step follow.

    DDP exchanges gradients once, with the last. The back ends that share gradients out exchange them every time, so
    that no process ever holds them whole.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        yield
        return
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


def optimizer_step(
    accelerator: Accelerator, model: nn.Module, optimizer, max_grad_norm: float, source: str = "this step"
) -> float:
    """Clip (0 clips nothing), step, and clear the gradients; `source` names the step and its records in errors.

    Returns:
        The gradient's global norm before clipping.

    Raises:
        FloatingPointError: the norm is not finite, on all processes at once; the weights are as they were.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Clipping and step happened inside backward; DeepSpeed leaves a step out whose norm is not finite.
        norm = float(model.get_global_grad_norm())  # type: ignore[operator]  # of DeepSpeed's engine
        _check_norm(norm, source)
        optimizer.zero_grad()
        return norm
    total = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
    _check_norm(norm, source)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _check_norm(norm: float, source: str) -> None:
    if not math.isfinite(norm) or norm < 0:  # -1 is DeepSpeed's word for it where it did not look
        raise FloatingPointError(f"the loss is finite, but the norm of its gradient is {norm}; {source}")


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether weights or optimizer state are sharded, so that the back end must save them."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def full_weights(accelerator: Accelerator, model: nn.Module, embedder: nn.Module) -> dict[str, Tensor] | None:
    """Full weights of ``embedder.model``, gathered on the main process.

    Every process must call it.

    Returns:
        None where the embedder holds its weights whole itself, and, under ZeRO-3 and FSDP2, on all processes but the main one.
    """
    if not is_sharded(accelerator):
        return None
    gathered = accelerator.get_state_dict(model)
    if not gathered:
        return None
    # What is not found here is missed where names are compared, on export.
    whole_model: Any = embedder.model
    names = whole_model.state_dict(keep_vars=True)
    found = {name: gathered[f"model.{name}"] for name in names if f"model.{name}" in gathered}
    # FSDP2 gathers a tied matrix twice; as one tensor again, it is written once.
    for name, source in getattr(embedder.model, "all_tied_weights_keys", {}).items():
        if name in found and source in found:
            found[name] = found[source]
    return found
