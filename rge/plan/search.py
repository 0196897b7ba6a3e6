"""Find the fastest settings for a step that fit in memory.

The settings varied give the same losses and gradients up to rounding: micro batch size, gradient checkpointing, how often
prompts are encoded, where activations of several micro batches are kept, and the back end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from rge.common.errors import Fault, RecipeError
from rge.config import Recipe
from rge.distributed.config import BACK_ENDS
from rge.optim.config import UNSHARDED_ONLY
from rge.plan import costs
from rge.plan.costs import ACTIVATIONS_OFF_BY, GIB, Load, Setup, Shapes
from rge.plan.options import PlanOptions
from rge.rl.reference import NOT_UNDER_ZERO3
from rge.rollout.writer import encodes_once


class ImpossibleKeeping(RecipeError):
    """`rollout.prompt_pass` cannot be satisfied."""


@dataclass(frozen=True)
class Room:
    """Resources of a process."""

    device: float  # bytes of a GPU's memory; without a GPU, of main memory
    reserved: float  # bytes of it set aside
    host: float | None  # bytes of main memory available for a GPU's activations; None: unknown
    speed: tuple[float, float]  # achieved FLOP/s, and bytes per second of the device's memory
    is_cpu: bool = False


@dataclass(kw_only=True)
class Way:
    """Costs of a step with one choice of settings."""

    load: Load
    setup: Setup
    flops_per_gpu: dict[str, float]  # by phase
    flops: float  # over all GPUs
    seconds: float
    memory: dict[str, float]  # bytes on a GPU, by kind
    memory_total: float
    memory_from: float  # bounds of `memory_total`
    memory_to: float
    kept_on_host: float  # bytes of main memory per process
    sent: float  # bytes sent per GPU
    overrides: list[str]  # arguments that select it, if it is not what is planned

    def has_room(self, room: Room, *, surely: bool = False) -> bool:
        """Whether it fits in memory; `surely`: even at the upper end of the estimate."""
        kept = self.kept_on_host * (1 + surely * ACTIVATIONS_OFF_BY)
        if kept and (surely if room.host is None else kept > room.host):
            return False
        return (self.memory_to if surely else self.memory_total) <= room.device


def way_of(shapes: Shapes, load: Load, setup: Setup, room: Room) -> Way:
    """Estimate the costs of a step."""
    flops = costs.flops(shapes, load, setup)
    memory, usual = (
        costs.memory(shapes, one, setup) | {"reserved": room.reserved}
        for one in (load.largest, load.high or load.largest)
    )
    total, of_usual = sum(memory.values()), sum(usual.values())
    return Way(
        load=load,
        setup=setup,
        flops_per_gpu=flops,
        flops=sum(flops.values()) * setup.num_gpus,
        seconds=costs.step_seconds(shapes, load, setup, sum(flops.values()), *room.speed),
        memory=memory,
        memory_total=total,
        memory_from=of_usual - _uncertain(usual),
        memory_to=total + _uncertain(memory),
        kept_on_host=costs.kept_bytes(shapes, load.largest, setup)[1],
        sent=costs.communication(shapes, load, setup),
        overrides=[],
    )


def _uncertain(memory: Mapping[str, float]) -> float:
    return ACTIVATIONS_OFF_BY * (memory["activations"] + memory[costs.KEPT])


def ways(
    recipe: Recipe, load: Load, setup: Setup, asked: str, prompt_pass: str, *, is_cpu: bool = False
) -> Iterator[Setup]:
    """The setup with each way to keep activations (`asked`) and encode prompts (`prompt_pass`), simplest first."""
    several = load.largest.chunks > 1 and load.contrastive
    places = ["none"]
    if several:
        # A CPU's own memory is the host's.
        places = ["none", "device", "host"][: 2 if is_cpu else 3] if asked == "auto" else [asked]
    wanted = {"once": [True], "twice": [False], "auto": [False, True] if several else [True]}[prompt_pass]
    by_us = load.own > 0 and recipe.rollout.backend == "own"
    for keep in places:
        possible = by_us and encodes_once(
            "auto",
            queries_a_rank=load.queries,
            micro_batch_size=setup.micro_queries,
            micro_batch_tokens=recipe.train.micro_batch_tokens,
            sharded=setup.shares_weights,
            has_dropout=setup.dropout,
            keep=keep,
        )
        for once in dict.fromkeys(once and possible for once in wanted):
            yield replace(setup, keep=keep, once=once)


def decided(recipe: Recipe, shapes: Shapes, load: Load, setup: Setup, room: Room) -> tuple[Way, str]:
    """Resolve ``auto`` in `train.keep_activations` and `rollout.prompt_pass`, and say why.

    Raises:
        ImpossibleKeeping: the recipe asks for one encoding of prompts, and what it keeps does not fit.
    """
    asked, prompt_pass = recipe.train.keep_activations, recipe.rollout.prompt_pass
    setups = ways(recipe, load, setup, asked, prompt_pass, is_cpu=room.is_cpu)
    found = [way_of(shapes, load, one, room) for one in setups]
    found.sort(key=lambda way: way.seconds)
    if asked != "auto":
        return found[0], f"train.keep_activations={asked}"
    none = next(way for way in found if way.setup.keep == "none")
    if all(way.setup.keep == "none" for way in found):
        return none, "one micro batch" if load.contrastive else "nothing is compared"
    best = next(way for way in found if way is none or way.has_room(room, surely=True))
    if best is none:
        if load.own and prompt_pass == "once":
            raise ImpossibleKeeping(
                f"rollout.prompt_pass=once keeps what {load.largest.chunks} micro batches need of their prompts, for which the device "
                "has no room according to the plan: set "
                f"{'' if room.is_cpu else 'train.keep_activations=host, or '}rollout.prompt_pass=auto"
            ).about(Fault("choice", "rollout.prompt_pass", ("auto",)))
        most = min(way.memory_to for way in found if way.setup.keep == "device")
        return none, f"the device would need up to {most / GIB:,.1f} of {room.device / GIB:,.1f} GiB"
    place = f", {best.kept_on_host / GIB:,.0f} GiB of main memory" if best.kept_on_host else ""
    return best, f"up to {best.memory_to / GIB:,.1f} of {room.device / GIB:,.1f} GiB{place}"


def refused(recipe: Recipe, options: PlanOptions, back_end: str) -> str | None:
    """Why training would refuse the recipe under a back end; None if it would not."""
    if options.num_gpus == 1:
        return None
    if recipe.optim.name in UNSHARDED_ONLY and back_end != "ddp":
        key = "back_end" if options.back_end else "train.back_end"
        return (
            f"optim.name={recipe.optim.name} needs whole gradients, which {back_end} does not have: set optim.name=adamw or "
            f"{key}=ddp"
        )
    copies = recipe.rl.has_reference and recipe.model.lora is None
    with_rl = "rl" in (options.for_, *recipe.stages())
    return NOT_UNDER_ZERO3 if with_rl and back_end == "zero3" and copies else None


def fastest(
    recipe: Recipe, shapes: Shapes, load: Load, setup: Setup, options: PlanOptions, room: Room
) -> list[Way]:
    """The three fastest settings that fit, one for each combination of checkpointing, keeping and encoding."""
    sizes = sorted({1 << shift for shift in range(load.queries.bit_length())} | {setup.micro_queries})
    others = () if options.num_gpus == 1 else BACK_ENDS
    back_ends = dict.fromkeys(
        [setup.back_end, *(name for name in others if not refused(recipe, options, name))]
    )
    best: dict[tuple[bool, str, bool], Way] = {}

    def rank(way: Way) -> tuple[float, bool, float, float]:
        return way.seconds, way.setup.back_end != setup.back_end, way.sent, way.memory_total

    for size, back_end, checkpointing in product(sizes, back_ends, (False, True)):
        taken = load.in_chunks(-(-load.queries // size))
        base = replace(setup, micro_queries=size, back_end=back_end, checkpointing=checkpointing)
        for choice in ways(recipe, taken, base, "auto", "auto"):
            way = way_of(shapes, taken, choice, room)
            kind = (checkpointing, choice.keep, choice.once)
            if way.has_room(room) and (kind not in best or rank(way) < rank(best[kind])):
                best[kind] = way
    found = sorted(best.values(), key=rank)[:3]
    for way in found:
        way.overrides = overrides(recipe, way, setup)
    return found


def overrides(recipe: Recipe, way: Way, setup: Setup) -> list[str]:
    """Command-line arguments that switch the recipe, planned as `setup`, to these settings."""
    new = way.setup
    keys: dict[str, tuple[object, object]] = {
        "train.micro_batch_size": (new.micro_queries, setup.micro_queries),
        "model.gradient_checkpointing": (new.checkpointing, recipe.model.gradient_checkpointing),
        "train.keep_activations": (new.keep, recipe.train.keep_activations),
        "train.back_end": (new.back_end, setup.back_end),
    }
    if way.load.largest.chunks == 1:
        del keys["train.keep_activations"]
    kept = way.load.largest.chunks > 1 and new.keep != "none"
    if way.load.own and (kept or recipe.rollout.prompt_pass != "auto"):
        keys["rollout.prompt_pass"] = ("once" if new.once else "twice", recipe.rollout.prompt_pass)
    return [f"{key}={str(value).lower()}" for key, (value, now) in keys.items() if value != now]
