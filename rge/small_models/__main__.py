"""`rge small-model`: build a small base model, and teach its vision tower to name pictures.

    rge small-model recipe=photos
    accelerate launch --config_file recipes/accelerate/cpu.yaml -m rge.small_models recipe=demo out=runs/small_models/demo

The trainer knows nothing of this room: it starts from the folder written here, as `model.path` or `init`. Running the same command
again resumes the naming stage; a finished model is kept. While it is made, log and states are in ``<out>_naming``.
"""

import os

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import RECIPES
from rge.common.options import parse_file
from rge.small_models.config import SmallModel


def main(arguments: list[str]) -> None:
    """Build the model that the options describe."""
    options = read_options(arguments)  # answered before torch is imported, which takes seconds
    from rge.small_models.make import run

    run(options)


def read_options(arguments: list[str]) -> SmallModel:
    """Read a file of recipes/small_models, and overrides such as ``naming.steps=20``."""
    folder, command = RECIPES / "small_models", "rge small-model recipe=NAME"
    options = parse_file(SmallModel, arguments, key="recipe", folder=folder, command=command)
    options.out = os.path.expanduser(options.out.replace("{recipe}", options.recipe))
    if wrong := list(options.problems()):
        raise UserError.of_problems(wrong)
    return options


if __name__ == "__main__":
    start(main)
