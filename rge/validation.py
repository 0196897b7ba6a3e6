"""Validation during training: retrieval on a small held-out set, after greedy rationales of its own.

All targets are candidates for every query, so that hit@1 is comparable between steps. Without gradients, augmentation or random
numbers, so that training is not affected.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rge.config import Recipe
from rge.data.collate import Batch, Collator, PromptBuilders
from rge.data.mixture import Draw
from rge.data.sources import RecordError, Records
from rge.distributed import collectives as dist
from rge.model.embedding_model import EmbeddingModel, Packed, Readout, eval_mode
from rge.objective import Objective
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import within
from rge.step.comparison import Candidates


def problems(recipe: Recipe, sources: Mapping[str, Records]) -> Iterator[str]:
    """Why held-out records, which are among the open sources, cannot be used."""
    for number, config in enumerate(recipe.validation.sources):
        if (held_out := sources.get(config.key or "")) is None:
            continue
        try:
            num_records(held_out, recipe.validation.max_records)
        except RecordError as error:
            yield str(error)
        content = held_out.content.get("sha256")  # unknown for a stream
        for name in recipe.stages():
            for key in [source.key for source in getattr(recipe, name).sources if source.key in sources]:
                if content is not None and sources[key].content.get("sha256") == content:
                    yield (
                        f"validation.sources[{number}] {held_out.name} is also a source of {name}: give held-out records"
                    )


def num_records(file: Records, max_records: int) -> int:
    """Number of held-out records to use; RecordError for fewer records than processes."""
    count = min(max_records, len(file))
    if count < dist.world_size():
        raise RecordError(
            f"validation uses {count} of these {len(file)} records, fewer than the {dist.world_size()} processes: raise "
            "validation.max_records, or add some",
            file.name,
        ).about("validation.max_records")
    return count


def make_validation(
    recipe: Recipe, objective: Objective, processor: Any, records: Mapping[str, Records]
) -> "Validation | None":
    """Validation on the recipe's held-out records, if any; collated as in training, but without augmentation or bad records."""
    if not recipe.validation.sources:
        return None
    builders = PromptBuilders(processor, recipe)
    plain: dict[str, Any] = {"augment": "none", "sort_by_length": False, "on_bad": "stop"}
    sources = [
        builders.source(config, records[config.key or ""], **plain) for config in recipe.validation.sources
    ]
    collator = Collator(sources, **objective.needs)
    return Validation(collator, objective, recipe)


class Validation:
    """Held-out records of one stage."""

    def __init__(self, collator: Collator, objective: Objective, recipe: Recipe):
        # Also if training embeds after oracle rationales: these may name the answer, and a checkpoint is used without them.
        anchor = "self" if objective.anchor in ("oracle", "mix") else objective.anchor
        self.collator, self.objective = collator, replace(objective, adaptive=None, anchor=anchor)
        self.micro_batch_size, self.most_tokens = (
            recipe.train.micro_batch_size,
            recipe.train.micro_batch_tokens,
        )
        self.max_new_tokens = recipe.rollout.max_new_tokens
        limits = [one for one in (recipe.rollout.batch_tokens, self.most_tokens) if one is not None]
        self.rollout_tokens = min(limits, default=None)
        most, world_size = recipe.validation.max_records, dist.world_size()
        counts = [num_records(source.records, most) for source in collator.sources]
        self.rows = [list(range(dist.rank(), count, world_size)) for count in counts]  # of each source

    @torch.no_grad()
    def measure(self, embedder: EmbeddingModel) -> dict[str, Any]:
        """Losses, hit@1 and the share of forced stops, equal on all processes.

        They are ``val_loss_lm``, ``val_loss_contrastive``, ``val_hit_at_1``, ``val_forced_rate``, as far as the objective has
        them, and ``val_loss``, weighted as in training. Losses are means over tokens and over queries. Of several sources, each
        figure is the mean over them, and ``..._by_source`` has it by name.
        """
        names = self.collator.names
        with eval_mode(embedder):
            found = [self._measure(embedder, source) for source in range(len(names))]
        means: dict[str, Any] = {
            name: math.fsum(one[name] for one in found) / len(found) for name in found[0]
        }
        if len(found) > 1:
            means |= {
                f"{name}_by_source": {source: one[name] for source, one in zip(names, found, strict=True)}
                for name in found[0]
            }
        return means

    def _measure(self, embedder: EmbeddingModel, source: int) -> dict[str, float]:
        objective, all_rows = self.objective, self.rows[source]
        chunks: list[Batch] = []
        q_parts: list[Tensor] = []
        t_parts: list[Tensor] = []
        nll, num_tokens, forced = 0.0, 0.0, 0.0
        for start in range(0, len(all_rows), self.micro_batch_size):
            rows = all_rows[start : start + self.micro_batch_size]
            batch = self.collator.collate([Draw(source, row, seed=row) for row in rows])
            rationales = self._written(embedder, batch)
            chunks.append(batch)
            for q, t in self._forwards(embedder, batch, rationales):
                if q is not None:
                    nll += float(objective.query_nll(q))
                    q_parts.append(q.state_ND)
                if t is not None:
                    nll += float(t.nll)
                    t_parts.append(t.state_ND)
            num_tokens += objective.num_lm_tokens(batch)
            forced += sum(rationale.forced for rationale in rationales)
        figures: dict[str, float] = {}
        if objective.compares:
            # In float32, as in training: bfloat16 makes close scores equal, and ties count as misses.
            with torch.autocast(embedder.device.type, enabled=False):
                figures = self._contrastive(chunks, torch.cat(q_parts), torch.cat(t_parts))
        totals = [nll, num_tokens, forced, len(all_rows), *figures.values()]
        nll, num_tokens, forced, count, *sums = dist.sum_over_ranks(totals, embedder.device)
        report = {}
        if num_tokens:
            report["val_loss_lm"] = nll / num_tokens
        report |= {f"val_{name}": total / count for name, total in zip(figures, sums, strict=True)}
        if objective.needs_rollout:
            report["val_forced_rate"] = forced / count
        lm, contrastive = report.get("val_loss_lm", 0.0), report.get("val_loss_contrastive", 0.0)
        report["val_loss"] = objective.alpha_lm * lm + objective.alpha_con * contrastive
        return report

    def _written(self, embedder: EmbeddingModel, batch: Batch) -> list[Rationale]:
        """Rationales of the batch's queries, if the objective needs them."""
        if not self.objective.needs_rollout:
            return []
        return generate(
            embedder,
            batch.queries,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.micro_batch_size,
            batch_tokens=self.rollout_tokens,
            with_direct=self.objective.direct > 0,
        )

    def _forwards(
        self, embedder: EmbeddingModel, batch: Batch, rationales: Sequence[Rationale]
    ) -> Iterator[tuple[Readout | None, Readout | None]]:
        """Readouts of queries and of candidates in order: of all in one forward, or where their prompts have too many tokens, in several."""
        objective, most = self.objective, self.most_tokens
        lengths = [[*map(len, prompts)] for prompts in (batch.queries, batch.candidates)]
        q_parts, t_parts = (within(each, most) for each in lengths)
        branches = [
            objective.query_branches(batch, rationales, embedder, row) for row in range(len(batch.queries))
        ]
        branch = objective.candidate_branch(embedder.emb_id)

        def queries(part: slice) -> Packed:
            packed = embedder.pack(batch.queries[part], branches[part])
            return replace(packed, by_branch=len(objective.lm_targets) > 1)

        def candidates(part: slice) -> Packed:
            shown = batch.candidates[part]
            return embedder.pack(shown, [[branch]] * len(shown))

        if t_parts and (most is None or sum(map(sum, lengths)) <= most):
            q, t = embedder(queries(q_parts[0]), candidates(t_parts[0]))
            yield q, t
            return
        for part in q_parts:
            yield embedder(queries(part))[0], None
        for part in t_parts:
            yield None, embedder(candidates(part))[0]

    def _contrastive(self, chunks: Sequence[Batch], q_ND: Tensor, t_ND: Tensor) -> dict[str, float]:
        """Every query against the candidates of all records: `Contrast.figures`, summed over the queries."""
        objective = self.objective
        candidates = Candidates.gather(chunks, t_ND)._replace(group_C=None)
        num_each = len(q_ND) // sum(len(batch.queries) for batch in chunks)
        sums: defaultdict[str, float] = defaultdict(float)
        # Chunk by chunk, to save memory, unless a loss compares the queries of all chunks at once.
        for batches in [chunks] if objective.gathers else [[batch] for batch in chunks]:
            size = num_each * sum(len(batch.queries) for batch in batches)
            labels = candidates.labels(batches, scored=objective.needs_scores)
            contrast = objective.contrastive(q_ND[:size], candidates.state_CD, labels)
            for name, figure in contrast.figures.items():
                sums[name] += float(figure.value) / figure.num_each
            q_ND = q_ND[size:]
            first = candidates.first + sum(len(batch.candidates) for batch in batches)
            candidates = candidates._replace(first=first)
        return dict(sums)
