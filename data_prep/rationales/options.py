"""Options of ``rge data rationales``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_prep.rationales.prompts import TASKS
from data_prep.rmir.config import EncoderConfig
from rge.calls.model_config import ModelConfig
from rge.common.options import AtLeastOne, Share


@dataclass(frozen=True, kw_only=True)
class RationaleOptions:
    """Have a model that sees query and target write oracle rationales for training records."""

    task: Literal[("auto", *TASKS)] = "auto"  # type: ignore[valid-type]
    """Task of the prompt; auto: inferred from each record."""
    leak: Literal["keep", "drop", "rewrite"] = "keep"
    """What to do with a rationale that copies more than `max_leak` of its target: keep, drop, or rewrite (request it
    once more, then drop it)."""
    max_leak: Share = 0.5
    """Highest leak score that passes: the share of the target that a rationale gives away (docs/data_prep.md)."""
    max_words: AtLeastOne = 50
    """Maximum words of a rationale; longer ones are left out."""
    temperature: float | None = None
    """Sampling temperature; null: 0, or 0.7 if several are written (at 0 they would all be the same)."""
    candidates: AtLeastOne = 1
    """Rationales written for each pair."""
    select: str | None = None
    """Checkpoint that chooses among the candidates; null: take the first that passes the checks."""
    min_gain: float | None = None
    """Minimum gain of a chosen rationale (nats); those with less are left out. null: keep all."""
    captions: Path | None = None
    """Parquet table with id and caption of target pictures, for the leak score; null: ``pictures.parquet`` next to the
    records, if it exists and has captions."""
    on_unanswered: Literal["wait", "proceed"] = "wait"
    """What to do if calls are unanswered (outages): wait until the same command has made them again, or proceed without
    them."""
    encoder: EncoderConfig | None = None
    """Encoder of target pictures for the leak score, of kind siglip or checkpoint; null: the checkpoint of `select`, if
    there is one."""
    records: Path
    """Training records, JSON lines; or a folder of such files."""
    out: Path
    """Training records with rationales; a folder if ``records`` is one. Pictures are referenced, not copied."""
    model: ModelConfig
    """The writer, with the same settings as a model of ``rge data rmir``; its ``budget`` covers all files."""
    prices: Path | None = None
    """Price table (YAML) for a writer without prices in its settings; null: rge/calls/prices.yaml."""
    dry_run: bool = False
    """Make no calls; print the number of calls, tokens and the cost."""
    yes: bool = False
    """On a terminal, do not ask for confirmation before the first paid call; the estimate is still printed."""
