"""Run a sweep over one recipe key with several seeds, evaluate every run, and write one table and one plot.

    python scripts/ablate.py recipe=demo sweep='loss.anchor=[self,oracle,none]' seeds=3 \
        init=runs/demo/cold_start/final set=data_prep/demo/data/test out=runs/ablate_anchor \
        with.none='loss.ratio=none joint.lr=2e-3 loss.temperature=0.05'

Every run trains one stage of the recipe from the same `init`, with ``train.seed`` 0, 1, .... ``with.VALUE`` adds overrides to one arm;
any other ``key=value`` goes to every run. The same command skips finished runs and resumes the rest; started in several terminals, it
makes several runs at a time. Paths are relative to the working directory. See docs/ablations.md for job arrays, launchers and the tables.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pandas as pd
from arms import (
    DEMO_SET,
    Arm,
    Results,
    Row,
    Slice,
    Study,
    Table,
    in_table,
    markdown,
    refuse_launcher,
    run_all,
    too_narrow,
)

from eval.benchmarks.suite import is_suite, load_suite
from eval.pages.charts import STYLES, interval_chart
from eval.scoring.metrics import names_of as names_of_metrics
from eval.scoring.metrics import parse_name
from eval.scoring.tables import latex
from rge.checkpoints.settings import RGE_JSON
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import checkpoint_folder, find_shipped, read_json, write_text
from rge.common.options import AtLeastOne, names_of, offer_help, parse_options, split_word
from rge.config import load_recipe
from rge.identity.run_identity import differences, in_words

BEFORE = {"joint": "cold_start", "rl": "joint"}
"""The stage whose checkpoint each stage starts from."""


@dataclass(frozen=True)
class Options:
    """Options of a sweep; any other key is an override of every run's recipe."""

    recipe: str
    """Name of a recipe, or a YAML file."""
    sweep: str
    """KEY=[VALUE,VALUE,...]: the swept key and its values."""
    seeds: AtLeastOne = 3
    """Runs per arm, with train.seed 0, 1, ..."""
    stage: Literal["joint", "rl"] = "joint"
    """Stage that every run trains."""
    init: str = ""
    """Checkpoint that every run starts from; empty: the recipe's own, from the stage before."""
    set: str = ""
    """Retrieval set or suite for evaluation; empty: the demo's test set, for the recipe demo."""
    out: str = ""
    """Folder of the sweep; empty: runs/ablate_RECIPE_KEY."""
    metrics: tuple[str, ...] = ("hit@1", "recall@1", "mrr")
    """Metrics of the tables, at any cutoff."""
    by: str = "pair"
    """Column whose values become slices, in addition to all queries."""
    index: int | None = None
    """Number of the one run to make, for job arrays."""
    list: bool = False
    """Print the runs and their numbers only."""
    collect: bool = False
    """Write the tables only."""
    launcher: str = ""
    """Command before rge/train.py; empty: accelerate as configured, or two processes if there is no GPU."""


def main(arguments: list[str]) -> None:
    """Make the missing runs, then write tables and plot."""
    refuse_launcher("scripts/ablate.py")
    options, arms, extra = read_options(arguments)
    key, values = parse_sweep(options.sweep)
    options, study = plan(options, key, values, arms, extra)
    runs = [(arm, seed) for seed in range(options.seeds) for arm in study.arms]
    if options.list:
        for number, (arm, seed) in enumerate(runs):
            state = "finished" if study.is_finished(arm, seed) else "open"
            print(f"{number}\t{arm.overrides[0]}\tseed {seed}\t{state}\t{study.folder(arm, seed)}")
        return
    if not options.collect:
        check_places(options)
        run_all(study, chosen(options, runs))
    if options.index is not None:
        return
    if missing := [number for number, run in enumerate(runs) if not study.is_finished(*run)]:
        folder = study.folder(*runs[missing[0]])
        raise UserError(
            f"{len(missing)} of {len(runs)} runs are not finished, e.g. index={missing[0]} ({folder}); run them first"
        )
    write_tables(study, key, values, options)


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
            arms.setdefault(name.removeprefix("with."), []).extend(shlex.split(value))
        else:
            extra.append(argument)
    return parse_options(Options, own), arms, extra


def parse_sweep(sweep: str) -> tuple[str, list[str]]:
    """``loss.ratio=[1:1,1:10]`` as key and values. Commas inside brackets belong to a value."""
    key, mark, inside = sweep.partition("=")
    if not mark or not (inside.startswith("[") and inside.endswith("]")):
        raise UserError(f"sweep must be KEY=[VALUE,VALUE,...], got {sweep!r}")
    values, depth = [""], 0
    for letter in inside[1:-1]:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if "" in values:
        raise UserError(f"sweep must be KEY=[VALUE,VALUE,...] without empty values, got {sweep!r}")
    folders: dict[str, str] = {}
    for value in values:
        if (name := folder_name(value)) in folders:
            raise UserError(
                f"{folders[name]} and {value} of the sweep are the same run, or would be written to the same folder {name}"
            )
        folders[name] = value
    return key, values


def folder_name(value: str) -> str:
    """A value as the name of a folder."""
    return re.sub(r"[^\w.+-]", "_", value)


def plan(
    options: Options, key: str, values: list[str], arms: dict[str, list[str]], extra: list[str]
) -> tuple[Options, Study]:
    """The options with defaults filled in, and a study with one arm per value; an error if the recipe refuses one of them."""
    if unknown := [value for value in arms if value not in values]:
        raise UserError(f"with.{unknown[0]} names no value of the sweep: {', '.join(values)}")
    overrides = {value: (f"{key}={value}", *extra, *arms.get(value, [])) for value in values}
    for word in (word for words in overrides.values() for word in words):
        if split_word(word)[0] == "train.seed":
            raise UserError(
                f"{word} would make every seed of an arm the same run: leave it out, and give seeds=N"
            )
    options = complete(options, key, overrides[values[0]])
    recipe = (f"recipe={options.recipe}", f"init={options.init}")
    runs = []
    for value, words in overrides.items():
        plugins = load_recipe([*recipe, f"stage={options.stage}", f"out={options.out}", *words]).plugins
        asked = (f"plugins={','.join(plugins)}",) if plugins else ()
        runs.append(Arm(folder_name(value), options.stage, overrides=words, ask=asked))
    if not options.collect:  # now, and not after the first training
        for metric in options.metrics:
            parse_name(metric)
    ask = [f"benchmark={load_suite(Path(options.set)).benchmark}"] if is_suite(Path(options.set)) else []
    if more := [name for name in options.metrics if name not in names_of_metrics(negatives=True)]:
        ask.append(f"metrics={','.join(more)}")
    study = Study(
        Path(options.out), runs, recipe, {"": Path(options.set)}, options.seeds, options.launcher, tuple(ask),
        metrics=options.metrics, columns=(options.by, "category"),
    )  # fmt: skip
    return options, study


def complete(options: Options, key: str, overrides: Sequence[str]) -> Options:
    """Fill in defaults: the recipe's own checkpoint of the stage before, the demo's test set, a folder named after the key."""
    # Read as the runs will be: the recipe's other stages may lack what only they need.
    before = f"{BEFORE[options.stage]}/final"
    words = [f"recipe={options.recipe}", f"stage={options.stage}", f"init={before}", *overrides]
    out = load_recipe(words).out
    if not options.set and options.recipe != "demo":
        raise UserError("set= must be given: the retrieval set that every run is evaluated on")
    return replace(
        options,
        init=options.init or f"{out}/{before}",
        out=options.out or f"runs/ablate_{options.recipe}_{folder_name(key)}",
        set=options.set or str(DEMO_SET),
    )


def chosen(options: Options, runs: list[tuple[Arm, int]]) -> list[tuple[Arm, int]]:
    """The runs to make: all, or the one that `Options.index` names."""
    if options.index is None:
        return runs
    if not 0 <= options.index < len(runs):
        raise UserError(
            f"index must be 0 to {len(runs) - 1}, since the sweep has {len(runs)} runs "
            f"(a Slurm array: --array=0-{len(runs) - 1}); got {options.index}"
        )
    return [runs[options.index]]


def check_places(options: Options) -> None:
    """Fail before the first run if the start or the set is missing."""
    place = find_shipped(options.set)
    if is_suite(place):
        load_suite(place)
    elif not (place / "queries.parquet").is_file():
        raise UserError(
            f"set={options.set} is no retrieval set (no queries.parquet) and no suite (no suite.json)"
        )
    init = options.init
    if not checkpoint_folder(Path(init)).is_dir() and init.count("/") != 1:  # one slash: may be a hub id
        raise UserError(
            f"init={init} does not exist; train it with "
            f"`accelerate launch rge/train.py recipe={options.recipe} stage={BEFORE[options.stage]}`, or name a checkpoint"
        )


def slices_of(frame: pd.DataFrame, options: Options) -> tuple[dict[str, Slice], dict[str, Slice]]:
    """Slices of the tables, and those that only ``table.csv`` and ``table.json`` have: a suite's members."""

    def values(column: str, of_members: bool = False) -> dict[str, Slice]:
        return {v: Slice("", column, v, of_members) for v in sorted(set(frame[column].astype(str)))}

    if not is_suite(Path(options.set)):
        if options.by not in frame and options.by != Options.by:
            raise UserError(
                f"by={options.by}: evaluations have no such column; report_by in the set's meta.json names theirs"
            )
        return {"all": Slice()} | (values(options.by) if options.by in frame else {}), {}
    shown = {"all": Slice(of_members=True)}
    members = load_suite(Path(options.set)).members.values()
    for column in dict.fromkeys(key for columns in members for key in columns):
        shown |= values(column, of_members=True)
    return shown, values("category")


def check_run(study: Study, arm: Arm, seed: int) -> None:
    """Refuse a finished run of other settings, or of other records or another start than the arm's first seed."""
    folder = study.folder(arm, seed)
    if other := study.changed(arm, seed):
        raise UserError(f"{folder} was trained with other settings: {', '.join(other)}")
    inputs = [
        {part: (about.get("identity") or {}).get(part) for part in ("records", "start")}
        for about in (read_json(study.checkpoint(arm, one) / RGE_JSON) or {} for one in (0, seed))
    ]
    if other := in_words(differences(*inputs)):
        raise UserError(
            f"{folder} was not trained from what {study.folder(arm, 0)} was: {'; '.join(other)}. Delete the older one, and run it again"
        )


def write_tables(study: Study, key: str, values: list[str], options: Options) -> None:
    """Write every table and the plot, and print them."""
    results = Results(study)
    for arm in study.arms:
        for seed in range(study.seeds):
            check_run(study, arm, seed)
            _, frame = results.of(arm.name, seed, "")  # type: ignore[misc]  # every run is finished
            if missing := [metric for metric in options.metrics if metric not in frame]:
                raise UserError(
                    f"{study.evaluation(arm, seed, '')} was not evaluated for {missing[0]}; "
                    f"there are: {', '.join(map(str, frame.columns))}"
                )
    results.keep()
    arms = {value: arm.name for value, arm in zip(values, study.arms, strict=True)}
    rows = [Row(value, {name: 1.0}) for value, name in arms.items()]
    rows += [Row(f"{value} - {values[0]}", {arms[value]: 1.0, arms[values[0]]: -1.0}) for value in values[1:]]
    shown, hidden = slices_of(frame, options)
    lines, tex, data = [], [], []
    for metric in options.metrics:
        cells, found, _ = in_table(results, Table(metric, rows, shown, metric), "")
        cells = cells.rename(columns={"arm": key})
        lines += [f"{metric}, %; 95 % intervals over seeds and groups of queries", ""]
        lines += [*markdown(cells.columns, cells.to_numpy().tolist()), "", *too_narrow(found)]
        tex.append(latex(cells))
        data += found + in_table(results, Table(metric, rows, hidden, metric), "")[1]
    out, text = Path(options.out), "\n".join(lines)
    write_text(out / "table.md", text)
    table = pd.DataFrame(data)
    seeds = pd.DataFrame(table.pop("seeds").tolist()).add_prefix("seed_")
    columns = ["row", "slice", "metric", "queries", "mean", "low", "high"]
    write_text(out / "table.csv", table[columns].join(seeds).to_csv(index=False))
    write_text(out / "table.tex", "\n".join(tex))
    write_text(out / "table.json", json.dumps(data, indent=1))
    marks = [row for row in data if row["row"] in arms and row["slice"] in list(shown)[:STYLES]]
    title = f"{key}: mean of {study.seeds} seeds, 95 % interval over seeds and groups of queries"
    write_text(out / "plot.svg", interval_chart(marks, title=title))
    print(f"\n{text}\n{json.dumps(data)}")


if __name__ == "__main__":
    start(main)
