"""Write an HTML page from finished evaluations; see `eval.pages.report` and `eval.pages.boards.leaderboard`.

rge eval report runs=DIR[,DIR...] out=FILE [log=FILE,...] [baseline=LABEL:DIR,...]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.pages.boards.leaderboard import write_leaderboard
from eval.pages.budget_curves import BASES, BUDGET
from eval.pages.evaluations import expand, read_evaluation
from eval.pages.report import write_report
from rge.common.errors import UserError
from rge.common.files import read_json
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
    page: Literal["auto", "set", "leaderboard"] = "auto"
    """``set`` for conditions of one set, ``leaderboard`` for many models; ``auto``: a leaderboard if the evaluations
    are for a suite or for several sets."""
    published: str = "auto"
    """Published tables on a leaderboard: ``auto`` (those of the benchmarks at hand), ``all`` or ``none``."""


def report(options: ReportOptions) -> Path:
    """``rge eval report``: write the page that the options describe, and return it; errors as in `write_report`."""
    runs = [word for word in options.runs if word]
    board = _is_for_leaderboard(runs) if options.page == "auto" else options.page == "leaderboard"
    path = _leaderboard(options, runs) if board else _page(options, [Path(name) for name in runs])
    print(path)
    return path


def _is_for_leaderboard(runs: Sequence[str]) -> bool:
    """Whether runs are of a suite or of several sets, or have labels."""
    for word in runs:
        if not Path(word).is_dir():
            return ":" in word
    results = [read_evaluation(path).results for word in runs for path in expand(Path(word))]
    return (
        any(about.get("suite") for about in results)
        or len({about["set"]["fingerprint"] for about in results}) > 1
    )


def _leaderboard(options: ReportOptions, runs: Sequence[str]) -> Path:
    if options.log or options.baseline:
        raise UserError(
            "log= and baseline= are for page=set; for a leaderboard pass all models as runs=LABEL:DIR,..."
        )
    return write_leaderboard(
        runs,
        options.out,
        title=options.title,
        which=options.published,
        num_examples=24 if options.examples == ReportOptions.examples else options.examples,
        set_dir=options.set,
        seed=options.seed,
    )


def _page(options: ReportOptions, dirs: Sequence[Path]) -> Path:
    curves = read_json(dirs[0] / BUDGET) if len(dirs) == 1 else None  # the output of `budget`
    return write_report(
        dirs if curves is None else [dirs[0] / name for name in BASES],
        options.out,
        title=options.title,
        training_logs=[Path(name) for name in options.log if name],
        metric=options.metric,
        num_examples=options.examples,
        baselines=_baselines(options.baseline),
        set_dir=options.set,
        seed=options.seed,
        budget=curves,
    )


def _baselines(words: Sequence[str]) -> dict[str, Path]:
    """``LABEL:DIR`` as label -> directory."""
    baselines = {}
    for word in filter(None, words):
        label, _, directory = word.partition(":")
        if not (label and directory):
            raise UserError(f"baseline must be LABEL:DIR, got {word!r}")
        baselines[label] = Path(directory)
    return baselines
