"""Suites: several retrieval sets that form one benchmark, such as MMEB's 36 sets or MM-BRIGHT's 29 domains.

A suite is a directory with ``suite.json`` and a retrieval set in each member's folder. Members are evaluated like any
set; the suite's output directory holds all their queries in one ``per_query.parquet``, with the member as category, so
that `compare` pairs suites as it pairs sets. The macro mean is the mean of the members' means; groups are resampled
within members.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import BaseModel

from eval.benchmarks.registry import protocol_for
from eval.scoring.identity import differences, versions, with_key
from eval.scoring.metrics import of_kinds
from eval.scoring.output_files import (
    PER_QUERY,
    RESULTS,
    by_name,
    check_out,
    invalidate,
    rationale_figures,
    read_results,
    statistics_settings,
    write_tables,
)
from eval.scoring.protocol import headline_figures
from eval.scoring.results import FORMAT, Measured, Results, SetFacts
from eval.scoring.tables import in_per_cent
from rge.common.errors import UserError
from rge.common.files import find_shipped, relative, write_json
from rge.stats.intervals import NUM_RESAMPLES, Bootstrap, cluster_bootstrap, index_of
from rge.vectors.processes import join

SUITE = "suite.json"
PER_MEMBER = ("set.", "embedder.run", "asked.depth", "machine.")
"""Parts of an identity that may differ between members."""
ByMember = Mapping[str, Results]
"""Evaluations by member."""


class Suite(BaseModel):
    """A checked ``suite.json``; ``benchmark`` is the protocol that its members are meant for."""

    path: Path
    name: str
    benchmark: str
    column: str  # what members are called, such as ``domain`` or ``set``
    members: dict[str, dict[str, str]]
    """Name -> further columns, such as ``{"meta_task": "VQA", "distribution": "OOD"}``."""


def is_suite(path: Path) -> bool:
    """Whether a directory is a suite."""
    return (find_shipped(path) / SUITE).is_file()


def write_suite(path: Path, *, name: str, benchmark: str, column: str, members: Mapping[str, Mapping[str, str]], **meta: Any) -> None:  # fmt: skip
    """Write ``suite.json`` next to the members' folders, after all of them."""
    content = {"name": name, "benchmark": benchmark, "column": column, "members": members} | meta
    write_json(path / SUITE, content)


def load_suite(path: Path) -> Suite:
    """Read a suite; a `UserError` if the file is invalid, or a member's folder is missing or outside the suite."""
    path = find_shipped(path)
    file = path / SUITE
    try:
        suite = Suite(**json.loads(file.read_text(encoding="utf-8")) | {"path": path})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"it cannot be read: {error}", file) from None
    if not suite.members:
        raise UserError("it has no members", file)
    for name in suite.members:
        if Path(name).is_absolute() or not name.strip() or ".." in Path(name).parts:
            raise UserError("the member is not a folder in the suite", file, key=name, kind="outside")
        if not (path / name / "meta.json").is_file():
            raise UserError("the member is not a retrieval set: import it again", file, key=name)
    return suite


def member_dirs(directory: Path, results: Results) -> dict[str, Path]:
    """Evaluation directories of a suite's members; a `UserError` if they are not recorded, or one is missing."""
    dirs = {name: directory / where for name, where in results.member_dirs.items()}
    if not dirs:
        raise UserError(
            "it does not record where its members' evaluations are: evaluate it again", directory, kind="old"
        )
    for name, path in dirs.items():
        if not path.is_dir():
            raise UserError(
                f"the evaluation of {name} is missing; {directory} needs all of them", path, kind="missing"
            )
    return dirs


def _aggregate(
    suite: Suite, dirs: Mapping[str, Path], options: Any, more: Callable[[ByMember], Mapping[str, Any]]
) -> str:
    """Join the evaluations of all members, write the joint output directory, and return its table of figures."""
    out, seed = options.out, options.seed
    results = {name: read_results(path) for name, path in dirs.items()}
    first = next(iter(results.values()))
    table = _joint_table(suite, dirs)
    columns = list(dict.fromkeys(chain.from_iterable(suite.members.values())))
    reported = dict.fromkeys(chain.from_iterable(result.by for result in results.values()))
    query_columns = [column for column in reported if column not in ("category", *columns)]
    by_member = {name: result.micro for name, result in results.items()}
    names = [name for name in _in_all(list(by_member.values())) if name in table]
    protocol = protocol_for(first.benchmark, first.profile)
    content: dict[str, Any] = {
        "format": FORMAT,
        "set": _joint_set(suite, results, table),
        **first.asked().as_json(),
        "benchmark": first.benchmark,
        "profile": first.profile,
        "protocol": first.protocol,
        "metrics": first.metrics,
        "seed": first.seed,
        "tag": first.tag,
        "depth": first.depth,
        "batch_size": first.batch_size,
        "ranked_with": first.ranked_with,
        "plugins": first.plugins,
        "suite": suite.column,
        "member_dirs": {name: relative(path, out) for name, path in dirs.items()},
        **_figures(table, names, columns, query_columns, seed),
        "by_category": by_member,
        "ties": _member_means([result.ties for result in results.values()]),
        "random": _member_means([result.random for result in results.values()]),
        "rationale": rationale_figures(table),
        "coverage": float(np.mean([result.coverage for result in results.values()])),
        "warnings": sorted(set().union(*(result.warnings for result in results.values()))),
        "statistics": statistics_settings(seed) | {"resampled": "group within member"},
        "versions": versions(),
    }
    if any(result.run_hash for result in results.values()):
        content["run_hash"] = _digest({name: result.run_hash for name, result in results.items()})
    if not any(
        name in content["macro"] for name in protocol.headline
    ):  # not of a ranking, such as scores of answers
        protocol = replace(protocol, headline=tuple(first.metrics))
    content |= protocol.suite_figures(results) | dict(more(results))
    joint = Results(
        **content,
        identity=with_key(Measured(**content), made=first.identity),
        headline=headline_figures(protocol, content["macro"], "macro"),
    )
    check_out(out, joint, overwrite=options.overwrite)
    invalidate(out)
    write_tables(out, pa.Table.from_pandas(table, preserve_index=False), joint)
    shown = (*protocol.headline, *joint.metrics, *of_kinds(joint.overall))
    return in_per_cent(joint, shown).to_string()


def _check_same_settings(first: Path, other: Path) -> None:
    for key, (expected, value) in differences(read_results(first), read_results(other)).items():
        if not key.startswith(PER_MEMBER):
            raise UserError(
                f"it is {value!r}, but {expected!r} in {first}: evaluate all members with the same settings",
                other,
                key=key,
            )


def _check_joint_out(suite: Suite, out: Path, *, overwrite: bool) -> None:
    """Raise a `UserError` if a joint output directory holds an evaluation of something else than these members."""
    if overwrite or not (out / RESULTS).exists():
        return
    old = read_results(out)
    if not old.suite or set(old.set.members or suite.members) != set(suite.members):
        raise UserError(
            f"it already holds an evaluation of {old.set.name}, this one is of {suite.name}"
            f": choose another, or pass overwrite=true",
            out,
            key="out",
        )


def _joint_table(suite: Suite, dirs: Mapping[str, Path]) -> pd.DataFrame:
    """Queries of all members, with the member as category and as prefix of ids and groups."""
    frames = []
    for name, path in dirs.items():
        frame = pd.read_parquet(path / PER_QUERY)
        within = {column: f"{name}/" + frame[column] for column in ("query_id", "group")}
        frames.append(frame.assign(**within | {"category": name} | suite.members[name]))
    return pd.concat(frames, ignore_index=True)


def _joint_set(suite: Suite, results: ByMember, table: pd.DataFrame) -> SetFacts:
    sets = {name: member.set for name, member in results.items()}
    first = next(iter(sets.values()))
    members = {name: member.fingerprint for name, member in sets.items()}
    contents = {name: member.content for name, member in sets.items()}
    return SetFacts(
        name=suite.name,
        fingerprint=_digest(members),
        content=None if None in contents.values() else _digest(contents),
        made_with=first.made_with,
        num_queries=len(table),
        num_candidates=sum(member.num_candidates for member in sets.values()),
        num_groups=int(table["group"].nunique()),
        num_members=len(sets),
        members=members,
        path=str(suite.path.resolve()),
        limit=first.limit,
    )


def _digest(of_member: Mapping[str, str | None]) -> str:
    return hashlib.sha256(json.dumps(sorted(of_member.items())).encode()).hexdigest()


def _in_all(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in blocks[0] if all(key in block for block in blocks)]


def _figures(
    table: pd.DataFrame, names: Sequence[str], columns: Sequence[str], query_columns: Sequence[str], seed: int
) -> dict[str, Any]:
    """Micro and macro figures over all members, and means of members for every value of a column.

    ``columns``: of members. ``query_columns``: each value's figure is over the members that have such queries.
    """
    of_member = member_bootstraps(table, names, seed=seed)
    micro = mean_over(table, names, members=False, seed=seed)
    whole = mean_of(list(of_member.values()))
    out: dict[str, Any] = {"micro": by_name(names, micro), "macro": by_name(names, whole)}
    for column in (*columns, *query_columns):
        out[f"by_{column}"] = {}
        for value, rows in table.groupby(column):
            if column in columns:
                mean = mean_of([of_member[name] for name in sorted(set(rows["category"]))])
            else:
                mean = mean_over(rows, names, members=True, seed=seed)
            out[f"by_{column}"][str(value)] = by_name(names, mean)
    return out


def member_bootstraps(
    table: pd.DataFrame, names: Sequence[str], *, seed: int, num_resamples: int = NUM_RESAMPLES
) -> dict[str, Bootstrap]:
    """Each member's means, resampled within the member; `mean_of` them is the macro mean.

    ``table``: per-query values, or differences of two runs, with ``category`` (the member) and ``group``.
    """
    means = {}
    for number, (member, rows) in enumerate(table.groupby("category", sort=True)):
        values, group_Q = rows[list(names)].to_numpy(np.float64), index_of(rows["group"].tolist())
        # different seeds, since members of equal size would otherwise get identical resamples
        means[str(member)] = cluster_bootstrap(
            values, group_Q, num_resamples=num_resamples, seed=seed + 1000 * number
        )
    return means


def mean_over(
    table: pd.DataFrame, names: Sequence[str], *, members: bool, seed: int, num_resamples: int = NUM_RESAMPLES
) -> Bootstrap:
    """Means of columns over queries, or, with `members`, means of the members' means; see `member_bootstraps`."""
    if members:
        means = member_bootstraps(table, names, seed=seed, num_resamples=num_resamples)
        return mean_of(list(means.values()))
    values, group_Q = table[list(names)].to_numpy(np.float64), index_of(table["group"].tolist())
    return cluster_bootstrap(values, group_Q, num_resamples=num_resamples, seed=seed)


def mean_of(parts: Sequence[Bootstrap]) -> Bootstrap:
    """The unweighted mean of independently bootstrapped means."""
    estimates = np.stack([part.estimate_M for part in parts])
    jackknife = [
        estimates.mean(axis=0) + (part.jackknife_GM - part.estimate_M) / len(parts) for part in parts
    ]
    return Bootstrap(
        estimate_M=estimates.mean(axis=0),
        draws_BM=np.mean([part.draws_BM for part in parts], axis=0),
        jackknife_GM=np.concatenate(jackknife),
        # a part with a single group has no resampling variance
        num_groups_M=np.sum(
            [np.where(part.num_groups_M > 1, part.num_groups_M, 0) for part in parts], axis=0
        ),
    )


def measure_members(
    suite: Suite,
    options: Any,
    measure: Callable[[str, Any], Sequence[Path]],
    *,
    title: str | None = None,
    more: Callable[[ByMember], Mapping[str, Any]] = lambda _: {},
) -> list[Path]:
    """Measure every member of a suite separately and join each condition's evaluations; returns the joint directories.

    ``options``: those of a command that measures. ``measure``: called with a member's name and the options with its set
    and output directory; returns the directories of its evaluations, which are that directory or subfolders of it;
    conditions that some members lack are not joined. ``title``: printed if there is only one condition; None prints no
    tables. ``more``: further keys of results.json, from those of the members.

    Raises:
        UserError: an output directory holds something else, or members were measured with different settings.
    """
    _check_joint_out(suite, options.out, overwrite=options.overwrite)
    conditions: dict[str, dict[str, Path]] = {}
    for name in suite.members:
        out = options.out / "members" / name
        for done in measure(name, replace(options, set=suite.path / name, out=out)):
            condition = os.path.relpath(done, out)
            dirs = conditions.setdefault(condition, {})
            dirs[name] = done
            if join().is_first:  # as early as possible, since every further member may take hours
                _check_joint_out(suite, options.out / condition, overwrite=options.overwrite)
                _check_same_settings(next(iter(dirs.values())), done)
    of_all = {condition: dirs for condition, dirs in conditions.items() if len(dirs) == len(suite.members)}
    for condition, dirs in of_all.items() if join().is_first else ():
        out = options.out / condition
        figures = _aggregate(suite, dirs, replace(options, out=out), more)
        if title is not None:
            shown = title if condition == os.curdir else condition
            print(f"\n{suite.name}: {shown} -> {out}\n{figures}", flush=True)
    return [options.out / condition for condition in of_all]


def _member_means(blocks: Sequence[Any]) -> Any:
    """Mean over members of every figure that all have, recursively for nested figures."""
    if not isinstance(blocks[0], Mapping):
        return float(np.mean(blocks))
    return {name: _member_means([block[name] for block in blocks]) for name in _in_all(blocks)}
