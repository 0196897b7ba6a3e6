"""Options of the diagnoses; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rge.common.registry import PluginOptions

AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass
class Diagnosis(PluginOptions):
    """What every diagnosis needs."""

    checkpoint: Path
    """Checkpoint directory with ``rge.json``, or ``demo``."""
    data: Path
    """Training records: a file, or a folder that the library `datasets` reads; or the folder of a retrieval set. Leakage needs records with oracle rationales."""
    out: Path | None = None
    """Where ``NAME.json`` goes; null: ``diagnose`` beside the checkpoint."""
    base: str | None = None
    """Directory or hub id of the model that a checkpoint of adapters belongs to; null: where its ``rge.json`` says."""
    seed: int = 0
    """Seed of everything drawn at random."""


@dataclass
class LeakageOptions(Diagnosis):
    """How fast the contrastive loss falls when the query's state follows the oracle's rationale, which names the target."""

    steps: AtLeastOne = 100
    """Steps of the short training that shows it."""
    batch_size: AtLeastOne = 32
    """Queries a step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of that training."""


@dataclass
class SensitivityOptions(Diagnosis):
    """Whether the embedding depends on what the rationale says, or on what the think tokens hold."""

    mode: Literal["reasoning", "latent"] | None = None
    """Whether words or think tokens are interfered with; null: as the checkpoint's queries were trained."""
    limit: AtLeastOne = 500
    """Pairs looked at."""
    batch_size: AtLeastOne = 64
    """Items embedded at once."""


@dataclass
class InvarianceOptions(Diagnosis):
    """Whether an embedding depends on what else is in its batch. The exit code is 1 where something differs that must not."""

    limit: AtLeastOne = 32
    """Pairs looked at."""
    backend: Literal["own", "vllm"] = "own"
    """What writes the rationales: the model itself, or vLLM."""
