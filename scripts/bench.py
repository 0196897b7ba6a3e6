"""Measure one part of the project: ``python scripts/bench.py NAME key=value ...``.

Every bench prints its tables and, last, their figures as one JSON object. What is compared is timed in turns, under the same load; on a
busy machine, trust CPU time. Threads: OMP_NUM_THREADS.
"""

import importlib
import json
from pathlib import Path

from docs_site import first_sentence

from rge.common.commands import pick, start
from rge.common.options import names_of, offer_help, parse_options, split_word

FILES = sorted(Path(__file__).resolve().parent.glob("benches/*.py"))
BENCHES = {
    path.stem: first_sentence(path) for path in FILES if path.stem not in ("forms", "harness", "__init__")
}


def main(words: list[str]) -> None:
    """Run the named bench."""
    name, given = pick(words, BENCHES, "python scripts/bench.py")
    bench = importlib.import_module(f"benches.{name}")
    Options, command, more = bench.Options, f"python scripts/bench.py {name}", []
    if getattr(bench, "TAKES_A_RECIPE", False):
        offer_help(Options, given, command)
        recipe = [word for word in given if split_word(word)[0] not in names_of(Options)]
        given, more = [word for word in given if word not in recipe], [recipe]
    found = bench.measure(parse_options(Options, given, command), *more)
    print(json.dumps(found, default=float))  # figures may be numpy's


if __name__ == "__main__":
    start(main)
