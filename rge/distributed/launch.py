"""Start the processes' common ground, and refuse a launch that is not what was asked for.

Several launches start one process, let each of several believe that it is alone, or run another back end than the
one named, without a word. Training would go on, with a fraction of the batch or of the memory.
"""

import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from rge.config import TrainConfig
from rge.distributed.collectives import LaunchError

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others, e.g. while the first writes a checkpoint. `rge.distributed.failure_detection` notices dead ones."""


@dataclass(frozen=True)
class BackEnd:
    """How a run is spread over processes.

    Attributes:
        name: ``one process``, ``DDP``, ``ZeRO-1``, ``ZeRO-2``, ``ZeRO-3`` or ``FSDP2``.
        num_processes: all machines together.
    """

    name: str
    num_processes: int

    @property
    def is_ddp(self) -> bool:
        """Whether every process holds weights, gradients and optimizer state whole."""
        return self.name in ("one process", "DDP")

    def __str__(self) -> str:
        return self.name if self.num_processes == 1 else f"{self.name} on {self.num_processes} processes"


def make_accelerator(train: TrainConfig) -> Accelerator:
    """The process group and mixed-precision settings that the launcher asked for."""
    use_deepspeed = _asked("DEEPSPEED")
    # Without a GPU, DeepSpeed leaves each rank alone unless a communication library is named, in silence.
    library = {"backend": "gloo"} if use_deepspeed and not torch.accelerator.is_available() else {}
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
    # Several processes without a GPU: unless told so, accelerate leaves each of them alone, in silence.
    on_cpu = not use_deepspeed and not torch.accelerator.is_available()
    return Accelerator(
        cpu=on_cpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE, **library)],
        step_scheduler_with_optimizer=False,
    )


def check_launch(
    accelerator: Accelerator,
    num_processes: int | None,
    distributed_type: str | None,
    optimizer: str = "adamw",
) -> None:
    """Compare what runs with what the launcher and the recipe asked for.

    Args:
        accelerator: what runs.
        num_processes: asked for by the recipe; None: any.
        distributed_type: asked for by the recipe, a name of `DistributedType`; None: any.
        optimizer: the recipe's.

    Raises:
        LaunchError: names what runs, what was asked, and a launch that works.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    running, kind = accelerator.num_processes, accelerator.distributed_type
    if launched != running:
        raise LaunchError(
            f"the launcher started {launched} processes, but each sees {running}: the back end was not initialised "
            "(on CPU, set ACCELERATE_USE_CPU=true or use a config file with use_cpu: true)"
        )
    for asked, expected in (("DEEPSPEED", DistributedType.DEEPSPEED), ("FSDP", DistributedType.FSDP)):
        if _asked(asked) and kind != expected:
            raise LaunchError(
                f"the launcher was asked for {asked}, but accelerate runs {kind.value}, in which every process holds "
                "everything: "
                + (
                    "FSDP needs a GPU (on CPU, use recipes/accelerate/cpu_2.yaml or a DeepSpeed config)"
                    if asked == "FSDP"
                    else "ACCELERATE_USE_CPU=true switches DeepSpeed off; unset it and use recipes/accelerate/cpu_zero2.yaml"
                )
            )
    if num_processes is not None and num_processes != running:
        raise LaunchError(
            f"train.num_processes={num_processes}, but {running} run; pass the number to accelerate launch as well "
            "(`accelerate launch --cpu --num_processes 2` starts one process: use --multi_gpu with ACCELERATE_USE_CPU=true)"
        )
    if distributed_type is not None and distributed_type != kind.value:
        raise LaunchError(
            f"train.distributed_type={distributed_type}, but {kind.value} runs; "
            "see recipes/accelerate for configs that select it"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise LaunchError(
            "FSDP version 1 cannot gather its parameters for the rollout; set fsdp_version: 2 in the fsdp_config of the "
            "launch config (see recipes/accelerate/fsdp2_8.yaml)"
        )
    if optimizer == "muon" and not back_end(accelerator).is_ddp:
        raise LaunchError(
            f"optim.name=muon needs whole gradients, which {back_end(accelerator).name} does not have; set "
            "optim.name=adamw, or launch with a DDP config such as recipes/accelerate/ddp_8.yaml"
        )


def back_end(accelerator: Accelerator) -> BackEnd:
    """How this run is spread over processes."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        name = f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif kind == DistributedType.FSDP:
        name = "FSDP2"
    else:
        name = "one process" if kind == DistributedType.NO else "DDP"
    return BackEnd(name, accelerator.num_processes)


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """What `check_resume` needs to know later, to be saved with a state."""
    return asdict(back_end(accelerator))


def check_resume(saved: dict[str, Any] | None, accelerator: Accelerator, path: object) -> None:
    """Whether a state saved by one launch can be loaded by another.

    One process and DDP write the same files, which any number of processes loads; FSDP2's shards are dealt out anew
    for any number of processes. DeepSpeed's are tied to its stage and to the number of processes.

    Args:
        saved: what `describe` gave when the state was written; None for states that do not say.
        accelerator: what runs now.
        path: the state, for the message.

    Raises:
        LaunchError: names both launches and the mend.
    """
    if saved is None:
        return
    then, now = BackEnd(**saved), back_end(accelerator)
    if (then.is_ddp and now.is_ddp) or (then.name == now.name == "FSDP2") or then == now:
        return
    raise LaunchError(
        f"{path} was saved by {then} and cannot be loaded by {now}. Launch with {then} as before, or begin this stage "
        "again under another out= from a finished checkpoint (init=...); states of DDP and FSDP2 load on any number of "
        "processes of their own kind"
    )


def _asked(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() == "true"
