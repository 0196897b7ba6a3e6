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
    bench = importlib.import_module(f"benches.{words[0]}")
    Options, command, words = bench.Options, f"python scripts/bench.py {words[0]}", words[1:]
    if getattr(bench, "TAKES_A_RECIPE", False):
        offer_help(Options, words, command)
        others = [word for word in words if split_word(word)[0] not in names_of(Options)]
        figures = bench.measure(
            parse_options(Options, [word for word in words if word not in others], command), others
        )
    else:
        figures = bench.measure(parse_options(Options, words, command))
    print(json.dumps(figures))


def _about(name: str) -> str:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


if __name__ == "__main__":
    start(main)
