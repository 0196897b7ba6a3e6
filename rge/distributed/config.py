"""The section `train`: the loop and its processes."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from rge.common.options import MAY_DIFFER, ROUNDING, AtLeastOne, Positive

BackEndName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
BACK_ENDS: tuple[str, ...] = get_args(BackEndName)
"""What is sharded across processes, from nothing to everything; the last two are equal."""


@dataclass
class TrainConfig:
    """The loop."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of all randomness: order of the records, augmentation, dropout, sampled rationales."""
    micro_batch_size: Annotated[AtLeastOne, ROUNDING] = 8
    """Queries per forward and backward pass on one rank. Affects memory, not the result."""
    micro_batch_tokens: Annotated[AtLeastOne | None, ROUNDING] = None
    """Most tokens of the prompts, queries and candidates together, of one forward and backward pass: a long document gets a
    pass of its own, and short texts share one. A single query and candidate may have more. null: no limit."""
    keep_activations: Annotated[Literal["auto", "device", "host", "none"], ROUNDING] = "auto"
    """Where a step of several micro batches keeps the activations of its first pass for the backward pass (with
    model.gradient_checkpointing, each layer's input), instead of computing them a second time: in the device's memory,
    in pinned main memory, or nowhere. auto: wherever they fit according to the plan; otherwise nowhere."""
    save_every: Annotated[AtLeastOne, MAY_DIFFER] = 500
    """Steps between resumable checkpoints."""
    keep_last: Annotated[AtLeastOne, MAY_DIFFER] = 2
    """Resumable checkpoints kept on disk; with two, one is left if the newest is damaged."""
    background_save: Annotated[bool, MAY_DIFFER] = True
    """Copy resumable checkpoints to main memory and write them while training continues; false: wait for the disk.
    With DeepSpeed and FSDP, every process copies and writes its shard."""
    log_every: Annotated[AtLeastOne, MAY_DIFFER] = 10
    """Steps between lines of metrics.jsonl and of trackers."""
    back_end: Annotated[BackEndName, MAY_DIFFER] = "ddp"
    """The minimum that is sharded across processes: ddp (nothing), zero1 (optimizer state and float32 weights), zero2
    (gradients too), zero3 or fsdp2 (everything). A launch that names no back end gets this one, one that shards less is
    refused (docs/scaling.md)."""
    num_processes: Annotated[AtLeastOne | None, MAY_DIFFER] = None
    """Number of processes that this run must have; any other number is an error. null: as many as the launcher starts."""
    silence_s: Annotated[Positive, MAY_DIFFER] = 45.0
    """With several processes: one without a heartbeat for this many seconds counts as dead, and ends the run. Raise it
    if processes may freeze, in a debugger or a paused container for example."""
    deterministic: Annotated[bool, ROUNDING] = False
    """torch.use_deterministic_algorithms: bit-exact repeats on GPU, slower."""
