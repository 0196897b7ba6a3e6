"""Prepare data: ``python -m data_prep COMMAND [key=value ...]``.

``demo``        rebuild the shipped picture set (`data_prep.demo.build`)
``rmir``        reasoning-intensive retrieval data from any pictures (`data_prep.rmir.main`); ``config=demo`` needs nothing
``rationales``  oracle rationales for training records (`data_prep.rationales.main`)
"""

import importlib
import sys
from collections.abc import Sequence

from data_prep.options import UserError, nearest

COMMANDS = {
    "demo": "data_prep.demo.build",
    "rmir": "data_prep.rmir.main",
    "rationales": "data_prep.rationales.main",
}
"""Module of each command; its ``main(words)`` takes the words after the command. Loaded only when asked for."""


def main(argv: Sequence[str]) -> None:
    """Run one command.

    Raises:
        UserError: no command, an unknown one, or words the command does not take.
    """
    if not argv:
        raise UserError(f"expected a command: python -m data_prep {'|'.join(COMMANDS)} [key=value ...]")
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
