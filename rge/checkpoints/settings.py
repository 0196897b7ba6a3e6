"""Settings of an embedder: the content of a checkpoint's ``rge.json``, and what was chosen on loading."""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rge.common.errors import Fault, UserError
from rge.common.modes import DIRECT_ABOVE, Mode
from rge.content.config import VideoConfig
from rge.identity.run_identity import Identity

RGE_JSON = "rge.json"
EYES = "eyes.json"
"""What a vision tower was taught to name, in a backbone that is built from nothing."""


class CheckpointError(UserError):
    """A checkpoint cannot be read or written; the message names it and the fix."""


class _Frozen(BaseModel):
    """Typed and immutable; unknown keys are kept, so that newer versions and plugins may add some."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def content(self) -> dict[str, Any]:
        """Explicitly set values, for files."""
        return self.model_dump(exclude_unset=True)

    def but(self, **changes: Any) -> Self:
        """A copy with other values; None leaves one as it is."""
        given = {name: value for name, value in changes.items() if value is not None}
        return type(self).model_validate(self.content() | given)


class Pixels(_Frozen):
    """Pixels that a picture is scaled to."""

    min: int
    max: int

    def between(self, least: int | None, most: int | None) -> dict[str, int]:
        """With another minimum or maximum, see `but`; a UserError if they contradict each other."""
        changed = self.but(min=least, max=most)
        if changed.min > changed.max:
            why = f"min_pixels={changed.min} is more than max_pixels={changed.max}: give both"
            raise UserError(why).about("min_pixels", "max_pixels")
        return changed.content()


class Generation(_Frozen):
    """Generation settings of rationales, see `rge.rollout.generate.generate`."""

    max_new_tokens: int
    max_rationale_tokens: int | None = None  # fewer, from 0 (the direct state) on; None: `max_new_tokens`
    temperature: float = 0.0
    min_new_tokens: int = 0
    direct_above: float = DIRECT_ABOVE
    stop: str | None = None  # the token that ends a rationale


class Instructions(_Frozen):
    """Instructions of the training queries, see `rge.checkpoints.description.instructions_of`."""

    default: str | None
    known: list[str]
    by_task: dict[str, str | None]


class TaskPrompts(_Frozen):
    """How the prompts of a training task differ from those of the others; None: not at all."""

    profile: str | None = None
    pixels: Pixels | None = None
    max_prompt_tokens: int | None = None
    video: VideoConfig | None = None


class BaseOfAdapters(_Frozen):
    """The base of a checkpoint of adapters, see `rge.model.adapter_files.Base`."""

    path: str
    revision: str | None
    sha256: str
    rows: int
    beside: str | None


class Origin(_Frozen):
    """A pretrained part of a small model, from a package, see `rge.small_models.build.origins`."""

    part: str
    name: str
    licence: str
    file: str
    bytes: int
    sha256: str
    hub_id: str | None = None


class Source(_Frozen):
    """A source of training records as in the recipe, without the keys at their default: see `rge.data.config.SourceConfig`."""

    path: str | None = None
    dataset: str | None = None
    type: str | None = None


class TrainedStage(_Frozen):
    """A stage of training, and the records that it read; ``naming`` is that of a small base's vision tower."""

    stage: str
    sources: list[Source]


Measured = dict[str, float | dict[str, float]]
"""Figures by name, such as ``val_loss``; those by source by its title."""


class Validated(_Frozen):
    """Figures on held-out records, see `rge.validation.Validation.measure`."""

    metric: str
    sources: list[str]  # titles
    figures: Measured


class RecordedModel(_Frozen):
    """The recipe's ``model``."""

    path: str
    dtype: str


class RecordedAdaptive(_Frozen):
    """The recipe's ``loss.adaptive``."""

    share: float


class RecordedLoss(_Frozen):
    """The recipe's ``loss``."""

    temperature: float
    adaptive: RecordedAdaptive


class RecordedRecipe(_Frozen):
    """The recipe of a checkpoint's last stage: what others than resuming read of it is typed, and the rest is kept."""

    recipe: str
    model: RecordedModel
    loss: RecordedLoss


class Settings(_Frozen):
    """Everything besides the weights that decides an embedder's embeddings, and caveats about its figures."""

    profile: str
    generation: Generation
    recipe: RecordedRecipe | None = None  # of its last stage's training; None for other models
    trained_on: list[TrainedStage] = []  # oldest first; unknown for other models
    reasons: Literal["query", "none"] | None = None  # the side that gets a rationale, if any
    max_prompt_tokens: int | None = None
    pixels: Pixels | None = None
    video: VideoConfig | None = None  # frames of clips; None: by default
    dimensions: list[int] = []
    instructions: Instructions | None = None
    tasks: dict[
        str, TaskPrompts
    ] = {}  # by the names in `Instructions.by_task`; those with prompts of their own
    dtype: str = "float32"
    quantization: str | None = None
    exact: bool = False  # every row is computed alone
    engine: str | None = None  # set if vLLM generates the rationales
    device: str = "cpu"
    modes: list[Mode] | None = None  # of queries; None: all that its training allows
    notes: list[str] = []  # warnings about how it was found and loaded
    model: str | None = None
    adapter: str = "rge"
    revision: str | None = None
    mmeb_instructions: str | None = None
    differs_from_release: list[str] | None = None  # known differences from its original evaluation

    def asking(self, **generation: Any) -> Self:
        """A copy with other generation settings."""
        return self.but(generation=self.generation.but(**generation).content())

    def check_cap(self, cap: int | None) -> None:
        """Raise UserError for a rationale's cap below 0, or above that of generation."""
        most = self.generation.max_new_tokens
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or not 0 <= cap <= most):
            raise UserError(
                f"max_rationale_tokens must be 0 to {most}, the most that this embedder writes, got {cap!r}; max_new_tokens= on "
                "loading raises it"
            ).about(Fault("range", "max_rationale_tokens"))

    def of_task(self, task: str) -> Self:
        """A copy with the prompts of a training task, whose instruction becomes the default."""
        prompts, known = self.tasks.get(task, TaskPrompts()), self.instructions
        return self.but(
            instructions=known and known.model_copy(update={"default": known.by_task.get(task)}),
            profile=prompts.profile,
            max_prompt_tokens=prompts.max_prompt_tokens,
            pixels=prompts.pixels and prompts.pixels.content(),
            video=prompts.video,
        )

    def with_prompts(
        self,
        profile: str | None = None,
        max_prompt_tokens: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Self:
        """A copy in which these settings hold for every task."""
        tasks = {
            name: task.but(
                profile=profile,
                max_prompt_tokens=max_prompt_tokens,
                pixels=task.pixels and task.pixels.between(min_pixels, max_pixels),
            ).content()
            for name, task in self.tasks.items()
        }
        pixels = self.pixels and self.pixels.between(min_pixels, max_pixels)
        return self.but(
            profile=profile, max_prompt_tokens=max_prompt_tokens, pixels=pixels, tasks=tasks or None
        )

    @property
    def query_mode(self) -> Mode:
        """How queries were trained: with a rationale, or directly."""
        return "direct" if self.reasons == "none" else "reasoning"

    @property
    def decides_itself(self) -> bool:
        """Whether it was trained to answer some queries directly with ``<emb>``."""
        return self.recipe is not None and self.recipe.loss.adaptive.share > 0

    @property
    def min_rationale_tokens(self) -> int:
        """``<emb>`` is suppressed before this many tokens in the mode ``reasoning``, which must not answer directly."""
        return max(self.generation.min_new_tokens, int(self.decides_itself))

    def check_mode(self, mode: str) -> None:
        """Raise UserError for a mode that it was not trained for."""
        if self.modes is not None and mode not in self.modes:
            raise UserError(
                f"{self.model or 'this model'} writes no rationales: use query_mode={self.modes[0]}"
            ).about(Fault("choice", "query_mode", tuple(self.modes)))
        if mode == "auto" and not self.decides_itself:
            raise UserError(
                "mode=auto needs a checkpoint that was trained to decide (loss.direct and loss.adaptive.share above 0); "
                "use mode=reasoning or mode=direct with this one"
            ).about(Fault("choice", "mode", ("reasoning", "direct")))


class CheckpointSettings(Settings):
    """Content of ``rge.json``: what an embedder needs and a model config lacks."""

    format: Literal[1]
    emb_id: int
    max_prompt_tokens: int
    pixels: Pixels
    recipe: RecordedRecipe
    reasons: Literal["query", "none"]
    stage: str
    step: int
    trained_on: list[TrainedStage]
    instructions: Instructions
    validation: Validated | None = None
    identity: Identity | None = None
    rge_version: str
    git_commit: str | None
    base: BaseOfAdapters | None = None
    origins: list[Origin] = []


def read_settings(checkpoint: Path) -> CheckpointSettings:
    """A checkpoint's ``rge.json``; CheckpointError: there is none, or it is damaged or written by a newer format."""
    path = checkpoint / RGE_JSON
    if not checkpoint.is_dir():
        raise CheckpointError("it does not exist", checkpoint, kind="missing")
    if not path.is_file():
        raise CheckpointError(
            f"it has no {RGE_JSON}, so it is not a checkpoint of rge; finished ones are in <out>/<stage>/final",
            checkpoint,
            kind="foreign",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"it is not valid JSON: {error}", path, kind="json") from None
    if isinstance(content, dict) and content.get("format") != 1:
        raise CheckpointError(
            f"it has format {content.get('format')}, this version reads format 1", path, key="format"
        )
    try:
        return CheckpointSettings.model_validate(content)
    except ValidationError as error:
        wrong = {".".join(map(str, one["loc"])) or "content": one["msg"] for one in error.errors()}
        problems = "; ".join(f"{key}: {why}" for key, why in wrong.items())
        raise CheckpointError(
            f"it is damaged ({problems}): copy it again from the run", path, kind="damaged"
        ).about(*wrong) from None
