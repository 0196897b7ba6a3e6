"""Does reinforcement learning of rationales help, and where: the study of docs/rl.md, by one command.

    python scripts/rl_study.py                     # everything, seed by seed; resumes
    python scripts/rl_study.py arms=rl_con_50      # these arms and what they start from
    python scripts/rl_study.py collect=true        # tables from finished runs

A dose of the training records' oracle rationales is spoiled (`data_prep.demo.spoil`): right sentence, wrong inference. A joint
stage is followed by one of several second halves that cost no more counted FLOPs than joint training for as long again:

    joint_D      the joint stage                          ume_D        UME-R1's rewards and settings, at our learning rate
    again_D      joint training for as long again         length_D     rl_con with a price per token
    rl_con_D     RL + InfoNCE, as recipes have it         adaptive_D   rl_con with gain over direct and a price per token
    rl_D         RL alone                                 rl_lm_D      rl_con with an LM loss as heavy as InfoNCE

D is the dose in per cent. Settings are frozen in scripts/rl_study.yaml. Tested on unspoiled queries: ``unseen``, trained questions by
drawings of training families that no question in training shows, and ``test``, the demo's. ``valid`` is there for choices.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ablate import default_launcher
from arms import Arm, Contrast, Study, flops_per_step, run_arm, steps_of, table

from data_prep.demo.spoil import write
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.options import parse_options

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "scripts/rl_study.yaml"
WEIGHTS = {"cold_start": (0.5, 0.4, 0.1), "joint": (0.6, 0.3, 0.1), "rl": (0.6, 0.3, 0.1)}
"""Of relations, text and naming."""
PLAN = {
    50: ("again", "rl_con", "rl", "ume", "rl_lm", "length", "adaptive"),
    0: ("again", "rl_con", "rl_lm"),
    25: ("again", "rl_con"),
}
"""Second halves by dose, the most telling dose first."""
LENGTH, ADAPTIVE = 0.1, 0.03
"""Nats that a token costs."""
SECOND = {
    "again": ("joint", ("joint.lr=3e-4", "joint.min_lr_ratio=0.1")),
    "rl_con": ("rl", ()),
    "rl": ("rl", ("rl.alpha_con=0", "rl.alpha_lm=0")),
    "ume": (
        "rl",
        (
            *("rl.alpha_con=0", "rl.alpha_lm=0", "rl.loss_type=grpo", "rl.beta=0.04", "rl.epsilon_high=0.28"),
            "rl.rewards=[{name: format}, {name: ume_r1}]",
        ),
    ),
    # The ratio of the joint stage, whose losses it then keeps.
    "rl_lm": ("rl", ("rl.alpha_lm=0.5",)),
    "length": ("rl", (f"rl.rewards=[{{name: margin}}, {{name: length, weight: {LENGTH}}}]",)),
    "adaptive": ("rl", (f"rl.rewards=[{{name: gain_over_direct}}, {{name: length, weight: {ADAPTIVE}}}]",)),
}
"""What follows the joint stage: its stage and its settings."""
SLICES = {
    "unseen drawings of training families": ("unseen", "", ""),
    "test families, seen pairs": ("test", "pair", "seen"),
    "test families, held-out pairs": ("test", "pair", "held_out"),
}


@dataclass
class Options:
    """What is run; without arms, everything."""

    out: Path = Path("runs/rl_study")
    """Folder of the study."""
    seeds: int = 3
    """Runs of every arm but the shared cold start."""
    doses: tuple[str, ...] = ("50", "0", "25")
    """Per cent of the oracles that are spoiled, in this order."""
    arms: tuple[str, ...] = ()
    """Only these, with what they start from."""
    collect: bool = False
    """Run nothing, write the tables from finished runs."""
    launcher: str = ""
    """What stands before rge/train.py; empty: accelerate as configured, or two processes where there is no GPU."""


def main(words: list[str]) -> None:
    """Run what is missing, then write the tables."""
    options = parse_options(Options, words, "python scripts/rl_study.py")
    os.chdir(ROOT)
    doses = [int(dose) for dose in options.doses]
    if unknown := [dose for dose in doses if dose not in PLAN]:
        raise UserError(f"doses are {', '.join(map(str, PLAN))} per cent; got {unknown[0]}")
    study = plan(options, doses)
    names = [arm.name for arm in study.arms if arm.query_mode]
    if unknown_arms := [name for name in options.arms if name not in names]:
        raise UserError(f"arms: no {unknown_arms[0]} among {', '.join(names)}")
    if not options.collect:
        run_all(study, options, doses)
    text, rows = report(study, doses)
    write_text(options.out / "table.md", text)
    write_text(options.out / "table.json", json.dumps(rows, indent=1))
    print(f"\n{text}")


def run_all(study: Study, options: Options, doses: list[int]) -> None:
    """Write the spoiled records, then train and evaluate, seed by seed."""
    for dose in doses:
        folder = options.out / f"data_{dose}"
        if not (folder / "unseen" / "meta.json").is_file():
            write(folder, dose / 100, seed=0)
    wanted = [arm for arm in study.arms if arm.query_mode and (not options.arms or arm.name in options.arms)]
    for seed in range(options.seeds):
        for arm in wanted:
            run_arm(study, arm, seed)


def plan(options: Options, doses: list[int]) -> Study:
    """All arms."""
    recipe, out = (f"recipe={RECIPE}",), options.out
    # Eyes and tokens are the same at every dose; the step of the cold start is there because a stage has to be named.
    eyes = ("cold_start.steps=1",)
    arms = [Arm("eyes", "cold_start", "", eyes, shared=True, query_mode="", ends_with="backbone")]
    for dose in doses:

        def data(stage: str, dose: int = dose) -> str:
            files = ("relations", "text", "naming")
            parts = [
                f"{{path: {out}/data_{dose}/train/{name}.jsonl, weight: {weight}}}"
                for name, weight in zip(files, WEIGHTS[stage], strict=True)
            ]
            return f"{stage}.sources=[{', '.join(parts)}]"

        cold, joint, again = f"cold_{dose}", f"joint_{dose}", f"again_{dose}"
        arms.append(Arm(cold, "cold_start", "eyes", (data("cold_start"),), shared=True, query_mode=""))
        arms.append(Arm(joint, "joint", cold, (data("joint"),)))
        for name in PLAN[dose]:
            stage, settings = SECOND[name]
            arms.append(
                Arm(
                    f"{name}_{dose}",
                    stage,
                    joint,
                    (data(stage), *settings),
                    flops_of="" if name == "again" else again,
                )
            )
    sets = {"unseen": out / f"data_{doses[0]}" / "unseen", "test": Path("data_prep/demo/data/test")}
    return Study(out, arms, recipe, sets, options.seeds, options.launcher or default_launcher())


def report(study: Study, doses: list[int]) -> tuple[str, list[dict]]:
    """Every arm, every question, and what each arm cost."""
    names = [arm.name for arm in study.arms if arm.query_mode]
    text, rows = "", []
    metrics = {
        "hit@1, %": "hit@1",
        "right rationale written, %": "right_rationale",
        "first hit right after a wrong rationale, % of all queries": "hit_after_wrong",
        "tokens a query, times 100": "rationale_tokens",
    }
    for title, metric in metrics.items():
        found, more = table(study, [Contrast(name, {name: 1.0}) for name in names], metric, SLICES)
        text += f"{title}\n\n{found}\n"
        rows += more
    for title, metric in (("hit@1", "hit@1"), ("right rationales written", "right_rationale")):
        found, more = table(study, questions(doses), metric, SLICES)
        text += f"Paired differences, points of {title}\n\n{found}\n"
        rows += more
    lines = ["| arm | steps | GFLOP a step at its start | TFLOP |", "|---|---|---|---|"]
    for arm in study.arms:
        if (study.folder(arm, 0) / "flops.json").is_file():
            steps, flops = steps_of(study, arm), flops_per_step(study, arm)
            lines.append(f"| {arm.name} | {steps} | {flops / 1e9:.1f} | {steps * flops / 1e12:.2f} |")
    return text + "Counted FLOPs, seed 0\n\n" + "\n".join(lines) + "\n", rows


def questions(doses: list[int]) -> list[Contrast]:
    """What the study asks, in the order of docs/rl.md."""
    found = []
    for dose in doses:
        arms = {name: f"{name}_{dose}" for name in ("joint", *PLAN[dose])}

        def less(a: str, b: str, arms: dict[str, str] = arms) -> None:
            if a in arms and b in arms:
                found.append(Contrast(f"{arms[a]} - {arms[b]}", {arms[a]: 1.0, arms[b]: -1.0}))

        for name in SECOND:
            less(name, "joint")
        for name in SECOND:
            if name != "again":
                less(name, "again")
        less("rl_con", "ume")
        less("rl_lm", "rl_con")
        less("length", "rl_con")
        less("adaptive", "rl_con")
        if dose and 0 in doses:
            found.append(
                Contrast(
                    f"cost of the spoiling: joint_{dose} - joint_0", {arms["joint"]: 1.0, "joint_0": -1.0}
                )
            )
            half = {arms["rl_con"]: 1.0, arms["joint"]: -0.5, "joint_0": -0.5}
            found.append(Contrast(f"rl_con_{dose} beyond half of the way back", half))
    return found


if __name__ == "__main__":
    start(main)
