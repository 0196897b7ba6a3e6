"""Evaluations in the formats that others read.

    python -m eval export format=pinpoint|top50|mmeb|mteb eval=DIR out=FILE.json

``pinpoint``  ``{"00001": {"retrieved_items": [...]}}``, all that is ranked: input of the released evaluate.py
``top50``     ``{query: [50 candidate ids]}``, as CIRCO's server takes it
``mmeb``      the leaderboard's JSON, from the evaluation of all 36 sets
``mteb``      a TaskResult of MTEB, for one retrieval set
"""

import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.embedding.identity import OLD, old_results
from eval.scoring.metrics import parse_name
from eval.scoring.output_files import RUN, read_results
from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.common.mmeb_prompts import SETS
from rge.common.options import one_of
from rge.common.registry import PluginOptions

FORMATS = ("pinpoint", "top50", "mmeb", "mteb")
MOST = 50
_MTEB = {
    "ndcg": "ndcg_at_",
    "map": "map_at_",
    "recall": "recall_at_",
    "precision": "precision_at_",
    "hit": "hit_rate_at_",
}


@dataclass
class ExportOptions(PluginOptions):
    """Options of `rge eval export`."""

    format: str
    """pinpoint, top50, mmeb or mteb."""
    eval: Path
    """Evaluation directory."""
    out: Path
    """File to write."""
    model: str = "unnamed"
    """Name of the model in the file."""
    main: str = "ndcg@10"
    """mteb: the main score."""


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
    else:
        content = _mteb(options, results)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(options.out, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
    print(options.out)
    return options.out


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


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
