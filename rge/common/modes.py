"""The modes of a query (reasoning, direct, latent, auto), and which of them a checkpoint was trained for."""

from typing import Any, Literal

from rge.common.errors import UserError

Mode = Literal["reasoning", "direct", "auto", "latent"]
"""How an embedding is asked for: after a rationale, at once, as the model decides, after think tokens."""

SILENT = ("direct", "latent")
"""Modes in which nothing is written, whatever the settings of generation are."""

DIRECT_ABOVE = 0.5
"""Probability of ``<emb>`` as the first token from which on ``mode=auto`` writes nothing, unless the settings say another."""


def decides_itself(settings: dict[str, Any]) -> bool:
    """Whether a checkpoint was trained to answer some queries with ``<emb>`` at once."""
    loss = (settings.get("recipe") or {}).get("loss") or {}
    return bool((loss.get("adaptive") or {}).get("share"))


def check_mode(mode: str, settings: dict[str, Any]) -> None:
    """Refuse a mode that a checkpoint cannot be asked in, or was not trained for.

    Args:
        mode: a `Mode`.
        settings: content of ``rge.json``.

    Raises:
        UserError: says which mode to take, or what to train with.
    """
    if mode == "auto" and not decides_itself(settings):
        raise UserError(
            "mode=auto needs a checkpoint that was trained to decide (loss.states.direct and loss.adaptive.share above 0); "
            "ask this one with mode=reasoning or mode=direct"
        )
    if mode == "latent" and not settings.get("think_tokens"):
        raise UserError(
            "mode=latent needs a checkpoint with think tokens (model.think_tokens, and loss.states.latent or "
            "loss.anchor=latent); ask this one with mode=reasoning or mode=direct"
        )
