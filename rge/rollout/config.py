"""The section `rollout`: how the model writes its own rationales."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rge.common.options import ROUNDING, AtLeastOne, BelowOne, Count, NotNegative


@dataclass
class RolloutConfig:
    """How the model writes its own rationales, in training and in evaluation. Nothing is inherited."""

    max_new_tokens: AtLeastOne = 128
    """Cap on generated tokens, `<emb>` included; at the cap `<emb>` is appended and counted as forced."""
    temperature: NotNegative = 0.0
    """Sampling temperature in training; 0 is greedy. Evaluation is greedy unless asked otherwise."""
    batch_size: Annotated[AtLeastOne, ROUNDING] = 64
    """Rationales generated at once per rank."""
    batch_tokens: Annotated[AtLeastOne | None, ROUNDING] = None
    """Most prompt tokens of these, each counted as the longest; null: no limit."""
    backend: Literal["own", "vllm"] = "own"
    """What writes rationales. own: the training model; vllm: a vLLM engine, which gets the model's weights before each
    rollout. In both cases the states that are trained on are the training model's."""
    vllm_memory: Annotated[float, Field(ge=0.01, le=0.95), ROUNDING] = 0.3
    """Share of a device's memory for the engine of `backend=vllm`: a second copy of the language model, and its cache."""
    vllm_sleep: Annotated[bool, ROUNDING] = False
    """Free the memory of the engine of `backend=vllm` between rollouts (vLLM's sleep mode). CUDA only."""
    prompt_pass: Annotated[Literal["auto", "once", "twice"], ROUNDING] = "auto"
    """How often a step encodes a query's prompt. `once`: with gradient, and the rollout continues from it; needs a
    rank's share of the batch to fit into one micro batch. `twice`: for the rollout, and again with gradient in its
    micro batch. `auto`: once if possible. The result is the same."""
    num_rationales: AtLeastOne = 1
    """Rationales sampled per query and step from one encoding of its prompt; needs a temperature. Each is an anchor of
    the contrastive loss, which is the mean over them."""
    reuse_steps: Count = 0
    """Number of steps for which a query's rationale is reused; 0: none. Its `<emb>` state is always computed with the
    current weights. Only in the joint stage: the stage rl always writes new ones."""
    direct_share: BelowOne = 0.0
    """Share of the queries, redrawn in each step, that are embedded without a rationale, so that one model is
    trained for both modes. Must be below 1: to embed all of them without, set loss.anchor=none."""

    def problems(self) -> Iterator[str]:
        """What contradicts itself."""
        if self.backend == "vllm" and self.prompt_pass == "once":
            yield (
                "rollout.prompt_pass=once continues the rollout from the training model's keys and values, which "
                "rollout.backend=vllm does not have: set rollout.prompt_pass=auto"
            )
        yield from self.check_temperature("rollout", self.temperature)
        if self.num_rationales > 1 and self.temperature == 0:
            yield (
                f"rollout.num_rationales={self.num_rationales} would write the same rationale each time, since decoding is "
                "greedy; set rollout.temperature, e.g. 1.0"
            )

    def check_temperature(self, section: str, temperature: float) -> Iterator[str]:
        """What keeps the back end from sampling at the temperature that a section of the recipe gives."""
        if self.backend == "vllm" and temperature != 0 and not 0.01 <= temperature <= 2:
            yield (
                f"{section}.temperature={temperature} is not possible with rollout.backend=vllm: set 0, or 0.01 to 2"
            )
