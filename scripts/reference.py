"""Write docs/reference.md: every key of every command, from the dataclasses that read them.

python scripts/reference.py
"""

import inspect
import re
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
from rge.common.options import Key, keys
from rge.common.registry import PluginOptions
from rge.config import CheckOptions, Recipe
from rge.diagnose.__main__ import DIAGNOSES
from rge.explore.__main__ import ExploreOptions
from rge.identity.compare_runs import CompareRunsOptions
from rge.index.options import EmbedOptions, IndexOptions, SearchOptions
from rge.plan.options import PlanOptions
from rge.serving.options import ServeOptions
from rge.small_models.config import SmallModel

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
DATA = {
    "demo": DemoOptions, "study": StudyOptions, "rmir": RmirCommand, "review": ReviewOptions, "agreement": AgreementOptions,
    "rationales": RationaleOptions, "mmeb": MmebOptions, "mmeb fetch": FetchOptions, "download": DownloadOptions,
    "paraphrase": ParaphraseOptions, "negatives": NegativesOptions,
}  # fmt: skip

OWN = {
    "plan": PlanOptions, "small-model": SmallModel, "embed": EmbedOptions, "index": IndexOptions, "search": SearchOptions, "explore": ExploreOptions,
    "verify": VerifyOptions, "serve": ServeOptions, "compare-runs": CompareRunsOptions,
}  # fmt: skip
[PLUGINS] = keys(PluginOptions)
"""A key of most commands, described at the top of the page."""


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
    """The page. Keys with the same meaning are described once; where they come again, they are named with a link to that place."""

    def __init__(self) -> None:
        self.lines = [
            "# Reference",
            "",
            "Every key of every command, as `rge COMMAND --help` prints it; written by `python scripts/reference.py`. A command is called as",
            "`rge COMMAND key=value ...`; `train`, `check` and `plan` also take `recipe=NAME`. In brackets: the default, and the type where",
            "the default does not show it. A key with the default `null` takes `null` too; `[]` stands for each entry of a list, `*` for each name of a mapping. `rge recipes` has no",
            "keys: it lists what `recipe=` and `--config_file` can name, and with a name prints its path.",
            "",
            f"`plugins` (list of text, `[]`), where it is named below: {PLUGINS.about}",
        ]
        self.described: dict[tuple[str, str, str | None, str], tuple[str, str]] = {}

    def add(self, command: str, schema: type, shared: type | None) -> None:
        """Describe a command, without the keys of `shared`, those of another."""
        known = {key.name for key in keys(shared)} if shared else set()
        self.lines += ["", f"## {command}", "", inspect.cleandoc(schema.__doc__ or ""), ""]
        rows, again, referred = [], defaultdict(list), set()
        for key in keys(schema):
            if key.name in known or key == PLUGINS:
                continue
            prefix, leaf = _parted(key.name)
            first = self.described.setdefault((leaf, key.kind, key.default, key.about), (command, prefix))
            if first == (command, prefix):
                rows.append(f"- `{key.name}` ({_brackets(key)}): {key.about}")
            else:
                referred.add(key.name)
                if (
                    re.sub(r"[.*[\]]+$", "", prefix) not in referred
                ):  # else the section itself is described elsewhere
                    again[first, prefix].append(leaf)
        if rows:
            self.lines += [*rows, ""]
        elsewhere = ["`plugins`"] if PLUGINS in keys(schema) and PLUGINS.name not in known else []
        if shared or command == "rge plan":
            whose = "rge eval run" if shared and shared is not Recipe else "rge train"
            elsewhere.append(f"every key of [{whose}]({_anchor(whose)})")
        for ((whose, before), prefix), leaves in again.items():
            places = [f"under `{before}`"] if before else []
            places += [f"in [{whose}]({_anchor(whose)})"] if whose != command else []
            there = [leaf for (leaf, *_), place in self.described.items() if place == (whose, before)]
            names = ", ".join(f"`{leaf}`" for leaf in leaves) if leaves != there else "all keys"
            elsewhere.append(f"{f'under `{prefix}` ' if prefix else ''}{names}, as {' '.join(places)}")
        if elsewhere:
            self.lines += [f"Also {'; '.join(elsewhere)}.", ""]
        self.lines.pop()


def _brackets(key: Key) -> str:
    """The type of a key, unless its default shows it, and the default."""
    if key.default not in (None, "null") and key.kind in (
        "text",
        "integer",
        "number",
        "path",
        "true or false",
    ):
        return f"`{key.default}`"
    kind = key.kind.removesuffix(" | null") if key.default == "null" else key.kind
    return f"{kind.replace(' | ', '/')}, {'required' if key.default is None else f'`{key.default}`'}"


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
