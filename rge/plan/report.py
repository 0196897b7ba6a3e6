"""`rge plan`'s report: parameters, tokens, FLOPs, memory, communication, hours, and whether it fits.

    rge plan recipe=qwen25vl_3b num_gpus=8 gpu_gib=80 back_end=zero2 [key=value of the recipe ...]

No weights are loaded and nothing is trained (rge/plan/costs.py). Where the sources' records are on this machine, FLOPs and time are
those of their mean prompt, and memory that of their largest; else all pictures are at model.max_pixels. Generated rationales are at
the cap. The last line is the plan as JSON. If it does not fit, the exit code is 1.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from rge.common.errors import Fault, RecipeError
from rge.config import Recipe
from rge.distributed.config import BACK_ENDS
from rge.model.hub_model import HubModel
from rge.objective import Objective
from rge.optim.config import StageConfig
from rge.plan import costs
from rge.plan.costs import GIB, Load, Setup, Shapes, cost_of_tokens, num_parameters, shapes_of
from rge.plan.known_models import outline
from rge.plan.machine import cpu_speed, main_memory
from rge.plan.options import PlanCommand, PlanOptions
from rge.plan.prompt_sizes import PromptSizes, Sizes, assumed, measured
from rge.plan.search import Room, Way, decided, fastest, refused

LESS = (
    "with less memory: a smaller train.micro_batch_size or rollout.batch_size, model.gradient_checkpointing=true, "
    "model.freeze=[vision,merger] or model.lora; less main memory: train.background_save=false; on GPUs also a back end that shards more, or "
    "more GPUs"
)


MEASURED_ROWS = {
    "query": "tokens of a query's prompt",
    "query_pictures": "of a query's pictures",
    "candidate": "tokens of a candidate's",
    "candidate_pictures": "of a candidate's pictures",
    "rationale": "tokens of a given rationale",
}
"""Rows of the report by fields of `Sizes`."""


@dataclass(kw_only=True)
class Plan(Way):
    """The plan of one stage; the command's last line is this as JSON."""

    shapes: Shapes
    prompts: PromptSizes
    tokens: dict[str, int]  # per step over all GPUs, by kind
    bytes_sent: dict[str, float]  # per GPU and step, by back end
    batch_bytes: float  # pictures of a rank's batch
    host: dict[str, float]  # of one machine, see `rge.plan.costs.host`
    mining: dict[str, float]  # one of `data.mine` over all GPUs, and its share of the time; empty without it
    why: str  # of `Setup.keep`
    fastest: list[Way]
    steps: int
    hours: float  # of all steps at the given utilisation
    hours_from: float  # at the highest
    hours_to: float  # at the lowest
    fits: bool


def show(recipe: PlanCommand) -> int:
    """Print the plan of one stage or all, and where the output is no terminal a last line of JSON; 1 if it does not fit."""
    if recipe.cpu:
        tflops, tbs = cpu_speed(recipe.model.dtype)
        here = {"gpu_gib": main_memory() / GIB, "peak_tflops": tflops, "bandwidth_tbs": tbs}
        recipe = replace(recipe, num_gpus=1, back_end="ddp", **here)  # type: ignore[arg-type]
    model, origin = outline(recipe.model, recipe.init)
    everything = recipe.for_ == "all"
    stages = recipe.stages() if everything else [recipe.for_]
    plans: dict[str, Plan] = {}
    fit = True
    for name in stages:
        options = replace(recipe, for_=name)  # type: ignore[arg-type]  # one of them
        given = options.prompts_given
        sizes = f"given: {' '.join(given)}" if given else measured(recipe, name, options.num_gpus)
        stage_plan = plans[name] = plan(recipe, model, options, sizes)
        fit &= stage_plan.fits
        print(report(recipe, stage_plan, origin, options), end="\n" * (1 + (len(stages) > 1)))  # noqa: T201 - a command
    if everything:
        hours = {name: one.hours for name, one in plans.items()}
        parts = ", ".join(f"{name} {_hours(number)}" for name, number in hours.items())
        print(f"hours at a utilisation of {recipe.reached:g}: {parts}; all {_hours(sum(hours.values()))}")  # noqa: T201
    if not sys.stdout.isatty():  # for programs; of no use on a screen
        print(json.dumps(plans if everything else plans[stages[0]], default=asdict))  # noqa: T201
    return int(not fit)


def plan(
    recipe: Recipe,
    model: HubModel,
    options: PlanOptions,
    prompts: PromptSizes | str = "the records were not looked at",
) -> Plan:
    """The plan of a stage, whose model comes without its weights; `prompts` are measured, or why they are not.

    RecipeError if the batch cannot be divided, a prompt is longer than allowed, or activations cannot be kept as asked.
    """
    recipe = recipe.largest(getattr(recipe, options.for_))
    shapes = shapes_of(model, recipe.model.max_pixels)
    if isinstance(prompts, str):
        prompts = assumed(recipe, shapes.picture, options, prompts)
    elif prompts.picture:
        shapes = replace(shapes, picture=cost_of_tokens(model, prompts.picture))
    load = load_of(recipe, shapes, options, prompts)
    base = setup_of(recipe, model, options, load)
    host, main = costs.host(recipe, shapes, load.largest, base, options), options.host_gib * GIB
    device = options.gpu_gib * GIB
    if options.cpu:
        device = max(costs.CPU_SHARE * device - host["memory"] / options.processes, 0.0)
    room = Room(
        device=device,
        reserved=reserved(recipe, options),
        host=max(main - host["memory"], 0.0) / options.processes if main else None,
        speed=options.speed(options.reached),
        is_cpu=options.cpu,
    )
    way, why = decided(recipe, shapes, load, base, room)
    kept = options.processes * way.kept_on_host
    host |= {"memory": host["memory"] + kept, "of that, kept": kept}
    num_flops = sum(way.flops_per_gpu.values())
    steps = options.steps or getattr(recipe, options.for_).steps or 1000
    hours, most, least = (
        steps * costs.step_seconds(shapes, load, way.setup, num_flops, *options.speed(utilisation)) / 3600
        for utilisation in (options.reached, *_utilisations(options))
    )
    return Plan(
        **vars(way),
        shapes=shapes,
        prompts=prompts,
        tokens={name: number * options.num_gpus for name, number in load.tokens.items()},
        bytes_sent={
            name: costs.communication(shapes, load, replace(way.setup, back_end=name)) for name in BACK_ENDS
        },
        batch_bytes=costs.pixel_bytes(shapes, load.largest),
        host=host,
        mining=costs.mining(shapes, load, way.setup, way.seconds, *options.speed(options.reached)),
        why=why,
        fastest=[] if options.cpu or room.host == 0 else fastest(recipe, shapes, load, base, options, room),
        steps=steps,
        hours=hours,
        hours_from=least,
        hours_to=most,
        fits=way.memory_total <= options.gpu_gib * GIB and not 0 < main < host["memory"],
    )


def _utilisations(options: PlanOptions) -> tuple[float, float]:
    least, most = costs.CPU_UTILISATION if options.cpu else costs.UTILISATION
    return min(least, options.reached), max(most, options.reached)


def load_of(recipe: Recipe, shapes: Shapes, options: PlanOptions, prompts: PromptSizes | None = None) -> Load:
    """Work of one rank in a step: with the mean prompts, or with the largest that the recipe allows."""
    prompts = prompts or assumed(recipe, shapes.picture, options, "the records were not looked at")
    load = _load_of(recipe, shapes, options, prompts, prompts.mean)
    if prompts.high is None or prompts.most is None:
        return load
    high, most = (_load_of(recipe, shapes, options, prompts, sizes) for sizes in (prompts.high, prompts.most))
    return replace(load, high=high, most=most)


def _load_of(
    recipe: Recipe, shapes: Shapes, options: PlanOptions, prompts: PromptSizes, sizes: Sizes
) -> Load:
    name, gpus, objective = options.for_, options.num_gpus, Objective.of(recipe, options.for_)
    if recipe.stage not in ("all", name):
        why = f"stage={recipe.stage} leaves no {name} to plan; give for={recipe.stage}"
        raise RecipeError(why).about(Fault("choice", "for", (recipe.stage,)))
    stage: StageConfig = getattr(recipe, name)
    if stage.batch_size < gpus:
        why = f"{name}.batch_size={stage.batch_size} leaves some of {gpus} GPUs without a query"
        raise RecipeError(why).about(f"{name}.batch_size")
    queries = -(-stage.batch_size // gpus)  # the largest share
    rationale = options.rationale_tokens or recipe.rollout.max_new_tokens
    targets = objective.lm_targets
    positives = sizes.positives if recipe.data.positives == "all" else 1
    # Rewards may need the oracle without a branch, and a mixture puts it in place of an own rationale.
    learned = sum(name != "direct" for name in targets)
    only_read = objective.alpha_con > 0 and objective.anchor == "oracle" and "words" not in targets
    beside = (objective.direct > 0) + ("direct" in targets)
    candidates = math.ceil(queries * (positives + sizes.negatives)) * objective.needs_candidates
    chunks = -(-queries // recipe.train.micro_batch_size)
    if (limit := recipe.train.micro_batch_tokens) is not None:
        tokens = queries * sizes.query + candidates * sizes.candidate
        chunks = min(max(chunks, math.ceil(tokens / limit)), queries)
    load = Load(
        queries=queries,
        candidates=candidates,
        chunks=chunks,
        prompt=sizes.query,
        candidate=sizes.candidate,
        own=rationale * objective.needs_rollout,
        oracle=sizes.rationale * (learned + only_read > 0),
        read_own=objective.needs_rollout or (objective.alpha_con > 0 and objective.anchor == "none"),
        contrastive=objective.compares,
        label_candidates=objective.alpha_lm > 0 and objective.lm_on_candidates,
        query_pictures=sizes.query_pictures / shapes.picture.placeholders,
        candidate_pictures=sizes.candidate_pictures / shapes.picture.placeholders,
        prompt_spread=sizes.query_spread,
        candidate_spread=sizes.candidate_spread,
        each=recipe.rollout_of(stage).num_rationales,
        oracles=learned + only_read or 1,
        learned=learned,
        beside=beside,
        sampled=objective.alpha_rl > 0,
        reference=objective.alpha_rl > 0 and recipe.rl.beta > 0,
        trains_candidates=objective.trains_candidates,
        updates=objective.num_updates,
    )
    every = min(recipe.data.mine.every, options.steps or stage.steps or 1000)
    if not every or objective.alpha_con == 0:
        return load
    num_records, num_targets = _mined(recipe, stage, prompts, every)
    writes = recipe.data.mine.mode(objective.anchor) == "reasoning"
    mining = replace(
        load, queries=-(-num_records // gpus), candidates=-(-num_targets // gpus), own=rationale * writes, oracle=0,
        read_own=True, contrastive=True, label_candidates=False, each=1, sampled=False, oracles=1, learned=1,
        reference=False, beside=0, trains_candidates=True, updates=1,
    )  # fmt: skip
    return replace(load, mining=mining, every=every)


def _mined(recipe: Recipe, stage: StageConfig, prompts: PromptSizes, every: int) -> tuple[int, int]:
    """Queries and candidates that one mining embeds at most: the window's, and the targets of the pools' records and the window's."""
    drawn, pools = every * stage.batch_size, recipe.data.mine.pool * max(len(stage.sources), 1)
    if prompts.records is None or prompts.targets is None:  # of unknown sources
        return drawn, math.ceil((drawn + pools) * (prompts.mean.positives + prompts.mean.negatives))
    size = max(prompts.records, 1)
    return min(drawn, size), math.ceil(min(drawn + pools, size) * prompts.targets / size)


def setup_of(recipe: Recipe, model: HubModel, options: PlanOptions, load: Load) -> Setup:
    """Settings of a rank in the planned stage; RecipeError if training would refuse it under the back end."""
    lora = recipe.model.lora
    back_end = options.back_end or recipe.train.back_end
    if why := refused(recipe, options, back_end):
        raise RecipeError(why).about("train.back_end")
    return Setup(
        back_end=back_end,
        num_gpus=options.num_gpus,
        dtype_bytes=costs.DTYPE_BYTES[recipe.model.dtype],
        trained=num_parameters(model, recipe.model)[1],
        checkpointing=recipe.model.gradient_checkpointing,
        adapters=lora is not None,
        # `modules_to_save` is meant for the tower's merger.
        train_vision=lora.vision or bool(lora.modules_to_save)
        if lora
        else not {"vision", "merger"} <= set(recipe.model.freeze),
        optimizer_states=costs.OPTIMIZER_STATES[recipe.optim.name],
        rollout_rows=recipe.rollout.batch_size,
        captures=recipe.model.cuda_graphs
        and recipe.model.dtype == "bfloat16"
        and recipe.model.attn_implementation in ("auto", "varlen")
        and recipe.rollout.backend == "own",
        micro_queries=min(recipe.train.micro_batch_size, -(-load.queries // load.chunks)),
        dropout=lora is not None and lora.dropout > 0,
        engine=engine_bytes(recipe, options) if recipe.rollout.vllm_sleep else 0.0,
    )


def reserved(recipe: Recipe, options: PlanOptions) -> float:
    """Reserved bytes, including vLLM's engine unless it sleeps between rollouts."""
    engine = 0.0 if recipe.rollout.vllm_sleep else engine_bytes(recipe, options)
    return costs.RESERVED_GIB * GIB * (not options.cpu) + engine


def engine_bytes(recipe: Recipe, options: PlanOptions) -> float:
    """GPU memory of vLLM's engine if it generates the rationales."""
    writes = recipe.rollout.backend == "vllm" and Objective.of(recipe, options.for_).needs_rollout
    return writes * recipe.rollout.vllm_memory * options.gpu_gib * GIB


def lack(found: Plan, options: PlanOptions) -> str:
    """What a plan that does not fit needs, and what there is."""
    if found.memory_total > options.gpu_gib * GIB:
        return f"{found.memory_total / GIB:,.1f} GiB of {options.gpu_gib:.4g}"
    return f"{found.host['memory'] / GIB:,.1f} GiB of a machine's {options.host_gib:.4g} GiB of main memory"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}"  # of a small model: minutes


def report(recipe: Recipe, found: Plan, origin: str, options: PlanOptions) -> str:
    """The plan as text."""
    load, setup, shapes, prompts = found.load, found.setup, found.shapes, found.prompts
    stage: StageConfig = getattr(recipe, options.for_)
    scale, unit = (1e15, "PFLOP") if found.flops >= 1e15 else (1e12, "TFLOP")
    device, here, all_gpus = f"{options.num_gpus} GPUs of {options.gpu_gib:g} GiB", "a GPU", ", all GPUs"
    if options.cpu:
        device, here, all_gpus = f"this CPU, {options.gpu_gib:.3g} GiB free", "the CPU", ""
    lines = [
        f"{recipe.recipe}, {options.for_}: {origin}",
        f"{device}, {setup.back_end}, {recipe.model.dtype}, batch {stage.batch_size}: {load.queries} queries and "
        f"{load.candidates} candidates{'' if options.cpu else ' per GPU'}, "
        f"{load.chunks} micro batch{'es' * (load.chunks > 1)} of {recipe.train.micro_batch_size}",
        f"kept between them: {setup.keep} ({found.why}); prompts encoded {'once' if setup.once else 'twice'}",
        f"prompts: {prompts.origin}"
        + "; FLOPs and hours of the mean, memory of the largest" * prompts.is_measured,
        "",
    ]

    def section(title: str, rows: Mapping[str, str]) -> None:
        lines.extend([title, *(f"  {name:<34}{value:>22}" for name, value in rows.items()), ""])

    def in_gib(sizes: Mapping[str, float]) -> dict[str, str]:
        return {name: f"{size / GIB:,.2f} GiB" for name, size in sizes.items()}

    counts = {
        "all": shapes.parameters,
        "of the vision tower": shapes.vision_parameters,
        "trained": setup.trained,
    }
    section("parameters", {name: f"{count / 1e9:.3f} G" for name, count in counts.items()})
    if prompts.is_measured:
        table = {name: prompts.table[key] for key, name in MEASURED_ROWS.items() if any(prompts.table[key])}
        shown = {name: " / ".join(map(_number, row)) for name, row in table.items()}
        section("prompts: mean / 95 % at most / largest", shown)
    tokens = found.tokens | {"a query's prompt": round(load.prompt)}
    section(f"tokens per step{all_gpus}", {name: f"{count:,}" for name, count in tokens.items()})
    phases = {phase: count * setup.num_gpus for phase, count in found.flops_per_gpu.items()}
    phases["all"] = found.flops
    section(
        f"FLOPs per step{all_gpus}", {name: f"{count / scale:,.3f} {unit}" for name, count in phases.items()}
    )
    if mined := found.mining:
        rows = {name: f"{mined[name]:,.0f}" for name in ("queries", "candidates", "tokens")}
        rows["FLOPs"] = f"{mined['flops'] / scale:,.3f} {unit}"
        rows["hours"], rows["share of the time"] = _hours(mined["seconds"] / 3600), f"{mined['share']:.1%}"
        section(f"a mining, every {load.every:,} steps{all_gpus} (estimate)", rows)
    memory = in_gib({kind: size for kind, size in found.memory.items() if size})
    memory["all"] = f"{found.memory_total / GIB:,.2f} of {options.gpu_gib:.4g} GiB"
    memory["range of the estimate"] = f"{found.memory_from / GIB:,.1f} to {found.memory_to / GIB:,.1f} GiB"
    section(f"peak memory of {here} (estimate)", memory)
    if not options.cpu:
        sent = {
            name + " (planned)" * (name == setup.back_end): size for name, size in found.bytes_sent.items()
        }
        section("sent per GPU and step (estimate)", in_gib(sent))
        descriptors = "descriptors of a process"
        machine = in_gib(found.host) | {descriptors: f"{found.host[descriptors]:,.0f}"}
        section(f"machine with {options.processes} processes (estimate)", machine)
    least, most = _utilisations(options)
    hours = {
        f"hours at a utilisation of {options.reached:g}": _hours(found.hours),
        f"from {most:g} to {least:g}": f"{_hours(found.hours_from)} to {_hours(found.hours_to)}",
    }
    speed = f"{options.peak_tflops:.3g} TFLOP/s and {options.bandwidth_tbs:.3g} TB/s"
    section(f"{found.steps:,} steps at {speed} (estimate)", hours)
    if found.fastest:
        lines.append("fastest settings that fit, with the same gradients up to rounding")
    elif not options.cpu:
        lines += ["no other settings for the same step fit either", ""]
    for number, way in enumerate(found.fastest, start=1):
        on_host = options.processes * way.kept_on_host / GIB
        kept = f", {on_host:,.0f} GiB of a machine's memory" if on_host else ""
        lines.append(
            f"  {number}. {way.flops / scale:,.1f} {unit}, {way.seconds:,.2f} s per step "
            f"({found.seconds / way.seconds:.2f} x), {way.memory_total / GIB:,.1f} (to {way.memory_to / GIB:,.1f}) "
            f"of {options.gpu_gib:g} GiB{kept}: "
            f"{' '.join(way.overrides) or 'as planned above'}"
        )
    lines += [""] * bool(found.fastest)
    lines.append("It fits." if found.fits else f"It does not fit: {lack(found, options)}.")
    return "\n".join(lines if found.fits or found.fastest else [*lines, LESS])
