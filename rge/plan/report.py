"""What a recipe takes before it is run: parameters, tokens, FLOPs of a step, memory, communication, hours, and whether it fits.

    rge plan recipe=qwen25vl_3b num_gpus=8 gpu_gib=80 back_end=zero2 [key=value of the recipe ...]

Everything is computed from the model's shapes and the recipe (rge/plan/costs.py); no weights are loaded and nothing runs. A step
is planned at its largest: every prompt with its pictures at model.max_pixels, every rationale at the cap. The last line
is the plan as JSON. The exit code is 1 where it does not fit, and then the report says what would.
"""

import json
from dataclasses import asdict, replace
from typing import Any

from rge.config import BACK_ENDS, Recipe, RecipeError, StageConfig
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.objective import Objective
from rge.plan.costs import (
    ACTIVATIONS_OFF_BY,
    GIB,
    OPTIMIZER_STATES,
    RESERVED_GIB,
    UTILISATION,
    Load,
    Shapes,
    communication,
    flops,
    host,
    memory,
    pixel_bytes,
    shapes_of,
    step_seconds,
    trained_parameters,
)
from rge.plan.known_models import outline
from rge.plan.options import PlanCommand


def show(recipe: PlanCommand) -> int:
    """Print the plan; 1 if it does not fit."""
    options = recipe.values()
    options["back_end"] = options["back_end"] or recipe.train.back_end
    model, origin = outline(recipe.model, recipe.init)
    found = plan(recipe, model, options)
    print(report(recipe, found, origin, options))  # noqa: T201 - this is a command
    print(json.dumps(found))  # noqa: T201
    return 0 if found["fits"] else 1


def plan(recipe: Recipe, model: HubModel, options: dict[str, Any]) -> dict[str, Any]:
    """All numbers of a plan.

    Raises:
        RecipeError: the batch cannot be shared out, a prompt is longer than allowed, or the stage is not the recipe's.
    """
    options = {**options, "back_end": options["back_end"] or recipe.train.back_end}
    shapes = shapes_of(model)
    load = load_of(recipe, model, options)
    trained = trained_parameters(shapes, model, recipe.model)
    settings = _settings(recipe, options, trained)
    train_vision = _train_vision(recipe)
    per_gpu = flops(
        shapes,
        load,
        checkpointing=recipe.model.gradient_checkpointing,
        trainable=0.0 if _lora(recipe) else 1.0,
        train_vision=train_vision,
    )
    batch_bytes = pixel_bytes(model, load)
    kinds = memory(shapes, load, batch_bytes=batch_bytes, **settings)
    reserved = _reserved(recipe, options)
    total = sum(kinds.values()) + reserved
    uncertain = ACTIVATIONS_OFF_BY * kinds["activations"]
    sent = {
        name: communication(
            shapes,
            load,
            back_end=name,
            num_gpus=options["num_gpus"],
            dtype_bytes=settings["dtype_bytes"],
            trained=trained,
        )
        for name in BACK_ENDS
    }
    fits = total <= options["gpu_gib"] * GIB
    steps = options["steps"] or getattr(recipe, options["for"]).steps or 1000

    def hours(utilisation: float) -> float:
        seconds = step_seconds(
            shapes,
            load,
            per_gpu,
            peak=options["peak_tflops"] * 1e12,
            bandwidth=options["bandwidth_tbs"] * 1e12,
            utilisation=utilisation,
            dtype_bytes=settings["dtype_bytes"],
            rollout_rows=settings["rollout_rows"],
        )
        return steps * seconds / 3600

    return {
        "parameters": shapes.parameters,
        "vision_parameters": shapes.vision_parameters,
        "trained_parameters": trained,
        "shapes": asdict(shapes),
        "load": asdict(load),
        "tokens": tokens_of(load, options["num_gpus"]),
        "flops_per_gpu": per_gpu,
        "flops": sum(per_gpu.values()) * options["num_gpus"],
        "memory": {**kinds, "reserved": reserved},
        "memory_total": total,
        "memory_from": total - uncertain,
        "memory_to": total + uncertain,
        "bytes_sent": sent,
        "batch_bytes": batch_bytes,
        "host": host(
            shapes,
            batch_bytes=batch_bytes,
            prefetch_bytes=recipe.data.prefetch_mb * 2**20,
            num_workers=recipe.data.num_workers,
            dtype_bytes=settings["dtype_bytes"],
            processes=min(options["num_gpus"], options["gpus_per_machine"]),
        ),
        "steps": steps,
        "hours": hours(options["utilisation"]),
        "hours_from": hours(max(UTILISATION[1], options["utilisation"])),
        "hours_to": hours(min(UTILISATION[0], options["utilisation"])),
        "fits": fits,
        "advice": [] if fits else advice(recipe, model, options, shapes, trained),
    }


def load_of(recipe: Recipe, model: HubModel, options: dict[str, Any]) -> Load:
    """What one rank works on in a step of the stage: the largest that the recipe allows, or that ``longest`` says there is.

    Raises:
        RecipeError: see `plan`.
    """
    name = options["for"]
    if name not in recipe.stages():
        raise RecipeError(
            f"the recipe has stage={recipe.stage}, so there is no {name} to plan; give for={recipe.stage}"
        )
    stage: StageConfig = getattr(recipe, name)
    gpus = options["num_gpus"]
    if stage.batch_size % gpus:
        raise RecipeError(
            f"{name}.batch_size {stage.batch_size} must be a multiple of the {gpus} GPUs, e.g. "
            f"{stage.batch_size // gpus * gpus or gpus}"
        )
    objective = Objective.of(recipe, name)
    family, config = family_of(model), model.config
    placeholders = family.num_placeholders(config, recipe.model.max_pixels)
    around = len(family.picture_ids(config, _NoTokenizer())) - family.num_placeholders(config, 0)
    prompts = {}
    longest = options.get("longest", {})
    shown = {}
    for side in ("query", "candidate"):
        pictures = options[f"{side}_pictures"]
        if longest:
            prompts[side], shown[side] = longest[side], longest[f"{side}_pictures"]
            continue
        shown[side] = pictures * placeholders
        prompts[side] = options["template_tokens"] + pictures * (placeholders + around)
        if prompts[side] > recipe.data.max_prompt_tokens:
            raise RecipeError(
                f"{pictures} pictures of model.max_pixels={recipe.model.max_pixels} take {pictures * placeholders} tokens, "
                f"which data.max_prompt_tokens={recipe.data.max_prompt_tokens} cannot hold; lower the one or raise the other"
            )
        prompts[side] = min(prompts[side] + options["text_tokens"], recipe.data.max_prompt_tokens)
    a_placeholder = family.patches_per_placeholder(config)
    spans = family.vision_spans(config, placeholders * a_placeholder)
    rationale = options["rationale_tokens"] or recipe.rollout.max_new_tokens
    queries = stage.batch_size // gpus
    each = (1 + recipe.data.max_negatives) if objective.needs_candidates else 0
    targets, states = objective.lm_targets, [*objective.states]
    latents = sum(name in ("latent", "think") for name in (objective.anchor, *states, *targets))
    beside = len(states) + ("direct" in targets) + latents * recipe.model.think_tokens
    return Load(
        queries=queries,
        candidates=queries * each,
        chunks=-(-queries // recipe.train.micro_batch_size),
        prompt=prompts["query"],
        candidate=prompts["candidate"],
        own=rationale if objective.needs_rollout else 0,
        oracle=longest.get("rationale", rationale) if objective.needs_oracle else 0,
        read_own=objective.needs_rollout
        or (objective.alpha_con > 0 and objective.anchor in ("none", "latent")),
        contrastive=objective.compares,
        each=recipe.rollout_of(stage).num_rationales,
        oracles=sum(name != "direct" for name in targets) or 1,
        beside=beside,
        sampled=objective.alpha_rl > 0,
        label_candidates=objective.alpha_lm > 0 and objective.lm_on_candidates,
        query_patches=shown["query"] * a_placeholder,
        query_placeholders=shown["query"],
        candidate_patches=shown["candidate"] * a_placeholder,
        candidate_placeholders=shown["candidate"],
        query_spans=spans,
        candidate_spans=spans,
    )


def tokens_of(load: Load, num_gpus: int) -> dict[str, int]:
    """Tokens of a step over all GPUs."""
    queries, candidates = load.queries * num_gpus, load.candidates * num_gpus
    return {
        "query prompts": queries * load.prompt,
        "own rationales": queries * load.each * (load.own + 1) if load.own else 0,
        "oracle rationales": queries * (load.oracle + 1) if load.oracle else 0,
        "candidates": candidates * (load.candidate + 1),
    }


def advice(
    recipe: Recipe, model: HubModel, options: dict[str, Any], shapes: Shapes, trained: int
) -> list[str]:
    """Changes that would make it fit, one alone each, the least intrusive first; none if nothing here does."""
    found = []

    def total(changed: Recipe, others: dict[str, Any], count: int) -> float:
        load = load_of(changed, model, others)
        settings = _settings(changed, others, count)
        return sum(memory(shapes, load, batch_bytes=pixel_bytes(model, load), **settings).values())

    def fits(changed: Recipe, others: dict[str, Any], count: int = trained) -> bool:
        return total(changed, others, count) + _reserved(recipe, options) <= options["gpu_gib"] * GIB

    size = recipe.train.micro_batch_size
    while size > 1:
        size //= 2
        changed = replace(recipe, train=replace(recipe.train, micro_batch_size=size))
        if fits(changed, options):
            found.append(f"train.micro_batch_size={size}: the result stays the same")
            break
    if not recipe.model.gradient_checkpointing:
        changed = replace(recipe, model=replace(recipe.model, gradient_checkpointing=True))
        if fits(changed, options):
            found.append("model.gradient_checkpointing=true: the result stays the same, a third more compute")
    rows = recipe.rollout.batch_size
    while rows > 1:
        rows //= 2
        if fits(replace(recipe, rollout=replace(recipe.rollout, batch_size=rows)), options):
            found.append(f"rollout.batch_size={rows}: slower rollouts, the same result")
            break
    for back_end in ("zero2", "zero3", "fsdp2"):
        if back_end != options["back_end"] and fits(recipe, {**options, "back_end": back_end}):
            found.append(f"back_end={back_end} (recipes/accelerate has launch configs)")
            break
    stage: StageConfig = getattr(recipe, options["for"])
    gpus = options["num_gpus"] * 2
    while gpus <= min(1024, stage.batch_size) and stage.batch_size % gpus == 0:
        if fits(recipe, {**options, "num_gpus": gpus}):
            found.append(f"num_gpus={gpus}")
            break
        gpus *= 2
    if not recipe.model.freeze_vision and _lora(recipe) is None:
        frozen = replace(recipe, model=replace(recipe.model, freeze_vision=True))
        if fits(frozen, options, shapes.parameters - shapes.vision_parameters):
            found.append("model.freeze_vision=true: the vision tower is not trained")
    return found


def _reserved(recipe: Recipe, options: dict[str, Any]) -> float:
    """Bytes set aside, with the engine's share where vLLM writes the rationales."""
    engine = recipe.rollout.backend == "vllm" and options["for"] != "cold_start"
    return (
        options.get("reserved_gib", RESERVED_GIB) + engine * recipe.rollout.vllm_memory * options["gpu_gib"]
    ) * GIB


class _NoTokenizer:
    def convert_tokens_to_ids(self, token: str) -> int:
        return 0


def _lora(recipe: Recipe) -> Any:
    return getattr(recipe.model, "lora", None)


def _train_vision(recipe: Recipe) -> bool:
    lora = _lora(recipe)
    return lora.vision if lora is not None else not recipe.model.freeze_vision


def _settings(recipe: Recipe, options: dict[str, Any], trained: int) -> dict[str, Any]:
    return {
        "back_end": options["back_end"],
        "num_gpus": options["num_gpus"],
        "dtype_bytes": {"float32": 4, "bfloat16": 2}[recipe.model.dtype],
        "checkpointing": recipe.model.gradient_checkpointing,
        "trained": trained,
        "train_vision": _train_vision(recipe),
        "optimizer_states": OPTIMIZER_STATES[recipe.optim.name],
        "rollout_rows": recipe.rollout.batch_size,
        "micro_queries": min(
            recipe.train.micro_batch_size, getattr(recipe, options["for"]).batch_size // options["num_gpus"]
        ),
    }


def report(recipe: Recipe, found: dict[str, Any], origin: str, options: dict[str, Any]) -> str:
    """The plan for people."""
    load, memory_of = found["load"], found["memory"]
    stage: StageConfig = getattr(recipe, options["for"])
    lines = [
        f"{recipe.recipe}, {options['for']}: {origin}",
        f"{options['num_gpus']} GPUs of {options['gpu_gib']:g} GiB, {options['back_end']}, {recipe.model.dtype}, "
        f"batch {stage.batch_size}: {load['queries']} queries and {load['candidates']} candidates a GPU, "
        f"{load['chunks']} micro batches of {recipe.train.micro_batch_size}",
        "",
        "parameters",
        _row("all", f"{found['parameters'] / 1e9:.3f} G"),
        _row("of the vision tower", f"{found['vision_parameters'] / 1e9:.3f} G"),
        _row("trained", f"{found['trained_parameters'] / 1e9:.3f} G"),
        "",
        "tokens of a step, all GPUs",
        *[_row(name, f"{count:,}") for name, count in found["tokens"].items()],
        _row("a query's prompt", f"{load['prompt']:,}"),
        "",
        "FLOPs of a step, all GPUs",
    ]
    lines += [
        _row(k, f"{v * options['num_gpus'] / 1e15:,.3f} PFLOP") for k, v in found["flops_per_gpu"].items()
    ]
    lines += [
        _row("all", f"{found['flops'] / 1e15:,.3f} PFLOP"),
        "",
        "memory of a GPU at its fullest (estimate)",
    ]
    lines += [_row(name, f"{size / GIB:,.2f} GiB") for name, size in memory_of.items() if size]
    lines += [
        _row("all", f"{found['memory_total'] / GIB:,.2f} of {options['gpu_gib']:g} GiB"),
        _row(
            "by what activations may be off",
            f"{found['memory_from'] / GIB:,.1f} to {found['memory_to'] / GIB:,.1f} GiB",
        ),
        "",
        "sent by a GPU in a step (estimate)",
        *[
            _row(name + (" (planned)" if name == options["back_end"] else ""), f"{size / GIB:,.2f} GiB")
            for name, size in found["bytes_sent"].items()
        ],
        "",
    ]
    of_host = found["host"]
    lines += [
        f"a machine of {min(options['num_gpus'], options['gpus_per_machine'])} processes (estimate)",
        _row("memory", f"{of_host['memory'] / GIB:,.0f} GiB"),
        _row("of that, batches", f"{of_host['of that, batches'] / GIB:,.1f} GiB"),
        _row("shared memory, NCCL's", f"{of_host['shared memory'] / GIB:,.0f} GiB"),
        _row("descriptors of a process", f"{of_host['descriptors of a process']:,.0f}"),
        "",
        f"time of {found['steps']:,} steps at {options['peak_tflops']:g} TFLOP/s and {options['bandwidth_tbs']:g} TB/s (estimate)",
        _row(f"hours at a utilisation of {options['utilisation']:g}", f"{found['hours']:,.1f}"),
        _row(
            f"from {max(UTILISATION[1], options['utilisation']):g} to {min(UTILISATION[0], options['utilisation']):g}",
            f"{found['hours_from']:,.1f} to {found['hours_to']:,.1f}",
        ),
        "",
    ]
    if found["fits"]:
        lines.append("It fits.")
    else:
        lines.append(f"It does not fit: {found['memory_total'] / GIB:,.1f} GiB of {options['gpu_gib']:g}.")
        lines += [f"  would do: {line}" for line in found["advice"]]
        if not found["advice"]:
            lines.append(
                "  no single change here would do; adapters (model.lora) train a hundredth of the parameters"
            )
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"  {name:<34}{value:>22}"
