"""Score a ranking from any program: the same metrics, intervals and files as `eval.commands.run`, without a checkpoint.

    rge eval score run=FILE.trec set=DIR out=DIR
    rge eval score run=A.trec fuse=B.trec,C.trec set=DIR out=DIR    # fuse several rankings

Scoring the ``run.trec`` of an evaluation reproduces its metrics, except the spread of ties, since scores in the file are
strictly decreasing (`eval.scoring.trec`).
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, load_suite, measure_members
from eval.commands.measurement import Measurement
from eval.scoring.fuse import added
from eval.scoring.metrics import deepest
from eval.scoring.output_files import RUN, rerun_command
from eval.scoring.trec import ReadRun, read_run
from eval.sets.contents import with_readable_content
from eval.sets.retrieval_set import RetrievalSet
from rge.common.errors import UserError


@dataclass(kw_only=True)
class ScoreOptions(MeasureOptions):
    """Score a ranking from any program."""

    run: Path
    """TREC run file (query Q0 candidate rank score tag), also gzipped, or an evaluation's directory. For a suite: a
    directory with MEMBER.trec files, or a suite's evaluation."""
    fuse: tuple[Path, ...] = ()
    """Further runs of the same set to fuse with run."""
    fuse_by: Literal["rrf", "score"] = "rrf"
    """rrf sums 1 / (60 + rank); score sums scores, scaled to 0 to 1 within each run and query."""
    weights: tuple[float, ...] = ()
    """Weights of run and of the runs in fuse, in this order; empty: all equal."""
    allow_missing: bool = False
    """Score queries without a ranking as 0 instead of refusing the run."""
    allow_ties: bool = False
    """Order equal scores by candidate id instead of refusing the run."""


def score(options: ScoreOptions) -> Path:
    """Score a run file, write the outputs, and return their directory."""
    options.protocol()  # report its errors first
    if len(options.weights) not in (0, 1 + len(options.fuse)):
        raise UserError(
            f"weights must be {1 + len(options.fuse)} numbers, one per run, got {len(options.weights)}"
        )
    if is_suite(options.set):
        suite = load_suite(options.set)
        runs = _runs_of_members(options, suite.members)

        def of_member(name: str, path: Path, out: Path) -> list[Path]:
            run, *fuse = runs[name]
            return [score(replace(options, run=run, fuse=tuple(fuse), set=path, out=out))]

        measure_members(suite, options, of_member, title=str(options.run))
        return options.out
    protocol, wanted = options.prepared()
    wanted, unread = with_readable_content(wanted)
    paths = [path / RUN if path.is_dir() else path for path in (options.run, *options.fuse)]
    read = _read_runs(options, paths, wanted)
    if read.missing and not options.allow_missing:
        counted = "leaves them out, as the released code does," if protocol.skips_missing else "scores them 0"
        raise UserError(
            f"{options.run}: {len(read.missing)} of {len(wanted.queries)} queries have no line, first {read.missing[0]!r}. "
            f"Leaving them out would flatter the run; allow_missing=true {counted} and reports the coverage"
        )
    fused = json.dumps([options.fuse_by, options.weights]).encode() if options.fuse else b""
    run_hash = hashlib.sha256(b"".join(path.read_bytes() for path in paths) + fused).hexdigest()
    fusion = {"runs": list(map(str, paths)), "by": options.fuse_by, "weights": list(options.weights)}
    about_run = {"tag": read.tag, "run_hash": run_hash, "fusion": fusion if options.fuse else None}
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite)
    measurement.check_out(options.out, {"query_mode": None} | about_run)
    needed = deepest(protocol.names(wanted))
    short = int((wanted.pool_sizes().clip(max=needed) > (read.ranking.rows_QW >= 0).sum(axis=1)).sum())
    about = {
        "num_missing": len(read.missing),
        "num_short": short,
        "num_excluded_lines": read.num_excluded,
        "run": str(options.run),
        "again": rerun_command("score", options),
        "warnings": [*wanted.meta.get("notes", []), *unread],
    } | about_run
    results = measurement.write(
        options.out, read.ranking, about, tag=read.tag, missing=read.missing, title=str(options.run)
    )
    if read.missing:
        counted = "are left out" if protocol.skips_missing else "count as 0"
        print(f"coverage {results['coverage']:.4f}: {len(read.missing)} queries without a line {counted}")
    if short:
        print(f"{short} queries list fewer than {needed} candidates; the others count as not found")
    return options.out


def _read_runs(options: ScoreOptions, paths: Sequence[Path], wanted: RetrievalSet) -> ReadRun:
    reads = [read_run(path, wanted, allow_ties=options.allow_ties) for path in paths]
    if len(reads) == 1:
        return reads[0]
    return ReadRun(
        added([read.ranking for read in reads], options.fuse_by, options.weights or None),
        [name for name in reads[0].missing if all(name in read.missing for read in reads)],
        sum(read.num_excluded for read in reads),
        f"{options.fuse_by}-of-{'-'.join(read.tag for read in reads)}",
    )


def _runs_of_members(options: ScoreOptions, members: Collection[str]) -> dict[str, list[Path]]:

    def run_of(folder: Path, name: str) -> Path:
        places = (folder / f"{name}.trec", folder / f"{name}.trec.gz", folder / "members" / name / RUN)
        for path in places:
            if path.is_file():
                return path
        raise UserError(
            f"{places[0]} does not exist: a suite needs a run file for each of its {len(members)} members"
        )

    return {name: [run_of(folder, name) for folder in (options.run, *options.fuse)] for name in members}
