"""Initialise accelerate for the recipe, and refuse launches that do not match it.

A recipe sets the minimum sharding (``train.back_end``) and the computing dtype (``model.dtype``); trained weights, gradients
summed over micro batches and the optimizer's state are float32. A launch without a back end gets the recipe's; a launch config
with one is used if it is sufficient. Some launches silently start one process, do not connect several, or run another back
end than configured: training would continue with a fraction of the batch or of the memory.
"""

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

from rge.common.errors import Fault
from rge.common.files import RECIPES, find_shipped
from rge.distributed.collectives import LaunchError, let_deepspeed_build
from rge.distributed.config import BACK_ENDS, TrainConfig
from rge.optim.config import UNSHARDED_ONLY

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others, e.g. while the first writes a checkpoint; `rge.distributed.failure_detection` detects dead ones."""

CONFIGS = RECIPES / "accelerate"
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}


@dataclass(frozen=True)
class BackEnd:
    """The back end of a run and its number of processes."""

    name: str  # ``one process``, ``DDP``, ``ZeRO-1``, ``ZeRO-2``, ``ZeRO-3`` or ``FSDP2``
    num_processes: int

    @property
    def is_ddp(self) -> bool:
        """Whether nothing is sharded."""
        return self.name in ("one process", "DDP")

    @property
    def key(self) -> str:
        """Its name in recipes."""
        return next((key for key, name in NAMES.items() if name == self.name), "ddp")

    def __str__(self) -> str:
        return self.name if self.num_processes == 1 else f"{self.name} on {self.num_processes} processes"


def make_accelerator(train: TrainConfig, dtype: str = "float32") -> Accelerator:
    """Initialise the process group, the back end and its precision.

    LaunchError: the launch asks for another precision, gradient accumulation or torch.compile. `check_launch` has the rest.
    """
    _check_precision(dtype)
    _check_accumulation(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), "the launch")
    if (compiler := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() != "no":
        raise LaunchError(  # prompts differ in length, and the rollout would not run the compiled code
            f"the launch asks for torch.compile (dynamo_backend {compiler}), which training does not use: remove the section "
            "dynamo_config from the launch config, or launch with --dynamo_backend no"
        ).about("dynamo_backend")
    plugin: DeepSpeedPlugin | FullyShardedDataParallelPlugin | None = None
    if _asked("DEEPSPEED"):
        plugin = _deepspeed(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), dtype)
    elif _asked("FSDP"):
        plugin = _fsdp2(FullyShardedDataParallelPlugin(), dtype)
    elif _launched() > 1 and train.back_end.startswith("zero"):
        plugin = _deepspeed(str(CONFIGS / f"{train.back_end}.json"), dtype)
    elif _launched() > 1 and train.back_end == "fsdp2":
        plugin = _fsdp2(
            FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="TRANSFORMER_BASED_WRAP",  # one unit per layer
                reshard_after_forward=True,
                state_dict_type="SHARDED_STATE_DICT",
                cpu_ram_efficient_loading=False,
                cpu_offload=False,
            ),
            dtype,
        )
    use_deepspeed = isinstance(plugin, DeepSpeedPlugin)
    without_gpu = not torch.accelerator.is_available()
    # Without a GPU, DeepSpeed silently does not connect ranks unless a communication library is given; accelerate unless `cpu`.
    library = {"backend": "gloo"} if use_deepspeed and without_gpu else {}
    if train.deterministic:
        # Without it, torch 2.8 refuses matrix products on a GPU; cuBLAS reads it once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return Accelerator(
        cpu=not use_deepspeed and without_gpu,
        mixed_precision="bf16" if dtype == "bfloat16" else "no",
        deepspeed_plugin=plugin if use_deepspeed else None,
        fsdp_plugin=plugin if isinstance(plugin, FullyShardedDataParallelPlugin) else None,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PATIENCE, **library),
            # Gradients are views of DDP's buckets instead of copies: saves 4 bytes per parameter.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
        step_scheduler_with_optimizer=False,
    )


def check_launch(accelerator: Accelerator, train: TrainConfig, optimizer: str = "adamw") -> None:
    """Compare the running back end with the launcher's and the recipe's settings; LaunchError names a launch that works."""
    launched = _launched()
    running, kind = accelerator.num_processes, accelerator.distributed_type
    if launched != running:
        raise LaunchError(
            f"the launcher started {launched} processes, but each sees {running}: the back end was not initialised "
            "(on CPU, set ACCELERATE_USE_CPU=true or use a config file with use_cpu: true)"
        ).about("use_cpu")
    if _started_one_of_several():
        raise LaunchError(
            "the launcher was asked for several processes and started one, as accelerate does with `--cpu`, and with a config "
            "whose distributed_type is NO or MULTI_CPU; on CPU, launch with --multi_gpu and ACCELERATE_USE_CPU=true (see "
            "recipes/accelerate/cpu.yaml), on GPUs give --multi_gpu. If you want one process: --num_processes 1, and unset "
            "MASTER_ADDR"
        ).about("multi_gpu")
    _check_plugins(kind)
    if train.num_processes is not None and train.num_processes != running:
        raise LaunchError(
            f"train.num_processes={train.num_processes}, but this run has {running}; pass the number to accelerate launch as well "
            "(`accelerate launch --cpu --num_processes 2` starts one process: use --multi_gpu with ACCELERATE_USE_CPU=true)"
        ).about("train.num_processes")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise LaunchError(
            "FSDP version 1 cannot gather its parameters for the rollout; set fsdp_version: 2 in the fsdp_config of the "
            "launch config (see recipes/accelerate/fsdp2.yaml)"
        ).about("fsdp_version")
    found = back_end(accelerator)
    if optimizer in UNSHARDED_ONLY and not found.is_ddp:
        raise LaunchError(
            f"optim.name={optimizer} needs whole gradients, which {found.name} does not have; set optim.name=adamw, or "
            f"train.back_end=ddp and this launch: {_command('ddp')}"
        ).about("optim.name", Fault("choice", "train.back_end", ("ddp",)))
    if running > 1 and _sharding_level(found.key) < _sharding_level(train.back_end):
        raise LaunchError(
            f"train.back_end={train.back_end}, but the launch config runs {found.name}, which shards less: drop the "
            f"config, or use one that shards as much: {_command(train.back_end)}. If the GPUs have room for "
            f"{found.name} (python -m rge.plan says), set train.back_end={found.key}"
        ).about(Fault("choice", "train.back_end", (found.key,)))


def _check_plugins(kind: DistributedType) -> None:
    fixes = {
        DistributedType.DEEPSPEED: "ACCELERATE_USE_CPU=true switches DeepSpeed off; unset it and use recipes/accelerate/cpu_zero.yaml",
        DistributedType.FSDP: "FSDP needs a GPU (on CPU, use recipes/accelerate/cpu.yaml or a DeepSpeed config)",
    }
    for expected, fix in fixes.items():
        if _asked(expected.value) and kind != expected:
            raise LaunchError(
                f"{expected.value} was asked for, but accelerate runs {kind.value}, in which every process holds everything: {fix}"
            ).about(expected.value)


def back_end(accelerator: Accelerator) -> BackEnd:
    """The back end of this run."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        name = f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif kind == DistributedType.FSDP:
        name = "FSDP2"
    else:
        name = "one process" if kind == DistributedType.NO else "DDP"
    return BackEnd(name, accelerator.num_processes)


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """The launch as saved with a state, for `check_resume`."""
    return asdict(back_end(accelerator))


def check_resume(saved: dict[str, Any], accelerator: Accelerator, path: object) -> None:
    """Refuse to load a state that another kind of launch saved; LaunchError names both launches and the fix.

    One process and DDP write the same files, for any number of processes, as do FSDP2's shards among themselves. DeepSpeed's
    are tied to its stage and to the number of processes.
    """
    then, now = BackEnd(**saved), back_end(accelerator)
    if (then.is_ddp and now.is_ddp) or (then.name == now.name == "FSDP2") or then == now:
        return
    raise LaunchError(
        f"it was saved by {then} and cannot be loaded by {now}. Launch with {then} as before, or start this stage again with "
        "another out= from a finished checkpoint (init=...); states of DDP and FSDP2 load on any number of processes of "
        "their own kind",
        path,
    ).about(Fault("choice", "launch", (str(then),)))


def _asked(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() == "true"


def _check_precision(dtype: str) -> None:
    """Refuse a launcher's ``mixed_precision`` other than the recipe's; ``no`` is the launchers' default."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked == "no" or (asked, dtype) == ("bf16", "bfloat16"):
        return
    fixes = f"launch with it off: accelerate launch --mixed_precision no {shlex.join(sys.argv)}"
    if asked == "bf16":
        fixes += ", or set model.dtype=bfloat16"
    raise LaunchError(
        f"the launch asks for mixed_precision {asked}, but the recipe computes in {dtype} (model.dtype); {fixes}"
    ).about(*["mixed_precision", "model.dtype"][: 1 + (asked == "bf16")])


def _check_accumulation(found: object, file: str) -> None:
    """Refuse gradient accumulation settings, by which accelerate and DeepSpeed would divide gradients."""
    if str(found) not in ("None", "auto", "1"):
        raise LaunchError(
            f"is {found}, which would divide every gradient; remove it: a step already is a stage's whole batch_size, of which "
            "train.micro_batch_size are computed at once",
            file,
            key="gradient_accumulation_steps",
        )


def _check_deepspeed(settings: dict[str, Any], file: str, dtype: str) -> None:
    """Refuse settings that contradict the recipe, or that DeepSpeed would reject with a traceback after the model is loaded."""
    enabled = str(dtype == "bfloat16").lower()
    computes = f"remove it, since the recipe computes in {dtype} (model.dtype)"
    rounds = "remove it, since small updates would be lost in rounding"
    rules = {
        "optimizer": ("none", "remove it, since the recipe's optim and each stage's lr determine how weights are updated"),
        "scheduler": ("none", "remove it, since each stage's schedule and warmup_steps determine the learning rate"),
        "amp": ("none", computes),
        "bf16.enabled": (f"none auto {enabled}", computes),
        "fp16.enabled": ("none auto false", computes),
        "bf16.bf16_master_weights_and_grads": ("none false", rounds),
        "data_types.grad_accum_dtype": ("none fp32", rounds),
        "train_batch_size": ("none auto", 'set it to "auto", since a stage\'s batch_size counts the queries of a step'),
        "zero_optimization.stage": ("1 2 3", f"set it to 1, 2 or 3, or launch without DeepSpeed: {_command('ddp')}"),
    }  # fmt: skip
    for key, (allowed, fix) in rules.items():
        found: Any = settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if str(found).lower() not in allowed.split():
            raise LaunchError(f"is {json.dumps(found)}: {fix}", file, key=key)
    _check_accumulation(settings.get("gradient_accumulation_steps"), file)


def _deepspeed(path: str | None, dtype: str) -> DeepSpeedPlugin:
    """ZeRO as in the launch config or the recipe; LaunchError for unreadable settings, or ones that contradict the recipe."""
    let_deepspeed_build()
    file = path or "DeepSpeed's settings in the launch config"
    try:
        # Shipped ones are found from any folder.
        given = {} if path is None else {"hf_ds_config": json.loads(find_shipped(path).read_text())}
        plugin = DeepSpeedPlugin(**given)
    except (OSError, ValueError) as error:
        raise LaunchError(str(error), file, kind="unreadable") from error
    settings = plugin.deepspeed_config
    _check_deepspeed(settings, file, dtype)
    settings.setdefault("bf16", {})["enabled"] = dtype == "bfloat16"
    settings.setdefault("fp16", {})["enabled"] = False
    settings.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    # ZeRO-1 adds to its float32 gradients after a backward, and clears the last chunk's only if it finds tensors in the
    # forward's outputs, which here are dataclasses: chunks would count several times. Immediate updates avoid that.
    settings["bf16"]["immediate_grad_update"] = True
    # Else a gradient that is not finite makes all weights NaN before its norm is known; before 0.19 that was the default.
    settings["bf16"]["check_grad_overflow"] = True
    return plugin


def _fsdp2(plugin: FullyShardedDataParallelPlugin, dtype: str) -> FullyShardedDataParallelPlugin:
    if dtype == "bfloat16" and plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = {
            "param_dtype": torch.bfloat16,
            "reduce_dtype": torch.float32,  # unlike accelerate's default
            "output_dtype": torch.bfloat16,
        }
    return plugin


def _launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _started_one_of_several() -> bool:
    """Whether accelerate was asked for several processes and started one: it sets their address but not their number."""
    here = os.environ.keys()
    by_mpi = any(name.endswith(("COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")) for name in here)
    return {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"} <= here and not by_mpi | (
        "WORLD_SIZE" in here
    )


def _sharding_level(key: str) -> int:
    """Sharding level of a back end: from nothing (DDP, one process) to everything (ZeRO-3, FSDP2)."""
    return min(BACK_ENDS.index(key), BACK_ENDS.index("zero3"))


def _command(key: str) -> str:
    if torch.accelerator.is_available():
        config = f"{key}.yaml"
    else:
        config = "cpu.yaml" if key in ("ddp", "fsdp2") else f"cpu_zero.yaml --zero_stage {key[-1]}"
    return f"accelerate launch --config_file recipes/accelerate/{config} --num_processes {_launched()} {shlex.join(sys.argv)}"
