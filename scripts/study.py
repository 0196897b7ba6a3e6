"""Reproduce the paper's findings at small scale, and test reinforcement learning: docs/evidence.md, demo.md, modes.md and rl.md.

    python scripts/study.py a                  # one finding, seed by seed; resumes; started twice, makes two runs at a time
    python scripts/study.py all seeds=5        # every finding
    python scripts/study.py a on=valid seeds=1 # a pilot on validation queries, for making choices
    python scripts/study.py all collect=true   # no training: all tables again, from finished runs and docs/kept

findings.yaml declares arms and contrasts; scripts/arms.py trains, evaluates and compares them. A claim is a paired contrast
on the same test queries, which no choice was based on, with a 95 % interval over seeds and groups of queries together. The verdict is
*confirmed* if the interval is on the paper's side of zero, *contradicted* if it is on the other side, and *undecided* if it contains
zero. Tables are written to ``page_NAME.md`` in the study's folder, per-query results to ``kept.json``.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import unseen
from arms import (
    DEMO_SET,
    DIAGNOSES,
    ROOT,
    TRAINED,
    Arm,
    Results,
    Row,
    Slice,
    Study,
    Table,
    flops_per_step,
    held,
    in_table,
    markdown,
    mean_over_seeds,
    percent,
    refuse_launcher,
    rows_of,
    run,
    run_all,
    steps_of,
    too_narrow,
)
from demo import judge_words

from data_prep.demo import spoil
from data_prep.demo.build import write_mixed, write_paraphrased, write_rotated
from data_prep.demo.tables import read_tables
from data_prep.study import design
from data_prep.study.build import build
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import write_json, write_text
from rge.common.options import HELP, one_of, parse_options, read_yaml
from rge.config import AtLeastOne, load_recipe
from rge.stats.intervals import index_of
from rge.towers import smollm2

DATA = read_yaml(ROOT / "scripts" / "findings.yaml")
TITLES: dict[str, str] = DATA["titles"]
SLICES = {
    group: {title: Slice(**where) for title, where in found.items()}
    for group, found in DATA["slices"].items()
}


@dataclass
class Options:
    """What to run; finished runs are skipped."""

    out: Path = Path("runs/study")
    """Folder of the studies; the study set is written to its folder data."""
    seeds: AtLeastOne = 3
    """Runs per arm, seeds 0, 1, ...; all seeds share a cold start, except in findings from the demo's shipped base."""
    arms: tuple[str, ...] = ()
    """Only these arms, with the arms that they start from, in all their query modes; empty: all."""
    on: Literal["test", "valid"] = "test"
    """Queries to evaluate on: test for results, valid for choices."""
    collect: bool = False
    """Train nothing; write the tables from finished and kept runs."""
    kept: Path = Path("docs/kept")
    """Folder of kept results, one file per study."""
    steps: int | None = None
    """Steps of every stage instead of the recipes', for a trial run; the results mean nothing."""
    launcher: str = ""
    """Command before rge/train.py; empty: accelerate as configured, or two processes if there is no GPU."""


@dataclass(frozen=True)
class Finding:
    """One finding: its arms and its page."""

    study: Study
    arms: Sequence[str]  # that it needs, the most telling first
    tables: Sequence[Table]
    # by name: arguments of ``python -m rge.diagnose``, and the diagnosed arm
    diagnoses: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    # by path: what makes it if it is missing, or says what is not installed
    needs: Mapping[Path, Callable[[], object]] = field(default_factory=dict)
    extra: Callable[[Results], list[str]] = lambda results: []  # further lines of the page


def main(words: list[str]) -> None:
    """Make the missing runs, then write the tables."""
    if any(word in HELP for word in words):
        print("findings:\n" + "\n".join(f"  {name:10} {title}" for name, title in TITLES.items()) + "\n")
    given = [word for word in words if "=" in word or word in HELP]
    options = parse_options(Options, given, f"python scripts/study.py {'|'.join(TITLES)}|all")
    refuse_launcher("scripts/study.py")
    names = [word for word in words if word not in given]
    one_of("finding", names, [*TITLES, "all"])
    if "all" in names:
        names = [*TITLES]
    os.chdir(ROOT)
    findings = {name: DECLARED[name](options) for name in names}
    if options.arms:
        one_of("arms", options.arms, sorted({arm for finding in findings.values() for arm in finding.arms}))
    if not options.collect:
        train(findings, options)
    print("\n".join(write_page(name, finding, options) for name, finding in findings.items()))


def train(findings: Mapping[str, Finding], options: Options) -> None:
    """Make the missing runs, seed by seed, and last those that another process is making."""
    for finding in findings.values():
        for path, make in finding.needs.items():
            with held(finding.study.out, wait=True):  # a second process must not build at the same time
                if not path.exists():
                    make()
    for seed in range(options.seeds):
        for name, finding in findings.items():
            run_all(finding.study, runs_of(finding, options, [seed]), wait=False)
            write_page(name, finding, options)
    for name, finding in findings.items():
        run_all(finding.study, runs_of(finding, options, range(options.seeds)))
        diagnose(finding, options.arms)
        write_page(name, finding, options)


def runs_of(finding: Finding, options: Options, seeds: Iterable[int]) -> list[tuple[Arm, int]]:
    """Wanted runs of a finding, seed by seed."""
    arms = [finding.study.by_name[name] for name in finding.arms]
    return [(arm, seed) for seed in seeds for arm in arms if is_wanted(arm, options.arms)]


def is_wanted(arm: Arm, only: Sequence[str]) -> bool:
    """Whether ``only`` is empty or names the arm, or the arm whose checkpoint it evaluates in another mode."""
    return not only or arm.name in only or (not arm.stage and arm.after in only)


def diagnose(finding: Finding, only: Sequence[str]) -> None:
    """Diagnose seed 0 of the arms in ``only``, or of all arms if it is empty."""
    for name, (words, arm) in finding.diagnoses.items():
        if only and arm not in only:
            continue
        study, out = finding.study, finding.study.out / DIAGNOSES / name
        if not (out / f"{words[0]}.json").is_file():
            checkpoint = study.checkpoint(study.by_name[arm], 0)
            run([sys.executable, "-m", "rge.diagnose", *words, f"checkpoint={checkpoint}", f"out={out}"])


@dataclass
class Declared:
    """An arm in findings.yaml."""

    settings: Sequence[str] = ()
    modes: Sequence[str] = (TRAINED,)
    after: str = ""
    stage: str = ""


def declared(group: str, after: str, first: Sequence[str] = (), **settings: Any) -> list[Arm]:
    """Joint stages of a group of findings.yaml, each with the evaluations of its checkpoint in other modes."""
    arms = []
    for name, content in DATA[group].items():
        about = Declared(**content)
        mode, *others = about.modes
        words = (*first, *about.settings)
        arms.append(Arm(name, "joint", about.after or after, words, query_mode=mode, **settings))
        arms += [Arm(f"{name}, {other}", "", name, query_mode=other, **settings) for other in others]
    return arms


# --- the study set: eyes, a, d, i

ANCHORS: dict[str, list[str]] = DATA["anchors"]
DOSES = (1, 3, 10, 30, 100)
"""Number of values that the serial can take."""
VARIANTS = (
    "hidden_100",
    "known_100",
    "silent_100",
    *(f"{arm}_{dose}" for dose in DOSES[:-1] for arm in ("hidden", "known")),
)
LENGTHS = {"short": 0.5, "long": 2.0, "longest": 4.0}
"""Multiples of the joint stage's steps: does the harm shrink?"""
LINKS = {
    "thing": "The first hit shows the right thing, %",
    "ground": "The first hit has the query's ground, % (chance: 16.7)",
    "serial": "The first hit bears the serial that was written, %",
}
WARM_STEPS = 300
"""InfoNCE without rationales before any cold start, on targets of any ground: stands for pretraining."""


def sources_word(stage: str, weights: Mapping[Path, float]) -> str:
    """The override of a stage's sources: files of records with their weights."""
    parts = [f"{{path: {path}, weight: {weight}}}" for path, weight in weights.items()]
    return f"{stage}.sources=[{', '.join(parts)}]"


def study_set(options: Options) -> Study:
    """All arms on the study set."""
    data, recipe = options.out / "data", load_recipe(["recipe=study"])

    def records(stage: str, variant: str) -> str:
        file = f"{variant}_cold" if stage == "cold_start" else variant
        return f"{stage}.sources=[{{path: {data}/train/{file}.jsonl}}]"

    def cold(variant: str) -> Arm:
        words = (records("cold_start", variant),)
        return Arm(f"cold_{variant}", "cold_start", "warm", words, shared=True, query_mode="")

    def joint(name: str, variant: str, *settings: str, multiple: float = 1.0) -> Arm:
        steps = f"joint.steps={round(multiple * (recipe.joint.steps or 0))}"
        words = (records("joint", variant), steps, *settings)
        return Arm(name, "joint", f"cold_{variant}", words, sets=sets(variant))

    def sets(variant: str) -> dict[str, Path]:
        return {options.on: data / options.on / variant.replace("silent", "hidden")}

    # The tokenizer is learned from the records of both stages. One step, since some stage must be named.
    first = (
        "cold_start.steps=1", records("cold_start", "hidden_100"), records("joint", "hidden_100"),
        f"model.scratch.naming={data}/train/naming.jsonl",
    )  # fmt: skip
    warm = (
        f"joint.sources=[{{path: {data}/train/warm.jsonl}}]",
        f"joint.steps={WARM_STEPS}",
        *ANCHORS["none"],
    )
    arms = [
        Arm("eyes", "cold_start", overrides=first, shared=True, query_mode="", ends_with="backbone"),
        Arm("warm", "joint", "eyes", warm, shared=True, sets=sets("hidden_100")),
    ]
    for variant in VARIANTS:
        arms.append(cold(variant))
        arms += [joint(f"{anchor}_{variant}", variant, *words) for anchor, words in ANCHORS.items()]
    for length, times in LENGTHS.items():
        for anchor, words in ANCHORS.items():
            arms.append(joint(f"{anchor}_{length}", "hidden_100", *words, multiple=times))
    plain = (records("joint", "hidden_100"), f"joint.steps={recipe.joint.steps}")
    arms += declared("study", "cold_hidden_100", plain, sets=sets("hidden_100"))
    return Study(
        options.out, arms, ("recipe=study",), {}, options.seeds, options.launcher,
        metrics=("hit@1", "thing", "ground", "serial"), columns=("fact",), steps=options.steps, derive=hit_figures,
    )  # fmt: skip


def hit_figures(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Whether the first hit shows the right thing, the query's ground, and the serial that was written."""
    corpus = pd.read_parquet(
        path / "corpus.parquet", columns=["id", "concept", "ground", "serial"]
    ).set_index("id")
    asked = pd.read_parquet(path / "queries.parquet", columns=["id", "answer", "ground"]).set_index("id")
    hits = corpus.loc[[top[0] for top in frame["top10"]]].reset_index(drop=True)
    asked = asked.loc[frame["query_id"]].reset_index(drop=True)
    written = frame["rationale"].fillna("").str.extract(r"serial is (\w\d)\.", expand=False)
    return frame.assign(
        thing=(hits["concept"] == asked["answer"]).astype(float),
        ground=(hits["ground"] == asked["ground"]).astype(float),
        serial=(hits["serial"] == written).astype(float),
    )


def on_study_set(options: Options, arms: Sequence[str], tables: Sequence[Table], **more: Any) -> Finding:
    """A finding on the study set, which is built on first use."""
    data = options.out / "data"
    return Finding(study_set(options), arms, tables, needs={data: partial(build, data, DOSES)}, **more)


def eyes(options: Options) -> Finding:
    """Does the vision tower read things, grounds and serials? The study set's first link; no training beyond the tower's."""
    backbone, place = options.out / "eyes" / "shared" / "backbone", options.out / DIAGNOSES / "eyes"

    def reading(results: Results) -> list[str]:
        kept, report = results.kept["diagnoses"], place / "reading.json"
        # A kept reading may be of another study's tower.
        if not report.is_file() and backbone.is_dir() and not options.collect:
            kept["eyes"] = read_pictures(backbone, options.out / "data" / "valid" / "hidden_100")
            write_json(report, kept["eyes"])
        if (found := kept.get("eyes")) is None:
            return ["Not run yet."]
        rows = [(name, str(number), f"{100 * share:.1f}") for name, (number, share) in found.items()]
        return markdown(["of validation pictures", "values", "read right, %"], rows)

    return on_study_set(options, ["eyes"], [], extra=reading)


def read_pictures(backbone: Path, path: Path) -> dict[str, tuple[int, float]]:
    """Number of values of things, grounds and serials in pictures, and the share that a tower names right."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from rge.common.images import load_image
    from rge.model import vision_tower
    from rge.scratch.pretrain_vision import named

    concepts = read_tables().concepts
    rows = pd.read_parquet(path / "corpus.parquet")
    pictures = np.stack([np.asarray(load_image(cell["bytes"])) for cell in rows["image"]])
    picture_N3HW = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    model: Any
    model, processor = (
        kind.from_pretrained(backbone) for kind in (AutoModelForImageTextToText, AutoProcessor)
    )
    vision_tower.speed_up(model)
    found = {}
    # A name's score is a sum over its tokens, so each part of a picture's name can be scored alone.
    for name, texts in {
        "thing": [concepts[key].sentence for key in rows["concept"]],
        "ground": [f" {ground}" for ground in rows["ground"]],
        "serial": [f" {serial}" for serial in rows["serial"]],
    }.items():
        names, labels = np.unique(texts, return_inverse=True)
        chosen = named(model.eval(), processor, picture_N3HW, torch.from_numpy(labels), names.tolist())
        found[name] = (len(names), float(chosen.float().mean()))
    return found


def table_4(options: Options) -> Finding:
    """Anchors by what the oracle's text tells, then the doses of that, then lengths."""
    shown = [f"{anchor}_{variant}" for variant in VARIANTS[:3] for anchor in ANCHORS]
    text = DATA["rows"]["a"]
    # The slope of a line through the doses, by the logarithm of their values.
    place = np.log10(DOSES) - np.log10(DOSES).mean()
    for arm, side in (("hidden", "+"), ("known", "")):
        text += "".join(f"{dose} values, {arm} = self_{arm}_{dose} - oracle_{arm}_{dose}\n" for dose in DOSES)
        terms = zip(DOSES, place / (place**2).sum(), strict=True)
        total = " + ".join(f"{w}*self_{arm}_{dose} - {w}*oracle_{arm}_{dose}" for dose, w in terms)
        text += f"points for ten times as many values, {arm} = {total} | | {side}\n"
    for length, times in LENGTHS.items():
        text += f"{times:g} times the steps = self_{length} - oracle_{length}\n"
    tables = [Table("hit@1, % and points", rows_of(text), SLICES["study"])]
    all_queries = {"all": Slice()}
    tables += [
        Table(title, rows_of("\n".join(shown)), all_queries, metric) for metric, title in LINKS.items()
    ]
    arms = [*shown, *(f"{anchor}_{variant}" for variant in VARIANTS[3:] for anchor in ("self", "oracle"))]
    arms += [f"{anchor}_{length}" for length in LENGTHS for anchor in ANCHORS]
    return on_study_set(options, arms, tables)


def study_modes(options: Options) -> Finding:
    """One checkpoint in several modes, on the study set."""
    rows = rows_of(DATA["rows"]["i"])
    return on_study_set(options, arms_in(rows), [Table("hit@1, % and points", rows, SLICES["study"])])


def arms_in(rows: Iterable[Row]) -> list[str]:
    """Arms of the rows of a table."""
    return list(dict.fromkeys(name for row in rows for name in row.weights))


def figure_4(options: Options) -> Finding:
    """Fig. 4: what is learned from the oracle's text alone (study set)."""
    diagnoses, arms = dict[str, tuple[tuple[str, ...], str]](), list[str]()
    for variant in VARIANTS[:3]:
        data = f"data={options.out}/data/train/{variant}.jsonl"
        quick = (f"steps={options.steps or 60}", "batch_size=32")
        diagnoses[f"leakage_{variant}"] = (("leakage", data, *quick), f"cold_{variant}")
        for anchor in ("oracle", "self"):
            arms.append(f"{anchor}_{variant}")
            diagnoses[f"sensitivity_{arms[-1]}"] = (("sensitivity", data, "limit=400"), arms[-1])

    def figures(results: Results) -> list[str]:
        gains, hits = [], []
        for name, (words, _) in diagnoses.items():
            if (found := results.kept["diagnoses"].get(name)) is None:
                continue
            label = name.partition("_")[2]
            if words[0] == "leakage":
                kinds = ("right", "wrong query", "own rationale")
                gains.append((label, "; ".join(f"{found['gain'][kind]:.2f}" for kind in kinds)))
            else:
                cells = [found["conditions"][kind]["hit@1"] for kind in ("own", "oracle", "oracle, swapped")]
                hits.append((label, "; ".join(percent(*cell) for cell in cells)))
        gain = "right triplets; wrong query, oracle's text; wrong query, own text: nats below chance"
        hit = "hit@1 after own text; oracle's; another query's oracle's, %"
        return [*markdown(["records", gain], gains), "", *markdown(["trained", hit], hits)]

    return on_study_set(options, arms, [], diagnoses=diagnoses, extra=figures)


# --- the demo: b, c, e, f, g, h

RATIOS = ("1:1", "10:1", "20:1")
"""Ratios that the demo's own is chosen from, the simplest first."""
EQUAL = "loss.ratio=1:1"
"""The demo's ratio until finding g chose another one; finding f was measured with it."""
ADAPTERS = "model.lora={rank: 8, modules_to_save: [merger]}"
WIDE = "model.scratch.text={hidden_size: 256, intermediate_size: 768}"
LATENTS = ("latent_1", "latent_2", "latent", "latent_8", "taught", "silent")
"""Arms with think tokens; the last writes nothing itself."""
AUTO = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
"""Thresholds of `mode=auto`."""
AUTO_BETWEEN = {"mixed_adaptive_longest": (0.3, 0.35, 0.4, 0.45)}
"""Further thresholds, where most of what can be saved lies between two of these."""


def on_demo(options: Options, folder: str, arms: Sequence[Arm], names: Sequence[str], rows: str) -> Finding:
    """A finding of the demo's queries; no names: the arms of its rows."""
    study = Study(
        options.out / folder, arms, ("recipe=demo",), {options.on: DEMO_SET.with_name(options.on)}, options.seeds, options.launcher,
        metrics=("hit@1", "rationale_tokens"), columns=("pair", "kind"), steps=options.steps,
    )  # fmt: skip
    table = Table("hit@1, % and points", rows_of(rows), SLICES["demo"])
    return Finding(study, names or arms_in(table.rows), [table])


def shipped_arms() -> list[Arm]:
    """Arms from the demo's shipped base, a cold start for each seed; b, c, e, f and h share their runs."""
    base = "init=rge/demo_base"
    quarter = round((load_recipe(["recipe=demo"]).cold_start.steps or 0) / 4)
    arms = [
        Arm("cold", "cold_start", "", (base,), query_mode=""),
        Arm("cold_quarter", "cold_start", "", (base, f"cold_start.steps={quarter}"), query_mode=""),
        *declared("demo", "cold"),
    ]
    for name, (after, query, candidate) in DATA["demo_modes"].items():
        arms.append(Arm(name, "", after, query_mode=query, ask=(f"candidate_mode={candidate}",)))
    return arms


def from_shipped_base(name: str, options: Options) -> Finding:
    """A finding that is a table of arms from the demo's shipped base."""
    return on_demo(options, "shipped", shipped_arms(), (), DATA["rows"][name])


def default_weights(options: Options) -> Finding:
    """Nothing here is trained on the families that are held back, the base included."""
    data, recipe = options.out / "rotated" / "data", load_recipe(["recipe=demo"])
    records = [f"model.scratch.naming={data}/train/naming.jsonl"]
    for stage in ("cold_start", "joint"):
        sources = getattr(recipe, stage).sources
        weights = {data / "train" / Path(str(source.path)).name: source.weight for source in sources}
        records.append(sources_word(stage, weights))
    arms = [
        Arm("cold", "cold_start", shared=True, query_mode=""),  # includes the backbone
        *(Arm(ratio.replace(":", "_"), "joint", "cold", (f"loss.ratio={ratio}",)) for ratio in RATIOS),
        *(Arm(name, "rl", "10_1", tuple(words)) for name, words in DATA["rl_weights"].items()),
    ]
    deciding = ["mixed_adaptive_longest"]
    mixed = mixed_arms(
        deciding, dict.fromkeys(DATA["weights"]["mixed"], data / "train"), {"mixed": data / "mixed"}
    )
    names = [arm.name for arm in (*arms[1:], *mixed)]
    finding = on_demo(options, "rotated", [*arms, *mixed], names, DATA["rows"]["g"])
    slices = {title: replace(which, set_name="valid") for title, which in SLICES["demo"].items()}
    return replace(
        finding,
        study=replace(finding.study, recipe=("recipe=demo", *records), sets={"valid": data / "valid"}),
        tables=[replace(finding.tables[0], slices=slices)],
        needs={data / "mixed" / "meta.json": partial(write_rotated, data)},
        extra=lambda results: decided(results, deciding, "mixed"),
    )


def paraphrases(options: Options) -> Finding:
    """The recipe as it is, and on the same records with paraphrases, asked in the trained wordings and in others."""
    data, recipe = options.out / "paraphrases" / "data", load_recipe(["recipe=demo"])
    base, files = "init=rge/demo_base", {"relations": data / "train", "text": data / "train"}
    shipped = DEMO_SET.parent / "train"

    def records(stage: str) -> str:
        names = {Path(str(source.path)).stem: source.weight for source in getattr(recipe, stage).sources}
        return sources_word(
            stage, {files.get(name, shipped) / f"{name}.jsonl": weight for name, weight in names.items()}
        )

    arms = [
        Arm("cold", "cold_start", "", (base,), query_mode=""),
        Arm("self", "joint", "cold"),
        Arm("cold_paraphrased", "cold_start", "", (base, records("cold_start")), query_mode=""),
        Arm("paraphrased", "joint", "cold_paraphrased", (records("joint"),)),
    ]
    finding = on_demo(options, "paraphrases", arms, (), DATA["rows"]["paraphrases"])
    sets = {kind.replace(" ", "_"): data / kind.replace(" ", "_") for kind in unseen.WORDS}

    def make() -> None:
        write_paraphrased(data)
        unseen.write(dict(zip(unseen.WORDS, sets.values(), strict=True)), None)

    [table] = finding.tables
    tables = [
        replace(table, title=title, metric=metric, slices=SLICES["paraphrases"])
        for metric, title in {"hit@1": table.title, "named": "things named right, % and points"}.items()
    ]
    study = replace(
        finding.study, sets=sets, metrics=("hit@1", "named"), derive=lambda frame, _: unseen.with_named(frame)
    )
    return replace(finding, study=study, tables=tables, needs={data / "in_known_words" / "meta.json": make})


def pretrained(options: Options) -> Finding:
    """From pretrained weights on both sides: anchor, ratio and mode (recipe smol, the demo's queries; needs its packages)."""
    arms = [Arm("cold", "cold_start", "", ("cold_start.steps=100",), query_mode="")]
    trained: dict[str, tuple[int, tuple[str, ...]]] = {
        "self": (36, ()),
        "none": (36, ("loss.anchor=none",)),
        "ratio_1_10": (36, ("loss.ratio=1:10",)),
        "oracle": (36, ("loss.anchor=oracle",)),
        "both": (36, ("loss.states.direct=1",)),
        "longer": (108, ()),
        "adapters": (36, (ADAPTERS, "joint.lr=1e-3")),
        "adapters_fast": (36, (ADAPTERS, "joint.lr=3e-3")),
    }
    for name, (steps, settings) in trained.items():
        words = (*settings, f"joint.steps={steps}")
        arms.append(Arm(name, "joint", "cold", words, query_mode="reasoning"))
    arms += [
        Arm(f"{name}, direct", "", name, query_mode="direct") for name in ("self", "none", "both", "longer")
    ]
    text = """
        self - self, direct
        self - none, direct
        self - none
        none - none, direct
        self - ratio_1_10
        self - oracle
        both - self
        both - both, direct
        both, direct - self, direct
        both, direct - none, direct
        longer - self
        longer - longer, direct
        adapters - self
    """
    names = [arm.name for arm in arms[1:]]
    return on_smol(options, arms, names, text)


def pretrained_for_longer(options: Options) -> Finding:
    """The same at 216 steps."""
    naming = ("model.scratch.naming_steps=1500", "model.scratch.naming_batch_size=64")
    cold = Arm("cold_long", "cold_start", "", (*naming, "cold_start.steps=100"), query_mode="")
    return on_smol(options, [cold, *declared("smol_long", "cold_long")], (), DATA["rows"]["smol_long"])


def on_smol(options: Options, arms: Sequence[Arm], names: Sequence[str], text: str) -> Finding:
    """A finding of recipe smol on the demo's queries."""
    finding = on_demo(options, "pretrained", arms, names, "\n".join(names) + text)
    study = replace(
        finding.study, recipe=("recipe=smol",), metrics=("hit@1", "recall@10", "rationale_tokens")
    )
    [hits] = finding.tables
    recall = replace(hits, title="recall@10, % and points", metric="recall@10")
    # `all` may not get to a missing package only after days of other trainings.
    return replace(
        finding, study=study, tables=[hits, recall], needs={study.out / arms[0].name: smollm2.folder}
    )


def pretrained_in_words(options: Options) -> Finding:
    """Finding a where the oracle's text names the target's serial, with a text in place of every picture.

    The eight most frequent answers, since the batch has 32 queries; the adapters are trained at ten times the recipe's rate.
    """
    out = options.out / "words"
    data, recipe = out / "data", ("recipe=smol", "data.augment=none")
    cold = (
        "model.scratch.naming_steps=1",
        f"cold_start.sources=[{{path: {data}/train/hidden_100_cold.jsonl}}]",
        "cold_start.steps=60",
        "cold_start.lr=1e-4",
    )
    joint = (
        "model.lora={rank: 16, modules_to_save: [merger]}",
        f"joint.sources=[{{path: {data}/train/hidden_100.jsonl}}]",
        "joint.steps=100",
        "joint.lr=1e-3",
        "joint.warmup_steps=5",
    )
    arms = [Arm("cold", "cold_start", "", cold, shared=True, query_mode="")]
    arms += [Arm(name, "joint", "cold", (*joint, *ANCHORS[name])) for name in ("self", "oracle")]
    study = Study(
        out, arms, recipe, {options.on: data / options.on / "hidden_100"}, options.seeds, options.launcher,
        metrics=("hit@1", "thing", "ground", "serial"), columns=("fact",), steps=options.steps, derive=hit_figures,
    )  # fmt: skip
    rows = rows_of(DATA["rows"]["smol_words"])
    titles = {"hit@1": "hit@1, % and points", **LINKS}
    tables = [Table(title, rows, SLICES["study"], metric) for metric, title in titles.items()]
    facts = design.facts(read_tables(), 8)
    needs: dict[Path, Callable[[], object]] = {
        out / arms[0].name: smollm2.folder,
        data: partial(build, data, [100], facts, in_words=True),
    }
    return Finding(study, arms_in(rows), tables, needs=needs)


def modes(options: Options) -> Finding:
    """Arms that train several states, and decide between them; the latter on queries half of which are easy."""
    base, arms = shipped_arms(), declared("modes", "cold")
    wide = (WIDE, "cold_start.steps=1")
    base += [
        Arm("wide_base", "cold_start", "", wide, shared=True, query_mode="", ends_with="backbone"),
        Arm("wide_cold", "cold_start", "wide_base", query_mode=""),
    ]
    names = ["equal", "none", *(arm.name for arm in arms)]
    text = "\n".join(names) + "\n" + DATA["rows"]["f"]
    for name in LATENTS[:-1]:
        text += f"{name}, latent - {name}\n{name}, latent - {name}, direct\n"
    data, on = options.out / "shipped" / "data", f"mixed_{options.on}"
    shipped = DEMO_SET.parent / "train"
    files = {"relations": shipped, "text": shipped, "naming": data / "train"}
    mixed = mixed_arms(DATA["mixed"], files, {on: data / options.on})
    shown = "\n".join(arm.name for arm in mixed if arm.point)
    slices = {"all": Slice(on), "easy": Slice(on, "kind", "easy"), "relations": Slice(on, "kind", "relation")}
    rows = rows_of(f"{shown}\n{DATA['rows']['f_mixed']}")
    needed = [*names, *(arm.name for arm in mixed)]
    finding = on_demo(options, "shipped", [*base, *arms, *mixed], needed, text)
    ablate = ("sensitivity", f"data={DEMO_SET.with_name(options.on)}", "mode=latent", "limit=2000")
    return replace(
        finding,
        tables=[
            *finding.tables,
            Table("Easy queries beside relations: hit@1, % and points", rows, slices),
            Table("The same: tokens a query, times 100", rows_of(shown), slices, "rationale_tokens"),
        ],
        diagnoses={f"{name}_{options.on}": (ablate, name) for name in LATENTS},
        needs={data / "valid" / "meta.json": partial(write_mixed, data)},
        extra=lambda results: [
            *decided(results, [name for name in DATA["mixed"] if name != "mixed_words"], on),
            *ablated(results, options.on),
        ],
    )


def mixed_arms(trained: Iterable[str], files: Mapping[str, Path], sets: Mapping[str, Path]) -> list[Arm]:
    """Arms on records with a share of easy pairs, and all query modes of their checkpoints; ``files``: folder by name of the records."""
    weights = {files[name] / f"{name}.jsonl": weight for name, weight in DATA["weights"]["mixed"].items()}
    records, arms = (sources_word("joint", weights), EQUAL), list[Arm]()
    for name in trained:
        settings = DATA["mixed"][name]
        thresholds = sorted((*AUTO, *AUTO_BETWEEN.get(name, ())))
        asked = (f"auto={','.join(f'{value:g}' for value in thresholds)}",)
        arms.append(Arm(name, "joint", "cold", (*records, *settings), query_mode=""))
        points = {"words": "reasoning", "direct": "direct"}
        if any(word.startswith("loss.adaptive.") for word in settings):
            points |= {f"auto {value:g}": f"auto-{value:g}" for value in thresholds}
        arms += [
            Arm(f"{name}, {title}", "", name, query_mode="budget", ask=asked, sets=sets, point=point)
            for title, point in points.items()
        ]
    return arms


def decided(results: Results, trained: Iterable[str], set_name: str) -> list[str]:
    """Gain of deciding over writing for as many random queries, by threshold, over all seeds.

    Once with every query counted once, and once with easy ones counted three times, as if there were three for each relation.
    """
    lines = list[str]()
    for easy, mix in ((1, "half of the queries easy"), (3, "three easy queries for each relation")):
        rows = []
        for name in trained:
            for asked in (arm.name for arm in results.study.arms if arm.after == name):
                rows += decided_by(results, name, asked, set_name, easy)
        titles = ["arm", "writes, %", "hit@1, %", "tokens", "tokens saved, %", "over random", "over always"]
        head = f"Who is written for, {mix}; over random: over as many queries of the same checkpoint chosen at random"
        lines += [head, "", *markdown(titles, rows), ""] if rows else []
    return lines


def decided_by(results: Results, trained: str, name: str, set_name: str, easy: int) -> list[list[str]]:
    """A line for one way to decide, if there are runs; easy queries count ``easy`` times."""
    always, never = f"{trained}, words", f"{trained}, direct"
    shares, columns, groups = [], [], np.array([])
    for seed in results.seeds([name, always, never], set_name, "hit@1"):
        own, written, silent = (results.of(one, seed, set_name)[1] for one in (name, always, never))  # type: ignore[index]
        times = np.where(own["kind"] == "easy", easy, 1)
        own, written, silent = (frame.loc[frame.index.repeat(times)] for frame in (own, written, silent))
        groups = index_of(own["group"].tolist())
        hit, words, direct = (frame["hit@1"].to_numpy() for frame in (own, written, silent))
        tokens, all_tokens = (frame["rationale_tokens"].to_numpy() for frame in (own, written))
        shares.append(share := (tokens > 0).mean())
        random = share * words + (1 - share) * direct
        columns.append(np.stack([hit, tokens, all_tokens, hit - random, hit - words], axis=1))
    if not shares:
        return []
    hits, spent, spent_always, *gains = (
        tuple(joint.values()) for joint, _ in mean_over_seeds(np.stack(columns, axis=1), groups, None)
    )
    writes, saved = 100 * np.mean(shares), 100 * (1 - spent[0] / spent_always[0])  # type: ignore[operator]
    over = [percent(*gain, sign="+") for gain in gains]
    return [[name, f"{writes:.0f}", percent(*hits), f"{spent[0]:.1f}", f"{saved:.0f}", *over]]


def ablated(results: Results, on: str) -> list[str]:
    """Cost of swapping, zeroing, averaging or shuffling the think tokens' states, seed 0."""
    rows = []
    for name in LATENTS:
        found = results.kept["diagnoses"].get(f"{name}_{on}", {})
        for kind, row in found.get("conditions", {}).items():
            difference, cosine = percent(*row["difference"], sign="+"), f"{row['cosine']:.3f}"
            rows.append((f"{name}, {kind}", f"{100 * row['hit@1'][0]:.1f}", difference, cosine))
    head = ["Think tokens replaced, seed 0 (`rge diagnose sensitivity mode=latent`)", ""]
    return [*head, *markdown(["arm", "hit@1, %", "over own", "cosine to own"], rows)] if rows else []


# --- reinforcement learning: rl

ONCE: dict[str, Any] = {"shared": True, "query_mode": ""}
"""Trained for all seeds, and not evaluated."""


def reinforcement(options: Options) -> Finding:
    """Reinforcement learning of rationales where a share of the oracle's is wrong (demo).

    Second halves after a joint stage on partly spoiled oracles (`data_prep.demo.spoil`), tested on unspoiled queries.
    """
    if options.on != "test":
        raise UserError("finding rl has test sets only: give on=test, or other findings")
    out = options.out / "rl"
    # Tower and tokens are the same at every dose. One step, since some stage must be named.
    arms = [Arm("eyes", "cold_start", "", ("cold_start.steps=1",), **ONCE, ends_with="backbone")]
    for dose, halves in DATA["spoiled"].items():
        arms += dose_arms(dose, halves, options)
    sets = {"unseen": out / "data_50" / "unseen", "test": DEMO_SET}
    metrics = {
        "hit@1, %": "hit@1",
        "right rationale written, %": "right_rationale",
        "first hit right after a wrong rationale, % of all queries": "hit_after_wrong",
        "tokens a query, times 100": "rationale_tokens",
    }
    study = Study(
        out, arms, ("recipe=scripts/rl_study.yaml",), sets, options.seeds, options.launcher,
        metrics=tuple(metrics.values()), columns=("pair",), steps=options.steps, derive=written_figures,
    )  # fmt: skip
    names = [arm.name for arm in arms if arm.query_mode]
    tables = [
        Table(title, rows_of("\n".join(names)), SLICES["rl"], metric) for title, metric in metrics.items()
    ]
    for title, metric in (("hit@1", "hit@1"), ("right rationales written", "right_rationale")):
        rows = rows_of(DATA["rows"]["rl"])
        tables.append(Table(f"Paired differences, points of {title}", rows, SLICES["rl"], metric))

    needs = dict[Path, Callable[[], object]]()
    for dose in DATA["spoiled"]:
        data = out / f"data_{dose}"
        needs[data / "unseen" / "meta.json"] = partial(spoil.write, data, dose / 100, seed=0)

    def costs(results: Results) -> list[str]:
        rows = []
        for arm in arms:
            if (study.folder(arm, 0) / "flops.json").is_file():
                steps, flops = steps_of(study, arm), flops_per_step(study, arm)
                rows.append((arm.name, str(steps), f"{flops / 1e9:.1f}", f"{steps * flops / 1e12:.2f}"))
        titles = ["arm", "steps", "GFLOP a step at its start", "TFLOP"]
        return ["Counted FLOPs, seed 0", "", *markdown(titles, rows)]

    return Finding(study, names, tables, needs=needs, extra=costs)


def dose_arms(dose: int, halves: Sequence[str], options: Options) -> list[Arm]:
    """Cold start, joint stage and second halves on records with this percentage of spoiled oracles."""
    folder = options.out / "rl" / f"data_{dose}" / "train"
    records = {
        stage: sources_word(
            stage, {folder / f"{name}.jsonl": weight for name, weight in DATA["weights"][stage].items()}
        )
        for stage in ("cold_start", "joint", "rl")
    }
    cold, joint, again = f"cold_{dose}", f"joint_{dose}", f"again_{dose}"
    arms = [
        Arm(cold, "cold_start", "eyes", (records["cold_start"],), **ONCE),
        Arm(joint, "joint", cold, (records["joint"],)),
    ]
    for name in halves:
        about = Declared(**DATA["rl"][name])
        stage, limit = about.stage or "rl", "" if name == "again" else again
        words = (records[stage], *about.settings)
        arms.append(Arm(f"{name}_{dose}", stage, joint, words, flops_of=limit))
    return arms


def written_figures(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Whether the rationale equals one of the set's, and whether the first hit is right even if it does not."""
    if not (path / "rationales.parquet").is_file() or "rationale" not in frame:
        return frame
    right = judge_words(frame["query_id"], frame["rationale"], path)["answered"].astype(float)
    return frame.assign(right_rationale=right, hit_after_wrong=frame["hit@1"] * (1 - right))


DECLARED: dict[str, Callable[[Options], Finding]] = {
    "eyes": eyes, "a": table_4, "d": figure_4, "f": modes, "g": default_weights, "i": study_modes, "rl": reinforcement,
    "paraphrases": paraphrases, "smol": pretrained, "smol_long": pretrained_for_longer, "smol_words": pretrained_in_words,
    **{name: partial(from_shipped_base, name) for name in "bceh"},
}  # fmt: skip


# --- pages


def write_page(name: str, finding: Finding, options: Options) -> str:
    """Write ``page_NAME.md`` and ``page_NAME.json`` in the study's folder, and its ``kept.json``."""
    study = finding.study
    folders = study.out.relative_to(options.out).parts if study.out.is_relative_to(options.out) else ()
    results = Results(study, options.kept / f"{'_'.join(('study', *folders))}.json")
    lines, data = [f"## {TITLES[name]}", "", f"`python scripts/study.py {name}`", ""], []
    if options.steps is not None:
        lines += [f"Every stage had {options.steps} steps: a trial of the machinery, not a result.", ""]
    for table in finding.tables:
        shown, rows, missing = in_table(results, table, options.on)
        lines += [f"{table.title}; 95 % intervals over seeds and groups of queries", ""]
        lines += [*markdown(shown.columns, shown.to_numpy().tolist()), "", *too_narrow(rows)]
        lines += [f"Not run yet: {'; '.join(missing)}.", ""] if missing else []
        data += rows
    lines += finding.extra(results)
    if results.other:
        lines += [
            "",
            f"Trained with other settings than today's, and not used: {', '.join(sorted(results.other))}.",
        ]
    results.keep()
    text = "\n".join(lines) + "\n"
    page = f"page_{name}" if options.on == "test" else f"page_{name}_{options.on}"
    write_text(study.out / f"{page}.md", text)
    write_text(study.out / f"{page}.json", json.dumps(data, indent=1))
    return text


if __name__ == "__main__":
    start(main)
