"""Sizes of a stage's prompts: measured from the headers of its records, as before training, or assumed.

FLOPs and time follow from the mean prompt, memory from the largest. What 95 % of the prompts need is the lower end of the memory's range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rge.common.errors import RecipeError, UserError, brief
from rge.common.files import find_shipped
from rge.config import Recipe
from rge.data.collate import PromptBuilders
from rge.data.config import RecordsConfig, SourceConfig
from rge.data.layout import Layout, lay_out_once
from rge.data.readers import open_records
from rge.data.sources import Records
from rge.data.verdicts import Verdicts
from rge.model.backbone import processor_to_train
from rge.objective import Objective
from rge.optim.config import StageConfig
from rge.plan.costs import PictureCost
from rge.plan.options import PlanOptions

MEASURED = 2000
"""Records of a source that `rge plan` measures, drawn at random, unless a training's checks have measured all."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the prompts in a step."""

    query: float  # tokens of a query's prompt, pictures included
    query_pictures: float  # tokens of its pictures
    candidate: float
    candidate_pictures: float
    rationale: int  # tokens of an oracle rationale without `<emb>`
    positives: float  # of a query, if all are used
    negatives: float  # that are drawn
    query_spread: float = 0.0  # variance of `query`
    candidate_spread: float = 0.0


@dataclass(frozen=True)
class PromptSizes:
    """Sizes of a stage's prompts."""

    mean: Sizes
    origin: str  # where they come from, for people
    high: Sizes | None = None  # at most these in 95 % of the records; None: assumed sizes are the largest
    most: Sizes | None = None
    # Tokens of the picture whose passes through a vision tower cost what the records' do; None: of one at `max_pixels`.
    picture: float | None = None
    records: int | None = None  # of all sources
    targets: float | None = None  # of these

    @property
    def is_measured(self) -> bool:
        """Whether they are those of records."""
        return self.most is not None

    @property
    def table(self) -> dict[str, list[float]]:
        """By kind the mean, what 95 % have at most, and the maximum; empty if they are assumed."""
        if self.high is None or self.most is None:
            return {}
        names = [each.name for each in fields(Sizes) if not each.name.endswith("_spread")]
        return {name: [getattr(size, name) for size in (self.mean, self.high, self.most)] for name in names}


def measured(recipe: Recipe, name: str, num_gpus: int) -> PromptSizes | str:
    """Sizes of a stage's prompts by the headers of its sources' files; why not, if some of these are not on this machine."""
    stage: StageConfig = getattr(recipe, name)
    objective, verdicts = Objective.of(recipe, name), Verdicts()
    if not stage.sources:
        return f"{name} has no sources"
    if away := [source.label for source in stage.sources if not _is_here(source)]:
        return f"not on this machine: {', '.join(away)}"
    if streams := [source.label for source in stage.sources if source.streaming]:
        return f"measured as they are read: {', '.join(streams)}"
    try:
        builders = PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)
        files = [_opened(source, verdicts, recipe, objective.needs_oracle) for source in stage.sources]
        layouts = [
            lay_out_once(
                builders.source(source, file), verdicts, need_oracle=objective.needs_oracle,
                need_candidates=objective.needs_candidates, most=MEASURED,
            )
            for source, file in zip(stage.sources, files, strict=True)
        ]  # fmt: skip
    except (UserError, OSError) as error:
        return brief(str(error)).partition("\n")[0]
    if not all(len(layout.sizes_NK) for layout in layouts):
        return "no record of a source can be trained on; `rge check` says why"
    return sizes_of(recipe, stage, files, layouts, -(-stage.batch_size // num_gpus))


def _is_here(source: RecordsConfig) -> bool:
    named = source.path or source.dataset
    return named is None or find_shipped(named).exists()


def _opened(source: SourceConfig, verdicts: Verdicts, recipe: Recipe, needs_oracle: bool) -> Records:
    checks: Any = {"need_rationale": needs_oracle, "on_bad": recipe.data.on_bad}
    if source.lines is not None:
        return verdicts.open(source.lines, **checks)
    return open_records(source, pictures=verdicts.pictures, progress=True, **checks)


@dataclass
class _Side:
    """Means over one side's prompts, see `rge.data.layout.SUMS`."""

    tokens: float = 0.0
    squares: float = 0.0
    pictures: float = 0.0
    compared: float = 0.0
    weight: float = 0.0

    def add(self, sums: np.ndarray, count: float, weight: float) -> None:
        """Add `count` prompts with these sums, which weigh as much as said together."""
        for name, total in zip(("tokens", "squares", "pictures", "compared"), sums.tolist(), strict=True):
            setattr(self, name, getattr(self, name) + weight * total / max(count, 1))
        self.weight += weight

    def mean(self, name: str) -> float:
        """Of one prompt."""
        return getattr(self, name) / self.weight if self.weight else 0.0

    @property
    def spread(self) -> float:
        """Variance of the tokens."""
        return max(self.mean("squares") - self.mean("tokens") ** 2, 0.0)


def sizes_of(
    recipe: Recipe, stage: StageConfig, files: Sequence[Records], layouts: Sequence[Layout], queries_each: int
) -> PromptSizes:
    """Sizes of a stage's prompts from the layouts of its sources, each with its share of the batches.

    At most: of as many records as a rank has queries, those with the most targets.
    """
    weights = np.array(stage.weights([file.size for file in files]))
    shares = weights / weights.sum()
    every = {
        name: np.concatenate([layout.column(name) for layout in layouts])
        for name in ("query", "query_pictures", "candidate", "candidate_pictures", "rationale")
    }
    share_N = np.concatenate(
        [
            np.full(len(one.sizes_NK), share / len(one.sizes_NK))
            for one, share in zip(layouts, shares, strict=True)
        ]
    )
    positives_N, negatives_N = (
        np.concatenate(
            [count(recipe, source, one) for source, one in zip(stage.sources, layouts, strict=True)]
        )
        for count in (_positives, _negatives)
    )
    queries, candidates, start = _Side(), _Side(), 0
    for layout, share in zip(layouts, shares, strict=True):
        size = len(layout.sizes_NK)
        here, negatives = slice(start, start + size), layout.column("negatives").sum()
        start += size
        queries.add(layout.sums_of("query"), size, share)
        all_positives = (layout.column("prompts") - 1).sum() - negatives
        candidates.add(layout.sums_of("positive"), all_positives, share * positives_N[here].mean())
        if negatives:
            candidates.add(layout.sums_of("negative"), negatives, share * negatives_N[here].mean())
    pictures = queries.pictures + candidates.pictures  # per query

    def at(values: np.ndarray, quantile: float) -> float:
        order = np.argsort(values, kind="stable")
        place = np.searchsorted(np.cumsum(share_N[order]), quantile * (1 - 1e-9))
        return float(values[order[min(int(place), len(order) - 1)]])

    def up_to(quantile: float) -> Sizes:
        found = {name: at(values, quantile) for name, values in every.items()}
        return Sizes(
            **found | {"rationale": _words(found["rationale"])},  # type: ignore[arg-type]
            positives=_of_largest(positives_N, queries_each, quantile),
            negatives=_of_largest(negatives_N, queries_each, quantile),
        )

    measured = sum(len(layout.numbers_N) + len(layout.faults) for layout in layouts)
    records = sum(len(file) for file in files)
    bad = sum(len(layout.faults) for layout in layouts)
    targets = sum(
        (layout.column("prompts") - 1).mean() * len(file) for layout, file in zip(layouts, files, strict=True)
    )
    return PromptSizes(
        Sizes(
            query=queries.mean("tokens"),
            query_pictures=queries.mean("pictures"),
            candidate=candidates.mean("tokens"),
            candidate_pictures=candidates.mean("pictures"),
            rationale=_words(float(every["rationale"] @ share_N)),
            positives=float(positives_N @ share_N),
            negatives=float(negatives_N @ share_N),
            query_spread=queries.spread,
            candidate_spread=candidates.spread,
        ),
        f"of {measured:,} of {records:,} records, by their files' headers"
        + (f"; {bad:,} of these cannot be used (`rge check` says why)" if bad else ""),
        up_to(0.95),
        up_to(1.0),
        (queries.compared + candidates.compared) / pictures if pictures else None,
        records,
        float(targets),
    )


def _words(rationale: float) -> int:
    return max(round(rationale) - 1, 1) if rationale else 0  # without `<emb>`


def _positives(recipe: Recipe, source: SourceConfig, layout: Layout) -> np.ndarray:
    """Positives of each record that a step uses."""
    of_records = layout.column("prompts") - 1 - layout.column("negatives")
    return of_records if recipe.resolved(source).positives == "all" else np.minimum(of_records, 1)


def _negatives(recipe: Recipe, source: SourceConfig, layout: Layout) -> np.ndarray:
    """Negatives of each record that are drawn; mined ones fill up what it lacks."""
    most = recipe.resolved(source).max_negatives or 0
    of_records = layout.column("negatives")
    return np.full_like(of_records, most) if recipe.data.mine.every else np.minimum(of_records, most)


def _of_largest(counts_N: np.ndarray, queries: int, quantile: float) -> float:
    """The mean over as many records as a batch has queries, those with the most; without the records above the quantile."""
    ordered = np.sort(counts_N)[: math.ceil(quantile * len(counts_N))]
    return float(ordered[-queries:].mean()) if len(ordered) else 0.0


def assumed(recipe: Recipe, picture: PictureCost, options: PlanOptions, why: str) -> PromptSizes:
    """The largest prompts that options and recipe allow. RecipeError: the pictures take more tokens than a prompt may have."""
    largest: dict[str, float] = {}
    limit = recipe.data.max_prompt_tokens
    text = 64 if options.text_tokens is None else options.text_tokens
    template = 24 if options.template_tokens is None else options.template_tokens
    for side, given in (("query", options.query_pictures), ("candidate", options.candidate_pictures)):
        pictures = 1 if given is None else given
        placeholders = pictures * picture.placeholders
        tokens = template + placeholders + 2 * pictures  # one before a picture, and one after
        if tokens > limit:
            raise RecipeError(
                f"{pictures} pictures of model.max_pixels={recipe.model.max_pixels} take {placeholders} tokens, "
                f"which data.max_prompt_tokens={limit} cannot hold; lower the former or raise the latter"
            ).about("model.max_pixels", "data.max_prompt_tokens")
        largest |= {f"{side}_pictures": placeholders, side: min(tokens + text, limit)}
    return PromptSizes(
        Sizes(
            **largest,
            rationale=options.rationale_tokens or recipe.rollout.max_new_tokens,
            positives=1 if options.positives is None else options.positives,
            negatives=recipe.data.max_negatives,
        ),
        f"assumed ({why})",
    )
