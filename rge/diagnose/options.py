"""Options of the diagnoses; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rge.common.registry import PluginOptions

AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass
class Diagnosis(PluginOptions):
    """Options of every diagnosis."""

    checkpoint: Path
    """Checkpoint directory with ``rge.json``, or ``demo``."""
    data: Path
    """Training records: a file, or a folder that the library `datasets` reads; or the folder of a retrieval set. Leakage needs records with oracle rationales."""
    out: Path | None = None
    """Folder for ``NAME.json``; null: ``diagnose`` beside the checkpoint."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    seed: int = 0
    """Seed of all randomness."""


@dataclass
class LeakageOptions(Diagnosis):
    """Measure how much an oracle rationale leaks: how fast the contrastive loss falls on the state after it."""

    steps: AtLeastOne = 100
    """Steps of the short training run."""
    batch_size: AtLeastOne = 32
    """Queries per step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of that training."""


@dataclass
class SensitivityOptions(Diagnosis):
    """Measure whether the embedding depends on what the rationale says, or on what the think tokens hold."""

    mode: Literal["reasoning", "latent"] | None = None
    """Whether to intervene on words or on think tokens; null: according to how the checkpoint's queries were trained."""
    limit: AtLeastOne = 500
    """Number of pairs to examine."""
    batch_size: AtLeastOne = 64
    """Items embedded at once."""


@dataclass
class InvarianceOptions(Diagnosis):
    """Check whether an embedding depends on the rest of its batch; the exit code is 1 if it does."""

    limit: AtLeastOne = 32
    """Number of pairs to examine."""
    backend: Literal["own", "vllm"] = "own"
    """What writes the rationales: the model itself, or vLLM."""
