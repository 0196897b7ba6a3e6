"""Arms: named trainings with several seeds, each from the checkpoint of another, and what is said of their differences.

A `Study` names its arms, sets and seeds; `run_all` trains and evaluates what is missing; `Results` pairs arms query by query. A training
or evaluation that is finished is not repeated and an interrupted one resumes, so a command can be stopped and given again. Given
twice at once, it makes one run beside another: each waits only for what it starts from.

Every evaluation's per-query values are kept in ``kept.json`` in the study's folder, hits as bits: small enough to commit, and all
that intervals need. scripts/study.py and scripts/ablate.py are commands over this.
"""

import base64
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rge.common.errors import SIGNALLED, UserError
from rge.common.files import write_text
from rge.stats.intervals import cluster_bootstrap, figures, index_of, over_seeds

ROOT = Path(__file__).resolve().parent.parent
DEMO_SET = Path("data_prep/demo/data/test")
TRAINED = "as trained"
KEPT = "kept.json"
COUNTED_STEPS = 3
"""Steps over which FLOPs are counted."""


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
        sets: retrieval sets by name, where they are not the study's.
        ends_with: what arms after it start from, in its folder; empty: its stage's last checkpoint.
        point: it is asked as this point of `rge eval budget`, such as ``auto-0.5``; the points of one checkpoint come from one
            run of it, so they are asked with the same `ask`.
    """

    name: str
    stage: str
    after: str = ""
    overrides: tuple[str, ...] = ()
    shared: bool = False
    flops_of: str = ""
    query_mode: str = TRAINED
    ask: tuple[str, ...] = ()
    sets: Mapping[str, Path] | None = None
    ends_with: str = ""
    point: str = ""


@dataclass(frozen=True)
class Study:
    """Where a study is made, and of what.

    Attributes:
        out: its folder.
        arms: all of them.
        recipe: arguments that every training gets.
        sets: retrieval sets by name; the evaluation on one is in the run's folder on_NAME, or eval where the name is empty.
        seeds: runs an arm.
        launcher: what stands before ``rge/train.py``; empty: `default_launcher`.
        ask: further arguments of every ``rge eval run``.
        metrics: numeric columns of per_query.parquet, or made by `derive`, that are kept.
        columns: further columns that are kept, for slices.
        derive: adds columns to the per-query values of a run on a set.
    """

    out: Path
    arms: Sequence[Arm]
    recipe: tuple[str, ...]
    sets: Mapping[str, Path]
    seeds: int
    launcher: str = ""
    ask: tuple[str, ...] = ("exact=false",)
    metrics: Sequence[str] = ("hit@1",)
    columns: Sequence[str] = ()
    derive: Callable[[pd.DataFrame, Path], pd.DataFrame] = field(default=lambda frame, path: frame)

    @cached_property
    def by_name(self) -> dict[str, Arm]:
        """Arms by their names."""
        return {arm.name: arm for arm in self.arms}

    def run_name(self, arm: Arm, seed: int) -> str:
        """What a run is called, and its folder below the study's."""
        return f"{arm.name}/" + ("shared" if arm.shared else f"seed_{seed}")

    def folder(self, arm: Arm, seed: int) -> Path:
        """Where a run is written."""
        return self.out / self.run_name(arm, seed)

    def checkpoint(self, arm: Arm, seed: int) -> Path:
        """What a run ends with."""
        if not arm.stage:
            return self.checkpoint(self.by_name[arm.after], seed)
        return self.folder(arm, seed) / (arm.ends_with or f"{arm.stage}/final")

    def sets_of(self, arm: Arm) -> Mapping[str, Path]:
        """What an arm is evaluated on."""
        return (arm.sets or self.sets) if arm.query_mode else {}

    def evaluation(self, arm: Arm, seed: int, name: str) -> Path:
        """Where a run's evaluation on a set is written."""
        if arm.point:
            return self.folder(self.by_name[arm.after], seed) / f"budget_{name}" / arm.point
        return self.folder(arm, seed) / (f"on_{name}" if name else "eval")

    def is_finished(self, arm: Arm, seed: int) -> bool:
        """Whether a run is trained and evaluated."""
        made = [self.evaluation(arm, seed, name) / "results.json" for name in self.sets_of(arm)]
        if arm.stage:
            made.append(self.folder(arm, seed) / "arm.json")
        return all(path.is_file() for path in made)

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Arguments of ``rge/train.py``, without its steps and folder."""
        seed = 0 if arm.shared else seed
        words = [*self.recipe, f"stage={arm.stage}", f"train.seed={seed}", *arm.overrides]
        if arm.after:
            words.append(f"init={self.checkpoint(self.by_name[arm.after], seed)}")
        return words


# --- running


def refuse_launcher(script: str) -> None:
    """Every process of a launch would make all runs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"start {script} with python, not with a launcher; put that into launcher='accelerate launch ...'"
        )


def default_launcher() -> str:
    """`accelerate launch` as configured on a machine with a GPU, else two processes on CPU."""
    launch = f"{shlex.quote(sys.executable)} -m accelerate.commands.launch"
    if shutil.which("nvidia-smi"):
        return launch
    return f"{launch} --config_file recipes/accelerate/cpu_2.yaml"


def run(command: list[str]) -> None:
    """Run a command; stop with its exit code if it fails, so that giving the study again continues there."""
    code = subprocess.run(command, check=False).returncode
    if code:
        print(
            f"stopped: {shlex.join(command)} ended with code {code}; give the same command again to continue",
            file=sys.stderr,
        )
        sys.exit(code if code > 0 else SIGNALLED - code)


def run_all(study: Study, wanted: Sequence[tuple[Arm, int]]) -> None:
    """Make these runs; those that another process is making come last."""
    busy = [one for one in wanted if not run_arm(study, *one, wait=False)]
    for arm, seed in busy:
        run_arm(study, arm, seed)


def run_arm(study: Study, arm: Arm, seed: int, *, wait: bool = True) -> bool:
    """Train and evaluate one run, and before it what it starts from, where that is missing; False: another process does."""
    if arm.after and not study.is_finished(arm, seed):
        run_arm(study, study.by_name[arm.after], seed)
    folder = study.folder(study.by_name[arm.after] if arm.point else arm, seed)
    with _held(folder, wait) as ours:
        if ours:
            if arm.stage:
                _train(study, arm, seed, folder)
            for name, path in study.sets_of(arm).items():
                _evaluate(study, arm, seed, name, path)
    return ours


@contextmanager
def _held(folder: Path, wait: bool) -> Iterator[bool]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _train(study: Study, arm: Arm, seed: int, folder: Path) -> None:
    steps = [f"{arm.stage}.steps={equal_steps(study, arm)}"] if arm.flops_of else []
    train = [*study.words(arm, seed), f"out={folder}", *steps]
    note, asked = folder / "arm.json", json.dumps(train, indent=1)
    if not note.is_file() or note.read_text() != asked:
        print(f"{study.run_name(arm, seed)}: {shlex.join(train)}", flush=True)
        # Whether a checkpoint that is there belongs to these settings is rge/train.py's to say.
        run([*shlex.split(study.launcher or default_launcher()), "rge/train.py", *train])
        write_text(note, asked)


def _evaluate(study: Study, arm: Arm, seed: int, name: str, path: Path) -> None:
    out, checkpoint = study.evaluation(arm, seed, name), study.checkpoint(arm, seed)
    note = out.with_name(f"{out.name}.set")
    if (out / "results.json").is_file():
        if note.is_file() and note.read_text() != str(path):
            raise UserError(
                f"{out} is an evaluation on {note.read_text()}, now set={path}: use another out=, or delete it"
            )
        return
    if arm.point:
        command = [sys.executable, "-m", "rge", "eval", "budget", f"checkpoint={checkpoint}", f"set={path}"]
        run([*command, f"out={out.parent}", *study.ask, *arm.ask, "report=false"])
        write_text(note, str(path))
        return
    mode = arm.query_mode
    if mode == TRAINED:
        reasons = json.loads((checkpoint / "rge.json").read_text())["reasons"]
        mode = "direct" if reasons == "none" else "reasoning"
    command = [sys.executable, "-m", "rge", "eval", "run", f"checkpoint={checkpoint}", f"set={path}"]
    run([*command, f"out={out}", f"query_mode={mode}", *study.ask, *arm.ask, "report=false"])
    write_text(note, str(path))


def flops_per_step(study: Study, arm: Arm) -> float:
    """Counted FLOPs of one step at its start, by seed 0."""
    place, words = study.folder(arm, 0) / "flops.json", study.words(arm, 0)
    command = [sys.executable, "scripts/bench.py", "flops", f"steps={COUNTED_STEPS}", *words]
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


# --- what came out


class Results:
    """Per-query values of a study's runs, from finished evaluations or as they were kept.

    Rows are in the order of the query ids; runs whose ids are the same have one name of queries, and can be paired.
    """

    def __init__(self, study: Study, kept: Path | None = None):
        """``kept``: a committed file that `keep` wrote; its runs stand in where the study's folder has none."""
        self.study = study
        self.kept: dict[str, dict[str, Any]] = {"queries": {}, "runs": {}}
        for file in (kept, study.out / KEPT):
            if file is not None and file.is_file():
                for part, found in json.loads(file.read_text()).items():
                    self.kept[part] |= found
        self.read: dict[tuple[str, int, str], tuple[str, pd.DataFrame] | None] = {}

    def of(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        """Name of the queries, and a row for each: ``group``, metrics and slices; None of a run that is not there."""
        key = (name, seed, set_name)
        if key not in self.read:
            self.read[key] = self._evaluated(*key) or self._as_kept(*key)
        return self.read[key]

    def _evaluated(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        arm = self.study.by_name[name]
        folder = self.study.evaluation(arm, seed, set_name)
        if set_name not in self.study.sets_of(arm) or not (folder / "results.json").is_file():
            return None
        frame = pd.read_parquet(folder / "per_query.parquet").sort_values("query_id").reset_index(drop=True)
        frame = self.study.derive(frame, self.study.sets_of(arm)[set_name])
        return hashlib.sha256("\n".join(frame["query_id"]).encode()).hexdigest()[:16], frame

    def _as_kept(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        found = self.kept["runs"].get(self._run_name(name, seed, set_name))
        if found is None:
            return None
        about = self.kept["queries"][found["queries"]]
        columns: dict[str, Any] = {"group": unpack(about["group"], about["number"])}
        for column, (values, of) in about["columns"].items():
            columns[column] = np.array(values)[unpack(of, about["number"]).astype(int)]
        columns |= {metric: unpack(text, about["number"]) for metric, text in found["metrics"].items()}
        return found["queries"], pd.DataFrame(columns)

    def _run_name(self, name: str, seed: int, set_name: str) -> str:
        return f"{self.study.run_name(self.study.by_name[name], seed)}/{set_name}"

    def keep(self) -> None:
        """Write all there is to ``kept.json``, with queries by a hash of their ids, groups by number, and hits as bits."""
        for arm in self.study.arms:
            for seed in range(self.study.seeds):
                for set_name in self.study.sets_of(arm):
                    if (self.study.evaluation(arm, seed, set_name) / "results.json").is_file():
                        key, frame = self.of(arm.name, seed, set_name)  # type: ignore[misc]  # it is there
                        self.kept["queries"][key] = _packed_queries(frame, self.study.columns)
                        metrics = {name: pack(frame[name]) for name in self.study.metrics if name in frame}
                        run = {"queries": key, "metrics": metrics}
                        self.kept["runs"][self._run_name(arm.name, seed, set_name)] = run
        if self.kept["runs"]:
            write_text(self.study.out / KEPT, json.dumps(self.kept, indent=0))

    def seeds(self, names: Sequence[str], set_name: str, metric: str) -> list[int]:
        """Seeds for which all these arms have the metric."""

        def has(name: str, seed: int) -> bool:
            found = self.of(name, seed, set_name)
            return found is not None and metric in found[1]

        return [seed for seed in range(self.study.seeds) if all(has(name, seed) for name in names)]

    def measure(
        self, weights: Mapping[str, float], set_name: str, metric: str, where: tuple[str, str] | None = None
    ) -> dict[str, Any] | None:
        """A weighted sum of arms on the same queries, its mean with its 95 % interval; None without a complete seed.

        Args:
            weights: by name of arm; those that sum to 0 make a difference.
            set_name: on which set.
            metric: column.
            where: column and value of the queries that count.

        Returns:
            ``mean``, ``low`` and ``high`` over seeds and groups of queries together, ``of_groups``, the interval over groups alone
            with the seeds given, ``seeds``, the mean of each, and ``queries``, how many.

        Raises:
            UserError: arms were evaluated on different queries.
        """
        values, queries, groups = [], "", None
        for seed in self.seeds(list(weights), set_name, metric):
            total = 0.0
            for name, weight in weights.items():
                key, frame = self.of(name, seed, set_name)  # type: ignore[misc]  # complete seeds alone
                if queries not in ("", key):
                    raise UserError(f"{name}, seed {seed}, was evaluated on other queries than the rest")
                queries = key
                chosen = frame if where is None else frame[frame[where[0]].astype(str) == where[1]]
                groups = index_of(chosen["group"].tolist())
                total = total + weight * chosen[metric].to_numpy(dtype=float)
            values.append(total)
        if groups is None or not len(groups):
            return None
        value_QS = np.stack(values, axis=1)  # type: ignore[arg-type]
        bounds = (sum(w for w in weights.values() if w < 0), sum(w for w in weights.values() if w > 0))
        joint, given = mean_over_seeds(value_QS[:, :, None], groups, bounds)[0]
        found = {"mean": joint["value"], "low": joint["low"], "high": joint["high"]}
        of_groups = [given["low"], given["high"]]
        return found | {
            "of_groups": of_groups,
            "seeds": value_QS.mean(axis=0).round(4).tolist(),
            "queries": len(groups),
        }


def _packed_queries(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, Any]:
    slices = {}
    for column in columns:
        if column in frame:
            values, of = np.unique(frame[column].astype(str), return_inverse=True)
            slices[column] = (values.tolist(), pack(of))
    return {"number": len(frame), "group": pack(index_of(frame["group"].tolist())), "columns": slices}


Figures = dict[str, float | None]


def mean_over_seeds(
    value_QSM: np.ndarray, group_Q: np.ndarray, bounds: tuple[float, float] | None
) -> list[tuple[Figures, Figures]]:
    """Of each metric the mean with its interval over seeds and groups together, and over groups alone."""
    Q, S, M = value_QSM.shape
    joint = over_seeds(cluster_bootstrap(value_QSM.reshape(Q, S * M), group_Q), S)
    given = cluster_bootstrap(value_QSM.mean(axis=1), group_Q)
    return list(zip(figures(joint, bounds), figures(given, bounds), strict=True))


def pack(values: Sequence[float] | np.ndarray) -> str:
    """Numbers as a short text: bits where all are 0 or 1, else float32, compressed."""
    array = np.asarray(values, dtype=np.float32)
    if np.isin(array, (0, 1)).all():
        return "bits " + base64.b64encode(np.packbits(array.astype(bool)).tobytes()).decode()
    return "zlib " + base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def unpack(text: str, number: int) -> np.ndarray:
    """What `pack` packed, float64; ``number``: how many."""
    kind, _, code = text.partition(" ")
    data = base64.b64decode(code)
    if kind == "bits":
        return np.unpackbits(np.frombuffer(data, np.uint8), count=number).astype(float)
    return np.frombuffer(zlib.decompress(data), np.float32).astype(float)
