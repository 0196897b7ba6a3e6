"""The training step: candidate masks, gradient caching in chunks, backward, over any number of processes.

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

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.loss_config import AdaptiveConfig
from rge.model.attention import EncodedPrompts
from rge.model.embedding_model import EmbeddingModel, Packed, Readout, eval_mode
from rge.model.packing import Branch
from rge.objective import Contrast, Objective
from rge.rl.credit import Credit
from rge.rollout.micro_batches import RandomState, chunks_of, has_dropout, keeping
from rge.rollout.writer import Rollout


@dataclass
class TrainingStep:
    """Accumulates the gradients of optimizer updates."""

    # The wrapped embedder (DDP, DeepSpeed or itself), called for every forward with gradient.
    model: nn.Module
    embedder: EmbeddingModel  # the same, unwrapped
    objective: Objective
    micro_batch_size: int  # queries per forward
    _: KW_ONLY
    micro_batch_tokens: int | None = (
        None  # and tokens of its prompts, see `rge.rollout.micro_batches.chunks_of`
    )
    # Where several chunks' activations wait for the backward, see `rge.rollout.micro_batches.keeping`; none recomputes them.
    keep: str = "none"
    backward: Callable[[Tensor], object] = torch.Tensor.backward  # or `Accelerator.backward`
    no_sync: Callable[[], AbstractContextManager] = nullcontext  # around all chunks but the last
    sources: Sequence[
        str
    ] = ()  # names of the batches' sources; of several, figures are reported by source too

    def __call__(
        self, batch: Batch, rollout: Rollout | None = None, credit: Credit | None = None
    ) -> dict[str, Any]:
        """Accumulate the gradients of one update on this rank's share of the batch and its rationales.

        The rationales (with ``anchor=mix`` some oracle ones) are equally many per query, query after query. Each is an anchor of
        its query, and the loss is the mean over them; `credit` is a loss on them, in the stage rl.

        Returns:
            Report, equal on all ranks: loss, loss_lm, loss_contrastive, its terms if there are several
            (``loss_info_nce``) and hit_at_1 if they exist, those of further states as ``..._direct``;
            the mean number of negatives and of labelled negatives per query; cut_prompts, the number of prompts that were
            too long and lost the end of their text. With several sources these are also given by name, as ``..._by_source``,
            with the number of queries and the mean length of rationales, for sources that have queries in this batch.

        Raises:
            FloatingPointError, on all ranks: the loss is not finite; names the records of the ranks where it is not.
            ValueError: prompts are encoded in other parts than the step's chunks.
        """
        objective = self.objective
        several = len(self.sources) > 1
        forward = _Forward(
            self.embedder,
            objective,
            batch,
            rollout,
            self.micro_batch_size,
            self.micro_batch_tokens,
            num_sources=len(self.sources) if several else 0,
        )
        share, by_source = _Share(forward), _BySource(forward, self.sources) if several else None
        comparing = _Comparing(forward, share.con_scale, credit, self.keep)
        for number, (queries, _) in enumerate(forward.chunks):
            with nullcontext() if number == len(forward.chunks) - 1 else self.no_sync():
                q, t = forward(self.model, number, comparing.firsts.pop(number, _First()))
                compared, easy_B = comparing.compare(q, t), None
                if compared is not None and compared.easy_B is not None:
                    easy_B = compared.easy_B[queries]
                    share.lm_tokens = compared.lm_tokens
                q_nll = objective.query_nll(q, easy_B)
                total = (q_nll + t.nll) * share.lm_scale + comparing.loss(q, t, number)
                if credit is not None and objective.alpha_rl > 0:
                    rl = credit.loss(q, forward.states_of(number))
                    total = total + rl * (objective.alpha_rl * dist.world_size())
                share.add(total, q_nll, t.nll)
                if by_source is not None and objective.alpha_lm > 0:
                    by_source.add(q, t, number, easy_B)
                self.backward(total)
        if self.embedder.pictures is not None:
            self.embedder.pictures.clear()
        report: dict[str, Any] = share.report(batch.record_ids, comparing.compared)
        if by_source is not None:
            report |= by_source.report(comparing.compared)
        if credit is not None:
            report |= credit.report()
            report["loss"] += objective.alpha_rl * report.get("loss_rl", 0.0)
        return report


@dataclass
class _First:
    """Kept from a chunk's first forward."""

    q: Readout | None = None  # queries, computed with gradient
    t: Readout | None = None  # candidates, likewise
    draw: RandomState | None = None  # to restore


class _Forward:
    """Forward passes of a batch under an objective: its prompts with the needed branches, packed and run chunk by chunk."""

    def __init__(
        self,
        embedder: EmbeddingModel,
        objective: Objective,
        batch: Batch,
        rollout: Rollout | None,
        micro_batch_size: int,
        micro_batch_tokens: int | None = None,
        *,
        num_sources: int = 0,
    ):
        rollout = rollout or Rollout(())
        self.num_sources, self.by_source = num_sources, num_sources > 0  # losses are needed by source
        self.embedder, self.objective, self.batch, self.rollout = embedder, objective, batch, rollout
        self.rationales = rollout.rationales or ()
        self.micro_batch_size = micro_batch_size
        self.shares = dist.gather_sizes(len(batch.queries), embedder.device)  # queries of each rank
        self.num_queries = sum(self.shares)
        # The same number on every rank.
        self.chunks = chunks_of(batch, self.shares, micro_batch_size, micro_batch_tokens, embedder.device)
        self.num_each = objective.num_states(batch, self.rationales)  # states per query that InfoNCE uses
        self._encoded: list[EncodedPrompts] = []
        if rollout.encoded is not None:
            self._encoded = rollout.encoded.parts
            sizes = [rows.stop - rows.start for rows, _ in self.chunks]
            if [len(part.part.lengths) for part in self._encoded] != sizes:
                raise ValueError(
                    f"prompts encoded once belong to one backward, but {len(self._encoded)} parts are encoded, and micro "
                    f"batches cut {len(batch.queries)} queries into {len(sizes)}: set rollout.prompt_pass=twice"
                )

    def states_of(self, number: int) -> slice:
        """The indices of a chunk's query states among this rank's."""
        queries, _ = self.chunks[number]
        return slice(queries.start * self.num_each, queries.stop * self.num_each)

    def __call__(self, model: nn.Module, number: int, first: _First) -> tuple[Readout, Readout]:
        """A chunk's queries with all their branches, and its candidates, through `model`."""
        if first.draw is not None:
            first.draw.set()
        packs: list[Packed | Readout] = [first.q or self._queries(number)]
        if self.batch.candidates and self.objective.trains_candidates:
            packs.append(first.t or self._candidates(number))
        q, *t = model(*packs)
        return q, t[0] if t else Readout(q.state_ND[:0], q.nll.new_zeros(()))

    def first_pass(self, keep: str) -> tuple[Tensor, Tensor, dict[int, _First]]:
        """This rank's query states (N, D) and candidates (N, D) for InfoNCE, and what the second pass takes over.

        If nothing is kept (`keep` as in `TrainingStep`), only branches whose state is read are computed, without gradient. With
        dropout, masks affect the states, so everything that the second pass computes is computed, from the same random numbers.
        Queries whose rollout ended in their state need no forward here.
        """
        objective, is_random = self.objective, has_dropout(self.embedder)
        as_second = is_random or keep != "none"
        with_queries = is_random or not objective.needs_rollout
        with_candidates = objective.trains_candidates or not as_second
        q_parts, t_parts, firsts = [], [], {}
        for number in range(len(self.chunks)):
            first = _First(draw=RandomState(self.embedder.device) if is_random and keep == "none" else None)
            packs = [self._queries(number, states_only=not as_second)] if with_queries else []
            packs += [self._candidates(number, states_only=not as_second)] if with_candidates else []
            with torch.no_grad() if keep == "none" else keeping(keep):
                readouts = self.embedder(*packs) if packs else []
            q_parts += [q.state_ND.detach() for q in readouts[: int(with_queries)]]
            t_ND = readouts[-1].state_ND.detach() if with_candidates else self.candidate_states(number)
            t_parts.append(t_ND)
            if keep != "none":
                first.q = readouts[0] if with_queries else None
                first.t = readouts[-1] if with_candidates else None
            firsts[number] = first
        if not with_queries:
            q_parts = [self._own_states()]
        return torch.cat(q_parts), torch.cat(t_parts), firsts

    @torch.no_grad()
    def candidate_states(self, number: int) -> Tensor:
        """States of a chunk's candidates, without gradient."""
        return self.embedder(self._candidates(number, states_only=True))[0].state_ND

    @torch.no_grad()
    def read(self, branches: Callable[[int], list[Branch]]) -> Tensor:
        """States (N, D) of other branches of the queries, without gradient and without dropout."""
        parts = []
        with eval_mode(self.embedder):
            for number, (queries, _) in enumerate(self.chunks):
                packed = self._pack(number, [branches(row) for row in range(queries.start, queries.stop)])
                parts.append(self.embedder(packed)[0].state_ND)
        return torch.cat(parts)

    def compare(self, q_ND: Tensor, t_ND: Tensor, credit: Credit | None = None) -> "Comparison":
        """This rank's query states against the candidates of all ranks."""
        batch, objective, device = self.batch, self.objective, q_ND.device
        sizes = dist.gather_sizes(t_ND.shape[0], device)
        c_CD = dist.gather_rows(t_ND, sizes)
        offset = sum(sizes[: dist.rank()])
        identity_C, group_C = gathered_identities([batch], sizes, device)
        masks = positive_BC, ignored_BC, labelled_BC = candidate_masks(batch, identity_C, offset, group_C)
        negative_BC = ~(positive_BC | ignored_BC)
        if credit is not None:
            credit.judge(q_ND.detach(), c_CD.detach(), masks, self.read)
        if objective.alpha_con == 0:
            q_ND, c_CD = q_ND.detach(), c_CD.detach()
        given = 0 if objective.states else sum(rationale.given for rationale in self.rationales)
        num_added = given // len(batch.queries)
        scores = judged_scores(batch, len(identity_C), offset) if objective.needs_scores else None
        contrast = objective.contrastive(q_ND, c_CD, positive_BC, ignored_BC, num_added, scores)
        compared = Comparison(contrast, int(negative_BC.sum()), int((negative_BC & labelled_BC).sum()))
        for source in self._compared_sources(device) if self.by_source else ():
            rows = torch.tensor(
                [row for row, one in enumerate(batch.sources) if one == source], dtype=torch.long
            )
            q_BSD = q_ND.detach().unflatten(0, (len(batch.queries), -1))
            with torch.no_grad():
                own = objective.contrastive(
                    q_BSD[rows.to(device)].flatten(0, 1),
                    c_CD.detach(),
                    positive_BC[rows],
                    ignored_BC[rows],
                    num_added,
                    None if scores is None else scores[rows],
                    self.num_each,
                )
            compared.by_source[source] = Comparison(
                own, int(negative_BC[rows].sum()), int((negative_BC & labelled_BC)[rows].sum())
            )
        if objective.adaptive is not None:
            assert contrast.lead_B is not None
            leads = dist.gather_rows(contrast.lead_B, self.shares)
            easy = easy_queries(leads, objective.adaptive, self.rollout.easy_share)
            easy_B = easy.split(self.shares)[dist.rank()]
            labels = objective.num_lm_tokens(batch, easy_B.tolist())
            (compared.lm_tokens,) = dist.sum_over_ranks([labels], device)
            contrast.figures["easy_rate"] = easy_B.sum(), 1
            compared.easy_B = easy_B
        return compared

    def _compared_sources(self, device: torch.device) -> list[int]:
        """The sources of this rank's queries, or of all ranks' if every rank has to compare the same ones."""
        own = set(self.batch.sources)
        if not self.objective.gathers:
            return sorted(own)
        counts = dist.sum_over_ranks([float(source in own) for source in range(self.num_sources)], device)
        return [source for source, count in enumerate(counts) if count]

    def _queries(self, number: int, *, states_only: bool = False) -> Packed:
        """A chunk's queries with all their branches; with `states_only`, those whose state is read."""
        objective, rationales = self.objective, self.rationales
        sampled, queries = objective.alpha_rl > 0, self.chunks[number][0]
        rows = [
            objective.query_branches(self.batch, rationales, self.embedder, row, sampled=sampled)
            for row in range(queries.start, queries.stop)
        ]
        if states_only:
            rows = [[branch for branch in branches if branch.read_state] for branches in rows]
            return self._pack(number, rows)
        return replace(
            self._pack(number, rows), by_branch=len(objective.lm_targets) > (0 if self.by_source else 1)
        )

    def _pack(self, number: int, branches: Sequence[Sequence[Branch]]) -> Packed:
        prompts, temperature = self.batch.queries[self.chunks[number][0]], self.objective.sampled_at
        encoded = self._encoded[number] if self._encoded else None
        return self.embedder.pack(prompts, branches, temperature, encoded)

    def _candidates(self, number: int, *, states_only: bool = False) -> Packed:
        emb_id, prompts = self.embedder.emb_id, self.batch.candidates[self.chunks[number][1]]
        branch = Branch([emb_id], read_state=True) if states_only else self.objective.candidate_branch(emb_id)
        by_branch = self.by_source and branch.predict
        return replace(self.embedder.pack(prompts, [[branch]] * len(prompts)), by_branch=by_branch)

    @torch.no_grad()
    def _own_states(self) -> Tensor:
        """The rollout's final states; those missing for the current weights are computed now."""
        embedder, batch, rationales = self.embedder, self.batch, self.rationales
        states, num_each = [rationale.state_D for rationale in rationales], self.num_each
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


@dataclass
class Comparison:
    """Result of comparing this rank's query states with the candidates of all ranks."""

    contrast: Contrast  # losses and hits
    num_negatives: int  # in the losses' denominators
    num_labelled: int  # labelled negatives among them
    # This rank's queries to be answered directly: their LM target is ``<emb>`` alone. None without `Objective.adaptive`.
    easy_B: Tensor | None = None
    lm_tokens: float = 0.0  # labels of all ranks with these targets
    by_source: dict[int, "Comparison"] = field(
        default_factory=dict
    )  # of the queries of each, if there are several


class _Comparing:
    """A step's comparison: with gradient if the step is one chunk, by gradient caching if there are several.

    `firsts` has what the first pass kept for each chunk's second.
    """

    def __init__(self, forward: _Forward, scale: float, credit: Credit | None, keep: str):
        self.forward, self.scale, self.credit = forward, scale, credit
        self.objective = forward.objective
        self.compared: Comparison | None = None
        self.firsts: dict[int, _First] = {}
        self.grads: tuple[Tensor | None, Tensor | None] | None = None
        if self.objective.compares and len(forward.chunks) > 1:
            q_ND, t_ND, self.firsts = forward.first_pass(keep)
            trains = self.objective.alpha_con > 0
            q_ND, t_ND = q_ND.requires_grad_(trains), t_ND.requires_grad_(trains)
            self.compared = forward.compare(q_ND, t_ND, credit)
            if trains:
                (self.compared.contrast.loss * scale).backward()
            self.grads = q_ND.grad, t_ND.grad

    def compare(self, q: Readout, t: Readout) -> Comparison | None:
        """The comparison of this step, if any; of several chunks, that before the first backward."""
        if self.compared is None and self.objective.compares:
            t_ND = t.state_ND if self.objective.trains_candidates else self.forward.candidate_states(0)
            self.compared = self.forward.compare(q.state_ND, t_ND, self.credit)
        return self.compared

    def loss(self, q: Readout, t: Readout, number: int) -> Tensor:
        """The comparison's share of a chunk's loss; of several, <state, dL/dstate>, whose gradient is the same."""
        if self.compared is None or self.objective.alpha_con == 0:
            return q.nll.new_zeros(())
        if self.grads is None:
            return self.compared.contrast.loss * self.scale
        grad_q_ND, grad_t_ND = self.grads
        assert grad_q_ND is not None
        assert grad_t_ND is not None
        rows, (_, candidates) = self.forward.states_of(number), self.forward.chunks[number]
        return (q.state_ND * grad_q_ND[rows]).sum() + (t.state_ND * grad_t_ND[candidates]).sum()


class _Share:
    """This rank's share of a step: the factors that make sums over it means over the global batch, and the sums.

    DDP averages gradients over ranks, the losses are means over all ranks' rows: sums / global count * world size.
    """

    def __init__(self, forward: _Forward):
        batch, self.objective = forward.batch, forward.objective
        self.num_queries, self.num_each = forward.num_queries, forward.num_each
        num_cut = sum(prompt.num_cut_tokens > 0 for prompt in (*batch.queries, *batch.candidates))
        # Of all ranks; easy queries, whose LM target is another one, change the number of labels.
        counts = [self.objective.num_lm_tokens(batch), num_cut]
        self.lm_tokens, self.cut_prompts = dist.sum_over_ranks(counts, forward.embedder.device)
        # Losses of the chunks, and the LM losses in them, on the device until the report reads all of them.
        self.totals: list[Tensor] = []
        self.nlls: list[Tensor] = []

    @property
    def lm_scale(self) -> float:
        """Factor of summed LM losses."""
        return self.objective.alpha_lm * dist.world_size() / max(self.lm_tokens, 1)

    @property
    def con_scale(self) -> float:
        """Factor of summed contrastive losses."""
        return self.objective.alpha_con * dist.world_size() / (self.num_queries * self.num_each)

    def add(self, total: Tensor, *nlls: Tensor) -> None:
        """A chunk's loss, and the LM losses in it."""
        self.totals.append(total.detach())
        self.nlls += [nll.detach() for nll in nlls]

    def report(self, record_ids: Sequence[str], compared: Comparison | None) -> dict[str, float]:
        """Means over the global batch, see `TrainingStep.__call__`."""
        figures = {} if compared is None else compared.contrast.figures
        counts = [0, 0] if compared is None else [compared.num_negatives, compared.num_labelled]
        # Wait for the device once instead of for each value.
        scalars = [*self.totals, *self.nlls, *(value for value, _ in figures.values())]
        values = torch.stack([scalar.double() for scalar in scalars]).tolist()
        wrong = [value for value in values[: len(self.totals)] if not math.isfinite(value)]
        values = values[len(self.totals) :]
        local = [len(wrong), sum(values[: len(self.nlls)]), *counts, *values[len(self.nlls) :]]
        num_wrong, nll, negatives, labelled, *sums = dist.sum_over_ranks(local, self.totals[0].device)
        if num_wrong:
            found = [pair for pair in dist.gather_objects((wrong, record_ids)) if pair[0]]
            ids = [one for _, of_rank in found for one in of_rank]
            raise FloatingPointError(f"the loss is {found[0][0][0]}; records of this batch: {ids}")
        report = {"cut_prompts": self.cut_prompts}
        if self.lm_tokens:
            report["loss_lm"] = nll / self.lm_tokens
        if compared is not None:
            for (name, (_, num_each)), total in zip(figures.items(), sums, strict=True):
                report[name] = total / (self.num_queries * num_each)
            report["negatives_mean"] = negatives / self.num_queries
            report["labelled_negatives_mean"] = labelled / self.num_queries
        lm, contrastive = report.get("loss_lm", 0.0), report.get("loss_contrastive", 0.0)
        report["loss"] = self.objective.alpha_lm * lm + self.objective.alpha_con * contrastive
        return report


class _BySource:
    """Figures of a step by source."""

    def __init__(self, forward: _Forward, names: Sequence[str]):
        self.forward, self.names, self.batch = forward, names, forward.batch
        self.objective = forward.objective
        owner = {column: row for row, column in enumerate(self.batch.positive)}
        for columns in (self.batch.negatives, self.batch.more_positives):
            owner |= {column: row for row, own in enumerate(columns) for column in own}
        # The source of each candidate.
        self.of_candidates = [
            self.batch.sources[owner[column]] for column in range(len(self.batch.candidates))
        ]
        self.nll: Tensor = torch.zeros(len(names), dtype=torch.float64, device=forward.embedder.device)
        self.easy: list[bool] = []

    def add(self, q: Readout, t: Readout, number: int, easy_B: Tensor | None) -> None:
        """The LM losses of a chunk."""
        queries, candidates = self.forward.chunks[number]
        parts = [(self.batch.sources[queries], self.objective.query_nll_of_each(q, easy_B))]
        if t.nll_P is not None and len(t.nll_P):
            parts.append((self.of_candidates[candidates], t.nll_P))
        for sources, nll in parts:
            at = torch.tensor(sources, device=nll.device)
            self.nll.index_add_(0, at, nll.detach().to(self.nll.dtype))
        self.easy += [] if easy_B is None else easy_B.tolist()

    def report(self, compared: Comparison | None) -> dict[str, dict[str, float]]:
        """Means over the global batch by name of the figure and of the source; all ranks call it."""
        batch, objective = self.batch, self.objective
        figures = (
            [] if compared is None else [name for name in compared.contrast.figures if name != "easy_rate"]
        )
        rationales = self.forward.rationales
        each = len(rationales) // len(batch.queries)
        tokens = objective.num_lm_tokens_of_queries(batch, self.easy) if objective.alpha_lm > 0 else []
        nlls, rows = self.nll.tolist(), []
        for source in range(len(self.names)):
            own = [row for row, one in enumerate(batch.sources) if one == source]
            columns = [column for column, one in enumerate(self.of_candidates) if one == source]
            prompts = [
                *(batch.queries[row] for row in own),
                *(batch.candidates[column] for column in columns),
            ]
            written = [rationales[row * each + place] for row in own for place in range(each)]
            reasoned = [one for one in written if not one.direct and not one.given]
            num_labels = sum(tokens[row] for row in own) if tokens else 0
            num_labels += len(columns) * (objective.alpha_lm > 0 and objective.lm_on_candidates)
            part = compared.by_source.get(source) if compared is not None else None
            rows.append([
                len(own), sum(prompt.num_cut_tokens > 0 for prompt in prompts), nlls[source], num_labels,
                len(reasoned), sum(len(one.ids) for one in reasoned),
                *((0, 0) if part is None else (part.num_negatives, part.num_labelled)),
                *(0.0 if part is None else float(part.contrast.figures[name][0]) for name in figures),
            ])  # fmt: skip
        flat = dist.sum_over_ranks([value for row in rows for value in row], self.forward.embedder.device)
        found: dict[str, dict[str, float]] = {}
        for place, name in enumerate(self.names):
            size = len(rows[0])
            values = flat[place * size : (place + 1) * size]
            count, cut, nll, num_labels, num_written, length, negatives, labelled, *sums = values
            if not count:
                continue
            means = {"queries": count, "cut_prompts": cut}
            if num_labels:
                means["loss_lm"] = nll / num_labels
            if num_written:
                means["rationale_tokens_mean"] = length / num_written
            if compared is not None:
                for figure, total in zip(figures, sums, strict=True):
                    means[figure] = total / (count * compared.contrast.figures[figure][1])
                means |= {"negatives_mean": negatives / count, "labelled_negatives_mean": labelled / count}
            lm, contrastive = means.get("loss_lm", 0.0), means.get("loss_contrastive", 0.0)
            means["loss"] = objective.alpha_lm * lm + objective.alpha_con * contrastive
            for figure, value in means.items():
                found.setdefault(f"{figure}_by_source", {})[name] = value
        return found


def easy_queries(leads: Tensor, adaptive: AdaptiveConfig, most: float) -> Tensor:
    """Bool: which of all ranks' queries have a direct state that leads by the margin, largest leads first, within the shares."""
    count = len(leads)
    wanted = int((leads > adaptive.margin).sum())
    wanted = min(max(wanted, math.ceil(min(adaptive.floor, most) * count)), int(most * count))
    easy = torch.zeros_like(leads, dtype=torch.bool)
    easy[leads.topk(wanted).indices] = True
    return easy


def gathered_identities(
    batches: Sequence[Batch], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Identities (C,) and groups (C,) of all ranks' candidates, on the host; no groups if all candidates are compared.

    `batches` are this rank's, and `sizes` the ranks' numbers of candidates.
    """
    identities = [one for batch in batches for one in batch.candidate_identity]
    groups = [one for batch in batches for one in batch.candidate_groups]
    columns = torch.tensor([identities, groups] if groups else [identities])
    if dist.world_size() > 1:
        columns = dist.gather_rows(columns.T.contiguous().to(device), sizes).cpu().T
    identity_C, *group_C = columns
    return identity_C, group_C[0] if group_C else None


def candidate_masks(
    batch: Batch, identity_C: Tensor, offset: int, group_C: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, C) bool masks on the host: positive, ignored and labelled negative candidates of each query in the global batch.

    A candidate of any rank that equals one of the query's right answers is ignored, unless it is one of the query's positives
    in this batch or one of its own labelled negatives: a label overrides an equal identity. So is a candidate of another group,
    see `rge.data.collate.Source`. Identities and groups are those of `gathered_identities`, this rank's from column `offset` on.
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
    if group_C is not None:
        ignored_BC |= torch.tensor(batch.groups)[:, None] != group_C[None]
    return positive_BC, ignored_BC & ~positive_BC & ~labelled_BC, labelled_BC


def judged_scores(batch: Batch, num_candidates: int, offset: int) -> Tensor:
    """(B, C) float32 on the host: a judge's scores of each query's own targets, NaN for all other candidates; `offset` as above."""
    score_BC = torch.full((len(batch.queries), num_candidates), float("nan"))
    for row, column in enumerate(batch.positive if batch.scores else ()):
        others = batch.more_positives[row] if batch.more_positives else []
        for own in (column, *others, *batch.negatives[row]):
            if (score := batch.scores[own]) is not None:
                score_BC[row, offset + own] = score
    return score_BC
