"""The modes of a query: reasoning, direct, latent, auto. Which of them a checkpoint was trained for: `rge.checkpoints.settings`."""

from typing import Literal

Mode = Literal["reasoning", "direct", "auto", "latent"]
"""How an embedding is asked for: after a rationale, at once, as the model decides, after think tokens."""

SILENT = ("direct", "latent")
"""Modes in which nothing is written, whatever the settings of generation are."""

DIRECT_ABOVE = 0.5
"""Probability of ``<emb>`` as the first token from which on ``mode=auto`` writes nothing, unless the settings say another."""
