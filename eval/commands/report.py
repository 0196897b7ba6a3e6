"""One HTML page from finished evaluations; see `eval.pages.report` and, for many models, `eval.pages.boards.leaderboard`.

rge eval report runs=DIR[,DIR...] out=FILE [log=FILE,...] [baseline=LABEL:DIR,...]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.pages.boards.leaderboard import write_leaderboard
from eval.pages.budget_curves import BASES, BUDGET
from eval.pages.evaluations import expand, read_evaluation
from eval.pages.report import write_report
from rge.common.errors import UserError
from rge.common.files import read_json
from rge.common.options import one_of
from rge.common.registry import PluginOptions


@dataclass
class ReportOptions(PluginOptions):
    """Write one HTML page from finished evaluations."""

    runs: tuple[str, ...]
    """Evaluation directories, or directories that contain them."""
    out: Path
    """The HTML file to write."""
    log: tuple[str, ...] = ()
    """``metrics.jsonl`` files of training runs."""
    baseline: tuple[str, ...] = ()
    """``LABEL:DIR`` of evaluations of other checkpoints."""
    title: str | None = None
    """Heading of the page; null: the default."""
    metric: str = "recall@1"
    """Metric of the main table."""
    examples: int = 48
    """Number of queries shown with pictures."""
    set: Path | None = None
    """Current location of the retrieval set; null: as in results.json."""
    seed: int = 0
    """Seed for the choice of examples."""
    page: str = "auto"
    """``set`` for conditions of one set, ``leaderboard`` for many models; ``auto``: a leaderboard if the evaluations
    are for a suite or for several sets."""
    published: str = "auto"
    """Published tables on a leaderboard: ``auto`` (those of the benchmarks at hand), ``all`` or ``none``."""


def _is_for_leaderboard(runs: Sequence[str]) -> bool:
    """Whether runs are of a suite or of several sets, or carry labels."""
    sets = set()
    for word in runs:
        if not Path(word).is_dir():
            return ":" in word
        for directory in expand(Path(word)):
            results = read_evaluation(directory).results
            if results.get("suite"):
                return True
            sets.add(results["set"]["fingerprint"])
    return len(sets) > 1


def report(options: ReportOptions) -> Path:
    """``rge eval report``: write the page that the options describe, and return it.

    Raises:
        UserError: an option is malformed; see `write_report` for the rest.
    """
    path = _page(options)
    print(path)
    return path


def _page(options: ReportOptions) -> Path:
    one_of("page", [options.page], ("auto", "set", "leaderboard"))
    shared: dict[str, Any] = {"title": options.title, "set_dir": options.set, "seed": options.seed}
    runs = [word for word in options.runs if word]
    if options.page == "leaderboard" or (options.page == "auto" and _is_for_leaderboard(runs)):
        if options.log or options.baseline:
            raise UserError(
                "log= and baseline= are for page=set; a leaderboard takes all models by runs=LABEL:DIR,..."
            )
        num = options.examples if options.examples != ReportOptions.examples else 24
        return write_leaderboard(runs, options.out, which=options.published, num_examples=num, **shared)
    dirs = [Path(name) for name in runs]
    curves = read_json(dirs[0] / BUDGET) if len(dirs) == 1 else None  # the output of `budget`
    return write_report(
        dirs if curves is None else [dirs[0] / name for name in BASES],
        options.out,
        training_logs=[Path(name) for name in options.log if name],
        metric=options.metric,
        num_examples=options.examples,
        baselines=_baselines(options.baseline),
        budget=curves,
        **shared,
    )


def _baselines(words: Sequence[str]) -> dict[str, Path]:
    """``LABEL:DIR`` as label -> directory."""
    found = {}
    for word in filter(None, words):
        label, _, directory = word.partition(":")
        if not (label and directory):
            raise UserError(f"baseline must be LABEL:DIR, got {word!r}")
        found[label] = Path(directory)
    return found
