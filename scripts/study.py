"""The paper's findings again, at small scale, by one command: training for docs/evidence.md.

    python scripts/study.py all                # every finding, seed by seed; resumes
    python scripts/study.py a seeds=5          # one of them
    python scripts/study.py all short=true     # one seed of what the first conclusions need
    python scripts/study.py all collect=true   # runs nothing, writes the page from finished runs

a  Table 4, whose rationale the contrastive loss should see, by how much the oracle's text gives away (`dose`)
b  Table 3, the ratio of the losses, on the demo
c  Tables 6 and 7, reasoning on and off at test, on queries, candidates and both
d  Fig. 4, what is learned from the oracle's text alone, by dose
e  how long a cold start, and greedy or sampled rollouts
f  one checkpoint in several modes (docs/modes.md), on the demo, with a cold start for each seed

a, c, d and e are trained on the study set (`data_prep.study`, made on the first call) by recipes/study.yaml, b and f on the demo
by recipes/demo.yaml. Every claim is a paired contrast of arms on the same queries of a test set that nothing was chosen on. Its verdict
follows from the 95 % interval: *found again* where it lies on the paper's side of zero, *the opposite* where it lies on the other,
*no difference seen* where it holds zero. ``page.md`` and ``page.json`` are written after every finding of a seed; ``collect=true`` writes them at any time.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ablate import default_launcher, run
from arms import Arm, Contrast, Study, measure, run_arm

from data_prep.study.build import build
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.options import parse_options
from rge.config import load_recipe
from rge.stats.intervals import in_words

ROOT = Path(__file__).resolve().parent.parent
DEMO_SET = Path("data_prep/demo/data/test")
ANCHORS = {
    "self": (),
    "oracle": ("loss.anchor=oracle",),
    # Its own learning rate, chosen for the demo on training families, so that it is given a fair chance.
    "none": ("loss.anchor=none", "loss.ratio=none", "joint.lr=2e-3"),
}
RATIOS = ("1:1", "100:1", "20:1", "10:1", "1:10", "1:20", "1:100", "none")
LENGTHS = {"quarter": 0.25, "double": 2.0, "fourfold": 4.0}
"""Further cold starts, as multiples of the recipe's steps."""
MIXED = {"half": "half oracle, half self", "falling": "from oracle to self"}
MODES = {
    "no reasoning": ("direct", "direct"),
    "candidates only": ("direct", "reasoning"),
    "both sides": ("reasoning", "reasoning"),
}
"""How a checkpoint is asked besides reasoning on queries: modes of queries and of candidates."""
METRIC = "hit@1"


@dataclass
class Options:
    """What is run; nothing that is finished is run again."""

    out: Path = Path("runs/study")
    """Folder of the study; the study set is made in its folder data."""
    seeds: int = 3
    """Joint stages an arm, seeds 0, 1, ...; cold starts are shared."""
    doses: tuple[float, ...] = (1.0, 0.0, 0.5)
    """Shares of oracle texts that name what only the target shows, in this order."""
    short: bool = False
    """One seed, doses 1 and 0, findings a, c and d only, and no mixes."""
    collect: bool = False
    """Run nothing, write the page from finished runs."""
    steps: int | None = None
    """Steps of every stage instead of the recipes' own, to try the machinery; such figures mean nothing."""
    launcher: str = ""
    """What stands before rge/train.py; empty: accelerate as configured, or two processes where there is no GPU."""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, as a contrast of arms.

    Attributes:
        says: what is compared.
        paper: the paper's figure, or what it says.
        contrast: ours.
        sign: +1 or -1: on which side of zero the paper is; 0: a figure without a verdict, such as a control.
    """

    says: str
    paper: str
    contrast: Contrast
    sign: int


@dataclass(frozen=True)
class Finding:
    """A table of the paper.

    Attributes:
        letter: what the command calls it.
        title: for the page.
        study: where its arms are trained.
        arms: that it needs, in the order of their importance.
        claims: what is asked of them.
        diagnoses: (name, words of ``python -m rge.diagnose``, arm whose checkpoint is diagnosed), for what no contrast says.
    """

    letter: str
    title: str
    study: Study
    arms: Sequence[str]
    claims: Sequence[Claim]
    diagnoses: Sequence[tuple[str, tuple[str, ...], str]] = ()


@dataclass(frozen=True)
class Row:
    """A line of the page: the paper's figure, ours, and what follows."""

    says: str
    paper: str
    ours: str
    verdict: str
    seeds: int
    figure: dict[str, Any] | None = None


def main(words: list[str]) -> None:
    """Run what is missing, then write the page."""
    chosen = [word for word in words if "=" not in word and not word.startswith("-")]
    options = read_options([word for word in words if word not in chosen])
    os.chdir(ROOT)
    findings = plan(options)
    wanted = choose(findings, chosen, options.short)
    if not options.collect:
        if not (data := options.out / "data").exists() and any(one.letter != "b" for one in wanted):
            build(data, sorted({0.0, 0.5, 1.0, *options.doses}))
        for seed in range(options.seeds):
            for finding in wanted:
                run_finding(finding, seed)
                write_page(options, findings)
    print(write_page(options, findings))


def read_options(words: list[str]) -> Options:
    """The options, checked; ``short`` sets seeds and doses."""
    options = parse_options(Options, words, "python scripts/study.py")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "start scripts/study.py with python, not with a launcher: put it into launcher='accelerate launch ...'"
        )
    if options.seeds < 1:
        raise UserError(f"seeds must be at least 1, got {options.seeds}")
    return replace(options, seeds=1, doses=(1.0, 0.0)) if options.short else options


def choose(findings: dict[str, Finding], chosen: list[str], short: bool) -> list[Finding]:
    """The findings that the command names."""
    if not chosen:
        raise UserError(f"say which finding: {', '.join(findings)}, or all")
    if unknown := [word for word in chosen if word not in ("all", *findings)]:
        raise UserError(f"there is no finding {unknown[0]!r}: {', '.join(findings)}, or all")
    letters = ("acd" if short else "".join(findings)) if "all" in chosen else chosen
    return [findings[letter] for letter in letters]


def run_finding(finding: Finding, seed: int) -> None:
    """Train, evaluate and diagnose what a finding needs, as far as it is not there."""
    for name in finding.arms:
        run_arm(finding.study, finding.study.by_name[name], seed)
    if seed:
        return
    for name, words, arm in finding.diagnoses:
        out = finding.study.out / "diagnoses" / name
        if not (out / f"{words[0]}.json").is_file():
            checkpoint = finding.study.checkpoint(finding.study.by_name[arm], 0)
            run([sys.executable, "-m", "rge.diagnose", *words, f"checkpoint={checkpoint}", f"out={out}"])


# --- what is asked


def plan(options: Options) -> dict[str, Finding]:
    """All findings by their letters."""
    ours, demo = study_arms(options), demo_arms(options)
    found = [
        table_4(options, ours),
        table_3(options, demo),
        tables_6_and_7(ours),
        figure_4(options, ours),
        cold_starts(ours),
        modes(options),
    ]
    return {finding.letter: finding for finding in found}


def study_arms(options: Options) -> Study:
    """Everything that is trained on the study set."""
    out = options.out

    def at(dose: float, stage: str) -> str:
        return f"{stage}.sources=[{{path: {out}/data/train/dose_{dose:g}.jsonl}}]"

    own_steps = load_recipe(["recipe=study"]).cold_start.steps or 0

    def cold(name: str, dose: float, multiple: float = 1.0) -> Arm:
        steps = None if multiple == 1 else round(multiple * own_steps)
        words = (at(dose, "cold_start"), *length("cold_start", options, steps))
        return Arm(name, "cold_start", "eyes", words, shared=True, query_mode="")

    mixes = {
        "half": ("loss.anchor=mix",),
        "falling": (
            "loss.anchor=mix",
            "loss.oracle_share=1",
            f"loss.oracle_decay_steps={joint_steps(options)}",
        ),
    }
    naming = () if options.steps is None else (f"model.scratch.naming_steps={options.steps}",)
    eyes = (
        "cold_start.steps=1",
        # The tokenizer is learned from the records of both stages.
        at(1.0, "cold_start"),
        at(1.0, "joint"),
        f"model.scratch.naming={out}/data/train/naming.jsonl",
        *naming,
    )
    arms = [Arm("eyes", "cold_start", overrides=eyes, shared=True, query_mode="", ends_with="backbone")]
    joint = length("joint", options)
    for dose in sorted({0.0, 1.0, *options.doses}):
        arms.append(cold(f"cold_{dose:g}", dose))
        for anchor, settings in ANCHORS.items():
            mode = "direct" if anchor == "none" else "reasoning"
            words = (at(dose, "joint"), *joint, *settings)
            arms.append(Arm(f"{anchor}_{dose:g}", "joint", f"cold_{dose:g}", words, query_mode=mode))
        for mix, settings in mixes.items():
            arms.append(
                Arm(f"{mix}_{dose:g}", "joint", f"cold_{dose:g}", (at(dose, "joint"), *joint, *settings))
            )
    for mode, (query, candidate) in MODES.items():
        ask = (f"candidate_mode={candidate}",)
        arms.append(Arm(f"self_1, {mode}", "", "self_1", query_mode=query, ask=ask))
    arms.append(Arm("none_1, reasoning", "", "none_1", query_mode="reasoning"))
    both = ("rollout.direct_share=0.5",)
    arms.append(Arm("half_direct", "joint", "cold_1", (at(1.0, "joint"), *joint, *both)))
    arms.append(Arm("half_direct, no reasoning", "", "half_direct", query_mode="direct"))
    for name, multiple in LENGTHS.items():
        arms.append(cold(f"cold_{name}", 1.0, multiple))
        arms.append(Arm(f"self_{name}", "joint", f"cold_{name}", (at(1.0, "joint"), *joint)))
    sampled = ("rollout.temperature=1.0",)
    arms.append(Arm("sampled", "joint", "cold_1", (at(1.0, "joint"), *joint, *sampled)))
    sets = {"test": out / "data" / "test"}
    return Study(out, arms, ("recipe=study",), sets, options.seeds, options.launcher or default_launcher())


def demo_arms(options: Options) -> Study:
    """The ratios of the losses, on the demo."""
    quick = () if options.steps is None else (f"model.scratch.naming_steps={options.steps}",)
    arms = [
        Arm("cold", "cold_start", "", (*length("cold_start", options), *quick), shared=True, query_mode="")
    ]
    for ratio in RATIOS:
        # As in the paper, an arm without LM loss has no rationale either.
        words = (
            *(ANCHORS["none"] if ratio == "none" else (f"loss.ratio={ratio}",)),
            *length("joint", options),
        )
        mode = "direct" if ratio == "none" else "reasoning"
        arms.append(Arm(ratio.replace(":", "_"), "joint", "cold", words, query_mode=mode))
    launcher = options.launcher or default_launcher()
    return Study(options.out / "demo", arms, ("recipe=demo",), {"test": DEMO_SET}, options.seeds, launcher)


def joint_steps(options: Options) -> int:
    """Steps of the study's joint stages."""
    return options.steps or load_recipe(["recipe=study"]).joint.steps or 0


def length(stage: str, options: Options, steps: int | None = None) -> tuple[str, ...]:
    """The override that gives a stage its steps, where the recipe does not."""
    steps = options.steps if options.steps is not None else steps
    return () if steps is None else (f"{stage}.steps={steps}",)


def less(a: str, b: str) -> Contrast:
    """One arm minus another."""
    return Contrast(f"{a} - {b}", {a: 1.0, b: -1.0})


def alone(name: str) -> Contrast:
    """An arm's own figure."""
    return Contrast(name, {name: 1.0})


def table_4(options: Options, study: Study) -> Finding:
    """Which query state the contrastive loss should see."""
    claims = []
    # What the paper is about first, on both sides; then its baseline.
    arms = [f"{anchor}_{dose:g}" for dose in options.doses for anchor in ("self", "oracle")]
    others = ("none",) if options.short else ("none", *MIXED)
    arms += [f"{anchor}_{dose:g}" for anchor in others for dose in options.doses]
    for dose in options.doses:
        names = {anchor: f"{anchor}_{dose:g}" for anchor in ANCHORS}
        paper = (
            {"self": "67.4", "oracle": "60.4", "none": "63.7"} if dose == 1 else dict.fromkeys(ANCHORS, "")
        )
        claims += [
            Claim(f"dose {dose:g}: {anchor}", paper[anchor], alone(name), 0) for anchor, name in names.items()
        ]
        over = less(names["self"], names["oracle"])
        claims.append(
            Claim(
                f"dose {dose:g}: self over oracle",
                "+7.0" if dose == 1 else "(control)" if dose == 0 else "",
                over,
                int(dose == 1),
            )
        )
        for mix, says in MIXED.items():
            over = less(f"{mix}_{dose:g}", names["self"])
            claims.append(Claim(f"dose {dose:g}: {says}, over self", "(not asked)", over, 0))
        over = less(names["self"], names["none"])
        claims.append(
            Claim(f"dose {dose:g}: self over none", "+3.7" if dose == 1 else "", over, int(dose == 1))
        )
    if {0.0, 1.0} <= set(options.doses):
        change = {"self_1": 1.0, "oracle_1": -1.0, "self_0": -1.0, "oracle_0": 1.0}
        claims.append(
            Claim(
                "self over oracle, dose 1 more than dose 0",
                "(not asked)",
                Contrast("change with the dose", change),
                1,
            )
        )
    return Finding("a", "Table 4: whose rationale the contrastive loss sees", study, arms, claims)


def table_3(options: Options, study: Study) -> Finding:
    """The ratio of LM to contrastive loss."""
    paper = {
        "100:1": 53.1,
        "20:1": 60.8,
        "10:1": 62.7,
        "1:1": 66.2,
        "1:10": 67.4,
        "1:20": 67.0,
        "1:100": 67.2,
        "none": 63.7,
    }
    names = {ratio: ratio.replace(":", "_") for ratio in RATIOS}
    claims = [Claim(f"{ratio}", f"{paper[ratio]}", alone(name), 0) for ratio, name in names.items()]
    for ratio in ("100:1", "10:1", "1:100", "none"):
        difference = paper["1:10"] - paper[ratio]
        claims.append(Claim(f"1:10 over {ratio}", f"{difference:+.1f}", less("1_10", names[ratio]), 1))
    return Finding("b", "Table 3: LM to contrastive loss", study, list(names.values()), claims)


def tables_6_and_7(study: Study) -> Finding:
    """Reasoning at test."""
    off = "self_1, no reasoning"
    claims = [
        Claim("reasoning on queries, at test", "67.4", alone("self_1"), 0),
        Claim("no reasoning at test, same checkpoint", "65.7", alone(off), 0),
        Claim("reasoning at test over none, same checkpoint", "+1.7", less("self_1", off), 1),
        Claim("no reasoning at test over trained without", "+2.0", less(off, "none_1"), 1),
        Claim(
            "trained without, asked with reasoning, over without",
            "(not asked)",
            less("none_1, reasoning", "none_1"),
            0,
        ),
        Claim("on both sides over queries only", "mixed", less("self_1, both sides", "self_1"), 0),
        Claim("on candidates only over queries only", "mixed", less("self_1, candidates only", "self_1"), 0),
        Claim(
            "half of the queries direct in training, no reasoning at test, over trained without",
            "(not asked)",
            less("half_direct, no reasoning", "none_1"),
            0,
        ),
        Claim(
            "half of the queries direct in training, reasoning at test, over none direct",
            "(not asked)",
            less("half_direct", "self_1"),
            0,
        ),
    ]
    arms = [
        "self_1",
        "none_1",
        *(f"self_1, {mode}" for mode in MODES),
        "none_1, reasoning",
        "half_direct",
        "half_direct, no reasoning",
    ]
    return Finding("c", "Tables 6 and 7: reasoning on and off at test", study, arms, claims)


def figure_4(options: Options, study: Study) -> Finding:
    """What the oracle's text alone teaches."""
    diagnoses = []
    quick = (
        ("steps=60", "batch_size=32")
        if options.steps is None
        else (f"steps={options.steps}", "batch_size=32")
    )
    for dose in options.doses:
        data = f"data={options.out}/data/train/dose_{dose:g}.jsonl"
        diagnoses.append((f"leakage_{dose:g}", ("leakage", data, *quick), f"cold_{dose:g}"))
        for anchor in ("oracle", "self"):
            words = ("sensitivity", data, "limit=400")
            diagnoses.append((f"sensitivity_{anchor}_{dose:g}", words, f"{anchor}_{dose:g}"))
    arms = [f"{anchor}_{dose:g}" for dose in options.doses for anchor in ("oracle", "self")]
    return Finding("d", "Fig. 4: what is learned from the oracle's text alone", study, arms, [], diagnoses)


def cold_starts(study: Study) -> Finding:
    """How well the model has to write before it embeds."""
    claims = [
        Claim(f"cold start {name}, over the recipe's", "(not asked)", less(f"self_{name}", "self_1"), 0)
        for name in LENGTHS
    ]
    claims.append(
        Claim("sampled rollouts at temperature 1, over greedy", "(not asked)", less("sampled", "self_1"), 0)
    )
    return Finding(
        "e",
        "Cold start and rollouts",
        study,
        ["self_1", *(f"self_{name}" for name in LENGTHS), "sampled"],
        claims,
    )


STATES = {
    "both": ("loss.states.direct=1",),
    "adaptive": (
        "loss.states.direct=1",
        "loss.adaptive.share=0.5",
        "loss.adaptive.margin=0.05",
        "loss.adaptive.warmup_steps=60",
    ),
    "latent": ("model.think_tokens=4", "loss.states={direct: 1, latent: 1}", "loss.think_lm=0.5"),
    "silent": (
        "model.think_tokens=4",
        "loss.anchor=latent",
        "loss.states.direct=1",
        "loss.think_lm=1",
        "joint.lr=2e-3",
    ),
}
"""What trains several states at once."""


def modes(options: Options) -> Finding:
    """One checkpoint asked in several ways, against checkpoints trained for one."""
    asked = {
        "words": ("reasoning", "direct"),
        "both": ("reasoning", "direct"),
        "adaptive": ("reasoning", "direct", "auto"),
        "latent": ("reasoning", "direct", "latent"),
        "silent": ("latent", "direct"),
        "none": ("direct",),
    }
    cold = ("init=rge/demo_base", *length("cold_start", options))
    arms = [Arm("cold", "cold_start", "", cold, query_mode="")]
    settings = STATES | {"words": (), "none": ANCHORS["none"]}
    for name, (first, *others) in asked.items():
        words = (*settings[name], *length("joint", options))
        arms.append(Arm(name, "joint", "cold", words, query_mode=first))
        arms += [Arm(f"{name}, {mode}", "", name, query_mode=mode) for mode in others]
    pairs = [
        ("both", "words"),
        ("both, direct", "none"),
        ("adaptive", "words"),
        ("adaptive, direct", "none"),
        ("adaptive, auto", "adaptive"),
        ("latent", "words"),
        ("latent, direct", "none"),
        ("latent, latent", "latent, direct"),
        ("latent, latent", "latent"),
        ("silent", "none"),
        ("silent", "silent, direct"),
        ("silent, direct", "none"),
    ]
    names = [arm.name for arm in arms[1:]]
    claims = [Claim(name, "", alone(name), 0) for name in names]
    claims += [Claim(f"{a} over {b}", "", less(a, b), 0) for a, b in pairs]
    launcher = options.launcher or default_launcher()
    study = Study(options.out / "modes", arms, ("recipe=demo",), {"test": DEMO_SET}, options.seeds, launcher)
    return Finding("f", "One checkpoint in several modes", study, names, claims)


# --- what came out


def rows_of(finding: Finding) -> list[Row]:
    """Every claim with its figures, and the diagnoses."""
    rows = []
    for claim in finding.claims:
        found = measure(finding.study, claim.contrast, "test", METRIC)
        if found is None:
            rows.append(Row(claim.says, claim.paper, "", "not run yet", 0))
            continue
        sign = "+" if abs(sum(claim.contrast.weights.values())) < 1e-9 else ""
        ours = f"{100 * found['mean']:{sign}.1f} {in_words(found['low'], found['high'])}"
        rows.append(
            Row(claim.says, claim.paper, ours, verdict(found, claim.sign), len(found["seeds"]), found)
        )
    for name, words, _ in finding.diagnoses:
        place = finding.study.out / "diagnoses" / name / f"{words[0]}.json"
        found = json.loads(place.read_text()) if place.is_file() else None
        rows += (leakage_rows if words[0] == "leakage" else sensitivity_rows)(name, found)
    return rows


def verdict(found: dict[str, Any], sign: int) -> str:
    """What a difference says about the paper's; nothing, where it is asked for none."""
    if not sign:
        return ""
    if found["low"] is None or found["low"] <= 0 <= found["high"]:
        return "no difference seen"
    return "found again" if (found["mean"] > 0) == (sign > 0) else "the opposite"


def leakage_rows(name: str, found: dict[str, Any] | None) -> list[Row]:
    """How much is learned after wrong queries, from the oracle's text and from the model's own."""
    dose = name.partition("_")[2]
    says = (
        f"dose {dose}: nats below chance, right triplets; wrong query, oracle's text; wrong query, own text"
    )
    if found is None:
        return [Row(says, "falls, does not", "", "not run yet", 0)]
    right, oracle, own = (found["gain"][kind] for kind in ("right", "wrong query", "own rationale"))
    again = oracle > 0.5 * right and own < 0.1 * right
    return [
        Row(
            says,
            "falls, does not",
            f"{right:.2f}; {oracle:.2f}; {own:.2f}",
            "found again" if again else "not found",
            1,
            found,
        )
    ]


def sensitivity_rows(name: str, found: dict[str, Any] | None) -> list[Row]:
    """How a checkpoint reads texts that are not its own."""
    _, anchor, dose = name.split("_")
    says = f"dose {dose}, trained on {anchor}: hit@1 after own text; oracle's; another query's oracle's"
    if found is None:
        return [Row(says, "(not asked)", "", "not run yet", 0)]
    cells = [found["conditions"][kind]["hit@1"] for kind in ("own", "oracle", "oracle, swapped")]
    ours = "; ".join(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for mean, low, high in cells)
    return [Row(says, "(not asked)", ours, "", 1, found)]


def write_page(options: Options, findings: dict[str, Finding]) -> str:
    """``page.md`` and ``page.json``: every finding with its figures."""
    lines, data = [], {}
    for finding in findings.values():
        rows = rows_of(finding)
        data[finding.letter] = [vars(row) for row in rows]
        command = f"python scripts/study.py {finding.letter}"
        lines += [
            f"## {finding.title}",
            "",
            f"`{command}`",
            "",
            "| | paper | ours | verdict | seeds |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row.says} | {row.paper} | {row.ours} | {row.verdict} | {row.seeds or ''} |" for row in rows
        ]
        lines.append("")
    text = "\n".join(lines)
    if options.steps is not None:
        text = f"Every stage had {options.steps} steps: a trial of the machinery, no figures.\n\n{text}"
    write_text(options.out / "page.md", text)
    write_text(options.out / "page.json", json.dumps(data, indent=1))
    return text


if __name__ == "__main__":
    start(main)
