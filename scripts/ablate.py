"""Train every value of one recipe key with several seeds, evaluate every run, write a table and a plot.

    python scripts/ablate.py recipe=demo sweep='loss.anchor=[self,oracle,none]' seeds=3 \
        init=runs/demo/cold_start/final set=data_prep/demo/data/test out=runs/ablate_anchor \
        with.none='loss.ratio=none joint.lr=2e-3 loss.temperature=0.05'
    python scripts/ablate.py finding=own_or_oracle             # what a file of scripts/findings declares
    python scripts/ablate.py kept=docs/kept/hits.parquet       # the rows of docs/evidence.md, without training

Every run trains one stage of the recipe from the same `init`, with ``train.seed`` 0, 1, .... ``with.VALUE`` adds overrides to one arm;
any other ``key=value`` goes to every run. The same command skips finished runs and resumes the rest; started in several terminals, it
makes several runs at a time. Paths are relative to the working directory. See docs/ablations.md for job arrays, launchers and the tables.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from sweep import (
    DEMO_SET,
    ROOT,
    Arm,
    Results,
    Row,
    Slice,
    Study,
    in_table,
    is_apart,
    markdown,
    percent,
    prepare,
    refuse_launcher,
    run_all,
    too_narrow,
    weights_of,
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
from rge.common.options import AtLeastOne, names_of, offer_help, one_of, parse_options, read_yaml, split_word
from rge.config import load_recipe
from rge.identity.run_identity import differences, in_words

BEFORE = {"joint": "cold_start", "rl": "joint"}
"""The stage whose checkpoint each stage starts from."""
FINDINGS = {path.stem: path for path in sorted((ROOT / "scripts" / "findings").glob("*.yaml"))}
HITS = "hits.parquet"
OF_ARM = ("set", "of", "query_mode", "max_rationale_tokens")
"""Words among a finding's overrides of an arm that are about its evaluation (`Arm`)."""


@dataclass(frozen=True)
class Options:
    """Options of a sweep; any other key is an override of every run's recipe."""

    recipe: str = ""
    """Name of a recipe, or a YAML file."""
    sweep: str = ""
    """KEY=[VALUE,VALUE,...]: the swept key and its values."""
    finding: str = ""
    """A file of scripts/findings instead of a sweep; options and overrides that are also given here replace its own."""
    kept: str = ""
    """File of kept hits, to print the table of docs/evidence.md from; nothing is trained."""
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


@dataclass(frozen=True)
class Claim:
    """A row of docs/evidence.md."""

    says: str
    sum: str  # of arms
    part: str = ""  # value of the finding's column `by`; empty: all queries
    is_null: bool = False  # a sentence about what was not found, below the table


@dataclass(frozen=True)
class Comparison:
    """What is trained and compared: the values of a sweep, or a file of scripts/findings."""

    title: str  # of the tables' first column
    arms: Mapping[str, Sequence[str]]  # each arm's overrides, in addition to those of all
    makes: Mapping[str, str] = field(default_factory=dict)  # by path: the command that makes it
    claims: Sequence[Claim] = ()


def main(arguments: list[str]) -> None:
    """Make the missing runs, then write tables and plot."""
    refuse_launcher("scripts/ablate.py")
    options, compared = read_options(arguments)
    if options.kept:
        print("\n".join(evidence(pd.read_parquet(options.kept))))
        return
    options, study = plan(options, compared)
    runs = [(arm, seed) for seed in range(options.seeds) for arm in study.arms]
    if options.list:
        for number, (arm, seed) in enumerate(runs):
            state = "finished" if study.is_finished(arm, seed) else "open"
            print(f"{number}\t{arm.name}\tseed {seed}\t{state}\t{study.folder(arm, seed)}")
        return
    if not options.collect:
        prepare(compared.makes, study)
        check_places(options)
        run_all(study, chosen(options, runs))
    if options.index is not None:
        return
    if missing := [number for number, run in enumerate(runs) if not study.is_finished(*run)]:
        folder = study.folder(*runs[missing[0]])
        raise UserError(
            f"{len(missing)} of {len(runs)} runs are not finished, e.g. index={missing[0]}; run them first",
            folder,
            missing[0],
            "index",
        )
    write_tables(study, compared, options)


def read_options(arguments: list[str]) -> tuple[Options, Comparison]:
    """This script's options, and what is compared, with the overrides of all runs."""
    offer_help(Options, arguments, "python scripts/ablate.py")
    given = dict(split_word(argument) for argument in arguments)
    if name := given.get("finding"):
        compared, words = read_finding(name)
        arguments = [word for word in words if split_word(word)[0] not in given] + arguments
    own, extra = [], []
    arms: dict[str, list[str]] = {}
    for argument in arguments:
        key, value = split_word(argument)
        if key in names_of(Options):
            own.append(argument)
        elif key.startswith("with."):
            arms.setdefault(key.removeprefix("with."), []).extend(shlex.split(value))
        else:
            extra.append(argument)
    options = parse_options(Options, own)
    if options.kept:
        return options, Comparison("", {})
    if not name:
        if not (options.recipe and options.sweep):
            raise UserError("give recipe= and sweep=, or finding=, or kept=").about(
                "recipe", "sweep", "finding", "kept"
            )
        key, values = parse_sweep(options.sweep)
        compared = Comparison(key, {value: [f"{key}={value}"] for value in values})
    if unknown := [arm for arm in arms if arm not in compared.arms]:
        raise UserError(
            f"it names no value of the sweep: {', '.join(compared.arms)}", key=f"with.{unknown[0]}"
        )
    # An arm's own overrides are the later ones.
    words_of = {arm: [*extra, *words, *arms.get(arm, [])] for arm, words in compared.arms.items()}
    return options, replace(compared, arms=words_of)


def read_finding(name: str) -> tuple[Comparison, list[str]]:
    """A file of scripts/findings: what is compared, and the words that it gives for a sweep's."""
    one_of("finding", [name], list(FINDINGS))
    content: dict[str, Any] = read_yaml(FINDINGS[name])
    claims = [Claim(**claim) for claim in content["rows"]]
    return Comparison(name, content.get("arms", {}), content.get("makes", {}), claims), content.get(
        "options", []
    )


def parse_sweep(sweep: str) -> tuple[str, list[str]]:
    """``loss.ratio=[1:1,1:10]`` as key and values. Commas inside brackets belong to a value."""
    key, mark, inside = sweep.partition("=")
    if not mark or not (inside.startswith("[") and inside.endswith("]")):
        raise UserError(f"it must be KEY=[VALUE,VALUE,...], got {sweep!r}", key="sweep")
    values, depth = [""], 0
    for letter in inside[1:-1]:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if "" in values:
        raise UserError(
            f"it must be KEY=[VALUE,VALUE,...] without empty values, got {sweep!r}", key="sweep", kind="empty"
        )
    folders: dict[str, str] = {}
    for value in values:
        if (name := folder_name(value)) in folders:
            raise UserError(
                f"{folders[name]} is the same run, or would be written to the same folder {name}",
                place=str(value),
                key="sweep",
            )
        folders[name] = value
    return key, values


def folder_name(value: str) -> str:
    """A value as the name of a folder."""
    return re.sub(r"[^\w.+-]", "_", value)


def plan(options: Options, compared: Comparison) -> tuple[Options, Study]:
    """The options with defaults filled in, and a study with one arm per value; an error if the recipe refuses one of them."""
    if not compared.arms:
        raise UserError(
            f"{compared.title} has kept hits only; what its runs were trained on is not made any more",
            key="finding",
        )
    for word in (word for words in compared.arms.values() for word in words):
        if split_word(word)[0] == "train.seed":
            raise UserError(
                "it would make every seed of an arm the same run: leave it out, and give seeds=N", key=word
            )
    first = [word for word in next(iter(compared.arms.values())) if split_word(word)[0] not in OF_ARM]
    options = complete(options, compared.title, first)
    recipe = (f"recipe={options.recipe}", f"init={options.init}")
    runs = []
    for name, words in compared.arms.items():
        about = dict(split_word(word) for word in words if split_word(word)[0] in OF_ARM)
        overrides = tuple(word for word in words if split_word(word)[0] not in OF_ARM)
        plugins = load_recipe([*recipe, f"stage={options.stage}", f"out={options.out}", *overrides]).plugins
        asked: tuple[str, ...] = (f"plugins={','.join(plugins)}",) if plugins else ()
        if cap := about.pop("max_rationale_tokens", ""):
            asked += (f"max_rationale_tokens={cap}",)
        runs.append(Arm(folder_name(name), overrides, ask=asked, **about))
    if not options.collect:  # now, and not after the first training
        for metric in options.metrics:
            parse_name(metric)
    ask = [f"benchmark={load_suite(Path(options.set)).benchmark}"] if is_suite(Path(options.set)) else []
    if more := [name for name in options.metrics if name not in names_of_metrics(negatives=True)]:
        ask.append(f"metrics={','.join(more)}")
    out, asked_of = Path(options.out), Path(options.set)
    study = Study(out, runs, recipe, asked_of, options.seeds, options.stage, options.launcher, tuple(ask))
    return options, study


def complete(options: Options, key: str, overrides: Sequence[str]) -> Options:
    """Fill in defaults: the recipe's own checkpoint of the stage before, the demo's test set, a folder named after the key."""
    # Read as the runs will be: the recipe's other stages may lack what only they need.
    before = f"{BEFORE[options.stage]}/final"
    words = [f"recipe={options.recipe}", f"stage={options.stage}", f"init={before}", *overrides]
    out = load_recipe(words).out
    if not options.set and options.recipe != "demo":
        raise UserError(
            "it must be given: the retrieval set that every run is evaluated on", key="set", kind="missing"
        )
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
            f"it must be 0 to {len(runs) - 1}, since the sweep has {len(runs)} runs "
            f"(a Slurm array: --array=0-{len(runs) - 1}); got {options.index}",
            key="index",
        )
    return [runs[options.index]]


def check_places(options: Options) -> None:
    """Fail before the first run if the start or the set is missing."""
    place = find_shipped(options.set)
    if is_suite(place):
        load_suite(place)
    elif not (place / "queries.parquet").is_file():
        raise UserError(
            "it is no retrieval set (no queries.parquet) and no suite (no suite.json)", options.set, key="set"
        )
    for init in dict.fromkeys(options.init.replace("{seed}", str(seed)) for seed in range(options.seeds)):
        if not checkpoint_folder(Path(init)).is_dir() and init.count("/") != 1:  # one slash: may be a hub id
            raise UserError(
                "it does not exist; train it with "
                f"`accelerate launch rge/train.py recipe={options.recipe} stage={BEFORE[options.stage]}`, or name a checkpoint",
                init,
                key="init",
            )


def slices_of(frame: pd.DataFrame, options: Options) -> tuple[dict[str, Slice], dict[str, Slice]]:
    """Slices of the tables, and those that only ``table.csv`` and ``table.json`` have: a suite's members."""

    def values(column: str, of_members: bool = False) -> dict[str, Slice]:
        return {v: Slice(column, v, of_members) for v in sorted(set(frame[column].astype(str)))}

    if not is_suite(Path(options.set)):
        if options.by not in frame and options.by != Options.by:
            raise UserError(
                f"evaluations have no column {options.by}; report_by in the set's meta.json names theirs",
                key="by",
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
        raise UserError(f"it was trained with other settings: {', '.join(other)}", folder, kind="settings")
    # A start per seed differs by intention.
    parts = (
        ("records",)
        if any("{seed}" in word for word in study.recipe + arm.overrides)
        else ("records", "start")
    )
    inputs = [
        {part: (about.get("identity") or {}).get(part) for part in parts}
        for about in (read_json(study.checkpoint(arm, one) / RGE_JSON) or {} for one in (0, seed))
    ]
    if other := in_words(differences(*inputs)):
        raise UserError(
            f"it was not trained from what {study.folder(arm, 0)} was: {'; '.join(other)}"
            f". Delete the older one, and run it again",
            folder,
            kind="start",
        )


def write_tables(study: Study, compared: Comparison, options: Options) -> None:
    """Write every table and the plot, and print them."""
    for arm in study.arms:
        for seed in range(study.seeds):
            check_run(study, arm, seed)
    results = Results.of_study(study)
    for (name, seed), frame in results.runs.items():
        if missing := [metric for metric in options.metrics if metric not in frame]:
            raise UserError(
                f"it was not evaluated for it; there are: {', '.join(map(str, frame.columns))}",
                study.evaluation(study.by_name[name], seed),
                key=missing[0],
            )
    arms = {value: arm.name for value, arm in zip(compared.arms, study.arms, strict=True)}
    rows = [Row(value, {name: 1.0}) for value, name in arms.items()]
    first, *others = arms
    if compared.claims:
        sums = (claim.sum for claim in compared.claims if len(weights_of(claim.sum)) > 1)
        rows += [Row(total, weights_of(total)) for total in dict.fromkeys(sums)]
    else:
        rows += [Row(f"{value} - {first}", {arms[value]: 1.0, arms[first]: -1.0}) for value in others]
    shown, hidden = slices_of(frame, options)
    lines, tex, data = [], [], []
    for metric in options.metrics:
        cells, found = in_table(results, rows, shown, metric)
        cells = cells.rename(columns={"arm": compared.title})
        lines += [f"{metric}, %; 95 % intervals over seeds and groups of queries", ""]
        lines += [*markdown(cells.columns, cells.to_numpy().tolist()), "", *too_narrow(found)]
        tex.append(latex(cells))
        data += found + in_table(results, rows, hidden, metric)[1]
    out, text = Path(options.out), "\n".join(lines)
    if "hit@1" in frame:
        results.hits(compared.title, options.by).to_parquet(out / HITS, compression="zstd")
    write_text(out / "table.md", text)
    table = pd.DataFrame(data)
    seeds = pd.DataFrame(table.pop("seeds").tolist()).add_prefix("seed_")
    columns = ["row", "slice", "metric", "queries", "mean", "low", "high"]
    write_text(out / "table.csv", table[columns].join(seeds).to_csv(index=False))
    write_text(out / "table.tex", "\n".join(tex))
    write_text(out / "table.json", json.dumps(data, indent=1))
    marks = [row for row in data if row["row"] in arms and row["slice"] in list(shown)[:STYLES]]
    title = f"{compared.title}: mean of {study.seeds} seeds, 95 % interval over seeds and groups of queries"
    write_text(out / "plot.svg", interval_chart(marks, title=title))
    print(f"\n{text}\n{json.dumps(data)}")


def evidence(hits: pd.DataFrame) -> Iterator[str]:
    """Table and nulls of docs/evidence.md, from kept hits."""
    rows, nulls = [], []
    for name in FINDINGS:
        results = Results.of_hits(hits[hits["finding"] == name])
        for claim in read_finding(name)[0].claims:
            weights, where = weights_of(claim.sum), Slice("part", claim.part) if claim.part else Slice()
            seeds = results.seeds(list(weights))
            found = results.measure(weights, "hit@1", where)
            if found is None:
                raise UserError(f"{name} has no kept runs of {claim.sum}", key="finding")
            cell = percent(found["mean"], found["low"], found["high"], sign="+" if len(weights) > 1 else "")
            number = f"{len(seeds)}{'†' if is_apart(found) else ''}"
            if claim.is_null:
                nulls.append(f"* {claim.says}: {cell} ({number}, {name}).")
                continue
            each = [results.measure({arm: 1.0}, "hit@1", where, seeds) for arm in weights]
            means = ", ".join(f"{100 * one['mean']:.1f}" for one in each if one) if len(weights) == 2 else ""
            rows.append((claim.says, cell, means, number, name))
    yield from markdown(("comparison", "hit@1, %", "each", "seeds", "finding"), rows)
    yield ""
    yield from nulls


if __name__ == "__main__":
    start(main)
