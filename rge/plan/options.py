"""Options of `rge plan`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rge.common.options import AtLeastOne, Count
from rge.config import Recipe
from rge.distributed.config import BackEndName


@dataclass
class PlanOptions:
    """Estimate what a recipe takes on a machine, without loading weights."""

    cpu: bool = False
    """Plan for one process on this machine's CPU, with its free memory and its measured speed; the keys about GPUs are
    then ignored."""
    num_gpus: AtLeastOne = 8
    """Number of GPUs, with one process each."""
    gpu_gib: Annotated[float, Field(ge=1)] = 80.0
    """Memory of a GPU, GiB."""
    gpus_per_machine: AtLeastOne = 8
    """GPUs that share a machine's main memory."""
    host_gib: Count = 0
    """Main memory of a machine, GiB; 0: unknown, and train.keep_activations=auto keeps nothing in it."""
    peak_tflops: Annotated[float, Field(gt=0)] = 989.0
    """TFLOP/s of a GPU in the computing dtype; the default is an H100's in bfloat16."""
    bandwidth_tbs: Annotated[float, Field(gt=0)] = 3.35
    """Memory bandwidth of a GPU, TB/s; the default is an H100's."""
    utilisation: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of both that the run achieves; null: 0.35 of a GPU's vendor figures, 0.7 of a CPU's measured speed
    (docs/smol.md)."""
    steps: Count = 0
    """Number of steps, for the estimate of hours; 0: the recipe's number, else 1000."""
    back_end: BackEndName | None = None
    """How parameters, gradients and optimizer state are sharded across GPUs; null: train.back_end."""
    for_: Literal["joint", "cold_start", "rl", "all"] = "joint"
    """Stage to plan, whether or not the recipe has sources for it; all: every stage that it would run."""
    query_pictures: Count | None = None
    """Pictures per query: a page of a document counts as one, and so do two frames of a clip. If this or one of the next four is
    given, the prompts are assumed; else they are those of the sources' records, if these are on this machine. null: 1."""
    candidate_pictures: Count | None = None
    """Pictures per candidate, counted likewise; null: 1."""
    positives: AtLeastOne | None = None
    """Positives per query, with data.positives=all; null: 1."""
    text_tokens: Count | None = None
    """Tokens of a prompt, besides pictures and template; null: 64."""
    template_tokens: Count | None = None
    """Tokens of the chat template; null: 24."""
    rationale_tokens: Count = 0
    """Tokens of a generated rationale, and of a given one where records are not measured; 0: rollout.max_new_tokens."""

    @property
    def prompts_given(self) -> list[str]:
        """The options that say how large prompts are, as given."""
        names = ("query_pictures", "candidate_pictures", "positives", "text_tokens", "template_tokens")
        return [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]

    @property
    def reached(self) -> float:
        """`utilisation`, also where it is not given."""
        return self.utilisation or (0.7 if self.cpu else 0.35)

    @property
    def processes(self) -> int:
        """Processes of a machine."""
        return min(self.num_gpus, self.gpus_per_machine)

    def speed(self, utilisation: float) -> tuple[float, float]:
        """FLOP/s of a GPU, and bytes per second of its memory."""
        return self.peak_tflops * utilisation * 1e12, self.bandwidth_tbs * utilisation * 1e12


@dataclass
class PlanCommand(PlanOptions, Recipe):
    """Estimate what a recipe takes: FLOPs, memory and communication of a step, hours, and whether it fits.

    ``recipe=NAME``, the options of this command, and every key of the recipe.
    """
