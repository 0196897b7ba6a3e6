"""Run a sweep over one recipe key with several seeds, evaluate every run, and write one table and one plot.

    python scripts/ablate.py recipe=demo sweep='loss.anchor=[self,oracle,none]' seeds=3 \
        init=runs/demo/cold_start/final set=data_prep/demo/data/test out=runs/ablate_anchor \
        with.none='loss.ratio=none joint.lr=2e-3 loss.temperature=0.05'

Every run is one stage of the recipe, the joint one unless ``stage=rl``, from the same `init`, with ``train.seed`` 0, 1, ...; ``with.VALUE`` adds
overrides to the arm of that value, for an arm that needs settings of its own to be given a fair chance, and any other
``key=value`` goes to every run. Everything is checked before anything runs. A run that is finished is not repeated, an
interrupted one resumes, so the command can be stopped and given again.

Many machines: ``index=5`` runs the sixth run of the list and nothing else (``index=$SLURM_ARRAY_TASK_ID`` in a job
array; ``list=true`` prints the list), ``only=0/4`` runs 0, 4, 8, ...; then the same command with ``collect=true`` runs
nothing and writes table and plot. ``launcher`` is put before ``rge/train.py``: any `accelerate launch` line, so a run may
have as many processes and machines as it needs.

The table has, for each arm and slice of the set, the mean over seeds with a 95 % interval from a bootstrap over seeds and groups
of queries together, and the lowest and highest seed; and the paired differences from the first arm. Of a suite, such as MMEB's, the figures are means over its members, and
one table has the averages of its paper side by side. It is written to ``out/table.md``, ``table.csv``, ``table.tex``,
``table.json`` and ``plot.svg``; the last line printed is that JSON.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from arms import DEMO_SET, ROOT, Arm, Figures, Results, Study, mean_over_seeds, refuse_launcher, run_arm

from eval.benchmarks.suite import is_suite, load_suite, mean_of, member_bootstraps
from eval.pages.charts import Mark, interval_chart
from eval.scoring.metrics import names_of as names_of_metrics
from eval.scoring.tables import latex
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.options import names_of, offer_help, parse_options, split_word
from rge.config import AtLeastOne, load_recipe
from rge.stats.intervals import OF_DIFFERENCES, figures, in_words, index_of, over_seeds

BEFORE = {"joint": "cold_start", "rl": "joint"}
"""Whose checkpoint a stage continues from."""


@dataclass(frozen=True)
class Options:
    """What is swept, how often, and which of the runs this call makes; any other key goes to every run's recipe."""

    recipe: str
    """Of the runs: a name, or a YAML file."""
    sweep: str
    """KEY=[VALUE,VALUE,...]: the key of the recipe and the values it takes."""
    seeds: AtLeastOne = 3
    """Runs an arm, with train.seed 0, 1, ..."""
    stage: Literal["joint", "rl"] = "joint"
    """Stage that every run is."""
    init: str = ""
    """Checkpoint that every run starts from; empty: the recipe's own from the stage before."""
    set: str = ""
    """Retrieval set or suite that every run is evaluated on; empty: the demo's, for the recipe demo."""
    out: str = ""
    """Folder of the sweep; empty: runs/ablate_RECIPE_KEY."""
    metrics: tuple[str, ...] = ("hit@1", "recall@1", "mrr")
    """Metrics of the table, at any cutoff."""
    by: str = "pair"
    """Column whose values become slices beside all queries."""
    only: str = "0/1"
    """PART/PARTS: the runs PART, PART + PARTS, PART + 2 PARTS, ..., for several machines without a scheduler."""
    index: int | None = None
    """Number of the one run to make, for a job array."""
    list: bool = False
    """Print the runs with their numbers, and make none."""
    collect: bool = False
    """Make no run, write the table."""
    launcher: str = ""
    """What stands before rge/train.py; empty: accelerate as configured, or two processes where there is no GPU."""


class SweepError(UserError):
    """The sweep is described wrongly, or its runs are not there; the message says how to fix it."""


def main(arguments: list[str]) -> None:
    """Run what is not finished, then write table and plot."""
    refuse_launcher("scripts/ablate.py")
    options, arms, extra = read_options(arguments)
    os.chdir(ROOT)
    key, values = parse_sweep(options.sweep)
    options, study = plan(options, key, values, arms, extra)
    runs = [(arm, seed) for seed in range(options.seeds) for arm in study.arms]
    said = [f"{key}={value}" for value in values] * options.seeds
    if options.list:
        for number, (arm, seed) in enumerate(runs):
            state = "finished" if is_evaluated(study, arm, seed) else "open"
            print(f"{number}\t{said[number]}\tseed {seed}\t{state}\t{study.folder(arm, seed)}")
        return
    chosen = choose(options, len(runs))
    check_places(options, bool(chosen))
    for number in chosen:
        arm, seed = runs[number]
        print(f"[{number + 1}/{len(runs)}] {said[number]} seed {seed}", flush=True)
        run_arm(study, arm, seed)
    if options.index is not None:
        return
    missing = [number for number, one in enumerate(runs) if not is_evaluated(study, *one)]
    if missing:
        message = (
            f"{len(missing)} of {len(runs)} runs are not finished here, e.g. index={missing[0]} "
            f"({study.folder(*runs[missing[0]])})"
        )
        if options.collect:
            raise SweepError(f"{message}; run them first")
        print(f"{message}; no table yet")
        return
    out = Path(options.out)
    table = collect(study, values, options)
    tables = shown(key, table, options.metrics)
    text = markdown(tables)
    write_text(out / "table.md", text)
    write_text(out / "table.csv", numbers(table, options.metrics).to_csv(index=False))
    write_text(out / "table.tex", "\n".join(latex(frame) for _, frame in tables))
    write_text(out / "table.json", json.dumps(table, indent=1))
    write_text(out / "plot.svg", plot(key, table, options.metrics, options.seeds))
    print(f"\n{text}\n{json.dumps(table)}")


def read_options(arguments: list[str]) -> tuple[Options, dict[str, list[str]], list[str]]:
    """Split the arguments into this script's options, overrides of single arms, and overrides of all runs."""
    offer_help(Options, arguments, "python scripts/ablate.py")
    own, extra = [], []
    arms: dict[str, list[str]] = {}
    for argument in arguments:
        name, value = split_word(argument)
        if name in names_of(Options):
            own.append(argument)
        elif name.startswith("with."):
            arms[name.removeprefix("with.")] = shlex.split(value)
        else:
            extra.append(argument)
    return parse_options(Options, own), arms, extra


def parse_sweep(sweep: str) -> tuple[str, list[str]]:
    """``loss.ratio=[1:1,1:10]`` as key and values. Commas inside brackets belong to a value.

    Raises:
        SweepError: another form, an empty value, or a value given twice.
    """
    key, mark, inside = sweep.partition("=")
    if not mark or not (inside.startswith("[") and inside.endswith("]")):
        raise SweepError(f"sweep must be KEY=[VALUE,VALUE,...], got {sweep!r}")
    values, depth = [""], 0
    for letter in inside[1:-1]:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if "" in values:
        raise SweepError(f"sweep must be KEY=[VALUE,VALUE,...] without empty values, got {sweep!r}")
    names = [folder_name(value) for value in values]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise SweepError(
                f"{values[names.index(name)]} and {values[place]} of the sweep are the same run, or would be written to the same folder {name}"
            )
    return key, values


def folder_name(value: str) -> str:
    """A value as a folder's name."""
    return re.sub(r"[^\w.+-]", "_", value)


def plan(
    options: Options, key: str, values: list[str], arms: dict[str, list[str]], extra: list[str]
) -> tuple[Options, Study]:
    """The options with every place worked out, and an arm for each value, each with a recipe that loads.

    Raises:
        SweepError: ``with.`` of a value that is not in the sweep, or a place that cannot be worked out.
        RecipeError: the recipe, the swept key, a value or an override is wrong.
    """
    if unknown := [value for value in arms if value not in values]:
        raise SweepError(f"with.{unknown[0]} names no value of the sweep: {', '.join(values)}")
    options = complete(options, key, load_recipe([f"recipe={options.recipe}"]).out)
    recipe = (f"recipe={options.recipe}", f"init={options.init}")
    found = []
    for value in values:
        overrides = (f"{key}={value}", *extra, *arms.get(value, []))
        load_recipe([*recipe, f"stage={options.stage}", f"out={options.out}", *overrides])
        found.append(Arm(folder_name(value), options.stage, overrides=overrides))
    ask = [f"benchmark={load_suite(Path(options.set)).benchmark}"] if is_suite(Path(options.set)) else []
    if more := [name for name in options.metrics if name not in names_of_metrics(negatives=True)]:
        ask.append(f"metrics={','.join(more)}")
    sets = {"": Path(options.set)}
    study = Study(
        Path(options.out), found, recipe, sets, options.seeds, options.launcher, tuple(ask),
        metrics=options.metrics, columns=(options.by, "category"),
    )  # fmt: skip
    return options, study


def complete(options: Options, key: str, recipe_out: str) -> Options:
    """Fill in what was not given: the recipe's own checkpoint of the stage before, the demo's test set, a folder named after the key."""
    if not options.set and options.recipe != "demo":
        raise SweepError("set= must be given: the retrieval set that every run is evaluated on")
    return replace(
        options,
        init=options.init or f"{recipe_out}/{BEFORE[options.stage]}/final",
        out=options.out or f"runs/ablate_{options.recipe}_{folder_name(key)}",
        set=options.set or str(DEMO_SET),
    )


def choose(options: Options, count: int) -> list[int]:
    """Numbers of the runs that this call is to make.

    Raises:
        SweepError: an index outside the list, a part that does not exist, or both given.
    """
    if options.collect:
        return []
    if options.index is not None:
        if options.only != "0/1":
            raise SweepError("give index= or only=, not both")
        if not 0 <= options.index < count:
            raise SweepError(
                f"index must be 0 to {count - 1}, since the sweep has {count} runs (a Slurm array: --array=0-{count - 1}); "
                f"got {options.index}"
            )
        return [options.index]
    part = re.fullmatch(r"(\d+)/([1-9]\d*)", options.only)
    if part is None or int(part[1]) >= int(part[2]):
        raise SweepError(f"only must be PART/PARTS such as 0/4 to 3/4, got {options.only!r}")
    return list(range(int(part[1]), count, int(part[2])))


def check_places(options: Options, will_run: bool) -> None:
    """Fail before the first run, not after it, where the start or the set is missing."""
    if not will_run:
        return
    if is_suite(Path(options.set)):
        load_suite(Path(options.set))
    elif not (Path(options.set) / "queries.parquet").is_file():
        raise SweepError(
            f"set={options.set} is no retrieval set (no queries.parquet) and no suite (no suite.json)"
        )
    init = options.init
    if not Path(init).is_dir() and init.count("/") != 1:  # one slash: may be a hub id
        raise SweepError(
            f"init={init} does not exist; train it with "
            f"`accelerate launch rge/train.py recipe={options.recipe} stage={BEFORE[options.stage]}`, or name a checkpoint"
        )


def is_evaluated(study: Study, arm: Arm, seed: int) -> bool:
    """Whether a run has its figures."""
    return (study.evaluation(arm, seed, "") / "results.json").is_file()


@dataclass(frozen=True)
class Slice:
    """Some of the queries.

    Attributes:
        chosen_Q: which.
        of_members: whether its figure is the mean over members of a suite, and not over queries.
        column: of a suite's members, whose value it is; empty: of none.
    """

    chosen_Q: np.ndarray
    of_members: bool = False
    column: str = ""


def slices_of(frame: pd.DataFrame, options: Options) -> dict[str, Slice]:
    """All queries, and the values of ``by``; of a suite the mean of members, its averages over columns, and each member."""
    everything = np.ones(len(frame), dtype=bool)

    def values(of: str, **more: Any) -> dict[str, Slice]:
        return {str(v): Slice((frame[of] == v).to_numpy(), **more) for v in sorted(frame[of].unique())}

    if not is_suite(Path(options.set)):
        return {"all": Slice(everything)} | (values(options.by) if options.by in frame else {})
    members = load_suite(Path(options.set)).members
    columns = dict.fromkeys(column for more in members.values() for column in more)
    found = {"all": Slice(everything, True)}
    for column in columns:
        found |= values(column, of_members=True, column=column)
    return found | values("category")


def collect(study: Study, values: list[str], options: Options) -> list[dict[str, Any]]:
    """Figures of every arm and slice.

    Raises:
        SweepError: runs of different queries, or a metric that was not measured.
    """
    metrics = list(options.metrics)
    first, value_AQSM = read_queries(study, metrics)
    rows = []
    for value, ours_QSM in zip(values, value_AQSM, strict=True):
        for name, one in slices_of(first, options).items():
            about, ours, base = first[one.chosen_Q], ours_QSM[one.chosen_Q], value_AQSM[0][one.chosen_Q]
            row: dict[str, Any] = {"arm": value, "slice": name, "queries": int(one.chosen_Q.sum())}
            means = slice_intervals(one, about, ours, metrics, (0.0, 1.0))
            seeds = np.stack([slice_mean(one, about, ours[:, s]) for s in range(options.seeds)], axis=1)
            for metric, mean, by_seed in zip(metrics, means, seeds.round(4).tolist(), strict=True):
                row[metric] = {**mean, "seeds": by_seed}
            if one.column:
                row["column"] = one.column
            if value != values[0]:
                gains = slice_intervals(one, about, ours - base, metrics, OF_DIFFERENCES)
                for metric, gain in zip(metrics, gains, strict=True):
                    row[metric]["difference"] = gain
            rows.append(row)
    return rows


def slice_intervals(
    one: Slice, about: pd.DataFrame, value_QSM: np.ndarray, metrics: list[str], bounds: tuple[float, float]
) -> list[Figures]:
    """A slice's mean of each metric with its interval over seeds and groups: of queries, or of a suite's members."""
    Q, S, M = value_QSM.shape
    if not one.of_members:
        return as_means(
            [joint for joint, _ in mean_over_seeds(value_QSM, index_of(about["group"].tolist()), bounds)]
        )
    columns = [f"{metric} {seed}" for seed in range(S) for metric in metrics]
    table = pd.DataFrame(value_QSM.reshape(Q, S * M), about.index, columns).join(about[["category", "group"]])
    found = mean_of(list(member_bootstraps(table, columns, seed=0).values()))
    return as_means(figures(over_seeds(found, S), bounds))


def slice_mean(one: Slice, about: pd.DataFrame, value_QM: np.ndarray) -> np.ndarray:
    """A slice's mean of each metric without an interval."""
    if not one.of_members:
        return np.nanmean(value_QM, axis=0)
    members = [(about["category"] == name).to_numpy() for name in sorted(set(about["category"]))]
    return np.mean([np.nanmean(value_QM[rows_Q], axis=0) for rows_Q in members], axis=0)


def read_queries(study: Study, metrics: Sequence[str]) -> tuple[pd.DataFrame, list[np.ndarray]]:
    """What queries are about, in the order of their ids, and each arm's values, (queries, seeds, metrics)."""
    results, names, arms = Results(study), "", []
    for arm in study.arms:
        seeds = []
        for seed in range(study.seeds):
            key, frame = results.of(arm.name, seed, "")  # type: ignore[misc]  # every run is there
            folder = study.evaluation(arm, seed, "")
            if names not in ("", key):
                raise SweepError(f"{folder} and the runs before it were evaluated on different queries")
            names = key
            if missing := [metric for metric in metrics if metric not in frame]:
                raise SweepError(
                    f"{folder} was not evaluated for {missing[0]}; there are: {', '.join(map(str, frame.columns))}"
                )
            seeds.append(frame[list(metrics)].to_numpy(dtype=float))
        arms.append(np.stack(seeds, axis=1))
    results.keep()
    return frame, arms


def as_means(found: list[Figures]) -> list[Figures]:
    """Figures as the table has them."""
    return [{"mean": one["value"], "low": one["low"], "high": one["high"]} for one in found]


def shown(key: str, table: list[dict[str, Any]], metrics: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """The tables for people, in per cent, each with its title: of a suite its averages side by side, then everything."""

    def cell(one: dict[str, Any], sign: str = "") -> str:
        return f"{100 * one['mean']:{sign}.1f} {in_words(one['low'], one['high'])}"

    def seeds(one: dict[str, Any]) -> str:
        return f"{cell(one)} ({100 * min(one['seeds']):.1f} to {100 * max(one['seeds']):.1f})"

    found = []
    averages = list(dict.fromkeys(row["slice"] for row in table if "column" in row))
    for metric in metrics if averages else ():
        arms: dict[str, dict[str, str]] = {}
        for row in table:
            if row["slice"] in ("all", *averages):
                arms.setdefault(row["arm"], {key: row["arm"]})[row["slice"]] = cell(row[metric])
        found.append(
            (f"{metric}, means over members:", pd.DataFrame(list(arms.values()))[[key, *averages, "all"]])
        )
    columns = {m: f"{m}, 95 % interval (lowest to highest seed)" for m in metrics}
    rows = [
        {key: row["arm"], "slice": row["slice"], "queries": row["queries"]}
        | {columns[m]: seeds(row[m]) for m in metrics}
        for row in table
    ]
    found.append(("", pd.DataFrame(rows)))
    first = table[0]["arm"]
    rows = [
        {key: row["arm"], "slice": row["slice"]} | {m: cell(row[m]["difference"], "+") for m in metrics}
        for row in table
        if row["arm"] != first
    ]
    if rows:
        title = f"Paired differences from {key}={first}, 95 % intervals over seeds and groups of queries:"
        found.append((title, pd.DataFrame(rows)))
    return found


def markdown(tables: list[tuple[str, pd.DataFrame]]) -> str:
    """`shown` as a page."""
    parts = []
    for title, frame in tables:
        rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines[1] = lines[1].replace(" ", "")
        parts.append("\n".join([*([title, ""] if title else []), *lines]))
    return "\n\n".join(parts) + "\n"


def numbers(table: list[dict[str, Any]], metrics: Sequence[str]) -> pd.DataFrame:
    """The same as fractions of one, a line for each arm, slice and metric."""
    rows = []
    for row in table:
        for metric in metrics:
            of = {key: row[metric][key] for key in ("mean", "low", "high")}
            of |= {f"difference_{k}": v for k, v in row[metric].get("difference", {}).items()}
            of |= {f"seed_{number}": value for number, value in enumerate(row[metric]["seeds"])}
            rows.append({key: row[key] for key in ("arm", "slice", "queries")} | {"metric": metric} | of)
    return pd.DataFrame(rows)


def plot(key: str, table: list[dict[str, Any]], metrics: Sequence[str], seeds: int) -> str:
    """The same as a picture."""
    marks = [
        Mark(row["arm"], row["slice"], m, row[m]["mean"], row[m]["low"], row[m]["high"], row[m]["seeds"])
        for row in table
        for m in metrics
    ]
    return interval_chart(
        marks, title=f"{key}: mean of {seeds} seeds, 95 % interval over seeds and groups of queries"
    )


if __name__ == "__main__":
    start(main)
