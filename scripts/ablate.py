"""Run a sweep over one recipe key with several seeds, evaluate every run, and write one table.

    python scripts/ablate.py recipe=demo sweep='loss.anchor=[self,oracle,none]' seeds=3 \
        init=runs/demo/cold_start/final set=data_prep/demo/data/test out=runs/ablate_anchor \
        with.none='loss.ratio=none joint.lr=1e-3'

Every run is the joint stage of the recipe from the same `init`, with ``train.seed`` 0, 1, ...; ``with.VALUE`` adds
overrides to the arm of that value, for an arm that needs settings of its own to be given a fair chance, and any other
``key=value`` goes to every run. A run that is finished is not repeated, an interrupted one resumes, so the command can
be stopped, given again, or given on several machines with ``only=0/4`` (arm-seed pairs 0, 4, 8, ... of the list) and
then once more without to collect. ``launcher`` is put before ``rge/train.py``, e.g. an `accelerate launch` line.

The table has, for each arm and slice of the set, the mean over seeds with a 95 % interval from a bootstrap over groups
of queries (the metric averaged over seeds first: what other queries would give), and the lowest and highest seed (what
another seed would give). It is written to ``out/table.md`` and ``out/table.json``; the last line printed is that JSON.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval import stats

ROOT = Path(__file__).resolve().parent.parent
OWN = {
    "recipe": None,
    "sweep": None,
    "seeds": "3",
    "init": None,
    "set": None,
    "out": None,
    "metrics": "hit@1,recall@1,mrr",
    "by": "pair",
    "only": "0/1",
    "launcher": f"{sys.executable} -m accelerate.commands.launch --config_file recipes/accelerate/cpu_2.yaml",
}
"""Options of this script and their defaults; None must be given."""


class SweepError(ValueError):
    """The sweep is described wrongly; the message says how."""


def main(arguments: list[str]) -> None:
    """Run what is not finished, then write the table."""
    options, arms, extra = read_options(arguments)
    os.chdir(ROOT)
    out = Path(options["out"])
    key, values = parse_sweep(options["sweep"])
    unknown = [value for value in arms if value not in values]
    if unknown:
        raise SweepError(f"with.{unknown[0]} names no value of the sweep: {', '.join(values)}")
    pairs = [(value, seed) for seed in range(int(options["seeds"])) for value in values]
    part, parts = (int(number) for number in options["only"].split("/"))
    for number, (value, seed) in enumerate(pairs):
        if number % parts == part:
            folder = out / folder_name(value) / f"seed_{seed}"
            print(f"[{number + 1}/{len(pairs)}] {key}={value} seed {seed}", flush=True)
            train(options, key, value, seed, folder, [*extra, *arms.get(value, [])])
            evaluate(options, folder)
    missing = [folder for folder in folders(out, values, options) if not results(folder).is_file()]
    if missing:
        print(f"{len(missing)} of {len(pairs)} runs are not finished here, e.g. {missing[0]}; no table yet")
        return
    table = collect(out, values, options)
    text = markdown(key, table, options["metrics"].split(","))
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(json.dumps(table, indent=1))
    print(f"\n{text}\n{json.dumps(table)}")


def read_options(arguments: list[str]) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Split the arguments into this script's options, overrides of single arms, and overrides of all runs."""
    options: dict[str, Any] = dict(OWN)
    arms: dict[str, list[str]] = {}
    extra = []
    for argument in arguments:
        name, mark, value = argument.partition("=")
        if not mark:
            raise SweepError(f"arguments are key=value, got {argument!r}")
        if name in OWN:
            options[name] = value
        elif name.startswith("with."):
            arms[name.removeprefix("with.")] = shlex.split(value)
        else:
            extra.append(argument)
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise SweepError(
            f"{', '.join(f'{name}=' for name in missing)} must be given; see the top of scripts/ablate.py"
        )
    return options, arms, extra


def parse_sweep(sweep: str) -> tuple[str, list[str]]:
    """``loss.ratio=[1:1,1:10]`` as key and values."""
    key, mark, values = sweep.partition("=")
    if not mark or not (values.startswith("[") and values.endswith("]")) or values == "[]":
        raise SweepError(f"sweep must be KEY=[VALUE,VALUE,...], got {sweep!r}")
    return key, [value.strip() for value in values[1:-1].split(",")]


def folder_name(value: str) -> str:
    """A value as a folder's name."""
    return value.replace(":", "_").replace("/", "_")


def folders(out: Path, values: list[str], options: dict[str, str]) -> list[Path]:
    """Folder of every run."""
    return [
        out / folder_name(value) / f"seed_{seed}" for value in values for seed in range(int(options["seeds"]))
    ]


def train(
    options: dict[str, str], key: str, value: str, seed: int, folder: Path, overrides: list[str]
) -> None:
    """Train one run unless it is finished; rge/train.py itself knows, and resumes."""
    recipe = [f"recipe={options['recipe']}", "stage=joint", f"init={options['init']}", f"out={folder}"]
    run(
        [
            *shlex.split(options["launcher"]),
            "rge/train.py",
            *recipe,
            f"train.seed={seed}",
            f"{key}={value}",
            *overrides,
        ]
    )


def evaluate(options: dict[str, str], folder: Path) -> None:
    """Evaluate a run in the mode it was trained for."""
    if results(folder).is_file():
        return
    checkpoint = folder / "joint" / "final"
    mode = "direct" if json.loads((checkpoint / "rge.json").read_text())["reasons"] == "none" else "reasoning"
    command = [sys.executable, "-m", "eval", "run", f"checkpoint={checkpoint}", f"set={options['set']}"]
    run([*command, f"out={folder / 'eval'}", f"query_mode={mode}", "report=false"])


def results(folder: Path) -> Path:
    """The file that an evaluation writes last."""
    return folder / "eval" / "results.json"


def run(command: list[str]) -> None:
    """Run a command; stop with its exit code if it fails, so that giving the sweep again continues there."""
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(
            f"stopped: {shlex.join(command)} ended with code {code}; give the same command again to continue"
        )


def collect(out: Path, values: list[str], options: dict[str, str]) -> list[dict[str, Any]]:
    """Figures of every arm and slice."""
    rows = []
    metrics = options["metrics"].split(",")
    for value in values:
        frames = [
            pd.read_parquet(out / folder_name(value) / f"seed_{seed}" / "eval" / "per_query.parquet")
            for seed in range(int(options["seeds"]))
        ]
        frames = [frame.sort_values("query_id").reset_index(drop=True) for frame in frames]
        slices = {"all": np.ones(len(frames[0]), dtype=bool)}
        if options["by"] in frames[0]:
            slices |= {
                name: (frames[0][options["by"]] == name).to_numpy()
                for name in sorted(frames[0][options["by"]].unique())
            }
        for name, chosen in slices.items():
            row: dict[str, Any] = {"arm": value, "slice": name, "queries": int(chosen.sum())}
            for metric in metrics:
                per_seed = np.stack([frame[metric].to_numpy()[chosen] for frame in frames])
                groups = stats.index_of(frames[0]["group"].to_numpy()[chosen])
                bootstrap = stats.cluster_bootstrap(per_seed.mean(axis=0)[:, None], groups)
                (low,), (high,) = stats.interval(bootstrap, bounds=(0.0, 1.0))
                row[metric] = {
                    "mean": float(per_seed.mean()),
                    "low": float(low),
                    "high": float(high),
                    "seeds": [round(float(mean), 4) for mean in per_seed.mean(axis=1)],
                }
            rows.append(row)
    return rows


def markdown(key: str, table: list[dict[str, Any]], metrics: list[str]) -> str:
    """The table for people, in per cent."""
    header = f"| {key} | slice | queries | " + " | ".join(
        f"{metric}, 95 % interval (lowest to highest seed)" for metric in metrics
    )
    lines = [header + " |", "|---|---|---|" + "---|" * len(metrics)]
    for row in table:
        cells = [
            f"{100 * row[m]['mean']:.1f} [{100 * row[m]['low']:.1f}, {100 * row[m]['high']:.1f}] "
            f"({100 * min(row[m]['seeds']):.1f} to {100 * max(row[m]['seeds']):.1f})"
            for m in metrics
        ]
        lines.append(f"| {row['arm']} | {row['slice']} | {row['queries']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SweepError as problem:
        sys.exit(f"error: {problem}")
