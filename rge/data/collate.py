"""Make this rank's batch: decode pictures, tokenise prompts, choose targets."""

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import ImageRef
from rge.common.schema import Item, Record, Target
from rge.config import SHARED, Recipe
from rge.content.config import VideoConfig
from rge.data.augment import AUGMENTATIONS
from rge.data.config import DataConfig, PromptedConfig
from rge.data.mixture import Draw, Mixture
from rge.data.sources import BadRecord, BrokenRecord, RecordError, Records, check_wording, identity
from rge.data.streams import Drawn, Reader, Stream
from rge.distributed import collectives as dist
from rge.model.families import with_pixels
from rge.model.prompts import Prompt, PromptBuilder
from rge.optim.config import StageConfig

Candidate = tuple[Prompt, int, float | None]
"""A candidate, its identity, and a judge's score of it for its query."""

StreamRows = Mapping[int, Mapping[int, Drawn]]
"""Rows of streams by number of the source and of the draw."""


class Named(NamedTuple):
    """A target of a source's records."""

    record: int  # number of the record
    is_positive: bool  # one of the record's positives, else of its negatives
    place: int  # among these

    def of(self, source: "Source") -> Target:
        """The target, read again."""
        record = source.record(self.record)
        return (record.positives if self.is_positive else record.negatives)[self.place]


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a step: lists over B queries and, of the candidates, over C."""

    record_ids: list[str]
    queries: list[Prompt]
    oracle_ids: list[list[int]]  # rationales as token ids, each ending with ``<emb>``; empty if not needed
    # C: each query's drawn positive, its other positives with ``data.positives=all``, its drawn negatives, query after query.
    candidates: list[Prompt]
    candidate_identity: list[int]  # C, see `rge.data.sources.identity`
    positive: list[int]  # columns of the queries' drawn positives among the candidates
    negatives: list[list[int]]  # columns of the query's labelled negatives, never masked
    right_answers: list[list[int]]  # identities of everything that answers the query
    seeds: list[int]  # for sampling
    more_positives: list[list[int]] = field(default_factory=list)  # columns; empty if one positive is drawn
    sources: list[int] = field(default_factory=list)  # number of each query's source
    # Of queries and of candidates, see `Source.group`: only those of one group are compared. Empty: all are.
    groups: list[int] = field(default_factory=list)
    candidate_groups: list[int] = field(default_factory=list)  # C
    # C, a judge's scores of the targets for their own query, None where there is none; empty if no target has one.
    scores: list[float | None] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)  # drawn, could not be used and were replaced


WHOLE_BYTES = 32 << 20
"""Pixels of a batch that stay in memory, and go to a device together. More are kept in a file, and read by what shows them."""


def in_file(file: Any, shape: Sequence[int]) -> Tensor:
    """Pixels (P, channels, height, width) of an open file; what was read of it takes no memory that the system cannot have back."""
    return torch.from_numpy(np.memmap(file, np.uint8, "c", shape=tuple(shape)))


class NoRoomError(UserError):
    """The disk for temporary files is full; no record is to blame."""


@contextmanager
def room_for_pixels() -> Iterator[None]:
    """Say what is full; a `NoRoomError`."""
    try:
        yield
    except OSError as error:
        raise NoRoomError(
            f"no room for the pixels of a batch in temporary files ({error}): set the variable TMPDIR to a folder of a larger disk",
            kind="TMPDIR",
        ) from error


class _Pixels:
    """Pixels of the prompts of a batch in the making, so that memory holds those of one picture and `WHOLE_BYTES`."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(WHOLE_BYTES, prefix="rge-pixels-")
        self._shape: tuple[int, ...] = (0,)
        self._places: dict[int, slice] = {}  # by the prompt that shows them

    def of(self, build: Callable[[Callable[[Tensor], None]], Prompt]) -> Prompt:
        """The prompt that `build` makes, without its pixels, which are written as it makes them."""
        start = self._shape[0]
        prompt = build(self._keep)
        if prompt.pixels is not None:
            self._keep(prompt.pixels)
            prompt = replace(prompt, pixels=None)
        if self._shape[0] > start:
            self._places[id(prompt)] = slice(start, self._shape[0])
        return prompt

    def _keep(self, pixels: Tensor) -> None:
        with room_for_pixels():
            self._file.write(pixels.contiguous().numpy().data)
        self._shape = (self._shape[0] + len(pixels), *pixels.shape[1:])

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forget what was kept of a record that turns out to be bad."""
        shape, end = self._shape, self._file.tell()
        try:
            yield
        except ValueError:
            self._shape = shape
            self._file.seek(end)
            self._file.truncate()
            self._places = {key: place for key, place in self._places.items() if place.stop <= shape[0]}
            raise

    def whole(self) -> Tensor:
        """All that were written."""
        with self._file as file:
            file.seek(0)
            if math.prod(self._shape) > WHOLE_BYTES:
                return in_file(file, self._shape)
            pixels = torch.empty(self._shape, dtype=torch.uint8)
            file.readinto(pixels.numpy().data)
            return pixels

    def given_back(self, batch: Batch) -> Batch:
        """The batch with the pixels of its prompts."""
        if not self._places:
            return batch
        pixels = self.whole()

        def filled(prompts: Sequence[Prompt]) -> list[Prompt]:
            places = [self._places.get(id(prompt)) for prompt in prompts]
            return [
                prompt if place is None else replace(prompt, pixels=pixels[place])
                for prompt, place in zip(prompts, places, strict=True)
            ]

        return replace(batch, queries=filled(batch.queries), candidates=filled(batch.candidates))


def _together(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Pixels as one tensor, and where each part begins; not copied if they are parts of one, as `_Pixels` makes them."""
    if not parts:
        return torch.empty(0, dtype=torch.uint8), []
    storage, size = parts[0].untyped_storage(), parts[0][0].numel()
    if any(part.untyped_storage().data_ptr() != storage.data_ptr() for part in parts):
        return torch.cat([*parts]), [*accumulate(map(len, parts), initial=0)][:-1]
    whole = parts[0].new_empty(0).set_(storage).view(-1, *parts[0].shape[1:])
    return whole, [part.storage_offset() // size for part in parts]


def flatten(batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """Flatten a batch for transfer, so that a device needs one copy instead of one for each array of each prompt.

    Returns:
        Everything but pixels, which pickles; (P, channels, height, width) uint8, or (0,) without pictures.
    """
    prompts = [*batch.queries, *batch.candidates]
    pixels, starts = _together([prompt.pixels for prompt in prompts if prompt.pixels is not None])
    grids = [prompt.image_grid for prompt in prompts if prompt.image_grid is not None]
    tokens = [torch.stack([prompt.input_ids, prompt.type_ids, *prompt.position_3T]) for prompt in prompts]
    head = {
        "rest": replace(batch, queries=[], candidates=[]),
        "num_queries": len(batch.queries),
        "names": [(prompt.id, prompt.num_cut_tokens) for prompt in prompts],
        "num_tokens": [len(prompt) for prompt in prompts],
        "num_patches": [0 if prompt.pixels is None else len(prompt.pixels) for prompt in prompts],
        "first_patches": starts,
        "num_pictures": [0 if prompt.image_grid is None else len(prompt.image_grid) for prompt in prompts],
        "token_5T": torch.cat(tokens, dim=1).numpy(),
        "grid_G3": torch.cat([torch.zeros(0, 3).long(), *grids]).numpy(),
    }
    return head, pixels


def unflatten(head: dict[str, Any], pixels: Tensor) -> Batch:
    """Inverse of `flatten`; the prompts' tensors are views."""
    num_queries = head["num_queries"]
    tokens = torch.from_numpy(head["token_5T"]).split(head["num_tokens"], dim=1)
    grids = torch.from_numpy(head["grid_G3"]).split(head["num_pictures"])
    starts, prompts = iter(head["first_patches"]), []
    of_prompts = zip(head["names"], tokens, head["num_patches"], grids, strict=True)
    for (name, num_cut), token_5T, count, grid_G3 in of_prompts:
        part, grid = (pixels[(start := next(starts)) : start + count], grid_G3) if count else (None, None)
        prompts.append(Prompt(name, token_5T[0], token_5T[1], token_5T[2:], part, grid, num_cut))
    return replace(head["rest"], queries=prompts[:num_queries], candidates=prompts[num_queries:])


def query_items(record: Record) -> list[Item]:
    """A record's query as items to embed: one for each of its wordings, its text first."""
    return [Item(record.id, content, record.instruction) for content in record.query.wordings]


def query_item(record: Record) -> Item:
    """A record's query, worded as its text, as an item to embed."""
    return query_items(record)[0]


def target_item(target: Target) -> Item:
    """A record's target as an item to embed."""
    return Item(target.id, target.parts)


def check_targets(record: Record) -> None:
    """Refuse (ValueError) a negative with the content of one of the record's positives: its label would push the answer away."""
    for negative in record.negatives:
        for positive in record.positives:
            if negative.parts == positive.parts:
                raise ValueError(
                    f"negative {negative.id!r} has the same content as positive {positive.id!r}, and no answer is both wrong and "
                    "right: remove one of them"
                )


@dataclass(frozen=True)
class Source:
    """Records, and how they become prompts."""

    records: Records
    builder: PromptBuilder  # with the source's own profile, picture sizes and maximum length
    settings: DataConfig  # the source's own, the recipe's where it has none
    instruction: str | None = None  # of all its queries, "" for none; None: the records' own
    # Candidates of one group are in-batch negatives of its queries; a candidate of another group is not compared with them.
    group: int = 0
    title: str | None = None  # None: the records' name

    @property
    def name(self) -> str:
        """Its name in logs."""
        return self.title or self.records.name

    def record(self, index: int) -> Record:
        """The record at `index`, as it is trained on; errors as of `Records`, and those of `check_wording`."""
        record = self.records[index]
        check_wording(record, self.records.name, self.settings.profile)
        return self.asked(record)

    def asked(self, record: Record) -> Record:
        """The record with the source's instruction."""
        if self.instruction is None:
            return record
        return record.model_copy(update={"instruction": self.instruction or None})


@dataclass(frozen=True, slots=True)
class _Row:
    """One record's contribution to a batch."""

    source: int
    record_id: str
    seed: int
    query: Prompt
    oracle_ids: list[int]
    right_answers: list[int]
    # Prompts and identities of the drawn positive, of other positives and of negatives; empty if none are needed.
    candidates: Sequence[Sequence[Candidate]]


MAX_REPLACEMENTS = 16
"""Consecutive bad records after which the source itself is considered bad, such as a folder that is not mounted."""


class Collator:
    """Makes batches of records: pictures decoded, prompts tokenised, targets drawn.

    `sources` are numbered in draws. `need_oracle`: tokenise oracle rationales; `need_candidates`: draw targets.
    """

    def __init__(self, sources: Sequence[Source], *, need_oracle: bool = True, need_candidates: bool = True):
        self.sources = list(sources)
        # Further negatives, by number of the source and of the record, see `rge.mining.refresh`.
        self.mined: Mapping[tuple[int, int], Sequence[Named]] = {}
        self.need_oracle, self.need_candidates = need_oracle, need_candidates

    @property
    def names(self) -> list[str]:
        """Distinct names of the sources."""
        names = [source.name for source in self.sources]
        return [
            f"{name} ({number + 1})" if name in names[:number] else name for number, name in enumerate(names)
        ]

    def collate(self, draws: Sequence[Draw], drawn: Collection[Draw] = ()) -> Batch:
        """Make the batch of these draws.

        Raises:
            RecordError: a record is bad and ``data.on_bad=stop``, or too many consecutive ones are.
        """
        bad: list[BadRecord] = []
        taken = {(draw.source, draw.index) for draw in drawn or draws}
        pixels = _Pixels()
        rows = [self._row_or_another(draw, taken, bad, pixels) for draw in draws]
        batch = _batch_of(rows, bad, by_length=self.sources[0].settings.sort_by_length)
        batch = pixels.given_back(batch)
        groups = [source.group for source in self.sources]
        if len(set(groups)) == 1:
            return replace(batch, candidate_groups=[])
        return replace(
            batch,
            groups=[groups[source] for source in batch.sources],
            candidate_groups=[groups[source] for source in batch.candidate_groups],
        )

    def _row_or_another(
        self, draw: Draw, taken: Collection[tuple[int, int]], bad: list[BadRecord], pixels: _Pixels
    ) -> _Row:
        """The row of the drawn record, or of a replacement from its source if it is bad.

        The draw alone decides which one, so that it is the same on any number of processes and after a resume.
        """
        source, tries = self.sources[draw.source], 0
        file = source.records
        for tries, chosen in enumerate(replacements(draw, file.replacements_of(draw.index), taken), start=1):  # noqa: B007 - counts them
            record, problem = None, ValueError()
            try:
                record = source.record(chosen.index)
            except BrokenRecord as error:
                problem = error
            if record is not None:
                try:
                    with pixels.undone_on_error():
                        return self._row(chosen, record, pixels)
                except NoRoomError:
                    raise
                except ValueError as error:
                    problem = error
            place, name = file.place(chosen.index), None if record is None else record.id
            if source.settings.on_bad == "stop":
                named = place if name is None else repr(name)
                raise RecordError.caused_by(problem, file.name, f"record {named}") from problem
            bad.append(BadRecord(file.name, place, name, str(problem)))
        raise RecordError(
            f"{tries} records, each drawn to replace the last, were all bad, so data.on_bad=skip gives up; this is the last: "
            f"{bad[-1].reason}",
            file.name,
            f"record {bad[-1].id!r}",
        ).about("data.on_bad")

    def _row(self, draw: Draw, record: Record, pixels: _Pixels) -> _Row:
        source, generator = self.sources[draw.source], np.random.default_rng(draw.seed)
        if self.need_candidates:
            check_targets(record)
        drawn = int(generator.integers(len(record.positives)))
        rationale = record.positives[drawn].rationale or ""
        query = _prompt(source, _worded(record, draw.seed), "query", generator, pixels)
        oracle_ids = source.builder.rationale_ids(rationale, record.id) if self.need_oracle else []
        mined = self.mined.get((draw.source, draw.index), ())
        candidates = (
            _candidates(source, record, drawn, mined, generator, pixels) if self.need_candidates else ()
        )
        right_answers = sorted({identity(target) for target in record.positives})
        return _Row(draw.source, record.id, draw.seed, query, oracle_ids, right_answers, candidates)


def _candidates(
    source: Source,
    record: Record,
    drawn: int,
    mined: Sequence[Named],
    generator: np.random.Generator,
    pixels: _Pixels,
) -> list[list[Candidate]]:
    positives, negatives = record.positives, [*record.negatives, *mined]

    def candidate(target: Target | Named) -> Candidate:
        if isinstance(target, Named):
            target = target.of(source).model_copy(update={"score": None})
        prompt = _prompt(source, target_item(target), "candidate", generator, pixels)
        return prompt, identity(target), target.score

    shown = candidate(positives[drawn])
    rest = positives[:drawn] + positives[drawn + 1 :] if source.settings.positives == "all" else []
    others = [candidate(target) for target in rest]
    count = min(source.settings.max_negatives, len(negatives))
    chosen = generator.choice(len(negatives), size=count, replace=False).tolist() if count else []
    return [[shown], others, [candidate(negatives[place]) for place in chosen]]


def _prompt(source: Source, item: Item, side: str, generator: np.random.Generator, pixels: _Pixels) -> Prompt:
    name = source.settings.augment

    def load(ref: ImageRef) -> Image.Image:
        image = load_image(ref)
        if name != "none":
            image = AUGMENTATIONS[name](image, int(generator.integers(2**63)))
            if not isinstance(image, Image.Image):
                raise RecordError(f"data.augment={name} must return a picture, got {image!r}").about(
                    "data.augment"
                )
        return image

    return pixels.of(partial(source.builder.build, item, side, load))


def _batch_of(rows: Sequence[_Row], bad: list[BadRecord], *, by_length: bool) -> Batch:
    """Put rows together, queries and candidates each sorted by prompt length if asked.

    `Batch.candidate_groups` are the numbers of the candidates' sources.
    """
    found = [candidate for row in rows for group in row.candidates for candidate in group]
    owners = [row.source for row in rows for group in row.candidates for _ in group]
    order = sorted(range(len(found)), key=lambda place: len(found[place][0]) if by_length else 0)
    column_of = {place: column for column, place in enumerate(order)}
    places = iter(range(len(found)))
    placed = [(row, [[column_of[next(places)] for _ in group] for group in row.candidates]) for row in rows]
    placed.sort(key=lambda pair: len(pair[0].query) if by_length else 0)
    rows, columns = [row for row, _ in placed], [groups for _, groups in placed if groups]
    return Batch(
        record_ids=[row.record_id for row in rows],
        queries=[row.query for row in rows],
        oracle_ids=[row.oracle_ids for row in rows],
        candidates=[found[place][0] for place in order],
        candidate_identity=[found[place][1] for place in order],
        positive=[column for (column,), _, _ in columns],
        negatives=[negatives for _, _, negatives in columns],
        right_answers=[row.right_answers for row in rows],
        seeds=[row.seed for row in rows],
        more_positives=[others for _, others, _ in columns],
        sources=[row.source for row in rows],
        candidate_groups=[owners[place] for place in order],
        scores=[found[place][2] for place in order] if any(one[2] is not None for one in found) else [],
        bad=bad,
    )


def _worded(record: Record, seed: int) -> Item:
    """The query in one of its wordings, each as likely; a draw's other chances do not depend on how many there are."""
    items = query_items(record)
    return items[int(np.random.default_rng([seed, _WORDING]).integers(len(items)))]


def replacements(draw: Draw, others: Sequence[int], taken: Collection[tuple[int, int]]) -> Iterator[Draw]:
    """Yield the draw, then replacements among `others` of its source; those already `taken` last."""
    yield draw
    count = min(len(others), MAX_REPLACEMENTS + len(taken) + 1)
    chance = np.random.default_rng([draw.seed, _REPLACEMENT])
    indices = [others[place] for place in chance.choice(len(others), size=count, replace=False).tolist()]
    indices.sort(key=lambda index: (draw.source, index) in taken)  # stable: the order stays random
    for index in [index for index in indices if index != draw.index][:MAX_REPLACEMENTS]:
        yield replace(draw, index=index)


_REPLACEMENT, _WORDING = 0xBAD, 0x3A1D
"""Salts: make the draws of replacements and wordings independent of other uses of a draw's seed."""


def problems(recipe: Recipe, stages: Sequence[str], num_processes: int) -> Iterator[str]:
    """Batching problems of all stages: unknown augmentations, batches with fewer queries than processes."""
    if recipe.data.augment != "none" and recipe.data.augment not in AUGMENTATIONS:
        yield f"data.augment must be one of none, {', '.join(AUGMENTATIONS)}, got {recipe.data.augment!r}"
    sizes = {f"{name}.batch_size": getattr(recipe, name).batch_size for name in stages}
    for key, size in sizes.items():
        if size < num_processes:
            yield f"{key}={size} leaves some of the {num_processes} processes without a query; raise it, or launch fewer"


class StepBatches(Collator):
    """Batches by step number, for one rank: `batches[step]` is this rank's share of the step's global batch.

    `sources` are in the order of the mixture. A step's rows of streams can be read in one process (`read`), and its batch made
    in another (`make`).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        mixture: Mixture,
        *,
        rank: int,
        world_size: int,
        **needs: bool,
    ):
        assert mixture.batch_size >= world_size, "refused before training, see `problems`"
        # A source that is given twice has two positions.
        self.readers = {
            number: source.records.reader()
            for number, source in enumerate(sources)
            if isinstance(source.records, Stream)
        }
        read = [
            replace(source, records=self.readers.get(number, source.records))
            for number, source in enumerate(sources)
        ]
        super().__init__(read, **needs)
        self.mixture = mixture
        # Shares differ by at most one; losses are means over all queries, so every query weighs the same.
        self.share = slice(*(end * mixture.batch_size // world_size for end in (rank, rank + 1)))

    def __getitem__(self, step: int) -> Batch:
        """This rank's batch of a step."""
        return self.make(step, self.read(step))

    def read(self, step: int) -> StreamRows:
        """The rows of streams in this rank's batch of a step."""
        if not self.readers:
            return {}
        drawn = self.mixture.batch(step)[self.share]
        return {
            source: reader.read([draw.index for draw in drawn if draw.source == source])
            for source, reader in self.readers.items()
        }

    def make(self, step: int, rows: StreamRows) -> Batch:
        """This rank's batch of a step, from what `read` returned for it."""
        for source, given in rows.items():
            self.readers[source].give(given)
        drawn = self.mixture.batch(step)
        return self.collate(drawn[self.share], drawn)

    @property
    def records(self) -> list[Records]:
        """The sources' records; of streams their readers."""
        return [source.records for source in self.sources]

    def coverage(self, step: int) -> dict[str, dict[str, float | None]]:
        """By source, after so many steps: passes over it, how many of its records were drawn, and how many never were.

        None where the number of a stream's records is not known yet.
        """
        passes: dict[str, float | None] = {}
        seen: dict[str, float | None] = {}
        unseen: dict[str, float | None] = {}
        for number, drawn in enumerate(self.mixture.drawn_before(step)):
            source, name = self.sources[number], self.names[number]
            file = source.records
            size = file.stream.num_rows() if isinstance(file, Reader) else len(file)
            passes[name] = None if size is None else round(drawn / size, 4)
            seen[name] = drawn if size is None else min(drawn, size)
            unseen[name] = None if size is None else max(size - drawn, 0)
        return {"passes": passes, "rows_seen": seen, "rows_never_seen": unseen}


class PromptBuilders:
    """The prompt builders of a recipe's sources; those with equal settings share one."""

    def __init__(self, processor: Any, recipe: Recipe):
        self.processor, self.recipe = processor, recipe
        self._made: dict[tuple, PromptBuilder] = {}

    def __call__(self, source: PromptedConfig | None = None) -> PromptBuilder:
        """The builder of a source; without one, that of the recipe's own settings."""
        own = self.recipe.resolved(source or PromptedConfig())
        key = own.profile, own.max_prompt_tokens, own.min_pixels, own.max_pixels, own.video
        if key not in self._made:
            profile, max_tokens, least, most, video = cast(
                "tuple[str, int, int, int, VideoConfig]", key
            )  # resolved
            processor, model = self.processor, self.recipe.model
            if (least, most) != (model.min_pixels, model.max_pixels):
                processor = with_pixels(processor, least, most)
            self._made[key] = PromptBuilder(
                processor,
                profile,
                max_tokens,
                max_rationale_tokens=self.recipe.max_rationale_tokens,
                video=video,
            )
        return self._made[key]

    def source(self, config: PromptedConfig, records: Records, group: int = 0, **data: Any) -> Source:
        """An opened source; `data` changes settings of all sources, such as `DataConfig.augment`."""
        own = vars(self.recipe.resolved(config))
        settings = {name: own[name] for name in SHARED if name in own and hasattr(self.recipe.data, name)}
        return Source(
            records,
            self(config),
            replace(self.recipe.data, **settings | data),
            config.instruction,
            group,
            config.name,
        )


def mixture_of(stage: StageConfig, files: Sequence[Records], seed: int) -> Mixture:
    """The draws of a stage from its open sources."""
    sizes = [file.size for file in files]
    return Mixture(
        sizes,
        stage.weights(sizes),
        stage.batch_size,
        seed,
        groups=stage.groups,
        sub_batches=stage.sub_batches,
    )


def make_batches(
    recipe: Recipe, stage: StageConfig, processor: Any, records: Mapping[str, Records], **needs: bool
) -> StepBatches:
    """Sources of a stage, their mixture and this rank's share of every step; `needs` are the objective's."""
    files = [records[source.key] for source in stage.sources if source.key]
    mixture, builders = mixture_of(stage, files, recipe.train.seed), PromptBuilders(processor, recipe)
    groups = [0] * len(files) if stage.compare_across else stage.groups
    sources = [
        builders.source(config, file, group)
        for config, file, group in zip(stage.sources, files, groups, strict=True)
    ]
    return StepBatches(sources, mixture, rank=dist.rank(), world_size=dist.world_size(), **needs)
