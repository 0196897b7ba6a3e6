"""``python -m eval run|score|compare|report key=value ...``; without keys, a command explains its own."""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields

from eval.compare import CompareOptions, compare
from eval.options import UserError, parse_options
from eval.run import RunOptions, run
from eval.score import ScoreOptions, score
from rge.backbone import BackboneError
from rge.checkpoint import CheckpointError
from rge.images import ImageError

COMMANDS = {"run": (RunOptions, run), "score": (ScoreOptions, score), "compare": (CompareOptions, compare)}


def main(argv: Sequence[str]) -> int:
    """Run a command; 0 if it succeeded, 2 if what the user gave was wrong."""
    if not argv or argv[0] not in (*COMMANDS, "report"):
        print(__doc__, file=sys.stderr)
        return 2
    name, words = argv[0], argv[1:]
    if not words or words in (["help"], ["--help"], ["-h"]):
        print(usage(name))
        return 2
    try:
        if name == "report":
            from eval.report import report_command

            print(report_command(words))
        else:
            schema, command = COMMANDS[name]
            command(parse_options(schema, words))  # type: ignore[operator]
    except (UserError, ImageError, CheckpointError, BackboneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def usage(name: str) -> str:
    """Keys of a command with their defaults; those without one have to be given."""
    if name == "report":
        return "python -m eval report runs=DIR[,DIR...] out=FILE [log=FILE,...] [baseline=LABEL:DIR,...]"
    lines = [f"python -m eval {name} key=value ..."]
    for field in fields(COMMANDS[name][0]):
        value = "(required)" if field.default is MISSING else _word(field.default)
        lines.append(f"  {field.name}={value}")
    return "\n".join(lines)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return {None: "null", True: "true", False: "false"}.get(value, str(value))  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
