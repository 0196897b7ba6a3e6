"""Pre-flight checks: report every problem that can be found before the model is loaded.

    python -m rge.check recipe=demo [pictures=true] [key=value of the recipe ...]
    accelerate launch -m rge.check recipe=qwen25vl_3b      # the launch too

Training does the same by itself before anything else. All stages are looked at: a path that only the joint stage reads
would else be found wrong when the cold start is over, hours later. Every record is laid out as training will, from the
headers of its pictures; ``pictures=true`` decodes every picture once, on all cores. Each room says itself what is wrong with
its part (`problems`). The exit code is 2 if anything is wrong, of every process.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator

from rge import logs, validation
from rge.checkpoints import resume
from rge.checkpoints.run_lock import held
from rge.common.commands import start
from rge.common.errors import USER, UserError
from rge.common.files import checkpoint_folder, find_shipped
from rge.config import CheckOptions, Recipe, RecipeError, RecordsConfig, StageConfig, load_options
from rge.data import collate, layout
from rge.data.layout import Layout
from rge.data.readers import open_records
from rge.data.sources import MAX_REPORTED, Mixture, Records, check_wording
from rge.data.verdicts import Verdicts
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.failure_detection import EndOfAll, after_main
from rge.losses import CONTRASTIVE_LOSSES
from rge.model.backbone import check_sizes, read_config
from rge.model.hub_model import HubModel
from rge.objective import Objective
from rge.plan import machine
from rge.plan.estimate import banner
from rge.plan.known_models import outline
from rge.rl import reference, rewards
from rge.rl.pool import check_pool
from rge.rollout import writer
from rge.scratch.starting_point import check_backbone, processor_of, tokenizer_sources

T = TypeVar("T")


@dataclass
class Checked:
    """A run that may start.

    Attributes:
        stages: those that are not finished, in order.
        records: every source that they read, opened and checked, by its `RecordsConfig.key`.
        summary: what will run, for people.
    """

    stages: list[str]
    records: dict[str, Records] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Check a recipe; 2 if anything is wrong."""
    recipe = load_options(CheckOptions, arguments, command="rge check recipe=NAME")
    machine.raise_descriptor_limit()
    accelerator = launch.make_accelerator(recipe.train, recipe.model.dtype)
    launched = "WORLD_SIZE" in os.environ
    problems: list[str] = []
    if accelerator.is_main_process:
        problems, found = examine(recipe, accelerator, with_launch=launched, decode=recipe.pictures)
        if not problems and found.stages:
            with ExitStack() as kept:
                _attempt(problems, kept.enter_context, held(Path(recipe.out)))
        if problems:
            print(_report(problems), file=sys.stderr)  # noqa: T201
        else:
            print("\n".join([*found.summary, "all checks passed"]))  # noqa: T201
        if not launched:
            print("launch: not checked; run under `accelerate launch` instead of `python` to check it")  # noqa: T201
    # Of the main process, which alone has looked; it may take longer than others would wait.
    return USER if problems else 0


@contextmanager
def checked(recipe: Recipe, accelerator: Accelerator) -> Iterator[Checked]:
    """Check a run on the main process, and keep its folder from others while inside.

    What is wrong, all of it, is printed once on each machine, and ends every process.

    Raises:
        SystemExit: something is wrong.
    """
    machine.raise_descriptor_limit()
    with ExitStack() as kept:
        problems: list[str] = []
        found = None
        if accelerator.is_main_process:
            problems, found = examine(recipe, accelerator)
            if not problems and found.stages:
                _attempt(problems, kept.enter_context, held(Path(recipe.out)))
            if not problems:
                print("\n".join(found.summary), flush=True)  # noqa: T201
        after_main("checked")  # which may take longer than an exchange would wait: a large file, a download
        problems, found = dist.from_main((problems, found))
        if problems:
            if accelerator.is_local_main_process:
                print(_report(problems), file=sys.stderr, flush=True)  # noqa: T201
            raise EndOfAll(USER)
        assert found is not None
        yield found


@dataclass
class Wanted:
    """A source that open stages read.

    Attributes:
        source: as the recipe has it.
        oracle: whether its rationales are read.
        candidates: whether its targets are.
        held_out: whether it validates; then none of its records may be bad.
    """

    source: RecordsConfig
    oracle: bool = False
    candidates: bool = False
    held_out: bool = False


def examine(
    recipe: Recipe, accelerator: Accelerator, *, with_launch: bool = True, decode: bool = False
) -> tuple[list[str], Checked]:
    """Everything that is wrong with a run, and what of it can be used if nothing is.

    Args:
        recipe: of the run.
        accelerator: its processes.
        with_launch: also look whether they are what the recipe asks for.
        decode: decode every picture.
    """
    problems: list[str] = []
    out, num_processes = Path(recipe.out), accelerator.num_processes
    if with_launch:
        _attempt(problems, launch.check_launch, accelerator, recipe.train, recipe.optim.name)
    over = [name for name in recipe.stages() if _attempt(problems, resume.finished, out / name, recipe, name)]
    stages = [name for name in recipe.stages() if name not in over]
    found = Checked(stages)
    if not stages:
        found.summary.append(
            f"{out} is finished: its checkpoint is {out / recipe.stages()[-1] / 'final'}. To train again, give "
            f"another out=, or delete {out}"
        )
        return problems, found
    problems += resume.problems(recipe, stages, accelerator)
    problems += logs.problems(recipe.log)
    if wrong := [*rewards.problems(recipe), *reference.problems(recipe, dist.is_zero3(accelerator))]:
        return problems + wrong, found  # what the stage rl reads follows from its rewards
    verdicts = Verdicts()
    wanted = wanted_sources(recipe, stages)
    found.records = open_wanted(problems, recipe, wanted, verdicts)
    if decode:
        faults = verdicts.undecodable(list(found.records.values()))
        _tell(faults, problems, found.summary, skip=recipe.data.on_bad == "skip")
    if stages[0] == recipe.stages()[0] and (
        warning := _attempt(problems, check_backbone, recipe, found.records)
    ):
        found.summary.append(f"warning: {warning}")
    for name in stages:
        _attempt(problems, resume.check_records, out / name, recipe, name, found.records)
    if "rl" in stages and (warning := _attempt(problems, check_pool, recipe, found.records)):
        found.summary.append(warning)
    for name, weight in recipe.loss.terms.items():
        if weight:  # one that was dropped may be of a plugin that was dropped too
            _attempt(problems, CONTRASTIVE_LOSSES.__getitem__, name)
    problems += collate.problems(recipe, stages, num_processes)
    problems += writer.problems(
        recipe, [name for name in stages if Objective.of(recipe, name).needs_rollout], accelerator
    )
    problems += validation.problems(recipe, found.records)
    problems += machine.problems(recipe)
    found.summary += machine.warnings(accelerator)
    model = _attempt(problems, _outline, recipe)
    layouts = {} if model is None else lay_out_wanted(problems, found, recipe, wanted, verdicts)
    for name in stages:
        problems += _too_many_bad(recipe, name, found, layouts)
        problems += _nothing_to_compare(recipe, name, layouts)
    if model is None:
        return problems, found
    num_steps = {name: _num_steps(recipe, name, found) for name in stages}
    _attempt(problems, check_sizes, recipe.loss.matryoshka_dims, model)
    problems += machine.disk_problems(recipe, num_steps, model, accelerator)
    if not problems:
        found.summary += banner(recipe, num_steps, found.records, layouts, model, accelerator)
        sources = [(found.records[key], laid) for key, laid in layouts.items() if not wanted[key].held_out]
        found.summary += layout.summary(sources, recipe) + layout.clashes(sources)
    return problems, found


def wanted_sources(recipe: Recipe, stages: Sequence[str]) -> dict[str, Wanted]:
    """Every source that these stages read, by key."""
    found: dict[str, Wanted] = {}

    def want(source: RecordsConfig, oracle: bool, candidates: bool, held_out: bool = False) -> None:
        assert source.key is not None
        before = found.setdefault(source.key, Wanted(source, held_out=held_out))
        before.oracle, before.candidates = before.oracle or oracle, before.candidates or candidates

    # Finished stages count too: what a run leaves out must not change when it is started again.
    objectives = {name: Objective.of(recipe, name) for name in recipe.stages()}
    read = {source.key for name in stages for source in getattr(recipe, name).sources}
    for name, objective in objectives.items():
        for source in getattr(recipe, name).sources:
            if source.key in read:
                want(source, objective.needs_oracle, objective.needs_candidates)
    if recipe.validation.key is not None:
        oracle = any(each.needs_oracle for each in objectives.values())
        want(recipe.validation, oracle, any(each.needs_candidates for each in objectives.values()), True)
    if recipe.init is None and recipe.model.scratch is not None and recipe.stages()[0] in stages:
        built = (
            Path(recipe.out) / "backbone"
        ).exists()  # then those of its sources that are left are compared
        for source in tokenizer_sources(recipe):
            if not built or source.path is None or find_shipped(source.path).is_file():
                want(source, False, False)
        if recipe.model.scratch.naming is not None and not built:
            want(RecordsConfig(path=recipe.model.scratch.naming), True, False)
    return found


def open_wanted(
    problems: list[str], recipe: Recipe, wanted: Mapping[str, Wanted], verdicts: Verdicts
) -> dict[str, Records]:
    """The sources, opened and checked, with their pictures looked up; those that cannot be are problems."""
    found = {}
    for key, one in wanted.items():
        checks: dict[str, Any] = {
            "need_rationale": one.oracle,
            "on_bad": "stop" if one.held_out else recipe.data.on_bad,
        }

        def opened(one: Wanted = one, checks: dict[str, Any] = checks) -> Records:
            if one.source.path is not None:
                records: Records = verdicts.open(one.source.path, **checks)
            else:
                records = open_records(
                    one.source,
                    pictures=verdicts.pictures,
                    progress=True,
                    first=recipe.validation.max_records if one.held_out else None,
                    seed=recipe.train.seed,
                    notes=Path(recipe.out) / "streams.jsonl",
                    **checks,
                )
            if records.size is not None:  # of a stream, the record that is drawn says so
                check_wording(records[0], records.name, recipe.data.profile)
            return records

        if (file := _attempt(problems, opened)) is not None:
            found[key] = file
    return found


def lay_out_wanted(
    problems: list[str], found: Checked, recipe: Recipe, wanted: Mapping[str, Wanted], verdicts: Verdicts
) -> dict[str, Layout]:
    """Lengths of everything that open sources hold, as far as that is known before it is read, by key."""
    layouts: dict[str, Layout] = {}
    try:
        builder = layout.prompt_builder(processor_of(recipe, found.records), recipe)
        for key, file in found.records.items():
            if file.size is None:
                found.summary.append(f"{file.name} is a stream: its records are laid out when they are read")
                continue
            needs = {"need_oracle": wanted[key].oracle, "need_candidates": wanted[key].candidates}
            laid = layouts[key] = layout.lay_out_once(file, builder, verdicts, **needs)
            more = len(laid.faults) - MAX_REPORTED
            faults = [*laid.faults.values()][:MAX_REPORTED] + [f"... and {more:,} more"] * (more > 0)
            skip = recipe.data.on_bad == "skip" and not wanted[key].held_out
            _tell(faults, problems, found.summary, skip=skip)
    except (UserError, OSError) as error:
        if str(error) not in problems:  # a missing source of a tokenizer's texts has been named
            problems.append(str(error))
    except Exception as error:  # noqa: BLE001 - training may still do what this could not
        found.summary.append(f"warning: records were not laid out: {type(error).__name__}: {error}")
    return layouts


def _tell(faults: Sequence[str], problems: list[str], summary: list[str], *, skip: bool) -> None:
    if skip:
        summary += [f"will be left out (data.on_bad=skip): {fault}" for fault in faults]
    else:
        problems += faults


def _attempt(problems: list[str], action: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return action(*arguments)
    except (UserError, OSError) as error:
        problems.append(str(error))
        return None


def _report(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} things are wrong, and nothing was started:"]
    lines += [
        f"{number}. " + problem.replace("\n", "\n   ") for number, problem in enumerate(problems, start=1)
    ]
    return "\n".join(lines)


def _too_many_bad(recipe: Recipe, name: str, found: Checked, layouts: Mapping[str, Layout]) -> Iterable[str]:
    """With ``data.on_bad=skip``, what a stage would end with once it begins, or on its way."""
    keys = [source.key for source in getattr(recipe, name).sources if source.key in found.records]
    files = [found.records[key] for key in keys if key]
    if recipe.data.on_bad != "skip" or any(file.size is None for file in files):
        return  # nobody knows yet
    reasons = [f"{record.source}: {record.reason}" for file in files for record in file.bad]
    reasons += [fault for key in keys if key in layouts for fault in layouts[key].faults.values()]
    total = sum(len(file.bad) + len(file) for file in files)
    if len(reasons) > recipe.data.max_bad_share * total:
        yield (
            f"{len(reasons)} of {total} records of {name} are bad, more than data.max_bad_share={recipe.data.max_bad_share}: "
            + "\n".join(reasons[:MAX_REPORTED])
        )


def _nothing_to_compare(recipe: Recipe, name: str, layouts: Mapping[str, Layout]) -> Iterable[str]:
    """Batches of one query, whose only negatives would be labelled ones, and no record has any."""
    stage: StageConfig = getattr(recipe, name)
    laid = [layouts[source.key] for source in stage.sources if source.key and source.key in layouts]
    alone = stage.batch_size == 1 and Objective.of(recipe, name).alpha_con > 0
    if alone and len(laid) == len(stage.sources) and not any(each.column("negatives").any() for each in laid):
        yield (
            f"{name}.batch_size=1, and no record has a labelled negative, so its contrastive loss is always 0: raise "
            f"{name}.batch_size"
        )


def _outline(recipe: Recipe) -> HubModel:
    """The model without its weights, of which at least the config must be at hand."""
    if recipe.init is not None:
        read_config(checkpoint_folder(Path(recipe.init)))
    elif recipe.model.path is not None:
        read_config(recipe.model.path, recipe.model.revision)
    try:
        return outline(recipe.model, recipe.init)[0]
    except KeyError as error:
        raise RecipeError(f"model.scratch lacks {error}") from None


def _num_steps(recipe: Recipe, name: str, found: Checked) -> int:
    stage: StageConfig = getattr(recipe, name)
    if stage.steps is not None:
        return stage.steps
    sizes = [len(found.records[it.key]) for it in stage.sources if it.key in found.records]
    if not sizes:
        return 1  # a problem already
    return stage.num_steps(Mixture(sizes, [1.0] * len(sizes), stage.batch_size, 0).steps_per_epoch())


if __name__ == "__main__":
    start(main)
