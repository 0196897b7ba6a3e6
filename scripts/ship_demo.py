"""Make the checkpoint that comes with the package, rge/demo_checkpoint, of what `make demo` trained: the same in bfloat16.

python scripts/ship_demo.py                                # of runs/demo/joint/final
python scripts/ship_demo.py checkpoint=runs/mine/joint/final
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rge.checkpoints.description import model_card  # noqa: E402
from rge.checkpoints.export import RGE_JSON, read_settings  # noqa: E402
from rge.common.commands import start  # noqa: E402
from rge.common.errors import UserError  # noqa: E402
from rge.common.files import DEMO_CHECKPOINT as DEMO  # noqa: E402
from rge.common.options import parse_options  # noqa: E402

MOST_BYTES = 6_000_000


@dataclass
class Options:
    """Make the checkpoint that comes with the package."""

    checkpoint: Path = ROOT / "runs/demo/joint/final"
    """What is converted."""


def ship(trained: Path, folder: Path) -> int:
    """Write the checkpoint in bfloat16; its size in bytes.

    Args:
        trained: a finished checkpoint.
        folder: where the copy goes; replaced.

    Raises:
        UserError: it would be too large for the repository.
    """
    settings = read_settings(trained)
    weights = {
        name: weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        for name, weight in load_file(trained / "model.safetensors").items()
    }
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    waiting = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(waiting, ignore_errors=True)
    shutil.copytree(trained, waiting, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    save_file(weights, waiting / "model.safetensors", metadata={"format": "pt"})
    (waiting / "config.json").write_text(json.dumps(_in_bfloat16(config), indent=2) + "\n", encoding="utf-8")
    (waiting / "README.md").write_text(model_card(settings, "rge/demo_checkpoint"), encoding="utf-8")
    for path in waiting.iterdir():
        path.chmod((waiting / RGE_JSON).stat().st_mode)
    size = sum(path.stat().st_size for path in waiting.iterdir())
    if size > MOST_BYTES:
        shutil.rmtree(waiting)
        raise UserError(
            f"{trained} takes {size:,} bytes in bfloat16, more than the {MOST_BYTES:,} that may be shipped"
        )
    shutil.rmtree(folder, ignore_errors=True)
    waiting.rename(folder)
    return size


def _in_bfloat16(config: dict) -> dict:
    return {
        key: "bfloat16" if key == "dtype" else _in_bfloat16(value) if isinstance(value, dict) else value
        for key, value in config.items()
    }


def main(words: list[str]) -> int:
    """Convert the named checkpoint."""
    asked = parse_options(Options, words, "python scripts/ship_demo.py")
    print(f"{DEMO}: {ship(asked.checkpoint, DEMO):,} bytes")
    return 0


if __name__ == "__main__":
    start(main)
