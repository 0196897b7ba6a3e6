"""Recipes: one YAML per run, typed, overridable from the command line, saved with every checkpoint.

``load_recipe(["recipe=demo", "joint.lr=1e-4"])`` reads ``recipes/demo.yaml`` over the defaults below and applies the
overrides. A key that does not exist is an error that names the nearest one. Configs stop at the builders in
``rge/train.py``; below them, plain keyword arguments are passed.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class RecipeError(ValueError):
    """A recipe or an override is wrong; the message names the key and the mend."""


@dataclass
class ScratchConfig:
    """A model built from nothing instead of loaded: real architecture and processor, own sizes.

    ``text`` and ``vision`` are passed to the Hugging Face sub-configs unchanged.
    """

    model_type: str = "qwen2_5_vl"
    vocab_size: int = 2048
    """BPE vocabulary learned from the training records' texts, special tokens not counted."""
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    naming: str | None = None
    """Records whose query pictures teach the vision tower to name things before anything else; null skips it."""
    naming_steps: int = 1000
    naming_batch_size: int = 64
    naming_lr: float = 3e-3


@dataclass
class ModelConfig:
    """Which backbone, and how it is held in memory."""

    path: str | None = None
    """Hugging Face id or directory; null with `scratch`."""
    revision: str | None = None
    """Commit or tag of a hub model; null: the newest."""
    scratch: ScratchConfig | None = None
    dtype: str = "bfloat16"
    """Weights' dtype: float32 or bfloat16. Embeddings and losses are float32 in any case."""
    attn_implementation: str = "sdpa"
    """The joint forward passes a 4-D mask, which flash_attention_2 cannot take."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more compute, memory per layer instead of per op."""
    freeze_vision: bool = False
    min_pixels: int = 200_704
    """Smallest picture, in pixels: 256 patches of 28x28, as released with RGE."""
    max_pixels: int = 802_816
    """Largest picture, in pixels: 1024 patches of 28x28, as released with RGE."""


@dataclass
class SourceConfig:
    """One file of training records and its share of every batch."""

    path: str = MISSING
    weight: float = 1.0
    """Share of the batch relative to the other sources' weights."""


@dataclass
class DataConfig:
    """How records become prompts."""

    profile: str = "rge"
    """Instruction profile, see `rge.prompts.PROFILES`."""
    max_prompt_tokens: int = 2048
    """Longer prompts lose the end of the user's text, never image tokens or the template. Tokens."""
    max_negatives: int = 1
    """Labelled negatives drawn per query and step, as further candidates."""
    num_workers: int = 4
    """Processes that decode pictures and tokenise, per rank; 0 does it in the training process."""
    augment: str = "none"
    """Picture augmentation while training: none, or drawing (shift, scale, mirror, colour)."""


@dataclass
class LossConfig:
    """The two losses. Users ablate these, so each can be given on its own."""

    ratio: str = "1:10"
    """LM to contrastive weight, normalised to sum to one (paper eq. 10: 1/11 and 10/11); `none` is no LM loss."""
    alpha_lm: float | None = None
    """Weight of the LM loss; overrides `ratio`. The other alpha is what remains to one."""
    alpha_con: float | None = None
    """Weight of the contrastive loss; overrides `ratio`."""
    temperature: float = 0.03
    """InfoNCE tau; cosine similarities are divided by it. No unit, > 0."""
    anchor: str = "self"
    """Query state that the contrastive loss sees, the paper's Table 4: `self` after the model's own rationale,
    `oracle` after the oracle's (leaks the target), `none` directly after the prompt."""
    lm_on_candidates: bool = True
    """Whether the LM loss also trains `<emb>` after the candidate's prompt, the second term of eq. 8."""


@dataclass
class RolloutConfig:
    """How the model writes its own rationales, in training and in evaluation. Nothing is inherited."""

    max_new_tokens: int = 128
    """Cap on generated tokens, `<emb>` included; at the cap `<emb>` is appended and counted as forced."""
    temperature: float = 0.0
    """Sampling temperature in training; 0 is greedy. Evaluation is greedy unless asked otherwise."""
    batch_size: int = 64
    """Rows generated at once per rank."""


@dataclass
class StageConfig:
    """One stage of training: what it sees and how it is optimised."""

    steps: int | None = None
    """Optimizer steps; null: as many as `epochs` needs."""
    epochs: float = 1.0
    """Passes over the sources' records, used where `steps` is null."""
    batch_size: int = 512
    """Queries per optimizer step over all ranks; for the contrastive loss also the in-batch negatives' number."""
    lr: float = 2e-5
    warmup_steps: int = 0
    schedule: str = "cosine"
    """cosine | linear | constant, after the warm-up."""
    min_lr_ratio: float = 0.0
    """The schedule ends at this share of `lr`."""
    sources: list[SourceConfig] = field(default_factory=list)


@dataclass
class OptimConfig:
    """The optimizer, the same for both stages."""

    name: str = "adamw"
    """adamw | muon. Muon for matrices with AdamW for the rest learns much faster from scratch; not under ZeRO."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm; the same on every back end. 0 switches it off."""


@dataclass
class TrainConfig:
    """The loop."""

    seed: int = 0
    micro_batch_size: int = 8
    """Queries per forward and backward on one rank. Memory depends on this, the result does not."""
    save_every: int = 500
    """Steps between resumable checkpoints."""
    keep_last: int = 2
    """Resumable checkpoints kept on disk."""
    log_every: int = 10
    num_processes: int | None = None
    """Processes this run must have; null: what the launcher set. A silent one-process launch becomes an error."""
    distributed_type: str | None = None
    """NO, MULTI_GPU, MULTI_CPU, DEEPSPEED or FSDP; null: any. Asserted at start."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms: bit-exact repeats on GPU, slower."""


@dataclass
class LogConfig:
    """Where progress goes; JSON lines are always written."""

    trackers: list[str] = field(default_factory=list)
    """Accelerate trackers: wandb."""
    project: str = "rge"


@dataclass
class Recipe:
    """A whole run."""

    recipe: str = MISSING
    out: str = "runs/${recipe}"
    stage: str = "all"
    """all | cold_start | joint. `all` continues the joint stage from the cold start's checkpoint."""
    init: str | None = None
    """Checkpoint to start from instead of `model.path` or `model.scratch`, e.g. another run's cold start."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cold_start: StageConfig = field(default_factory=StageConfig)
    joint: StageConfig = field(default_factory=StageConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def stages(self) -> list[str]:
        """Names of the stages this run goes through, in order."""
        return ["cold_start", "joint"] if self.stage == "all" else [self.stage]


def load_recipe(arguments: Sequence[str], recipes: Path = RECIPES) -> Recipe:
    """Read a recipe by name and apply ``key=value`` overrides.

    Args:
        arguments: ``recipe=NAME`` (a file of `recipes` without its ending, or a path to a YAML file) and overrides
            such as ``loss.alpha_lm=0.5``.
        recipes: folder of the recipes.

    Returns:
        A typed, checked recipe. `LossConfig.alpha_lm` and `alpha_con` are filled in and sum to one.

    Raises:
        RecipeError: no or an unknown recipe, an unknown key (the nearest is named), a value of the wrong type or
            outside its range.
    """
    overrides = [split_override(argument) for argument in arguments]
    names = [value for key, value in overrides if key == "recipe"]
    if len(names) != 1:
        raise RecipeError(f"give exactly one recipe=NAME; there are: {', '.join(_available(recipes))}")
    path = _recipe_path(names[0], recipes)
    layers: list[tuple[str, DictConfig]] = []
    try:
        document = OmegaConf.load(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {error}") from error
    except Exception as error:  # noqa: BLE001 - yaml's own errors share no public base
        raise RecipeError(f"recipe {path} is not valid YAML: {error}") from error
    layers.append((str(path), document))
    for key, value in overrides:
        if key != "recipe":
            layers.append((f"{key}={value}", OmegaConf.from_dotlist([f"{key}={value}"])))
    layers.append(("recipe", OmegaConf.create({"recipe": path.stem})))
    config = OmegaConf.structured(Recipe)
    for origin, layer in layers:
        try:
            config = OmegaConf.merge(config, layer)
        except OmegaConfBaseException as error:
            raise RecipeError(_explain(origin, error)) from None
    try:
        recipe = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise RecipeError(_explain(str(path), error)) from None
    assert isinstance(recipe, Recipe)
    check(recipe)
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain containers, for rge.json and the log."""
    return OmegaConf.to_container(OmegaConf.structured(recipe), resolve=True)  # type: ignore[return-value]


def check(recipe: Recipe) -> None:
    """Check what types cannot say, and complete the loss weights.

    Raises:
        RecipeError: names the key, the value and what is allowed.
    """
    _one_of("stage", recipe.stage, ["all", "cold_start", "joint"])
    _one_of("loss.anchor", recipe.loss.anchor, ["self", "oracle", "none"])
    _one_of("model.dtype", recipe.model.dtype, ["float32", "bfloat16"])
    _one_of("optim.name", recipe.optim.name, ["adamw", "muon"])
    _one_of("data.augment", recipe.data.augment, ["none", "drawing"])
    if (recipe.model.path is None) == (recipe.model.scratch is None):
        raise RecipeError("give exactly one of model.path and model.scratch")
    if recipe.model.min_pixels > recipe.model.max_pixels:
        raise RecipeError(
            f"model.min_pixels ({recipe.model.min_pixels}) must not exceed model.max_pixels ({recipe.model.max_pixels})"
        )
    _positive("loss.temperature", recipe.loss.temperature)
    _positive("rollout.max_new_tokens", recipe.rollout.max_new_tokens)
    _positive("rollout.batch_size", recipe.rollout.batch_size)
    _positive("train.micro_batch_size", recipe.train.micro_batch_size)
    _positive("train.save_every", recipe.train.save_every)
    _positive("train.log_every", recipe.train.log_every)
    _positive("train.keep_last", recipe.train.keep_last)
    if recipe.rollout.temperature < 0:
        raise RecipeError(f"rollout.temperature must be >= 0 (0 is greedy), got {recipe.rollout.temperature}")
    for name in recipe.stages():
        stage: StageConfig = getattr(recipe, name)
        _positive(f"{name}.batch_size", stage.batch_size)
        _positive(f"{name}.lr", stage.lr)
        _one_of(f"{name}.schedule", stage.schedule, ["cosine", "linear", "constant"])
        if stage.steps is not None:
            _positive(f"{name}.steps", stage.steps)
        if not stage.sources:
            raise RecipeError(f"{name}.sources is empty: name at least one file, {name}.sources=[{{path: FILE.jsonl}}]")
        for source in stage.sources:
            _positive(f"{name}.sources weight of {source.path}", source.weight)
    recipe.loss.alpha_lm, recipe.loss.alpha_con = _loss_weights(recipe.loss)


def _loss_weights(loss: LossConfig) -> tuple[float, float]:
    lm, con = loss.alpha_lm, loss.alpha_con
    if lm is None and con is None:
        if loss.ratio == "none":
            return 0.0, 1.0
        parts = loss.ratio.split(":")
        try:
            ratio_lm, ratio_con = (float(part) for part in parts)
        except ValueError:
            raise RecipeError(f"loss.ratio must be LM:CONTRASTIVE such as 1:10, or none; got {loss.ratio!r}") from None
        if min(ratio_lm, ratio_con) < 0 or ratio_lm + ratio_con <= 0 or not math.isfinite(ratio_lm + ratio_con):
            raise RecipeError(f"loss.ratio needs two weights >= 0, not both zero; got {loss.ratio!r}")
        return ratio_lm / (ratio_lm + ratio_con), ratio_con / (ratio_lm + ratio_con)
    if lm is None:
        lm = 1.0 - con  # type: ignore[operator]
    if con is None:
        con = 1.0 - lm
    if not (0 <= lm <= 1 and 0 <= con <= 1 and math.isclose(lm + con, 1.0, abs_tol=1e-9)):
        raise RecipeError(
            f"loss.alpha_lm ({lm}) and loss.alpha_con ({con}) must lie in [0, 1] and sum to 1 (paper eq. 10); "
            "give one of them and the other follows"
        )
    return lm, con


def split_override(argument: str) -> tuple[str, str]:
    """Split ``key=value``.

    Raises:
        RecipeError: there is no ``=``.
    """
    key, mark, value = argument.partition("=")
    if not mark or not key:
        raise RecipeError(f"arguments are key=value, got {argument!r}")
    return key.lstrip("-"), value


def nearest(key: str, known: Sequence[str]) -> str:
    """A hint naming the known key most like `key`."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close:
        close = difflib.get_close_matches(key.rsplit(".", 1)[-1], [name.rsplit(".", 1)[-1] for name in known], n=1)
        close = [name for name in known if close and name.rsplit(".", 1)[-1] == close[0]]
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(sorted(known))}"


def _known_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    hints = get_type_hints(cls)
    for item in fields(cls):
        keys.append(prefix + item.name)
        kind = hints[item.name]
        for candidate in (kind, *getattr(kind, "__args__", ())):
            if is_dataclass(candidate):
                keys += _known_keys(candidate, f"{prefix}{item.name}.")  # type: ignore[arg-type]
    return keys


def _explain(origin: str, error: OmegaConfBaseException) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    if isinstance(error, ConfigKeyError):
        return f"{origin}: unknown key {key}{nearest(str(key), _known_keys(Recipe))}"
    reason = str(error).splitlines()[0]
    return f"{origin}: {key}: {reason}"


def _available(recipes: Path) -> list[str]:
    return sorted(path.stem for path in recipes.glob("*.yaml"))


def _recipe_path(name: str, recipes: Path) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml")) else recipes / f"{name}.yaml"
    if not path.is_file():
        available = _available(recipes)
        close = difflib.get_close_matches(name, available, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RecipeError(f"unknown recipe {name!r}: {hint}there are: {', '.join(available)}")
    return path


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise RecipeError(f"{key} must be one of {', '.join(allowed)}; got {value!r}")


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise RecipeError(f"{key} must be > 0, got {value}")
