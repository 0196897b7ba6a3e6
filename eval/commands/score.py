"""Score a ranking from any program: the same metrics, intervals and files as `eval.commands.run`, without a checkpoint.

    rge eval score run=FILE.trec set=DIR out=DIR

Scoring the ``run.trec`` of an evaluation reproduces its metrics, except the spread of ties, since scores in the file are
strictly decreasing (`eval.scoring.trec`).
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from eval.benchmarks.published_tables import beside
from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, load_suite, measure_members
from eval.scoring.measurement import Measurement
from eval.scoring.metrics import deepest
from eval.scoring.output_files import RUN, read_results, rerun_command
from eval.scoring.results import MadeFromRun
from eval.scoring.trec import read_run
from eval.sets.contents import with_readable_content
from rge.common.errors import UserError


@dataclass(kw_only=True)
class ScoreOptions(MeasureOptions):
    """Score a ranking from any program."""

    run: Path
    """TREC run file (query Q0 candidate rank score tag), also gzipped, or an evaluation's directory. For a suite: a
    directory with MEMBER.trec files, or a suite's evaluation."""
    allow_missing: bool = False
    """Score queries without a ranking as 0 instead of refusing the run."""
    allow_ties: bool = False
    """Order equal scores by candidate id instead of refusing the run."""


def score(options: ScoreOptions, *, of_suite: bool = False) -> Path:
    """Score a run file, write the outputs, and return their directory; a member `of_suite` is compared with its suite."""
    options.protocol()  # report its errors first
    if is_suite(options.set):
        suite = load_suite(options.set)
        runs = {name: _run_of_member(options.run, name) for name in suite.members}
        measure_members(
            suite,
            options,
            lambda name, of_member: [score(replace(of_member, run=runs[name]), of_suite=True)],
            title=str(options.run),
        )
        print(beside({options.run.stem: read_results(options.out)}))
        return options.out
    protocol, wanted = options.prepared()
    wanted, unread = with_readable_content(wanted)
    path = options.run / RUN if options.run.is_dir() else options.run
    read = read_run(path, wanted, allow_ties=options.allow_ties)
    if read.missing and not options.allow_missing:
        counted = "leaves them out, as the released code does," if protocol.skips_missing else "scores them 0"
        raise UserError(
            f"{len(read.missing)} of {len(wanted.queries)} queries have no line, first {read.missing[0]!r}"
            f". Leaving them out would flatter the run; allow_missing=true {counted} and reports the coverage",
            options.run,
            read.missing[0],
            "allow_missing",
            "skipped" if protocol.skips_missing else "",
        )
    needed = deepest(protocol.names(wanted))
    short = int((wanted.pool_sizes().clip(max=needed) > (read.ranking.rows_QW >= 0).sum(axis=1)).sum())
    made = MadeFromRun(
        tag=read.tag,
        run_hash=hashlib.sha256(path.read_bytes()).hexdigest(),
        depth=read.ranking.depth,
        num_missing=len(read.missing),
        num_short=short,
        num_excluded_lines=read.num_excluded,
        run=str(options.run),
        again=rerun_command("score", options),
        warnings=[*wanted.meta.get("notes", []), *unread],
    )
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite)
    measurement.check_out(options.out, made)
    results = measurement.write(
        options.out, read.ranking, made, tag=read.tag, missing=read.missing, title=str(options.run)
    )
    if read.missing:
        counted = "are left out" if protocol.skips_missing else "count as 0"
        print(f"coverage {results.coverage:.4f}: {len(read.missing)} queries without a line {counted}")
    if short:
        print(f"{short} queries list fewer than {needed} candidates; the others count as not found")
    if not of_suite:
        print(beside({options.run.stem: results}))
    return options.out


def _run_of_member(folder: Path, name: str) -> Path:
    places = (folder / f"{name}.trec", folder / f"{name}.trec.gz", folder / "members" / name / RUN)
    if path := next(filter(Path.is_file, places), None):
        return path
    raise UserError("it does not exist: a suite needs a run file for each of its members", places[0])
