"""Counted FLOPs of one training step.

``python scripts/bench.py flops steps=4 recipe=demo stage=rl init=CHECKPOINT``: all words but ``steps`` are those of ``rge/train.py``. A few steps are really taken by one process, in a folder that is thrown away.
Everything that multiplies is counted: rollouts, forwards, backwards and the optimizer's own products. Validation is left out.
"""

import tempfile
from dataclasses import dataclass
from unittest.mock import patch

from benches.harness import count_flops
from rge.common.errors import UserError
from rge.config import load_recipe

TAKES_A_RECIPE = True


@dataclass
class Options:
    """How many steps; any other word is the recipe's."""

    steps: int = 4
    """Steps over which the mean is taken."""


def measure(options: Options, words: list[str]) -> dict:
    """Take the steps and count."""
    stage = load_recipe(words).stage
    if stage == "all":
        raise UserError(
            "the steps of one stage are counted: give stage=joint and init=CHECKPOINT, for example",
            key="stage",
        )
    from rge import train  # slow, and `--help` does not need it

    # Whatever `validation.every` says, the last step is followed by it.
    with tempfile.TemporaryDirectory() as folder, patch.object(train, "make_validation", return_value=None):
        given = [f"{stage}.steps={options.steps}", f"{stage}.warmup_steps=0", "data.num_workers=0"]
        flops = count_flops(lambda: train.main([*words, f"out={folder}", *given]))
    return {"flops_per_step": flops / options.steps, "steps": options.steps}
