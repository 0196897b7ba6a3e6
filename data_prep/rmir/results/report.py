"""The report of a run, and the card of its data set."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from huggingface_hub import DatasetCardData
from jinja2 import Environment, FileSystemLoader, Template

from data_prep.rmir.config import RmirConfig
from data_prep.rmir.decisions import AGREEMENT, REVIEWED, about_panel
from data_prep.rmir.run import NOT_IN_FINGERPRINT, Run, stages_of
from rge.common.files import read_json, write_json, write_text
from rge.stats.intervals import in_words

TEMPLATES = Path(__file__).parent / "templates"
HUB_LICENCES = (
    "apache-2.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc0-1.0", "gpl-2.0", "gpl-3.0", "mit", "odc-by", "pddl",
)  # fmt: skip
"""Licence identifiers that the hub accepts; others are listed per picture in the table of pictures."""

PAPER: dict[str, float | None] = {
    "discarded by the filter": 0.40,
    "pool share of the seed set": 35803 / 500000,
    "queries with an answer, of the seed set": 8321 / 500000,
    "test share of the queries": 1634 / 8321,
    "pool images a query": 35803 / 8321,
    "unanimous panels": None,
}
"""From the paper: about 40 % filtered; a seed set of 500,000 images; 1,634 test and 6,687 training queries; a pool of 35,803
images. It does not report how many seed pictures were asked about, nor how many triplets were unanimous."""

MET = {
    "reasked": "repeated because unreadable",
    "unreadable": "unreadable after all attempts",
    "refused": "refused by the provider's policy",
    "rejected": "rejected by the endpoint",
    "unanswered": "unanswered so far",
    "limited": "429",
    "retries": "retries",
}
"""Column titles of the report for the fields of `rge.calls.caller.Counts`."""


def collect(run: Run) -> dict[str, Any]:
    """Collect the reports of all finished stages into one dict."""
    stages = {stage: found for stage in stages_of(run.config) if (found := run.done(stage))}
    return {
        "stages": stages,
        "settings": published(run.config),
        "funnel": funnel(stages),
        "ratios": ratios(stages),
        "models": [asdict(entry) for entry in run.store.ledger()],
    }


def published(config: RmirConfig) -> dict[str, Any]:
    """The settings that explain the data, without paths, addresses, key names and machine-specific settings."""
    whole = asdict(config)
    models = {}
    for label, model in config.models.items():
        about = {
            "name": model.published_name,
            "family": model.family,
            **model.cache_settings(),
            "max_side_px": model.max_side_px,
        }
        models[label] = {key: value for key, value in about.items() if key != "extra_body"}
    for key in ("path", *NOT_IN_FINGERPRINT):
        whole["library"].pop(key, None)
        whole["retrieve"].pop(key, None)
    stages = [stage for stage in stages_of(config) if stage not in ("pool", "audit")] + ["export"]
    settings = {"library": whole["library"], "models": models, **{stage: whole[stage] for stage in stages}}
    if config.prompts is not None:
        settings["prompts"] = sorted(path.name for path in Path(config.prompts).glob("[!.]*.md"))
    for spec in settings["retrieve"]["more"]:
        spec["encoder"].pop("path")
    return settings


def funnel(stages: dict[str, dict[str, Any]]) -> list[tuple[str, int, str]]:
    """(title, count, unit) rows from the library to the two sets."""
    counts = {stage: found["counts"] for stage, found in stages.items()}
    steps = [
        ("seed", "listed", "pictures listed", "images"),
        ("seed", "usable", "usable", "images"),
        ("seed", "seed", "seed set", "images"),
        ("caption", "written", "captioned by a model", "images"),
        ("generate", "inputs", "asked about", "images"),
        ("generate", "queries", "queries generated", "queries"),
        ("filter", "valid", "queries valid", "queries"),
        ("retrieve", "triplets", "candidates retrieved", "triplets"),
        ("judge", "judgements", "judgements", "calls"),
        ("keep", "kept", "kept (true, confident)", "triplets"),
        ("keep", "rejected", "rejected (false, confident)", "triplets"),
        ("keep", "doubted", "doubted", "triplets"),
        ("keep", "doubted_images", "images removed by doubt", "images"),
        ("pool", "triplets", "triplets left", "triplets"),
        ("pool", "images", "retrieval pool", "images"),
        ("split", "test", "test queries", "queries"),
        ("split", "train", "training queries", "queries"),
    ]
    return [(title, counts[stage][key], unit) for stage, key, title, unit in steps if stage in counts]


def ratios(stages: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ratios of `PAPER` for this run, as far as its stages are finished."""
    counts = {stage: found["counts"] for stage, found in stages.items()}
    found = {}
    if "filter" in counts and counts["filter"]["queries"]:
        found["discarded by the filter"] = 1 - counts["filter"]["valid"] / counts["filter"]["queries"]
    if (keep := counts.get("keep")) and keep["triplets"]:
        # Runs of earlier versions did not count them.
        unanimous = keep.get("unanimous", keep["triplets"] - keep["doubted"])
        found["unanimous panels"] = unanimous / keep["triplets"]
    if "pool" in counts:
        found["pool share of the seed set"] = counts["pool"]["images"] / counts["seed"]["seed"]
    if "split" in counts and (total := counts["split"]["test"] + counts["split"]["train"]):
        answered = counts["split"]["queries_with_an_answer"]
        found["queries with an answer, of the seed set"] = answered / counts["seed"]["seed"]
        found["test share of the queries"] = counts["split"]["test"] / total
        found["pool images a query"] = counts["pool"]["images"] / total
    return {name: found[name] for name in PAPER if name in found}


def about_split(rows: Sequence[Mapping[str, Any]], threshold: float) -> str | None:
    """Says that a split has fewer training than test queries, and how to change that; None if it has not.

    Args:
        rows: of the table ``splits``: each query's ``tsr`` and ``split``.
        threshold: the ``split.tsr_threshold`` that they were split by.
    """
    counts = Counter(row["split"] for row in rows)
    if counts["train"] >= counts["test"]:
        return None
    scores = [row["tsr"] for row in rows]

    def num_test(limit: float) -> int:
        return sum(score > limit for score in scores)

    share = PAPER["test share of the queries"] or 0.0
    best = min({threshold, *scores}, key=lambda limit: (abs(num_test(limit) / len(scores) - share), limit))
    fix = "All queries have nearly the same TSR, so no other split.tsr_threshold helps"
    if 0 < num_test(best) < num_test(threshold):
        fix = (
            f"With split.tsr_threshold={best!r} they are {len(scores) - num_test(best):,} and {num_test(best):,}, before any "
            "are dropped; the same command makes only the split again, and asks no model"
        )
    return (
        f"warning: {counts['train']:,} training and {counts['test']:,} test queries; the paper's share of test queries is "
        f"{share:.0%}, but with few pictures most lists have a high TSR. {fix}. More pictures "
        "(seed.clusters, seed.per_cluster, generate.max_inputs) make more queries"
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of Markdown tables."""
    named = [(entry["endpoint"].partition(" at ")[0], entry) for entry in report["models"]]
    names = Counter(name for name, _ in named)
    met = [found["met"] for found in report["stages"].values() if found.get("met")]
    audit = report["stages"].get("audit", {}).get("counts")
    return template("report.md").render(
        report=report,
        paper=PAPER,
        # With the address only if two endpoints serve the same model: ports change between runs.
        models=[(name if names[name] == 1 else entry["endpoint"], entry) for name, entry in named],
        met_kinds={kind: about for kind, about in MET.items() if any(found.get(kind) for found in met)},
        audit=audit,
        ks=cut_offs(audit),
    )


def write(run: Run) -> Path:
    """Write ``report.json`` and ``report.md``, which is returned, and the card if the data set exists."""
    report = collect(run)
    write_json(run.out / "report.json", report)
    write_text(run.out / "report.md", markdown(report))
    write_card(run.out)
    return run.out / "report.md"


def write_card(run: Path) -> Path | None:
    """Write the card of a run's data set from all its reports, and return its path.

    None: there is no data set, or it was made with other settings than the report's, of which the card must not speak.
    """
    report = read_json(run / "report.json") or {}
    if not (run / "dataset").is_dir() or (report and "split" not in report["stages"]):
        return None
    people, reviewed = (about_panel(run / name) or {} for name in (AGREEMENT, REVIEWED))
    return write_card_into(run / "dataset", report, people, reviewed)


def write_card_into(
    folder: Path, report: dict[str, Any], people: dict[str, Any], reviewed: dict[str, Any], name: str = ""
) -> Path:
    """Write ``README.md`` into the folder of a data set, and return its path.

    ``report``, ``people`` and ``reviewed`` are results of `data_prep.rmir.results`: of `report.collect`, `review.compare` and
    `review.settle`; empty if there are none yet. ``name`` is used if the report is empty.
    """
    settings, stages = report.get("settings", {}), report.get("stages", {})
    name = settings.get("export", {}).get("name", name)
    columns = ["licence", "source", "author", "caption_by"]
    pictures = pq.read_table(folder / "pictures.parquet", columns=columns)
    licences = Counter(str(licence) for licence in pictures["licence"].to_pylist())
    captions_by = Counter(by or "none" for by in pictures["caption_by"].to_pylist())
    composition = _composition(folder)
    audit = stages.get("audit", {}).get("counts")
    rows = people.get("rows", {})
    accepted = rows.get("panel accepted")
    text = template("card.md").render(
        head=_head(folder, licences, sum(composition[-1][1:])),
        name=name,
        report=report,
        stages=stages,
        composition=composition,
        licences=licences,
        known={key: len(pictures) - pictures[key].null_count for key in ("source", "author")},
        captions_by=captions_by if captions_by.keys() - {"library", "none"} else None,
        filters=settings.get("library", {}).get("filters"),
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip() if settings else None,
        audit=audit,
        ks=cut_offs(audit),
        accepted=accepted if accepted and accepted["share"] is not None else None,
        in_words=in_words,
        verdicts=[
            (group, row)
            for group, row in rows.items()
            if row["share"] is not None and not group.startswith("by ")
        ],
        kappas=[row["kappa"] for row in people.get("between", {}).values() if row["kappa"] is not None],
        reviewed=reviewed,
    )
    write_text(folder / "README.md", text)
    return folder / "README.md"


def cut_offs(audit: dict[str, Any] | None) -> list[str]:
    """Cut-offs k of the audit's ``solved@k``."""
    solved = audit["shortcuts"].get("any shortcut", {}).get("all", {}) if audit else {}
    return [key.partition("@")[2] for key in solved if key.startswith("solved@")]


def figure(value: float | None) -> str:
    """A share or kappa with three digits."""
    return "undefined" if value is None else f"{value:.3f}"


@cache
def template(name: str) -> Template:
    """Load a file of ``templates/`` with the filters ``number``, ``share`` and ``cell``."""
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {
        "number": "{:,}".format,
        "share": figure,
        "cell": lambda text: " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;"),
    }
    return environment.get_template(name)


def _head(folder: Path, licences: Counter[str], num_queries: int) -> str:
    """YAML header for the hub and Hugging Face `datasets`, with a subset for each table that exists."""
    only = next(iter(licences)).lower().replace(" ", "-") if len(licences) == 1 else ""
    sizes = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    tables = [
        folder / "train.parquet",
        folder / "pictures.parquet",
        *sorted((folder / "test").glob("*.parquet")),
    ]
    configs = []
    for path in filter(Path.is_file, tables):
        file = {"split": "train" if path.parent == folder else "test", "path": str(path.relative_to(folder))}
        configs.append({"config_name": path.stem, "data_files": [file]})
    return DatasetCardData(
        license=only if only in HUB_LICENCES else "other",
        language=["en"],
        tags=["image-retrieval", "composed-image-retrieval", "reasoning", "synthetic"],
        size_categories=[next((word for most, word in sizes if num_queries < most), "n>1M")],
        configs=configs,
    ).to_yaml()


def _composition(folder: Path) -> list[tuple[str, int, int]]:
    """(category, training queries, test queries) rows; the last row is the total."""
    train, test = (
        Counter(str(name) for name in pq.read_table(path, columns=["category"])["category"].to_pylist())
        if path.is_file()
        else Counter[str]()
        for path in (folder / "train.parquet", folder / "test" / "queries.parquet")
    )
    rows = [(name, train[name], test[name]) for name in sorted({*train, *test})]
    return [*rows, ("all", train.total(), test.total())]
