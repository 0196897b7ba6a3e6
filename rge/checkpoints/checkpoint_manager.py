"""Keeps a stage's states and checkpoints: to resume from, the best so far, the final one.

On a cluster's SIGTERM or a user's Ctrl-C the step is finished, a state is saved, and the process exits with 143 or 130.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from torch import nn

import rge
from rge.checkpoints.description import instructions_of, prompts_of, trained_on
from rge.checkpoints.export import export, git_commit
from rge.checkpoints.manifest import damage, discard
from rge.checkpoints.resume import changed_with, check_not_past, check_same_recipe, check_same_run
from rge.checkpoints.settings import (
    RGE_JSON,
    CheckpointError,
    CheckpointSettings,
    Generation,
    Measured,
    RecordedRecipe,
    Validated,
    read_settings,
)
from rge.checkpoints.training_state import States, complete_states, step_name
from rge.common.errors import UserError
from rge.common.prompt_profiles import EMB_TOKEN
from rge.config import Recipe, RecipeJson, to_dict
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.stop_signals import exit_after, received_by_any, stop_after_this_step_at_signals
from rge.identity.run_identity import Identity
from rge.model.adapter_files import Base
from rge.model.adapters import has_adapters, merge
from rge.model.embedding_model import EmbeddingModel
from rge.optim.config import StageConfig
from rge.validation import Validation

T = TypeVar("T")


class DivergedError(UserError, FloatingPointError):
    """A loss or gradient is not finite; the message names the step's records and the state before."""


@contextmanager
def divergence_explained(name: str, folder: Path, skipped: int = 0) -> Iterator[None]:
    """Inside, a loss or gradient that is not finite raises DivergedError, which names the last good state.

    `skipped` is the number of successive steps that were left out before, the recipe's ``optim.skip_nonfinite``.
    """
    try:
        yield
    except FloatingPointError as error:
        last = "No state was saved before (train.save_every)"
        for path in complete_states(folder / "state"):
            if damage(path, contents=False) is None:
                last = f"The last good state is of step {int(path.name.removeprefix('step_'))}: {path}"
        advice = (
            "The same command would diverge again. If it is a single batch, inspect its records, or continue without its update: "
            "the same command with optim.skip_nonfinite=1. Otherwise start"
        )
        if skipped:
            advice = f"What came before it was left out already (optim.skip_nonfinite={skipped}), so it is no single batch. Start"
        raise DivergedError(
            f"{name} has diverged: {error}. {last}. {advice} with another out= and a lower {name}.lr, more {name}.warmup_steps "
            "or a smaller optim.max_grad_norm"
        ) from error


class CheckpointManager:
    """Saves, validates and stops one stage's training; every process calls every method."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        folder: Path,
        num_steps: int,
        validation: Validation | None,
        embedder: EmbeddingModel,
        model: nn.Module,
        optimizer,
        accelerator: Accelerator,
        identity: Identity,
        start: str,
    ):
        self.recipe, self.name, self.folder, self.num_steps = recipe, name, folder, num_steps
        self.validation, self.identity = validation, identity
        self.embedder, self.model, self.accelerator = embedder, model, accelerator
        keep, background = recipe.train.keep_last, recipe.train.background_save
        self.states = States(
            accelerator, embedder, optimizer, folder / "state", keep_last=keep, background=background
        )
        metric = recipe.validation.metric
        self._saved = 0  # step of the newest state
        # The best value so far (lower is better) and the measurements since, for `validation.patience`.
        self._best: tuple[float, int] = (math.inf, 0)
        self._validated: Validated | None = None
        if (
            accelerator.is_main_process
        ):  # now: at the end of the stage, an unreachable hub would cost the training
            stage: StageConfig = getattr(recipe, name)
            contents = [identity.get("records", {}).get(source.key, {}) for source in stage.sources]
            weights = stage.weights([content.get("records") for content in contents])
            self._instructions = instructions_of(stage.sources, weights)
            self._prompts = prompts_of(recipe, stage.sources, weights, self._instructions.by_task)
            self._trained_on = trained_on(start, recipe, name)
        if recipe.export.adapters_only and accelerator.is_main_process:
            commit, rows = getattr(embedder.model.config, "_commit_hash", None), embedder.rows_of_base
            self._base = Base.of(start, commit, rows, recipe.model.path)
        self.metric = "val_" + (metric if validation and validation.objective.compares else "loss_lm")
        stop_after_this_step_at_signals()

    def resume(self) -> int:
        """Load the newest intact state, if any, and return the number of finished steps.

        CheckpointError: all states are damaged, or another recipe made them; LaunchError: this launch cannot read them.
        """
        found = self.states.latest()
        if found is None:
            return 0
        path, done = found  # not necessarily the one checked in pre-flight
        rounding = check_same_recipe(done["recipe"], self.recipe, self.name, path)
        launch.check_resume(done["launch"], self.accelerator, path)
        rounding += check_same_run(done["identity"], self.identity, path)
        check_not_past(done["step"], self.num_steps, self.name, path)
        history = list(done["identity"].get("resumed_with", []))
        if changed := changed_with(done["recipe"], self.recipe, self.name):
            history.append({"step": done["step"], "changed": changed})
            words = ", ".join(f"{key} {then!r} -> {now!r}" for key, (then, now) in changed.items())
            self.accelerator.print(f"{self.name}: resumed with {words} (resume_with)")
        if history:
            self.identity = {**self.identity, "resumed_with": history}
        self.states.load(path)
        self._saved = done["step"]
        self._best = tuple(done["best"])
        if self._is_over():
            self.num_steps = self._saved
        # Figures of an earlier step are not those of the weights that are exported next.
        if done["validated"] is not None and self._saved == self.num_steps:
            self._validated = Validated.model_validate(done["validated"])
        self.states.announce(self.name, done["step"], path, rounding)
        return done["step"]

    def steps(self, batches: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Steps from the resumed one on, with their batches, until the last one or that after which `validation.patience` ends."""
        for step, batch in enumerate(batches, start=self._saved):
            yield step, batch
            if step + 1 == self.num_steps:
                return

    def validate(self, step: int) -> Measured:
        """Every `validation.every` steps, measure the held-out records, and keep the checkpoint if it is among the best.

        Returns the figures of `Validation.measure` and ``val_s``, the seconds that this took; otherwise nothing.
        """
        if self.validation is None or (step % self.recipe.validation.every and step != self.num_steps):
            return {}
        began = time.perf_counter()
        with dist.whole_model(self.accelerator, self.model):
            figures = self.validation.measure(self.embedder)
        titles = [source.title for source in self.recipe.validation.sources]
        self._validated = Validated(metric=self.metric.removeprefix("val_"), sources=titles, figures=figures)
        self._keep_if_best(step, figures)
        self._stop_if_no_better(step, figures)
        return {**figures, "val_s": time.perf_counter() - began}

    def after_step(self, step: int) -> None:
        """Save a state every `train.save_every` steps, and after a SIGTERM or SIGINT.

        CheckpointError: this or an earlier state could not be written; SystemExit: after such a signal to any process, with 143 or
        130: neither success, after which a scheduler would start the next job, nor the 1 of a crash.
        """
        self.states.check()
        stop = received_by_any(self.embedder.device)
        if step < self.num_steps and (stop or step % self.recipe.train.save_every == 0):
            self._save(step)
        if not stop or step == self.num_steps:  # a stage that is over is exported first
            return
        self.states.wait()
        exit_after(stop, self.accelerator, self.name, step, self.num_steps, self.states.folder)

    def finish(self) -> None:
        """Export the trained model as a checkpoint that evaluation and plain transformers load.

        A state of the last step is saved first, so that a failed export (CheckpointError) costs no training.
        """
        if self._saved != self.num_steps:
            self._save(self.num_steps)
        try:
            self.states.close()
        except CheckpointError as error:
            # The checkpoint is smaller and may still fit on the disk; then the state is not needed.
            self.accelerator.print(f"{self.name}: warning: {error}")
        self._export(self.folder / "final", self.num_steps)  # the last step is measured
        self.accelerator.free_memory()
        self.accelerator.print(f"{self.name}: wrote {self.folder / 'final'}")

    def _save(self, step: int) -> None:
        meta = {
            "recipe": to_dict(self.recipe),
            "launch": launch.describe(self.accelerator),
            "validated": self._validated and self._validated.content(),
            "best": self._best,
            "identity": self.identity,
        }
        self.states.save(step, meta)
        self._saved = step

    def _value(self, figures: Measured) -> float:
        """What decides which checkpoint is best; lower is better, and no number is worst."""
        by = self.recipe.validation.best_by
        found, by_source = figures[self.metric], figures.get(f"{self.metric}_by_source")
        if by is not None and isinstance(by_source, dict):
            [place] = [
                place for place, it in enumerate(self.recipe.validation.sources) if by in (it.name, it.label)
            ]
            found = list(by_source.values())[place]
        assert isinstance(found, float)
        return math.inf if math.isnan(found) else -found if self.metric == "val_hit_at_1" else found

    def _is_over(self) -> bool:
        patience = self.recipe.validation.patience
        return 0 < patience <= self._best[1]

    def _stop_if_no_better(self, step: int, figures: Measured) -> None:
        """End the stage after this step if the last `validation.patience` measurements were no better than the best before."""
        best, since = self._best
        value = self._value(figures)
        self._best = (value, 0) if value < best else (best, since + 1)
        if self._is_over() and step < self.num_steps:
            self.num_steps = step
            self.accelerator.print(
                f"{self.name}: ends after step {step}: {self._best[1]} measurements in a row were no better than the best "
                "(validation.patience)"
            )

    def _keep_if_best(self, step: int, figures: Measured) -> None:
        keep = self.recipe.validation.keep_best
        if keep == 0:
            return
        saved: dict[int, float] = {}
        best = (self.folder / "best").glob(f"step_*/{RGE_JSON}")
        for path in best if self.accelerator.is_main_process else ():
            settings = read_settings(path.parent)
            measured = settings.validation.figures if settings.validation else {}
            # With other figures, it was measured in another way, by another version.
            is_alike = measured.keys() >= figures.keys() and self._measured_alike(settings, path.parent)
            saved[settings.step] = self._value(measured) if is_alike else math.inf
        values = dist.from_main(saved) | {step: self._value(figures)}
        ranked = sorted(values, key=lambda at: (values[at], at))  # best first; of equals the earlier
        if step in ranked[:keep]:
            self._export(self.folder / "best" / step_name(step), step)
        if self.accelerator.is_main_process:
            for old in ranked[keep:]:
                discard(self.folder / "best" / step_name(old))

    def _measured_alike(self, settings: CheckpointSettings, path: Path) -> bool:
        """Whether a best checkpoint is this run's, with figures of the same held-out records: others cannot be compared."""
        made_with = settings.recipe.content()
        try:
            check_same_recipe(made_with, self.recipe, self.name, path)
            check_same_run(settings.identity or {}, self.identity, path)
        except CheckpointError:
            return False
        return _held_out(made_with) == _held_out(to_dict(self.recipe))

    def _export(self, path: Path, step: int) -> None:
        weights = dist.full_weights(self.accelerator, self.model, self.embedder)
        if self.accelerator.is_main_process:
            if not self.recipe.export.adapters_only and has_adapters(self.embedder.model):
                weights = dict(merge(self.embedder.model, weights))
            export(self.embedder, path, self._settings(path, step), weights)
        self.accelerator.wait_for_everyone()

    def _settings(self, path: Path, step: int) -> CheckpointSettings:
        recipe, (prompts, tasks) = self.recipe, self._prompts
        unreasoned = self.name == "joint" and recipe.loss.anchor == "none"
        settings = CheckpointSettings(
            format=1,
            emb_id=self.embedder.emb_id,
            generation=Generation(
                max_new_tokens=recipe.rollout.max_new_tokens, temperature=0.0, stop=EMB_TOKEN
            ),
            reasons="none" if unreasoned else "query",
            instructions=self._instructions,
            trained_on=self._trained_on,
            recipe=RecordedRecipe.model_validate(to_dict(recipe)),
            stage=self.name,
            step=step,
            identity=self.identity,
            rge_version=rge.__version__,
            git_commit=git_commit(),
            **dict(prompts),
        )
        return settings.but(
            tasks=tasks or None,
            dimensions=sorted(recipe.loss.matryoshka_dims) if self.name != "cold_start" else None,
            validation=self._validated,
            base=self._base.as_recorded_in(path) if recipe.export.adapters_only else None,
        )


def _held_out(recipe: RecipeJson) -> RecipeJson:
    return {key: recipe["validation"].get(key) for key in ("sources", "max_records")}
