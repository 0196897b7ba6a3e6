"""The training step: gradient caching in chunks, all losses, backward, over any number of processes.

A step's contrastive batch is global: every query is compared with every candidate of every rank. If it does not fit
into memory as a whole, gradients are computed exactly by gradient caching (arXiv:2101.06983): first all states without
gradient, then dL/dstate of the InfoNCE over all ranks, then one forward per chunk with the surrogate <state, dL/dstate>.
The query side's first pass is free, since the rollout already ends in the state at ``<emb>``. If memory has room for the
activations of a first forward with gradient (`train.keep_activations`), that is the chunks' only forward.

Prompts that `encode_prompts` has run with gradient before the rollout are not encoded again. The stage rl takes the same
step with more branches per query and one more loss, a rollout's `Credit`.

Shape suffixes: B = queries of this rank, N = query states or candidates of this rank, C = candidates of all ranks,
D = hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.model.attention import EncodedPrompts
from rge.model.embedding_model import EmbeddingModel, Packed, Readout, eval_mode
from rge.model.packing import Branch
from rge.objective import Objective
from rge.rl.credit import Credit
from rge.rollout.micro_batches import RandomState, chunks_of, has_dropout, keeping
from rge.rollout.writer import Rollout
from rge.step.comparison import Candidates, Comparison, compare_by_source, find_easy
from rge.step.report import SourceReport, StepReport


@dataclass
class TrainingStep:
    """Accumulates the gradients of optimizer updates."""

    # The wrapped embedder (DDP, DeepSpeed or itself), called for every forward with gradient.
    model: nn.Module
    embedder: EmbeddingModel  # the same, unwrapped
    objective: Objective
    micro_batch_size: int  # queries per forward
    _: KW_ONLY
    # And tokens of its prompts, see `rge.rollout.micro_batches.chunks_of`.
    micro_batch_tokens: int | None = None
    # Where several chunks' activations wait for the backward, see `rge.rollout.micro_batches.keeping`; none recomputes them.
    keep: str = "none"
    backward: Callable[[Tensor], object] = torch.Tensor.backward  # or `Accelerator.backward`
    no_sync: Callable[[], AbstractContextManager] = nullcontext  # around all chunks but the last
    sources: Sequence[str] = ()  # names of the batches' sources

    def __call__(
        self,
        batch: Batch,
        rollout: Rollout | None = None,
        credit: Credit | None = None,
        *,
        by_source: bool = True,
    ) -> dict[str, Any]:
        """Accumulate the gradients of one update on this rank's share of the batch and its rationales.

        The rationales (with ``anchor=mix`` some oracle ones) are equally many per query, query after query. Each is an anchor of
        its query, and the loss is the mean over them; `credit` is a loss on them, in the stage rl.

        Returns:
            Report, equal on all ranks: loss, loss_lm, loss_contrastive, its terms if there are several
            (``loss_info_nce``) and hit_at_1 if they exist, those of the direct state as ``..._direct``;
            the mean number of negatives and of labelled negatives per query; cut_prompts, the number of prompts that were
            too long and lost the end of their text. With several sources, and unless `by_source` is false, these are also given
            by name, as ``..._by_source``, with the number of queries and the mean length of rationales, for sources that have
            queries in this batch. That takes a second comparison, without gradient.

        Raises:
            FloatingPointError, on all ranks: the loss is not finite; names the records of the ranks where it is not.
            ValueError: prompts are encoded in other parts than the step's chunks.
        """
        objective, embedder, rollout = self.objective, self.embedder, rollout or Rollout(())
        sources = self.sources if len(self.sources) > 1 else ()
        packs = _Packs(
            embedder,
            objective,
            batch,
            rollout,
            self.micro_batch_size,
            self.micro_batch_tokens,
            by_branch=bool(sources),
        )
        passes = _Passes(packs, self.micro_batch_size, self.keep)
        report = StepReport(objective, batch, sum(packs.shares), embedder.device)
        of_sources = None
        if sources and by_source:
            of_sources = SourceReport(objective, batch, packs.rationales, sources, embedder.device)
        contrastive = _Contrastive(passes, credit, num_sources=len(sources) * by_source)
        for number, (queries, candidates) in enumerate(packs.chunks):
            with nullcontext() if number == len(packs.chunks) - 1 else self.no_sync():
                q, t = passes.second(self.model, number)
                compared, easy_B = contrastive.compare(q, t), None
                if compared is not None and compared.easy_B is not None:
                    easy_B, report.lm_tokens = compared.easy_B[queries], compared.lm_tokens
                q_nll = objective.query_nll(q, easy_B)
                total = _weighted(q_nll + t.nll, objective.alpha_lm, max(report.lm_tokens, 1))
                total = total + contrastive.loss(q, t, number)
                if credit is not None and objective.alpha_rl > 0:
                    total = total + _weighted(credit.loss(q, packs.states_of(number)), objective.alpha_rl)
                report.add(total, q_nll, t.nll)
                if of_sources is not None:
                    of_sources.add(q, t, queries, candidates, easy_B)
                self.backward(total)
        if embedder.pictures is not None:
            embedder.pictures.clear()
        found: dict[str, Any] = report.means(batch.record_ids, contrastive.compared)
        if of_sources is not None:
            found |= of_sources.means(contrastive.compared)
        if credit is not None:
            found |= credit.report()
            found["loss"] += objective.alpha_rl * found.get("loss_rl", 0.0)
        return found


def _weighted(loss: Tensor, weight: float, count: float = 1) -> Tensor:
    """What a rank minimises of a loss, of which it has a part of the sum over the `count` of all ranks: of its mean, `weight`.

    Gradients are averaged over ranks, hence the factor.
    """
    return loss * (weight * dist.world_size() / count)


class _Packs:
    """A batch cut into chunks, and what the forward of each runs: its prompts with the branches that the objective needs."""

    def __init__(
        self,
        embedder: EmbeddingModel,
        objective: Objective,
        batch: Batch,
        rollout: Rollout,
        micro_batch_size: int,
        micro_batch_tokens: int | None = None,
        *,
        by_branch: bool = False,
    ):
        self.embedder, self.objective, self.batch, self.rollout = embedder, objective, batch, rollout
        self.rationales = rollout.rationales or ()
        self.by_branch = by_branch  # LM losses are read by query and candidate
        self.shares = dist.gather_sizes(len(batch.queries), embedder.device)  # queries of each rank
        # The same number on every rank.
        self.chunks = chunks_of(batch, self.shares, micro_batch_size, micro_batch_tokens, embedder.device)
        self.num_each = objective.num_states(batch, self.rationales)  # states per query that InfoNCE uses
        self.encoded: list[EncodedPrompts] = []
        if rollout.encoded is not None:
            self.encoded = rollout.encoded.parts
            sizes = [rows.stop - rows.start for rows, _ in self.chunks]
            if [len(part.part.lengths) for part in self.encoded] != sizes:
                raise ValueError(
                    f"prompts encoded once belong to one backward, but {len(self.encoded)} parts are encoded, and micro "
                    f"batches cut {len(batch.queries)} queries into {len(sizes)}: set rollout.prompt_pass=twice"
                )

    def states_of(self, number: int) -> slice:
        """The indices of a chunk's query states among this rank's."""
        queries, _ = self.chunks[number]
        return slice(queries.start * self.num_each, queries.stop * self.num_each)

    def queries(self, number: int, *, states_only: bool = False) -> Packed:
        """A chunk's queries with all their branches; with `states_only`, those whose state is read."""
        objective, sampled = self.objective, self.objective.alpha_rl > 0

        def branches(row: int) -> list[Branch]:
            found = objective.query_branches(self.batch, self.rationales, self.embedder, row, sampled=sampled)
            return [branch for branch in found if branch.read_state] if states_only else found

        by_branch = not states_only and len(objective.lm_targets) > (0 if self.by_branch else 1)
        return replace(self.with_branches(number, branches), by_branch=by_branch)

    def with_branches(self, number: int, branches: Callable[[int], list[Branch]]) -> Packed:
        """A chunk's queries with other branches."""
        rows, encoded = self.chunks[number][0], self.encoded[number] if self.encoded else None
        of_rows = [branches(row) for row in range(rows.start, rows.stop)]
        return self.embedder.pack(self.batch.queries[rows], of_rows, self.objective.sampled_at, encoded)

    def candidates(self, number: int, *, states_only: bool = False) -> Packed:
        """A chunk's candidates; with `states_only`, without LM labels."""
        emb_id, prompts = self.embedder.emb_id, self.batch.candidates[self.chunks[number][1]]
        branch = Branch([emb_id], read_state=True) if states_only else self.objective.candidate_branch(emb_id)
        by_branch = self.by_branch and branch.predict
        return replace(self.embedder.pack(prompts, [[branch]] * len(prompts)), by_branch=by_branch)


@dataclass
class _First:
    """Kept from a chunk's first forward."""

    q: Readout | None = None  # queries, computed with gradient
    t: Readout | None = None  # candidates, likewise
    draw: RandomState | None = None  # to restore


class _Passes:
    """The forwards of a step: of several chunks the first, whose states are compared; and the second, which has the backward."""

    def __init__(self, packs: _Packs, micro_batch_size: int, keep: str):
        self.packs, self.embedder, self.objective = packs, packs.embedder, packs.objective
        self.micro_batch_size, self.keep = micro_batch_size, keep
        self.firsts: dict[int, _First] = {}

    def first(self) -> tuple[Tensor, Tensor]:
        """This rank's query states (N, D) and candidates (N, D) for InfoNCE, without gradient; keeps what `second` takes over.

        If nothing is kept (`keep` as in `TrainingStep`), only branches whose state is read are computed, without gradient. With
        dropout, masks affect the states, so everything that the second pass computes is computed, from the same random numbers.
        Queries whose rollout ended in their state need no forward here.
        """
        objective, is_random, keep = self.objective, has_dropout(self.embedder), self.keep
        as_second = is_random or keep != "none"
        with_queries = is_random or not objective.needs_rollout
        with_candidates = objective.trains_candidates or not as_second
        q_parts, t_parts = [], []
        for number in range(len(self.packs.chunks)):
            first = _First(draw=RandomState(self.embedder.device) if is_random and keep == "none" else None)
            packs = [self.packs.queries(number, states_only=not as_second)] if with_queries else []
            packs += [self.packs.candidates(number, states_only=not as_second)] if with_candidates else []
            with torch.no_grad() if keep == "none" else keeping(keep):
                readouts = self.embedder(*packs) if packs else []
            q_parts += [q.state_ND.detach() for q in readouts[: int(with_queries)]]
            t_ND = readouts[-1].state_ND.detach() if with_candidates else self.candidate_states(number)
            t_parts.append(t_ND)
            if keep != "none":
                first.q = readouts[0] if with_queries else None
                first.t = readouts[-1] if with_candidates else None
            self.firsts[number] = first
        if not with_queries:
            q_parts = [self._own_states()]
        return torch.cat(q_parts), torch.cat(t_parts)

    def second(self, model: nn.Module, number: int) -> tuple[Readout, Readout]:
        """A chunk's queries with all their branches, and its candidates, through `model`."""
        first = self.firsts.pop(number, _First())
        if first.draw is not None:
            first.draw.set()
        packs: list[Packed | Readout] = [first.q or self.packs.queries(number)]
        if self.packs.batch.candidates and self.objective.trains_candidates:
            packs.append(first.t or self.packs.candidates(number))
        q, *t = model(*packs)
        return q, t[0] if t else Readout(q.state_ND[:0], q.nll.new_zeros(()))

    @torch.no_grad()
    def candidate_states(self, number: int) -> Tensor:
        """States of a chunk's candidates, without gradient."""
        return self.embedder(self.packs.candidates(number, states_only=True))[0].state_ND

    @torch.no_grad()
    def read(self, branches: Callable[[int], list[Branch]]) -> Tensor:
        """States (N, D) of other branches of the queries, without gradient and without dropout."""
        with eval_mode(self.embedder):
            packs = (self.packs.with_branches(number, branches) for number in range(len(self.packs.chunks)))
            return torch.cat([self.embedder(packed)[0].state_ND for packed in packs])

    @torch.no_grad()
    def _own_states(self) -> Tensor:
        """The rollout's final states; those missing for the current weights are computed now."""
        embedder, batch, rationales = self.embedder, self.packs.batch, self.packs.rationales
        states, num_each = [rationale.state_D for rationale in rationales], self.packs.num_each
        # All of a query's, from one encoding of its prompt.
        missing = sorted({number // num_each for number, state in enumerate(states) if state is None})
        # With sharded parameters every forward is collective: each rank must run equally many.
        most = max(dist.gather_sizes(len(missing), embedder.device))
        for start in range(0, most, self.micro_batch_size):
            rows = missing[start : start + self.micro_batch_size] or [0]
            groups = [range(row * num_each, (row + 1) * num_each) for row in rows]
            branches = [
                [Branch([*rationales[number].ids, embedder.emb_id], read_state=True) for number in group]
                for group in groups
            ]
            packed = embedder.pack([batch.queries[row] for row in rows], branches)
            for number, state in zip(chain(*groups), embedder(packed)[0].state_ND, strict=True):
                if states[number] is None:
                    states[number] = state
        return torch.stack(states)  # type: ignore[arg-type]


class _Contrastive:
    """A step's comparison: with gradient if the step is one chunk, by gradient caching if there are several."""

    def __init__(self, passes: _Passes, credit: Credit | None, *, num_sources: int):
        self.passes, self.packs, self.credit = passes, passes.packs, credit
        self.objective, self.num_sources = passes.objective, num_sources
        self.compared: Comparison | None = None
        self.grads: tuple[Tensor | None, Tensor | None] | None = None
        if self.objective.compares and len(self.packs.chunks) > 1:
            q_ND, t_ND = passes.first()
            trains = self.objective.alpha_con > 0
            q_ND, t_ND = q_ND.requires_grad_(trains), t_ND.requires_grad_(trains)
            self.compared = self._compare(q_ND, t_ND)
            if trains:
                self._whole(self.compared).backward()
            self.grads = q_ND.grad, t_ND.grad

    def compare(self, q: Readout, t: Readout) -> Comparison | None:
        """The comparison of this step, if any; of several chunks, that before the first backward."""
        if self.compared is None and self.objective.compares:
            t_ND = t.state_ND if self.objective.trains_candidates else self.passes.candidate_states(0)
            self.compared = self._compare(q.state_ND, t_ND)
        return self.compared

    def loss(self, q: Readout, t: Readout, number: int) -> Tensor:
        """The comparison's share of a chunk's loss; of several, <state, dL/dstate>, whose gradient is the same."""
        if self.compared is None or self.objective.alpha_con == 0:
            return q.nll.new_zeros(())
        if self.grads is None:
            return self._whole(self.compared)
        grad_q_ND, grad_t_ND = self.grads
        assert grad_q_ND is not None
        assert grad_t_ND is not None
        rows, (_, candidates) = self.packs.states_of(number), self.packs.chunks[number]
        return (q.state_ND * grad_q_ND[rows]).sum() + (t.state_ND * grad_t_ND[candidates]).sum()

    def _whole(self, compared: Comparison) -> Tensor:
        loss = compared.contrast.loss
        return _weighted(loss.value, self.objective.alpha_con, loss.divisor(sum(self.packs.shares)))

    def _compare(self, q_ND: Tensor, t_ND: Tensor) -> Comparison:
        objective, batch, rollout = self.objective, self.packs.batch, self.packs.rollout
        candidates = Candidates.gather([batch], t_ND)
        c_CD, labels = candidates.state_CD, candidates.labels([batch], scored=objective.needs_scores)
        if self.credit is not None:
            self.credit.judge(q_ND.detach(), c_CD.detach(), labels, self.passes.read)
        if objective.alpha_con == 0:
            q_ND, c_CD = q_ND.detach(), c_CD.detach()
        num_added = 0 if self.credit is None else self.credit.num_direct
        compared = Comparison(objective.contrastive(q_ND, c_CD, labels, num_added=num_added))
        if self.num_sources:
            compared.by_source = compare_by_source(
                objective, batch, q_ND, c_CD, labels, num_added=num_added, num_sources=self.num_sources
            )
        if objective.adaptive is not None:
            find_easy(objective, batch, compared, self.packs.shares, rollout.easy_share)
        return compared
