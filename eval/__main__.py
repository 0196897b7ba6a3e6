"""``python -m eval run|score|compare|report key=value ...``; without keys, a command explains its own.

``python -m eval import rmir|pinpoint|mmeb|mmbright src=DIR out=DIR`` makes a retrieval set of a benchmark's release,
``python -m eval audit set=DIR train=FILE.jsonl`` looks for a set's pictures in training files.
"""

import sys
from collections.abc import Sequence

from eval.audit import AuditOptions, audit_command
from eval.benchmarks.mmbright import MmbrightOptions, import_mmbright
from eval.benchmarks.mmeb import MmebOptions, import_mmeb
from eval.benchmarks.pinpoint import PinpointOptions, import_pinpoint
from eval.benchmarks.rmir import RmirOptions, import_rmir
from eval.compare import CompareOptions, compare
from eval.options import UserError, explain, parse_options
from eval.run import RunOptions, run
from eval.score import ScoreOptions, score
from eval.sets import RetrievalSet
from rge.backbone import BackboneError
from rge.checkpoint import CheckpointError
from rge.images import ImageError

COMMANDS = {
    "run": (RunOptions, run),
    "score": (ScoreOptions, score),
    "compare": (CompareOptions, compare),
    "audit": (AuditOptions, audit_command),
    "import rmir": (RmirOptions, import_rmir),
    "import pinpoint": (PinpointOptions, import_pinpoint),
    "import mmeb": (MmebOptions, import_mmeb),
    "import mmbright": (MmbrightOptions, import_mmbright),
}


def main(argv: Sequence[str]) -> int:
    """Run a command; 0 if it succeeded, 2 if what the user gave was wrong."""
    size = 2 if argv and argv[0] == "import" else 1
    name, words = " ".join(argv[:size]), argv[size:]
    if name not in (*COMMANDS, "report"):
        print(__doc__, file=sys.stderr)
        return 2
    if not words or words in (["help"], ["--help"], ["-h"]):
        print(usage(name))
        return 2
    try:
        if name == "report":
            from eval.report import report_command

            print(report_command(words))
        else:
            schema, command = COMMANDS[name]
            done = command(parse_options(schema, words))  # type: ignore[operator]
            if name.startswith("import"):
                print(_imported(done))
    except (UserError, ImageError, CheckpointError, BackboneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _imported(done: RetrievalSet | list[str]) -> str:
    if isinstance(done, list):
        return f"{len(done)} sets: {', '.join(done)}"
    lines = [
        f"{done.path}: {len(done.queries)} queries, {len(done.corpus_ids)} candidates, {done.fingerprint[:12]}"
    ]
    return "\n".join(lines + [f"note: {note}" for note in done.meta.get("notes", [])])


def usage(name: str) -> str:
    """Keys of a command with their defaults and meanings; those with ``...`` have to be given."""
    if name == "report":
        from eval.report import ReportOptions

        return f"python -m eval report key=value ...\n{explain(ReportOptions)}"
    return f"python -m eval {name} key=value ...\n{explain(COMMANDS[name][0])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
