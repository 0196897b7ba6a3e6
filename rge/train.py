"""Train a reasoning-guided multimodal embedder (RGE, arXiv:2511.16150).

    accelerate launch rge/train.py recipe=qwen25vl_3b [key=value ...]

Three stages. The cold start teaches the model to write rationales, by language modelling on oracle rationales. The joint
stage adds InfoNCE on embeddings taken after rationales that the model writes itself, in every step:

    records --collate--> Batch --rollout--> own rationales --pack--> one row per query:
        [ prompt ][ own rationale, <emb> ][ oracle rationale, <emb> ]
    --embedder--> state at the first <emb> (InfoNCE), nll of the second branch (LM) --> backward, step

The oracle's tokens cannot reach the contrastive state: the branches do not see one another. The stage rl is the same step
with several sampled rationales per query: the better their states retrieve, the likelier they become. ``<out>/<stage>`` holds
metrics.jsonl, state/ (to resume from), best/ and final/ (Hugging Face directories plus rge.json). Running the same command
again resumes; finished stages are skipped. Benchmarks are run by ``rge eval``.
"""

import time
from pathlib import Path
from typing import Any

from rge.common.commands import answer_first
from rge.config import load_recipe

if __name__ == "__main__":  # a mistyped key is answered before torch is imported, which takes seconds
    answer_first(load_recipe)

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from rge.check import Checked, checked
from rge.checkpoints.checkpoint_manager import CheckpointManager, divergence_explained
from rge.checkpoints.resume import stage_identity
from rge.common.commands import start
from rge.config import Recipe
from rge.data.bad_records import BadRecords
from rge.data.collate import make_batches
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.failure_detection import watch_other_ranks
from rge.distributed.stop_signals import restoring_handlers
from rge.logs import Logs, end_trackers, start_trackers
from rge.mining.refresh import StageLoader
from rge.model.backbone import parts_of
from rge.model.embedding_model import embedder_to_train
from rge.objective import Objective
from rge.optim.config import StageConfig
from rge.optim.optimizers import learning_rate, make_optimizer, set_learning_rate
from rge.rl.credit import make_reinforcement
from rge.rollout.writer import Rollout, easy_share, make_writer, rollout_report
from rge.step.training_step import TrainingStep
from rge.validation import make_validation


def main(arguments: list[str]) -> None:
    """Run the stages of a recipe, one after the other, in a program that may go on afterwards."""
    with restoring_handlers():
        run_recipe(arguments)


def run_recipe(arguments: list[str]) -> None:
    """Run the stages of a recipe in a process of their own.

    It keeps the handlers of signals until it ends: launchers may forward the signal that ends it once more.
    """
    recipe = load_recipe(arguments)
    accelerator = launch.make_accelerator(recipe.train, recipe.model.dtype)
    with watch_other_ranks(recipe.train.silence_s), checked(recipe, accelerator) as run:
        if run.stages:  # not all finished
            train(recipe, run, accelerator)
    dist.close()


def train(recipe: Recipe, run: Checked, accelerator: Accelerator) -> None:
    """Train the stages that are not finished, each from the checkpoint of the one before."""
    start_trackers(accelerator, recipe)
    start = recipe.start
    for name in recipe.stages():
        folder = Path(recipe.out) / name
        if name in run.stages:
            with divergence_explained(name, folder, recipe.optim.skip_nonfinite):
                train_stage(recipe, name, folder, start, run, accelerator)
        start = str(folder / "final")
    end_trackers(accelerator)
    accelerator.end_training()


def train_stage(
    recipe: Recipe, name: str, folder: Path, start: str, run: Checked, accelerator: Accelerator
) -> None:
    """Train one stage from `start`, or from its own last state, and export it to ``folder/final``."""
    set_seed(recipe.train.seed)
    records, kept = run.records, run.kept[name]
    stage: StageConfig = getattr(recipe, name)
    objective = Objective.of(recipe, name)
    embedder = embedder_to_train(
        start, recipe.model, recipe.export.adapters_only, needs_head=objective.needs_head
    )
    batches = make_batches(recipe, stage, embedder.processor, records, **objective.needs)
    rewarded = name == "rl" and objective.needs_rollout
    reinforcement = make_reinforcement(recipe, embedder, folder, accelerator) if rewarded else None
    optimizer = make_optimizer(embedder, recipe.optim, stage.lr, parts_of(embedder.model))
    model, optimizer = dist.prepare(accelerator, embedder, optimizer, recipe.optim.max_grad_norm)

    writer = None
    if objective.needs_rollout:
        writer = make_writer(model, embedder, recipe, stage, accelerator, kept)

    training_step = TrainingStep(
        model,
        embedder,
        objective,
        recipe.train.micro_batch_size,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        keep=kept.where,
        backward=accelerator.backward,
        no_sync=lambda: dist.no_sync(accelerator, model),
        sources=batches.names,
    )
    num_steps = stage.num_steps(batches.mixture.num_records)
    validation = make_validation(recipe, objective, embedder.processor, records)
    commit = getattr(embedder.model.config, "_commit_hash", None)
    identity = stage_identity(recipe, name, records, start, commit, accelerator)
    manager = CheckpointManager(
        recipe, name, folder, num_steps, validation, embedder, model, optimizer, accelerator, identity, start
    )
    first_step = manager.resume()

    bad_records = BadRecords(recipe.data, batches.records, folder, first_step, batches.mixture)
    loader = StageLoader(
        recipe, batches, range(first_step, manager.num_steps), objective, model, embedder, accelerator, folder
    )
    logs = Logs(accelerator, folder, name, first_step, num_steps, recipe.train.log_every)
    skipped = 0  # steps in a row
    waited = time.perf_counter()
    for step, batch in manager.steps(loader):
        began, is_logged = time.perf_counter(), logs.is_due(step + 1)
        lr = learning_rate(step, num_steps, stage)
        set_learning_rate(optimizer, lr)

        # 1. The model writes its own rationales, without gradient, continuing the prompts that step 2 will need.
        rollout, credit = Rollout(()), None
        if writer is not None:
            with dist.whole_model(accelerator, model):
                rollout = writer(step, batch)
                if reinforcement is not None:
                    credit = reinforcement.begin(batch, rollout.rationales, is_logged)
                    rollout = rollout._replace(rationales=credit.rationales)
        rollout = rollout._replace(easy_share=easy_share(recipe.loss, step))
        rolled_out = time.perf_counter()

        report: dict[str, Any] = {}
        try:
            for update in range(objective.num_updates):  # several only in the stage rl
                if update:
                    rollout = rollout.after_update()
                # 2. All losses from one forward over prompt, own rationales and oracle rationale; backward.
                report |= training_step(batch, rollout, credit, by_source=is_logged)

                # 3. Clip and step, the same on every back end.
                source = f"step {step + 1}, records of this batch: {batch.record_ids}"
                report["grad_norm"] = dist.optimizer_step(
                    accelerator, model, optimizer, recipe.optim.max_grad_norm, source
                )
            skipped = 0
        except FloatingPointError as error:  # on all processes, before the update
            skipped += 1
            if skipped > recipe.optim.skip_nonfinite:
                raise
            optimizer.zero_grad()
            logs.skipped(step + 1, error)
            report = {"skipped_steps": skipped}

        took = time.perf_counter() - began
        report |= {"lr": lr, "wait_s": began - waited, "rollout_s": rolled_out - began, "step_s": took}
        report |= rollout_report(rollout, rolled_out - began, embedder.device)
        # 4. Periodically measure held-out records, keep the best, save a state to resume from.
        report |= loader.report() | bad_records.after_step(step + 1, batch)
        report |= manager.validate(step + 1)
        logs.step(step + 1, report, batches.coverage)
        if reinforcement is not None:
            reinforcement.after_step(report)
        with logs.saving():
            manager.after_step(step + 1)
        waited = time.perf_counter()
    logs.close()
    manager.finish()


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    start(run_recipe)
