"""Prepare data: ``python -m data_prep COMMAND [key=value ...]``.

``demo``        rebuild the shipped picture set (`data_prep.demo.build`)
``rmir``        reasoning-intensive retrieval data from any pictures (`data_prep.rmir.main`); ``config=demo`` needs nothing
``review``      a page on which a person accepts or rejects a sample of the result (`data_prep.rmir.results.review`)
``agreement``   how far these verdicts agree with the judges, with a 95 % interval (`data_prep.rmir.results.review`)
``rationales``  oracle rationales for training records (`data_prep.rationales.main`)
``mmeb``        MMEB's files as training records or retrieval sets (`data_prep.mmeb`)
"""

import importlib
import sys
from collections.abc import Sequence

from data_prep.options import nearest
from rge.common.errors import UserError

COMMANDS = {
    "demo": "data_prep.demo.build:main",
    "rmir": "data_prep.rmir.main:main",
    "review": "data_prep.rmir.results.review:review",
    "agreement": "data_prep.rmir.results.review:agreement",
    "rationales": "data_prep.rationales.main:main",
    "mmeb": "data_prep.mmeb:main",
}
"""Function of each command; it takes the words after the command. Loaded only when asked for."""


def main(argv: Sequence[str]) -> None:
    """Run one command.

    Raises:
        UserError: no command, an unknown one, or words the command does not take.
    """
    if not argv:
        raise UserError(f"expected a command: python -m data_prep {'|'.join(COMMANDS)} [key=value ...]")
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    module, _, name = COMMANDS[argv[0]].partition(":")
    getattr(importlib.import_module(module), name)(argv[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
