"""Score a ranking made by anyone: the same metrics, intervals and files as `eval.commands.run`, without a checkpoint.

    python -m eval score run=FILE.trec set=DIR out=DIR

Scoring the ``run.trec`` of an evaluation gives that evaluation's metrics again. Only the spread of ties does not
survive the file, whose scores are strictly decreasing (`eval.scoring.trec`).
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from eval.benchmarks.registry import protocol_for
from eval.benchmarks.suite import each_member, is_suite, join_members, load_suite
from eval.scoring.evaluation import write_evaluation
from eval.scoring.metrics import CUTOFFS
from eval.scoring.output_files import again, check_out, summary
from eval.scoring.trec import read_run
from eval.sets.retrieval_set import load_set, with_readable_content
from rge.common.errors import UserError
from rge.common.registry import PluginOptions


@dataclass
class ScoreOptions(PluginOptions):
    """Score a ranking that any program made."""

    run: Path
    """TREC run file: query Q0 candidate rank score tag. For a suite: a directory with MEMBER.trec."""
    set: Path
    """Retrieval set directory, see `eval.sets.retrieval_set`, or a suite of them, see `eval.benchmarks.suite`."""
    out: Path
    """Output directory."""
    allow_missing: bool = False
    """Score queries without a line 0 instead of refusing the run."""
    allow_ties: bool = False
    """Order equal scores by candidate id instead of refusing the run."""
    by: tuple[str, ...] = ()
    """Further query columns to report by, besides the set's ``report_by``."""
    seed: int = 0
    """Seed of the resampling."""
    benchmark: str = "generic"
    """Protocol of a benchmark: rmir, mmeb, mmeb2, mmbright, pinpoint, mrmr, mr2bench, one that plugins=
    adds, or generic."""
    profile: str = "clean"
    """clean is the defensible protocol, official what the benchmark's released code computes."""
    overwrite: bool = False
    """Replace the output of another run or set."""


def score(options: ScoreOptions) -> Path:
    """Score a run file, write the outputs, and return their directory.

    Raises:
        UserError: the run or the set is wrong, or queries are missing and ``allow_missing`` is not given.
    """
    protocol = protocol_for(options.benchmark, options.profile)
    if is_suite(options.set):
        return score_members(options)
    wanted = load_set(options.set, by=options.by)
    protocol = protocol_for(options.benchmark, options.profile, wanted)
    wanted, unread = with_readable_content(protocol.prepare(wanted))
    read = read_run(options.run, wanted, allow_ties=options.allow_ties)
    num_queries = len(wanted.queries)
    if read.missing and not options.allow_missing:
        raise UserError(
            f"{options.run}: {len(read.missing)} of {num_queries} queries have no line, first {read.missing[0]!r}. "
            "Leaving them out would flatter the run; allow_missing=true "
            + ("leaves them out, as the released code does," if protocol.skips_missing else "scores them 0")
            + " and reports the coverage"
        )
    run_hash = hashlib.sha256(options.run.read_bytes()).hexdigest()
    identity = {
        "set.fingerprint": wanted.fingerprint,
        "set.content": wanted.content,
        "query_mode": None,
        "benchmark": protocol.benchmark,
        "profile": protocol.profile,
        "tag": read.tag,
        "run_hash": run_hash,
        "seed": options.seed,
    }
    check_out(options.out, identity, overwrite=options.overwrite)
    short = int((wanted.pool_sizes().clip(max=max(CUTOFFS)) > (read.ranking.rows_QW >= 0).sum(axis=1)).sum())
    about = {
        "num_missing": len(read.missing),
        "num_short": short,
        "num_excluded_lines": read.num_excluded,
        "run": str(options.run),
        "run_hash": run_hash,
        "tag": read.tag,
        "again": again("score", options),
        "warnings": [*wanted.meta.get("notes", []), *unread],
    }
    results = write_evaluation(
        options.out,
        wanted,
        read.ranking,
        protocol,
        about,
        tag=read.tag,
        seed=options.seed,
        missing=read.missing,
    )
    print(f"{wanted.name}: {options.run} -> {options.out}\n{summary(results, protocol.headline)}")
    if read.missing:
        what = "are left out" if protocol.skips_missing else "count as 0"
        print(f"coverage {results['coverage']:.4f}: {len(read.missing)} queries without a line {what}")
    if short:
        print(
            f"{short} queries list fewer than {max(CUTOFFS)} candidates; what is not listed counts as not found"
        )
    return options.out


def score_members(options: ScoreOptions) -> Path:
    """Score one run file a member of a suite, then join them; returns the joint output directory.

    Raises:
        UserError: as `score`, or a member has no run file.
    """
    suite = load_suite(options.set)
    runs = {name: options.run / f"{name}.trec" for name in suite.members}
    for path in runs.values():
        if not path.is_file():
            raise UserError(
                f"{path} is not there: a suite needs a run file for each of its {len(suite.members)} members"
            )

    def one(name: str, path: Path, out: Path) -> None:
        score(replace(options, run=runs[name], set=path, out=out))

    dirs = each_member(suite, options.out, one)
    join_members(suite, dirs, options.out, str(options.run), seed=options.seed, overwrite=options.overwrite)
    return options.out
