"""Optimizers, and the learning rate as a function of the step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rge.config import OptimConfig, StageConfig
from rge.optim.muon import Muon


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices, AdamW for embeddings and vectors, as one optimizer.

    Muon (`rge.optim.muon`) orthogonalises the update of a matrix. Its step is scaled to AdamW's root mean square, so that
    both take the same learning rate. On models trained from scratch it needs far fewer steps than AdamW; the paper's
    fine-tuning uses AdamW.

    Args:
        matrices: parameter groups of weights of linear layers and kernels of convolutions.
        others: parameter groups of everything else that is trained.
        lr: learning rate of both.
        betas: of AdamW; Muon has a momentum of its own.
        eps: of AdamW.
    """

    def __init__(
        self, matrices: list[dict], others: list[dict], *, lr: float, betas: tuple[float, float], eps: float
    ):
        self._muon = Muon(matrices, lr=lr)
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=(betas[0], betas[1]), eps=eps)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], defaults={})
        self._link()

    def _link(self) -> None:
        # The two share this optimizer's groups and state, so that saving, loading and a changed rate reach them.
        count = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = (
            self.param_groups[:count],
            self.param_groups[count:],
        )
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state saved by this class."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure=None) -> Tensor | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        self._muon.step()
        self._adamw.step()
        return loss


def make_optimizer(
    model: nn.Module, config: OptimConfig, lr: float, slow: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Optimizer over the trainable parameters; norms, biases and other vectors are not decayed.

    Args:
        model: what is trained.
        config: the recipe's; weight decay is decoupled and multiplied by the rate. For ``muon`` see `MuonAdamW`.
        lr: learning rate.
        slow: parameters whose rate is `OptimConfig.vision_lr_ratio` times `lr`: the vision tower's.

    Raises:
        ValueError: unknown name.
    """
    name, betas, eps = config.name, config.betas, config.eps
    if name not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be adamw or muon, got {name!r}")
    is_slow = set(map(id, slow))
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # A weight that ZeRO-3 has shared out on loading is a vector here, and would not be decayed.
            num_axes = len(getattr(parameter, "ds_shape", parameter.shape))
            is_matrix = num_axes == 2 or (num_axes > 2 and config.muon_kernels)
            by_muon = name == "muon" and is_matrix and id(parameter) not in lookups
            groups.setdefault((by_muon, id(parameter) in is_slow, num_axes >= 2), []).append(parameter)
    found = [
        (
            by_muon,
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decayed else 0.0,
                "lr_ratio": config.vision_lr_ratio if slowed else 1.0,
            },
        )
        for (by_muon, slowed, decayed), parameters in groups.items()
    ]
    others = [group for by_muon, group in found if not by_muon]
    if name == "adamw":
        return torch.optim.AdamW(others, lr=lr, betas=(betas[0], betas[1]), eps=eps)
    return MuonAdamW([group for by_muon, group in found if by_muon], others, lr=lr, betas=betas, eps=eps)


def learning_rate(step: int, num_steps: int, stage: StageConfig) -> float:
    """Learning rate of a step: linear warm-up to `StageConfig.lr`, then the stage's schedule.

    Args:
        step: counts from zero.
        num_steps: of the stage.
        stage: gives peak, warm-up, schedule, and the share of the peak that the schedule ends at.
    """
    if step < stage.warmup_steps:
        return stage.lr * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, num_steps - stage.warmup_steps)
    if stage.schedule == "constant":
        return stage.lr
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if stage.schedule == "cosine" else 1 - progress
    return stage.lr * (stage.min_lr_ratio + (1 - stage.min_lr_ratio) * falling)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the rate into every parameter group, times the group's own ratio."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
