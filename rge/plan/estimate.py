"""The estimate in training's banner: steps, records, memory and time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator

from rge.config import Recipe
from rge.data.collate import mixture_of
from rge.data.layout import Layout
from rge.data.mixture import Mixture
from rge.data.sources import Records
from rge.distributed import launch
from rge.model.hub_model import HubModel
from rge.optim.config import StageConfig
from rge.plan.costs import GIB, speed_of
from rge.plan.machine import cpu_speed, main_memory
from rge.plan.options import PlanOptions
from rge.plan.prompt_sizes import sizes_of
from rge.plan.report import LESS, Plan, lack, plan
from rge.plan.search import ImpossibleKeeping
from rge.rollout.micro_batches import Kept

WORTH_MEASURING = 2e13
"""FLOPs of a stage above which the CPU's speed is measured to estimate hours: minutes on one core."""
WORTH_SAYING = 0.95
"""Faster settings are suggested if their step takes less than this share of the seconds."""


@dataclass
class Plans:
    """Plans of a run's open stages on this machine: `found` has each stage's, or why there is none.

    RecipeError if `rollout.prompt_pass` cannot be satisfied.
    """

    recipe: Recipe
    num_steps: Mapping[str, int]  # by open stage
    records: Mapping[str, Records]  # by `RecordsConfig.key`
    layouts: Mapping[str, Layout]  # by `Recipe.prompts_key`
    model: HubModel
    accelerator: Accelerator

    def __post_init__(self) -> None:
        recipe, accelerator = self.recipe, self.accelerator
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        free_gib = main_memory() / GIB
        self.device_name, figures = accelerator.device.type, {"gpu_gib": free_gib / processes}
        on_gpu = self.device_name == "cuda"
        if on_gpu:
            card = torch.cuda.get_device_properties(accelerator.device)
            self.device_name, figures["gpu_gib"] = card.name, card.total_memory / GIB
        self.speed = speed_of(self.device_name, recipe.model.dtype)
        if self.speed is not None:
            figures |= zip(("peak_tflops", "bandwidth_tbs"), self.speed, strict=True)
        self.options = PlanOptions(
            cpu=not on_gpu,
            num_gpus=accelerator.num_processes,
            back_end=launch.back_end(accelerator).key,  # type: ignore[arg-type]
            gpus_per_machine=processes,
            host_gib=int(free_gib),
            **figures,  # type: ignore[arg-type]
        )
        self.found: dict[str, Plan | str] = {}
        for name in self.num_steps:
            try:
                self.found[name] = self.plan(name, self.options)
            except ImpossibleKeeping:
                raise
            except Exception as error:  # noqa: BLE001 - training does not need an estimate
                self.found[name] = f"{type(error).__name__}: {error}"

    def plan(self, name: str, options: PlanOptions) -> Plan:
        """A stage's plan."""
        stage: StageConfig = getattr(self.recipe, name)
        options = replace(options, for_=name, steps=self.num_steps[name])  # type: ignore[arg-type]
        layouts = [layout for layout in self.layouts_of(name) if layout is not None and len(layout.sizes_NK)]
        if len(layouts) < len(stage.sources):  # such as a stream
            return plan(self.recipe, self.model, options, "a source is measured as it is read")
        files = [self.records[source.key] for source in stage.sources if source.key]
        queries = -(-stage.batch_size // options.num_gpus)
        return plan(self.recipe, self.model, options, sizes_of(self.recipe, stage, files, layouts, queries))

    def layouts_of(self, name: str) -> list[Layout | None]:
        """Layouts of a stage's sources; None of those that were not laid out."""
        stage: StageConfig = getattr(self.recipe, name)
        return [self.layouts.get(self.recipe.prompts_key(source)) for source in stage.sources]

    def kept(self, name: str) -> Kept:
        """What a stage keeps between its micro batches; nothing unless its plan has room."""
        found, recipe = self.found[name], self.recipe
        if isinstance(found, str):
            keep = recipe.train.keep_activations
            return Kept("none" if keep == "auto" else keep, recipe.rollout.prompt_pass)
        twice = found.setup.keep != "none" and not found.setup.once
        return Kept(found.setup.keep, "twice" if twice else recipe.rollout.prompt_pass)


def banner(plans: Plans) -> Iterator[str]:
    """Back end, processes, device and dtypes; for each open stage its data and the plan's figures."""
    recipe, back_end = plans.recipe, launch.back_end(plans.accelerator)
    yield (
        f"{back_end}, {plans.device_name}; float32 weights trained, computed in {recipe.model.dtype}; into {recipe.out}"
    )
    for name, steps in plans.num_steps.items():
        stage: StageConfig = getattr(recipe, name)
        files = [plans.records[it.key] for it in stage.sources if it.key]
        yield from _trained_on(name, stage, steps, files)
        mixture = mixture_of(stage, files, recipe.train.seed)
        yield from _passes(name, stage, mixture, steps)
        yield from _repeated(name, stage, mixture)
        figures = plans.found[name]
        if isinstance(figures, str):
            yield f"  warning: memory and time are not estimated: {figures}"
        else:
            yield from _estimated(plans, name, figures)


def _trained_on(name: str, stage: StageConfig, steps: int, files: Sequence[Records]) -> Iterator[str]:
    streams = sum(file.size is None for file in files)
    left_out = sum(len(file.bad) for file in files)
    if 0 < streams == len(files):  # how many records they have is not known
        told = f"{streams} stream{'s' * (streams > 1)}"
    else:
        told = f"{sum(file.size or 0 for file in files):,} records in {len(files)} source{'s' * (len(files) > 1)}"
        told += f", {streams} of them a stream" if streams else ""
    yield (
        f"{name}: {steps:,} steps of {stage.batch_size} queries, from {told}"
        + (f"; {left_out:,} more are bad and left out" if left_out else "")
    )
    if steps < stage.warmup_steps:
        yield (
            f"  warning: {name}.warmup_steps={stage.warmup_steps} is more than the stage's {steps} steps, so the "
            f"learning rate never reaches {name}.lr={stage.lr:g}: lower it, or train longer"
        )


def _passes(name: str, stage: StageConfig, mixture: Mixture, steps: int) -> Iterator[str]:
    """Passes over each source but streams, and a warning if `epochs` of all of them are something else for some."""
    drawn = zip(stage.sources, mixture.drawn_before(steps), mixture.sizes, strict=True)
    known = [(source.name or source.label, count, size) for source, count, size in drawn if size is not None]
    if known:
        each = ", ".join(f"{_times(count / size)} of {label}" for label, count, size in known)
        yield f"  passes over the records: {each}"
    if stage.steps is not None:
        return
    whole = steps * stage.batch_size / mixture.num_records  # more than `epochs` if there are few records
    # Records that are drawn together.
    least = stage.batch_size // mixture.sub_batches if len(mixture.members) > 1 else 1
    few = [label for label, count, size in known if count + least < 0.9 * stage.epochs * size]
    many = [label for label, count, size in known if count - least > 3 * whole * size]
    if few or many:
        much = [f"fewer passes over {', '.join(few)}"] * bool(few)
        much += [f"more than three times as many over {', '.join(many)}"] * bool(many)
        yield (
            f"  warning: {name}.epochs={stage.epochs:g} counts the records of all sources together, and their weights lead to "
            f"{' and '.join(much)}: with weight: size in each source, all get equally many, or set {name}.steps"
        )


def _repeated(name: str, stage: StageConfig, mixture: Mixture) -> Iterator[str]:
    """Warnings of sources whose records come several times in one batch."""
    for number, (source, size) in enumerate(zip(stage.sources, mixture.sizes, strict=True)):
        drawn = mixture.most_at_once(number)
        most = int(stage.batch_size * (size or 0) / drawn)
        if size and most < stage.batch_size:
            yield (
                f"  warning: {source.name or source.label} has only {size:,} records, so a batch of {name} holds each of them about "
                f"{_times(drawn / size)} times, and they are no negatives of each other: lower {name}.batch_size to "
                f"{max(most, 1):,}{' or the weight of this source' * (len(stage.sources) > 1)}, or make more records"
            )


def _times(passes: float) -> str:
    return f"{passes:,.1f}" if passes >= 1 else f"{passes:.2g}"


def _time(plans: Plans, name: str, figures: Plan) -> str:
    """A stage's duration and the assumed speed, or why it is unknown."""
    device, options = plans.device_name, plans.options
    if plans.speed is not None:
        speed = f"the vendor's figures for {device}"
    elif device == "cpu" and figures.steps * figures.flops > WORTH_MEASURING:
        # For display only, since other processes affect the measurement.
        tflops, tbs = cpu_speed(plans.recipe.model.dtype)
        options = replace(options, peak_tflops=tflops, bandwidth_tbs=tbs)
        figures = plans.plan(name, options)
        speed = f"the {tflops:.2g} TFLOP/s and {tbs:.2g} TB/s measured here"
    elif device == "cpu":
        return "no time estimate: so short a stage is not worth measuring the CPU's speed (`rge plan cpu=true` does)"
    else:
        return f"no time estimate: unknown throughput of {device} in {plans.recipe.model.dtype} (`rge plan` takes peak_tflops=)"
    least, most = _duration(figures.hours_from), _duration(figures.hours_to)
    return f"{_duration(figures.hours)} ({least} to {most}) at {options.reached:.0%} of {speed}"


def _estimated(plans: Plans, name: str, figures: Plan) -> Iterator[str]:
    load, room = figures.load, "" if plans.options.cpu else f" of {plans.options.gpu_gib:,.1f}"
    about = "on average" if figures.prompts.is_measured else "at most"
    yield (
        f"  {figures.setup.trained:,} of {figures.shapes.parameters:,} parameters trained; {about} "
        f"{sum(figures.tokens.values()):,} tokens and {figures.flops / 1e12:,.3g} TFLOP per step"
    )
    yield (
        f"  estimated by rge.plan: {figures.memory_total / GIB:,.1f}{room} GiB per process "
        f"({figures.memory_from / GIB:,.1f} to {figures.memory_to / GIB:,.1f}); {_time(plans, name, figures)}"
    )
    if mined := figures.mining:
        yield (
            f"  data.mine: at most {mined['candidates']:,.0f} candidates and {mined['queries']:,.0f} queries every {load.every:,} "
            f"steps, {mined['flops'] / 1e12:,.3g} TFLOP"
            + (f", {mined['share']:.0%} of the time" if plans.speed is not None else "")
        )
    unseen = max((layout.unseen for layout in plans.layouts_of(name) if layout is not None), default=0.0)
    if unseen:
        yield (
            f"  the largest prompts are those of a random sample: with 95 % confidence, at most {unseen:.2g} of the records "
            "have larger ones"
        )
    if (chunks := load.largest.chunks) > 1 and load.contrastive:
        yield (
            f"  kept between the {chunks} micro batches' first forward pass and their backward pass: "
            f"{figures.setup.keep} ({figures.why})"
        )
    if plans.options.cpu:
        return
    if not figures.fits:
        less = "" if figures.fastest else f"; {LESS}"
        yield f"  warning: according to the plan, this does not fit: {lack(figures, plans.options)}{less}"
    for way in figures.fastest[:1]:
        if not figures.fits or way.seconds < WORTH_SAYING * figures.seconds:
            yield (
                f"  according to the plan, {'faster ' * figures.fits}settings for the same step fit, {figures.seconds / way.seconds:.2f} x, in "
                f"{way.memory_total / GIB:,.1f} (to {way.memory_to / GIB:,.1f}) GiB: {' '.join(way.overrides)}"
            )


def _duration(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.0f} min"
