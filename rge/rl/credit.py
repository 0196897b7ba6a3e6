"""Rewards, advantages and the policy loss of one rollout, over all updates that use it.

`Reinforcement` belongs to a stage, a `Credit` to one of its rollouts. States and log probabilities are `rge.step`'s.

Shape suffixes: B = queries of this rank, K = rationales per query, N = B * K, L = their tokens with ``<emb>``, C = candidates of
all ranks, D = hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rge.common.errors import UserError
from rge.config import Recipe
from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.losses import Labels, hit_at_1
from rge.model.embedding_model import EmbeddingModel, Readout
from rge.model.packing import Branch, Read
from rge.rl.config import RewardConfig
from rge.rl.policy import advantages, policy_loss, sampling_weights, standard_deviation
from rge.rl.pool import Pool
from rge.rl.reference import Reference, make_reference
from rge.rl.rewards import Rollouts, evaluate, find_reward
from rge.rollout.generate import Rationale
from rge.rollout.writer import DIRECT_STATE

DIFFERS = 1e-4
"""Rewards of a group that lie within this are equal: states of equal rationales differ by rounding."""


class Reinforcement:
    """Rewards, reference of the KL term and candidate pool of the stage rl; ``folder`` is where rewards may cache paid answers."""

    def __init__(self, recipe: Recipe, embedder: EmbeddingModel, reference: Reference | None, folder: Path):
        self.settings, self.temperature = recipe.rl, recipe.loss.temperature
        self.cap, self.folder = recipe.rollout.max_new_tokens, folder
        self.from_vllm = recipe.rollout.backend == "vllm"
        self.embedder, self.reference = embedder, reference
        # Without a policy gradient, computing rewards and paying a judge would be wasted.
        chosen = [config for config in recipe.rl.rewards if config.weight and recipe.rl.alpha_rl]
        names = _names(chosen)
        self.terms = {name: (config, find_reward(config)) for name, config in zip(names, chosen, strict=True)}
        self.with_direct = any(found.needs_direct for _, found in self.terms.values())
        self.pool = None
        if self.terms and recipe.rl.pool is not None:
            self.pool = Pool(recipe.rl.pool, recipe, embedder)
        self.idle_steps = 0

    def begin(self, batch: Batch, rationales: Sequence[Rationale], measure: bool) -> "Credit":
        """The credit of a rollout; with `measure`, since the step is logged, its controls are measured too."""
        if self.with_direct:
            num_each = self.settings.num_rationales
            starts = range(0, len(rationales), num_each)
            rationales = [one for at in starts for one in (*rationales[at : at + num_each], DIRECT_STATE)]
        if self.pool is not None:
            self.pool.before_step()
        reference_L = None
        if self.reference is not None:
            reference_L = self.reference.log_probs(batch.queries, rationales)
        return Credit(self, batch, rationales, reference_L, measure)

    def after_step(self, report: dict[str, float]) -> None:
        """Raise UserError after `rl.patience` consecutive steps with nothing to learn from."""
        if "groups_that_differ" not in report:
            return
        self.idle_steps = 0 if report["groups_that_differ"] > 0 else self.idle_steps + 1
        if not self.settings.patience or self.idle_steps < self.settings.patience:
            return
        terms = ", ".join(
            f"{name} {report[f'reward_{name}']:.4g}" if f"reward_{name}" in report else f"{name} not a number"
            for name in self.terms
        )
        problem = (
            f"had two rationales of different reward, so nothing was learned. Mean reward of the last step: {terms}; entropy "
            f"{report['entropy']:.3g} nats per token, cut off {report['forced_rate']:.0%}, unscored "
            f"{report['unscored_groups']:.0%}. If the entropy is near 0, the model writes one rationale per query: start from "
            "an earlier checkpoint, or raise rl.temperature; if a reward is at its maximum, choose another (rl.rewards); if "
            "all are cut off, raise rollout.max_new_tokens. rl.patience=0 disables this check"
        )
        if report["unscored_groups"] == 1:
            problem = (
                f"could be scored, so nothing was learned. Mean reward of the last step: {terms}. A query is scored if every "
                "reward gives a finite number for each of its rationales and a right answer is among the candidates: check "
                "rl.rewards and rl.candidates"
            )
        raise UserError(f"for {self.idle_steps} steps no query {problem}", key="rl")

    def state_dict(self) -> dict[str, Any]:
        """For a resumable checkpoint."""
        pool = {} if self.pool is None else {"pool": self.pool.state_dict()}
        return {"idle_steps": self.idle_steps, **pool}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a resumable checkpoint."""
        self.idle_steps = state["idle_steps"]
        if self.pool is not None:
            self.pool.load_state_dict(state["pool"])


@dataclass(frozen=True)
class Judged:
    """What the rewards of a rollout's rationales decide, for all its updates."""

    advantage_N: Tensor
    credit_L: Tensor  # the tokens that are learned from
    # of all ranks
    num_rationales: int
    num_tokens: int  # learned from
    num_sampled: int  # those of them that the model sampled


class Credit:
    """One rollout's rationales, with direct members if a reward needs them; `judged` once their states are known."""

    def __init__(
        self,
        rl: Reinforcement,
        batch: Batch,
        rationales: Sequence[Rationale],
        reference_L: Tensor | None,
        measure: bool,
    ):
        self.rl, self.batch, self.rationales, self.measure = rl, batch, list(rationales), measure
        self.device = rl.embedder.device
        self.num_each = len(rationales) // len(batch.queries)
        self.num_direct = int(rl.with_direct)  # of them, and no anchors
        # Sampled rationales: neither direct members nor those of `rollout.direct_share`.
        self.written_N = torch.tensor([not one.direct for one in rationales], device=self.device)
        lengths = torch.tensor([len(one.ids) + 1 for one in rationales])
        self.starts = [0, *lengths.cumsum(0).tolist()]
        owner_L = torch.arange(len(rationales)).repeat_interleave(lengths)
        credit_L = torch.ones(len(owner_L), dtype=torch.bool)
        for number, one in enumerate(rationales):
            start, end = self.starts[number], self.starts[number + 1]
            group = rationales[number - number % self.num_each :][: self.num_each]
            if one.forced:
                # The `<emb>` at the cap was appended, not sampled.
                credit_L[end - 1] = False
            elif all(other.direct for other in group):
                credit_L[start:end] = False  # a query without rationales, by rollout.direct_share
        self.owner_L, self.credit_L = owner_L.to(self.device), credit_L.to(self.device)
        self.reference_L = reference_L
        corrects = rl.from_vllm and rl.terms and rl.settings.vllm_importance_sampling_correction
        self.sampler_L = self._sampled() if corrects else None
        self.old: dict[int, Tensor] = {}
        self.judged: Judged | None = None
        self.figures: dict[str, float] = {}
        self.sums: dict[str, Tensor] = {}

    def judge(self, q_ND: Tensor, c_CD: Tensor, labels: Labels, read: Read) -> None:
        """Compute rewards and advantages once per rollout, before any backward, for all its updates.

        If the step is logged, also measure hits of states without a rationale and after another query's, which `read` computes.
        States and candidates have no gradient.
        """
        if self.judged is None and self.rl.terms:
            assert labels.labelled_BC is not None
            right_BC = labels.positive_BC | labels.ignored_BC
            self.judged = self._judged(q_ND, c_CD, right_BC, labels.labelled_BC)
        if self.measure:
            self._measure_controls(c_CD, labels.positive_BC, labels.ignored_BC, read)
            self.measure = False

    def _judged(self, q_ND: Tensor, c_CD: Tensor, right_BC: Tensor, labelled_BC: Tensor) -> Judged:
        settings, pool, seen_as = self.rl.settings, self.rl.pool, [0] * len(self.batch.queries)
        c_VCD = c_CD[None]
        if pool is not None:  # replaces the batch's candidates
            assert pool.state_VPD is not None
            c_VCD, seen_as = pool.state_VPD.to(c_CD), pool.settings_of(self.batch)
            right_BC, labelled_BC = pool.masks(self.batch)
        group = self._rollouts(q_ND, c_VCD, seen_as, right_BC.to(self.device), labelled_BC.to(self.device))
        values = {name: evaluate(config, found, group) for name, (config, found) in self.rl.terms.items()}
        weighted = [config.weight * values[name] for name, (config, _) in self.rl.terms.items()]
        total_BK = torch.stack(weighted).sum(dim=0)
        total_BK = torch.where(group.right_BC.any(dim=1)[:, None], total_BK, torch.nan)
        sizes = dist.gather_sizes(len(total_BK), self.device)
        all_BK = dist.gather_rows(total_BK, sizes)
        advantage_N = advantages(
            total_BK,
            scale=settings.scale_rewards or "group",
            std_floor=settings.std_floor,
            std_batch=standard_deviation(all_BK),
        ).flatten()
        # The direct member was not sampled. If it is better than the samples, it is learned from; if worse, its `<emb>` would
        # be pushed down in each step as if the model had written it, however unlikely it already is.
        refused_N = ~self.written_N & (advantage_N <= 0)
        advantage_N = advantage_N.masked_fill(refused_N, 0.0)
        credit_L = self.credit_L & ~refused_N[self.owner_L]
        sampled_L = credit_L & self.written_N[self.owner_L]
        counts = [len(self.rationales), int(credit_L.sum()), int(sampled_L.sum())]
        judged = Judged(advantage_N, credit_L, *map(int, dist.sum_over_ranks(counts, self.device)))
        self.figures |= self._figures_of(judged, group, values, total_BK)
        return judged

    def loss(self, readout: Readout, rows: slice) -> Tensor:
        """A chunk's share of the policy loss, `rows` its rationales; the shares of all chunks and ranks add up to it."""
        settings, tokens = self.rl.settings, slice(self.starts[rows.start], self.starts[rows.stop])
        log_prob_L, judged = readout.log_prob_L, self.judged
        assert log_prob_L is not None
        assert readout.entropy_L is not None
        assert judged is not None
        # In the first update the weights are those that generated the rationales.
        old_L = self.old.setdefault(rows.start, log_prob_L.detach())
        owner_L, credit_L = self.owner_L[tokens] - rows.start, judged.credit_L[tokens]
        weight_L = None
        if self.sampler_L is not None:
            sampler_L, count = self.sampler_L[tokens].to(old_L.dtype), rows.stop - rows.start
            weight_L, ratio_L = sampling_weights(old_L, sampler_L, owner_L, credit_L, count, settings)
            self._count("sampling_ratio_mean", (ratio_L * credit_L).sum())
            self._count("sampling_corrected", ((ratio_L != weight_L) & credit_L).sum())
        found = policy_loss(
            log_prob_L,
            old_L,
            judged.advantage_N[rows].to(log_prob_L.dtype),
            owner_L,
            credit_L,
            settings,
            rationales=judged.num_rationales,
            tokens=judged.num_tokens,
            cap=self.rl.cap,
            reference_L=None if self.reference_L is None else self.reference_L[tokens].to(log_prob_L),
            weight_L=weight_L,
        )
        sampled_L = credit_L & self.written_N[rows][owner_L]
        self._count("loss_rl", found.loss.detach())
        self._count("entropy", (readout.entropy_L * sampled_L).sum())
        self._count("clip_share", found.clipped)
        if self.reference_L is not None:
            self._count("kl", found.kl)
        return found.loss

    def _count(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + value.double()

    def _measure_controls(self, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor, read: Read) -> None:
        """Count hits of direct states and of states after the first rationale of the query before."""
        count, emb_id = len(self.batch.queries), self.rl.embedder.emb_id

        def controls(row: int) -> list[Branch]:
            other = self.rationales[(row - 1) * self.num_each]
            return [Branch([emb_id], read_state=True), Branch([*other.ids, emb_id], read_state=True)]

        state_ND = read(controls)
        hits = [
            float(hit_at_1(state_BD, c_CD, positive_BC, ignored_BC))
            for state_BD in (state_ND[0::2], state_ND[1::2])
        ]
        # With one query there is no other's rationale.
        local = [hits[0], hits[1] * (count > 1), count, count * (count > 1)]
        direct, other, counted, others = dist.sum_over_ranks(local, self.device)
        self.figures["hit_at_1_direct"] = direct / counted
        if others:
            self.figures["hit_at_1_counterfactual"] = other / others

    def report(self) -> dict[str, float]:
        """Figures of the last update, equal on all ranks; resets the sums for the next."""
        if self.judged is None:
            return dict(self.figures)
        totals = dist.sum_over_ranks(torch.stack([*self.sums.values()]).tolist(), self.device)
        found = dict(zip(self.sums, totals, strict=True))
        self.sums = {}
        loss, entropy = found.pop("loss_rl"), found.pop("entropy") / max(self.judged.num_sampled, 1)
        shares = {name: value / max(self.judged.num_tokens, 1) for name, value in found.items()}
        return {"loss_rl": loss, "entropy": entropy, **shares, **self.figures}

    def _sampled(self) -> Tensor:
        """The sampler's log probabilities; NaN for direct states and forced `<emb>`."""
        parts = []
        for one in self.rationales:
            given = list(one.log_probs or ())
            chosen = 0 if one.direct else len(one.ids) + (not one.forced)
            if len(given) < chosen:
                raise UserError(
                    f"rollout.backend=vllm: vLLM returned log probabilities for {len(given)} of the {chosen} tokens of a "
                    "rationale, but all are needed to weight its samples: use a vLLM that returns them, or set "
                    "rl.vllm_importance_sampling_correction=false"
                ).about("rollout.backend")
            parts += [*given, *[float("nan")] * (len(one.ids) + 1 - len(given))]
        return torch.tensor(parts, dtype=torch.float32).to(self.device)

    def _rollouts(
        self, q_ND: Tensor, c_VCD: Tensor, seen_as: list[int], right_BC: Tensor, labelled_BC: Tensor
    ) -> Rollouts:
        K, batch, tokenizer = self.num_each, self.batch, self.rl.embedder.processor.tokenizer
        ids = [one.ids for one in self.rationales]

        def flags(values: list[bool]) -> Tensor:
            return torch.tensor(values).view(-1, K).to(self.device)

        return Rollouts(
            state_BKD=q_ND.view(-1, K, q_ND.shape[1]),
            candidate_VCD=c_VCD,
            seen_as_B=torch.tensor(seen_as).to(self.device),
            right_BC=right_BC,
            labelled_BC=labelled_BC,
            ids=[ids[start : start + K] for start in range(0, len(ids), K)],
            oracle_ids=batch.oracle_ids,
            query_ids=[prompt.input_ids.tolist() for prompt in batch.queries],
            forced_BK=flags([one.forced for one in self.rationales]),
            direct_BK=flags([one.direct for one in self.rationales]),
            temperature=self.rl.temperature,
            cap=self.rl.cap,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True).strip(),
            folder=self.rl.folder,
            record_ids=batch.record_ids,
        )

    def _figures_of(
        self, judged: Judged, group: Rollouts, values: dict[str, Tensor], total_BK: Tensor
    ) -> dict[str, float]:
        """Mean rewards over sampled rationales, shares of informative and unscored groups, mean advantages.

        A group's direct member counts for whether its rewards differ, since it is learned from.
        """
        known_B = total_BK.isfinite().all(dim=1)
        spread_B = torch.where(known_B[:, None], total_BK, 0.0)
        differs_B = (spread_B.amax(dim=1) - spread_B.amin(dim=1)) > DIFFERS
        hit_N = group.hit_BK.flatten()
        known_N = known_B.repeat_interleave(self.num_each) & self.written_N
        right_N, wrong_N = hit_N & known_N, ~hit_N & known_N
        sums = [differs_B.sum(), (~known_B).sum(), right_N.sum(), wrong_N.sum()]
        sums += [(judged.advantage_N * right_N).sum(), (judged.advantage_N * wrong_N).sum()]
        for value_BK in (*values.values(), total_BK):
            value_N = value_BK.flatten()[self.written_N]
            sums += [value_N.nan_to_num(0.0, 0.0, 0.0).sum(), value_N.isfinite().sum()]
        found = dist.sum_over_ranks(torch.stack([one.double() for one in sums]).tolist(), self.device)
        differ, unscored, right, wrong, for_right, for_wrong, *rest = found
        queries = judged.num_rationales / self.num_each
        # A mean over no finite value is left out: 0 would look like a measured reward.
        names = [*(f"reward_{name}" for name in values), "reward"]
        means = zip(names, rest[::2], rest[1::2], strict=True)
        report = {name: total / count for name, total, count in means if count}
        report["groups_that_differ"] = differ / queries
        report["unscored_groups"] = unscored / queries
        if right:
            report["advantage_of_right"] = for_right / right
        if wrong:
            report["advantage_of_wrong"] = for_wrong / wrong
        lengths = dist.gather_objects([len(one.ids) for one in self.rationales if not one.direct])
        written = [length for part in lengths for length in part]
        report["rationale_tokens_p95"] = float(np.percentile(written, 95)) if written else 0.0
        report["empty_rate"] = written.count(0) / max(len(written), 1)
        return report


def _names(rewards: Sequence[RewardConfig]) -> list[str]:
    """Names in the log: a second ``ndcg``, with other options, is ``ndcg_2``."""
    names = [config.name for config in rewards]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True)]


def make_reinforcement(
    recipe: Recipe, embedder: EmbeddingModel, folder: Path, accelerator: Accelerator
) -> Reinforcement:
    """The stage rl of a run; called before `embedder` is wrapped, since its weights are the reference's."""
    reference = None
    if recipe.rl.has_reference:
        reference = make_reference(recipe.rl, recipe.train.micro_batch_size, embedder, accelerator)
    reinforcement = Reinforcement(recipe, embedder, reference, folder)
    accelerator.register_for_checkpointing(reinforcement)
    return reinforcement
