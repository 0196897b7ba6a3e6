"""Diagnose a checkpoint.

    rge diagnose leakage checkpoint=runs/demo/cold_start/final data=FILE.jsonl
    rge diagnose sensitivity checkpoint=runs/demo/joint/final data=FILE.jsonl|SET
    rge diagnose invariance checkpoint=runs/demo/joint/final data=FILE.jsonl|SET

A table is printed, and ``out/NAME.json`` written (leakage: also ``leakage.svg``).
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rge.common.commands import pick, start
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT, checkpoint_folder, write_text
from rge.common.options import parse_options
from rge.diagnose.options import Diagnosis, InvarianceOptions, LeakageOptions, SensitivityOptions

DIAGNOSES: dict[str, type[Diagnosis]] = {
    "leakage": LeakageOptions,
    "sensitivity": SensitivityOptions,
    "invariance": InvarianceOptions,
}


def main(arguments: list[str]) -> int:
    """Run one diagnosis."""
    name, words = pick(
        arguments,
        {name: (one.__doc__ or "").split("\n")[0] for name, one in DIAGNOSES.items()},
        "rge diagnose",
    )
    asked = parse_options(DIAGNOSES[name], words, f"rge diagnose {name}")
    import torch  # after --help, which needs none of these

    torch.set_float32_matmul_precision("highest")
    asked = replace(asked, checkpoint=checkpoint_folder(asked.checkpoint))
    if asked.out is None and asked.checkpoint == DEMO_CHECKPOINT:
        raise UserError("checkpoint=demo is part of the package: set out= to a folder of your own")
    out = asked.out or asked.checkpoint.parent / "diagnose"
    options = {key: value for key, value in asdict(asked).items() if key not in ("checkpoint", "data", "out")}
    about = {
        "diagnosis": name,
        "checkpoint": str(asked.checkpoint),
        "data": str(asked.data),
        "options": options,
    }
    result, table = _leakage(asked, out) if isinstance(asked, LeakageOptions) else _with_pairs(asked)
    write_text(out / f"{name}.json", json.dumps(about | result, indent=1))
    print(table)  # noqa: T201 - this is a command
    print(f"written: {out / name}.json")  # noqa: T201
    return 0 if result.get("agrees", True) else 1


def _leakage(asked: LeakageOptions, out: Path) -> tuple[dict[str, Any], str]:
    from rge.diagnose import leakage

    training = {key: getattr(asked, key) for key in ("steps", "batch_size", "lr", "seed")}
    found = leakage.leakage(asked.checkpoint, asked.data, on_step=_progress, base=asked.base, **training)
    write_text(out / "leakage.svg", leakage.plot(found))
    return found, leakage.table(found)


def _with_pairs(asked: Diagnosis) -> tuple[dict[str, Any], str]:
    from rge.diagnose import invariance, sensitivity
    from rge.diagnose.pairs import read_pairs
    from rge.embedder import Embedder

    assert isinstance(asked, (SensitivityOptions, InvarianceOptions))
    encoder = Embedder.from_pretrained(asked.checkpoint, base=asked.base, dtype="float32")
    pairs = read_pairs(asked.data, asked.limit, asked.seed)
    if isinstance(asked, SensitivityOptions):
        found = sensitivity.sensitivity(
            encoder, pairs, batch_size=asked.batch_size, mode=asked.mode, seed=asked.seed
        )
        return found, sensitivity.table(found)
    found = invariance.invariance(encoder, pairs, backend=asked.backend)
    return found, invariance.table(found)


def _progress(kind: str, step: int, report: dict[str, float]) -> None:
    if step % 10 == 0:
        losses = f"LM {report['loss_lm']:.3f}, contrastive {report['loss_contrastive']:.3f}"
        print(f"{kind}, step {step}: {losses}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    start(main)
