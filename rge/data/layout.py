"""Prompt and rationale lengths of every record in training, from headers of files and texts alone.

The code that makes prompts (`rge.model.prompts`) decides wording, tokens, cuts and refusals; no picture is decoded. Many
records are laid out on all cores.
"""

import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rge.common.commands import progress_bar
from rge.common.images import picture_bytes, picture_size
from rge.common.parts import (
    Content,
    ImagePart,
    ImageRef,
    Part,
    TextPart,
    is_short,
    part_to_json,
    pictures_of,
    refs_of,
    text_of,
)
from rge.common.schema import Item, Record, Target
from rge.config import Recipe
from rge.data.collate import Source, check_targets, query_items, target_item
from rge.data.sources import RecordError, Records, identity, number_of, on_disk
from rge.data.verdicts import Verdicts, forked
from rge.identity.run_identity import version_of
from rge.model import backbone, families, prompts
from rge.model.prompts import Measured, PromptBuilder

T = TypeVar("T")

FEW = 2000
"""Up to this number of records, starting processes takes longer than the layout."""

SAMPLE, AT_MOST_S = 20_000, 300.0
"""If measuring this many records, drawn at random, shows that all would take longer than this many seconds, they stand for all."""

LONGEST = 10
"""Number of longest records in the summary."""

COLUMNS = tuple(
    "query query_pictures candidate candidate_pictures pictures rationale cut prompts negatives id asks rights wordings".split()
)
"""Per record: tokens of its query and its longest candidate, and of their pictures; most pictures of a prompt; tokens of its
longest rationale, `<emb>` included; number of cut prompts and of all; labelled negatives; hashes of its id, of its query with the
instruction, and of the identities of its right answers; further wordings of the query."""

SUMS = tuple(
    f"{side} {what}"
    for side in ("query", "positive", "negative")
    for what in "tokens squares pictures compared".split()
)
"""Of prompts of a query, of all positives and of all negatives: their tokens, the squares of these, their picture tokens, and
`Measured.num_compared`."""


@dataclass
class Layout:
    """Layout statistics of a source."""

    sizes_NK: np.ndarray  # int64, a row per usable record; see `COLUMNS`
    numbers_N: np.ndarray  # of these records in the source
    faults: dict[int, str] = field(default_factory=dict)  # by record number, why it cannot be trained on
    # int64, a row per target if these are needed, record after record: hashes of identity and content, and whether an
    # identity is given.
    targets_T3: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    # int64, hashes of the queries in their further wordings, record after record, as in the column ``asks``
    reworded_W: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Records of the source, of which those above are a random sample; None: they are all.
    sample_of: int | None = None
    # int64, of these records, see `SUMS`
    sums: np.ndarray = field(default_factory=lambda: np.zeros(len(SUMS), np.int64))

    @property
    def unseen(self) -> float:
        """Upper bound, with 95 % confidence, of the share of records unlike all in the sample, such as longer ones; 0 of all."""
        measured = len(self.numbers_N) + len(self.faults)
        return 0.0 if self.sample_of is None else 1 - 0.05 ** (1 / measured)

    def column(self, name: str) -> np.ndarray:
        """One of `COLUMNS`."""
        return self.sizes_NK[:, COLUMNS.index(name)]

    def sums_of(self, side: str) -> np.ndarray:
        """(4,) the sums of ``query``, ``positive`` or ``negative``."""
        return self.sums.reshape(3, -1)[("query", "positive", "negative").index(side)]


def lay_out(
    source: Source, *, need_oracle: bool, need_candidates: bool, sample: bool = True, most: int | None = None
) -> Layout:
    """Lay out the records of a source of known length.

    They are all, or with `sample` only `SAMPLE` if all would take too long, or at most `most`.
    """
    file, measure = source.records, partial(_sizes, source, need_oracle, need_candidates)
    rows, numbers, reworded, targets = array("q"), array("q"), array("q"), array("q")
    faults: dict[int, str] = {}
    some: dict[int, list[int] | str] = {}
    sums = np.zeros(len(SUMS), np.int64)
    order: Sequence[int] = range(len(file))
    if most is not None and len(file) > most:
        order = _drawn(len(file), most)
    elif sample and len(file) > SAMPLE:
        drawn = _drawn(len(file), SAMPLE)
        began = time.perf_counter()
        some = dict(zip(drawn, on_all_cores(measure, drawn), strict=True))
        if (time.perf_counter() - began) / SAMPLE * len(file) > AT_MOST_S:
            order = drawn
    rest = on_all_cores(measure, [number for number in order if number not in some] if some else order)
    for number in order:
        found = some.pop(number) if number in some else next(rest)
        if isinstance(found, str):
            faults[number] = found
        else:
            rows.extend(found[: len(COLUMNS)])
            start = len(COLUMNS) + len(SUMS)
            sums += found[len(COLUMNS) : start]
            end = start + found[COLUMNS.index("wordings")]
            reworded.extend(found[start:end])
            targets.extend(found[end:])
            numbers.append(number)
    sizes_NK = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
    return Layout(
        sizes_NK,
        np.array(numbers, dtype=np.int64),
        faults,
        on_disk(targets).reshape(-1, 3),
        on_disk(reworded),
        len(file) if isinstance(order, list) else None,
        sums,
    )


def _drawn(size: int, most: int) -> list[int]:
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False)).tolist()


def on_all_cores(measure: Callable[[Any], T], items: Sequence[Any]) -> Iterator[T]:
    """`measure` of each item, in order; of few in this process."""
    few = len(items) <= FEW
    with (
        progress_bar(total=len(items), desc="lengths", unit="record", disable=few) as bar,
        nullcontext(partial(map, measure)) if few else forked(measure, chunksize=64) as each,
    ):
        for found in each(items):
            bar.update(1)
            yield found


def settings_of(builder: PromptBuilder, *asked: object) -> str:
    """Everything a layout depends on except records and pictures: its cache key in `rge.data.verdicts`."""
    processor, tokenizer = builder.processor, builder.tokenizer
    return json.dumps(
        [
            tokenizer.backend_tokenizer.to_str(),
            processor.image_processor.to_dict(),
            processor.chat_template,
            type(processor).__name__,
            asdict(builder.profile),
            builder.max_tokens,
            builder.max_rationale_tokens,
            asdict(builder.video),
            COLUMNS,
            SUMS,
            version_of(backbone, prompts, families, sys.modules[__name__]),
            asked,
        ],
        default=str,
    )


def lay_out_once(
    source: Source,
    verdicts: Verdicts,
    *,
    need_oracle: bool,
    need_candidates: bool,
    sample: bool = True,
    most: int | None = None,
) -> Layout:
    """`lay_out`, cached for the same records and settings if it found no problem.

    A sample that is cached does not serve without `sample`, and one of at most `most` is not cached.
    """
    file, asked = (
        source.records,
        settings_of(source.builder, need_oracle, need_candidates, source.instruction),
    )
    if (known := verdicts.numbers(file, asked)) is not None and (sample or not known[1]):
        count, sample_of = known[:2].tolist()
        sums, numbers, sizes, rest = np.split(
            known[2:], np.cumsum([len(SUMS), count, count * len(COLUMNS)]).tolist()
        )
        laid = Layout(sizes.reshape(-1, len(COLUMNS)), numbers, sample_of=sample_of or None, sums=sums)
        reworded, targets = np.split(rest, [laid.column("wordings").sum()])
        laid.reworded_W, laid.targets_T3 = on_disk(reworded), on_disk(targets).reshape(-1, 3)
        return laid
    laid = lay_out(source, need_oracle=need_oracle, need_candidates=need_candidates, sample=sample, most=most)
    if not laid.faults and (most is None or laid.sample_of is None):
        head = np.array([len(laid.sizes_NK), laid.sample_of or 0, *laid.sums])
        parts = (head, laid.numbers_N, laid.sizes_NK.ravel(), laid.reworded_W, laid.targets_T3.ravel())
        verdicts.keep_numbers(file, asked, np.concatenate(parts))
    return laid


def _sizes(source: Source, need_oracle: bool, need_candidates: bool, number: int) -> list[int] | str:
    record, file = None, source.records
    try:
        record = source.asked(file[number])
        return _measured(record, source.builder, need_oracle, need_candidates)
    except ValueError as error:
        name = file.place(number) if record is None else repr(record.id)
        return str(RecordError.caused_by(error, file.name, f"record {name}"))


def measured(builder: PromptBuilder, item: Item, side: str) -> Measured:
    """The size of an item's prompt, from the headers of its pictures; errors as of `PromptBuilder.build`."""
    return builder.measure(item, side, _size_of)


def _measured(record: Record, builder: PromptBuilder, need_oracle: bool, need_candidates: bool) -> list[int]:
    if need_candidates:
        check_targets(record)
    measure = partial(measured, builder)
    # The longest wording, since any of them may be drawn.
    query = max((measure(item, "query") for item in query_items(record)), key=lambda size: size.num_tokens)
    targets = (*record.positives, *record.negatives) if need_candidates else ()
    candidates = [measure(target_item(target), "candidate") for target in targets]
    sides = ([query], candidates[: len(record.positives)], candidates[len(record.positives) :])
    oracles = [target.rationale or "" for target in record.positives if need_oracle]
    rationales = [len(builder.rationale_ids(oracle, record.id)) for oracle in oracles]
    asks, *reworded = (_content(content, record.instruction or "") for content in record.query.wordings)
    return [
        query.num_tokens,
        query.num_picture_tokens,
        max((one.num_tokens for one in candidates), default=0),
        max((one.num_picture_tokens for one in candidates), default=0),
        max(one.num_pictures for one in (query, *candidates)),
        max(rationales, default=0),
        sum(one.num_cut_tokens > 0 for one in (query, *candidates)),
        1 + len(candidates),
        len(record.negatives),
        number_of(record.id),
        asks,
        number_of(json.dumps(sorted({identity(target) for target in record.positives}))),
        len(reworded),
        *(total for side in sides for total in _totals(side)),
        *reworded,
        *(number for target in targets for number in _names(target)),
    ]


def _totals(prompts: Sequence[Measured]) -> Iterator[int]:
    """Of one side's prompts what `SUMS` adds up."""
    for of_prompt in (
        lambda one: one.num_tokens,
        lambda one: one.num_tokens**2,
        lambda one: one.num_picture_tokens,
        lambda one: one.num_compared,
    ):
        yield sum(map(of_prompt, prompts))


def _names(target: Target) -> tuple[int, int, int]:
    """A row of `Layout.targets_T3`."""
    return identity(target), _content(target.parts), int(target.identity is not None)


def _content(content: Content, *more: str) -> int:
    order = () if is_short(content) else map(_told, content)
    return number_of(
        "\0".join([*more, *order, text_of(content) or "", *map(_picture_name, pictures_of(content))])
    )


def _told(part: Part) -> str:
    """A part's kind, and of a document or clip its files and what is shown of them."""
    if isinstance(part, TextPart | ImagePart):
        return type(part).__name__
    asked = {name: value for name, value in part_to_json(part).items() if name not in ("pdf", "video")}
    return f"{type(part).__name__} {asked} {list(map(_picture_name, refs_of(part)))}"


def _picture_name(ref: ImageRef) -> str:
    """Of bytes and rows of libraries their hash; of a file its name, size and beginning, since it may be in several folders."""
    if isinstance(ref, bytes):
        return hashlib.sha256(ref).hexdigest()
    if ".parquet#" in ref:  # libraries of one name in several folders may have different pictures under an id
        return _hash_of_row(ref)
    found = os.stat(ref)
    return f"{Path(ref).name} {found.st_size} {_beginning(ref, found.st_size, found.st_mtime_ns)}"


@lru_cache(maxsize=1 << 16)
def _hash_of_row(ref: str) -> str:
    return hashlib.sha256(picture_bytes(ref)).hexdigest()


@lru_cache(maxsize=1 << 16)
def _beginning(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(4096)).hexdigest()


def clashes(laid: Sequence[tuple[Records, Layout]]) -> list[str]:
    """Warnings of sources with equal ids of different records."""
    lines = []
    for (one, layout), (other, theirs) in combinations(laid, 2):
        _, at, there = np.intersect1d(layout.column("id"), theirs.column("id"), return_indices=True)
        apart = layout.column("asks")[at] != theirs.column("asks")[there]
        if apart.any():
            record = one[int(layout.numbers_N[at[apart].min()])]
            lines.append(
                f"warning: {apart.sum():,} records of {one.name} and {other.name} have the same id and different queries, such as "
                f"{record.id!r}: logs cannot tell them apart"
            )
    return lines


def _size_of(ref: ImageRef) -> tuple[int, int]:
    return _size_of_file(ref) if isinstance(ref, str) else picture_size(ref)


_size_of_file = lru_cache(maxsize=1 << 16)(picture_size)


def summary(found: Sequence[tuple[Records, Layout]], recipe: Recipe) -> list[str]:
    """Summarise prompt and rationale lengths of several sources as text."""
    laid = [(file, layout) for file, layout in found if len(layout.sizes_NK)]
    if not laid:
        return []

    def column(name: str) -> np.ndarray:
        return np.concatenate([layout.column(name) for _, layout in laid])

    lines = [
        f"{file.name}: the lengths of {len(layout.numbers_N) + len(layout.faults):,} of {layout.sample_of:,} records, drawn at random; "
        f"with 95 % confidence, at most {layout.unseen:.2g} of the records are longer than all of these. Measuring all would take more "
        f"than {AT_MOST_S / 60:g} minutes (`rge check pictures=true` does); the others are checked as they are drawn"
        for file, layout in laid
        if layout.sample_of is not None
    ]
    told = len(lines)
    lines.append(f"tokens per query prompt: {_spread(column('query'))}")
    if column("candidate").any():
        lines[told] += f"; per record's longest candidate: {_spread(column('candidate'))}"
    pictures, rationales = column("pictures"), column("rationale")
    lines[told] += f"; pictures per prompt: {pictures.mean():.1f} on average, at most {pictures.max()}"
    if rationales.any():
        cap = recipe.rollout.max_new_tokens
        lines.append(
            f"tokens per rationale: {_spread(rationales)}; {(rationales > cap).mean():.1%} longer than the model may generate "
            f"(rollout.max_new_tokens={cap})"
        )
    cut, count = column("cut").sum(), column("prompts").sum()
    stages = [getattr(recipe, name) for name in recipe.stages()]
    limits = {recipe.resolved(source).max_prompt_tokens for stage in stages for source in stage.sources}
    limit = (
        f"data.max_prompt_tokens={limits.pop()}" if len(limits) == 1 else "their source's max_prompt_tokens"
    )
    lines.append(f"{cut / count:.1%} of {count:,} prompts are cut to {limit}")
    total = column("query") + column("candidate") + rationales
    ends = np.cumsum([len(layout.sizes_NK) for _, layout in laid])
    named = []
    for place in np.argsort(-total, kind="stable")[:LONGEST].tolist():
        source = int(np.searchsorted(ends, place, side="right"))
        file, layout = laid[source]
        number = layout.numbers_N[place - (ends[source] - len(layout.sizes_NK))]
        named.append(f"{file[int(number)].id} {total[place]:,}")
    lines.append(f"longest records, tokens of query, candidate and rationale: {', '.join(named)}")
    return lines


def _spread(values: np.ndarray) -> str:
    low, middle, high = (int(np.quantile(values, share, method="nearest")) for share in (0, 0.5, 0.95))
    return f"{low:,} to {int(values.max()):,}, median {middle:,}, 95 % at most {high:,}"
