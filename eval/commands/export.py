"""Export evaluations to other formats: LaTeX, CSV, leaderboards.

    rge eval export format=pinpoint|top50|mmeb|mteb eval=DIR out=FILE.json
    rge eval export format=csv|latex eval=DIR out=FILE
    rge eval export format=card eval=DIR out=CHECKPOINT/README.md

``pinpoint``  ``{"00001": {"retrieved_items": [...]}}``, all that is ranked: input of the released evaluate.py
``top50``     ``{query: [50 candidate ids]}``, as CIRCO's server takes it
``mmeb``      the leaderboard's JSON, from the evaluation of all 36 sets
``mteb``      a TaskResult of MTEB, for one retrieval set
``csv``       every slice and every metric as fractions of one, with intervals
``latex``     the table that `run` prints, in per cent with intervals, for a paper (booktabs)
``card``      the figures put into the model card of the checkpoint that was evaluated, where the Hugging Face hub reads them
"""

import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.benchmarks.published_tables import published
from eval.embedding.identity import OLD, old_results
from eval.scoring.metrics import parse_name
from eval.scoring.output_files import RUN, read_results
from eval.scoring.protocol import Protocol
from eval.scoring.tables import in_per_cent, latex, numbers
from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.common.mmeb_prompts import SETS
from rge.common.options import one_of
from rge.common.registry import PluginOptions

FORMATS = ("pinpoint", "top50", "mmeb", "mteb", "csv", "latex", "card")
MOST = 50
EVALUATION = "## Evaluation"
_HEAD = ("| set | asked | metric | all queries, with 95 % interval |", "|---|---|---|---|")
_MTEB = {
    "ndcg": "ndcg_at_",
    "map": "map_at_",
    "recall": "recall_at_",
    "precision": "precision_at_",
    "hit": "hit_rate_at_",
}


@dataclass
class ExportOptions(PluginOptions):
    """Export an evaluation to another program's format."""

    format: str
    """pinpoint, top50, mmeb, mteb, csv, latex or card."""
    eval: Path
    """Evaluation directory."""
    out: Path
    """File to write; with format=card, the model card to extend (the checkpoint's README.md)."""
    model: str = "unnamed"
    """Name of the model in the file."""
    main: str = "ndcg@10"
    """With format=mteb: the main score."""
    metric: tuple[str, ...] = ()
    """With format=latex: columns; empty: the headline and the metrics added by metrics=."""


def export(options: ExportOptions) -> Path:
    """Write the file and return its path.

    Raises:
        UserError: the evaluation lacks what the format needs.
    """
    one_of("format", [options.format], FORMATS)
    results = read_results(options.eval)
    for warning in [
        *([f"{options.eval} {OLD}"] if old_results(results) else []),
        *results.get("warnings", []),
    ]:
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    if options.format in ("pinpoint", "top50"):
        content: Any = dict(_top(options.eval / RUN, MOST if options.format == "top50" else None))
        if len(content) < results["set"]["num_queries"]:
            raise UserError(
                f"{options.eval / RUN} has {len(content)} of {results['set']['num_queries']} queries; evaluate.py would "
                "leave the others out without a word"
            )
        if options.format == "pinpoint":
            content = {query: {"retrieved_items": names} for query, names in content.items()}
    elif options.format == "mmeb":
        content = _mmeb(options, results)
    elif options.format == "card":
        content = with_evaluation(_card(options.out, results), results)
    elif options.format == "csv":
        content = numbers(results).to_csv(index=False)
    elif options.format == "latex":
        content = latex(in_per_cent(results, options.metric or _headline(results)))
    else:
        content = _mteb(options, results)
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_bytes(options.out, text.encode())
    print(options.out)
    return options.out


def _headline(results: dict[str, Any]) -> list[str]:
    found = [one["metric"] for one in results.get("headline") or []] or list(Protocol().headline)
    return [*found, *results.get("metrics", [])]


def _top(path: Path, most: int | None) -> Iterator[tuple[str, list[str]]]:
    """The first candidates of each query; a run of ours lists a query's lines together, best first."""
    query, names = None, list[str]()
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    with lines:
        for line in lines:
            one, _, candidate, *_ = line.split()
            if one != query:
                if query is not None:
                    yield query, names
                query, names = one, []
            if most is None or len(names) < most:
                names.append(candidate)
    if query is not None:
        yield query, names


def _mmeb(options: ExportOptions, results: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in SETS if name not in results["by_category"]]
    if results.get("benchmark") != "mmeb" or missing:
        raise UserError(
            f"format=mmeb needs an evaluation of all {len(SETS)} sets with benchmark=mmeb; {options.eval} lacks "
            f"{len(missing)}" + (f", first {missing[0]}" if missing else "")
        )
    if why := published()["mmeb"].not_this_set(results["set"]):
        raise UserError(f"format=mmeb is for the leaderboard, and {why} ({options.eval})")
    return {
        "metadata": {
            "model_name": options.model,
            "model_backbone": None,
            "model_size": None,
            "embedding_dimension": None,
            "max_length_tokens": None,
            "model_release_date": None,
            "data_source": "Self-Reported",
            "url": None,
            "report_generated_date": _now(),
            "profile": results["profile"],
            "identity": results.get("identity"),
            "warnings": results.get("warnings", []),
        },
        "metrics": {
            "image": {
                name: {metric: figure["value"] for metric, figure in results["by_category"][name].items()}
                for name in SETS
            },
            "video": {},
            "visdoc": {},
        },
    }


def _mteb(options: ExportOptions, results: dict[str, Any]) -> dict[str, Any]:
    scores = {}
    for name, figure in results["micro"].items():
        kind, k = parse_name(name) if "@" in name and name.split("@")[0] in _MTEB else ("", None)
        scores[f"{_MTEB[kind]}{k}" if kind else name.replace("@", "_at_")] = round(figure["value"], 5)
    if options.main not in results["micro"]:
        raise UserError(f"main must be one of {', '.join(results['micro'])}, got {options.main!r}")
    scores |= {
        "main_score": round(results["micro"][options.main]["value"], 5),
        "hf_subset": "default",
        "languages": ["eng-Latn"],
    }
    return {
        "dataset_revision": results["set"].get("content") or results["set"]["fingerprint"],
        "task_name": results["set"]["name"],
        "mteb_version": None,
        "scores": {results["set"].get("split", "test"): [scores]},
        "evaluation_time": None,
        "kg_co2_emissions": None,
        "date": _now(),
        "model_name": options.model,
    }


def _card(path: Path, results: dict[str, Any]) -> str:
    """The card of the checkpoint that was evaluated, and of no other."""
    if not path.is_file():
        raise UserError(f"format=card adds to the card of a checkpoint, and {path} does not exist")
    from rge.checkpoints.export import checkpoint_hash  # brings torch

    if checkpoint_hash(path.parent) != results.get("checkpoint_hash"):
        raise UserError(
            f"{path.parent} is not the checkpoint that was evaluated ({results.get('checkpoint')}): its files have another "
            "hash than checkpoint_hash in results.json"
        )
    return path.read_text(encoding="utf-8")


def with_evaluation(card: str, results: dict[str, Any]) -> str:
    """A model card with the headline figures of an evaluation: as a table, and as ``model-index`` in its front matter.

    Figures of other evaluations stay; those of the same set asked in the same way are replaced.

    Args:
        card: of the checkpoint.
        results: content of results.json.
    """
    name, way = results["set"]["name"], f"{results['query_mode']}, {results['query_modality']}"
    if results["benchmark"] != "generic":
        way += f", {results['benchmark']} {results['profile']}"
    found = results.get("headline") or [
        {"metric": metric, **results["micro"][metric]} for metric in Protocol().headline
    ]
    rows = [
        f"| {name} | {way} | {one['metric']} | {one['value']:.4f} "
        + ("–" if one["low"] is None else f"[{one['low']:.4f}, {one['high']:.4f}]")
        + " |"
        for one in found
    ]
    notes = [f"* {name}, {way}: {warning}" for warning in results.get("warnings", [])]
    before, _, rest = card.partition(f"\n{EVALUATION}\n")
    own, _, after = rest.partition("\n## ")
    lines = own.splitlines()
    mine = (f"| {name} | {way} |", f"* {name}, {way}: ")
    kept = [
        line for line in lines if line.startswith(("| ", "* ")) and not line.startswith((*mine, _HEAD[0]))
    ]
    section = [
        EVALUATION,
        "",
        *_HEAD,
        *(line for line in kept if line.startswith("|")),
        *rows,
        "",
        *(line for line in kept if line.startswith("*")),
        *notes,
    ]
    text = f"{before.rstrip()}\n\n" + "\n".join(section).rstrip() + "\n" + (f"\n## {after}" if after else "")
    return _indexed(text, name, way, found)


def _indexed(card: str, name: str, way: str, found: list[dict[str, Any]]) -> str:
    """The card with the figures in its front matter, in the form of the hub's ``model-index``."""
    _, mark, rest = card.partition("---\n")
    front, _, body = rest.partition("\n---\n")
    about = (yaml.safe_load(front) if mark else None) or {}
    title = next((line[2:] for line in body.splitlines() if line.startswith("# ")), "this model")
    entry = (about.get("model-index") or [{"name": title, "results": []}])[0]
    entry["results"] = [
        one
        for one in entry["results"]
        if (one["dataset"]["name"], one["dataset"].get("config")) != (name, way)
    ]
    metrics = [
        {"type": one["metric"].replace("@", "_at_"), "name": one["metric"], "value": one["value"]}
        for one in found
    ]
    task = {"type": "image-text-retrieval", "name": "Retrieval"}
    entry["results"].append(
        {"task": task, "dataset": {"name": name, "type": name, "config": way}, "metrics": metrics}
    )
    about["model-index"] = [entry]
    front = yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=120)
    return f"---\n{front}---\n{body if mark else card}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
