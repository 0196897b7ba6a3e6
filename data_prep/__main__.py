"""Prepare data: ``rge data COMMAND [key=value ...]``, or ``python -m data_prep COMMAND``."""

import importlib
from collections.abc import Sequence

from rge.common.commands import pick, start

COMMANDS = {
    "demo": ("data_prep.demo.build:main", "rebuild the shipped picture set"),
    "spoiled": ("data_prep.demo.spoil:main", "the demo's training records with a dose of wrong rationales"),
    "study": ("data_prep.study.build:main", "pictures and rationales for studying how much an oracle may give away"),
    "rmir": ("data_prep.rmir.main:main", "reasoning-intensive retrieval data from any pictures; config=demo needs nothing"),
    "review": ("data_prep.rmir.reviewing:review", "a page on which people accept or reject a sample of the result; apply= acts on it"),
    "agreement": ("data_prep.rmir.results.review:agreement", "how far these verdicts agree with the judges, with a 95 % interval"),
    "rationales": ("data_prep.rationales.main:main", "oracle rationales for training records"),
    "mmeb": ("data_prep.mmeb:main", "MMEB's training files as training records"),
}  # fmt: skip
"""Function and help text of each command. The function takes the remaining arguments; its module is imported on use."""


def main(argv: Sequence[str]) -> None:
    """Run one command."""
    name, words = pick(argv, {name: about for name, (_, about) in COMMANDS.items()}, "rge data")
    module, _, function = COMMANDS[name][0].partition(":")
    getattr(importlib.import_module(module), function)(words)


if __name__ == "__main__":
    start(main)
