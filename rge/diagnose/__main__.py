"""Diagnose a checkpoint.

    python -m rge.diagnose leakage checkpoint=runs/demo/cold_start/final data=FILE.jsonl
    python -m rge.diagnose sensitivity checkpoint=runs/demo/joint/final data=FILE.jsonl|SET
    python -m rge.diagnose invariance checkpoint=runs/demo/joint/final data=FILE.jsonl|SET

`data` is training records or the folder of a retrieval set; leakage needs records with oracle rationales. A table is printed,
and ``out/NAME.json`` written (leakage: also ``leakage.svg``). The exit code of invariance is 1 where something differs that
must not.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rge.common.errors import UserError
from rge.common.files import write_text
from rge.config import RecipeError, nearest, split_override
from rge.diagnose import invariance, leakage, sensitivity
from rge.diagnose.pairs import read_pairs
from rge.embedder import Embedder

NAMES = ("leakage", "sensitivity", "invariance")
DEFAULTS: dict[str, dict[str, Any]] = {
    "leakage": {"steps": 100, "batch_size": 32, "lr": 1e-3, "seed": 0},
    "sensitivity": {"limit": 500, "batch_size": 64, "seed": 0},
    "invariance": {"limit": 32, "seed": 0, "backend": "own"},
}


def main(arguments: list[str]) -> int:
    """Run one diagnosis."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)  # noqa: T201 - this is a command
        return 0 if arguments else 2
    name = arguments[0]
    if name not in NAMES:
        raise RecipeError(f"unknown diagnosis {name!r}{nearest(name, NAMES)}")
    options = read_options(name, arguments[1:])
    checkpoint, data, out = (Path(options.pop(key)) for key in ("checkpoint", "data", "out"))
    if name == "leakage":
        found = leakage.leakage(checkpoint, data, on_step=_progress, **options)
        shown = leakage.table(found)
    else:
        limit = options.pop("limit")
        encoder = Embedder.from_pretrained(checkpoint, dtype="float32")
        pairs = read_pairs(data, limit, options["seed"])
        if name == "sensitivity":
            found = sensitivity.sensitivity(encoder, pairs, **options)
            shown = sensitivity.table(found)
        else:
            found = invariance.invariance(encoder, pairs, backend=options["backend"])
            shown = invariance.table(found)
    found = {"diagnosis": name, "checkpoint": str(checkpoint), "data": str(data), "options": options, **found}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.json", json.dumps(found, indent=1))
    if name == "leakage":
        write_text(out / "leakage.svg", leakage.plot(found))
    print(shown)  # noqa: T201
    print(f"written: {out / name}.json")  # noqa: T201
    return 0 if found.get("agrees", True) else 1


def read_options(name: str, arguments: list[str]) -> dict[str, Any]:
    """Options of a diagnosis, complete and of the right types.

    Raises:
        RecipeError: an unknown option, a missing one, or a value of the wrong kind.
    """
    options: dict[str, Any] = {**DEFAULTS[name], "checkpoint": None, "data": None, "out": None}
    for argument in arguments:
        key, value = split_override(argument)
        if key not in options:
            raise RecipeError(f"unknown option {key}{nearest(key, list(options))}")
        default = DEFAULTS[name].get(key)
        try:
            options[key] = value if default is None else type(default)(value)
        except ValueError:
            raise RecipeError(f"{key} must be a number, got {value!r}") from None
        if key == "backend" and value not in ("own", "vllm"):
            raise RecipeError(f"backend must be own or vllm, got {value!r}")
        if isinstance(default, int | float) and key != "seed" and options[key] <= 0:
            raise RecipeError(f"{key} must be > 0, got {value}")
    for key in ("checkpoint", "data"):
        if options[key] is None:
            raise RecipeError(f"give {key}=...")
    options["out"] = options["out"] or str(Path(options["checkpoint"]).parent / "diagnose")
    return options


def _progress(kind: str, step: int, report: dict[str, float]) -> None:
    if step % 10 == 0:
        losses = f"LM {report['loss_lm']:.3f}, contrastive {report['loss_contrastive']:.3f}"
        print(f"{kind}, step {step}: {losses}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as problem:
        sys.exit(f"error: {problem}")
