"""Score a ranking made by anyone: the same metrics, intervals and files as `eval.run`, without a checkpoint.

    python -m eval score run=FILE.trec set=DIR out=DIR

Scoring the ``run.trec`` of an evaluation gives that evaluation's metrics again. Only the spread of ties does not
survive the file, whose scores are strictly decreasing (`eval.trec`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.metrics import CUTOFFS
from eval.options import UserError, one_of
from eval.outputs import (
    FORMAT,
    RUN,
    check_out,
    figures,
    invalidate,
    per_query_table,
    rationale_figures,
    score_ranking,
    set_figures,
    statistics_settings,
    summary,
    versions,
    write_tables,
)
from eval.run import BENCHMARKS, PROTOCOLS
from eval.sets import load_set
from eval.stats import NUM_RESAMPLES
from eval.trec import read_run, write_run


@dataclass
class ScoreOptions:
    """Options of ``python -m eval score``."""

    run: Path
    """TREC run file: query Q0 candidate rank score tag."""
    set: Path
    """Retrieval set directory, see `eval.sets`."""
    out: Path
    """Output directory."""
    allow_missing: bool = False
    """Score queries without a line 0 instead of refusing the run."""
    allow_ties: bool = False
    """Order equal scores by candidate id instead of refusing the run."""
    by: tuple[str, ...] = ()
    """Further query columns to report by, besides the set's ``report_by``."""
    seed: int = 0
    """Of the resampling."""
    benchmark: str = "generic"
    """Protocol of a known benchmark; only generic so far."""
    profile: str = "clean"
    """clean is the defensible protocol."""
    overwrite: bool = False
    """Replace the output of another run or set."""


def score(options: ScoreOptions) -> Path:
    """Score a run file, write the outputs, and return their directory.

    Raises:
        UserError: the run or the set is wrong, or queries are missing and ``allow_missing`` is not given.
    """
    one_of("benchmark", [options.benchmark], BENCHMARKS)
    one_of("profile", [options.profile], PROTOCOLS)
    wanted = load_set(options.set, by=options.by)
    read = read_run(options.run, wanted, allow_ties=options.allow_ties)
    num_queries = len(wanted.queries)
    if read.missing and not options.allow_missing:
        raise UserError(
            f"{options.run}: {len(read.missing)} of {num_queries} queries have no line, first {read.missing[0]!r}. "
            "Leaving them out would flatter the run; allow_missing=true scores them 0 and reports the coverage"
        )
    identity = {"set.fingerprint": wanted.fingerprint, "query_mode": None, "tag": read.tag}
    check_out(options.out, identity, overwrite=options.overwrite)
    scored = score_ranking(wanted, read.ranking)
    short = int((wanted.pool_sizes().clip(max=max(CUTOFFS)) > (read.ranking.rows_QW >= 0).sum(axis=1)).sum())
    results: dict[str, Any] = {
        "format": FORMAT,
        "set": set_figures(wanted) | {"limit": None},
        "benchmark": options.benchmark,
        "profile": options.profile,
        "query_mode": None,
        "query_modality": None,
        **figures(wanted, scored, seed=options.seed),
        "rationale": rationale_figures(None),
        "coverage": 1.0 - len(read.missing) / num_queries,
        "num_missing": len(read.missing),
        "num_short": short,
        "num_excluded_lines": read.num_excluded,
        "run": str(options.run),
        "tag": read.tag,
        "depth": read.ranking.depth,
        "seed": options.seed,
        "statistics": statistics_settings(options.seed, NUM_RESAMPLES),
        "versions": versions(),
    }
    invalidate(options.out)
    write_run(options.out / RUN, read.ranking, wanted.query_ids, wanted.corpus_ids, read.tag)
    write_tables(options.out, per_query_table(wanted, read.ranking, scored, None), results)
    print(f"{wanted.name}: {options.run} -> {options.out}\n{summary(results)}")
    if read.missing:
        print(f"coverage {results['coverage']:.4f}: {len(read.missing)} queries without a line count as 0")
    if short:
        print(
            f"{short} queries list fewer than {max(CUTOFFS)} candidates; what is not listed counts as not found"
        )
    return options.out
