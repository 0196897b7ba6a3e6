"""Prepare data: ``rge data COMMAND [key=value ...]``, or ``python -m data_prep COMMAND``."""

import pkgutil
from collections.abc import Sequence

from rge.common.commands import pick, start

COMMANDS = {
    "demo": ("data_prep.demo.build:main", "rebuild the shipped picture set"),
    "study": ("data_prep.study.build:main", "make pictures and rationales for studying how much a rationale may give away"),
    "rmir": ("data_prep.rmir.main:main", "make reasoning-intensive retrieval data from any pictures; config=demo needs no model"),
    "review": ("data_prep.rmir.review:review", "write a page on which people check a sample of the result; apply= applies their verdicts"),
    "agreement": ("data_prep.rmir.review:agreement", "measure how far people's verdicts agree with the judges, with a 95 % interval"),
    "rationales": ("data_prep.rationales.main:main", "have a model write rationales for training records"),
    "download": ("data_prep.download:main", "fetch pictures that training records name by web address"),
    "paraphrase": ("data_prep.paraphrase:main", "have a model reword the questions of training records or of a retrieval set"),
    "negatives": ("data_prep.negatives.main:main", "mine hard negatives for training records with any embedder, and let a judge score them"),
    "mmeb": ("data_prep.mmeb:main", "turn MMEB's training files into training records"),
}  # fmt: skip
"""Function and help text of each command. The function takes the remaining arguments; its module is imported on use."""


def main(argv: Sequence[str]) -> None:
    """Run one command."""
    name, words = pick(argv, {name: about for name, (_, about) in COMMANDS.items()}, "rge data")
    pkgutil.resolve_name(COMMANDS[name][0])(words)


if __name__ == "__main__":
    start(main)
