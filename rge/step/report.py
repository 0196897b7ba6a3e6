"""What a training step reports: means over the global batch, and over the queries of each source."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.model.embedding_model import Readout
from rge.objective import Objective, Summed
from rge.rollout.generate import Rationale
from rge.step.comparison import Comparison


class StepReport:
    """This rank's sums of a step, and the numbers over the global batch that make its losses means."""

    def __init__(self, objective: Objective, batch: Batch, num_queries: int, device: torch.device):
        self.objective, self.num_queries = objective, num_queries  # of all ranks
        num_cut = sum(prompt.num_cut_tokens > 0 for prompt in (*batch.queries, *batch.candidates))
        # Of all ranks; easy queries, whose LM target is another one, change the number of labels.
        counts = [objective.num_lm_tokens(batch), num_cut]
        self.lm_tokens, self.cut_prompts = dist.sum_over_ranks(counts, device)
        # Losses of the chunks, and the LM losses in them, on the device until the report reads all of them.
        self.totals: list[Tensor] = []
        self.nlls: list[Tensor] = []

    def add(self, total: Tensor, *nlls: Tensor) -> None:
        """A chunk's loss, and the LM losses in it."""
        self.totals.append(total.detach())
        self.nlls += [nll.detach() for nll in nlls]

    def means(self, record_ids: Sequence[str], compared: Comparison | None) -> dict[str, float]:
        """Means over the global batch, see `rge.step.training_step.TrainingStep`; FloatingPointError if a loss is not finite."""
        figures = {} if compared is None else compared.contrast.figures
        counts = (
            [0, 0] if compared is None else [compared.contrast.num_negatives, compared.contrast.num_labelled]
        )
        # Wait for the device once instead of for each value.
        scalars = [*self.totals, *self.nlls, *(figure.value for figure in figures.values())]
        values = torch.stack([scalar.double() for scalar in scalars]).tolist()
        wrong = [value for value in values[: len(self.totals)] if not math.isfinite(value)]
        values = values[len(self.totals) :]
        local = [len(wrong), sum(values[: len(self.nlls)]), *counts, *values[len(self.nlls) :]]
        num_wrong, nll, *sums = dist.sum_over_ranks(local, self.totals[0].device)
        if num_wrong:
            found = [pair for pair in dist.gather_objects((wrong, record_ids)) if pair[0]]
            ids = [one for _, of_rank in found for one in of_rank]
            raise FloatingPointError(f"the loss is {found[0][0][0]}; records of this batch: {ids}")
        means = {"cut_prompts": self.cut_prompts}
        return means | _means(self.objective, self.num_queries, nll, self.lm_tokens, compared, figures, sums)


def _means(
    objective: Objective,
    num_queries: float,
    nll: float,
    num_labels: float,
    compared: Comparison | None,
    figures: Mapping[str, Summed],
    sums: Sequence[float],
) -> dict[str, float]:
    """Means of sums over queries: of LM losses, and if they were compared of negatives, labelled ones and `figures`."""
    means = {"loss_lm": nll / num_labels} if num_labels else {}
    if compared is not None:
        negatives, labelled, *values = sums
        for (name, figure), value in zip(figures.items(), values, strict=True):
            means[name] = value / figure.divisor(num_queries)
        means |= {
            "negatives_mean": negatives / num_queries,
            "labelled_negatives_mean": labelled / num_queries,
        }
    lm, contrastive = means.get("loss_lm", 0.0), means.get("loss_contrastive", 0.0)
    return means | {"loss": objective.alpha_lm * lm + objective.alpha_con * contrastive}


class SourceReport:
    """The same by source."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rationales: Sequence[Rationale],
        names: Sequence[str],
        device: torch.device,
    ):
        self.objective, self.batch, self.rationales, self.names = objective, batch, rationales, names
        owner = {column: row for row, column in enumerate(batch.positive)}
        for columns in (batch.negatives, batch.more_positives):
            owner |= {column: row for row, own in enumerate(columns) for column in own}
        self.of_candidates = [batch.sources[owner[column]] for column in range(len(batch.candidates))]
        self.nll: Tensor = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.easy: list[bool] = []

    def add(self, q: Readout, t: Readout, queries: slice, candidates: slice, easy_B: Tensor | None) -> None:
        """The LM losses of a chunk."""
        if self.objective.alpha_lm == 0:
            return
        parts = [(self.batch.sources[queries], self.objective.query_nll_of_each(q, easy_B))]
        if t.nll_P is not None and len(t.nll_P):
            parts.append((self.of_candidates[candidates], t.nll_P))
        for sources, nll in parts:
            at = torch.tensor(sources, device=nll.device)
            self.nll.index_add_(0, at, nll.detach().to(self.nll.dtype))
        self.easy += [] if easy_B is None else easy_B.tolist()

    def means(self, compared: Comparison | None) -> dict[str, dict[str, float]]:
        """Means over the global batch by name of the figure and of the source; all ranks call it."""
        batch, objective = self.batch, self.objective
        figures = {} if compared is None else dict(compared.contrast.figures)
        figures.pop("easy_rate", None)
        each = len(self.rationales) // len(batch.queries)
        labels = objective.num_lm_tokens_of_queries(batch, self.easy) if objective.alpha_lm > 0 else []
        nlls, rows = self.nll.tolist(), []
        for source in range(len(self.names)):
            own = [row for row, one in enumerate(batch.sources) if one == source]
            columns = [column for column, one in enumerate(self.of_candidates) if one == source]
            prompts = [*(batch.queries[row] for row in own), *(batch.candidates[place] for place in columns)]
            written = [self.rationales[row * each + place] for row in own for place in range(each)]
            reasoned = [len(one.ids) for one in written if not one.direct]
            num_labels = sum(labels[row] for row in own) if labels else 0
            num_labels += len(columns) * (objective.alpha_lm > 0 and objective.lm_on_candidates)
            part = compared.by_source.get(source) if compared is not None else None
            rows.append([
                len(own), sum(prompt.num_cut_tokens > 0 for prompt in prompts), nlls[source], num_labels,
                len(reasoned), sum(reasoned),
                *((0, 0) if part is None else (part.num_negatives, part.num_labelled)),
                *(0.0 if part is None else float(part.figures[name].value) for name in figures),
            ])  # fmt: skip
        flat = dist.sum_over_ranks([value for row in rows for value in row], self.nll.device)
        size = len(rows[0])
        found: dict[str, dict[str, float]] = {}
        for place, name in enumerate(self.names):
            count, cut, nll, num_labels, num_written, length, *sums = flat[place * size : (place + 1) * size]
            if not count:
                continue
            means = {"queries": count, "cut_prompts": cut}
            if num_written:
                means["rationale_tokens_mean"] = length / num_written
            means |= _means(objective, count, nll, num_labels, compared, figures, sums)
            for figure, value in means.items():
                found.setdefault(f"{figure}_by_source", {})[name] = value
        return found
