"""Negatives that training mines itself, every so many steps, with the present model.

    step 0: mine --> batches of steps 0 ... N-1     step N: mine --> batches of steps N ... 2N-1     ...

All ranks embed a share of the candidates and of the queries, in the same micro batches on any number of ranks, so that the same
weights mine the same negatives. A training state has the weights of its own step, not those of the last mining; so what was mined
is kept beside the states, in ``mined/step_*.json``, and a resumed run reads it.

Memory: `data.mine.pool` records' targets, each rank's share of their embeddings, and the window's queries. There is no second model.

Shape suffixes: Q = queries, C = candidates of all ranks, D = hidden size.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rge.checkpoints.training_state import complete_states
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import read_json, write_json
from rge.common.schema import Target
from rge.config import Recipe
from rge.data.collate import Batch, Named, Source, StepBatches, query_item, target_item
from rge.data.config import DataConfig
from rge.data.loader import Loader
from rge.data.sources import Records
from rge.distributed import collectives as dist
from rge.mining.rules import limits, order
from rge.mining.search import Nearest, merged, nearest
from rge.mining.table import Asked, Candidate, Table, pair_scores
from rge.model.embedding_model import EmbeddingModel, eval_mode
from rge.model.packing import Branch
from rge.model.prompts import Prompt
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.micro_batches import within

Mined = dict[tuple[int, int], list[Named]]
"""Negatives of records, by number of the source and of the record in it."""
T = TypeVar("T")
THREADS = 4
"""That decode pictures while the model embeds."""


class StageLoader:
    """The batches of a stage's steps, with negatives mined every `data.mine.every` steps; 0: never. Can be iterated once."""

    def __init__(
        self,
        recipe: Recipe,
        batches: StepBatches,
        steps: range,
        objective: Objective,
        model: nn.Module,
        embedder: EmbeddingModel,
        accelerator: Accelerator,
        folder: Path,
    ):
        self.batches, self.steps, self.settings, self.folder = batches, steps, recipe.data, folder
        self.embedder = embedder
        self.every = recipe.data.mine.every if objective.alpha_con > 0 else 0
        self._whole = partial(dist.whole_model, accelerator, model)
        self._mine = _Mining(recipe, batches, objective, embedder)
        self._figures: dict[str, float] = {}

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches; errors as of `Loader`."""
        every, first = self.every or self.steps.stop, self.steps.start
        while first < self.steps.stop:
            window = first - first % every
            stop = min(window + every, self.steps.stop)
            if self.every:
                self.batches.mined = self._refreshed(window) if first == window else self._read(window)
            yield from Loader(self.batches, range(first, stop), self.settings, self.embedder.device)
            first = stop

    def report(self) -> dict[str, float]:
        """Figures of the mining before this step, once: how hard the negatives are."""
        figures, self._figures = self._figures, {}
        return figures

    def _refreshed(self, window: int) -> Mined:
        """Mine for the steps from `window` on, and keep the result for runs that resume."""
        began = time.perf_counter()
        steps = range(window, min(window + self.every, self.steps.stop))
        with self._whole(), torch.no_grad(), eval_mode(self.embedder):
            mined, self._figures = self._mine(steps)
        if dist.rank() == 0:
            rows = [[*record, negatives] for record, negatives in mined.items()]
            write_json(self._file(window), {"window": window, "negatives": rows})
            self._forget()
        dist.from_main(None)
        self._figures["mine_s"] = time.perf_counter() - began
        return mined

    def _read(self, window: int) -> Mined:
        file = self._file(window)
        content = dist.from_main(read_json(file) if dist.rank() == 0 else None)
        if content is None:
            raise UserError(
                f"{file} is missing: it has the negatives that were mined at step {window}, with weights that are gone. Delete the "
                f"states after that step in {self.folder / 'state'}, and the run continues from there"
            )
        return {
            (source, index): [Named(*one) for one in negatives]
            for source, index, negatives in content["negatives"]
        }

    def _file(self, window: int) -> Path:
        return self.folder / "mined" / f"step_{window:08d}.json"

    def _forget(self) -> None:
        """Delete what no state that is still there can need."""
        oldest = min(
            (int(path.name.removeprefix("step_")) for path in complete_states(self.folder / "state")),
            default=0,
        )
        for file in (self.folder / "mined").glob("step_*.json"):
            if int(file.stem.removeprefix("step_")) + self.every <= oldest:
                file.unlink(missing_ok=True)


class _Mining:
    """Mines with the weights that the embedder has."""

    def __init__(self, recipe: Recipe, batches: StepBatches, objective: Objective, embedder: EmbeddingModel):
        self.settings, self.batches, self.embedder = recipe.data.mine, batches, embedder
        self.micro_batch_size = recipe.train.micro_batch_size
        self.micro_batch_tokens = recipe.train.micro_batch_tokens
        self.max_new_tokens = recipe.rollout.max_new_tokens
        self.mode = self.settings.mode(objective.anchor)
        self.query_rows = recipe.rollout.batch_size if self.mode == "reasoning" else self.micro_batch_size

    def __call__(self, steps: range) -> tuple[Mined, dict[str, float]]:
        """The negatives of the records of these steps, and figures; the same on every rank."""
        drawn = [draw for step in steps for draw in self.batches.mixture.batch(step)]
        mined: Mined = {}
        margins: list[float] = []
        num_queries = 0
        for number, source in enumerate(self.batches.sources):
            indices = sorted({draw.index for draw in drawn if draw.source == number})
            if indices:
                found, of_source = self._source(number, source, indices, steps.start)
                mined |= {(number, index): names for index, names in found.items()}
                margins += of_source
                num_queries += len(indices)
        negatives = sum(map(len, mined.values()))
        figures = {"mined_mean": negatives / num_queries}
        if margins:  # by how much the hardest negative is below the lowest positive
            figures["mined_margin"] = float(np.mean(margins))
        return mined, figures

    def _source(
        self, number: int, source: Source, indices: Sequence[int], step: int
    ) -> tuple[dict[int, list[Named]], list[float]]:
        settings, size = self.settings, len(source.records)
        chance = np.random.default_rng([settings.seed, number, step])
        pool = chance.choice(size, min(settings.pool, size), replace=False).tolist()
        read = sorted({*indices, *pool})
        asked: dict[int, str] = {}
        table = Table(self._asked(source, index, asked) for index in read)
        places = sorted({table.places[asked[index]] for index in indices})
        row_of = {place: row for row, place in enumerate(places)}
        candidate_CD, first, usable_C = self._embedded(
            table.targets,
            lambda name: source.builder.build(target_item(name.of(source)), "candidate"),
            self._direct,
            self.micro_batch_size,
            source,
            f"mining before step {step + 1}, candidates",
        )
        query_ND, _, _ = self._embedded(
            [table.queries[place].item for place in places],
            lambda index: source.builder.build(query_item(source.record(index)), "query"),
            self._queries,
            self.query_rows,
            source,
            f"mining before step {step + 1}, queries",
        )
        query_QD = np.concatenate(dist.gather_objects(query_ND))
        groups = table.groups(places=places)
        place_P, row_P = table.positive_pairs(places)
        own_P = (first <= row_P) & (row_P < first + len(candidate_CD))
        lowest_Q = np.full(len(places), np.inf, np.float32)
        scores = pair_scores(query_QD, candidate_CD, place_P[own_P], row_P[own_P] - first)
        np.minimum.at(lowest_Q, place_P[own_P], scores)
        lowest_Q = np.minimum.reduce(dist.gather_objects(lowest_Q))
        found = nearest(
            query_QD, candidate_CD, groups, limits(settings, lowest_Q), depth=settings.depth(), first_row=first,
            allowed_C=usable_C, device=self.embedder.device,
        )  # fmt: skip
        found = merged(dist.gather_objects(found))
        chosen = [self._chosen(table, found, row, places[row]) for row in range(len(places))]
        margins = lowest_Q - found.score_QK[:, 0] if found.score_QK.shape[1] else np.zeros(0)
        names = {index: chosen[row_of[table.places[asked[index]]]] for index in indices}
        return names, margins[np.isfinite(margins)].tolist()

    def _chosen(self, table: Table, found: Nearest, row: int, place: int) -> list[Named]:
        rows = found.row_QK[row][found.row_QK[row] >= 0]
        taken = order(self.settings, len(rows), table.queries[place].digest)[: self.settings.num]
        return [table.targets[at] for at in rows[taken].tolist()]

    @staticmethod
    def _asked(source: Source, index: int, asked: dict[int, str]) -> Asked:
        """A record's row of a table; contents are told apart by their references, as pre-flight has found equal ones."""
        record = source.record(index)
        asked[index] = _digest(record.query.parts, record.instruction)

        def named(targets: Sequence[Target], is_positive: bool) -> list[Candidate[Named]]:
            return [
                Candidate(
                    _digest(target.parts),
                    target.id,
                    target.identity or target.id,
                    Named(index, is_positive, place),
                )
                for place, target in enumerate(targets)
            ]

        return asked[index], index, named(record.positives, True), named(record.negatives, False)

    def _embedded(
        self,
        keys: Sequence[T],
        prompt: Callable[[T], Prompt],
        states: Callable[[Sequence[Prompt]], Tensor],
        size: int,
        source: Source,
        desc: str,
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """This rank's share of the embeddings (rows, D), its first row, and which of its rows could be read.

        Threads prepare the next `size` prompts while the model embeds some, in parts of `train.micro_batch_tokens`. An unreadable item ends the run, or with
        ``data.on_bad=skip`` gets zeros.
        """
        num = -(-len(keys) // size)
        first, stop = (end * num // dist.world_size() * size for end in (dist.rank(), dist.rank() + 1))
        own = keys[first:stop]
        state_ND = np.zeros((len(own), self.embedder.model.config.get_text_config().hidden_size), np.float32)
        usable_N = np.ones(len(own), bool)

        def prepared(key: T) -> Prompt | None:
            try:
                return prompt(key)
            except ValueError:
                if source.settings.on_bad == "stop":
                    raise
                return None

        bar = progress_bar(total=len(own), desc=desc, unit="item", disable=dist.rank() > 0, leave=False)
        with ThreadPoolExecutor(THREADS) as threads, bar:
            following = [threads.submit(prepared, key) for key in own[:size]]
            for start in range(0, len(own), size):
                current, after = following, own[start + size : start + 2 * size]
                following = [threads.submit(prepared, key) for key in after]
                prompts = [future.result() for future in current]
                rows = [start + place for place, one in enumerate(prompts) if one is not None]
                usable = [one for one in prompts if one is not None]
                for part in within([*map(len, usable)], self.micro_batch_tokens):
                    state_ND[rows[part]] = states(usable[part]).float().cpu().numpy()
                usable_N[start : start + len(prompts)] = [one is not None for one in prompts]
                bar.update(len(prompts))
        return state_ND, first, usable_N

    def _direct(self, prompts: Sequence[Prompt]) -> Tensor:
        """States directly after the prompt."""
        branch = Branch([self.embedder.emb_id], read_state=True)
        return self.embedder(self.embedder.pack(prompts, [[branch]] * len(prompts)))[0].state_ND

    def _queries(self, prompts: Sequence[Prompt]) -> Tensor:
        """States of queries, after a greedy rationale if they are served so."""
        if self.mode != "reasoning":
            return self._direct(prompts)
        written = generate(
            self.embedder, prompts, max_new_tokens=self.max_new_tokens, batch_size=self.query_rows
        )
        states = [rationale.state_D for rationale in written]
        assert all(state is not None for state in states), "computed with the current weights"
        return torch.stack(states)  # type: ignore[arg-type]


def _digest(*content: object) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def problems(data: DataConfig, sources: Sequence[Records]) -> Iterator[str]:
    """Why a stage cannot mine negatives from its sources."""
    mine = data.mine
    if not mine.every:
        return
    try:
        mine.check()
    except UserError as error:
        yield f"data.mine: {error}"
    if mine.num == 0:
        yield f"data.mine.every={mine.every} with data.mine.num=0 mines nothing"
    if data.max_negatives == 0:
        yield "data.mine needs data.max_negatives above 0: the number of negatives that a query gets in a step"
    for records in sources:
        if records.size is None:
            yield f"data.mine needs all records at hand, and {records.name} is a stream: read it without streaming"
