"""From a step's draws to this rank's batch: pictures decoded, prompts tokenised, targets chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rge.common.images import load_image
from rge.common.schema import Item, Record, Target
from rge.config import RecipeError
from rge.data.augment import AUGMENTATIONS, prepare_worker
from rge.data.sources import Draw, Mixture, RecordFile, identity
from rge.model.prompts import Prompt, PromptBuilder


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank works on in one step. Lists over queries have equal length B, lists over candidates length C.

    Attributes:
        record_ids: of the queries.
        queries: B prompts.
        oracle_ids: B rationales as token ids, each ending with ``<emb>``; empty lists where none is needed.
        candidates: C prompts: each query's drawn positive, its other positives if all are wanted, its drawn
            negatives, query after query.
        candidate_identity: C identities, see `rge.data.sources.identity`.
        positive: B columns: where among the candidates the query's positive is.
        negatives: B lists of columns of the query's labelled negatives, never masked.
        right_answers: B lists of identities of everything that answers the query.
        seeds: B seeds for sampling.
        more_positives: B lists of columns of the query's other positives; empty where one is drawn.
    """

    record_ids: list[str]
    queries: list[Prompt]
    oracle_ids: list[list[int]]
    candidates: list[Prompt]
    candidate_identity: list[int]
    positive: list[int]
    negatives: list[list[int]]
    right_answers: list[list[int]]
    seeds: list[int]
    more_positives: list[list[int]] = field(default_factory=list)


def query_item(record: Record) -> Item:
    """The query of a record as an item to embed."""
    return Item(record.id, record.query.text, tuple(record.query.images), record.instruction)


def target_item(target: Target) -> Item:
    """A target of a record as an item to embed."""
    return Item(target.id, target.text, (target.image,) if target.image else ())


class Collator:
    """Makes batches of records: pictures decoded, prompts tokenised, targets drawn.

    Args:
        files: the sources that draws name by number.
        builder: makes prompts.
        augment: name of an augmentation, or ``none``.
        need_oracle: whether oracle rationales are tokenised.
        need_candidates: whether targets are drawn at all (the LM loss alone may do without).
        max_negatives: labelled negatives drawn per query.
        positives: ``draw`` makes one of a record's positives a candidate, ``all`` every one of them. The oracle
            rationale is the drawn one's either way.
        sort_by_length: order queries, and candidates, by the length of their prompts, most of which is pictures.
            Micro batches are cut from that order, so little of them is padding; the batch stays what it was.
    """

    def __init__(
        self,
        files: Sequence[RecordFile],
        builder: PromptBuilder,
        *,
        augment: str = "none",
        need_oracle: bool = True,
        need_candidates: bool = True,
        max_negatives: int = 1,
        positives: str = "draw",
        sort_by_length: bool = False,
    ):
        self.files, self.builder = files, builder
        self.all_positives, self.sort_by_length = positives == "all", sort_by_length
        self.augment = AUGMENTATIONS.get(augment)
        self.need_oracle, self.need_candidates, self.max_negatives = (
            need_oracle,
            need_candidates,
            max_negatives,
        )

    def collate(self, draws: Sequence[Draw]) -> Batch:
        """The batch of these draws.

        Raises:
            ValueError: a record cannot become a prompt; names it.
        """
        batch = Batch([], [], [], [], [], [], [], [], [])
        for draw in draws:
            record = self.files[draw.source][draw.index]
            try:
                self._add(batch, draw, record)
            except ValueError as error:
                raise type(error)(
                    f"record {record.id!r} of {self.files[draw.source].path}: {error}"
                ) from error
        return sorted_by_length(batch) if self.sort_by_length else batch

    def _add(self, batch: Batch, draw: Draw, record: Record) -> None:
        generator = np.random.default_rng(draw.seed)
        drawn = int(generator.integers(len(record.positives)))
        positive = record.positives[drawn]
        batch.record_ids.append(record.id)
        batch.seeds.append(draw.seed)
        batch.queries.append(self._prompt(query_item(record), "query", generator))
        batch.oracle_ids.append(
            self.builder.rationale_ids(positive.rationale or "", record.id) if self.need_oracle else []
        )
        batch.right_answers.append(sorted({identity(target) for target in record.positives}))
        if not self.need_candidates:
            return
        batch.positive.append(len(batch.candidates))
        self._add_candidate(batch, positive, generator)
        others = [
            target for place, target in enumerate(record.positives) if place != drawn and self.all_positives
        ]
        batch.more_positives.append(list(range(len(batch.candidates), len(batch.candidates) + len(others))))
        for target in others:
            self._add_candidate(batch, target, generator)
        count = min(self.max_negatives, len(record.negatives))
        chosen = generator.choice(len(record.negatives), size=count, replace=False) if count else []
        batch.negatives.append(list(range(len(batch.candidates), len(batch.candidates) + count)))
        for place in chosen:
            self._add_candidate(batch, record.negatives[int(place)], generator)

    def _add_candidate(self, batch: Batch, target: Target, generator: np.random.Generator) -> None:
        batch.candidates.append(self._prompt(target_item(target), "candidate", generator))
        batch.candidate_identity.append(identity(target))

    def _prompt(self, item: Item, side: str, generator: np.random.Generator) -> Prompt:
        images: list[Image.Image] | None = None
        if self.augment is not None and item.images:
            images = [self.augment(load_image(ref), int(generator.integers(2**63))) for ref in item.images]
        return self.builder.build(item, side, images)


class StepBatches(Collator, Dataset):
    """Batches by step number, for one rank: `dataset[step]` is this rank's share of the step's global batch.

    Args:
        files: the sources, in the order of the mixture.
        mixture: which records a step draws.
        builder: makes prompts.
        rank: this process.
        world_size: number of processes, at most the batch size.
        settings: as of `Collator`.

    Raises:
        RecipeError: more processes than queries in a batch.
    """

    def __init__(
        self,
        files: Sequence[RecordFile],
        mixture: Mixture,
        builder: PromptBuilder,
        *,
        rank: int,
        world_size: int,
        **settings,
    ):
        if mixture.batch_size < world_size:
            raise RecipeError(
                f"batch_size={mixture.batch_size} leaves some of the {world_size} processes without a query; "
                "raise it, or launch fewer"
            )
        super().__init__(files, builder, **settings)
        self.mixture = mixture
        # Shares differ by one at most; losses are means over all queries, so every query weighs the same.
        self.share = slice(
            rank * mixture.batch_size // world_size, (rank + 1) * mixture.batch_size // world_size
        )

    def __getitem__(self, step: int) -> Batch:
        """This rank's batch of a step."""
        return self.collate(self.mixture.batch(step)[self.share])


def sorted_by_length(batch: Batch) -> Batch:
    """The same batch with queries, and candidates, from the shortest prompt to the longest."""
    rows = sorted(range(len(batch.queries)), key=lambda row: len(batch.queries[row]))
    columns = sorted(range(len(batch.candidates)), key=lambda column: len(batch.candidates[column]))
    now_at = {column: place for place, column in enumerate(columns)}

    def by_row(values: list) -> list:
        return [values[row] for row in rows] if values else []

    return Batch(
        record_ids=by_row(batch.record_ids),
        queries=by_row(batch.queries),
        oracle_ids=by_row(batch.oracle_ids),
        candidates=[batch.candidates[column] for column in columns],
        candidate_identity=[batch.candidate_identity[column] for column in columns],
        positive=[now_at[column] for column in by_row(batch.positive)],
        negatives=[[now_at[column] for column in own] for own in by_row(batch.negatives)],
        right_answers=by_row(batch.right_answers),
        seeds=by_row(batch.seeds),
        more_positives=[[now_at[column] for column in own] for own in by_row(batch.more_positives)],
    )


def make_loader(batches: StepBatches, steps: range, num_workers: int) -> DataLoader:
    """Batches of the given steps, in order, made ahead by worker processes."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=list(steps),
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=prepare_worker,
        persistent_workers=False,
    )
