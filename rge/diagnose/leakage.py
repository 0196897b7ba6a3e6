"""Does an oracle rationale leak the target? The paper's diagnostic (RGE, arXiv:2511.16150, Fig. 4), from one checkpoint.

docs/diagnose.md describes the four kinds of triplets. With a wrong query only the oracle points to the target, so a loss below
chance (the logarithm of the number of candidates) is a leak.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rge.checkpoints.settings import read_settings
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.data.collate import Batch, Source, StepBatches
from rge.data.config import DataConfig
from rge.data.mixture import Mixture
from rge.diagnose.pairs import open_data
from rge.embedder import Embedder
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep

TRIPLETS = ("right", "wrong target", "wrong query", "own rationale")
LEAKS, CLEAN = 0.5, 0.1
"""Gain with wrong queries, as a share of that with right triplets: from here on a leak; up to here no leak."""


def leakage(
    checkpoint: Path,
    data: Path,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int = 0,
    base: str | None = None,
) -> dict[str, Any]:
    """Train a copy of the checkpoint on each kind of triplets.

    The checkpoint should be a cold start's, which writes rationales but was not trained to embed; the data need oracle rationales.
    AdamW with a constant learning rate makes `steps` steps per kind of triplets.

    Returns:
        ``chance``, ``curves`` (kind -> loss_lm and loss_contrastive per step), ``gain`` (kind -> nats below chance over the
        last fifth), ``leak`` (the wrong query's gain as a share of the right one's) and a ``verdict``.
    """
    temperature = read_settings(checkpoint).recipe.loss.temperature
    records = open_data(data, need_rationale=True)
    mixture = Mixture([len(records)], [1.0], batch_size, seed)
    config = DataConfig(max_negatives=0, sort_by_length=False)
    curves: dict[str, dict[str, list[float]]] = {
        kind: {"loss_lm": [], "loss_contrastive": []} for kind in TRIPLETS
    }
    chances: list[float] = []
    for kind, curve in curves.items():
        torch.manual_seed(seed)
        encoder = Embedder.from_pretrained(checkpoint, base=base, dtype="float32")
        encoder.model.train().requires_grad_(True)
        anchor = "self" if kind == "own rationale" else "oracle"
        objective = Objective(0.5, 0.5, temperature, anchor, lm_on_candidates=False)
        batches = StepBatches([Source(records, encoder.builder, config)], mixture, rank=0, world_size=1)
        optimizer = torch.optim.AdamW(encoder.model.parameters(), lr=lr, weight_decay=0.0)
        for step in progress_bar(range(steps), desc=kind, unit="step"):
            batch = rearrange(batches[step], kind, np.random.default_rng([seed, step]))
            report = _step(encoder, objective, batch, optimizer)
            for name, values in curve.items():
                values.append(report[name])
            if kind == "right":
                chances.append(chance(batch))
        if not any(chances):
            raise UserError(
                "no batch had more than one target, so there was nothing to tell apart; leakage needs records with different "
                "positives, or a larger batch_size",
                data,
            )
    return judge(curves, float(np.mean(chances)))


def _step(
    encoder: Embedder, objective: Objective, batch: Batch, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    embedder, batch_size = encoder.model, len(batch.queries)
    rollout = None
    if objective.needs_rollout:
        cap = encoder.settings.generation.max_new_tokens
        rollout = Rollout(generate(embedder, batch.queries, max_new_tokens=cap, batch_size=batch_size))
    report = TrainingStep(embedder, embedder, objective, batch_size)(batch, rollout)
    torch.nn.utils.clip_grad_norm_(embedder.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return report


def rearrange(batch: Batch, kind: str, rng: np.random.Generator) -> Batch:
    """Turn a batch of right triplets into one of `TRIPLETS`: a random cycle through the batch exchanges partners."""
    if kind == "right":
        return batch
    order = rng.permutation(len(batch.queries))
    other = np.empty_like(order)
    other[order] = np.roll(order, 1)
    moved = ("positive", "right_answers") if kind == "wrong target" else ("queries",)
    changes: dict[str, Any] = {name: [getattr(batch, name)[row] for row in other] for name in moved}
    return replace(batch, **changes)


def chance(batch: Batch) -> float:
    """InfoNCE at chance: the mean logarithm of the number of valid candidates."""
    identity_C = torch.tensor(batch.candidate_identity)
    _, ignored_BC, _ = candidate_masks(batch, identity_C, 0)
    return float((~ignored_BC).sum(dim=1).double().log().mean())


def judge(curves: dict[str, dict[str, list[float]]], level: float) -> dict[str, Any]:
    """Interpret the curves."""
    gain = {}
    for kind, curve in curves.items():
        tail = curve["loss_contrastive"][-max(len(curve["loss_contrastive"]) // 5, 1) :]
        gain[kind] = level - float(np.mean(tail))
    found = {"chance": level, "curves": curves, "gain": gain}
    right, wrong = gain["right"], gain["wrong query"]
    if right < 0.1 * level:
        below = f"{right:.2f} nats below chance ({level:.2f})"
        verdict = f"no verdict: right triplets got {below}; give more steps or another lr"
        return found | {"leak": None, "verdict": verdict}
    leak = max(wrong, 0.0) / right
    words = (
        "the oracle rationale leaks the target: with wrong queries the loss still falls" if leak >= LEAKS
        else "no leak is seen: with wrong queries the loss falls" if leak <= CLEAN
        else "the oracle rationale leaks in part: with wrong queries the loss falls"
    )  # fmt: skip
    learned = f"what right triplets learn ({wrong:.2f} of {right:.2f} nats below chance)"
    return found | {"leak": leak, "verdict": f"{words} by {100 * leak:.0f} % of {learned}"}


def table(result: dict[str, Any]) -> str:
    """The printed table: losses at the beginning and at the end."""
    lines = [
        f"contrastive loss of a model that knows nothing: {result['chance']:.3f} nats",
        "",
        f"{'triplets':<16}{'LM loss, first and last fifth':>32}{'contrastive, first and last fifth':>36}{'below chance':>14}",
    ]
    for kind, curve in result["curves"].items():
        cells = []
        for name in ("loss_lm", "loss_contrastive"):
            size = max(len(curve[name]) // 5, 1)
            cells.append(f"{np.mean(curve[name][:size]):.3f} -> {np.mean(curve[name][-size:]):.3f}")
        lines.append(f"{kind:<16}{cells[0]:>32}{cells[1]:>36}{result['gain'][kind]:>14.3f}")
    return "\n".join([*lines, "", result["verdict"]])
