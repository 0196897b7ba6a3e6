"""Counted FLOPs of one training step: ``python scripts/count_flops.py steps=4 recipe=demo stage=rl init=CHECKPOINT``.

The words are those of ``rge/train.py``; a few steps are really taken, in a folder that is thrown away, by one process.
Everything that multiplies is counted: rollouts, forwards, backwards and the optimizer's own products. The last line is JSON.
"""

import json
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench_step import count_flops

from rge.common.commands import start
from rge.common.options import names_of, parse_options, split_word
from rge.config import load_recipe

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Options:
    """How many steps; any other word is the recipe's."""

    steps: int = 4
    """Steps over which the mean is taken."""


def main(arguments: list[str]) -> None:
    """Count and print."""
    own = [word for word in arguments if split_word(word)[0] in names_of(Options)]
    options = parse_options(Options, own, "python scripts/count_flops.py")
    words = [word for word in arguments if word not in own]
    stage = load_recipe(words).stage
    train = runpy.run_path(str(ROOT / "rge" / "train.py"), run_name="counted")["main"]
    with tempfile.TemporaryDirectory() as folder:
        given = [f"{stage}.steps={options.steps}", f"{stage}.warmup_steps=0", "data.num_workers=0"]
        flops = count_flops(lambda: train([*words, f"out={folder}", *given]))
    print(json.dumps({"flops_per_step": flops / options.steps, "steps": options.steps}))


if __name__ == "__main__":
    start(main)
