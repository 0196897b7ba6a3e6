"""The report of a run: counts, costs, rejections, and our ratios next to the paper's."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.rmir.config import RmirConfig
from data_prep.rmir.results import card
from data_prep.rmir.run import NOT_IN_FINGERPRINT, Run, stages_of
from rge.common.files import write_json, write_text

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


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of Markdown tables."""
    named = [(entry["endpoint"].partition(" at ")[0], entry) for entry in report["models"]]
    names = Counter(name for name, _ in named)
    met = [found["met"] for found in report["stages"].values() if found.get("met")]
    audit = report["stages"].get("audit", {}).get("counts")
    return card.template("report.md").render(
        report=report,
        paper=PAPER,
        # With the address only if two endpoints serve the same model: ports change between runs.
        models=[(name if names[name] == 1 else entry["endpoint"], entry) for name, entry in named],
        met_kinds={kind: about for kind, about in MET.items() if any(found.get(kind) for found in met)},
        audit=audit,
        ks=card.cut_offs(audit),
    )


def write(run: Run) -> Path:
    """Write ``report.json`` and ``report.md``, which is returned, and the card if the data set exists."""
    report = collect(run)
    write_json(run.out / "report.json", report)
    write_text(run.out / "report.md", markdown(report))
    card.write(run.out)
    return run.out / "report.md"
