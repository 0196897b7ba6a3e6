"""The estimate in training's banner: steps, records, memory and time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator

from rge.config import Recipe, StageConfig
from rge.data.layout import Layout
from rge.data.sources import Records
from rge.distributed import launch
from rge.model.hub_model import HubModel
from rge.plan.costs import GIB, RESERVED_GIB, speed_of
from rge.plan.options import PlanOptions
from rge.plan.report import plan


def banner(
    recipe: Recipe,
    num_steps: Mapping[str, int],
    records: Mapping[str, Records],
    layouts: Mapping[str, Layout],
    model: HubModel,
    accelerator: Accelerator,
) -> Iterator[str]:
    """Back end, processes, device, dtypes, and for each open stage what is trained on what, with the plan's figures.

    `num_steps` are by open stage; `records`, which are opened, and `layouts` of those that were laid out, by source.
    """
    device, gib = accelerator.device, None
    name = device.type
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, gib = card.name, card.total_memory / GIB
    back_end = launch.back_end(accelerator)
    yield f"{back_end}, {name}; float32 weights trained, computed in {recipe.model.dtype}; into {recipe.out}"
    options = PlanOptions(num_gpus=accelerator.num_processes, back_end=back_end.key)  # type: ignore[arg-type]
    speed = speed_of(name, recipe.model.dtype)
    if gib is not None:
        options = replace(options, gpu_gib=gib)
    if speed is not None:
        options = replace(options, peak_tflops=speed[0], bandwidth_tbs=speed[1])
    for stage_name, steps in num_steps.items():
        stage: StageConfig = getattr(recipe, stage_name)
        files = [records[source.key] for source in stage.sources if source.key]
        streams = sum(file.size is None for file in files)
        left_out = sum(len(file.bad) for file in files)
        yield (
            f"{stage_name}: {steps:,} steps of {stage.batch_size} queries, from "
            f"{sum(file.size or 0 for file in files):,} records in {len(files)} source{'s' * (len(files) > 1)}"
            + (f", {streams} of them a stream" if streams else "")
            + (f"; {left_out:,} more are bad and left out" if left_out else "")
        )
        if steps < stage.warmup_steps:
            yield (
                f"  warning: {stage_name}.warmup_steps={stage.warmup_steps} is more than the stage's {steps} steps, so the "
                f"learning rate never reaches {stage_name}.lr={stage.lr:g}: lower it, or train longer"
            )
        laid = [layouts[source.key] for source in stage.sources if source.key and source.key in layouts]
        # Without all of them, such as a stream's, the largest that the recipe allows.
        longest = _longest(laid) if len(laid) == len(files) else None
        # Context, NCCL's buffers and fragments are a GPU's.
        reserved = RESERVED_GIB if gib is not None else 0.0
        try:
            of_stage = replace(options, for_=stage_name, steps=steps)  # type: ignore[arg-type]
            figures = plan(recipe, model, of_stage, longest, reserved)
        except Exception as error:  # noqa: BLE001 - training does not need an estimate
            yield f"  warning: memory and time are not estimated: {type(error).__name__}: {error}"
            continue
        room = f" of {gib:,.1f}" if gib is not None else ""
        time = (
            f"{_duration(figures['hours'])} ({_duration(figures['hours_from'])} to {_duration(figures['hours_to'])}) "
            f"at {options.utilisation:.0%} of what its maker gives for {name}"
            if speed is not None
            else f"no time estimate: unknown throughput of {name} in {recipe.model.dtype} (`rge plan` takes peak_tflops=)"
        )
        yield (
            f"  {figures['trained_parameters']:,} of {figures['parameters']:,} parameters trained; at most "
            f"{sum(figures['tokens'].values()):,} tokens and {figures['flops'] / 1e12:,.3g} TFLOP a step"
        )
        yield (
            f"  estimated by rge.plan: {figures['memory_total'] / GIB:,.1f}{room} GiB a process "
            f"({figures['memory_from'] / GIB:,.1f} to {figures['memory_to'] / GIB:,.1f}); {time}"
        )
        if gib is not None and not figures["fits"]:
            yield "  warning: by the plan this does not fit: " + "; or ".join(figures["advice"])


def _longest(laid: Sequence[Layout]) -> dict[str, int]:
    """The greatest of each size among the records of several sources."""

    def greatest(name: str) -> int:
        return max((int(layout.column(name).max(initial=0)) for layout in laid), default=0)

    found = {name: greatest(name) for name in ("query", "query_pictures", "candidate", "candidate_pictures")}
    return {**found, "rationale": max(greatest("rationale") - 1, 1)}  # without `<emb>`


def _duration(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.0f} min"
