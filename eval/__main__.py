"""``rge eval run|score|compare|report key=value ...``; ``--help`` after a command lists its keys.

``rge eval budget checkpoint=DIR set=DIR out=DIR`` puts accuracy against tokens and time (several rationales, gate,
judge), ``rge eval rerank of=DIR out=DIR judge=MODEL`` lets a vision-language model reorder a finished ranking,
``rge eval records src=FILE descriptions=FILE out=FILE`` makes records from which such a judge is trained,
``rge eval fetch mmeb|mmeb2|rmir|mmbright|mbeir out=DIR`` downloads a benchmark's release and checks that it is all there,
``rge eval import rmir|pinpoint|mmeb|mmbright|mbeir src=DIR out=DIR`` makes a retrieval set of a benchmark's release,
``rge eval import folder src=DIR out=DIR`` makes one of a folder of photos and a spreadsheet,
``rge eval mine PHOTOS TABLE.xlsx`` does that, evaluates and writes the page,
``rge eval check set=DIR`` looks any set over before a model is asked,
``rge eval audit set=DIR train=FILE.jsonl`` looks for a set's pictures in training files,
``rge eval export format=pinpoint|top50|mmeb|mteb|card eval=DIR out=FILE`` writes what others read.
Every command knows ``plugins=MODULE,...``: modules that register benchmarks, embedders or metrics (docs/extending.md).
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eval.benchmarks.registry import BENCHMARKS
from eval.embedding.processes import leave
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import HELP, help_text, names_of, parse_options, positional
from rge.common.registry import PluginOptions

if TYPE_CHECKING:
    from eval.sets.retrieval_set import RetrievalSet

# Module, options and function by name: a command imports what it needs, so that a comparison of two tables does not
# wait for the libraries of models.
COMMANDS = {
    "run": ("eval.commands.run", "RunOptions", "run"),
    "mine": ("eval.commands.mine", "MineOptions", "mine"),
    "score": ("eval.commands.score", "ScoreOptions", "score"),
    "compare": ("eval.commands.compare", "CompareOptions", "compare"),
    "budget": ("eval.commands.budget", "BudgetOptions", "budget"),
    "rerank": ("eval.commands.rerank", "RerankOptions", "rerank_command"),
    "records": ("eval.judging.description", "JudgeRecordsOptions", "write_records"),
    "bm25": ("eval.commands.bm25", "Bm25Options", "bm25"),
    "fetch": ("eval.commands.fetch", "FetchOptions", "fetch"),
    "check": ("eval.commands.check", "CheckOptions", "check"),
    "audit": ("eval.commands.audit", "AuditOptions", "audit_command"),
    "report": ("eval.commands.report", "ReportOptions", "report"),
    "export": ("eval.commands.export", "ExportOptions", "export"),
    "import folder": ("eval.benchmarks.folder.importer", "FolderOptions", "import_folder"),
}
"""Beside these there is ``import BENCHMARK`` for every benchmark that is registered."""


def main(argv: Sequence[str]) -> int:
    """Run a command; 0 if it succeeded, 2 if what the user gave was wrong."""
    name, words = _command_and_words(argv)
    asked = any(word in HELP for word in argv)
    try:
        # first: what they register may be the command (import), and is looked up by name in the others
        plugins = [word for word in words if word.startswith("plugins=")]
        parse_options(PluginOptions, plugins)
        if name not in ("import", *COMMANDS, *_importers()):
            importers = f"there are folder, {', '.join(BENCHMARKS)}"
            return _show(importers if name.startswith("import") else str(__doc__), asked)
        if words == plugins or asked:
            print(usage(name))
            return 0 if asked else 2
        schema, command = command_of(name)
        if "plugins" not in names_of(schema):  # the importer of a user's module need not know of modules
            words = [word for word in words if word not in plugins]
        done = command(parse_options(schema, words))
        if name.startswith("import"):
            print(_imported(done))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    leave()  # after an error the launcher ends the others
    return 0


def _command_and_words(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name and its ``key=value`` words; what may be given without a key gets it."""
    name = " ".join(argv[: 2 if argv[:1] == ["import"] else 1])
    words = list(argv[len(name.split()) :])
    if name == "fetch" and words and words[0] not in HELP and "=" not in words[0]:
        words[0] = f"benchmark={words[0]}"
    return name, positional(words, "src", "queries") if name == "mine" else words


def _show(text: str, asked: bool) -> int:
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _importers() -> list[str]:
    return [f"import {benchmark}" for benchmark in BENCHMARKS]


def command_of(name: str) -> tuple[type, Callable[..., Any]]:
    """Options and function of ``run`` or ``import rmir``, which are known."""
    if name in COMMANDS:
        module, options, function = COMMANDS[name]
        return getattr(import_module(module), options), getattr(import_module(module), function)
    return BENCHMARKS[name.removeprefix("import ")].load_importer()


def _imported(done: "RetrievalSet | list[str]") -> str:
    if isinstance(done, list):
        return f"{len(done)} sets: {', '.join(done)}"
    lines = [
        f"{done.path}: {len(done.queries)} queries, {len(done.corpus_ids)} candidates, {done.fingerprint[:12]}"
    ]
    return "\n".join(lines + [f"note: {note}" for note in done.meta.get("notes", [])])


def usage(name: str) -> str:
    """Keys of a command with their defaults and meanings; those with ``...`` have to be given."""
    if name == "import":
        return "\n\n".join(map(usage, ("import folder", *_importers())))
    return help_text(command_of(name)[0], f"rge eval {name}")


if __name__ == "__main__":
    start(main)
