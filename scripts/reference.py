"""Write docs/reference.md: every key of every command, from the dataclasses that read them.

python scripts/reference.py
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from data_prep.demo.build import DemoOptions
from data_prep.download import DownloadOptions
from data_prep.mmeb import FetchOptions, MmebOptions
from data_prep.negatives.options import NegativesOptions
from data_prep.paraphrase import ParaphraseOptions
from data_prep.rationales.options import RationaleOptions
from data_prep.rmir.main import RmirCommand
from data_prep.rmir.review import AgreementOptions, ReviewOptions
from data_prep.study.build import StudyOptions
from eval.__main__ import COMMANDS, command_of
from eval.benchmarks.registry import BENCHMARKS
from eval.verify.__main__ import VerifyOptions
from rge.common.options import keys
from rge.config import CheckOptions, Recipe
from rge.diagnose.__main__ import DIAGNOSES
from rge.explore.__main__ import ExploreOptions
from rge.identity.compare_runs import CompareRunsOptions
from rge.index.options import EmbedOptions, IndexOptions, SearchOptions
from rge.plan.options import PlanOptions
from rge.serving.options import ServeOptions

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
DATA = {
    "demo": DemoOptions, "study": StudyOptions, "rmir": RmirCommand, "review": ReviewOptions, "agreement": AgreementOptions,
    "rationales": RationaleOptions, "mmeb": MmebOptions, "mmeb fetch": FetchOptions, "download": DownloadOptions,
    "paraphrase": ParaphraseOptions, "negatives": NegativesOptions,
}  # fmt: skip


OWN = {
    "plan": PlanOptions, "embed": EmbedOptions, "index": IndexOptions, "search": SearchOptions, "explore": ExploreOptions,
    "verify": VerifyOptions, "serve": ServeOptions, "compare-runs": CompareRunsOptions,
}  # fmt: skip


def commands() -> Iterator[tuple[str, type, type | None]]:
    """Every command, its options, and those that it shares with a command before it."""
    yield "rge train", Recipe, None
    yield "rge check", CheckOptions, Recipe
    for name, schema in OWN.items():
        yield f"rge {name}", schema, None
    for name, schema in DIAGNOSES.items():
        yield f"rge diagnose {name}", schema, None
    run = command_of("run")[0]
    for name in (*COMMANDS, *(f"import {benchmark}" for benchmark in BENCHMARKS)):
        schema = command_of(name)[0]
        yield f"rge eval {name}", schema, run if schema is not run and issubclass(schema, run) else None
    for name, schema in DATA.items():
        yield f"rge data {name}", schema, None


class Page:
    """The page. Keys with the same meaning are described once: where they come again, they are named with a link to that place."""

    def __init__(self) -> None:
        self.lines = [
            "# Reference",
            "",
            "Every key of every command. `...`: the key is required; `[]` stands for each entry of a list, `*` for each name of a mapping.",
            "Written by `python scripts/reference.py`; `rge COMMAND --help` prints the same in full. `rge recipes` has no keys: it lists what",
            "`recipe=` and `--config_file` can name, and with a name prints its path.",
        ]
        self.described: dict[tuple[str, str, str | None, str], tuple[str, str]] = {}

    def add(self, command: str, schema: type, shared: type | None) -> None:
        """Describe a command, without the keys of `shared`, those of another."""
        known = {key.name for key in keys(shared)} if shared else set()
        title = f"{command} recipe=NAME" if command in ("rge train", "rge check", "rge plan") else command
        self.lines += ["", f"## {command}", "", inspect.cleandoc(schema.__doc__ or ""), ""]
        self.lines += [f"`{title} key=value ...`", ""]
        if shared or command == "rge plan":
            whose = "rge eval run" if shared and shared is not Recipe else "rge train"
            self.lines += [f"Also every key of [{whose}]({_anchor(whose)}).", ""]
        rows, again = [], defaultdict(list)
        for key in keys(schema):
            if key.name in known:
                continue
            prefix, leaf = _parted(key.name)
            first = self.described.setdefault((leaf, key.kind, key.default, key.about), (command, prefix))
            if first == (command, prefix):
                default = "..." if key.default is None else f"`{key.default}`"
                cells = (f"`{key.name}`", default, key.kind, key.about)
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            else:
                again[first, prefix].append(leaf)
        if rows:
            self.lines += ["| key | default | type | meaning |", "|---|---|---|---|", *rows, ""]
        for ((whose, before), prefix), leaves in again.items():
            places = [f"under `{before}`"] if before else []
            places += [f"in [{whose}]({_anchor(whose)})"] if whose != command else []
            there = [leaf for (leaf, *_), place in self.described.items() if place == (whose, before)]
            names = ", ".join(f"`{leaf}`" for leaf in leaves) if leaves != there else "all keys"
            self.lines += [f"{f'Under `{prefix}`: ' if prefix else ''}{names}, as {' '.join(places)}.", ""]
        self.lines.pop()


def _parted(name: str) -> tuple[str, str]:
    """The prefix of a key with its last dot, and its last part."""
    prefix, dot, leaf = name.rpartition(".")
    return prefix + dot, leaf


def _anchor(command: str) -> str:
    return f"#{command.replace(' ', '-')}"


def page() -> str:
    """The page's text."""
    found = Page()
    for command in commands():
        found.add(*command)
    return "\n".join(found.lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
