"""The study runner: train and evaluate named arms over several seeds, and compare them query by query.

An `Arm` is one training, started from another arm's checkpoint. A `Study` lists arms, retrieval sets and seeds; `run_all` makes the
missing runs; `Results` reads them; `in_table` puts 95 % intervals on any weighted sum of arms. Finished runs are skipped and
interrupted ones resume; the same command started twice makes two runs at a time. Per-query results are kept in the study's
``kept.json``, small enough to commit and enough to recompute every interval.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import mean_of, member_bootstraps
from rge.checkpoints.resume import NOT_OF, ROUNDING, result_keys
from rge.checkpoints.settings import RGE_JSON
from rge.common.errors import SIGNALLED, UserError
from rge.common.files import read_json, write_text
from rge.config import Recipe, ScratchConfig, load_recipe, to_dict
from rge.identity.run_identity import digest, flattened
from rge.stats.intervals import Bootstrap, cluster_bootstrap, figures, in_words, index_of, over_seeds

ROOT = Path(__file__).resolve().parent.parent
DEMO_SET = Path("data_prep/demo/data/test")
TRAINED = "as trained"
KEPT, DIAGNOSES = "kept.json", "diagnoses"
NOTE = "arm.json"
"""What a finished training was made with, in its folder: its command, and the recipe, whose file may be edited between two runs."""
SEEDS_APART = 2.0
"""Standard deviation of seeds, in standard errors of groups, above which a page says that its interval may be too narrow."""
COUNTED_STEPS = 3
"""Steps over which FLOPs are counted."""


@dataclass(frozen=True)
class Arm:
    """One training for each seed, and its evaluation."""

    name: str  # also its folder
    stage: str  # that it trains; empty: it trains nothing and evaluates the checkpoint of `after` in another mode
    after: str = ""  # arm whose checkpoint it starts from; empty: the start that `overrides` give
    overrides: tuple[str, ...] = ()  # arguments of ``rge/train.py``
    shared: bool = False  # trained once for all seeds
    flops_of: str = ""  # arm whose counted FLOPs limit the number of steps; empty: the recipe's steps
    query_mode: str = TRAINED  # of the evaluation; empty: it is not evaluated
    ask: tuple[str, ...] = ()  # further arguments of ``rge eval run``
    sets: Mapping[str, Path] | None = None  # retrieval sets by name, instead of the study's
    ends_with: str = ""  # path in its folder that later arms start from; empty: the stage's last checkpoint
    # Point of `rge eval budget`, such as ``auto-0.5``; all points of one checkpoint come from one run of that command and therefore
    # have the same `ask`.
    point: str = ""


@dataclass(frozen=True)
class Study:
    """Arms, and where their runs are written."""

    out: Path
    arms: Sequence[Arm]
    recipe: tuple[str, ...]  # arguments of every training
    # Retrieval sets by name; an evaluation is in the run's folder on_NAME, or eval for the empty name.
    sets: Mapping[str, Path]
    seeds: int  # runs per arm
    launcher: str = ""  # command before ``rge/train.py``; empty: `default_launcher`
    ask: tuple[str, ...] = ("exact=false",)  # further arguments of every ``rge eval run``
    metrics: Sequence[str] = ("hit@1",)  # numeric columns of per_query.parquet, or of `derive`, that are kept
    columns: Sequence[str] = ()  # to slice by, also kept
    steps: int | None = None  # of every stage, and of naming where a backbone is built, for a trial
    # Adds columns to a run's per-query results on a set.
    derive: Callable[[pd.DataFrame, Path], pd.DataFrame] = field(default=lambda frame, path: frame)
    _settings: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def by_name(self) -> dict[str, Arm]:
        """Arms by name."""
        return {arm.name: arm for arm in self.arms}

    def run_name(self, arm: Arm, seed: int) -> str:
        """Name of a run: its folder, relative to the study's."""
        return f"{arm.name}/" + ("shared" if arm.shared else f"seed_{seed}")

    def folder(self, arm: Arm, seed: int) -> Path:
        """Folder of a run."""
        return self.out / self.run_name(arm, seed)

    def checkpoint(self, arm: Arm, seed: int) -> Path:
        """Checkpoint of a run."""
        if not arm.stage:
            return self.checkpoint(self.by_name[arm.after], seed)
        return self.folder(arm, seed) / (arm.ends_with or f"{arm.stage}/final")

    def sets_of(self, arm: Arm) -> Mapping[str, Path]:
        """Sets that an arm is evaluated on."""
        return (arm.sets or self.sets) if arm.query_mode else {}

    def evaluation(self, arm: Arm, seed: int, name: str) -> Path:
        """Folder of a run's evaluation on a set."""
        if arm.point:
            return self.folder(self.by_name[arm.after], seed) / f"budget_{name}" / arm.point
        return self.folder(arm, seed) / (f"on_{name}" if name else "eval")

    def is_finished(self, arm: Arm, seed: int) -> bool:
        """Whether a run is trained and evaluated."""
        made = [self.evaluation(arm, seed, name) / "results.json" for name in self.sets_of(arm)]
        if arm.stage:
            made.append(self.folder(arm, seed) / NOTE)
        return all(path.is_file() for path in made)

    def settings(self, arm: Arm) -> str:
        """Digest of what an arm's results depend on, whatever the seed and the study's folder: recipe, earlier stages, evaluation."""
        if arm.name not in self._settings:
            own = given(to_dict(load_recipe(self.words(arm, 0))), arm.stage) if arm.stage else {}
            parts: list[Any] = [arm.query_mode, arm.point, *self.ask, *arm.ask]
            if arm.after:
                before = self.by_name[arm.after]
                parts += [self.settings(before), before.ends_with]
                other = ("init", "model.scratch", *(f"{stage}." for stage in NOT_OF if stage != arm.stage))
                own = {key: value for key, value in own.items() if not key.startswith(other)}
            if arm.flops_of:
                parts.append(self.settings(self.by_name[arm.flops_of]))
            text = json.dumps([own, *parts], sort_keys=True, ensure_ascii=False)
            self._settings[arm.name] = digest(text.replace(f"{self.out}/", ""))[:16]
        return self._settings[arm.name]

    def changed(self, arm: Arm, seed: int) -> list[str]:
        """How the settings that a finished run was trained with differ from the arm's: ``key (there ..., now ...)``."""
        then: Any = read_json(self.folder(arm, seed) / NOTE)
        if then is None:
            return []
        if isinstance(then, list):  # the command, as notes once were
            try:
                then = {"command": then, "recipe": to_dict(load_recipe(then))}
            except UserError as error:  # a key or a recipe that is gone
                return [str(error)]
        (out,) = (word[4:] for word in then["command"] if word.startswith("out="))
        # The study's folder may have been moved, and its recipe may name files in its usual place.
        before = out.removesuffix(self.run_name(arm, seed)).rstrip("/")
        places = sorted({before, str(self.out)}, key=len, reverse=True)  # one may be in the other

        def in_folder(recipe: Mapping[str, Any]) -> dict[str, Any]:
            text = json.dumps(recipe, ensure_ascii=False)
            for place in filter(None, places):
                text = text.replace(f"{place}/", "")
            return given(json.loads(text), arm.stage)

        theirs, ours = in_folder(then["recipe"]), in_folder(to_dict(load_recipe(self.words(arm, seed))))
        free = f"{arm.stage}.steps" if arm.flops_of else None
        return [
            f"{key} (there {theirs.get(key, 'the default')!r}, now {ours.get(key, 'the default')!r})"
            for key in sorted(theirs.keys() | ours.keys())
            if theirs.get(key) != ours.get(key) and key != free
        ]

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Arguments of ``rge/train.py``, without output folder and matched steps."""
        seed = 0 if arm.shared else seed
        words = [*self.recipe, f"stage={arm.stage}", f"train.seed={seed}", *arm.overrides]
        if self.steps and not arm.flops_of:
            words.append(f"{arm.stage}.steps={self.steps}")
            words += [] if arm.after else [f"model.scratch.naming_steps={self.steps}"]
        if arm.after:
            words.append(f"init={self.checkpoint(self.by_name[arm.after], seed)}")
        return words


@cache
def _defaults() -> dict[str, Any]:
    return flattened({**to_dict(Recipe(recipe="")), "model.scratch": asdict(ScratchConfig())})


def given(recipe: dict[str, Any], stage: str) -> dict[str, Any]:
    """The keys of a recipe that a stage's result depends on by more than rounding, without those at their default.

    So a new key of the recipe changes nothing for earlier runs; neither does a default that has changed since.
    """
    usual = _defaults()
    return {
        key: value
        for key, value in result_keys(recipe, stage).items()
        if key not in ROUNDING and (key not in usual or value != usual[key])
    }


# --- running


def refuse_launcher(script: str) -> None:
    """Fail under a launcher, where every process would make all runs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"start {script} with python, not with a launcher; put that into launcher='accelerate launch ...'"
        )


def in_clone(name: str) -> str:
    """A file of the repository, as seen from the working directory."""
    return os.path.relpath(ROOT / name)


def default_launcher() -> str:
    """`accelerate launch` as configured on a machine with a GPU, else two processes on CPU."""
    config = ["--config_file", in_clone("recipes/accelerate/cpu_2.yaml")]
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


def run_all(study: Study, wanted: Sequence[tuple[Arm, int]], *, wait: bool = True) -> None:
    """Make these runs; those that wait for another process come last, or are left out without ``wait``."""
    left = list(wanted)
    while left:
        busy = [(arm, seed) for arm, seed in left if not run_arm(study, arm, seed, wait=False)]
        if not wait:
            return
        if len(busy) == len(left):
            arm, seed = busy.pop(0)
            run_arm(study, arm, seed)
        left = busy


def run_arm(study: Study, arm: Arm, seed: int, *, wait: bool = True) -> bool:
    """Train and evaluate one run, after the run that it starts from; False: another process is making either."""
    if arm.after and not study.is_finished(arm, seed):
        if not run_arm(study, study.by_name[arm.after], seed, wait=wait):
            return False
    folder = study.folder(study.by_name[arm.after] if arm.point else arm, seed)
    with held(folder, wait=wait) as ours:
        if ours:
            if arm.stage:
                _train(study, arm, seed, folder)
            for name, path in study.sets_of(arm).items():
                _evaluate(study, arm, seed, name, path)
    return ours


@contextmanager
def held(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a folder against other processes of a study; gives False if one has it and this one does not wait."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not training's own lock: on NFS, flock and record locks exclude one another.
    with (folder / ".arm_lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _train(study: Study, arm: Arm, seed: int, folder: Path) -> None:
    if (folder / NOTE).is_file() and not study.changed(arm, seed):
        return
    steps = [f"{arm.stage}.steps={steps_of(study, arm)}"] if arm.flops_of else []
    train = [*study.words(arm, seed), f"out={folder}", *steps]
    print(f"{study.run_name(arm, seed)}: {shlex.join(train)}", flush=True)
    # rge/train.py refuses a checkpoint of other settings.
    run([*shlex.split(study.launcher or default_launcher()), in_clone("rge/train.py"), *train])
    write_text(folder / NOTE, json.dumps({"command": train, "recipe": to_dict(load_recipe(train))}, indent=1))


def _evaluate(study: Study, arm: Arm, seed: int, name: str, path: Path) -> None:
    out, checkpoint = study.evaluation(arm, seed, name), study.checkpoint(arm, seed)
    if (out / "results.json").is_file():
        check_evaluation(study, arm, seed, name)
        return
    words = [f"checkpoint={checkpoint}", f"set={path}", f"out={out.parent if arm.point else out}"]
    if not arm.point:
        mode = arm.query_mode
        if mode == TRAINED:
            settings = json.loads((checkpoint / RGE_JSON).read_text())
            silent = "latent" if settings.get("think_tokens") else "direct"
            mode = silent if settings["reasons"] == "none" else "reasoning"
        words.append(f"query_mode={mode}")
    command = [sys.executable, "-m", "rge", "eval", "budget" if arm.point else "run", *words]
    run([*command, *study.ask, *arm.ask, "report=false"])
    write_text(_note_of_set(arm, out), f"{path}\n{_hash(checkpoint / RGE_JSON)}")


def check_evaluation(study: Study, arm: Arm, seed: int, name: str) -> None:
    """Refuse a finished evaluation on another set, or of an older checkpoint of that run."""
    out, path = study.evaluation(arm, seed, name), study.sets_of(arm)[name]
    about = study.checkpoint(arm, seed) / RGE_JSON
    notes = (
        _note_of_set(arm, out),
        out.with_name(f"{out.name}.set"),
    )  # the latter of earlier versions, one a point
    note = next((note for note in notes if note.is_file()), None)
    then, _, of = note.read_text().partition("\n") if note else (str(path), "", "")
    if then != str(path):
        raise UserError(f"{out} is an evaluation on {then}, now set={path}: use another out=, or delete it")
    if of and about.is_file() and of != _hash(about):  # the checkpoint may have been deleted since
        raise UserError(f"{out} is an evaluation of another checkpoint than {about.parent}: delete it")


def _note_of_set(arm: Arm, out: Path) -> Path:
    """Beside the output of the command, which for all points of a checkpoint is one."""
    folder = out.parent if arm.point else out
    return folder.with_name(f"{folder.name}.set")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def flops_per_step(study: Study, arm: Arm) -> float:
    """FLOPs of one step, counted over the first `COUNTED_STEPS` of seed 0."""
    place, words = study.folder(arm, 0) / "flops.json", study.words(arm, 0)
    command = [sys.executable, "scripts/bench.py", "flops", f"steps={COUNTED_STEPS}", *words]
    found = read_json(place) or {}
    if found.get("command") != command[1:]:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{shlex.join(command)} ended with code {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1]) | {"command": command[1:]}
        write_text(place, json.dumps(found, indent=1))
    return found["flops_per_step"]


def steps_of(study: Study, arm: Arm) -> int:
    """Steps of an arm's stage: the recipe's, or the most that cost no more FLOPs than those of the arm `Arm.flops_of`."""
    if arm.flops_of:
        other = study.by_name[arm.flops_of]
        total = steps_of(study, other) * flops_per_step(study, other)
        return max(1, int(total // flops_per_step(study, arm)))
    steps = getattr(load_recipe(study.words(arm, 0)), arm.stage).steps
    if steps is None:
        raise UserError(f"{arm.name}: {arm.stage}.steps must be given for FLOPs to be set equal")
    return steps


# --- results


class Results:
    """Per-query results of a study's runs, from finished evaluations or from a ``kept.json``; reports of diagnoses likewise.

    Rows are ordered by query id. Runs with the same ids share a hash of them and can be paired.
    """

    def __init__(self, study: Study, kept: Path | None = None):
        """``kept``: a committed ``kept.json``, used for runs that the study's folder lacks."""
        self.study = study
        self.kept: dict[str, dict[str, Any]] = {"queries": {}, "runs": {}, "diagnoses": {}}
        for file in filter(None, (kept, study.out / KEPT)):
            for part, found in (read_json(file) or {}).items():
                for name, content in found.items():
                    # Of two copies of a run, that with today's settings.
                    if part != "runs" or name not in self.kept[part] or self._is_todays(name, content):
                        self.kept[part][name] = content
        for file in sorted((study.out / DIAGNOSES).glob("*/*.json")):
            report: Any = read_json(file)
            report.pop("curves", None)  # of every step, and not shown
            self.kept["diagnoses"][file.parent.name] = report
        self.read: dict[tuple[str, int, str], tuple[str, pd.DataFrame] | None] = {}
        self.other: set[str] = set()
        """Runs that were trained with other settings than the arm has now, and are therefore not used."""

    def of(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        """Hash of the query ids, and a row per query (``group``, metrics, slices); None if the run is missing."""
        key = (name, seed, set_name)
        if key not in self.read:
            self.read[key] = self._evaluated(*key) or self._as_kept(*key)
        return self.read[key]

    def _is_todays(self, run: str, content: Mapping[str, Any]) -> bool:
        arm = self.study.by_name.get(run.rsplit("/", 2)[0])
        return arm is not None and content.get("settings") == self.study.settings(arm)

    def _evaluated(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        arm = self.study.by_name[name]
        folder = self.study.evaluation(arm, seed, set_name)
        if set_name not in self.study.sets_of(arm) or not (folder / "results.json").is_file():
            return None
        if self.study.changed(arm if arm.stage else self.study.by_name[arm.after], seed):
            self.other.add(self.study.run_name(arm, seed))
            return None
        check_evaluation(self.study, arm, seed, set_name)
        frame = pd.read_parquet(folder / "per_query.parquet").sort_values("query_id").reset_index(drop=True)
        frame = self.study.derive(frame, self.study.sets_of(arm)[set_name])
        return hashlib.sha256("\n".join(frame["query_id"]).encode()).hexdigest()[:16], frame

    def _as_kept(self, name: str, seed: int, set_name: str) -> tuple[str, pd.DataFrame] | None:
        arm = self.study.by_name[name]
        run_name = self.study.run_name(arm, seed)
        found = self.kept["runs"].get(f"{run_name}/{set_name}")
        if found is None:
            return None
        if not self._is_todays(f"{run_name}/{set_name}", found):
            self.other.add(run_name)
            return None
        about = self.kept["queries"][found["queries"]]
        # Padded, numbers sort as the names that they stand for, and intervals have the same digits.
        group = unpack(about["group"], about["number"]).astype(int).astype(str)
        columns: dict[str, Any] = {"group": np.char.zfill(group, 9)}
        for column, (values, of) in about["columns"].items():
            columns[column] = np.array(values)[unpack(of, about["number"]).astype(int)]
        columns |= {metric: unpack(text, about["number"]) for metric, text in found["metrics"].items()}
        return found["queries"], pd.DataFrame(columns)

    def keep(self) -> None:
        """Write ``kept.json``: queries by a hash of their ids, groups by number, hits as bits; reports of diagnoses without their curves."""
        study = self.study
        seeds = range(study.seeds)
        every = [(arm, seed, name) for arm in study.arms for seed in seeds for name in study.sets_of(arm)]
        for arm, seed, set_name in every:
            if not (study.evaluation(arm, seed, set_name) / "results.json").is_file():
                continue
            if (found := self.of(arm.name, seed, set_name)) is None:  # of other settings
                continue
            key, frame = found
            self.kept["queries"][key] = _packed_queries(frame, study.columns)
            metrics = {name: pack(frame[name]) for name in study.metrics if name in frame}
            run = f"{study.run_name(arm, seed)}/{set_name}"
            self.kept["runs"][run] = {"queries": key, "metrics": metrics, "settings": study.settings(arm)}
        if self.kept["runs"] or self.kept["diagnoses"]:
            write_text(study.out / KEPT, json.dumps(self.kept, indent=0))

    def measure(
        self, weights: Mapping[str, float], set_name: str, metric: str, where: "Slice"
    ) -> dict[str, Any] | None:
        """The mean of a weighted sum of arms over queries, with its 95 % interval; None without a complete seed.

        ``mean``, ``low`` and ``high`` are over seeds and groups of queries together, ``of_groups`` is the interval over groups alone,
        ``seeds`` has each seed's mean. UserError if arms were evaluated on different queries.
        """
        values, first, chosen = [], "", pd.DataFrame()
        for seed in self.seeds(list(weights), set_name, metric):
            total: Any = 0.0
            for name, weight in weights.items():
                key, frame = self.of(name, seed, set_name)  # type: ignore[misc]  # complete seeds only
                if first not in ("", key):
                    raise UserError(
                        f"{name}, seed {seed}, was evaluated on other queries than the runs before it"
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
        joint, given = mean_over_seeds(
            value_QS[:, :, None], index_of(chosen["group"].tolist()), bounds, member_Q
        )[0]
        members = [member_Q == name for name in np.unique(member_Q)] if where.of_members else [slice(None)]
        by_seed = np.mean([np.nanmean(value_QS[rows], axis=0) for rows in members], axis=0)
        return {
            "mean": joint["value"], "low": joint["low"], "high": joint["high"], "of_groups": [given["low"], given["high"]],
            "seeds": by_seed.round(4).tolist(), "queries": len(chosen),
        }  # fmt: skip

    def seeds(self, names: Sequence[str], set_name: str, metric: str) -> list[int]:
        """Seeds for which all these arms have the metric."""
        return [
            seed
            for seed in range(self.study.seeds)
            if all((found := self.of(name, seed, set_name)) and metric in found[1] for name in names)
        ]


def _packed_queries(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, Any]:
    slices = {}
    for column in columns:
        if column in frame:
            values, of = np.unique(frame[column].astype(str), return_inverse=True)
            slices[column] = (values.tolist(), pack(of))
    return {"number": len(frame), "group": pack(index_of(frame["group"].tolist())), "columns": slices}


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


def pack(values: Sequence[float] | np.ndarray) -> str:
    """Numbers as short text: bits if all are 0 or 1, else compressed float32."""
    array = np.asarray(values, dtype=np.float32)
    if np.isin(array, (0, 1)).all():
        return "bits " + base64.b64encode(np.packbits(array.astype(bool)).tobytes()).decode()
    return "zlib " + base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def unpack(text: str, number: int) -> np.ndarray:
    """The ``number`` values that `pack` packed, float64."""
    kind, _, code = text.partition(" ")
    data = base64.b64decode(code)
    if kind == "bits":
        return np.unpackbits(np.frombuffer(data, np.uint8), count=number).astype(float)
    return np.frombuffer(zlib.decompress(data), np.float32).astype(float)


# --- tables


@dataclass(frozen=True)
class Row:
    """A line of a table: a weighted sum of arms."""

    says: str
    weights: Mapping[str, float]
    paper: str = ""  # the paper's figure
    sign: int = 0  # of the paper's difference; 0: no verdict


@dataclass(frozen=True)
class Slice:
    """Queries that a column of a table is about."""

    set_name: str = ""  # empty: the table's own set
    column: str = ""  # queries with this value in this column; empty: all queries
    value: str = ""
    of_members: bool = False  # the mean is over a suite's members instead of over queries


@dataclass(frozen=True)
class Table:
    """Rows by slices, for one metric."""

    title: str
    rows: Sequence[Row]
    slices: Mapping[str, Slice]
    metric: str = "hit@1"


def rows_of(text: str) -> list[Row]:
    """Parse rows, one a line: ``[label =] SUM [| the paper's figure [| +]]``.

    SUM is arms joined by " - " or " + ", each with an optional weight, as in ``0.5*joint_0``. The last ``+`` or ``-`` is `Row.sign`.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        row, paper, side = (*(part.strip() for part in line.split("|")), "", "")[:3]
        says, _, total = row.rpartition(" = ")
        first, *more = re.split(r"\s([-+])\s", total)
        weights: dict[str, float] = {}
        for sign, term in [("+", first), *zip(more[::2], more[1::2], strict=True)]:
            weight, _, name = term.rpartition("*")
            weights[name] = weights.get(name, 0.0) + (1 if sign == "+" else -1) * float(weight or 1)
        found.append(Row(says or total, weights, paper, {"+": 1, "-": -1, "": 0}[side]))
    return found


def in_table(results: Results, table: Table, on: str) -> tuple[pd.DataFrame, list[dict[str, Any]], list[str]]:
    """A table's cells in per cent, its rows as data, and the labels of rows without a run; ``on``: set of unnamed slices."""
    shown, data, missing = [], [], []
    for row in table.rows:
        cells, seeds, result = {}, 0, ""
        sign = "+" if abs(sum(row.weights.values())) < 1e-9 else ""
        for title, where in table.slices.items():
            found = results.measure(row.weights, where.set_name or on, table.metric, where)
            if found is None:
                cells[title] = ""
                continue
            cells[title] = percent(found["mean"], found["low"], found["high"], sign=sign)
            result, seeds = result or verdict(found, row.sign), len(found["seeds"])
            data.append({"row": row.says, "slice": title, "metric": table.metric, "verdict": result, **found})
        if seeds:
            columns = {"arm": row.says, "the paper": row.paper, **cells}
            shown.append({**columns, "seeds": str(seeds), "verdict": result})
        else:
            missing.append(row.says)
    frame = pd.DataFrame(shown, columns=["arm", "the paper", *table.slices, "seeds", "verdict"])
    unused = [name for name in ("the paper", "verdict") if (frame[name] == "").all()]
    return frame.drop(columns=unused), data, missing


def too_narrow(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for a page that names the rows of `in_table` whose seeds differ by more than `SEEDS_APART`; see `over_seeds`."""

    def is_apart(row: Mapping[str, Any]) -> bool:
        low, high = row["of_groups"]
        if low is None or len(row["seeds"]) < 2:
            return False
        return bool(
            np.std(row["seeds"], ddof=1) > SEEDS_APART * (high - low) / (2 * NormalDist().inv_cdf(0.975))
        )

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
    return f"{100 * mean:{sign}.1f} {in_words(low, high)}"


def verdict(found: Mapping[str, Any], sign: int) -> str:
    """Whether a difference confirms the paper's; empty if the row asks for no verdict."""
    if not sign:
        return ""
    if found["low"] is None or found["low"] <= 0 <= found["high"]:
        return "undecided"
    return "confirmed" if (found["mean"] > 0) == (sign > 0) else "contradicted"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
