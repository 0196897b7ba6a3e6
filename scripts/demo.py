"""The demo, end to end, as `make demo` runs it: train with and without rationales, evaluate both, write one page.

    python scripts/demo.py

The steps, in order; each is a command that can be given by hand (printed before it runs):

    1 train       rge/train.py recipe=demo                       runs/demo: eyes, cold start, joint stage
    2 baseline    rge/train.py recipe=demo stage=joint ...       runs/demo_none: same start and steps, no rationales
    3 eval        python -m eval run ...                         runs/demo/eval: with rationale and direct; shortcuts
    4 eval_none   python -m eval run ...                         runs/demo_none/eval: direct
    5 compare     python -m eval compare a=... b=...             paired test: rationales against none
    6 report      python -m eval report ...                      runs/demo/report.html

A finished step is skipped as long as its command and its inputs stay the same; an interrupted one continues where it
stopped, since training and encoding keep their state. ``runs/demo/steps.json`` remembers; ``runs/demo/summary.json``
holds minutes and figures at the end.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = "data_prep/demo/data"
RUN, NONE = "runs/demo", "runs/demo_none"
BASELINE = (
    "stage=joint",
    f"init={RUN}/cold_start/final",
    f"out={NONE}",
    "loss.anchor=none",
    "loss.ratio=none",
)
"""What the model without rationales changes: no LM loss, InfoNCE on the state directly after the prompt."""

SHOWN = ("recall@1", "recall@10", "mrr", "ndcg@10")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: key in steps.json.
        command: arguments after the interpreter.
        inputs: files whose content decides, with the command, whether a finished step still counts.
        output: file that is there once the step has finished.
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str


def steps() -> list[Step]:
    """All steps, in order."""
    train = (*launcher(), "rge/train.py", "recipe=demo")
    training_data = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / DATA / "train").rglob("*") if path.is_file()
    )
    recipe = ("recipes/demo.yaml", *training_data)
    test_set = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / DATA / "test").glob("*")))
    evaluate = ("-m", "eval", "run", f"set={DATA}/test", "overwrite=true", "report=false")
    weights, weights_none = f"{RUN}/joint/final/model.safetensors", f"{NONE}/joint/final/model.safetensors"
    reasoning, direct, none = f"{RUN}/eval/reasoning-both", f"{RUN}/eval/direct-both", f"{NONE}/eval"
    figures = (f"{reasoning}/results.json", f"{direct}/results.json", f"{none}/results.json")
    return [
        Step("train", train, recipe, f"{RUN}/joint/final/rge.json"),
        Step(
            "baseline",
            (*train, *BASELINE),
            (*recipe, f"{RUN}/cold_start/final/model.safetensors"),
            f"{NONE}/joint/final/rge.json",
        ),
        Step(
            "eval",
            (
                *evaluate,
                f"checkpoint={RUN}/joint/final",
                f"out={RUN}/eval",
                "query_mode=reasoning,direct",
                "query_modality=both,text,image",
            ),
            (*test_set, weights),
            figures[0],
        ),
        Step(
            "eval_none",
            (*evaluate, f"checkpoint={NONE}/joint/final", f"out={none}", "query_mode=direct"),
            (*test_set, weights_none),
            figures[2],
        ),
        Step(
            "compare",
            ("-m", "eval", "compare", f"a={reasoning}", f"b={none}", f"out={RUN}/compare"),
            figures,
            f"{RUN}/compare/compare.json",
        ),
        Step(
            "report",
            (
                *("-m", "eval", "report", f"runs={RUN}/eval", f"out={RUN}/report.html"),
                f"log={RUN}/cold_start/metrics.jsonl,{RUN}/joint/metrics.jsonl",
                f"baseline=Without rationales:{none}",
            ),
            (*figures, f"{RUN}/joint/metrics.jsonl"),
            f"{RUN}/report.html",
        ),
    ]


def launcher() -> tuple[str, ...]:
    """`accelerate launch` for one process; its default of one thread would leave all cores but one idle."""
    threads = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return (
        *("-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", threads),
    )


def main() -> int:
    """Run what is not finished, then print the table and the page's path."""
    os.chdir(ROOT)
    record_path = ROOT / RUN / "steps.json"
    record_path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, dict[str, Any]] = json.loads(record_path.read_text()) if record_path.exists() else {}
    todo = steps()
    for number, step in enumerate(todo, start=1):
        title = f"demo [{number}/{len(todo)}] {step.name}"
        entry = record.get(step.name, {})
        key = digest(step)
        if entry.get("key") == key and (ROOT / step.output).exists():
            print(f"{title}: finished before ({entry['seconds'] / 60:.1f} min)", flush=True)
            continue
        print(f"{title}: python {' '.join(map(quoted, step.command))}", flush=True)
        began = time.monotonic()
        try:
            code = subprocess.run([sys.executable, *step.command], check=False).returncode
        except KeyboardInterrupt:
            code = 130
        seconds = entry.get("seconds_so_far", 0.0) + time.monotonic() - began
        if code == 0:
            # Its inputs may have been written by the step before: the key is of what it really read.
            record[step.name] = {"key": digest(step), "seconds": seconds}
        else:
            record[step.name] = {"seconds_so_far": seconds}
        write_json(record_path, record)
        if code:
            print(f"{title}: stopped (exit code {code}); the same command continues", file=sys.stderr)
            return 1
        print(f"{title}: {seconds / 60:.1f} min", flush=True)
    minutes = {step.name: round(record[step.name]["seconds"] / 60, 2) for step in todo}
    rows = figures()
    page = ROOT / RUN / "report.html"
    write_json(
        ROOT / RUN / "summary.json",
        {
            "minutes": minutes,
            "total_minutes": round(sum(minutes.values()), 2),
            "figures": rows,
            "page": f"{RUN}/report.html",
        },
    )
    print(f"\n{table(rows)}\n\n{sum(minutes.values()):.1f} minutes in all\npage: {page}")
    return 0


def digest(step: Step) -> str:
    """Sha256 over the command and the inputs' contents."""
    found = hashlib.sha256("\0".join(step.command).encode())
    for name in step.inputs:
        path = ROOT / name
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"
        found.update(f"\0{name}\0{content}".encode())
    return found.hexdigest()


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """Micro figures by row of the final table."""
    found = {
        "rationale first": f"{RUN}/eval/reasoning-both",
        "direct, same checkpoint": f"{RUN}/eval/direct-both",
        "trained without rationales": f"{NONE}/eval",
        "rationale, question only": f"{RUN}/eval/reasoning-text",
        "rationale, picture only": f"{RUN}/eval/reasoning-image",
    }
    results = {
        label: json.loads((ROOT / folder / "results.json").read_text()) for label, folder in found.items()
    }
    rows = {
        label: {name: result["micro"][name] for name in SHOWN if name in result["micro"]}
        for label, result in results.items()
    }
    chance = results["rationale first"].get("random", {})
    rows["random ranking"] = {name: {"value": chance[name]} for name in SHOWN if name in chance}
    return rows


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """The figures in per cent, with 95 % intervals."""

    def cell(figure: dict[str, float] | None) -> str:
        if figure is None:
            return "-"
        text = f"{100 * figure['value']:.1f}"
        return f"{text} [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]" if "low" in figure else text

    lines = [f"{'held-out drawings, %':28s}" + "".join(f"{name:>20s}" for name in SHOWN)]
    for label, row in rows.items():
        lines.append(f"{label:28s}" + "".join(f"{cell(row.get(name)):>20s}" for name in SHOWN))
    return "\n".join(lines)


def quoted(word: str) -> str:
    """The word as a shell needs it, for the printed command."""
    return word if all(letter.isalnum() or letter in "-_=./,:@" for letter in word) else f"'{word}'"


def write_json(path: Path, content: object) -> None:
    """Write whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
