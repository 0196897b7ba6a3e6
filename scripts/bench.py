"""Measure one part of the project: ``python scripts/bench.py NAME key=value ...``; NAME alone or ``--help`` lists the options.

Every bench prints a table and, last, one JSON object. What is compared is timed in turns, under the same load; on a busy machine,
trust CPU time. Threads: OMP_NUM_THREADS.
"""

import ast
import importlib
import json
from pathlib import Path

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import names_of, offer_help, parse_options, split_word

FOLDER = Path(__file__).resolve().parent / "benches"
SHARED = ("forms", "harness")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in (*SHARED, "__init__"))


def main(words: list[str]) -> None:
    """Run the named bench."""
    if not words or words[0] not in NAMES:
        raise UserError("name a bench:\n" + "\n".join(f"  {name:10} {_about(name)}" for name in NAMES))
    name, *given = words
    bench = importlib.import_module(f"benches.{name}")
    Options, command, more = bench.Options, f"python scripts/bench.py {name}", []
    if getattr(bench, "TAKES_A_RECIPE", False):
        offer_help(Options, given, command)
        recipe = [word for word in given if split_word(word)[0] not in names_of(Options)]
        given, more = [word for word in given if word not in recipe], [recipe]
    print(json.dumps(bench.measure(parse_options(Options, given, command), *more)))


def _about(name: str) -> str:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


if __name__ == "__main__":
    start(main)
