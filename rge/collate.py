"""From a step's draws to this rank's batch: pictures decoded, prompts tokenised, targets chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rge.augment import AUGMENTATIONS, set_torch_threads_of_worker
from rge.images import load_image
from rge.prompts import Prompt, PromptBuilder
from rge.schema import Item, Record, Target
from rge.sources import Draw, Mixture, RecordFile, identity


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank works on in one step. Lists over queries have equal length B, lists over candidates length C.

    Attributes:
        record_ids: of the queries.
        queries: B prompts.
        oracle_ids: B rationales as token ids, each ending with ``<emb>``; empty lists where none is needed.
        candidates: C prompts: each query's drawn positive, then its drawn negatives, query after query.
        candidate_identity: C identities, see `rge.sources.identity`.
        positive: B columns: where among the candidates the query's positive is.
        negatives: B lists of columns of the query's labelled negatives, never masked.
        right_answers: B lists of identities of everything that answers the query.
        seeds: B seeds for sampling.
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


def query_item(record: Record) -> Item:
    """The query of a record as an item to embed."""
    return Item(record.id, record.query.text, tuple(record.query.images), record.instruction)


def target_item(target: Target) -> Item:
    """A target of a record as an item to embed."""
    return Item(target.id, target.text, (target.image,) if target.image else ())


class StepBatches(Dataset):
    """Batches by step number, for one rank: `dataset[step]` is this rank's share of the step's global batch.

    Args:
        files: the sources, in the order of the mixture.
        mixture: which records a step draws.
        builder: makes prompts.
        rank: this process.
        world_size: number of processes; the batch size must be a multiple of it.
        augment: name of an augmentation, or ``none``.
        need_oracle: whether oracle rationales are tokenised.
        need_candidates: whether targets are drawn at all (the LM loss alone may do without).
        max_negatives: labelled negatives drawn per query.

    Raises:
        ValueError: a batch that cannot be shared out evenly.
    """

    def __init__(
        self,
        files: Sequence[RecordFile],
        mixture: Mixture,
        builder: PromptBuilder,
        *,
        rank: int,
        world_size: int,
        augment: str = "none",
        need_oracle: bool = True,
        need_candidates: bool = True,
        max_negatives: int = 1,
    ):
        if mixture.batch_size % world_size:
            raise ValueError(
                f"batch_size {mixture.batch_size} must be a multiple of the {world_size} processes"
            )
        self.files, self.mixture, self.builder = files, mixture, builder
        self.share = slice(
            rank * (mixture.batch_size // world_size), (rank + 1) * (mixture.batch_size // world_size)
        )
        self.augment = AUGMENTATIONS.get(augment)
        self.need_oracle, self.need_candidates, self.max_negatives = (
            need_oracle,
            need_candidates,
            max_negatives,
        )

    def __getitem__(self, step: int) -> Batch:
        """This rank's batch of a step."""
        batch = Batch([], [], [], [], [], [], [], [], [])
        for draw in self.mixture.batch(step)[self.share]:
            record = self.files[draw.source][draw.index]
            try:
                self._add(batch, draw, record)
            except ValueError as error:
                raise type(error)(
                    f"record {record.id!r} of {self.files[draw.source].path}: {error}"
                ) from error
        return batch

    def _add(self, batch: Batch, draw: Draw, record: Record) -> None:
        generator = np.random.default_rng(draw.seed)
        positive = record.positives[int(generator.integers(len(record.positives)))]
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


def make_loader(batches: StepBatches, steps: range, num_workers: int) -> DataLoader:
    """Batches of the given steps, in order, made ahead by worker processes."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=list(steps),
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=set_torch_threads_of_worker,
        persistent_workers=False,
    )
