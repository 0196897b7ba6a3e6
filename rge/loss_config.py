"""The section `loss`: the losses of the stages cold_start and joint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from rge.common.errors import RecipeError
from rge.common.options import IN_COLD_START, AtLeastOne, BelowOne, Count, NotNegative, Positive, Share


@dataclass
class AdaptiveConfig:
    """Teach the model to answer easy queries with `<emb>` at once.

    Where its direct state already ranks a right candidate first, the LM target is `<emb>` alone instead of the oracle
    rationale, as in TRACE (arXiv:2603.02929), where a larger model marks the easy queries. Needs `loss.direct`.
    """

    share: BelowOne = 0.0
    """Largest share of a batch's queries that get `<emb>` alone as LM target; 0: none. The others keep their rationale."""
    margin: float = 0.0
    """Margin by which the right candidate has to lead every wrong one, as a difference of cosines."""
    floor: Share = 0.0
    """Smallest share of a batch's queries that get `<emb>` alone as LM target (those with the largest margins), so that the
    model does not forget how to answer directly."""
    warmup_steps: Count = 0
    """Steps over which the largest share rises from 0."""


@dataclass
class LossConfig:
    """The two losses. Users ablate these, so each can be given on its own."""

    ratio: str = "1:10"
    """Weight of the LM loss to that of the contrastive loss, normalised to sum to one (paper eq. 10: 1/11 and 10/11);
    `none`: no LM loss."""
    alpha_lm: float | None = None
    """Weight of the LM loss; overrides `ratio`. The other weight is 1 minus this one."""
    alpha_con: float | None = None
    """Weight of the contrastive loss; overrides `ratio`."""
    temperature: Positive = 0.03
    """InfoNCE tau; cosine similarities are divided by it. No unit, > 0."""
    anchor: Literal["self", "oracle", "none", "mix"] = "self"
    """Query state that the contrastive loss uses (the paper's Table 4): `self` after the model's own rationale,
    `oracle` after the oracle rationale (leaks the target), `none` directly after the prompt; `mix`: `oracle` for a
    share of the queries, `self` for the others."""
    oracle_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With `anchor=mix`: share of the queries, redrawn in each step, that are embedded after the oracle rationale."""
    oracle_decay_steps: AtLeastOne | None = None
    """With `anchor=mix`: steps over which the share falls linearly from `oracle_share` to 0; null: it stays constant."""
    direct: NotNegative = 0.0
    """Weight of the state directly after the prompt, where the anchor's is 1, from the same pass: one checkpoint works in
    both modes (docs/modes.md). The contrastive loss is the weighted mean of both states'."""
    budget: Share = 0.0
    """Share of the queries, redrawn in each step, whose own rationale ends after a number of tokens drawn from 0 to
    `rollout.max_new_tokens`; the anchor is the state there. So one checkpoint works with any `max_rationale_tokens` of a
    request (docs/modes.md)."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    terms: dict[str, NotNegative | None] = field(default_factory=lambda: {"info_nce": 1.0})
    """Contrastive losses, by registered name, and their weights within the contrastive part (docs/extending.md). null
    removes one that the `base` recipe has."""
    teacher_temperature: Positive | None = None
    """Temperature of a judge's scores (`score` of a record's targets) in the term `kl`; null: `temperature`."""
    teacher_scale: Positive = 1.0
    """Cosines per unit of a judge's score in the term `margin_mse`, which compares margins."""
    matryoshka_dims: list[AtLeastOne] = field(default_factory=list)
    """Further sizes to which embeddings can be truncated: InfoNCE becomes the mean over them and the full size."""
    lm_on_candidates: Annotated[bool, IN_COLD_START] = True
    """Whether the LM loss also trains `<emb>` after the candidate's prompt, the second term of eq. 8."""

    def complete(self) -> None:
        """Fill in both weights, which then sum to one, and leave out the terms that are null; RecipeError if they do not fit."""
        self.terms = {name: weight for name, weight in self.terms.items() if weight is not None}
        lm, con = self.alpha_lm, self.alpha_con
        if lm is None:
            lm, con = _weights_of_ratio(self.ratio) if con is None else (1.0 - con, con)
        elif con is None:
            con = 1.0 - lm
        if not (0 <= lm <= 1 and 0 <= con <= 1 and math.isclose(lm + con, 1.0, abs_tol=1e-9)):
            raise RecipeError(
                f"loss.alpha_lm ({lm}) and loss.alpha_con ({con}) must lie in [0, 1] and sum to 1 (paper eq. 10); "
                "give one of them and the other follows"
            ).about("loss.alpha_lm", "loss.alpha_con")
        self.alpha_lm, self.alpha_con = lm, con

    def problems(self) -> Iterator[str]:
        """What contradicts itself."""
        adaptive = self.adaptive
        if not any(self.terms.values()):
            yield "loss.terms leaves no contrastive loss: give one of them a weight above 0"
        if self.anchor == "mix" and self.oracle_decay_steps is None and self.oracle_share == 1:
            yield "loss.oracle_share=1 mixes nothing: that is loss.anchor=oracle; or give loss.oracle_decay_steps"
        if adaptive.share and not self.direct:
            yield f"loss.adaptive.share={adaptive.share} needs the direct state: set loss.direct, e.g. 1"
        if adaptive.floor > adaptive.share:
            yield f"loss.adaptive.floor={adaptive.floor} is above loss.adaptive.share={adaptive.share}"
        if adaptive.share and not (self.alpha_lm and self.alpha_con):
            yield (
                f"loss.adaptive.share={adaptive.share} changes the LM loss by what the contrastive loss compares, and the weight "
                "of one of them is 0: set loss.ratio, e.g. 1:10"
            )
        if self.anchor == "none" and self.direct:
            yield "loss.anchor=none trains the direct state alone: set loss.direct=0, or another loss.anchor"


def _weights_of_ratio(ratio: str) -> tuple[float, float]:
    if ratio == "none":
        return 0.0, 1.0
    try:
        lm, con = (float(part) for part in ratio.split(":"))
    except ValueError:
        raise RecipeError(
            f"it must be LM:CONTRASTIVE such as 1:10, or none; got {ratio!r}", key="loss.ratio", kind="form"
        ) from None
    total = lm + con
    if min(lm, con) < 0 or total <= 0 or not math.isfinite(total):
        raise RecipeError(
            f"it needs two weights >= 0, not both zero; got {ratio!r}", key="loss.ratio", kind="range"
        )
    return lm / total, con / total
