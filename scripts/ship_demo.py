"""Make the two models that come with the package, in bfloat16, from what `make demo-from-nothing` trained.

python scripts/ship_demo.py                                   # rge/demo_checkpoint, of runs/demo/joint/final
python scripts/ship_demo.py base=runs/demo_from_nothing/base       # rge/demo_base, what `make demo` starts from
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rge.checkpoints.description import model_card
from rge.checkpoints.manifest import DONE
from rge.checkpoints.settings import RGE_JSON, read_settings
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import DEMO_BASE, DEMO_CHECKPOINT
from rge.common.options import parse_options
from rge.identity.run_identity import IDENTITY

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 6_000_000
LICENCE = "apache-2.0"
"""Of the weights, as of the project."""


@dataclass
class Options:
    """Make the models that come with the package."""

    checkpoint: Path = ROOT / "runs/demo/joint/final"
    """Source of rge/demo_checkpoint."""
    base: Path | None = None
    """Source of rge/demo_base, of `rge small-model recipe=demo`; if given, only that is made."""


def ship(trained: Path, folder: Path) -> int:
    """Write a model in bfloat16 and return its size in bytes; UserError if it is too large for the repository."""
    weights = {
        name: weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        for name, weight in load_file(trained / "model.safetensors").items()
    }
    config = json.loads(
        (trained / "config.json").read_text(encoding="utf-8"),
        object_hook=lambda part: part | ({"dtype": "bfloat16"} if "dtype" in part else {}),
    )
    waiting = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(waiting, ignore_errors=True)
    shutil.copytree(
        trained, waiting, ignore=shutil.ignore_patterns("*.safetensors", "README.md", DONE, IDENTITY)
    )
    save_file(weights, waiting / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2)
    (waiting / "config.json").write_text(text + "\n", encoding="utf-8")
    if (trained / RGE_JSON).is_file():
        card = model_card(read_settings(trained), folder.name, LICENCE)
        (waiting / "README.md").write_text(card, encoding="utf-8")
    for path in waiting.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in waiting.iterdir())
    if size > MOST_BYTES:
        shutil.rmtree(waiting)
        raise UserError(
            f"it takes {size:,} bytes in bfloat16, more than the {MOST_BYTES:,} that may be shipped", trained
        )
    shutil.rmtree(folder, ignore_errors=True)
    waiting.rename(folder)
    return size


def main(words: list[str]) -> int:
    """Convert the named model."""
    options = parse_options(Options, words, "python scripts/ship_demo.py")
    source, folder = (options.base, DEMO_BASE) if options.base else (options.checkpoint, DEMO_CHECKPOINT)
    print(f"{folder}: {ship(source, folder):,} bytes")
    return 0


if __name__ == "__main__":
    start(main)
