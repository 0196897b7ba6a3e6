"""Diagnose a checkpoint.

    rge diagnose leakage checkpoint=runs/demo/cold_start/final data=FILE.jsonl
    rge diagnose sensitivity checkpoint=runs/demo/joint/final data=FILE.jsonl|SET

A table is printed, and ``out/NAME.json`` written. Torch is imported after ``--help``.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rge.common.commands import pick, start
from rge.common.errors import Fault, UserError
from rge.common.files import DEMO_CHECKPOINT, checkpoint_folder, write_json
from rge.common.options import AtLeastOne, Count, Positive, parse_options
from rge.common.registry import PluginOptions


@dataclass
class Diagnosis(PluginOptions):
    """Options of every diagnosis."""

    checkpoint: Path
    """Checkpoint directory with ``rge.json``, or ``demo``."""
    data: Path
    """Training records: a file, or a folder that the library `datasets` reads; or the folder of a retrieval set. Leakage needs records with oracle rationales."""
    out: Path | None = None
    """Folder for ``NAME.json``; null: ``diagnose`` next to the checkpoint."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    seed: Count = 0
    """Seed of all randomness."""


@dataclass
class LeakageOptions(Diagnosis):
    """Measure how much an oracle rationale leaks: how fast the contrastive loss falls on the state after it."""

    steps: AtLeastOne = 100
    """Steps of the short training run."""
    batch_size: Annotated[int, Field(ge=2)] = 32
    """Queries per step, which exchange their partners."""
    lr: Positive = 1e-3
    """Learning rate of that training."""


@dataclass
class SensitivityOptions(Diagnosis):
    """Measure whether the embedding depends on what the rationale says."""

    limit: AtLeastOne = 500
    """Number of pairs to examine."""
    batch_size: AtLeastOne = 64
    """Items embedded at once."""


DIAGNOSES: dict[str, type[Diagnosis]] = {
    "leakage": LeakageOptions,
    "sensitivity": SensitivityOptions,
}


def main(arguments: list[str]) -> int:
    """Run one diagnosis."""
    about = {name: (schema.__doc__ or "").split("\n")[0] for name, schema in DIAGNOSES.items()}
    name, words = pick(arguments, about, "rge diagnose")
    options = parse_options(DIAGNOSES[name], words, f"rge diagnose {name}")
    import torch

    torch.set_float32_matmul_precision("highest")
    options = replace(options, checkpoint=checkpoint_folder(options.checkpoint))
    if options.out is None and options.checkpoint == DEMO_CHECKPOINT:
        why = "checkpoint=demo is part of the package: set out= to a folder of your own"
        raise UserError(why).about(Fault("missing", "out"))
    out = options.out or options.checkpoint.parent / "diagnose"
    result, table = _measured(options)
    settings = asdict(options)
    del settings["out"]
    inputs = {key: str(settings.pop(key)) for key in ("checkpoint", "data")}
    report = {"diagnosis": name, **inputs, "options": settings, **result}
    write_json(out / f"{name}.json", report)
    print(table)  # noqa: T201 - output of a command
    print(f"written: {out / name}.json")  # noqa: T201
    return 0


def _measured(options: Diagnosis) -> tuple[dict[str, Any], str]:
    """The result of a diagnosis, and its table."""
    from rge.diagnose import leakage, sensitivity
    from rge.diagnose.pairs import read_pairs
    from rge.embedder import Embedder

    if isinstance(options, LeakageOptions):
        training = {key: getattr(options, key) for key in ("steps", "batch_size", "lr", "seed", "base")}
        result = leakage.leakage(options.checkpoint, options.data, **training)
        return result, leakage.table(result)
    assert isinstance(options, SensitivityOptions)
    encoder = Embedder.from_pretrained(options.checkpoint, base=options.base, dtype="float32")
    pairs = read_pairs(options.data, options.limit, options.seed)
    result = sensitivity.sensitivity(encoder, pairs, batch_size=options.batch_size, seed=options.seed)
    return result, sensitivity.table(result)


if __name__ == "__main__":
    start(main)
