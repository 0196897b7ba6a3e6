"""What a stage minimises: its loss terms, their weights, and the branches of a prompt that each term needs.

Shape suffixes: B = queries of this rank, C = candidates of all ranks, D = hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rge.config import Recipe
from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.loss_config import AdaptiveConfig
from rge.losses import (
    Labels,
    contrastive_losses,
    hit_at_1,
    is_gathered,
    lead_over_negatives,
    takes_teacher,
)
from rge.model.embedding_model import EmbeddingModel, Readout
from rge.model.packing import Branch
from rge.rl.rewards import find_reward
from rge.rollout.generate import Rationale


class Summed(NamedTuple):
    """A loss or figure, summed over the states of this rank's queries that it concerns."""

    value: Tensor
    num_each: int = 1  # of a query's states

    def divisor(self, num_queries: float) -> float:
        """What the sum over so many queries is divided by for their mean."""
        return num_queries * self.num_each


class Contrast(NamedTuple):
    """Result of comparing query states with candidates."""

    loss: Summed
    figures: dict[str, Summed]  # by name in the report
    num_negatives: int  # of all queries
    num_labelled: int  # labelled ones among them
    # Of the direct state, see `rge.losses.lead_over_negatives`; None if none is trained.
    lead_B: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """alpha_lm * L_lm + alpha_con * L_con (paper eq. 10), and alpha_rl * L_rl in the stage rl."""

    alpha_lm: float
    alpha_con: float
    temperature: float = 0.03  # of InfoNCE
    # The query state that InfoNCE sees: ``self``, ``oracle``, ``none`` or ``mix``. With ``mix`` some of the
    # rationales given to a step are the oracle's (`rge.rollout.writer`); the step is that of ``self``.
    anchor: str = "self"
    lm_on_candidates: bool = True  # ``<emb>`` after a candidate's prompt is an LM label too
    # Further embedding sizes that the contrastive losses are averaged over.
    matryoshka_dims: tuple[int, ...] = ()
    # Registered contrastive losses, with their weights within L_con.
    terms: Mapping[str, float] = field(default_factory=lambda: {"info_nce": 1.0})
    teacher_temperature: float = 0.03  # of a judge's scores, in the term ``kl``
    teacher_scale: float = 1.0  # cosines per unit of such a score, in the term ``margin_mse``
    alpha_rl: float = 0.0
    sampled_at: float = 1.0  # temperature of the policy gradient's rationales
    num_updates: int = 1  # optimizer updates per rollout
    rewards_oracle: bool = False  # a reward reads the oracle rationale
    direct: float = 0.0  # share of L_con for the direct state of the same queries; the rest is the anchor's
    adaptive: AdaptiveConfig | None = None  # which queries' LM target becomes ``<emb>`` alone

    @classmethod
    def of(cls, recipe: Recipe, stage: str) -> "Objective":
        """The objective of a stage of a checked recipe (UserError: an unknown reward); the cold start has the LM loss only."""
        loss, rl = recipe.loss, recipe.rl
        if stage == "cold_start":
            return cls(1.0, 0.0, lm_on_candidates=loss.lm_on_candidates)
        joint = cls(
            loss.alpha_lm,  # type: ignore[arg-type]  # `load_recipe` has filled both in
            loss.alpha_con,  # type: ignore[arg-type]
            loss.temperature,
            loss.anchor,
            loss.lm_on_candidates,
            tuple(loss.matryoshka_dims),
            {name: weight for name, weight in loss.terms.items() if weight},
            direct=loss.direct / (1 + loss.direct),
            teacher_temperature=loss.teacher_temperature or loss.temperature,
            teacher_scale=loss.teacher_scale,
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
    def needs_head(self) -> bool:
        """Whether the model's output matrix is used: for an LM loss, or to write rationales."""
        return self.alpha_lm > 0 or self.needs_rollout

    @property
    def needs(self) -> dict[str, bool]:
        """What batches have to hold, as arguments of `rge.data.collate.Collator`."""
        return {"need_oracle": self.needs_oracle, "need_candidates": self.needs_candidates}

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
    def needs_scores(self) -> bool:
        """Whether a contrastive loss reads a judge's scores."""
        return self.alpha_con > 0 and any(map(takes_teacher, self.terms))

    @property
    def gathers(self) -> bool:
        """Whether a contrastive loss sees the queries of all ranks, so that `contrastive` is collective."""
        return any(map(is_gathered, self.terms))

    @property
    def compares(self) -> bool:
        """Whether states of queries are compared with candidates, for a loss or for rewards."""
        return self.alpha_con > 0 or self.alpha_rl > 0

    @property
    def trains_candidates(self) -> bool:
        """Whether a loss has a gradient for the candidates; rewards alone have none."""
        return self.alpha_con > 0 or (self.alpha_lm > 0 and self.lm_on_candidates)

    def num_states(self, batch: Batch, rationales: Sequence[Rationale]) -> int:
        """States per query that are compared with the candidates."""
        if self.needs_rollout:
            return len(rationales) // len(batch.queries)
        return 1 + (self.direct > 0)

    def num_lm_tokens(self, batch: Batch, easy_B: Sequence[bool] | None = None) -> float:
        """Weighted number of LM labels in a batch, in which the target of queries in `easy_B` is ``<emb>`` alone."""
        if self.alpha_lm == 0:
            return 0
        of_queries = self.num_lm_tokens_of_queries(batch, easy_B)
        return sum(of_queries) + (len(batch.candidates) if self.lm_on_candidates else 0)

    def num_lm_tokens_of_queries(self, batch: Batch, easy_B: Sequence[bool] | None = None) -> list[float]:
        """The same of each query alone, without its candidates."""
        easy_B = easy_B or [False] * len(batch.queries)
        return [1 if easy else len(ids) for ids, easy in zip(batch.oracle_ids, easy_B, strict=True)]

    @property
    def lm_targets(self) -> list[str]:
        """LM targets of a query, in the order of `query_branches`.

        ``words``: the oracle rationale; ``direct``: ``<emb>`` alone.
        """
        if self.alpha_lm == 0:
            return []
        return ["words"] if self.adaptive is None else ["words", "direct"]

    def query_nll(self, q: Readout, easy_B: Tensor | None = None) -> Tensor:
        """Summed LM loss of queries over their weighted targets; `easy_B` as in `num_lm_tokens`."""
        return q.nll if len(self.lm_targets) < 2 else self.query_nll_of_each(q, easy_B).sum()

    def query_nll_of_each(self, q: Readout, easy_B: Tensor | None = None) -> Tensor:
        """(B,) the LM loss of each query, of readouts by branch."""
        targets = self.lm_targets
        assert q.nll_P is not None
        nll_BP = q.nll_P.unflatten(0, (-1, len(targets)))
        easy_B = nll_BP.new_zeros(len(nll_BP)) if easy_B is None else easy_B.to(nll_BP.dtype)
        weight_B = {"words": 1 - easy_B, "direct": easy_B}
        return (nll_BP * torch.stack([weight_B[name] for name in targets], dim=1)).sum(dim=1)

    def query_branches(
        self,
        batch: Batch,
        rationales: Sequence[Rationale],
        embedder: EmbeddingModel,
        row: int,
        *,
        sampled: bool = False,
    ) -> list[Branch]:
        """The continuations of one query's prompt: those whose state is read, the anchor's first, then the LM targets.

        Rationales are equally many per query, that of the direct state last. With `sampled`, the log probabilities of the
        rollout's tokens are read too, for the policy gradient.
        """
        emb_id, targets = embedder.emb_id, self.lm_targets
        branches = []
        if self.needs_rollout:
            num_each = self.num_states(batch, rationales)
            own = rationales[row * num_each : (row + 1) * num_each]
            branches = [Branch([*each.ids, emb_id], read_state=True, sampled=sampled) for each in own]
        elif self.alpha_con > 0:
            num_direct = (self.anchor == "none") + (self.direct > 0)
            branches = [Branch([emb_id], read_state=True) for _ in range(num_direct)]
            if self.anchor == "oracle":  # one branch may be both read and learned
                branches.insert(0, Branch(batch.oracle_ids[row], read_state=True, predict="words" in targets))
                targets = [name for name in targets if name != "words"]
        for name in targets:
            branches.append(Branch([emb_id] if name == "direct" else batch.oracle_ids[row], predict=True))
        return branches

    def candidate_branch(self, emb_id: int) -> Branch:
        """The continuation of every candidate's prompt: ``<emb>``, embedded and, if so set, an LM label."""
        label = self.lm_on_candidates and self.alpha_lm > 0
        return Branch([emb_id], read_state=self.compares, predict=label)

    def contrastive(
        self, q_ND: Tensor, c_CD: Tensor, labels: Labels, *, num_added: int = 0, num_each: int | None = None
    ) -> Contrast:
        """The contrastive losses, the same in training and in validation.

        `q_ND` are states of B queries, equally many each, in the order of `query_branches`; hit_at_1 does not count the last
        `num_added` of each. If the objective `gathers`, all ranks call it equally often, with any number of queries; one without
        queries needs `num_each`, the number of states of each.
        """
        num_each = num_each or q_ND.shape[0] // labels.positive_BC.shape[0]
        q_BSD = q_ND.unflatten(0, (-1, num_each))
        total: dict[str, Any] = {}
        figures: dict[str, Summed] = {}
        # The anchor's states, and the direct one.
        beside = int(self.direct > 0)
        parts = [("", num_each - beside, 1 - self.direct), *[("_direct", 1, self.direct)] * beside]
        for suffix, size, weight in parts:
            q = (q_BSD[:, -1:] if suffix else q_BSD[:, :size]).flatten(0, 1)
            own = labels.each(lambda of_query_BC, size=size: of_query_BC.repeat_interleave(size, dim=0))  # type: ignore[misc]
            losses = contrastive_losses(
                q, c_CD, own, terms=self.terms, temperature=self.temperature, sizes=self.matryoshka_dims,
                teacher_temperature=self.teacher_temperature, teacher_scale=self.teacher_scale,
                gather=_of_all_ranks(q.device) if self.gathers else None, num_processes=dist.world_size(),
            )  # fmt: skip
            for name, loss in losses.items():
                # A mean over these states, times their weight, as part of a sum over all states.
                total[name] = total.get(name, 0) + loss * (weight * num_each / size)
            counted = size - num_added
            rows = torch.arange(len(q)) % size < counted if num_added else slice(None)
            hits = hit_at_1(q.detach()[rows], c_CD.detach(), own.positive_BC[rows], own.ignored_BC[rows])
            figures[f"hit_at_1{suffix}"] = Summed(hits, counted)
            if suffix:
                figures[f"loss_contrastive{suffix}"] = Summed(losses["contrastive_loss"].detach(), size)
        if self.needs_scores:
            figures["scored_rate"] = Summed(labels.num_scored().to(q_ND.device))
        masks = labels.positive_BC, labels.ignored_BC
        lead_B = lead_over_negatives(q_BSD[:, -1].detach(), c_CD.detach(), *masks) if self.direct else None
        if len(self.terms) > 1:
            figures |= {f"loss_{name}": Summed(total[name].detach(), num_each) for name in self.terms}
        figures["loss_contrastive"] = Summed(total["contrastive_loss"].detach(), num_each)
        trained = Summed(total["contrastive_loss"], num_each)
        return Contrast(trained, figures, *labels.num_negatives(), lead_B)


def _of_all_ranks(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Gathers the rows of all ranks, with gradient; those on the host over a device that processes may need for it."""

    def gather(rows: Tensor) -> Tensor:
        plain = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        found = dist.gather_rows(plain.to(device), dist.gather_sizes(len(rows), device))
        return found.to(rows.device, rows.dtype)

    return gather
