"""What a stage minimises, and which continuations of a prompt that takes.

Shape suffixes: B = queries of this rank, C = candidates of all ranks, D = hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rge.config import AdaptiveConfig, Recipe
from rge.data.collate import Batch
from rge.losses import alignment, contrastive_losses, hit_at_1, right_by
from rge.model.packing import Branch
from rge.rl.rewards import find_reward
from rge.rollout.generate import Rationale


class Contrast(NamedTuple):
    """What the comparison of query states with candidates gives.

    Attributes:
        loss: summed over all states of the queries.
        figures: by the name in the report, a sum and how many values of each query it is over.
        lead_B: by how much the direct state ranks a right candidate first, see `rge.losses.right_by`; None where no
            direct state is trained.
    """

    loss: Tensor
    figures: dict[str, tuple[Tensor, int]]
    lead_B: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """alpha_lm * L_lm + alpha_con * L_con (paper eq. 10), and alpha_rl * L_rl in the stage rl.

    Attributes:
        alpha_lm: weight of the LM loss; 1 in the cold start.
        alpha_con: weight of the contrastive loss; 0 in the cold start.
        temperature: of InfoNCE.
        anchor: ``self``, ``oracle``, ``none`` or ``mix``: which query state InfoNCE sees. With ``mix`` some of the
            rationales given to a step are the oracle's (`rge.rollout.writer`); the step is that of ``self``.
        direct: share of L_con that is computed on the direct state of the same queries, the other share being on the
            anchor's; 0 leaves the direct state out.
        align: weight within L_con of the KL divergence from the anchor's ranking to the direct state's.
        align_temperature: of both sides of that divergence.
        adaptive: which queries' LM target becomes ``<emb>`` alone; None: none.
        lm_on_candidates: whether ``<emb>`` after a candidate's prompt is an LM label too.
        matryoshka_dims: further sizes of the embedding that the contrastive losses are averaged over.
        terms: contrastive losses by their registered names, with their weights within L_con.
        alpha_rl: weight of the policy gradient.
        sampled_at: temperature at which the rationales of a policy gradient are sampled.
        num_updates: optimizer updates a rollout.
        rewards_oracle: whether a reward reads the oracle rationale.
    """

    alpha_lm: float
    alpha_con: float
    temperature: float = 0.03
    anchor: str = "self"
    lm_on_candidates: bool = True
    matryoshka_dims: tuple[int, ...] = ()
    terms: Mapping[str, float] = field(default_factory=lambda: {"info_nce": 1.0})
    alpha_rl: float = 0.0
    sampled_at: float = 1.0
    num_updates: int = 1
    rewards_oracle: bool = False
    direct: float = 0.0
    align: float = 0.0
    align_temperature: float = 0.03
    adaptive: AdaptiveConfig | None = None

    @classmethod
    def of(cls, recipe: Recipe, stage: str) -> "Objective":
        """The objective of a stage of a checked recipe; the cold start has the LM loss only.

        Raises:
            UserError: `rl.rewards` names a reward that is not registered.
        """
        loss, rl = recipe.loss, recipe.rl
        if stage == "cold_start":
            return cls(alpha_lm=1.0, alpha_con=0.0, lm_on_candidates=loss.lm_on_candidates)
        joint = cls(
            loss.alpha_lm,  # type: ignore[arg-type]  # `load_recipe` has filled both in
            loss.alpha_con,  # type: ignore[arg-type]
            loss.temperature,
            loss.anchor,
            loss.lm_on_candidates,
            tuple(loss.matryoshka_dims),
            {name: weight for name, weight in loss.terms.items() if weight},
            direct=loss.states.direct / (loss.states.direct + loss.states.reasoned),
            align=loss.align,
            align_temperature=loss.align_temperature or loss.temperature,
            adaptive=loss.adaptive if loss.adaptive.share else None,
        )
        if stage != "rl":
            return joint
        return replace(
            joint,
            alpha_lm=rl.alpha_lm,
            alpha_con=rl.alpha_con,
            alpha_rl=rl.alpha_rl,
            sampled_at=rl.temperature,
            num_updates=rl.num_iterations,
            rewards_oracle=rl.alpha_rl > 0
            and any(find_reward(config).needs_oracle for config in rl.rewards if config.weight),
        )

    @property
    def needs_rollout(self) -> bool:
        """Whether the model has to write rationales first."""
        return self.alpha_rl > 0 or (self.alpha_con > 0 and self.anchor in ("self", "mix"))

    @property
    def needs_oracle(self) -> bool:
        """Whether records need an oracle rationale."""
        return (
            self.alpha_lm > 0
            or (self.alpha_con > 0 and self.anchor in ("oracle", "mix"))
            or self.rewards_oracle
        )

    @property
    def needs_candidates(self) -> bool:
        """Whether candidates are embedded."""
        return self.compares or self.lm_on_candidates

    @property
    def compares(self) -> bool:
        """Whether states of queries are compared with candidates, for a loss or for rewards."""
        return self.alpha_con > 0 or self.alpha_rl > 0

    @property
    def trains_candidates(self) -> bool:
        """Whether a loss has a gradient for the candidates; rewards alone have none."""
        return self.alpha_con > 0 or (self.alpha_lm > 0 and self.lm_on_candidates)

    def num_states(self, batch: Batch, rationales: Sequence[Rationale] | None) -> int:
        """States a query that are compared with the candidates."""
        if self.needs_rollout:
            return len(rationales) // len(batch.queries)  # type: ignore[arg-type]
        return 1 + (self.direct > 0)

    def num_lm_tokens(self, batch: Batch) -> int:
        """Labels of the LM loss in a batch."""
        if self.alpha_lm == 0:
            return 0
        return sum(map(len, batch.oracle_ids)) + (len(batch.candidates) if self.lm_on_candidates else 0)

    def query_branches(
        self,
        batch: Batch,
        rationales: Sequence[Rationale] | None,
        emb_id: int,
        row: int,
        *,
        sampled: bool = False,
    ) -> list[Branch]:
        """The continuations of one query's prompt: own rationales, the direct state, the oracle rationale, as needed.

        Args:
            batch: of this rank.
            rationales: own ones, equally many a query.
            emb_id: id of ``<emb>``.
            row: of the query.
            sampled: whether log probabilities of the own ones are read, for the policy gradient.
        """
        branches = []
        if self.needs_rollout:
            num_each = self.num_states(batch, rationales)
            own = rationales[row * num_each : (row + 1) * num_each]  # type: ignore[index]
            branches += [Branch([*one.ids, emb_id], read_state=True, sampled=sampled) for one in own]
        elif self.alpha_con > 0 and (self.anchor == "none" or self.direct):
            branches.append(Branch([emb_id], read_state=True))
        if self.adaptive is not None:
            branches.append(Branch([emb_id], predict=True))
        if self.needs_oracle:
            read = self.alpha_con > 0 and self.anchor == "oracle"
            branches.append(Branch(batch.oracle_ids[row], read_state=read, predict=self.alpha_lm > 0))
        return branches

    def candidate_branch(self, emb_id: int) -> Branch:
        """The continuation of every candidate's prompt: ``<emb>``, embedded and, if so set, an LM label."""
        label = self.lm_on_candidates and self.alpha_lm > 0
        return Branch([emb_id], read_state=self.compares, predict=label)

    def contrastive(
        self, q_ND: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor, num_added: int = 0
    ) -> Contrast:
        """The contrastive losses, the same in training and in validation.

        Args:
            q_ND: states of B queries, equally many each, in the order of `query_branches`.
            c_CD: candidates.
            positive_BC: right answers.
            ignored_BC: neither right nor wrong.
            num_added: states at the end of each query's that `Contrast.hits` leaves out.
        """
        num_each = q_ND.shape[0] // positive_BC.shape[0]
        parts = [("", slice(0, num_each), 1.0)]
        if self.direct:
            # Own rationales stand before the given direct one; the direct branch stands before the oracle's.
            first = slice(0, num_each - 1) if self.needs_rollout else slice(1, 2)
            last = slice(num_each - 1, num_each) if self.needs_rollout else slice(0, 1)
            parts = [("", first, 1 - self.direct), ("_direct", last, self.direct)]
        q_BSD = q_ND.unflatten(0, (-1, num_each))
        total: dict[str, Tensor] = {}
        figures: dict[str, tuple[Tensor, int]] = {}
        for suffix, columns, weight in parts:
            size = columns.stop - columns.start
            q = q_ND if size == num_each else q_BSD[:, columns].flatten(0, 1)
            # Several states of one query are compared with the same candidates.
            masks = [mask.repeat_interleave(size, dim=0) for mask in (positive_BC, ignored_BC)]
            losses = contrastive_losses(
                q, c_CD, *masks, terms=self.terms, temperature=self.temperature, sizes=self.matryoshka_dims
            )
            for name, loss in losses.items():
                scaled = loss * (weight * num_each / size)
                total[name] = total[name] + scaled if name in total else scaled
            counted = size - num_added
            rows = torch.arange(len(q)) % size < counted if num_added else slice(None)
            hits = hit_at_1(q.detach()[rows], c_CD.detach(), *(mask[rows] for mask in masks))
            figures[f"hit_at_1{suffix}"] = hits, counted
            if suffix:
                figures[f"loss_contrastive{suffix}"] = losses["contrastive_loss"].detach(), size
        lead_B = None
        if self.direct:
            _, columns, _ = parts[1]
            direct_BD = q_BSD[:, columns.start]
            lead_B = right_by(direct_BD.detach(), c_CD.detach(), positive_BC, ignored_BC)
            if self.align:
                teacher_BD = q_BSD[:, parts[0][1].start]
                pull = alignment(direct_BD, teacher_BD, c_CD, ignored_BC, temperature=self.align_temperature)
                total["contrastive_loss"] = total["contrastive_loss"] + pull * (self.align * num_each)
                figures["loss_align"] = pull.detach(), 1
        if len(self.terms) > 1:
            figures |= {f"loss_{name}": (total[name].detach(), num_each) for name in self.terms}
        figures["loss_contrastive"] = total["contrastive_loss"].detach(), num_each
        return Contrast(total["contrastive_loss"], figures, lead_B)
