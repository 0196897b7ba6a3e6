"""The training step: rollout, candidate masks, gradient caching in chunks, backward, over any number of processes.

A step's contrastive batch is global: every query is compared with every candidate of every rank. If it does not fit
into memory as a whole, gradients are computed exactly by gradient caching (arXiv:2101.06983): first all states without
gradient, then dL/dstate of the InfoNCE over all ranks, then one forward a chunk with the surrogate <state, dL/dstate>.
Here the query side's first pass is free, since the rollout already ends in the state at ``<emb>``.

That second forward is only computed where memory has no room for what a first one with gradient would keep
(`train.keep_activations`): of every layer its input, or all of it without gradient checkpointing. Then the chunks' first
forward is their only one, and prompts are encoded once chunk by chunk, before the rollout.

If the step does fit, the prompts are encoded once in all: `encode_prompts` runs them with gradient, the rollout continues
from their keys and values without, and the branches continue from the same ones with gradient. Otherwise a prompt is
encoded once for the rollout and once in its chunk.

The stage rl takes the same step with more branches a query and one loss more, a `RolloutLoss`.

Shape suffixes: B = queries of this rank, N = query states or candidates of this rank, C = candidates of all ranks,
D = hidden size.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from rge.config import AdaptiveConfig
from rge.data.collate import Batch, Chunk, chunks_of
from rge.distributed import collectives as dist
from rge.model.attention import EncodedParts, EncodedPrompts
from rge.model.embedding_model import EmbeddingModel, Packed, RandomState, Readout, drops_out, keeping
from rge.model.packing import Branch
from rge.objective import Objective
from rge.rollout.generate import Rationale
from rge.rollout.writer import Rollout

Masks = tuple[Tensor, Tensor, Tensor]
"""Positive, ignored and labelled negative candidates, see `candidate_masks`."""

_Kept = tuple[Readout | None, Readout | None]
"""Queries and candidates of a chunk, as far as they have been computed with gradient."""

Read = Callable[[Callable[[int], list[Branch]]], Tensor]
"""From the branches of each row to their states (N, D), without gradient."""


class RolloutLoss(Protocol):
    """A loss on the rationales of a rollout beside the contrastive one; in the stage rl, `rge.rl.credit.Credit`."""

    def judge(self, q_ND: Tensor, c_CD: Tensor, masks: Masks, read: Read) -> None:
        """See the states of the rollout and the candidates, once they are known and before any backward.

        Args:
            q_ND: this rank's states, without gradient.
            c_CD: candidates of all ranks, without gradient.
            masks: see `candidate_masks`.
            read: gives states of other branches of the same queries, row by row, for what is measured and not trained.
        """

    def loss(self, readout: Readout, rows: slice) -> Tensor:
        """A chunk's share of the loss; `rows` says which of this rank's rationales it holds."""

    def report(self) -> dict[str, float]:
        """Figures of the update just computed, equal on all ranks; ``loss_rl`` among them."""


class TrainingStep:
    """Accumulates the gradients of optimizer updates.

    Args:
        model: the wrapped embedder (DDP, DeepSpeed or itself), called for every forward with gradient.
        embedder: the same, unwrapped.
        objective: losses and weights.
        micro_batch_size: queries per forward.
        keep: where what the backward of several chunks needs of their first forwards is kept, ``device`` or ``host``, see
            `rge.model.embedding_model.keeping`; ``none`` computes these forwards without gradient and again.
        backward: `Accelerator.backward` or `Tensor.backward`.
        no_sync: context in which gradients of other ranks are not waited for, used for all chunks but the last.
    """

    def __init__(
        self,
        model: nn.Module,
        embedder: EmbeddingModel,
        objective: Objective,
        micro_batch_size: int,
        *,
        keep: str = "none",
        backward: Callable[[Tensor], object] = torch.Tensor.backward,
        no_sync: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model, self.embedder, self.objective = model, embedder, objective
        self.micro_batch_size, self.keep = micro_batch_size, keep
        self.backward, self.no_sync = backward, no_sync

    def __call__(
        self, batch: Batch, rollout: Rollout | None = None, extra: RolloutLoss | None = None
    ) -> dict[str, float]:
        """Accumulate the gradients of one update.

        Args:
            batch: this rank's share of the step.
            rollout: this rank's own rationales (with ``anchor=mix`` some oracle ones), equally many a query, query
                after query. Each is an anchor of its query, and the loss is the mean over them.
            extra: a loss on these rationales.

        Returns:
            Report, equal on all ranks: loss, loss_lm, loss_contrastive, its terms where there are several
            (``loss_info_nce``) and hit_at_1 where they exist, those of further states under ``..._direct`` and
            ``..._latent``; with them how many negatives a query had in the loss's
            denominator, on average, and how many of those are labelled ones; cut_prompts, how many prompts were too
            long and lost the end of their text.

        Raises:
            FloatingPointError: the loss is not finite; names the records of this rank.
            ValueError: prompts are encoded in other parts than the step's chunks.
        """
        objective, forward = self.objective, _Forward(self.embedder, self.objective, batch, rollout)
        share = _Share.of(batch, forward, self.micro_batch_size)
        forward.lay_out(share.chunks)
        cached = objective.compares and len(share.chunks) > 1
        comparing: _AtOnce = (_GradientCache if cached else _AtOnce)(forward, share, extra, self.keep)
        sums = _Sums()
        for number, chunk in enumerate(share.chunks):
            with nullcontext() if number == len(share.chunks) - 1 else self.no_sync():
                rows = share.states_of(chunk)
                q, t = comparing.readouts(self.model, number)
                compared, easy_B = comparing.compare(q, t), None
                if compared is not None and compared.easy_B is not None:
                    easy_B = compared.easy_B[chunk[0]]
                    share = share.with_lm_tokens(compared.lm_tokens, objective)
                q_nll = objective.query_nll(q, easy_B)
                total = (q_nll + t.nll) * share.lm_scale + comparing.loss(q, t, rows, chunk[1])
                if extra is not None and objective.alpha_rl > 0:
                    total = total + extra.loss(q, rows) * (objective.alpha_rl * dist.world_size())
                sums.add(total, q_nll, t.nll)
                self.backward(total)
        if self.embedder.pictures is not None:
            self.embedder.pictures.clear()
        report = sums.report(batch, objective, share, compared)
        if extra is not None:
            report |= extra.report()
            report["loss"] += objective.alpha_rl * report.get("loss_rl", 0.0)
        return report


@dataclass(frozen=True)
class _Share:
    """This rank's share of a step, and the factors that make sums over it means over the global batch.

    DDP averages gradients over ranks, the losses are means over all ranks' rows: sums / global count * world size.

    Attributes:
        micro_batch_size: queries per forward at most.
        chunks: of one forward each; equally many on every rank.
        num_each: states a query that InfoNCE sees.
        queries: of all ranks.
        lm_tokens: labels of all ranks.
        cut_prompts: of all ranks.
        lm_scale: factor of summed LM losses.
        con_scale: factor of summed contrastive losses.
    """

    micro_batch_size: int
    chunks: list[Chunk]
    num_each: int
    queries: int
    lm_tokens: float
    cut_prompts: float
    lm_scale: float
    con_scale: float

    @classmethod
    def of(cls, batch: Batch, forward: "_Forward", micro_batch_size: int) -> "_Share":
        objective, device = forward.objective, forward.embedder.device
        shares = dist.gather_sizes(len(batch.queries), device)
        num_cut = sum(prompt.num_cut_tokens > 0 for prompt in (*batch.queries, *batch.candidates))
        lm_tokens, cut = dist.sum_over_ranks([objective.num_lm_tokens(batch), num_cut], device)
        num_each = objective.num_states(batch, forward.rationales)
        return cls(
            micro_batch_size,
            chunks_of(batch, shares, micro_batch_size),
            num_each,
            sum(shares),
            lm_tokens,
            cut,
            lm_scale=objective.alpha_lm * dist.world_size() / max(lm_tokens, 1),
            con_scale=objective.alpha_con * dist.world_size() / (sum(shares) * num_each),
        )

    def with_lm_tokens(self, lm_tokens: float, objective: Objective) -> "_Share":
        """The same with other labels than the oracle rationales'."""
        scale = objective.alpha_lm * dist.world_size() / max(lm_tokens, 1)
        return replace(self, lm_tokens=lm_tokens, lm_scale=scale)

    def states_of(self, chunk: Chunk) -> slice:
        """Which of this rank's query states a chunk holds."""
        return slice(chunk[0].start * self.num_each, chunk[0].stop * self.num_each)


class _Forward:
    """A batch under an objective: its prompts with the branches that are needed, packed and read chunk by chunk."""

    def __init__(self, embedder: EmbeddingModel, objective: Objective, batch: Batch, rollout: Rollout | None):
        self.embedder, self.objective, self.batch = embedder, objective, batch
        self.rationales: Sequence[Rationale] | None = None if rollout is None else rollout.rationales
        self.encoded = None if rollout is None else rollout.encoded
        self.parts: dict[int, EncodedPrompts] = {}
        given = sum(one.given for one in self.rationales or ())
        self.num_given = 0 if objective.states else given // len(batch.queries)
        self.easy_share = 0.0 if rollout is None else rollout.easy_share

    def lay_out(self, chunks: Sequence[Chunk]) -> None:
        """Say in which chunks the step is taken.

        Raises:
            ValueError: prompts are encoded in other parts.
        """
        if self.encoded is None:
            return
        parts = self.encoded.parts if isinstance(self.encoded, EncodedParts) else [self.encoded]
        if [len(part.part.lengths) for part in parts] != [rows.stop - rows.start for rows, _ in chunks]:
            raise ValueError(
                f"prompts encoded once belong to one backward, but {len(parts)} parts are encoded, and micro batches cut "
                f"{len(self.batch.queries)} queries into {len(chunks)}: set rollout.prompt_pass=twice"
            )
        self.parts = {rows.start: part for (rows, _), part in zip(chunks, parts, strict=True)}

    def __call__(self, model: nn.Module, chunk: Chunk, kept: _Kept | None = None) -> tuple[Readout, Readout]:
        """Queries with all their branches and candidates, through `model`; what is kept is not computed again."""
        objective = self.objective
        known_q, known_t = kept or (None, None)
        packs: list[Packed | Readout] = [known_q or self._queries(chunk[0])]
        if self.batch.candidates and objective.trains_candidates:
            packs.append(known_t or self._trained_candidates(chunk[1]))
        readouts = model(*packs)
        if len(readouts) == 1:
            q = readouts[0]
            return q, Readout(q.state_ND[:0], q.nll.new_zeros(()), 0)
        return readouts[0], readouts[1]

    @torch.no_grad()
    def states(self, chunks: Sequence[Chunk], micro_batch_size: int) -> tuple[Tensor, Tensor]:
        """What InfoNCE compares, without gradient: query states (N, D) and candidates (N, D) of this rank."""
        objective, embedder, batch = self.objective, self.embedder, self.batch
        direct = Branch([embedder.emb_id], read_state=True)
        q_parts, t_parts = [], []
        for queries, candidates in chunks:
            packs = []
            if not objective.needs_rollout:
                read = [
                    [
                        branch
                        for branch in objective.query_branches(batch, None, embedder, row)
                        if branch.read_state
                    ]
                    for row in self._rows(queries)
                ]
                packs.append(embedder.pack(batch.queries[queries], read))
            packs.append(self._candidates(candidates, direct))
            *q, t = embedder(*packs)
            q_parts += [readout.state_ND for readout in q]
            t_parts.append(t.state_ND)
        if objective.needs_rollout:
            q_parts = [self._own_states(micro_batch_size)]
        return torch.cat(q_parts), torch.cat(t_parts)

    @torch.no_grad()
    def states_with_dropout(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, list[RandomState]]:
        """States of every chunk as its forward with gradient will compute them, and the random state each needs.

        Dropout's masks decide the states that the loss sees, so the second forward has to draw the first one's.
        """
        q_parts, t_parts, draws = [], [], []
        for chunk in chunks:
            draws.append(RandomState(self.embedder.device))
            q, t = self(self.embedder, chunk)
            q_parts.append(q.state_ND)
            trained = self.objective.trains_candidates
            t_parts.append(t.state_ND if trained else self.candidate_states(chunk[1]))
        return torch.cat(q_parts), torch.cat(t_parts), draws

    @torch.no_grad()
    def candidate_states(self, rows: slice = slice(None)) -> Tensor:
        """States of candidates, without gradient."""
        packed = self._candidates(rows, Branch([self.embedder.emb_id], read_state=True))
        return self.embedder(packed)[0].state_ND

    @torch.no_grad()
    def read(self, chunks: Sequence[Chunk], branches: Callable[[int], list[Branch]]) -> Tensor:
        """States (N, D) of other branches of the queries, without gradient and without dropout."""
        was_training, parts = self.embedder.training, []
        self.embedder.eval()
        try:
            for queries, _ in chunks:
                packed = self._pack(queries, [branches(row) for row in self._rows(queries)])
                parts.append(self.embedder(packed)[0].state_ND)
        finally:
            self.embedder.train(was_training)
        return torch.cat(parts)

    def keep(
        self, chunks: Sequence[Chunk], where: str, micro_batch_size: int
    ) -> tuple[Tensor, Tensor, list[_Kept]]:
        """`states`, or `states_with_dropout`, and the readouts that they are of, with gradient.

        Queries whose states a rollout ended in have had no forward of their own yet: nothing of them is kept.
        """
        objective = self.objective
        kept: list[_Kept] = []
        q_parts: list[Tensor] = []
        t_parts: list[Tensor] = []
        with_queries = not objective.needs_rollout or drops_out(self.embedder)
        for chunk in chunks:
            packs = [self._queries(chunk[0])] if with_queries else []
            if objective.trains_candidates:
                packs.append(self._trained_candidates(chunk[1]))
            with keeping(where):
                readouts = self.embedder(*packs) if packs else []
            t = readouts.pop() if objective.trains_candidates else None
            kept.append((readouts[0] if with_queries else None, t))
            t_parts.append(self.candidate_states(chunk[1]) if t is None else t.state_ND.detach())
            q_parts += [q.state_ND.detach() for q in readouts]
        if not with_queries:
            q_parts = [self._own_states(micro_batch_size)]
        return torch.cat(q_parts), torch.cat(t_parts), kept

    def _queries(self, queries: slice) -> Packed:
        """Queries with all their branches."""
        objective = self.objective
        sampled = objective.alpha_rl > 0
        branches = [
            objective.query_branches(self.batch, self.rationales, self.embedder, row, sampled=sampled)
            for row in self._rows(queries)
        ]
        return self._pack(queries, branches)

    def _trained_candidates(self, rows: slice) -> Packed:
        return self._candidates(rows, self.objective.candidate_branch(self.embedder.emb_id))

    def _rows(self, queries: slice) -> range:
        return range(len(self.batch.queries))[queries]

    def _pack(self, queries: slice, branches: Sequence[Sequence[Branch]]) -> Packed:
        prompts, temperature = self.batch.queries[queries], self.objective.sampled_at
        if self.encoded is None:
            packed = self.embedder.pack(prompts, branches, temperature)
        else:
            packed = self.embedder.pack_branches(prompts, branches, self.parts[queries.start], temperature)
        return replace(packed, by_branch=len(self.objective.lm_targets) > 1)

    def _candidates(self, rows: slice, branch: Branch) -> Packed:
        prompts = self.batch.candidates[rows]
        return self.embedder.pack(prompts, [[branch]] * len(prompts))

    @torch.no_grad()
    def _own_states(self, micro_batch_size: int) -> Tensor:
        """The rollout's own final states; those that it did not compute with these weights are computed now."""
        embedder, batch, rationales = self.embedder, self.batch, self.rationales
        assert rationales is not None
        states = [rationale.state_D for rationale in rationales]
        missing = [number for number, state in enumerate(states) if state is None]
        # Where parameters are sharded, a forward of one rank is a forward of all: equally many on each.
        most = max(dist.gather_sizes(len(missing), embedder.device))
        num_each = len(rationales) // len(batch.queries)
        for start in range(0, most, micro_batch_size):
            numbers = missing[start : start + micro_batch_size] or [0]
            branches = [
                [Branch([*rationales[number].ids, embedder.emb_id], read_state=True)] for number in numbers
            ]
            packed = embedder.pack([batch.queries[number // num_each] for number in numbers], branches)
            for number, state in zip(numbers, embedder(packed)[0].state_ND, strict=True):
                if states[number] is None:
                    states[number] = state
        return torch.stack(states)  # type: ignore[arg-type]


class _AtOnce:
    """A step whose states are compared with their gradient, since they are all of one chunk, or not compared at all."""

    def __init__(self, forward: _Forward, share: _Share, extra: RolloutLoss | None, keep: str):
        self.forward, self.share, self.extra = forward, share, extra
        self.compared: Comparison | None = None

    def readouts(self, model: nn.Module, number: int) -> tuple[Readout, Readout]:
        """Of a chunk's queries and candidates, with gradient."""
        return self.forward(model, self.share.chunks[number])

    def compare(self, q: Readout, t: Readout) -> "Comparison | None":
        """What InfoNCE sees in this step, once; None where it sees nothing."""
        if self.forward.objective.compares:
            t_ND = t.state_ND if self.forward.objective.trains_candidates else self.forward.candidate_states()
            self.compared = Comparison(self.forward, self.share.chunks, q.state_ND, t_ND, self.extra)
        return self.compared

    def loss(self, q: Readout, t: Readout, rows: slice, candidates: slice) -> Tensor:
        """What the comparison adds to a chunk's loss."""
        if self.compared is None or self.forward.objective.alpha_con == 0:
            return q.nll.new_zeros(())
        return self.compared.found.loss * self.share.con_scale


class _GradientCache(_AtOnce):
    """dL/dstate of a step in several chunks: all states without gradient, then one backward of the comparison."""

    def __init__(self, forward: _Forward, share: _Share, extra: RolloutLoss | None, keep: str):
        super().__init__(forward, share, extra, keep)
        self.draws: list[RandomState] | None = None
        self.kept: list[_Kept] = []
        if keep != "none":
            q_ND, t_ND, self.kept = forward.keep(share.chunks, keep, share.micro_batch_size)
        elif drops_out(forward.embedder):
            q_ND, t_ND, self.draws = forward.states_with_dropout(share.chunks)
        else:
            q_ND, t_ND = forward.states(share.chunks, share.micro_batch_size)
        trains = forward.objective.alpha_con > 0
        if trains:
            q_ND, t_ND = q_ND.requires_grad_(), t_ND.requires_grad_()
        self.compared = compared = Comparison(forward, share.chunks, q_ND, t_ND, extra)
        if trains:
            (compared.found.loss * share.con_scale).backward()
        self.grad_q_ND, self.grad_t_ND = q_ND.grad, t_ND.grad

    def readouts(self, model: nn.Module, number: int) -> tuple[Readout, Readout]:
        """Dropout of a chunk's second forward draws what its first one drew; what was kept of that is not computed again."""
        if self.draws is not None:
            self.draws[number].set()
        kept = None
        if self.kept:
            kept, self.kept[number] = self.kept[number], (None, None)
        return self.forward(model, self.share.chunks[number], kept)

    def compare(self, q: Readout, t: Readout) -> "Comparison | None":
        """Of all chunks, made before the first."""
        return self.compared

    def loss(self, q: Readout, t: Readout, rows: slice, candidates: slice) -> Tensor:
        """<state, dL/dstate>, whose gradient is that of the comparison; 0 where nothing is trained by it."""
        if self.grad_q_ND is None or self.grad_t_ND is None:
            return q.nll.new_zeros(())
        return (q.state_ND * self.grad_q_ND[rows]).sum() + (t.state_ND * self.grad_t_ND[candidates]).sum()


class Comparison:
    """This rank's query states against the candidates of all ranks.

    Attributes:
        found: losses and hits, see `Objective.contrastive`.
        num_negatives: in the losses' denominators.
        num_labelled: of these, labelled ones.
        easy_B: which of this rank's queries are to be answered directly: their LM target is ``<emb>`` alone, the others'
            the oracle rationale. None without `Objective.adaptive`.
        lm_tokens: labels of all ranks then.
    """

    def __init__(
        self,
        forward: _Forward,
        chunks: Sequence[Chunk],
        q_ND: Tensor,
        t_ND: Tensor,
        extra: RolloutLoss | None = None,
    ):
        batch, objective, device = forward.batch, forward.objective, q_ND.device
        sizes = dist.gather_sizes(t_ND.shape[0], device)
        offset = sum(sizes[: dist.rank()])
        c_CD = dist.gather_rows(t_ND, sizes)
        identity_C = torch.tensor(batch.candidate_identity)
        if dist.world_size() > 1:
            identity_C = dist.gather_rows(identity_C.to(device), sizes).cpu()
        masks = positive_BC, ignored_BC, labelled_BC = candidate_masks(batch, identity_C, offset)
        negative_BC = ~(positive_BC | ignored_BC)
        self.num_negatives = int(negative_BC.sum())
        self.num_labelled = int((negative_BC & labelled_BC).sum())
        if extra is not None:
            extra.judge(q_ND.detach(), c_CD.detach(), masks, lambda branches: forward.read(chunks, branches))
        if objective.alpha_con == 0:
            q_ND, c_CD = q_ND.detach(), c_CD.detach()
        self.found = objective.contrastive(q_ND, c_CD, positive_BC, ignored_BC, forward.num_given)
        self.easy_B, self.lm_tokens = None, 0.0
        if objective.adaptive is not None:
            assert self.found.lead_B is not None
            self.easy_B = easy_queries(self.found.lead_B, objective.adaptive, forward.easy_share)
            labels = objective.num_lm_tokens(batch, self.easy_B.tolist())
            (self.lm_tokens,) = dist.sum_over_ranks([labels], device)
            self.found.figures["easy_rate"] = self.easy_B.sum(), 1


def easy_queries(lead_B: Tensor, adaptive: AdaptiveConfig, most: float) -> Tensor:
    """(B,) bool: the queries whose direct state leads by the margin, those that lead most first, within the shares."""
    count = len(lead_B)
    wanted = int((lead_B > adaptive.margin).sum())
    wanted = min(max(wanted, math.ceil(min(adaptive.floor, most) * count)), int(most * count))
    easy_B = torch.zeros_like(lead_B, dtype=torch.bool)
    easy_B[lead_B.topk(wanted).indices] = True
    return easy_B


class _Sums:
    """What a step adds up on its device until one look at it makes the report."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.nlls: list[Tensor] = []

    def add(self, total: Tensor, *nlls: Tensor) -> None:
        """A chunk's loss, and the LM losses in it."""
        self.totals.append(total.detach())
        self.nlls += [nll.detach() for nll in nlls]

    def report(
        self, batch: Batch, objective: Objective, share: _Share, compared: Comparison | None
    ) -> dict[str, float]:
        """Means over the global batch, see `TrainingStep.__call__`."""
        figures: dict[str, tuple[Tensor, int]] = {}
        counts = [0, 0]
        if compared is not None:
            figures = compared.found.figures
            counts = [compared.num_negatives, compared.num_labelled]
        # One wait for the device, and not one for each value.
        scalars = [*self.totals, *self.nlls, *(value for value, _ in figures.values())]
        values = torch.stack([scalar.double() for scalar in scalars]).tolist()
        for value in values[: len(self.totals)]:
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss is {value}; records of this batch: {batch.record_ids}")
        values = values[len(self.totals) :]
        local = [sum(values[: len(self.nlls)]), *counts, *values[len(self.nlls) :]]
        nll, negatives, labelled, *sums = dist.sum_over_ranks(local, self.totals[0].device)
        report: dict[str, float] = {"cut_prompts": share.cut_prompts}
        if share.lm_tokens:
            report["loss_lm"] = nll / share.lm_tokens
        if compared is not None:
            for (name, (_, num_each)), total in zip(figures.items(), sums, strict=True):
                report[name] = total / (share.queries * num_each)
            report["negatives_mean"] = negatives / share.queries
            report["labelled_negatives_mean"] = labelled / share.queries
        report["loss"] = objective.alpha_lm * report.get("loss_lm", 0.0) + objective.alpha_con * report.get(
            "loss_contrastive", 0.0
        )
        return report


def candidate_masks(batch: Batch, identity_C: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which candidates of the global batch are each query's positive, which must not count as its negatives, which do.

    A candidate of any rank that stands for one of the query's right answers is ignored, unless it is one of the
    query's positives in this batch or one of the query's own labelled negatives: a label is stronger than an equal
    identity.

    Args:
        batch: this rank's batch.
        identity_C: identities of all ranks' candidates.
        offset: column of this rank's first candidate.

    Returns:
        Three (B, C) bool masks, on the host, where they are made from lists: positive, ignored, labelled negative.
    """
    B, C, identity_C = len(batch.queries), identity_C.shape[0], identity_C.cpu()
    positive_BC = torch.zeros(B, C, dtype=torch.bool)
    labelled_BC = torch.zeros_like(positive_BC)
    ignored_BC = torch.zeros_like(positive_BC)
    for row in range(B):
        positive_BC[row, offset + batch.positive[row]] = True
        if batch.more_positives:
            positive_BC[row, [offset + column for column in batch.more_positives[row]]] = True
        labelled_BC[row, [offset + column for column in batch.negatives[row]]] = True
        ignored_BC[row] = torch.isin(identity_C, torch.tensor(batch.right_answers[row]))
    return positive_BC, ignored_BC & ~positive_BC & ~labelled_BC, labelled_BC
