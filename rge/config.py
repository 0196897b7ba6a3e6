"""Recipes: one YAML per run, typed, overridable from the command line, saved with every checkpoint.

``load_recipe(["recipe=demo", "joint.lr=1e-4"])`` reads ``recipes/demo.yaml`` over the defaults and applies the overrides. An unknown
key is an error that names the nearest one. Every room owns its section: a dataclass in its ``config.py``, with the rules that
concern it alone; what is here joins them. Pass whole sections (``recipe.optim``, a stage), never copies of their keys, which
would go stale.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from rge.checkpoints.config import ExportConfig
from rge.common.errors import RecipeError, UserError
from rge.common.files import RECIPES, checkpoint_folder, read_json
from rge.common.options import MAY_DIFFER, AtLeastOne, Count, parse_file
from rge.common.registry import load_plugins
from rge.data.config import PROMPTS, DataConfig, PromptedConfig, SourceConfig
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.model.config import ModelConfig
from rge.optim.config import OptimConfig, StageConfig
from rge.rl.config import RLConfig
from rge.rollout.config import RolloutConfig

R = TypeVar("R", bound="Recipe")
P = TypeVar("P", bound=PromptedConfig)

RecipeJson = dict[str, Any]
"""A recipe as JSON values, see `to_dict`."""

CHANGEABLE = ("lr", "steps", "epochs", "warmup_steps", "schedule", "min_lr_ratio")
"""Keys of a stage that `Recipe.resume_with` may name."""

SHARED = (*PROMPTS, "max_negatives", "positives")
"""Keys of a source that `data` and `model` have for all of them."""


@dataclass
class ValidationConfig:
    """Held-out records measured while training. Nothing here changes what is trained, but `patience` may end it.

    Benchmarks are run by ``rge eval``.
    """

    sources: list[PromptedConfig] = field(default_factory=list)
    """Held-out records, given as those of a stage; without any, there is no validation. Every source is measured on its own,
    and the figures are the means over the sources."""
    every: AtLeastOne = 500
    """Steps between measurements; the last step is always measured."""
    max_records: AtLeastOne = 512
    """Number of records of each source used, from the beginning; each query is ranked against the targets of all of them."""
    metric: Literal["hit_at_1", "loss", "loss_contrastive", "loss_lm"] = "hit_at_1"
    """Metric for choosing the best checkpoints. A stage without a contrastive loss, such as the cold start, uses
    loss_lm; one without an LM loss has none."""
    best_by: str | None = None
    """Name of the source by whose metric the best checkpoints are chosen; null: by the mean over the sources."""
    keep_best: Count = 1
    """Best checkpoints kept in ``<out>/<stage>/best``, ready for evaluation; 0: only measure."""
    patience: Count = 0
    """A stage ends after this many measurements in a row that are no better than the best before them; 0: never. Its final
    checkpoint is that of its last step."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the sources, and settings without effect."""
        for number, source in enumerate(self.sources):
            yield from source.problems(f"validation.sources[{number}]")
        names = [source.name or source.label for source in self.sources]
        if twice := sorted({one for one in names if names.count(one) > 1}):
            yield f"validation.sources: several are called {', '.join(twice)}; give each another name"
        if self.best_by is not None and self.best_by not in names:
            yield f"validation.best_by={self.best_by} is none of validation.sources: {', '.join(names) or 'there are none'}"
        if self.patience and not self.sources:
            yield "validation.patience has no effect without validation.sources: give held-out records, or set it to 0"


@dataclass
class LogConfig:
    """Where progress goes; JSON lines are always written."""

    trackers: list[str] = field(default_factory=list)
    """Accelerate's trackers by name, e.g. wandb, tensorboard."""
    project: str = "rge"
    """Project name for trackers."""


@dataclass
class Recipe:
    """Train a model: what data, which losses, in which stages, and what is kept."""

    recipe: Annotated[str, MAY_DIFFER]
    """Name of the recipe's file."""
    out: Annotated[str, MAY_DIFFER] = "runs/{recipe}"
    """Output folder of the run; ``{recipe}`` stands for the recipe's name."""
    stage: Annotated[Literal["all", "cold_start", "joint", "rl"], MAY_DIFFER] = "all"
    """Stages to run; `all`: one after the other, each from the previous one's checkpoint, and rl only if it has sources."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own that register losses, rewards, families, prompt profiles, augmentations or data
    sources (docs/extending.md)."""
    init: str | None = None
    """Checkpoint to start from instead of `model.path`, e.g. another run's cold start; if a stage is
    run alone, such as `stage=joint`, the checkpoint of the previous stage."""
    resume_with: Annotated[list[str], MAY_DIFFER] = field(default_factory=list)
    """Keys that may have other values than when the run began, such as joint.lr or joint.steps: it resumes, or a finished stage goes on, with
    the new ones. What changed at which step is recorded in the checkpoint's identity."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cold_start: StageConfig = field(default_factory=StageConfig)
    joint: StageConfig = field(default_factory=StageConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: Annotated[ValidationConfig, MAY_DIFFER] = field(default_factory=ValidationConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    log: Annotated[LogConfig, MAY_DIFFER] = field(default_factory=LogConfig)

    def stages(self) -> list[str]:
        """Names of the stages of this run, in order."""
        if self.stage != "all":
            return [self.stage]
        return ["cold_start", "joint", *(["rl"] if self.rl.sources else [])]

    @property
    def start(self) -> str:
        """Path or hub id of the model that the first stage starts from."""
        return str(checkpoint_folder(Path(self.init or self.model.path)))

    @property
    def max_rationale_tokens(self) -> int:
        """`data.max_rationale_tokens`, with null resolved."""
        return self.data.max_rationale_tokens or max(4 * self.rollout.max_new_tokens, 512)

    def resolved(self, source: P) -> P:
        """A source with the recipe's settings where it has none; its instruction stays as it is."""
        given = vars(self.model) | vars(self.data)
        empty = [name for name, value in vars(source).items() if value is None and name in given]
        return replace(source, **{name: given[name] for name in empty if name in SHARED})

    def prompts_key(self, source: PromptedConfig) -> str:
        """Identifies the prompts of a source: its records, and its settings of prompts."""
        return json.dumps([source.key, self.resolved(source).prompts], sort_keys=True, default=vars)

    def largest(self, stage: StageConfig) -> "Recipe":
        """The recipe with the largest prompts and most candidates of a stage's sources as those of all."""
        sources = [self.resolved(source) for source in stage.sources]
        if not sources:
            return self
        most: dict[str, Any] = {
            name: max(getattr(source, name) for source in sources)
            for name in ("max_prompt_tokens", "max_negatives")
        }
        if any(source.positives == "all" for source in sources):
            most["positives"] = "all"
        pixels = max(source.max_pixels or 0 for source in sources)
        return replace(self, data=replace(self.data, **most), model=replace(self.model, max_pixels=pixels))

    def rollout_of(self, stage: StageConfig) -> RolloutConfig:
        """How rationales are written in a stage: `rl` samples groups of new ones."""
        if not isinstance(stage, RLConfig):
            return self.rollout
        return replace(
            self.rollout, num_rationales=stage.num_rationales, temperature=stage.temperature, reuse_steps=0
        )


@dataclass
class CheckOptions(Recipe):
    """Report every problem of a run that can be found before it starts."""

    pictures: bool = False
    """Decode every picture once, on all cores; false: only check that each exists."""


def load_recipe(arguments: Sequence[str], recipes: Path = RECIPES) -> Recipe:
    """Read a recipe by name and apply ``key=value`` overrides; see `load_options`."""
    return load_options(Recipe, arguments, recipes)


def load_options(
    schema: type[R], arguments: Sequence[str], recipes: Path = RECIPES, command: str = "rge train recipe=NAME"
) -> R:
    """Read and check a recipe, or a recipe and a command's further options (`schema` is a subclass of `Recipe`).

    `arguments` are ``recipe=NAME`` (a file of `recipes` without its ending, or the path of a YAML file) and overrides such as
    ``loss.alpha_lm=0.5``. `LossConfig.alpha_lm` and `alpha_con` are filled in and sum to one. RecipeError: no or an unknown
    recipe, an unknown key (the nearest is named), or an invalid value.
    """
    try:
        recipe = parse_file(schema, arguments, key="recipe", folder=recipes, command=command)
    except UserError as error:
        raise RecipeError.caused_by(error) from None
    recipe.out = os.path.expanduser(recipe.out.replace("{recipe}", recipe.recipe))
    recipe.init = recipe.init and os.path.expanduser(recipe.init)
    recipe.model.path = os.path.expanduser(recipe.model.path)
    if recipe.init and not recipe.model.path:  # a checkpoint records its base
        recorded = read_json(checkpoint_folder(Path(recipe.init)) / "rge.json") or {}
        recipe.model.path = recorded.get("recipe", {}).get("model", {}).get("path") or recipe.init
    load_plugins(recipe.plugins)
    check(recipe)
    return recipe


def to_dict(recipe: Recipe) -> RecipeJson:
    """The recipe as JSON values, equal to what is read back from a checkpoint.

    Omits a command's further options and unused settings of sources.
    """
    whole = json.loads(json.dumps(asdict(recipe)))
    return without_unused({item.name: whole[item.name] for item in fields(Recipe)})


def without_unused(recipe: RecipeJson) -> RecipeJson:
    """A recipe as JSON values, of a checkpoint for example, without unused settings of sources."""
    unused = asdict(SourceConfig()) | {"weight": None}
    sections = {
        stage: recipe[stage]
        | {
            "sources": [
                {name: value for name, value in source.items() if name not in unused or value != unused[name]}
                for source in recipe[stage]["sources"]
            ]
        }
        for stage in ("cold_start", "joint", "rl", "validation")
    }
    return recipe | sections


def check(recipe: Recipe) -> None:
    """Complete a recipe, and check what the types of single keys do not cover.

    RecipeError names every wrong key, its value and the allowed ones.
    """
    if recipe.stage == "rl" and not recipe.rl.sources:
        recipe.rl.sources = list(recipe.joint.sources)
    recipe.loss.complete()
    if found := list(problems(recipe)):
        raise RecipeError.of_problems(found)


Rules = dict[str, Callable[[Recipe], object]]
"""Error messages, each with the condition under which it applies; ``{r.rl.beta}`` in a message is the recipe's value."""

_RULES: Rules = {
    "export.adapters_only=true needs adapters, and all weights are trained: set model.lora, e.g. {{rank: 16}}, or "
    "export.adapters_only=false": lambda r: r.export.adapters_only and r.model.lora is None,
    "rollout.direct_share takes the reasoned state from some queries, loss.direct adds a state to all: set one of them to 0": (
        lambda r: r.rollout.direct_share and r.loss.direct
    ),
    "loss.direct={r.loss.direct} adds a state, and the stage rl trains the reasoned state alone: set loss.direct=0": lambda r: (
        r.loss.direct and "rl" in r.stages()
    ),
    "loss.budget={r.loss.budget} cuts rationales, and the stage rl trains whole ones: set loss.budget=0": lambda r: (
        r.loss.budget and "rl" in r.stages()
    ),
}
"""Of every recipe; what concerns one section alone stands with it."""

_RL_RULES: Rules = {
    "rl.beta's reference is the model without adapters, but with export.adapters_only=true the stage rl continues earlier "
    "ones: set rl.beta=0 or export.adapters_only=false": lambda r: (
        r.rl.beta and r.rl.alpha_rl and r.export.adapters_only
    ),
    "loss.anchor={r.loss.anchor} embeds queries without the model's own rationale, which is what the stage rl trains: set "
    "loss.anchor=self": lambda r: r.loss.anchor != "self",
}
"""Of recipes that run the stage rl."""


def problems(recipe: Recipe) -> Iterator[str]:
    """Everything that is wrong with combinations of keys: first section by section, then between them."""
    for section in (recipe.data, recipe.model, recipe.loss, recipe.rollout):
        yield from section.problems()
    runs_rl = "rl" in recipe.stages()
    for message, is_broken in (_RULES | (_RL_RULES if runs_rl else {})).items():
        if is_broken(recipe):
            yield message.format(r=recipe)
    if runs_rl:
        yield from recipe.rollout.check_temperature("rl", recipe.rl.temperature)
    yield from _check_unused(recipe)
    yield from _check_validation(recipe)
    allowed = [f"{name}.{key}" for name in ("cold_start", "joint", "rl") for key in CHANGEABLE]
    if unknown := [key for key in recipe.resume_with if key not in allowed]:
        yield (
            f"resume_with: {', '.join(unknown)} may not change when a run is resumed, only {', '.join(CHANGEABLE)} of a stage, such as "
            "joint.lr (train.save_every and validation need no permission): use another out="
        )
    for name in recipe.stages():
        yield from _check_stage(recipe, name, getattr(recipe, name))


def _check_stage(recipe: Recipe, name: str, stage: StageConfig) -> Iterator[str]:
    yield from stage.problems(name)
    sources = [recipe.resolved(source) for source in stage.sources]
    for number, source in enumerate(sources):
        if (source.min_pixels or 0) > (source.max_pixels or 0) and {
            "min_pixels",
            "max_pixels",
        } & stage.sources[number].prompts.keys():
            yield (
                f"{name}.sources[{number}]: min_pixels ({source.min_pixels}) must not exceed max_pixels ({source.max_pixels})"
            )
    alone = stage.batch_size == (1 if stage.compare_across else stage.sub_batches)
    if alone and not any(source.max_negatives for source in sources) and _compares_in_batch(recipe, name):
        yield (
            f"{name}.batch_size={stage.batch_size} with max_negatives=0 leaves nothing to compare a query with, so its contrastive "
            "loss is always 0: raise one of them"
        )


def _compares_in_batch(recipe: Recipe, stage: str) -> bool:
    """Whether a stage's losses or rewards rank the step's candidates."""
    if stage == "rl":
        return recipe.rl.alpha_con > 0 or (recipe.rl.alpha_rl > 0 and recipe.rl.candidates == "batch")
    return stage == "joint" and bool(recipe.loss.alpha_con)


def _check_unused(recipe: Recipe) -> Iterator[str]:
    """Settings without effect; those of a rollout's speed (`backend`, `prompt_pass`) may be in a sweep's base."""
    anchor = recipe.loss.anchor
    unused: list[tuple[str, LossConfig | RolloutConfig, str]] = []
    if anchor != "mix":
        unused += [("loss", recipe.loss, key) for key in ("oracle_share", "oracle_decay_steps")]
    if anchor not in ("self", "mix"):
        written = ("temperature", "num_rationales", "reuse_steps", "direct_share")
        unused += [("rollout", recipe.rollout, key) for key in written]
        unused += [("loss", recipe.loss, "budget")]
    for section, settings, key in unused:
        value, default = getattr(settings, key), getattr(type(settings), key)
        if value != default:
            yield (
                f"{section}.{key}={value} has no effect with loss.anchor={anchor}: set {section}.{key}={json.dumps(default)}, "
                f"or loss.anchor={'mix' if key.startswith('oracle') else 'self'}"
            )


def _check_validation(recipe: Recipe) -> Iterator[str]:
    """Whether stages have the metric for choosing their best checkpoints; one without a contrastive loss uses the LM loss."""
    validation, rl = recipe.validation, recipe.rl
    yield from validation.problems()
    if not validation.sources:
        return
    weights = {
        "joint": (recipe.loss.alpha_lm, recipe.loss.alpha_con, 0.0),
        "rl": (rl.alpha_lm, rl.alpha_con, rl.alpha_rl),
    }
    for stage, (alpha_lm, alpha_con, alpha_rl) in weights.items():
        if stage not in recipe.stages() or alpha_lm or not (alpha_con or alpha_rl):
            continue
        if validation.metric == "loss_lm" or (validation.metric == "loss" and not alpha_con):
            yield (
                f"validation.metric={validation.metric} has no value in the stage {stage}, where the weights of the losses that "
                "it measures are 0: use hit_at_1 or loss_contrastive"
            )
