"""All communication between processes, gradient clipping and `prepare` of models; the only import of torch.distributed.

Shape suffixes: N = rows of this rank, C = rows of all ranks, D = embedding size.
"""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
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

    A rank's rows receive the sum of all ranks' gradients. With a loss over *local* queries, divided by the global count and
    multiplied by the world size, DDP's mean is exactly the single-process gradient.
    """
    return _GatheredRows.apply(rows_ND, sizes) if _initialized() else rows_ND


class _GatheredRows(torch.autograd.Function):
    # `torch.distributed.nn.functional.all_gather` is deprecated in favour of a function that is still private.

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        padded = torch.cat([rows_ND, rows_ND.new_zeros(max(sizes) - rows_ND.shape[0], *rows_ND.shape[1:])])
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient_CD: Tensor) -> tuple[Tensor, None]:
        total = gradient_CD.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total.split(list(ctx.sizes))[rank()], None


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
    """Rank and number of processes, in a group for work that shares only files and short messages; selects the local rank's GPU.

    The group is gloo's, with a long time-out: one process may be hours ahead of another. LaunchError if they don't find each other.
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
    """A new connection to the launch's key-value store, for this attempt: torchrun can restart processes on the same store."""
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
    """Create a single-process group if there is none; some libraries require one. It needs no port."""
    if not _initialized():
        back_end = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(
            back_end, store=torch.distributed.HashStore(), rank=0, world_size=1
        )


def background_group() -> Any:
    """A gloo group of all processes for threads, separate from training's, that waits two hours for the slowest disk; all call it."""
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=2))


@contextmanager
def writes_deferred(accelerator: Accelerator, group: Any) -> Iterator[list[Callable[[], None]]]:
    """Inside, ``accelerator.save_state`` of a sharded back end only copies this process's shard to main memory.

    Small files, such as random states, are written immediately; so are whole weights (FSDP's FULL_STATE_DICT), and everything
    if the launch configures one of DeepSpeed's checkpoint writers. Calling the writes that it yields, filled when the block ends,
    in order and on all processes, writes the files (OSError: a full disk). `group` is one of `background_group`.
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
        writes.append(partial(write, in_main_memory(state_dict), path))

    # Otherwise DeepSpeed copies the weights to main memory once more.
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
        writes.append(partial(finish, state_dict=in_main_memory(state_dict), **given))

    checkpoint.save = save
    try:
        yield
    finally:
        checkpoint.save = write


def in_main_memory(state: Any) -> Any:
    """Copy a nested state to main memory, preserving shared storage."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    settings = dict.fromkeys(
        ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"), False
    )
    stager = DefaultStager(StagingOptions(**settings))
    try:
        return stager.stage(state)
    finally:
        stager.close()  # otherwise it keeps the copy for its next use


def close() -> None:
    """Leave the process group, if there is one."""
    if _initialized():
        torch.distributed.destroy_process_group()


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def let_deepspeed_build() -> None:
    """Let DeepSpeed compile in a virtual environment whose path has a space, and on CPU not at all.

    It links its own optimizer, for a launch config with states in main memory, by a shell command with torch's folder unquoted.
    On CPU it would spend a minute compiling shared-memory collectives, which gloo does not need.
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

    At a learning rate of 2e-5 a bfloat16 weight would hardly ever change: its spacing is 0.4 to 0.8 % of its size. ZeRO
    makes sharded float32 copies itself; otherwise the weights become float32, and forwards run under autocast.
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
        # Required to export under ZeRO-3.
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if auto := [key for key, value in zero.items() if value == "auto"]:
            # Accelerate fills these in, by the same rule, only for models of transformers.
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
    shared = [*{id(one): one for one in parameters if hasattr(one, "ds_id")}.values()]
    if not shared:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0):
        yield


@contextmanager
def whole_model(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Gather all parameters on every process once, without hooks, for forwards without gradient that bypass `model`.

    Processes may then differ in the number, length and kind of their forwards. ZeRO-3 and FSDP2 themselves gather a layer's
    parameters in each forward: once per token of a rationale, and in vain if one process generates more tokens than another.
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
        # As mixed precision does in the wrapped forward.
        with accelerator.autocast():
            yield


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Disable the back end's hooks; others, such as the ``<emb>`` row's, stay."""

    def of_back_end(hook: object) -> bool:
        return (getattr(hook, "__module__", None) or "").startswith(("deepspeed.", "torch.distributed.fsdp."))

    names = ("_forward_pre_hooks", "_forward_hooks")
    saved = [(module, name, getattr(module, name)) for module in model.modules() for name in names]
    try:
        for module, name, hooks in saved:
            others = [(key, hook) for key, hook in hooks.items() if not of_back_end(hook)]
            setattr(module, name, type(hooks)(others))
        yield
    finally:
        for module, name, hooks in saved:
            setattr(module, name, hooks)


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without synchronising: more backward passes of the step follow.

    DDP reduces gradients once, with the last backward. Back ends that shard them reduce every time, to never hold them whole.
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
    """Clip (0 clips nothing), step, and clear the gradients; returns their global norm before clipping.

    FloatingPointError, on all processes: the norm is not finite; names `source`, the weights are unchanged.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Clipping and step happened inside backward; DeepSpeed skips a step whose norm is not finite.
        norm = float(model.get_global_grad_norm())  # type: ignore[operator]  # of DeepSpeed's engine
        if optimizer.step_was_skipped:  # before 0.19 the norm then is that of an earlier step
            norm = math.nan
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
    if not math.isfinite(norm) or norm < 0:  # DeepSpeed reports an unknown norm as -1
        raise FloatingPointError(f"the loss is finite, but the norm of its gradient is {norm}; {source}")


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether weights or optimizer state are sharded, so that the back end must save them."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def full_weights(accelerator: Accelerator, model: nn.Module, embedder: nn.Module) -> dict[str, Tensor] | None:
    """Full weights of ``embedder.model``, gathered on the main process; all processes call it.

    None if the embedder itself holds its weights whole, and, under ZeRO-3 and FSDP2, on other processes.
    """
    if not shards_parameters(accelerator):
        return None
    gathered = accelerator.get_state_dict(model)
    if not gathered:
        return None
    # Missing names are detected on export.
    whole_model: Any = embedder.model
    names = whole_model.state_dict(keep_vars=True)
    found = {name: gathered[f"model.{name}"] for name in names if f"model.{name}" in gathered}
    # FSDP2 gathers a tied matrix twice; as one tensor again, it is written once.
    for name, source in getattr(embedder.model, "all_tied_weights_keys", {}).items():
        if name in found and source in found:
            found[name] = found[source]
    return found
