"""The modes of a query: reasoning, direct, latent, auto. `rge.checkpoints.settings` says which of them a checkpoint supports."""

from typing import Literal

Mode = Literal["reasoning", "direct", "auto", "latent"]
"""Embed after a rationale, directly, as the model decides, or after think tokens."""

SILENT = ("direct", "latent")
"""Modes without generation."""

DIRECT_ABOVE = 0.5
"""Default threshold of ``mode=auto``: it answers directly from this probability of ``<emb>`` as the first token."""
