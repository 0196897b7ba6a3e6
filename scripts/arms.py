"""Arms of a study: named trainings, each from the checkpoint of another, with several seeds, and what is said of their differences.

A script names its arms (`Arm`), its sets and its questions (`Contrast`), and calls `run` and `report`; scripts/rl_study.py is an
example. A training or evaluation that is finished with the same settings is not repeated, an interrupted one resumes, so the
script can be stopped and given again, or given part of its arms. Missing runs are left out of the tables, and counted.

scripts/ablate.py is the command for one key of one recipe; its training, evaluation and intervals are used here.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ablate import intervals, run
from demo import judge_words

from rge.common.errors import UserError
from rge.common.files import write_text
from rge.stats.intervals import in_words, index_of

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Arm:
    """One training, or as many as there are seeds.

    Attributes:
        name: its folder.
        stage: the one stage that it trains; empty: none, what `after` ends with is asked in another way.
        after: arm whose checkpoint it starts from; empty: as `overrides` say.
        overrides: arguments of ``rge/train.py``.
        shared: trained once, whatever the number of seeds.
        flops_of: its steps are as many as cost no more counted FLOPs than this arm's; empty: as the recipe says.
        query_mode: how it is asked; empty: it is not evaluated.
        ask: further arguments of ``rge eval run``.
        ends_with: what arms after it start from, in its folder; empty: its stage's last checkpoint.
    """

    name: str
    stage: str
    after: str = ""
    overrides: tuple[str, ...] = ()
    shared: bool = False
    flops_of: str = ""
    query_mode: str = "reasoning"
    ask: tuple[str, ...] = ()
    ends_with: str = ""


@dataclass(frozen=True)
class Contrast:
    """A question: a sum of arms, each with a weight, on the same queries.

    Attributes:
        name: what a table calls it.
        weights: by name of arm; weights that sum to 0 make it a difference.
    """

    name: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Study:
    """Where a study is made, and of what.

    Attributes:
        out: its folder.
        arms: in the order in which they are trained.
        recipe: arguments that every training gets.
        sets: retrieval sets by name.
        seeds: runs an arm.
        launcher: what stands before ``rge/train.py``.
        count_steps: steps over which FLOPs are counted.
    """

    out: Path
    arms: Sequence[Arm]
    recipe: tuple[str, ...]
    sets: Mapping[str, Path]
    seeds: int
    launcher: str
    count_steps: int = 3

    @cached_property
    def by_name(self) -> dict[str, Arm]:
        """Arms by their names."""
        return {arm.name: arm for arm in self.arms}

    def folder(self, arm: Arm, seed: int) -> Path:
        """Where a run is written."""
        return self.out / arm.name / ("shared" if arm.shared else f"seed_{seed}")

    def checkpoint(self, arm: Arm, seed: int) -> Path:
        """What a run ends with."""
        if not arm.stage:
            return self.checkpoint(self.by_name[arm.after], seed)
        return self.folder(arm, seed) / (arm.ends_with or f"{arm.stage}/final")

    def evaluation(self, arm: Arm, seed: int, name: str) -> Path:
        """Where a run's evaluation on a set is written."""
        return self.folder(arm, seed) / f"on_{name}"

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Arguments of ``rge/train.py``, without its steps and folder."""
        words = [*self.recipe, f"stage={arm.stage}", f"train.seed={seed}", *arm.overrides]
        if arm.after:
            words.append(f"init={self.checkpoint(self.by_name[arm.after], seed)}")
        return words


def run_arm(study: Study, arm: Arm, seed: int) -> None:
    """Train and evaluate one run of an arm, and before it the arms that it starts from, where they are missing."""
    if arm.after:
        run_arm(study, study.by_name[arm.after], seed)
    folder = study.folder(arm, seed)
    words = study.words(arm, 0 if arm.shared else seed)
    steps = []
    if arm.flops_of:
        steps = [f"{arm.stage}.steps={equal_steps(study, arm)}"]
    train = [*words, f"out={folder}", *steps]
    note, asked = folder / "arm.json", json.dumps(train, indent=1)
    if arm.stage and (not note.is_file() or note.read_text() != asked):
        print(f"{arm.name}, seed {seed}: {shlex.join(train)}", flush=True)
        # Whether a checkpoint that is there belongs to these settings is rge/train.py's to say.
        run([*shlex.split(study.launcher), "rge/train.py", *train])
        write_text(note, asked)
    for name, path in study.sets.items() if arm.query_mode else ():
        out = study.evaluation(arm, seed, name)
        if not (out / "results.json").is_file():
            command = [
                sys.executable,
                "-m",
                "rge",
                "eval",
                "run",
                f"checkpoint={study.checkpoint(arm, seed)}",
            ]
            mode = f"query_mode={arm.query_mode}"
            run([*command, f"set={path}", f"out={out}", mode, *arm.ask, "exact=false", "report=false"])


def flops_per_step(study: Study, arm: Arm, *, ended: bool = False) -> float:
    """Counted FLOPs of one step, by seed 0: at its start, or with the checkpoint that it ended with."""
    place = study.folder(arm, 0) / ("flops_end.json" if ended else "flops.json")
    words = study.words(arm, 0)
    if ended:
        words = [*words, f"init={study.checkpoint(arm, 0)}"]
    command = [sys.executable, "scripts/bench.py", "flops", f"steps={study.count_steps}", *words]
    found = json.loads(place.read_text()) if place.is_file() else {}
    if found.get("command") != command[1:]:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{shlex.join(command)} ended with code {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1]) | {"command": command[1:]}
        write_text(place, json.dumps(found, indent=1))
    return found["flops_per_step"]


def equal_steps(study: Study, arm: Arm) -> int:
    """As many steps as cost no more than those of the arm that it is set beside."""
    model = study.by_name[arm.flops_of]
    return max(1, int(steps_of(study, model) * flops_per_step(study, model) // flops_per_step(study, arm)))


def steps_of(study: Study, arm: Arm) -> int:
    """Steps of an arm's stage."""
    from rge.config import load_recipe

    if arm.flops_of:
        return equal_steps(study, arm)
    steps = getattr(load_recipe(study.words(arm, 0)), arm.stage).steps
    if steps is None:
        raise UserError(f"{arm.name}: {arm.stage}.steps must be given for FLOPs to be set equal")
    return steps


def complete_seeds(study: Study, names: Sequence[str], set_name: str) -> list[int]:
    """Seeds for which all these arms are evaluated."""
    return [
        seed
        for seed in range(study.seeds)
        if all(
            (study.evaluation(study.by_name[name], seed, set_name) / "results.json").is_file()
            for name in names
        )
    ]


def queries(study: Study, name: str, seed: int, set_name: str) -> pd.DataFrame:
    """Per-query values of one run, by query id.

    Where the set has rationales, `right_rationale` says whether one of them was written to the letter, and
    `hit_after_wrong` whether the first hit is right although none was.
    """
    folder = study.evaluation(study.by_name[name], seed, set_name)
    frame = pd.read_parquet(folder / "per_query.parquet").sort_values("query_id").reset_index(drop=True)
    if (study.sets[set_name] / "rationales.parquet").is_file() and "rationale" in frame:
        words = judge_words(frame["query_id"], frame["rationale"], study.sets[set_name])
        frame["right_rationale"] = words["answered"].astype(float)
        frame["hit_after_wrong"] = frame["hit@1"] * (1 - frame["right_rationale"])
    return frame


def measure(
    study: Study, contrast: Contrast, set_name: str, metric: str, where: tuple[str, str] | None = None
) -> dict[str, Any] | None:
    """A contrast's mean with its 95 % interval over groups of queries, seeds averaged first; None without a complete seed.

    Args:
        study: with the runs.
        contrast: what is asked.
        set_name: on which set.
        metric: column of per_query.parquet.
        where: column and value of the queries that count.

    Raises:
        UserError: arms were evaluated on different queries.
    """
    seeds = complete_seeds(study, list(contrast.weights), set_name)
    values, groups, tokens = [], None, []
    for seed in seeds:
        total = None
        for name, weight in contrast.weights.items():
            frame = queries(study, name, seed, set_name)
            if where is not None:
                frame = frame[frame[where[0]] == where[1]]
            if groups is None:
                ids, groups = frame["query_id"].tolist(), index_of(frame["group"].tolist())
            if frame["query_id"].tolist() != ids:
                raise UserError(f"{name}, seed {seed}, was evaluated on other queries than the rest")
            part = weight * frame[metric].to_numpy(dtype=float)
            total = part if total is None else total + part
            tokens.append(float(frame["rationale_tokens"].mean()))
        values.append(total)
    if not seeds or groups is None or not len(groups):
        return None
    value_SQ = np.stack(values)  # type: ignore[arg-type]
    weights = contrast.weights.values()
    bounds = (sum(w for w in weights if w < 0), sum(w for w in weights if w > 0))
    (found,) = intervals(value_SQ.mean(axis=0)[:, None], groups, bounds)
    return found | {
        "seeds": value_SQ.mean(axis=1).round(4).tolist(),
        "queries": len(groups),
        "tokens": float(np.mean(tokens)),
    }


def table(
    study: Study, contrasts: Sequence[Contrast], metric: str, slices: Mapping[str, tuple[str, str, str]]
) -> tuple[str, list[dict[str, Any]]]:
    """A Markdown table in per cent, a contrast a row and a slice a column, and its rows as data.

    Args:
        study: with the runs.
        contrasts: rows.
        metric: column of per_query.parquet.
        slices: by title: set, and column and value of its queries (empty: all).
    """
    lines = ["| | " + " | ".join(slices) + " | seeds |", "|---|" + "---|" * (len(slices) + 1)]
    rows: list[dict[str, Any]] = []
    missing = []
    for contrast in contrasts:
        cells, seeds = [], 0
        is_difference = abs(sum(contrast.weights.values())) < 1e-9
        for title, (set_name, column, value) in slices.items():
            found = measure(study, contrast, set_name, metric, (column, value) if column else None)
            if found is None:
                cells.append("not run")
                continue
            sign = "+" if is_difference else ""
            cells.append(f"{100 * found['mean']:{sign}.1f} {in_words(found['low'], found['high'])}")
            seeds = len(found["seeds"])
            rows.append({"row": contrast.name, "slice": title, "metric": metric, **found})
        if seeds:
            lines.append(f"| {contrast.name} | " + " | ".join(cells) + f" | {seeds} |")
        else:
            missing.append(contrast.name)
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n", rows
