"""A loss that sees the queries of all processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rge.common import registry
from rge.losses import CONTRASTIVE_LOSSES, register_loss

NAME = "both_ways"


@contextmanager
def registered() -> Iterator[None]:
    """Register the loss for a while: other tests list all losses and plug-ins."""
    register_loss(NAME, gathered=True)(both_ways)
    try:
        yield
    finally:
        del CONTRASTIVE_LOSSES._entries[NAME]
        registry._plugins.pop(__name__, None)


def both_ways(
    q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE of each right candidate against the queries of the global batch."""
    logit_BC = (q_BD @ c_CD.T / temperature).masked_fill(
        ignored_BC.to(q_BD.device), torch.finfo(q_BD.dtype).min
    )
    return -logit_BC.log_softmax(dim=0)[positive_BC.to(q_BD.device)].sum()
