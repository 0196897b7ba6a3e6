"""The demo, end to end, as `make demo` runs it: train, evaluate on unseen drawings, write one page.

    python scripts/demo.py [baseline=true] [from_nothing=true]

Training starts from rge/demo_base, whose vision tower is already trained. ``from_nothing=true`` first makes such a base
(rge/small_models), and writes to runs/demo_from_nothing instead of runs/demo. Each step is a command that is printed before it runs:

    1 train       rge/train.py recipe=demo               runs/demo: cold start, joint stage
    2 eval        rge eval run ...                       runs/demo/eval: with rationale and direct; shortcuts
    3 baseline    rge/train.py recipe=demo stage=joint   runs/demo_none: same start and steps, no rationales
    4 eval_none   rge eval run ...                       runs/demo_none/eval: direct
    5 compare     rge eval compare a=... b=...           paired tests: the rationale against each rival
    6 report      rge eval report ...                    runs/demo/report.html

Steps 3 and 4 train the baseline without rationales and run only with ``baseline=true`` (`make demo-baseline`). A finished step is
skipped as long as its command and inputs are unchanged; an interrupted one resumes. ``progress.html`` shows the progress and leads to the
report at the end. ``steps.json`` records finished steps; ``summary.json`` has minutes, CPU time and figures.
"""

import contextlib
import hashlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rge.common.commands import start
from rge.common.errors import SIGNALLED
from rge.common.files import RECIPES, read_json, write_json, write_text
from rge.common.options import parse_options, read_yaml
from rge.config import load_recipe
from rge.stats.intervals import in_words

ROOT = Path(__file__).resolve().parent.parent
DATA = "data_prep/demo/data"
RUN = "runs/demo"
BASE = "rge/demo_base"
TRAIN, FIRST_STAGE = 10, 15
"""Shares of the demo's time: training from `BASE`, and making such a base."""
EVAL = ("-m", "rge", "eval")
BASELINE = ("stage=joint", "loss.anchor=none", "loss.ratio=none", "joint.lr=2e-3", "loss.temperature=0.05")
"""Overrides of the model without rationales: no LM loss, InfoNCE on the state directly after the prompt."""

PAIRS = {"seen": "seen pairs, %", "held_out": "held-out pairs, %"}
SHOWN = ("hit@1", "recall@1", "recall@10", "mrr")
CONDITIONS = (
    "reasoning-both", "direct-both", "reasoning-text", "reasoning-image", "direct-text", "direct-image",
)  # fmt: skip
"""Folders that the evaluation writes: query mode and what of the query is shown."""


@dataclass
class Options:
    """What the demo trains."""

    baseline: bool = False
    """Also train and evaluate a model without rationales."""
    from_nothing: bool = False
    """Make the base too, instead of starting from rge/demo_base."""


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str  # key in steps.json
    command: tuple[str, ...]  # arguments after the interpreter
    inputs: tuple[str, ...]  # files whose change, like that of the command, repeats a finished step
    output: str  # file that a finished step has written
    share: float = 1.0  # rough share of the demo's time, relative to the other steps


def steps(baseline: bool, run: str = RUN) -> list[Step]:
    """All steps, in order; any folder `run` but `RUN` has a base of its own."""
    base, none = BASE if run == RUN else f"{run}/base", f"{run}_none"
    train = (*launcher(), "rge/train.py", "recipe=demo")

    def files_below(folder: str) -> list[str]:
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(ROOT)) for path in files)

    recipe, test_set = ("recipes/demo.yaml", *files_below(f"{DATA}/train")), files_below(f"{DATA}/test")
    # One item at a time would make run.trec independent of the batch, and take twice as long here.
    evaluate = (*EVAL, "run", f"set={DATA}/test", "overwrite=true", "report=false", "exact=false")
    weights, weights_none = f"{run}/joint/final/model.safetensors", f"{none}/joint/final/model.safetensors"
    conditions = tuple(f"{run}/eval/{name}/results.json" for name in CONDITIONS)
    rivals = {"question_only": "reasoning-text", "picture_only": "reasoning-image", "direct": "direct-both"}
    pairs = {name: f"{run}/eval/{folder}" for name, folder in rivals.items()}
    base_weights = f"{base}/model.safetensors"
    trained, modes = f"{run}/joint/final", ("query_mode=reasoning,direct", "query_modality=both,text,image")
    train_own = (*train, *(() if base == BASE else (f"model.path={base}",)), f"out={run}")
    eval_own = (*evaluate, f"checkpoint={trained}", f"out={run}/eval", *modes)
    found = [
        Step("train", train_own, (*recipe, base_weights), f"{trained}/rge.json", TRAIN),
        Step("eval", eval_own, (*test_set, weights), conditions[0], share=3),
    ]
    if base != BASE:
        make_base = (*launcher(), "-m", "rge.small_models", "recipe=demo", f"out={base}")
        sizes = ("recipes/small_models/demo.yaml", *recipe[1:])
        found.insert(0, Step("base", make_base, sizes, base_weights, FIRST_STAGE))
    figures, reported = conditions, f"runs={run}/eval"
    if baseline:
        pairs["trained_without"] = f"{none}/eval"
        figures = (*conditions, f"{none}/eval/results.json")
        reported += f",Trained without rationales:{none}/eval"
        found += [
            Step(
                "baseline",
                (*train, *BASELINE, f"init={run}/cold_start/final", f"out={none}"),
                (*recipe, f"{run}/cold_start/final/model.safetensors"),
                f"{none}/joint/final/rge.json",
                share=4,
            ),
            Step(
                "eval_none",
                (*evaluate, f"checkpoint={none}/joint/final", f"out={none}/eval", "query_mode=direct"),
                (*test_set, weights_none),
                f"{none}/eval/results.json",
            ),
        ]
    for name, folder in pairs.items():
        out = f"{run}/compare/{name}"
        words = (f"a={run}/eval/{CONDITIONS[0]}", f"b={folder}", "metric=hit@1", f"out={out}")
        command = (*EVAL, "compare", *words)
        found.append(Step(f"compare_{name}", command, figures, f"{out}/compare.json", share=0.3))
    report = (
        *(*EVAL, "report", reported, f"out={run}/report.html", "metric=hit@1"),
        f"log={run}/cold_start/metrics.jsonl,{run}/joint/metrics.jsonl",
    )
    found.append(Step("report", report, (*figures, f"{run}/joint/metrics.jsonl"), f"{run}/report.html"))
    return found


def launcher() -> tuple[str, ...]:
    """`accelerate launch`: one process on a GPU or a single core, else two on CPU.

    Two processes of one thread are faster here than one process of two threads, and slow down less on a busy machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = "--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    if cores >= 2 and shutil.which("nvidia-smi") is None:
        words = "--config_file recipes/accelerate/cpu.yaml --num_cpu_threads_per_process 1"
    return ("-m", "accelerate.commands.launch", *words.split())


def main(arguments: list[str]) -> int:
    """Run the unfinished steps, then print the table and the page's path."""
    options = parse_options(Options, arguments, "python scripts/demo.py")
    run = f"{RUN}_from_nothing" if options.from_nothing else RUN
    os.chdir(ROOT)
    record_path = ROOT / run / "steps.json"
    record_path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, dict[str, Any]] = read_json(record_path) or {}
    todo = steps(options.baseline, run)
    page = ROOT / run / "report.html"
    progress = Progress(run, todo)
    print(f"demo: open {progress.path} to watch it; it leads to the report at the end", flush=True)
    for number, step in enumerate(todo, start=1):
        title = f"demo [{number}/{len(todo)}] {step.name}"
        entry = record.get(step.name, {})
        key = digest(step)
        if entry.get("key") == key and (ROOT / step.output).exists():
            print(f"{title}: finished before ({entry['seconds'] / 60:.1f} min)", flush=True)
            continue
        print(f"{title}: python {shlex.join(step.command)}", flush=True)
        began, cpu = time.monotonic(), children_cpu()
        code = call(step.command, partial(progress.write, number))
        seconds = entry.get("seconds_so_far", 0.0) + time.monotonic() - began
        cpu = entry.get("cpu_so_far", 0.0) + children_cpu() - cpu
        if code == 0:
            # Computed again, since the step may have read files that an earlier step has just written.
            record[step.name] = {"key": digest(step), "seconds": seconds, "cpu_seconds": cpu}
        else:
            record[step.name] = {"seconds_so_far": seconds, "cpu_so_far": cpu}
        write_json(record_path, record, indent=2)
        if code:
            print(f"{title}: stopped (exit code {code}); the same command continues", file=sys.stderr)
            return code if code > 0 else SIGNALLED - code
        print(f"{title}: {seconds / 60:.1f} min", flush=True)
    leads_there = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={page.name}">'
    write_text(progress.path, leads_there)
    minutes = {step.name: round(record[step.name]["seconds"] / 60, 2) for step in todo}
    cpu_minutes = sum(record[step.name].get("cpu_seconds", 0.0) for step in todo) / 60
    rows = figures(options.baseline, run)
    links = chain(ROOT / run / "eval" / CONDITIONS[0], ROOT / DATA / "test")
    times = {"total_minutes": round(sum(minutes.values()), 2), "cpu_minutes": round(cpu_minutes, 2)}
    summary = {"minutes": minutes, **times, "figures": rows, "chain": links, "page": f"{run}/report.html"}
    write_json(ROOT / run / "summary.json", summary, indent=2)
    spent = f"{sum(minutes.values()):.1f} minutes in all, {cpu_minutes:.1f} of CPU time"
    print(f"\n{table(rows)}\n\n{chain_lines(links)}\n\n{spent}\npage: {page}")
    return 0


def children_cpu() -> float:
    """CPU seconds of all child processes that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


class Progress:
    """Writes progress.html while the demo runs: the current step, and the minutes left."""

    def __init__(self, run: str, todo: Sequence[Step]):
        self.run, self.todo, self.began = run, todo, time.monotonic()
        self.path = ROOT / run / "progress.html"
        self.skipped: float | None = None

    def write(self, number: int) -> None:
        """The page while the step of this number (from 1) runs."""
        step = self.todo[number - 1]
        done = sum(one.share for one in self.todo[: number - 1])
        done += self._share_done(step.name) * step.share
        if self.skipped is None:
            self.skipped = done
        whole = sum(step.share for step in self.todo)
        elapsed = time.monotonic() - self.began
        in_this_run = (done - self.skipped) / whole
        left = "estimating the time left"
        if in_this_run > 0.03:
            left = f"about {max(elapsed / in_this_run * (1 - done / whole) / 60, 0.1):.0f} min left"
        shown = dict.fromkeys(range(1, number), "{}: done") | {number: "<b>{}: running</b>"}
        rows = "".join(
            f"<li>{shown.get(place, '{}').format(step.name)}</li>"
            for place, step in enumerate(self.todo, start=1)
        )
        write_text(
            self.path,
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
            '<meta name="viewport" content="width=device-width"><title>rge demo</title>'
            "<style>body{font:16px/1.5 system-ui;max-width:40rem;margin:3rem auto;padding:0 1rem;color-scheme:light dark}"
            "progress{width:100%;height:1.2rem}</style><h1>The demo is running</h1>"
            f'<p><progress max="1" value="{done / whole:.3f}"></progress></p><p>{done / whole:.0%}, {left}</p><ol>{rows}</ol>'
            "<p>A small model learns to say what a picture shows, to reason to what is needed, and to find it. "
            "This page reloads itself and leads to the report.</p></html>",
        )

    def _share_done(self, name: str) -> float:
        """Share of a step that is done, from the last lines of its training's logs; 0 for one without any."""
        if name == "base":
            naming = read_yaml(RECIPES / "small_models" / "demo.yaml")["naming"]
            return self._steps("base_naming") / naming["steps"]
        if name != "train":
            return 0.0
        recipe = load_recipe(["recipe=demo"])
        stages = {name: getattr(recipe, name).steps for name in recipe.stages()}
        return sum(map(self._steps, stages)) / sum(stages.values())

    def _steps(self, stage: str) -> int:
        path = ROOT / self.run / stage / "metrics.jsonl"
        with contextlib.suppress(OSError, IndexError, ValueError):
            return json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"]
        return 0


def call(command: Sequence[str], every_two_seconds: Callable[[], None]) -> int:
    """Run a step and return its exit code.

    Ctrl-C reaches the step too, and training then saves a state: wait for that, unless Ctrl-C comes again.
    """
    # One thread per process: threads that wait for one another spin when anything else wants a core.
    process = subprocess.Popen([sys.executable, *command], env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        while True:
            with contextlib.suppress(OSError):  # the step itself reports a full disk
                every_two_seconds()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(2)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()
        process.kill()
        return SIGNALLED + signal.SIGINT


def digest(step: Step) -> str:
    """Sha256 over the command and the inputs' contents."""
    found = hashlib.sha256("\0".join(step.command).encode())
    for name in step.inputs:
        path = ROOT / name
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"
        found.update(f"\0{name}\0{content}".encode())
    return found.hexdigest()


def figures(baseline: bool, run: str = RUN) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by row of the final table, for seen and for held-out pairs."""
    found = {
        "rationale first": f"{run}/eval/reasoning-both",
        "rationale, question only": f"{run}/eval/reasoning-text",
        "rationale, picture only": f"{run}/eval/reasoning-image",
        "direct, same checkpoint": f"{run}/eval/direct-both",
    }
    if baseline:
        found["trained without rationales"] = f"{run}_none/eval"
    results = {
        label: json.loads((ROOT / folder / "results.json").read_text()) for label, folder in found.items()
    }
    rows = {
        label: {pair: {name: result["by_pair"][pair][name] for name in SHOWN} for pair in PAIRS}
        for label, result in results.items()
    }
    chance = results["rationale first"]["random"]
    rows["random ranking, all pairs"] = {
        pair: {name: {"value": chance[name]} for name in SHOWN} for pair in PAIRS
    }
    return rows


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figures in per cent, with 95 % intervals."""

    def cell(figure: dict[str, float]) -> str:
        text = f"{100 * figure['value']:.1f}"
        return text if figure.get("low") is None else f"{text} {in_words(figure['low'], figure['high'])}"

    blocks = []
    for pair, title in PAIRS.items():
        cells = {label: {name: cell(row[pair][name]) for name in SHOWN} for label, row in rows.items()}
        blocks.append(pd.DataFrame.from_dict(cells, orient="index").rename_axis(columns=title).to_string())
    return "\n\n".join(blocks)


def chain(eval_folder: Path, set_folder: Path) -> dict[str, dict[str, float]]:
    """Where answers are lost: is the thing named right, is the answer, is its picture found?

    For seen and held-out pairs, per cent: ``named`` of all queries; ``answered`` of these; ``found`` of those (the first candidate is
    right); and ``found_otherwise`` of the queries whose thing is named wrong.
    """
    queries = pd.read_parquet(
        eval_folder / "per_query.parquet", columns=["query_id", "pair", "rationale", "hit@1"]
    )
    words = judge_words(queries["query_id"], queries["rationale"], set_folder)
    named, answered = words["named"], words["answered"]
    found: dict[str, dict[str, float]] = {}
    for pair in PAIRS:
        chosen = queries["pair"] == pair
        of = {
            "named": named[chosen],
            "answered": answered[chosen & named],
            "found": queries["hit@1"][chosen & answered],
            "found_otherwise": queries["hit@1"][chosen & ~named],
        }
        found[pair] = {name: 100 * float(values.mean()) for name, values in of.items()}
    return found


def judge_words(query_ids: Iterable[str], rationales: Iterable[str], set_folder: Path) -> pd.DataFrame:
    """Compare rationales with those of a set (``rationales.parquet``); without one, a query counts as wrong.

    Per query ``named``, whether the first clause equals that of a rationale of the set, and so names the thing right, and ``answered``,
    whether the whole text does.
    """
    known = pd.read_parquet(set_folder / "rationales.parquet").groupby("query-id")["rationale"].agg(set)
    rows = []
    for name, text in zip(query_ids, rationales, strict=True):
        right, written = known.get(name, set()), text.strip()
        clauses = {one.partition(";")[0] for one in right}
        rows.append((written.partition(";")[0] in clauses, written in right))
    return pd.DataFrame(rows, columns=["named", "answered"], dtype=bool)


def chain_lines(figures: dict[str, dict[str, float]]) -> str:
    """`chain` in words."""
    return "\n".join(
        f"{PAIRS[pair].removesuffix(', %')}: the thing is named right in {shares['named']:.1f} %; then the answer in "
        f"{shares['answered']:.1f} %; then its picture comes first in {shares['found']:.1f} % "
        f"(thing named wrong: {shares['found_otherwise']:.1f} %)"
        for pair, shares in figures.items()
    )


if __name__ == "__main__":
    start(main)
