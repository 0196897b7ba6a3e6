"""``python -m eval run|score|compare|report key=value ...``; without keys, a command explains its own."""

import sys
from collections.abc import Sequence

from eval.compare import CompareOptions, compare
from eval.options import UserError, explain, parse_options
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
    """Keys of a command with their defaults and meanings; those with ``...`` have to be given."""
    if name == "report":
        from eval.report import ReportOptions

        return f"python -m eval report key=value ...\n{explain(ReportOptions)}"
    return f"python -m eval {name} key=value ...\n{explain(COMMANDS[name][0])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
