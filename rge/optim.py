"""Optimizer and learning rate, both without hidden state: the rate of a step is a function of the step."""

import math

import torch
from torch import nn


def make_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms, biases and other vectors are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=tuple(betas), eps=eps)


def learning_rate(
    step: int, *, num_steps: int, lr: float, warmup_steps: int, schedule: str, min_lr_ratio: float
) -> float:
    """Learning rate of a step.

    Args:
        step: counts from zero.
        num_steps: of the stage.
        lr: peak.
        warmup_steps: steps over which the rate rises linearly to the peak.
        schedule: ``cosine``, ``linear`` or ``constant`` after that.
        min_lr_ratio: share of the peak that the schedule ends at.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "constant":
        return lr
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * falling)


def set_learning_rate(optimizer, lr: float) -> None:
    """Write the rate into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
