"""The lowest versions that pyproject.toml allows: installed in an environment of their own, and used.

    pip install uv
    python scripts/lowest_versions.py dir=/tmp/lowest
    python scripts/lowest_versions.py dir=/tmp/lowest tests=tests/rge/model,tests/rge/checkpoints/test_training_states.py

Each dependency of pyproject.toml gets its lowest version (uv's ``lowest-direct``), what they depend on the newest that fits. A small
model is then trained from scratch in two stages, resumed from the state in the middle of the second, and evaluated; `tests` are run
as well. A machine without a GPU takes the CPU build of torch where ``PIP_FIND_LINKS`` has one. It needs the network, 2 GB and a
few minutes, so no CI job runs it: run it after every change of a bound (tests/scripts/test_lowest_versions.py does the same).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from PIL import Image

from eval.sets.write_set import Candidate, Query, write_set
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options

ROOT = Path(__file__).resolve().parents[1]
GPU_ONLY = re.compile(r"(nvidia-|cuda-|triton\b)")
"""Packages of torch's CUDA build, which its CPU build does not need."""
COLOURS = ("red", "green", "blue", "white")
STEPS = 4


@dataclass
class Options:
    """Train, resume and evaluate with the lowest versions that pyproject.toml allows."""

    dir: Path
    """Folder for the environment and the runs; an environment that is there already is used again."""
    tests: tuple[str, ...] = ()
    """Test files or folders that are run in it, too."""


def main(words: list[str]) -> None:
    """Install, and use."""
    options = parse_options(Options, words, "python scripts/lowest_versions.py")
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise UserError("it is not installed: pip install uv", key="uv", kind="package")
    python = install(uv, options.dir)
    use(python, options.dir / "runs")
    if options.tests:
        tests = ["-m", "pytest", "-q", "-m", "not gpu and not net", *options.tests]
        call([str(python), *tests], cwd=ROOT, env=environment())
    print(f"all of it runs with the versions in {options.dir / 'versions.txt'}")


def install(uv: str, folder: Path) -> Path:
    """Make the environment, and return its interpreter; UserError if a step fails."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [f"--find-links={place}" for place in os.environ.get("PIP_FIND_LINKS", "").split()]
    resolve = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--resolution=lowest-direct"]
    found = call([*resolve, f"--python={sys.executable}", *links, str(ROOT / "pyproject.toml")], cwd=folder)
    versions = [line for line in found.splitlines() if "==" in line]
    torch = next(line for line in versions if line.startswith("torch==")).removeprefix("torch==")
    wheels = [
        name.name
        for place in os.environ.get("PIP_FIND_LINKS", "").split()
        for name in Path(place).glob("torch-*")
    ]
    if any(name.startswith(f"torch-{torch.split('+')[0]}+cpu") for name in wheels):
        versions = [line for line in versions if not GPU_ONLY.match(line)]
    (folder / "versions.txt").write_text("\n".join(versions) + "\n", encoding="utf-8")
    python = folder / "venv/bin/python"
    if not python.exists():
        call([uv, "venv", "--quiet", f"--python={sys.executable}", str(folder / "venv")])
    # Without dependencies: the list is complete, and the CPU build needs less than it.
    into = [uv, "pip", "install", "--quiet", "--no-deps", *links, f"--python={python}"]
    call([*into, "--requirements", str(folder / "versions.txt"), "pytest", "pluggy", "iniconfig", "pygments"])
    return python


def use(python: Path, folder: Path) -> None:
    """Train, resume and evaluate in a new folder; UserError with the output of what fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder)
    call([str(python), "-m", "rge.small_models", "recipe=base.yaml"], cwd=folder, env=environment())
    train = [str(python), "-m", "rge.train", "recipe=small.yaml"]
    call(train, cwd=folder, env=environment())
    joint = folder / "run/joint"
    (first, last) = sorted((joint / "state").iterdir())
    before = last_loss(joint)
    for path in (joint / "final", last):
        shutil.rmtree(path)
    call(train, cwd=folder, env=environment())
    if (after := last_loss(joint)) != before:
        raise UserError(f"resumed from it, the last loss is {after}, and was {before}", first)
    given = [f"checkpoint={joint / 'final'}", "set=set", "out=evaluated", "query_mode=direct"]
    call([str(python), "-m", "rge", "eval", "run", *given], cwd=folder, env=environment())


def last_loss(stage: Path) -> float:
    """The loss of the stage's last step."""
    last = json.loads((stage / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS
    return last["loss"]


def write_inputs(folder: Path) -> None:
    """A recipe of both stages, its records, and a retrieval set."""
    lines = []
    for colour in COLOURS:
        Image.new("RGB", (40, 40), colour).save(folder / f"{colour}.png")
        target = {"text": f"a {colour} thing", "rationale": f"It is {colour}."}
        query = {"text": "What colour is this?", "images": [f"{colour}.png"]}
        lines.append(json.dumps({"query": query, "positives": [target]}) + "\n")
    (folder / "records.jsonl").write_text("".join(lines))
    stage = {"steps": STEPS, "batch_size": 2, "sources": [{"path": "records.jsonl"}]}
    small = {"hidden_size": 32, "intermediate_size": 64}
    text = small | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = small | {"depth": 1, "num_heads": 2, "patch_size": 14, "window_size": 56}
    pixels = {"min_pixels": 784, "max_pixels": 3136}
    base = {
        "out": "base",
        "texts": ["records.jsonl"],
        "vocab_size": 300,
        "text": text,
        "vision": vision,
        **pixels,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    recipe = {
        "out": "run",
        "model": {
            "path": "base", "dtype": "float32", "gradient_checkpointing": False, **pixels
        },
        "rollout": {"max_new_tokens": 8},
        "cold_start": stage,
        "joint": stage,
        "train": {"log_every": 1, "save_every": STEPS // 2, "keep_last": 2},
    }  # fmt: skip
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe))
    write_set(
        folder / "set",
        meta={"name": "colours"},
        queries=[Query(colour, "Which?", (folder / f"{colour}.png",)) for colour in COLOURS],
        corpus=[Candidate(colour, f"a {colour} thing") for colour in COLOURS],
        qrels=[(colour, colour, 1) for colour in COLOURS],
    )


def environment() -> dict[str, str]:
    """Our code and nothing else of this environment; without the network, on one thread."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def call(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; UserError with the end of what it printed if it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise UserError(f"{' '.join(command)} ends with {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    start(main)
