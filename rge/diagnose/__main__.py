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
    about = {name: (schema.__doc__ or "").split("\n")[0] for name, schema in DIAGNOSES.items()}
    name, words = pick(arguments, about, "rge diagnose")
    options = parse_options(DIAGNOSES[name], words, f"rge diagnose {name}")
    import torch  # after --help, which needs none of these

    torch.set_float32_matmul_precision("highest")
    options = replace(options, checkpoint=checkpoint_folder(options.checkpoint))
    if options.out is None and options.checkpoint == DEMO_CHECKPOINT:
        raise UserError("checkpoint=demo is part of the package: set out= to a folder of your own")
    out = options.out or options.checkpoint.parent / "diagnose"
    settings = {
        key: value for key, value in asdict(options).items() if key not in ("checkpoint", "data", "out")
    }
    inputs = {"checkpoint": str(options.checkpoint), "data": str(options.data)}
    result, table = _leakage(options, out) if isinstance(options, LeakageOptions) else _with_pairs(options)
    report = {"diagnosis": name, **inputs, "options": settings, **result}
    write_text(out / f"{name}.json", json.dumps(report, indent=1))
    print(table)  # noqa: T201 - output of a command
    print(f"written: {out / name}.json")  # noqa: T201
    return 0 if result.get("agrees", True) else 1


def _leakage(options: LeakageOptions, out: Path) -> tuple[dict[str, Any], str]:
    from rge.diagnose import leakage

    training = {key: getattr(options, key) for key in ("steps", "batch_size", "lr", "seed")}
    result = leakage.leakage(
        options.checkpoint, options.data, on_step=_progress, base=options.base, **training
    )
    write_text(out / "leakage.svg", leakage.plot(result))
    return result, leakage.table(result)


def _with_pairs(options: Diagnosis) -> tuple[dict[str, Any], str]:
    from rge.diagnose import invariance, sensitivity
    from rge.diagnose.pairs import read_pairs
    from rge.embedder import Embedder

    assert isinstance(options, (SensitivityOptions, InvarianceOptions))
    encoder = Embedder.from_pretrained(options.checkpoint, base=options.base, dtype="float32")
    pairs = read_pairs(options.data, options.limit, options.seed)
    if isinstance(options, SensitivityOptions):
        result = sensitivity.sensitivity(
            encoder, pairs, batch_size=options.batch_size, mode=options.mode, seed=options.seed
        )
        return result, sensitivity.table(result)
    result = invariance.invariance(encoder, pairs, backend=options.backend)
    return result, invariance.table(result)


def _progress(kind: str, step: int, report: dict[str, float]) -> None:
    if step % 10 == 0:
        losses = f"LM {report['loss_lm']:.3f}, contrastive {report['loss_contrastive']:.3f}"
        print(f"{kind}, step {step}: {losses}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    start(main)
