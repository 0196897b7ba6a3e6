"""Optimizers, and the learning rate as a function of the step."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rge.optim.config import OptimConfig, StageConfig
from rge.optim.muon import Muon


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for embeddings, output matrix and vectors, as one optimizer.

    Muon (`rge.optim.muon`) orthogonalises the update of a matrix. Its step is scaled to AdamW's root mean square, so that
    both use the same learning rate; its momentum is fixed. On models trained from scratch it needs far fewer steps than AdamW;
    the paper's fine-tuning uses AdamW.
    """

    def __init__(
        self, matrices: list[dict], others: list[dict], *, lr: float, betas: tuple[float, float], eps: float
    ):
        self._muon = Muon(matrices, lr=lr)
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], defaults={})
        self._link()

    def _link(self) -> None:
        # Both share this optimizer's groups and state, for saving, loading and changes of the rate.
        count = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state saved by this class."""
        super().load_state_dict(state_dict)
        self._link()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # accelerate passes None
        """Update all parameters that have a gradient."""
        self._muon.step()
        self._adamw.step()


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    lr: float,
    parts: Mapping[str, Sequence[nn.Parameter]] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Optimizer over the trainable parameters; norms, biases and other vectors are not decayed.

    Weight decay is decoupled and multiplied by the rate, which is `lr` times the factor in `OptimConfig.lr_scale` of a parameter's
    part (`rge.model.backbone.parts_of`); those of no part have 1.
    """
    name, betas, eps = config.name, config.betas, config.eps
    if name not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be adamw or muon, got {name!r}")
    scales = vars(config.lr_scale)
    scale = {id(parameter): scales[part] for part, own in parts.items() for parameter in own}
    # Tied or not, the output matrix is trained like the embeddings, as Muon's author recommends.
    modules: list[Any] = [*model.modules()]
    words = [module for module in modules if isinstance(module, nn.Embedding)]
    heads = [module.get_output_embeddings() for module in modules if hasattr(module, "get_output_embeddings")]
    by_token = {id(module.weight) for module in (*words, *filter(None, heads))}
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Weights sharded by ZeRO-3 on loading are vectors here, which would not be decayed.
            num_axes = len(getattr(parameter, "ds_shape", parameter.shape))
            by_muon = name == "muon" and num_axes >= 2 and id(parameter) not in by_token
            key = by_muon, scale.get(id(parameter), 1.0), num_axes >= 2
            groups.setdefault(key, []).append(parameter)
    matrices: list[dict] = []
    others: list[dict] = []
    for (by_muon, scaled, decayed), parameters in groups.items():
        group = {
            "params": parameters,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "lr_ratio": scaled,
        }
        (matrices if by_muon else others).append(group)
    if name == "adamw":
        return torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
    return MuonAdamW(matrices, others, lr=lr, betas=betas, eps=eps)


def learning_rate(step: int, num_steps: int, stage: StageConfig) -> float:
    """Learning rate of a step, counted from 0: linear warm-up to `StageConfig.lr`, then the stage's schedule."""
    if step < stage.warmup_steps:
        return stage.lr * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, num_steps - stage.warmup_steps)
    if stage.schedule == "constant":
        return stage.lr
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if stage.schedule == "cosine" else 1 - progress
    return stage.lr * (stage.min_lr_ratio + (1 - stage.min_lr_ratio) * falling)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group, times the group's ratio."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
