"""Optimizers and learning rate; the rate has no hidden state: it is a function of the step."""

import math

import torch
from torch import Tensor, nn


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices, AdamW for embeddings and vectors, as one optimizer.

    Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the update of a matrix. Its step is scaled to
    AdamW's root mean square, so that both take the same learning rate. On models trained from scratch it needs far
    fewer steps than AdamW; the paper's fine-tuning uses AdamW.

    Args:
        matrices: 2-D parameters of linear layers.
        others: everything else that is trained.
        lr: learning rate of both.
        betas: of AdamW; Muon's momentum is its default, 0.95.
        eps: of AdamW.
        weight_decay: of all parameters with two or more dimensions.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        self._muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(_decay_groups(others, weight_decay), lr=lr, betas=tuple(betas), eps=eps)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], defaults={})
        self._link()

    def _link(self) -> None:
        # The two share this optimizer's groups and state, so that saving, loading and a changed rate reach them.
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state saved by this class."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure=None) -> Tensor | None:
        """Update all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        self._muon.step()
        self._adamw.step()
        return loss


def make_optimizer(
    model: nn.Module, *, name: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Optimizer over the trainable parameters; norms, biases and other vectors are not decayed.

    Args:
        model: what is trained.
        name: ``adamw`` or ``muon`` (see `MuonAdamW`).
        lr: learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled, multiplied by the rate.

    Raises:
        ValueError: unknown name.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(_decay_groups(trainable, weight_decay), lr=lr, betas=tuple(betas), eps=eps)
    if name != "muon":
        raise ValueError(f"optimizer must be adamw or muon, got {name!r}")
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and id(parameter) not in lookups]
    chosen = set(map(id, matrices))
    others = [parameter for parameter in trainable if id(parameter) not in chosen]
    return MuonAdamW(matrices, others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the rate into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
