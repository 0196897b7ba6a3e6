"""Evaluate: ``rge eval COMMAND [key=value ...]``."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eval.benchmarks.registry import BENCHMARKS
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import HELP, help_text, names_of, nearest, parse_options, positional
from rge.common.registry import PluginOptions
from rge.vectors.processes import leave

if TYPE_CHECKING:
    from eval.sets.retrieval_set import RetrievalSet

# (module, options, function) by name. A command imports only what it needs, so that comparing two tables does not wait
# for the model libraries.
COMMANDS = {
    "run": ("eval.commands.run", "RunOptions", "run_command"),
    "mine": ("eval.commands.mine", "MineOptions", "mine"),
    "score": ("eval.commands.score", "ScoreOptions", "score"),
    "compare": ("eval.commands.compare", "CompareOptions", "compare"),
    "budget": ("eval.commands.budget", "BudgetOptions", "budget"),
    "rerank": ("eval.commands.rerank", "RerankOptions", "rerank_command"),
    "records": ("eval.judging.records", "JudgeRecordsOptions", "write_records"),
    "rag": ("eval.commands.rag", "RagOptions", "rag"),
    "label": ("eval.judging.label", "LabelOptions", "label"),
    "bm25": ("eval.commands.bm25", "Bm25Options", "bm25"),
    "fetch": ("eval.commands.fetch", "FetchOptions", "fetch"),
    "check": ("eval.commands.check", "CheckOptions", "check"),
    "audit": ("eval.commands.audit", "AuditOptions", "audit_command"),
    "report": ("eval.pages.report", "ReportOptions", "report"),
    "export": ("eval.commands.export", "ExportOptions", "export"),
    "import folder": ("eval.benchmarks.folder.importer", "FolderOptions", "import_folder"),
}
"""Besides these there is ``import BENCHMARK`` for every registered benchmark."""
LIST = """rge eval COMMAND [key=value ...]

  mine PHOTOS TABLE   evaluate on a folder of photos and a spreadsheet: import, run and report in one command
  fetch BENCHMARK     download a benchmark's release and check that it is complete
  import BENCHMARK    make a retrieval set from a benchmark's release
  import folder       make one from a folder of photos and a spreadsheet
  check               check a set before a model is run on it
  run                 embed a set, search it, score the ranking and write a report
  score               score a ranking from any program
  budget              measure accuracy against tokens and time (several rationales, a gate)
  rerank              let a vision-language model reorder a finished ranking
  records             make training records for such a model
  rag                 answer questions with retrieved documents, and let judges score the answers
  label               label queries by a model, for figures by label
  bm25                rank texts by BM25, the text baseline
  compare             compare two evaluations of one set with a paired test
  audit               search training files for a set's pictures, or results for shortcuts
  report              write one page of several evaluations of a set
  export              write files for other tools

`rge eval COMMAND --help` lists its keys. Every command takes plugins=MODULE,...: modules that register benchmarks,
embedders or metrics (docs/extending.md)."""


def main(argv: Sequence[str]) -> int:
    """Run a command; returns 0 on success and 2 on a user error."""
    if not argv or argv[0] in HELP:
        print(LIST)
        return 0 if argv else 2
    name, words = _command_and_words(argv)
    wants_help = any(word in HELP for word in argv)
    try:
        # first, since plugins may register the command itself (import) or names that its options refer to
        plugins = [word for word in words if word.startswith("plugins=")]
        parse_options(PluginOptions, plugins)
        known = ("import", *COMMANDS, *_importers())
        if name not in known:
            raise UserError(f"unknown command {name!r}{nearest(name, known)}")
        if words == plugins or wants_help:
            print(usage(name))
            return 0 if wants_help else 2
        schema, command = command_of(name)
        if "plugins" not in names_of(schema):  # a plugin's importer need not have this option
            words = [word for word in words if word not in plugins]
        done = command(parse_options(schema, words))
        if name.startswith("import"):
            print(_imported(done))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    leave()  # after an error the launcher stops the other processes
    return 0


def _command_and_words(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name and its ``key=value`` words; adds the keys of positional arguments."""
    is_import = argv[0] == "import" and argv[1:] and argv[1] not in HELP
    name = " ".join(argv[: 2 if is_import else 1])
    words = list(argv[len(name.split()) :])
    if name == "fetch" and words and words[0] not in HELP and "=" not in words[0]:
        words[0] = f"benchmark={words[0]}"
    return name, positional(words, "src", "queries") if name == "mine" else words


def _importers() -> list[str]:
    return [f"import {benchmark}" for benchmark in BENCHMARKS]


def command_of(name: str) -> tuple[type, Callable[..., Any]]:
    """Options class and function of a known command, such as ``run`` or ``import rmir``."""
    if name in COMMANDS:
        module, options, function = COMMANDS[name]
        return getattr(import_module(module), options), getattr(import_module(module), function)
    benchmark = BENCHMARKS[name.removeprefix("import ")]
    return benchmark.options(), benchmark.importer


def _imported(done: "RetrievalSet | list[str]") -> str:
    if isinstance(done, list):
        return f"{len(done)} sets: {', '.join(done)}"
    lines = [
        f"{done.path}: {len(done.queries)} queries, {len(done.corpus_ids)} candidates, {done.fingerprint[:12]}"
    ]
    return "\n".join(lines + [f"note: {note}" for note in done.meta.get("notes", [])])


def usage(name: str) -> str:
    """Help text of a command: its keys, defaults and meanings; keys with ``...`` are required."""
    if name == "import":
        return "\n\n".join(map(usage, ("import folder", *_importers())))
    return help_text(command_of(name)[0], f"rge eval {name}")


if __name__ == "__main__":
    start(main)
