"""The type of models that come from transformers, for annotations only."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn


class HubModel(nn.Module):
    """A model of transformers, or a part of one, whose own parts are read by name.

    Their classes differ from family to family and say little of their attributes' types; of `nn.Module` every attribute
    would be a tensor or a module.
    """

    config: Any
    device: torch.device
    dtype: torch.dtype

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whatever the family has under that name."""
