"""``python -m eval run|score|compare|report key=value ...``; without keys, a command explains its own.

``python -m eval budget checkpoint=DIR set=DIR out=DIR`` puts accuracy against tokens and time (several rationales, gate,
judge), ``python -m eval rerank of=DIR out=DIR judge=MODEL`` lets a vision-language model reorder a finished ranking,
``python -m eval import rmir|pinpoint|mmeb|mmbright src=DIR out=DIR`` makes a retrieval set of a benchmark's release,
``python -m eval audit set=DIR train=FILE.jsonl`` looks for a set's pictures in training files,
``python -m eval export format=pinpoint|top50|mmeb|mteb eval=DIR out=FILE`` writes what others read.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from eval.audit import AuditOptions, audit_command
from eval.benchmarks.mmbright import MmbrightOptions, import_mmbright
from eval.benchmarks.mmeb import MmebOptions, import_mmeb
from eval.benchmarks.pinpoint import PinpointOptions, import_pinpoint
from eval.benchmarks.rmir import RmirOptions, import_rmir
from eval.bm25 import Bm25Options, bm25
from eval.budget import BudgetOptions, budget
from eval.compare import CompareOptions, compare
from eval.export import ExportOptions, export
from eval.options import UserError, explain, parse_options
from eval.rerank import RerankOptions, rerank_command
from eval.run import RunOptions, run
from eval.score import ScoreOptions, score
from eval.sets import RetrievalSet
from eval.team import leave
from rge.backbone import BackboneError
from rge.checkpoint import CheckpointError
from rge.images import ImageError

IMPORTS: dict[str, tuple[type, Callable[..., Any]]] = {
    "rmir": (RmirOptions, import_rmir),
    "pinpoint": (PinpointOptions, import_pinpoint),
    "mmeb": (MmebOptions, import_mmeb),
    "mmbright": (MmbrightOptions, import_mmbright),
}
COMMANDS: dict[str, Any] = {
    "run": (RunOptions, run),
    "score": (ScoreOptions, score),
    "compare": (CompareOptions, compare),
    "budget": (BudgetOptions, budget),
    "rerank": (RerankOptions, rerank_command),
    "bm25": (Bm25Options, bm25),
    "audit": (AuditOptions, audit_command),
    "export": (ExportOptions, export),
    "import": IMPORTS,
}


def main(argv: Sequence[str]) -> int:
    """Run a command; 0 if it succeeded, 2 if what the user gave was wrong."""
    name = " ".join(argv[: 2 if argv[:1] == ["import"] else 1])
    words = argv[len(name.split()) :]
    if name != "report" and _entry(name) is None:
        print(f"there are {', '.join(IMPORTS)}" if name.startswith("import") else __doc__, file=sys.stderr)
        return 2
    if not words or words in (["help"], ["--help"], ["-h"]):
        print(usage(name))
        return 2
    try:
        if name == "report":
            from eval.report import report_command

            print(report_command(words))
        else:
            schema, command = _entry(name) or COMMANDS[name]
            done = command(parse_options(schema, words))
            if name.startswith("import"):
                print(_imported(done))
    except (UserError, ImageError, CheckpointError, BackboneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    leave()  # after an error the launcher ends the others
    return 0


def _entry(name: str) -> tuple[type, Callable[..., Any]] | None:
    """Options and function of ``run`` or ``import rmir``; None if there is no such command."""
    first, _, benchmark = name.partition(" ")
    return IMPORTS.get(benchmark) if first == "import" else COMMANDS.get(first)


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
    if name == "import":
        return "\n\n".join(usage(f"import {benchmark}") for benchmark in IMPORTS)
    schema, _ = _entry(name) or COMMANDS[name]
    return f"python -m eval {name} key=value ...\n{explain(schema)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
