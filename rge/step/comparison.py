"""A step's queries against the candidates of all ranks: which of them are right, the losses, and what these say of each query.

Shape suffixes: B = queries of this rank, N = query states or candidates of this rank, C = candidates of all ranks,
D = hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.loss_config import AdaptiveConfig
from rge.losses import Labels
from rge.objective import Contrast, Objective, Summed


class Candidates(NamedTuple):
    """The candidates of all ranks."""

    state_CD: Tensor  # with gradient
    # On the host; see `rge.data.collate.Batch`.
    identity_C: Tensor
    group_C: Tensor | None  # None: every query is compared with all of them
    first: int  # column of this rank's first

    @classmethod
    def gather(cls, batches: Sequence[Batch], t_ND: Tensor) -> "Candidates":
        """From this rank's batches and their states; all ranks call it."""
        device = t_ND.device
        sizes = dist.gather_sizes(t_ND.shape[0], device)
        state_CD = dist.gather_rows(t_ND, sizes)
        identities = [one for batch in batches for one in batch.candidate_identity]
        groups = [one for batch in batches for one in batch.candidate_groups]
        columns = torch.tensor([identities, groups] if groups else [identities])
        if dist.world_size() > 1:
            columns = dist.gather_rows(columns.T.contiguous().to(device), sizes).cpu().T
        identity_C, *group_C = columns
        return cls(state_CD, identity_C, group_C[0] if group_C else None, sum(sizes[: dist.rank()]))

    def labels(self, batches: Sequence[Batch], *, scored: bool) -> Labels:
        """What the queries of these batches say of them, whose own candidates begin with `first`; `scored`: with a judge's scores."""
        parts, offset = [], self.first
        for batch in batches:
            masks = candidate_masks(batch, self.identity_C, offset, self.group_C)
            scores = judged_scores(batch, len(self.identity_C), offset) if scored else None
            parts.append((*masks, scores))
            offset += len(batch.candidates)
        joined = [None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)]
        return Labels(*joined)  # type: ignore[arg-type]


@dataclass
class Comparison:
    """Result of comparing this rank's query states with the candidates of all ranks."""

    contrast: Contrast
    # This rank's queries to be answered directly: their LM target is ``<emb>`` alone. None without `Objective.adaptive`.
    easy_B: Tensor | None = None
    lm_tokens: float = 0.0  # labels of all ranks with these targets
    by_source: dict[int, Contrast] = field(default_factory=dict)  # of the queries of each


@torch.no_grad()
def compare_by_source(
    objective: Objective,
    batch: Batch,
    q_ND: Tensor,
    c_CD: Tensor,
    labels: Labels,
    *,
    num_added: int,
    num_sources: int,
) -> dict[int, Contrast]:
    """The contrastive losses of the queries of each source alone, for the log; arguments as in `Objective.contrastive`."""
    present = set(batch.sources)
    if objective.gathers:  # then every rank compares the same ones
        counts = [float(source in present) for source in range(num_sources)]
        counts = dist.sum_over_ranks(counts, q_ND.device)
        present = {source for source, count in enumerate(counts) if count}
    q_BSD = q_ND.detach().unflatten(0, (len(batch.queries), -1))
    found = {}
    for source in sorted(present):
        rows = torch.tensor([row for row, one in enumerate(batch.sources) if one == source], dtype=torch.long)
        found[source] = objective.contrastive(
            q_BSD[rows.to(q_ND.device)].flatten(0, 1),
            c_CD.detach(),
            labels.each(lambda of_query_BC, rows=rows: of_query_BC[rows]),  # type: ignore[misc]
            num_added=num_added,
            num_each=q_BSD.shape[1],
        )
    return found


def find_easy(
    objective: Objective, batch: Batch, compared: Comparison, shares: Sequence[int], most: float
) -> None:
    """Note in a comparison which queries are easy, of all ranks' at most a share of `most`; `shares` are the ranks' queries."""
    lead_B = compared.contrast.lead_B
    assert lead_B is not None
    assert objective.adaptive is not None
    easy = easy_queries(dist.gather_rows(lead_B, shares), objective.adaptive, most)
    compared.easy_B = easy.split(list(shares))[dist.rank()]
    labels = objective.num_lm_tokens(batch, compared.easy_B.tolist())
    (compared.lm_tokens,) = dist.sum_over_ranks([labels], lead_B.device)
    compared.contrast.figures["easy_rate"] = Summed(compared.easy_B.sum())


def easy_queries(leads: Tensor, adaptive: AdaptiveConfig, most: float) -> Tensor:
    """Bool: which of all ranks' queries have a direct state that leads by the margin, largest leads first, within the shares."""
    count = len(leads)
    wanted = int((leads > adaptive.margin).sum())
    wanted = min(max(wanted, math.ceil(min(adaptive.floor, most) * count)), int(most * count))
    easy = torch.zeros_like(leads, dtype=torch.bool)
    easy[leads.topk(wanted).indices] = True
    return easy


def candidate_masks(
    batch: Batch, identity_C: Tensor, offset: int, group_C: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, C) bool masks on the host: positive, ignored and labelled negative candidates of each query in the global batch.

    A candidate of any rank that equals one of the query's right answers is ignored, unless it is one of the query's positives
    in this batch or one of its own labelled negatives: a label overrides an equal identity. So is a candidate of another group,
    see `rge.data.collate.Source`. Identities and groups are those of `Candidates`, this rank's from column `offset` on.
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
