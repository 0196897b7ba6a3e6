"""How every command starts, chooses among commands below it, and ends."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from rge.common.errors import UserError
from rge.common.options import HELP, nearest


def start(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command on the words of the command line, and leave with its exit code.

    What is the user's to mend is one message without a traceback, and exit code 2; Ctrl-C is exit code 130.
    """
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)  # noqa: T201 - a command speaks to people
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def pick(words: Sequence[str], commands: Mapping[str, str], usage: str) -> tuple[str, list[str]]:
    """The command that the first word names, and the words after it.

    Args:
        words: without any, or with ``--help`` first, the commands are listed and the program ends.
        commands: what each is for, in one line, by name.
        usage: what is typed before the name.

    Raises:
        UserError: there is no such command.
    """
    if not words or words[0] in HELP:
        width = max(map(len, commands))
        lines = [f"  {name:<{width}}  {about}" for name, about in commands.items()]
        print(f"{usage} COMMAND [key=value ...]\n", *lines, sep="\n")  # noqa: T201
        print(f"\n`{usage} COMMAND --help` lists its keys.")  # noqa: T201
        sys.exit(0 if words else 2)
    if words[0] not in commands:
        raise UserError(f"unknown command {words[0]!r}{nearest(words[0], commands)}")
    return words[0], list(words[1:])
