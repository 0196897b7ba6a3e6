"""Dropout under gradient caching: replay the random state, so that a chunk draws the same masks again."""

import torch
from torch import nn


def drops_out(module: nn.Module) -> bool:
    """Whether a forward of the module, as it is now, is random."""
    if not module.training:
        return False
    return any(
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0)
        or (part.training and float(getattr(part, "attention_dropout", 0.0) or 0.0) > 0)
        for part in module.modules()
    )


class RandomState:
    """The random numbers that come next, on the CPU and on the model's device."""

    def __init__(self, device: torch.device):
        self.cpu = torch.get_rng_state()
        self.device = device
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def set(self) -> None:
        """Make them come next again."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
