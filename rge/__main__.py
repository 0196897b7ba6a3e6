"""``rge COMMAND``, or ``python -m rge COMMAND``: the command line.

Each command is also a module: ``rge plan`` is ``python -m rge.plan``. Several processes are started with
``accelerate launch -m rge.train recipe=...``.
"""

import runpy
import sys
from importlib import import_module
from pathlib import Path

from rge import __version__
from rge.common.commands import pick, start
from rge.common.errors import UserError
from rge.common.files import RECIPES
from rge.common.options import available

COMMANDS = {
    "train": ("rge.train", "train a recipe"),
    "check": ("rge.check", "find a run's problems before it starts"),
    "plan": ("rge.plan", "estimate a recipe's FLOPs, memory and communication"),
    "small-model": ("rge.small_models", "build a small base model, for CPUs, tests and the demo"),
    "embed": ("rge.index.embed", "embed a folder or a table of pictures and texts"),
    "index": ("rge.index", "index a folder or a table, or update an index"),
    "search": ("rge.index.search", "search an index"),
    "explore": ("rge.explore", "explore a checkpoint on a local web page"),
    "compare-runs": ("rge.identity.compare_runs", "compare two runs: files, keys and modules that differ"),
    "diagnose": (
        "rge.diagnose",
        "test whether a checkpoint's rationales matter, leak, or depend on the batch",
    ),
    "eval": ("eval", "evaluate, compare and report"),
    "verify": ("eval.verify", "test whether every route to an embedding gives the same, and if not, why"),
    "serve": ("rge.serving", "serve embeddings, rationales and search over HTTP"),
    "data": ("data_prep", "prepare training data and retrieval sets"),
    "recipes": ("", "list the recipes and launch configs that are installed; with a name, print its path"),
}
WITH_RECIPE = {"train": "Recipe", "check": "CheckOptions"}
"""Commands whose modules import torch, which takes seconds. Their keys are read before, so that a typo is answered at once."""


def main(words: list[str]) -> int:
    """Run the command's module."""
    if words[:1] == ["--version"]:
        print(f"rge {__version__}")  # noqa: T201 - output of a command
        return 0
    name, rest = pick(words, {name: about for name, (_, about) in COMMANDS.items()}, "rge")
    if name == "recipes":
        recipes(rest)
        return 0
    if name in WITH_RECIPE:
        config = import_module("rge.config")
        config.load_options(getattr(config, WITH_RECIPE[name]), rest, command=f"rge {name} recipe=NAME")
    sys.argv = [f"rge {name}", *rest]
    # `python -m rge` searches the working directory first, which may contain another eval/.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    return 0


def recipes(names: list[str]) -> None:
    """Print the paths of recipes, or the names of all recipes and launch configs."""
    below = [
        f"{folder}/{name}"
        for folder in ("small_models", "accelerate")
        for name in available(RECIPES / folder)
    ]
    for name in names or [*available(RECIPES), *below]:
        path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
        if not path.is_file():
            raise UserError(f"there is no {path}; `rge recipes` lists them all")
        print(path if names else name)  # noqa: T201


def console() -> None:
    """The console script."""
    start(main)


if __name__ == "__main__":
    console()
