"""The section `rl`: the stage that rewards rationales."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rge.common.options import AtLeastOne, Count, NotNegative, Positive, Share
from rge.optim.config import StageConfig


@dataclass
class RewardConfig:
    """One term of the reward, and its price."""

    name: str
    """A registered reward (docs/rl.md has the table), or your own as module:function."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """The reward is the sum of the terms times their weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the reward."""


@dataclass
class RLConfig(StageConfig):
    """The stage rl: rationales that retrieve better than their group's become likelier.

    Names and defaults are TRL's where TRL has them. Without `sources` it trains on the joint stage's; then stage=all leaves
    it out, and stage=rl runs it.
    """

    batch_size: AtLeastOne = 64
    """Queries per optimizer step over all ranks, each with `num_rationales` rationales; their candidates are ranked."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    alpha_rl: NotNegative = 1.0
    """Weight of the policy gradient."""
    alpha_con: NotNegative = 0.0
    """Weight of InfoNCE over the sampled rationales' states; replaces loss.alpha_con. On the demo, 0.5 costs accuracy."""
    alpha_lm: NotNegative = 0.05
    """Weight of the LM loss on oracle rationales; replaces loss.alpha_lm."""
    num_rationales: AtLeastOne = 8
    """Rationales sampled per query and step (a group); replaces rollout.num_rationales."""
    temperature: NotNegative = 1.0
    """Sampling temperature; replaces rollout.temperature. Log probabilities are those of this distribution."""
    rewards: list[RewardConfig] = field(default_factory=lambda: [RewardConfig("margin")])
    """Terms of the reward, each with name, weight and options."""
    candidates: str = "batch"
    """What rewards rank: batch, the step's candidates on all processes; or pool:PATH, a fixed, harder pool
    (docs/rl.md)."""
    pool_every: AtLeastOne = 50
    """Steps between embeddings of the pool; without a pool it has no effect."""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """Normalisation of the policy gradient, see docs/rl.md."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation that advantages are divided by: of the group, of the batch, or none; null: group, as in TRL."""
    std_floor: NotNegative = 1e-4
    """Added to that standard deviation: equal rationales differ in reward by rounding."""
    epsilon: Share = 0.2
    """Lower clipping: ratios of a token's probability to its probability when written are clipped at 1 - epsilon. In a
    rollout's first update they are 1."""
    epsilon_high: NotNegative | None = None
    """Upper clipping, at 1 + epsilon_high; null: epsilon. DAPO uses 0.28."""
    beta: NotNegative = 0.0
    """Weight, within the policy gradient, of the KL divergence (k3) from the checkpoint that the stage starts from: the
    model without its adapters, or else a frozen copy in memory."""
    num_iterations: AtLeastOne = 1
    """Optimizer updates per rollout; after the first, ratios differ from 1 and clipping begins."""
    vllm_importance_sampling_correction: bool = True
    """Weight a rationale from vLLM by its probability under our model divided by that under vLLM's."""
    vllm_importance_sampling_clip_max: NotNegative | None = 3.0
    """A rationale whose ratio is higher is left out; null: none is."""
    patience: Count = 50
    """The stage ends with a message if no group's rewards differ for this many consecutive steps; 0: never."""

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model, of the KL divergence."""
        return bool(self.beta and self.alpha_rl)

    @property
    def pool(self) -> Path | None:
        """The fixed pool that rewards rank; None for the batch."""
        return (
            None if self.candidates == "batch" else Path(self.candidates.removeprefix("pool:")).expanduser()
        )

    def problems(self, name: str) -> Iterator[str]:
        """Also what is wrong with its rewards and candidates."""
        yield from super().problems(name)
        if not (self.alpha_rl or self.alpha_con or self.alpha_lm):
            yield "rl.alpha_rl, rl.alpha_con and rl.alpha_lm are all 0, which leaves nothing to train"
        if self.beta and not self.alpha_rl:
            yield (
                f"rl.beta={self.beta} is a part of the policy gradient, which rl.alpha_rl=0 leaves out: set rl.beta=0 too"
            )
        if not re.fullmatch("batch|pool:.+", self.candidates):
            yield f"rl.candidates must be batch or pool:PATH, got {self.candidates!r}"
        if self.candidates != "batch" and not self.alpha_rl:
            yield "rl.candidates is what rewards rank, and rl.alpha_rl=0 leaves rewards out: set it to batch"
        if self.alpha_rl and not any(reward.weight for reward in self.rewards):
            yield "rl.rewards leaves no reward: name at least one and give it a weight, or set rl.alpha_rl=0"
        if self.alpha_rl and self.num_rationales < 2:
            yield (
                "rl.num_rationales=1 leaves nothing to compare a rationale with, so there is no policy gradient: set 2 or more "
                "(8 is usual), or set rl.alpha_rl=0"
            )
        if self.num_rationales > 1 and self.temperature == 0:
            yield (
                "rl.temperature=0 writes the same rationale each time, so no group would differ: set it above 0, e.g. 1.0"
            )
        terms = [(reward.name, reward.options) for reward in self.rewards]
        if twice := {term for term, options in terms if terms.count((term, options)) > 1}:
            yield (
                f"rl.rewards names {', '.join(sorted(twice))} twice with the same options; use one entry with the sum of the "
                "weights"
            )
