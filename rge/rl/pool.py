"""A fixed pool of candidates for rewards, since a batch's negatives are easy.

Every `rl.pool_every` steps the model in training embeds it again, each process a share; all keep everything. In between the
embeddings are stale, as in MoCo (arXiv:1911.05722). They have no gradient, and are part of a resumable state. A query sees the
pool through the prompts of its own source, so it is embedded once for each of their settings.

Shape suffixes: B = queries of this rank, V = settings of prompts, P = pool, D = hidden size.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from rge.common.errors import UserError, grouped
from rge.common.images import PictureIndex, load_image
from rge.common.parts import picture_of, refs_of
from rge.common.schema import Record, Target
from rge.config import Recipe
from rge.data.collate import Batch, PromptBuilders, target_item
from rge.data.layout import measured, on_all_cores
from rge.data.sources import MAX_REPORTED, RecordFile, Records, identity
from rge.distributed import collectives as dist
from rge.model.embedding_model import EmbeddingModel, eval_mode
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.rl.config import RLConfig
from rge.rl.reference import without_pictures
from rge.tables.names import resolved
from rge.tables.rows import table_rows

CORPUS = "corpus.parquet"
LOOKED_AT = 1000
"""Records per source whose right answers are looked up before a run."""


class Pool:
    """Fixed candidates and their latest unit-norm embeddings, `state_VPD`."""

    def __init__(self, path: Path, recipe: Recipe, embedder: EmbeddingModel):
        self.embedder, self.every = embedder, recipe.rl.pool_every
        self.micro_batch_size = recipe.train.micro_batch_size
        builders = PromptBuilders(embedder.processor, recipe)
        of_sources = [builders(source) for source in recipe.rl.sources] or [builders()]
        self.builders = [*dict.fromkeys(of_sources)]
        self.of_source = [self.builders.index(builder) for builder in of_sources]
        self.targets = read_pool(path)
        self.identity_P = torch.tensor([identity(target) for target in self.targets])
        self.age = 0
        self.state_VPD: Tensor | None = None

    def before_step(self) -> None:
        """Embed the pool if it is due; all processes call it while the weights are whole."""
        if self.state_VPD is None or self.age >= self.every:
            self.state_VPD, self.age = torch.stack([*map(self._embedded, self.builders)]), 0
        self.age += 1

    def settings_of(self, batch: Batch) -> list[int]:
        """Which of V each query's source has."""
        return [self.of_source[source] for source in batch.sources or [0] * len(batch.queries)]

    def masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Right answers and labelled negatives of each query in the pool by identity: (B, P) bool, on the host."""

        def among(identities: list[list[int]]) -> Tensor:
            return torch.stack([torch.isin(self.identity_P, torch.tensor(each)) for each in identities])

        negatives = [[batch.candidate_identity[column] for column in columns] for columns in batch.negatives]
        return among(batch.right_answers), among(negatives)

    @torch.no_grad()
    def _embedded(self, builder: PromptBuilder) -> Tensor:
        count, world_size, rank = len(self.targets), dist.world_size(), dist.rank()
        bounds = [count * number // world_size for number in range(world_size + 1)]
        sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
        embedder, direct, parts = self.embedder, [Branch([self.embedder.emb_id], read_state=True)], []
        # Features kept until the step's end would be those of the whole pool.
        with eval_mode(embedder), without_pictures(embedder):
            # With sharded parameters every forward is collective: each process must run equally many.
            for start in range(bounds[rank], bounds[rank] + max(sizes), self.micro_batch_size):
                chosen = self.targets[start : min(start + self.micro_batch_size, bounds[rank + 1])]
                prompts = [
                    builder.build(target_item(target), "candidate") for target in chosen or self.targets[:1]
                ]
                state_ND = embedder(embedder.pack(prompts, [direct] * len(prompts)))[0].state_ND
                parts.append(state_ND[: len(chosen)])
        return dist.gather_rows(torch.cat(parts), sizes)

    def state_dict(self) -> dict[str, Any]:
        """For a resumable checkpoint."""
        state_VPD = None if self.state_VPD is None else self.state_VPD.to("cpu", copy=True)
        return {"age": self.age, "state_VPD": state_VPD}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a resumable checkpoint; UserError if the pool's size has changed."""
        state_VPD = state["state_VPD"]
        if state_VPD is not None and state_VPD.shape[1] != len(self.targets):
            raise UserError(
                f"the pool has {len(self.targets)} candidates, but had {state_VPD.shape[1]} when this run was stopped: restore it, "
                "or start with another out=",
                key="rl.candidates",
            )
        self.age = state["age"]
        self.state_VPD = None if state_VPD is None else state_VPD.to(self.embedder.device)


def read_pool(path: Path) -> list[Target]:
    """The candidates of a pool, each id once; UserError if it is missing or empty.

    It is a file of training records, whose positives and negatives are the pool; or a folder with ``corpus.parquet``, as in
    retrieval sets: columns id, text and/or image, and ``identity`` if ids differ from those of the records' targets.
    """
    found: dict[str, Target] = {}
    if not path.exists():
        raise UserError("there is no pool", path, key="rl.candidates", kind="missing")
    if path.is_dir():
        targets = _of_corpus(path)
    else:
        records = RecordFile(path)
        chosen = (records[index] for index in range(len(records)))
        targets = (target for record in chosen for target in (*record.positives, *record.negatives))
    for target in targets:
        found.setdefault(target.id, target)
    if not found:
        raise UserError("the pool contains no candidates", path, key="rl.candidates", kind="empty")
    return list(found.values())


def _of_corpus(folder: Path) -> Iterator[Target]:
    file = folder / CORPUS
    if not file.is_file():
        raise UserError(
            f"it has no {CORPUS}: a pool is such a folder, or a file of training records",
            folder,
            key="rl.candidates",
        )
    names = pq.read_schema(file).names
    if "id" not in names or not {"text", "image"} & set(names):
        raise UserError(
            f"it needs the columns id and text or image, and has {', '.join(names)}",
            file,
            key="rl.candidates",
            kind="columns",
        )
    for row in table_rows(file, ["id", "text", "image", "identity"]):
        try:
            image = picture_of(row.get("image"))
        except ValueError as error:
            raise UserError(f"the picture: {error}", file, row["id"], "rl.candidates") from None
        if image is not None:
            image = f"{file}#{row['id']}" if isinstance(image, bytes) else resolved(image, str(folder))
        yield Target(id=row["id"], text=row.get("text"), image=image, identity=row.get("identity"))


def unusable(
    path: Path, targets: Sequence[Target], pictures: PictureIndex, builders: Sequence[PromptBuilder] = ()
) -> list[str]:
    """Candidates of a pool that cannot be embedded: their pictures do not exist; with `builders`, all are measured and decoded."""
    found: Iterable[str | None] = (_missing(pictures, target) for target in targets)
    if builders:
        found = chain.from_iterable(on_all_cores(partial(_fault, one), targets) for one in builders)
    faults = dict.fromkeys(f"rl.candidates: {path}: {fault}" for fault in found if fault is not None)
    return grouped(faults, MAX_REPORTED)


def _missing(pictures: PictureIndex, target: Target) -> str | None:
    for ref in (ref for part in target.parts for ref in refs_of(part)):
        if isinstance(ref, str) and (fault := pictures.fault(ref)):
            return f"candidate {target.id!r}: {fault}"
    return None


def _fault(builder: PromptBuilder, target: Target) -> str | None:
    try:
        measured(builder, target_item(target), "candidate")
        for ref in target.pictures:
            load_image(ref)
    except ValueError as error:
        return f"candidate {target.id!r}: {error}"
    return None


def check_pool(rl: RLConfig, sources: Mapping[str, Records], targets: Sequence[Target]) -> str | None:
    """A warning if some of training's queries have no right answer in the pool; UserError if none has.

    A stream's queries are unknown.
    """
    pool = {identity(target) for target in targets}
    sampled: list[Record] = []
    for source in rl.sources:
        records = sources.get(source.key or "")
        if records is not None and records.size is not None:
            number = min(records.size, LOOKED_AT)
            sampled += [records[records.size * place // number] for place in range(number)]
    missing = [record for record in sampled if not any(identity(each) in pool for each in record.positives)]
    if not missing:
        return None
    first = missing[0]
    example = f"{first.id} wants {first.positives[0].identity or first.positives[0].id}"
    if len(missing) == len(sampled):
        raise UserError(
            f"nothing among the {len(pool)} candidates of {rl.pool} answers any of {len(sampled)} queries "
            f"({example}): ids, or identities, must be those of the records' positives",
            key="rl.candidates",
        )
    return (
        f"warning: {len(missing)} of {len(sampled)} queries have no right answer in the pool {rl.pool} ({example}); "
        "they get no reward and count as unscored_groups"
    )
