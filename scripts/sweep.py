"""Train and evaluate named arms over several seeds, and compare them query by query, for `scripts/ablate.py`.

An `Arm` is one way of training. A `Study` lists arms and seeds; `run_all` makes the missing runs; `Results` reads them; `in_table`
puts 95 % intervals on any weighted sum of arms. Finished runs are skipped and interrupted ones resume; the same command started
twice makes two runs at a time.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import mean_of, member_bootstraps
from rge.checkpoints.resume import only_rounds, result_keys
from rge.checkpoints.settings import RGE_JSON
from rge.common import files
from rge.common.errors import SIGNALLED, UserError
from rge.common.files import read_json, write_text
from rge.config import Recipe, load_recipe, to_dict
from rge.identity.run_identity import flattened
from rge.stats.intervals import Bootstrap, cluster_bootstrap, figures, in_words, index_of, over_seeds

ROOT = Path(__file__).resolve().parent.parent
DEMO_SET = Path("data_prep/demo/data/test")
NOTE = "arm.json"
"""What a finished training was made with, in its folder: its command, and the recipe, whose file may be edited between two runs."""
SEEDS_APART = 2.0
"""Standard deviation of seeds, in standard errors of groups, above which a page says that its interval may be too narrow."""


@dataclass(frozen=True)
class Arm:
    """One training for each seed, and its evaluation."""

    name: str  # also its folder
    overrides: tuple[str, ...] = ()  # arguments of ``rge/train.py``
    set: str = ""  # retrieval set; empty: the study's
    of: str = ""  # arm whose checkpoint is evaluated; empty: its own, which it trains
    query_mode: str = ""  # of the evaluation; empty: as trained
    ask: tuple[str, ...] = ()  # further arguments of ``rge eval run``


@dataclass(frozen=True)
class Study:
    """Arms, and where their runs are written."""

    out: Path
    arms: Sequence[Arm]
    recipe: tuple[
        str, ...
    ]  # arguments of every training; ``{seed}`` is the seed's number, as in `Arm.overrides`
    set: Path
    seeds: int  # runs per arm
    stage: str = "joint"  # that every arm trains
    launcher: str = ""  # command before ``rge/train.py``; empty: `default_launcher`
    ask: tuple[str, ...] = ()  # further arguments of every ``rge eval run``

    @cached_property
    def by_name(self) -> dict[str, Arm]:
        """Arms by name."""
        return {arm.name: arm for arm in self.arms}

    def folder(self, arm: Arm, seed: int) -> Path:
        """Folder of a run."""
        return self.out / arm.name / f"seed_{seed}"

    def checkpoint(self, arm: Arm, seed: int) -> Path:
        """Checkpoint of a run."""
        return self.folder(self.by_name[arm.of] if arm.of else arm, seed) / self.stage / "final"

    def set_of(self, arm: Arm) -> Path:
        """Set that an arm is evaluated on."""
        return Path(arm.set) if arm.set else self.set

    def evaluation(self, arm: Arm, seed: int) -> Path:
        """Folder of a run's evaluation."""
        return self.folder(arm, seed) / "eval"

    def is_finished(self, arm: Arm, seed: int) -> bool:
        """Whether a run is trained and evaluated."""
        evaluated = (self.evaluation(arm, seed) / "results.json").is_file()
        return evaluated and (bool(arm.of) or (self.folder(arm, seed) / NOTE).is_file())

    def changed(self, arm: Arm, seed: int) -> list[str]:
        """How the settings that a finished run was trained with differ from the arm's: ``key (there ..., now ...)``."""
        trained = self.by_name[arm.of] if arm.of else arm
        then: Any = read_json(self.folder(trained, seed) / NOTE)
        if then is None:
            return []
        theirs = given(then["recipe"], self.stage)
        ours = given(to_dict(load_recipe(self.words(trained, seed))), self.stage)
        return [
            f"{key} (there {theirs.get(key, 'the default')!r}, now {ours.get(key, 'the default')!r})"
            for key in sorted(theirs.keys() | ours.keys())
            if theirs.get(key) != ours.get(key)
        ]

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Arguments of ``rge/train.py``, without output folder."""
        words = [*self.recipe, f"stage={self.stage}", f"train.seed={seed}", *arm.overrides]
        return [word.replace("{seed}", str(seed)) for word in words]


@cache
def _defaults() -> dict[str, Any]:
    return flattened(to_dict(Recipe(recipe="")))


def given(recipe: dict[str, Any], stage: str) -> dict[str, Any]:
    """The keys of a recipe that a stage's result depends on by more than rounding, without those at their default.

    So a new key of the recipe changes nothing for earlier runs; neither does a default that has changed since.
    """
    usual = _defaults()
    return {
        key: value
        for key, value in result_keys(recipe, stage).items()
        if not only_rounds(key) and (key not in usual or value != usual[key])
    }


# --- running


def refuse_launcher(script: str) -> None:
    """Fail under a launcher, where every process would make all runs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "start it with python, not with a launcher; put that into launcher='accelerate launch ...'",
            script,
            key="launcher",
        )


def in_clone(name: str) -> str:
    """A file of the repository, as seen from the working directory."""
    return os.path.relpath(ROOT / name)


def default_launcher() -> str:
    """`accelerate launch` as configured on a machine with a GPU, else two processes on CPU."""
    config = ["--config_file", in_clone("recipes/accelerate/cpu.yaml")]
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    return shlex.join(words if shutil.which("nvidia-smi") else [*words, *config])


def run(command: list[str]) -> None:
    """Run a command; exit with its code if it fails."""
    code = subprocess.run(command, check=False).returncode
    if code:
        print(
            f"stopped: {shlex.join(command)} ended with code {code}; give the same command again to continue",
            file=sys.stderr,
        )
        sys.exit(code if code > 0 else SIGNALLED - code)


def prepare(makes: Mapping[str, str], study: Study) -> None:
    """Run the command of every path that does not exist, in order; those with ``{seed}`` for every seed."""
    for path, command in makes.items():
        for seed in range(study.seeds) if "{seed}" in path else range(1):
            place, *words = (word.replace("{seed}", str(seed)) for word in (path, *shlex.split(command)))
            with held(study.out, wait=True):  # a second process must not make the same at once
                if not Path(place).exists():
                    run([sys.executable if word == "python" else word for word in words])


def run_all(study: Study, wanted: Sequence[tuple[Arm, int]]) -> None:
    """Make these runs; those that wait for another process come last."""
    left = list(wanted)
    while left:
        busy = [(arm, seed) for arm, seed in left if not run_arm(study, arm, seed, wait=False)]
        if len(busy) == len(left):
            arm, seed = busy.pop(0)
            run_arm(study, arm, seed)
        left = busy


def run_arm(study: Study, arm: Arm, seed: int, *, wait: bool = True) -> bool:
    """Train and evaluate one run, after the arm whose checkpoint it evaluates; False: another process is making either."""
    if arm.of and not run_arm(study, study.by_name[arm.of], seed, wait=wait):
        return False
    folder = study.folder(arm, seed)
    with held(folder, wait=wait) as ours:
        if ours:
            if not arm.of:
                _train(study, arm, seed, folder)
            _evaluate(study, arm, seed)
    return ours


@contextmanager
def held(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a folder against other processes of a study; gives False if one has it and this one does not wait."""
    with ExitStack() as stack:
        try:
            stack.enter_context(files.held(folder, ".arm_lock", wait=wait))  # training holds its own
        except files.InUseError:
            yield False
        else:
            yield True


def _train(study: Study, arm: Arm, seed: int, folder: Path) -> None:
    if (folder / NOTE).is_file() and not study.changed(arm, seed):
        return
    train = [*study.words(arm, seed), f"out={folder}"]
    print(f"{arm.name}/seed_{seed}: {shlex.join(train)}", flush=True)
    # rge/train.py refuses a checkpoint of other settings.
    run([*shlex.split(study.launcher or default_launcher()), in_clone("rge/train.py"), *train])
    write_text(folder / NOTE, json.dumps({"command": train, "recipe": to_dict(load_recipe(train))}, indent=1))


def _evaluate(study: Study, arm: Arm, seed: int) -> None:
    out, checkpoint = study.evaluation(arm, seed), study.checkpoint(arm, seed)
    if (out / "results.json").is_file():
        check_evaluation(study, arm, seed)
        return
    words = [f"checkpoint={checkpoint}", f"set={study.set_of(arm)}", f"out={out}"]
    mode = arm.query_mode
    if not mode:
        settings = json.loads((checkpoint / RGE_JSON).read_text())
        mode = "direct" if settings["reasons"] == "none" else "reasoning"
    command = [sys.executable, "-m", "rge", "eval", "run", *words, f"query_mode={mode}"]
    run([*command, *study.ask, *arm.ask, "report=false"])
    write_text(_note_of_set(out), f"{study.set_of(arm)}\n{_hash(checkpoint / RGE_JSON)}")


def check_evaluation(study: Study, arm: Arm, seed: int) -> None:
    """Refuse a finished evaluation on another set, or of an older checkpoint of that run."""
    out, path = study.evaluation(arm, seed), study.set_of(arm)
    about, note = study.checkpoint(arm, seed) / RGE_JSON, _note_of_set(out)
    then, _, of = note.read_text().partition("\n") if note.is_file() else (str(path), "", "")
    if then != str(path):
        raise UserError(
            f"it is an evaluation on {then}, now set={path}: use another out=, or delete it", out, key="set"
        )
    if of and about.is_file() and of != _hash(about):  # the checkpoint may have been deleted since
        raise UserError(f"it is an evaluation of another checkpoint than {about.parent}: delete it", out)


def _note_of_set(out: Path) -> Path:
    return out.with_name(f"{out.name}.set")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# --- results


class Results:
    """Per-query results: of a study's finished runs, or of a file of hits that `hits` made."""

    def __init__(self, runs: Mapping[tuple[str, int], pd.DataFrame]):
        """`runs`: by arm and seed a row per query, in the same order in all: ``group``, ``queries``, metrics, slices."""
        self.runs = runs

    @classmethod
    def of_study(cls, study: Study) -> "Results":
        """All finished runs of a study, ordered by query id."""
        runs = {}
        for arm in study.arms:
            for seed in range(study.seeds):
                if study.is_finished(arm, seed):
                    check_evaluation(study, arm, seed)
                    frame = pd.read_parquet(study.evaluation(arm, seed) / "per_query.parquet")
                    frame = frame.sort_values("query_id").reset_index(drop=True)
                    ids = hashlib.sha256("\n".join(frame["query_id"]).encode()).hexdigest()[:16]
                    runs[arm.name, seed] = frame.assign(queries=ids)
        return cls(runs)

    @classmethod
    def of_hits(cls, hits: pd.DataFrame) -> "Results":
        """The runs of one finding of a file of hits."""
        return cls({key: frame for key, frame in hits.groupby(["arm", "seed"], observed=True)})

    def hits(self, finding: str, part: str) -> pd.DataFrame:
        """Each run's hit@1 and group by query, and its value in the column ``part``: the rows of a file of hits."""
        frames = [
            pd.DataFrame(
                {
                    "finding": finding, "arm": arm, "seed": seed, "queries": frame["queries"],
                    "part": frame[part].astype(str) if part in frame else "",
                    "query": np.arange(len(frame)), "group": index_of(frame["group"].tolist()), "hit@1": frame["hit@1"] > 0,
                }
            )
            for (arm, seed), frame in self.runs.items()
        ]  # fmt: skip
        small = {"seed": "int16", "query": "int32", "group": "int32"}
        names = dict.fromkeys(("finding", "arm", "queries", "part"), "category")
        return pd.concat(frames, ignore_index=True).astype(small | names)

    def measure(
        self, weights: Mapping[str, float], metric: str, where: "Slice", seeds: Sequence[int] | None = None
    ) -> dict[str, Any] | None:
        """The mean of a weighted sum of arms over queries, with its 95 % interval; None without a complete seed.

        ``mean``, ``low`` and ``high`` are over seeds and groups of queries together, ``of_groups`` is the interval over groups alone,
        ``seeds`` has each seed's mean. UserError if arms were evaluated on different queries.
        """
        values, first, chosen = [], "", pd.DataFrame()
        for seed in self.seeds(list(weights)) if seeds is None else seeds:
            total: Any = 0.0
            for name, weight in weights.items():
                frame = self.runs[name, seed]
                key = frame["queries"].iloc[0]
                if first not in ("", key):
                    raise UserError(
                        "it was evaluated on other queries than the runs before it",
                        name,
                        f"seed {seed}",
                        kind="queries",
                    )
                first = key
                chosen = frame[frame[where.column].astype(str) == where.value] if where.column else frame
                total = total + weight * chosen[metric].to_numpy(dtype=float)
            values.append(total)
        if not len(chosen):
            return None
        value_QS = np.stack(values, axis=1)
        bounds = (sum(w for w in weights.values() if w < 0), sum(w for w in weights.values() if w > 0))
        member_Q: Any = chosen["category"].to_numpy() if where.of_members else None
        group = chosen["group"]
        # Numbers sort as the names that they stand for.
        group_Q = group.to_numpy() if pd.api.types.is_integer_dtype(group) else index_of(group.tolist())
        joint, given = mean_over_seeds(value_QS[:, :, None], group_Q, bounds, member_Q)[0]
        members = [member_Q == name for name in np.unique(member_Q)] if where.of_members else [slice(None)]
        by_seed = np.mean([np.nanmean(value_QS[rows], axis=0) for rows in members], axis=0)
        return {
            "mean": joint["value"], "low": joint["low"], "high": joint["high"], "of_groups": [given["low"], given["high"]],
            "seeds": by_seed.round(4).tolist(), "queries": len(chosen),
        }  # fmt: skip

    def seeds(self, names: Sequence[str]) -> list[int]:
        """Seeds of which there is a run of each of these arms."""
        return sorted(set.intersection(*({seed for arm, seed in self.runs if arm == name} for name in names)))


Figures = dict[str, float | None]


def mean_over_seeds(
    value_QSM: np.ndarray,
    group_Q: np.ndarray,
    bounds: tuple[float, float] | None,
    member_Q: np.ndarray | None = None,
) -> list[tuple[Figures, Figures]]:
    """Each metric's mean with its interval over seeds and groups together, and over groups alone.

    With ``member_Q``, the member of a suite that each query belongs to, means are over members, and groups are resampled within them.
    """
    Q, S, M = value_QSM.shape

    def bootstrap(value_QC: np.ndarray) -> Bootstrap:
        if member_Q is None:
            return cluster_bootstrap(value_QC, group_Q)
        columns = [str(number) for number in range(value_QC.shape[1])]
        table = pd.DataFrame(value_QC, columns=columns).assign(category=member_Q, group=group_Q)
        return mean_of(list(member_bootstraps(table, columns, seed=0).values()))

    joint = over_seeds(bootstrap(value_QSM.reshape(Q, S * M)), S)
    given = bootstrap(value_QSM.mean(axis=1))
    return list(zip(figures(joint, bounds), figures(given, bounds), strict=True))


# --- tables


@dataclass(frozen=True)
class Row:
    """A line of a table: a weighted sum of arms."""

    says: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Slice:
    """Queries that a column of a table is about."""

    column: str = ""  # queries with this value in this column; empty: all queries
    value: str = ""
    of_members: bool = False  # the mean is over a suite's members instead of over queries


def weights_of(total: str) -> dict[str, float]:
    """Weights of the arms in a sum such as ``self - oracle``."""
    first, *more = re.split(r"\s([-+])\s", total.strip())
    weights: dict[str, float] = {}
    for sign, name in [("+", first), *zip(more[::2], more[1::2], strict=True)]:
        weights[name] = weights.get(name, 0.0) + (1 if sign == "+" else -1)
    return weights


def in_table(
    results: Results, rows: Sequence[Row], slices: Mapping[str, Slice], metric: str
) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """A metric's cells in per cent, rows by slices, and the rows as data; rows without a complete seed are left out."""
    shown, data = [], []
    for row in rows:
        cells, seeds = {}, 0
        sign = "+" if abs(sum(row.weights.values())) < 1e-9 else ""
        for title, where in slices.items():
            found = results.measure(row.weights, metric, where)
            if found is None:
                cells[title] = ""
                continue
            cells[title] = percent(found["mean"], found["low"], found["high"], sign=sign)
            seeds = len(found["seeds"])
            data.append({"row": row.says, "slice": title, "metric": metric, **found})
        if seeds:
            shown.append({"arm": row.says, **cells, "seeds": str(seeds)})
    return pd.DataFrame(shown, columns=["arm", *slices, "seeds"]), data


def is_apart(row: Mapping[str, Any]) -> bool:
    """Whether a measured row's seeds differ by more than `SEEDS_APART`; see `over_seeds`."""
    low, high = row["of_groups"]
    if low is None or len(row["seeds"]) < 2:
        return False
    of_groups = (high - low) / (2 * NormalDist().inv_cdf(0.975))
    return bool(np.std(row["seeds"], ddof=1) > SEEDS_APART * of_groups)


def too_narrow(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for a page that names the rows of `in_table` whose seeds are apart."""
    if not (names := dict.fromkeys(row["row"] for row in rows if is_apart(row))):
        return []
    return [
        f"Seeds differ by more than {SEEDS_APART:g} standard errors of groups, so these intervals can cover less than 95 % "
        f"(`rge.stats.intervals.over_seeds` says how much): {'; '.join(names)}.",
        "",
    ]


def percent(mean: float | None, low: float | None, high: float | None, *, sign: str = "") -> str:
    """A mean in per cent with its interval; ``sign``: "+" for a difference."""
    assert mean is not None
    return f"{100 * mean:{sign}z.1f} {in_words(low, high)}"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
