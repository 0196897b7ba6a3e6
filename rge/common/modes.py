"""The modes of a query: reasoning, direct, auto. `rge.checkpoints.settings` says which of them a checkpoint supports."""

from typing import Literal

Mode = Literal["reasoning", "direct", "auto"]
"""Embed after a rationale, directly, or as the model decides."""

DIRECT_ABOVE = 0.5
"""Default threshold of ``mode=auto``: it answers directly from this probability of ``<emb>`` as the first token."""
