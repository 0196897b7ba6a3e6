"""What can be known to be wrong before a model is loaded, found and said at once.

    python -m rge.check recipe=demo [pictures=true] [key=value of the recipe ...]
    accelerate launch -m rge.check recipe=qwen25vl_3b      # the launch too

Training does the same by itself before anything else. All stages are looked at: a path that only the joint stage reads
would else be found wrong when the cold start is over, hours later. ``pictures=true`` decodes every picture once, on all
cores; without it, each is looked up where it should be. The exit code is 2 if anything is wrong, of every process.
"""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator

from rge.checkpoints.resume import check_start, check_state, finished
from rge.checkpoints.run_lock import held
from rge.common.commands import start
from rge.common.errors import USER, UserError
from rge.config import CheckOptions, Recipe, RecipeError, RecordsConfig, StageConfig, load_options
from rge.data.augment import AUGMENTATIONS
from rge.data.readers import open_records
from rge.data.sources import MAX_REPORTED, Mixture, Records
from rge.data.verdicts import Verdicts
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.failure_detection import EndOfAll, after_main
from rge.logs import tracker_problems
from rge.losses import CONTRASTIVE_LOSSES
from rge.model.backbone import check_sizes, read_config
from rge.model.hub_model import HubModel
from rge.plan.costs import GIB, NCCL_GIB, descriptors, shapes_of, speed_of, trained_parameters
from rge.plan.known_models import outline
from rge.plan.options import PlanOptions
from rge.plan.report import OPTIMIZER_STATES, plan
from rge.rl.pool import check_pool
from rge.rl.reference import check_reference
from rge.rl.rewards import find_reward
from rge.rollout.vllm_writer import check_possible
from rge.rollout.writer import encodes_once
from rge.step import Objective
from rge.validation import num_records

T = TypeVar("T")

DESCRIPTORS = 1 << 16
"""Open files and connections that a process asks for, where the machine's hard limit lets it have so many."""

SHARED_MEMORY = "/dev/shm"


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
    raise_descriptor_limit()
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
            print("\n".join([*found.summary, "nothing is wrong"]))  # noqa: T201
        if not launched:
            print("launch: not looked at; put `accelerate launch` in the place of `python` for that")  # noqa: T201
    # Of the main process, which alone has looked; it may take longer than others would wait.
    return USER if problems else 0


@contextmanager
def checked(recipe: Recipe, accelerator: Accelerator) -> Iterator[Checked]:
    """Check a run on the main process, and keep its folder from others while inside.

    What is wrong, all of it, is printed once on each machine, and ends every process.

    Raises:
        SystemExit: something is wrong.
    """
    raise_descriptor_limit()
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
    out = Path(recipe.out)
    if with_launch:
        _attempt(
            problems,
            launch.check_launch,
            accelerator,
            recipe.train,
            recipe.optim.name,
        )
    over = [name for name in recipe.stages() if _attempt(problems, finished, out / name, recipe, name)]
    stages = [name for name in recipe.stages() if name not in over]
    found = Checked(stages)
    if not stages:
        found.summary.append(
            f"{out} is finished: its checkpoint is {out / recipe.stages()[-1] / 'final'}. To train again, give "
            f"another out=, or delete {out}"
        )
        return problems, found
    _attempt(problems, check_start, recipe)
    for name in stages:
        _attempt(problems, check_state, out / name, recipe, name, accelerator)
    problems += tracker_problems(recipe.log)
    if "rl" in recipe.stages():
        for reward in recipe.rl.rewards:
            _attempt(problems, find_reward, reward)
        _attempt(problems, check_reference, recipe, dist.is_zero3(accelerator))
        if problems:
            return problems, found  # what a stage needs follows from its rewards
    verdicts = Verdicts()
    found.records = _records(problems, recipe, stages, verdicts)
    if decode:
        faults = verdicts.undecodable(list(found.records.values()))
        if recipe.data.on_bad == "skip":
            found.summary += [f"will be left out (data.on_bad=skip): {fault}" for fault in faults]
        else:
            problems += faults
    if "rl" in stages and (warning := _attempt(problems, check_pool, recipe, found.records)):
        found.summary.append(warning)
    for name in recipe.loss.terms:
        _attempt(problems, CONTRASTIVE_LOSSES.__getitem__, name)
    if recipe.data.augment != "none":
        _attempt(problems, AUGMENTATIONS.__getitem__, recipe.data.augment)
    for name in stages:
        _check_stage(problems, recipe, name, accelerator)
        _check_bad_share(problems, recipe, name, found)
    if recipe.validation.key in found.records:
        _attempt(problems, num_records, found.records[recipe.validation.key], recipe)
    model = _attempt(problems, _outline, recipe)
    _check_machine(problems, found, recipe, accelerator)
    if model is not None:
        _attempt(problems, check_sizes, recipe.loss.matryoshka_dims, model)
        _attempt(problems, _check_disk, problems, recipe, found, model, accelerator)
        if not problems:
            found.summary += _banner(recipe, found, model, accelerator)
    return problems, found


def raise_descriptor_limit() -> None:
    """Ask for more open files than the usual 1,024, of which data workers, sockets and trackers want many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def _records(
    problems: list[str], recipe: Recipe, stages: list[str], verdicts: Verdicts
) -> dict[str, Records]:
    """Every source that the stages read, opened, with its pictures looked up."""
    needs: dict[str, tuple[RecordsConfig, bool]] = {}

    def need(source: RecordsConfig, rationale: bool) -> None:
        assert source.key is not None
        needs[source.key] = source, needs.get(source.key, (source, False))[1] or rationale

    # Finished stages count too: what a run leaves out must not change when it is started again.
    oracle = {name: Objective.of(recipe, name).needs_oracle for name in recipe.stages()}
    read = {source.key for name in stages for source in getattr(recipe, name).sources}
    for name in recipe.stages():
        for source in getattr(recipe, name).sources:
            if source.key in read:
                need(source, oracle[name])
    if recipe.validation.key is not None:
        need(recipe.validation, any(oracle.values()))
    if (
        recipe.init is None
        and recipe.model.scratch is not None
        and not (Path(recipe.out) / "backbone").exists()
    ):
        for source in (*recipe.cold_start.sources, *recipe.joint.sources):
            need(source, False)  # texts for the tokenizer
        if recipe.model.scratch.naming is not None:
            need(RecordsConfig(path=recipe.model.scratch.naming), True)
    found = {}
    for key, (source, rationale) in needs.items():
        held_out = key == recipe.validation.key

        def opened(
            source: RecordsConfig = source, rationale: bool = rationale, held_out: bool = held_out
        ) -> Records:
            on_bad = "stop" if held_out else recipe.data.on_bad
            if source.path is not None:
                return verdicts.open(source.path, need_rationale=rationale, on_bad=on_bad)
            return open_records(
                source,
                need_rationale=rationale,
                pictures=verdicts.pictures,
                progress=True,
                on_bad=on_bad,
                first=recipe.validation.max_records if held_out else None,
                seed=recipe.train.seed,
                notes=Path(recipe.out) / "streams.jsonl",
            )

        if (file := _attempt(problems, opened)) is not None:
            found[key] = file
    return found


def _check_stage(problems: list[str], recipe: Recipe, name: str, accelerator: Accelerator) -> None:
    """What a stage would find out when it begins."""
    stage: StageConfig = getattr(recipe, name)
    _attempt(problems, stage_share, name, stage, accelerator.num_processes)
    if not Objective.of(recipe, name).needs_rollout:
        return
    sharded = dist.shards_parameters(accelerator)
    if recipe.rollout.backend == "vllm":
        _attempt(problems, check_possible, sharded)
        return

    def once() -> None:
        encodes_once(
            recipe.rollout.prompt_pass,
            queries_a_rank=-(-stage.batch_size // accelerator.num_processes),
            micro_batch_size=recipe.train.micro_batch_size,
            sharded=sharded,
            drops_out=recipe.model.lora is not None and recipe.model.lora.dropout > 0,
        )

    _attempt(problems, once)


def _check_bad_share(problems: list[str], recipe: Recipe, name: str, found: Checked) -> None:
    """With ``data.on_bad=skip``, what a stage would end with once it begins."""
    files = [found.records[it.key] for it in getattr(recipe, name).sources if it.key in found.records]
    if any(file.size is None for file in files):
        return  # nobody knows yet
    bad = [record for file in files for record in file.bad]
    total = len(bad) + sum(map(len, files))
    if len(bad) > recipe.data.max_bad_share * total:
        problems.append(
            f"{len(bad)} of {total} records of {name} are bad, more than data.max_bad_share={recipe.data.max_bad_share}: "
            + "\n".join(f"{it.source}: {it.reason}" for it in bad[:MAX_REPORTED])
        )


def stage_share(name: str, stage: StageConfig, num_processes: int) -> None:
    """Whether every process gets a query.

    Raises:
        RecipeError: more processes than queries in a batch.
    """
    if stage.batch_size < num_processes:
        raise RecipeError(
            f"{name}.batch_size={stage.batch_size} leaves some of the {num_processes} processes without a query; "
            "raise it, or launch fewer"
        )


def _outline(recipe: Recipe) -> HubModel:
    """The model without its weights, of which at least the config must be at hand."""
    if recipe.init is not None:
        read_config(recipe.init)
    elif recipe.model.path is not None:
        read_config(recipe.model.path, recipe.model.revision)
    try:
        return outline(recipe.model, recipe.init)[0]
    except KeyError as error:
        raise RecipeError(f"model.scratch lacks {error}") from None


def _check_machine(problems: list[str], found: Checked, recipe: Recipe, accelerator: Accelerator) -> None:
    """Open files and shared memory of this process's machine against what will be wanted of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, here = descriptors(recipe.data.num_workers), _open_files()
    if soft != resource.RLIM_INFINITY and soft - here < needed:
        problems.append(
            f"a process may open {soft} files (hard limit {hard}), has {here} open, and may need {needed} more: raise it "
            "with `ulimit -n`, or in the container's or the service's settings; or lower data.num_workers"
        )
    # Batches go through pipes; of what runs here only NCCL puts anything there.
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if accelerator.device.type == "cuda" and beside > 1:
        free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0
        if free < NCCL_GIB * GIB:
            found.summary.append(
                f"warning: {SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, and NCCL's guide asks for {NCCL_GIB:g} GiB "
                f"for {beside} processes: where their GPUs cannot reach one another directly they will fail to start. In a "
                "container, give it more (docker run --shm-size=1g)"
            )


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0


def _check_disk(
    problems: list[str], recipe: Recipe, found: Checked, model: HubModel, accelerator: Accelerator
) -> None:
    out = Path(recipe.out)
    needed = bytes_to_keep(recipe, found, model, accelerator)
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    there = sum(
        path.stat().st_size for name in found.stages for path in (out / name).rglob("*") if path.is_file()
    )
    if needed > free + there:
        problems.append(
            f"{out} will hold up to {needed / GIB:,.1f} GiB of states and checkpoints, and its disk has "
            f"{free / GIB:,.1f} GiB free: free some, give an out= on another disk, or lower train.keep_last "
            f"({recipe.train.keep_last}) or validation.keep_best ({recipe.validation.keep_best})"
        )


def bytes_to_keep(recipe: Recipe, found: Checked, model: HubModel, accelerator: Accelerator) -> float:
    """Most that a run's folder will hold at once of what its open stages save.

    A state has the trained weights and the optimizer's numbers in float32, and under ZeRO or FSDP2 all weights beside them.
    One more than is kept is there while it is written.
    """
    shapes = shapes_of(model)
    trained = trained_parameters(shapes, model, recipe.model)
    state = trained * 4 * (1 + OPTIMIZER_STATES[recipe.optim.name])
    checkpoint = shapes.parameters * {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    if dist.is_sharded(accelerator):
        state += checkpoint
    best = recipe.validation.keep_best + 1 if recipe.validation.key and recipe.validation.keep_best else 0
    total = 0.0
    for name in found.stages:
        saves = max(1, (_num_steps(recipe, name, found) - 1) // recipe.train.save_every)
        total += min(recipe.train.keep_last + 1, saves) * state + (1 + best) * checkpoint
    return total


def _num_steps(recipe: Recipe, name: str, found: Checked) -> int:
    stage: StageConfig = getattr(recipe, name)
    if stage.steps is not None:
        return stage.steps
    sizes = [len(found.records[it.key]) for it in stage.sources if it.key in found.records]
    if not sizes:
        return 1  # a problem already
    return stage.num_steps(Mixture(sizes, [1.0] * len(sizes), stage.batch_size, 0).steps_per_epoch())


def _banner(recipe: Recipe, found: Checked, model: HubModel, accelerator: Accelerator) -> list[str]:
    """Back end, processes, device, dtypes, and for each stage what is trained on what, with the plan's figures."""
    device, gib = accelerator.device, None
    name = device.type
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, gib = card.name, card.total_memory / GIB
    back_end = launch.back_end(accelerator)
    lines = [
        f"{back_end}, {name}; float32 weights trained, computed in {recipe.model.dtype}; into {recipe.out}"
    ]
    options = PlanOptions().values() | {
        "num_gpus": accelerator.num_processes,
        "back_end": back_end.key,
    }
    speed = speed_of(name, recipe.model.dtype)
    if gib is not None:
        options["gpu_gib"] = gib
    if speed is not None:
        options["peak_tflops"], options["bandwidth_tbs"] = speed
    for stage_name in found.stages:
        stage: StageConfig = getattr(recipe, stage_name)
        files = [found.records[source.key] for source in stage.sources if source.key]
        streams = sum(file.size is None for file in files)
        left_out = sum(len(file.bad) for file in files)
        lines.append(
            f"{stage_name}: {_num_steps(recipe, stage_name, found):,} steps of {stage.batch_size} queries, from "
            f"{sum(file.size or 0 for file in files):,} records in {len(files)} source{'s' * (len(files) > 1)}"
            + (f", {streams} of them a stream" if streams else "")
            + (f"; {left_out:,} more are bad and left out" if left_out else "")
        )
        num_steps = _num_steps(recipe, stage_name, found)
        if num_steps < stage.warmup_steps:
            lines.append(
                f"  warning: {stage_name}.warmup_steps={stage.warmup_steps} is more than the stage's {num_steps} steps, so the "
                f"learning rate never reaches {stage_name}.lr={stage.lr:g}: lower it, or train longer"
            )
        try:
            figures = plan(recipe, model, {**options, "for": stage_name, "steps": num_steps})
        except RecipeError as error:
            lines.append(f"  not planned: {error}")
            continue
        room = f" of {gib:,.1f}" if gib is not None else ""
        lines += [
            f"  {figures['trained_parameters']:,} of {figures['parameters']:,} parameters trained; at most "
            f"{sum(figures['tokens'].values()):,} tokens and {figures['flops'] / 1e12:,.3g} TFLOP a step",
            f"  estimated by rge.plan: {figures['memory_total'] / GIB:,.1f}{room} GiB a process "
            f"({figures['memory_from'] / GIB:,.1f} to {figures['memory_to'] / GIB:,.1f}); "
            + (
                f"{_duration(figures['hours'])} ({_duration(figures['hours_from'])} to {_duration(figures['hours_to'])}) "
                f"at {options['utilisation']:.0%} of what its maker gives for {name}"
                if speed is not None
                else f"no time, since the speed of {name} in {recipe.model.dtype} is not known (`rge plan` takes peak_tflops=)"
            ),
        ]
        if gib is not None and not figures["fits"]:
            lines.append("  warning: by the plan this does not fit: " + "; or ".join(figures["advice"]))
    return lines


def _duration(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.0f} min"


if __name__ == "__main__":
    start(main)
