"""The training step: its losses, one prompt, any number of chunks, any number of processes.

A step's contrastive batch is global: every query is compared with every candidate of every rank. If it does not fit
into memory as a whole, gradients are computed exactly by gradient caching: first all states without gradient, then
dL/dstate of the InfoNCE over all ranks, then one forward a chunk with the surrogate <state, dL/dstate>. Here the
query side's first pass is free, since the rollout already ends in the state at ``<emb>``.

If it does fit, the prompts are encoded once in all: `encode_prompts` runs them with gradient, the rollout goes on from
their keys and values without, and the branches go on from the same ones with gradient. Otherwise a prompt is encoded
once for the rollout and once in its chunk.

The stage rl takes the same step with more branches a query and one loss more: states, known before the first backward in
either case, are compared for rewards as they are for InfoNCE, and the log probabilities that the policy gradient needs are
read off the branches that InfoNCE reads its states from. `rge.rl.credit` says what each rationale is worth.

Shape suffixes: B = queries of this rank, N = candidates of this rank, C = candidates of all ranks, D = hidden size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rge.config import Recipe
from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.losses import contrastive_losses, hit_at_1
from rge.model.attention import EncodedPrompts
from rge.model.dropout import RandomState, drops_out
from rge.model.embedding_model import EmbeddingModel, Readout
from rge.model.packing import Branch
from rge.rl.credit import Credit
from rge.rl.rewards import find_reward
from rge.rollout.generate import Rationale


@dataclass(frozen=True)
class Objective:
    """What a stage minimises: alpha_lm * L_lm + alpha_con * L_con (paper eq. 10), and alpha_rl * L_rl in the stage rl.

    Attributes:
        alpha_lm: weight of the LM loss; 1 in the cold start.
        alpha_con: weight of the contrastive loss; 0 in the cold start.
        temperature: of InfoNCE.
        anchor: ``self``, ``oracle``, ``none`` or ``mix``: which query state InfoNCE sees. With ``mix`` some of the
            rationales given to a step are the oracle's (`rge.rollout.writer`); the step is that of ``self``.
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

    @classmethod
    def of(cls, recipe: Recipe, stage: str) -> "Objective":
        """What a stage of a checked recipe minimises; the cold start knows the LM loss only.

        Raises:
            UserError: `rl.rewards` names something that there is not.
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

    def contrastive(
        self, q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor
    ) -> dict[str, Tensor]:
        """The contrastive losses, see `contrastive_losses`; the same in training and in validation."""
        return contrastive_losses(
            q_BD,
            c_CD,
            positive_BC,
            ignored_BC,
            terms=self.terms,
            temperature=self.temperature,
            sizes=self.matryoshka_dims,
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


Backward = Callable[[Tensor], None]
NoSync = Callable[[], AbstractContextManager]


def training_step(
    model: nn.Module,
    embedder: EmbeddingModel,
    batch: Batch,
    objective: Objective,
    *,
    rationales: Sequence[Rationale] | None,
    micro_batch_size: int,
    backward: Backward,
    no_sync: NoSync = nullcontext,
    encoded: EncodedPrompts | None = None,
    credit: Credit | None = None,
) -> dict[str, float]:
    """Accumulate the gradients of one step.

    Args:
        model: the wrapped embedder (DDP, DeepSpeed or itself), called for every forward with gradient.
        embedder: the same, unwrapped.
        batch: this rank's share of the step.
        objective: losses and weights.
        rationales: this rank's own rationales, and with ``anchor=mix`` some oracle ones: equally many a query, query after query. Each is an
            anchor of its query, and the loss is the mean over them.
        micro_batch_size: queries per forward.
        backward: `Accelerator.backward` or `Tensor.backward`.
        no_sync: context in which gradients of other ranks are not waited for, used for all chunks but the last.
        encoded: of `encode_prompts`, where the step is one chunk.
        credit: of these rationales, in the stage rl.

    Returns:
        Report, equal on all ranks: loss, loss_lm, loss_contrastive, its terms where there are several (``loss_info_nce``) and
        hit_at_1 where they exist; with them how many negatives a query had in the loss's denominator, on average, and how
        many of those are labelled ones; cut_prompts, how many prompts were too long and lost the end of their text.

    Raises:
        FloatingPointError: the loss is not finite; names the records of this rank.
        ValueError: encoded prompts for a step of several chunks.
    """
    num_lm_tokens = _num_lm_tokens(batch, objective)
    device = embedder.device
    shares = dist.gather_sizes(len(batch.queries), device)
    chunks = _chunks(batch, shares, micro_batch_size)
    total_queries = sum(shares)
    cut = sum(prompt.num_cut_tokens > 0 for prompt in (*batch.queries, *batch.candidates))
    total_lm_tokens, num_cut = dist.sum_over_ranks([num_lm_tokens, cut], device)
    # DDP averages over ranks, the losses are means over the global batch: sums / global count * world size.
    lm_scale = objective.alpha_lm * dist.world_size() / max(total_lm_tokens, 1)
    num_each = _num_each(batch, objective, rationales)
    con_scale = objective.alpha_con * dist.world_size() / (total_queries * num_each)
    if encoded is not None and len(chunks) > 1:
        raise ValueError(
            f"prompts encoded once belong to one backward, but micro batches of {micro_batch_size} cut "
            f"{len(batch.queries)} queries into {len(chunks)}: set rollout.prompt_pass=twice"
        )
    nlls: list[Tensor] = []
    totals: list[Tensor] = []
    losses: dict[str, Tensor] = {}
    counts = [0, 0]
    draws = None
    if objective.compares and len(chunks) > 1:
        if drops_out(embedder):
            q_BD, t_ND, draws = _states_with_dropout(embedder, batch, objective, rationales, chunks)
        else:
            q_BD, t_ND = _states_without_gradient(
                embedder, batch, objective, rationales, chunks, micro_batch_size
            )
        if objective.alpha_con > 0:
            q_BD, t_ND = q_BD.requires_grad_(), t_ND.requires_grad_()
        losses, hits, counts = _compare(embedder, q_BD, t_ND, batch, objective, chunks, credit)
        if objective.alpha_con > 0:
            (losses["contrastive_loss"] * con_scale).backward()
        grad_q_BD, grad_t_ND = q_BD.grad, t_ND.grad
    for number, (queries, candidates) in enumerate(chunks):
        last = number == len(chunks) - 1
        with nullcontext() if last else no_sync():
            if draws is not None:
                draws[number].set()
            q, t = _forward(model, embedder, batch, objective, rationales, queries, candidates, encoded)
            total = (q.nll + t.nll) * lm_scale
            nlls += [q.nll.detach(), t.nll.detach()]
            rows = _rows_of(queries, num_each)
            if objective.compares and len(chunks) == 1:
                t_ND = t.state_ND if objective.trains_candidates else _candidate_states(embedder, batch)
                losses, hits, counts = _compare(
                    embedder, q.state_ND, t_ND, batch, objective, chunks, credit, encoded
                )
            if objective.alpha_con > 0:
                if len(chunks) == 1:
                    total = total + losses["contrastive_loss"] * con_scale
                else:
                    assert grad_q_BD is not None
                    assert grad_t_ND is not None
                    total = (
                        total
                        + (q.state_ND * grad_q_BD[rows]).sum()
                        + (t.state_ND * grad_t_ND[candidates]).sum()
                    )
            if credit is not None and objective.alpha_rl > 0:
                total = total + credit.loss(q, rows) * (objective.alpha_rl * dist.world_size())
            totals.append(total.detach())
            backward(total)
    if embedder.pictures is not None:
        embedder.pictures.clear()
    contrastive = {}
    if len(objective.terms) > 1:
        contrastive = {f"loss_{name}": losses[name].detach() for name in objective.terms if losses}
    if losses:
        contrastive |= {"loss_contrastive": losses["contrastive_loss"].detach(), "hit_at_1": hits}
    values = _on_host([*totals, *nlls, *contrastive.values()])
    for value in values[: len(totals)]:
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value}; records of this batch: {batch.record_ids}")
    nll = sum(values[len(totals) :][: len(nlls)])
    sums = [nll, *counts, *values[len(totals) + len(nlls) :]]
    nll, negatives, labelled, *sums = dist.sum_over_ranks(sums, device)
    report: dict[str, float] = {"cut_prompts": num_cut}
    if total_lm_tokens:
        report["loss_lm"] = nll / total_lm_tokens
    if objective.compares:
        report |= {
            name: total / (total_queries * num_each) for name, total in zip(contrastive, sums, strict=True)
        }
        if credit is not None:
            report["hit_at_1"] *= num_each / (num_each - credit.num_added)
        report["negatives_mean"] = negatives / total_queries
        report["labelled_negatives_mean"] = labelled / total_queries
    report["loss"] = objective.alpha_lm * report.get("loss_lm", 0.0) + objective.alpha_con * report.get(
        "loss_contrastive", 0.0
    )
    if credit is not None:
        report |= credit.report()
        report["loss"] += objective.alpha_rl * report.get("loss_rl", 0.0)
    return report


def _on_host(scalars: Sequence[Tensor]) -> list[float]:
    """Values of a step, by one wait for the device and not one each."""
    return torch.stack([scalar.double() for scalar in scalars]).tolist()


def query_branches(
    batch: Batch,
    objective: Objective,
    rationales: Sequence[Rationale] | None,
    emb_id: int,
    row: int,
    *,
    sampled: bool = False,
) -> list[Branch]:
    """The continuations of one query's prompt: self, oracle or direct, as the objective needs them.

    Args:
        batch: of this rank.
        objective: says what is needed.
        rationales: own ones, equally many a query.
        emb_id: id of ``<emb>``.
        row: of the query.
        sampled: whether log probabilities of the own ones are read.
    """
    branches = []
    if objective.needs_rollout:
        num_each = _num_each(batch, objective, rationales)
        own = rationales[row * num_each : (row + 1) * num_each]  # type: ignore[index]
        branches += [Branch([*one.ids, emb_id], read_state=True, sampled=sampled) for one in own]
    if objective.alpha_con > 0 and objective.anchor == "none":
        branches.append(Branch([emb_id], read_state=True))
    if objective.needs_oracle:
        read = objective.alpha_con > 0 and objective.anchor == "oracle"
        branches.append(Branch(batch.oracle_ids[row], read_state=read, predict=objective.alpha_lm > 0))
    return branches


def _forward(
    model: nn.Module,
    embedder: EmbeddingModel,
    batch: Batch,
    objective: Objective,
    rationales: Sequence[Rationale] | None,
    queries: slice,
    candidates: slice,
    encoded: EncodedPrompts | None = None,
) -> tuple[Readout, Readout]:
    emb_id = embedder.emb_id
    rows = range(len(batch.queries))[queries]
    sampled = objective.alpha_rl > 0
    branches = [query_branches(batch, objective, rationales, emb_id, row, sampled=sampled) for row in rows]
    prompts = batch.queries[queries]
    if encoded is None:
        packs = [embedder.pack(prompts, branches, objective.sampled_at)]
    else:
        packs = [embedder.pack_branches(prompts, branches, encoded, objective.sampled_at)]
    if batch.candidates and objective.trains_candidates:
        label = objective.lm_on_candidates and objective.alpha_lm > 0
        branch = Branch([emb_id], read_state=objective.compares, predict=label)
        prompts = batch.candidates[candidates]
        packs.append(embedder.pack(prompts, [[branch]] * len(prompts)))
    readouts = model(*packs)
    if len(readouts) == 1:
        q = readouts[0]
        return q, Readout(q.state_ND[:0], q.nll.new_zeros(()), 0)
    return readouts[0], readouts[1]


@torch.no_grad()
def _states_without_gradient(
    embedder: EmbeddingModel,
    batch: Batch,
    objective: Objective,
    rationales: Sequence[Rationale] | None,
    chunks: Sequence[tuple[slice, slice]],
    micro_batch_size: int,
) -> tuple[Tensor, Tensor]:
    direct = Branch([embedder.emb_id], read_state=True)
    q_parts, t_parts = [], []
    for queries, candidates in chunks:
        packs = []
        if not objective.needs_rollout:
            rows = range(len(batch.queries))[queries]
            ids = [[embedder.emb_id] if objective.anchor == "none" else batch.oracle_ids[row] for row in rows]
            packs.append(
                embedder.pack(batch.queries[queries], [[Branch(row, read_state=True)] for row in ids])
            )
        prompts = batch.candidates[candidates]
        packs.append(embedder.pack(prompts, [[direct]] * len(prompts)))
        *q, t = embedder(*packs)
        q_parts += [readout.state_ND for readout in q]
        t_parts.append(t.state_ND)
    if objective.needs_rollout:
        q_parts = [_own_states(embedder, batch, rationales, micro_batch_size)]  # type: ignore[arg-type]
    return torch.cat(q_parts), torch.cat(t_parts)


def _own_states(
    embedder: EmbeddingModel, batch: Batch, rationales: Sequence[Rationale], micro_batch_size: int
) -> Tensor:
    """The rollout's own final states; those that it did not compute with these weights are computed now."""
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


def _num_each(batch: Batch, objective: Objective, rationales: Sequence[Rationale] | None) -> int:
    """Query states a query that InfoNCE sees."""
    return len(rationales) // len(batch.queries) if objective.needs_rollout else 1  # type: ignore[arg-type]


def _rows_of(queries: slice, num_each: int) -> slice:
    return slice(queries.start * num_each, queries.stop * num_each)


@torch.no_grad()
def _states_with_dropout(
    embedder: EmbeddingModel,
    batch: Batch,
    objective: Objective,
    rationales: Sequence[Rationale] | None,
    chunks: Sequence[tuple[slice, slice]],
) -> tuple[Tensor, Tensor, list[RandomState]]:
    """States of every chunk as its forward with gradient will compute them, and the random state that each needs.

    Dropout's masks decide the states that the loss sees, so the second forward has to draw the first one's.
    """
    q_parts, t_parts, draws = [], [], []
    for queries, candidates in chunks:
        draws.append(RandomState(embedder.device))
        q, t = _forward(embedder, embedder, batch, objective, rationales, queries, candidates)
        q_parts.append(q.state_ND)
        t_parts.append(
            t.state_ND if objective.trains_candidates else _candidate_states(embedder, batch, candidates)
        )
    return torch.cat(q_parts), torch.cat(t_parts), draws


@torch.no_grad()
def _candidate_states(embedder: EmbeddingModel, batch: Batch, rows: slice = slice(None)) -> Tensor:
    direct, prompts = Branch([embedder.emb_id], read_state=True), batch.candidates[rows]
    return embedder(embedder.pack(prompts, [[direct]] * len(prompts)))[0].state_ND


def _compare(
    embedder: EmbeddingModel,
    q_BD: Tensor,
    t_ND: Tensor,
    batch: Batch,
    objective: Objective,
    chunks: Sequence[tuple[slice, slice]],
    credit: Credit | None,
    encoded: EncodedPrompts | None = None,
) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """What comes of this rank's query states and the candidates of all ranks: losses, and rewards where there are any.

    Returns:
        Summed losses of this rank's queries, its number of hits at rank 1, and those of negatives and labelled ones.
    """
    device = q_BD.device
    sizes = dist.gather_sizes(t_ND.shape[0], device)
    offset = sum(sizes[: dist.rank()])
    c_CD = dist.gather_rows(t_ND, sizes)
    identity_C = torch.tensor(batch.candidate_identity)
    if dist.world_size() > 1:
        identity_C = dist.gather_rows(identity_C.to(device), sizes).cpu()
    positive_BC, ignored_BC = candidate_masks(batch, identity_C, offset)
    negative_BC = ~(positive_BC | ignored_BC)
    labelled = sum(
        int(negative_BC[row, [offset + column for column in columns]].sum())
        for row, columns in enumerate(batch.negatives)
    )
    if credit is not None:
        labelled_BC = torch.zeros_like(positive_BC)
        for row, columns in enumerate(batch.negatives):
            labelled_BC[row, [offset + column for column in columns]] = True
        credit.judge(q_BD.detach(), c_CD.detach(), positive_BC | ignored_BC, labelled_BC)
        if credit.measure:
            controls = _control_states(embedder, batch, credit.rationales, chunks, encoded)
            credit.compare(*controls, c_CD.detach(), (positive_BC, ignored_BC))
            credit.measure = False
    # Several own rationales are several anchors of one query.
    num_each = q_BD.shape[0] // positive_BC.shape[0]
    positive_BC, ignored_BC = (mask.repeat_interleave(num_each, dim=0) for mask in (positive_BC, ignored_BC))
    if objective.alpha_con == 0:
        q_BD, c_CD = q_BD.detach(), c_CD.detach()
    losses = objective.contrastive(q_BD, c_CD, positive_BC, ignored_BC)
    seen, masks = q_BD.detach(), (positive_BC, ignored_BC)
    if credit is not None and credit.num_added:
        written = credit.written_N
        seen, masks = seen[written], (positive_BC[written.cpu()], ignored_BC[written.cpu()])
    hits = hit_at_1(seen, c_CD.detach(), *masks)
    return losses, hits, [int(negative_BC.sum()), labelled]


@torch.no_grad()
def _control_states(
    embedder: EmbeddingModel,
    batch: Batch,
    rationales: Sequence[Rationale],
    chunks: Sequence[tuple[slice, slice]],
    encoded: EncodedPrompts | None,
) -> tuple[Tensor, Tensor]:
    """States (B, D) of this rank's queries without a rationale, and after the first one of the query before."""
    num_each, emb_id, parts = len(rationales) // len(batch.queries), embedder.emb_id, []
    was_training = embedder.training
    embedder.eval()  # no dropout: nothing of training is to change by being looked at
    try:
        for queries, _ in chunks:
            branches = [
                [
                    Branch([emb_id], read_state=True),
                    Branch([*rationales[(row - 1) * num_each].ids, emb_id], read_state=True),
                ]
                for row in range(len(batch.queries))[queries]
            ]
            prompts = batch.queries[queries]
            if encoded is None:
                packed = embedder.pack(prompts, branches)
            else:
                packed = embedder.pack_branches(prompts, branches, encoded)
            parts.append(embedder(packed)[0].state_ND)
    finally:
        embedder.train(was_training)
    states = torch.cat(parts)
    return states[0::2], states[1::2]


def candidate_masks(batch: Batch, identity_C: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Which candidates of the global batch are each query's positive, and which must not count as its negatives.

    A candidate of any rank that stands for one of the query's right answers is ignored, unless it is one of the
    query's positives in this batch or one of the query's own labelled negatives: a label is stronger than an equal identity.

    Args:
        batch: this rank's batch.
        identity_C: identities of all ranks' candidates.
        offset: column of this rank's first candidate.

    Returns:
        Two (B, C) bool masks, on the host, where they are made from lists: positive, ignored.
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
    return positive_BC, ignored_BC & ~positive_BC & ~labelled_BC


def _num_lm_tokens(batch: Batch, objective: Objective) -> int:
    if objective.alpha_lm == 0:
        return 0
    return sum(map(len, batch.oracle_ids)) + (len(batch.candidates) if objective.lm_on_candidates else 0)


def _chunks(batch: Batch, shares: Sequence[int], micro_batch_size: int) -> list[tuple[slice, slice]]:
    """Cut queries and candidates, of which there may be more, into equally many parts of nearly equal size.

    Every rank gets as many parts as the others: ZeRO and FSDP2 exchange something in each forward. Where a rank has
    fewer queries than another needs parts (micro batches of one, uneven shares), the other's hold one more.

    Args:
        batch: this rank's share of the step.
        shares: number of queries of every rank.
        micro_batch_size: queries per forward.
    """
    count = min(max(-(-share // micro_batch_size) for share in shares), min(shares))

    def part(rows: int, number: int) -> slice:
        return slice(number * rows // count, (number + 1) * rows // count)

    return [
        (part(len(batch.queries), number), part(len(batch.candidates), number)) for number in range(count)
    ]
