"""The section `export`: what a checkpoint holds."""

from dataclasses import dataclass


@dataclass
class ExportConfig:
    """What a checkpoint holds."""

    adapters_only: bool = False
    """With `model.lora`: export only the adapters and the rows of new tokens, as PEFT's own files of a few MB;
    ``rge.json`` names their base (docs/training.md). The next stage then continues these adapters. false: export merged
    weights."""
