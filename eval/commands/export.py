"""Export evaluations to other formats: LaTeX, CSV, leaderboards.

    rge eval export format=pinpoint|top50|mmeb|mteb eval=DIR out=FILE.json
    rge eval export format=csv|latex eval=DIR out=FILE
    rge eval export format=card eval=DIR out=CHECKPOINT/README.md

``pinpoint``  ``{"00001": {"retrieved_items": [...]}}``, whole rankings: input of the released evaluate.py
``top50``     ``{query: [50 candidate ids]}``, as CIRCO's server expects it
``mmeb``      the leaderboard's JSON, from an evaluation of all 36 sets
``mteb``      an MTEB TaskResult, for one retrieval set
``csv``       all slices and metrics as fractions, with intervals
``latex``     the table that `run` prints, in per cent with intervals, for papers (booktabs)
``card``      the figures added to the model card of the evaluated checkpoint, where the Hugging Face hub reads them
"""

import datetime
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from eval.benchmarks.published_tables import published
from eval.pages.evaluations import BASES, BUDGET, caveats, ways_of
from eval.pages.wording import number
from eval.scoring.metrics import of_kinds
from eval.scoring.output_files import RUN, read_results
from eval.scoring.protocol import Protocol
from eval.scoring.results import Results
from eval.scoring.tables import in_per_cent, latex, numbers
from eval.scoring.trec import read_lines
from rge.common.errors import UserError
from rge.common.files import read_json, write_json, write_text
from rge.common.mmeb_prompts import SETS
from rge.common.options import one_of
from rge.common.registry import PluginOptions

OF_ONE_SET = ("pinpoint", "top50", "mteb")
"""Formats that suites do not have."""
EVALUATION, BUDGET_SECTION = "## Evaluation", "## Accuracy against tokens"
_HEAD = ("| set | asked | metric | all queries, with 95 % interval |", "|---|---|---|---|")
_UNKNOWN = (
    "model_backbone", "model_size", "embedding_dimension", "max_length_tokens", "model_release_date",
)  # fmt: skip


@dataclass
class ExportOptions(PluginOptions):
    """Export an evaluation to another program's format."""

    format: Literal["pinpoint", "top50", "mmeb", "mteb", "csv", "latex", "card"]
    """What is written (docs/evaluation.md)."""
    eval: Path
    """Evaluation directory; with format=card also an output of `budget`, whose curve is added."""
    out: Path
    """File to write; with format=card, the model card to extend (the checkpoint's README.md)."""
    model: str = "unnamed"
    """Name of the model in the file."""
    main: str = "ndcg@10"
    """With format=mteb: the main score."""
    metric: tuple[str, ...] = ()
    """With format=latex: columns; empty: the headline and the metrics added by metrics=."""


def export(options: ExportOptions) -> Path:
    """Write the file and return its path; a UserError if the evaluation lacks what the format needs."""
    budget = read_json(options.eval / BUDGET) if options.format == "card" else None
    results = read_results(options.eval if budget is None else options.eval / BASES[-1])
    for warning in caveats(results):
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    if results.suite and options.format in OF_ONE_SET:
        raise UserError(
            f"it is of a suite, and format={options.format} of one set: export those in its members/",
            options.eval,
            kind="suite",
        )
    content = FORMATS[options.format](options, results)
    if budget is not None:
        content = with_budget(content, budget)
    write = write_text if isinstance(content, str) else write_json
    write(options.out, content)
    print(options.out)
    return options.out


def _columns(options: ExportOptions, results: Results) -> Sequence[str]:
    """Metrics of a LaTeX table; a UserError if one was not measured."""
    if options.metric:
        one_of("metric", options.metric, tuple(results.overall))
        return options.metric
    headline = [figure["metric"] for figure in results.headline]
    return [*(headline or Protocol().headline), *results.metrics, *of_kinds(results.overall)]


def _ranked(options: ExportOptions, results: Results) -> dict[str, list[str]]:
    """Candidates of each query, best first; our run files keep a query's lines together."""
    lines = read_lines(options.eval / RUN).select(["query", "candidate"]).to_pandas().astype(str)
    rankings = lines.groupby("query", sort=False)["candidate"].agg(list).to_dict()
    if len(rankings) < results.set.num_queries:
        raise UserError(
            f"it has only {len(rankings)} of {results.set.num_queries} queries"
            f"; evaluate.py would silently leave the others out",
            options.eval / RUN,
        )
    return rankings


def _mmeb(options: ExportOptions, results: Results) -> dict[str, Any]:
    why = published()["mmeb"].not_this_set(results.set)
    if why or results.benchmark != "mmeb":
        has = f"it has benchmark={results.benchmark}" + (f", and {why}" if why else "")
        raise UserError(
            f"{has}; format=mmeb needs an evaluation of all {len(SETS)} sets with benchmark=mmeb",
            options.eval,
            kind="subset" if results.benchmark == "mmeb" else "benchmark",
        )
    return {
        "metadata": {
            "model_name": options.model,
            **dict.fromkeys(_UNKNOWN),
            "data_source": "Self-Reported",
            "url": None,
            "report_generated_date": _now(),
            "profile": results.profile,
            "identity": results.identity,
            "warnings": list(caveats(results)),
        },
        "metrics": {
            "image": {name: _values(results.by["category"][name]) for name in SETS},
            "video": {},
            "visdoc": {},
        },
    }


def _mteb(options: ExportOptions, results: Results) -> dict[str, Any]:
    one_of("main", [options.main], tuple(results.micro))
    values = {name: round(value, 5) for name, value in _values(results.micro).items()}
    scores = {
        **{re.sub("^hit@", "hit_rate@", name).replace("@", "_at_"): value for name, value in values.items()},
        "main_score": values[options.main],
        "hf_subset": "default",
        "languages": ["eng-Latn"],
    }
    return {
        "dataset_revision": results.set.content or results.set.fingerprint,
        "task_name": results.set.name,
        "mteb_version": None,
        "scores": {results.set.split or "test": [scores]},
        "evaluation_time": None,
        "kg_co2_emissions": None,
        "date": _now(),
        "model_name": options.model,
    }


def _values(figures: dict[str, Any]) -> dict[str, float]:
    return {metric: figure["value"] for metric, figure in figures.items()}


def _card(path: Path, results: Results) -> str:
    """Read the model card, checking that it belongs to the evaluated checkpoint."""
    from rge.checkpoints.export import checkpoint_hash  # imports torch

    if not path.is_file() or checkpoint_hash(path.parent) != results.checkpoint_hash:
        raise UserError(
            f"it is not the model card of the evaluated checkpoint ({results.checkpoint}): it does not exist, or"
            f" the hash of the files next to it is not checkpoint_hash in results.json",
            path,
        )
    return path.read_text(encoding="utf-8")


def with_evaluation(card: str, results: Results) -> str:
    """Add an evaluation's headline figures to a model card: as a table, and as ``model-index`` in its front matter.

    Figures of other evaluations are kept; those of the same set and conditions are replaced.
    """
    name, condition = results.set.name, f"{results.query_mode}, {results.query_modality}"
    if results.benchmark != "generic":
        condition += f", {results.benchmark} {results.profile}"
    way, *more = ways_of(results)
    for words in more if way == results.query_mode else (way, *more):
        condition += f", {words}"
    if limit := results.set.limit:
        condition += f", first {limit} queries"
    if results.suite:
        condition += f", mean of {results.set.num_members} members"
    figures = results.headline or [
        {"metric": metric, **results.micro[metric]} for metric in Protocol().headline
    ]
    figures = [*figures, *({"metric": name, **results.overall[name]} for name in of_kinds(results.overall))]
    replaced = (row := f"| {name} | {condition} |", note := f"* {name}, {condition}: ", _HEAD[0])
    before, _, rest = card.partition(f"\n{EVALUATION}\n")
    old, _, after = rest.partition("\n## ")

    def kept(mark: str) -> list[str]:
        return [line for line in old.splitlines() if line.startswith(mark) and not line.startswith(replaced)]

    rows = [f"{row} {figure['metric']} | {figure['value']:.4f} {_interval(figure)} |" for figure in figures]
    notes = [note + warning for warning in caveats(results)]
    section = "\n".join([EVALUATION, "", *_HEAD, *kept("| "), *rows, "", *kept("* "), *notes])
    text = f"{before.rstrip()}\n\n{section.rstrip()}\n" + (f"\n## {after}" if after else "")
    return _indexed(text, name, condition, figures)


def with_budget(card: str, budget: dict[str, Any]) -> str:
    """Add the curve of a budget.json to a model card, in place of an older one."""
    points = sorted(budget["points"], key=lambda point: point["tokens"])
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "queries": lambda one: f"`{one['name']}`",
        f"{budget['metric']}, with 95 % interval": lambda one: f"{one['value']:.4f} {_interval(one)}",
        "tokens": lambda one: f"{one['tokens']:.1f}",
        "GFLOP": lambda one: number(one["gflops"]),
        "ms": lambda one: f"{one['ms']:.1f}",
    }
    if any("gflops" not in one for one in points):
        del columns["GFLOP"]
    rows = [[cell(one) for cell in columns.values()] for one in points]
    lines = [
        BUDGET_SECTION,
        "",
        f"On {budget['set']['name']}; means over queries. `cap-N` is `max_rationale_tokens=N`.",
        "",
        *(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)),
        *(f"\n{note}" for note in budget["notes"]),
    ]
    before, _, rest = card.partition(f"\n{BUDGET_SECTION}\n")
    after = rest.partition("\n## ")[2]
    section = "\n".join(lines)
    return f"{before.rstrip()}\n\n{section}\n" + (f"\n## {after}" if after else "")


def _interval(figure: dict[str, Any]) -> str:
    return "–" if figure["low"] is None else f"[{figure['low']:.4f}, {figure['high']:.4f}]"


def _indexed(card: str, name: str, condition: str, figures: list[dict[str, Any]]) -> str:
    """Add the figures to the card's front matter as the hub's ``model-index``; other entries stay as they are."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, RepoCard

    try:
        read = RepoCard(card if REGEX_YAML_BLOCK.search(card) else f"---\n\n---\n{card}")
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"it cannot be read: {error}", key="front matter") from None
    title = next((line[2:] for line in read.text.splitlines() if line.startswith("# ")), "this model")
    models = read.data.get("model-index") or [{"name": title}]
    try:
        results = [dict(one) for one in models[0].get("results") or ()]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(
            "it must be a list of mappings with `results`, in the front matter", key="model-index"
        ) from None
    metrics = [
        {"type": one["metric"].replace("@", "_at_"), "name": one["metric"], "value": one["value"]}
        for one in figures
    ]
    ours = {
        "task": {"type": "image-text-retrieval", "name": "Retrieval"},
        "dataset": {"name": name, "type": name, "config": condition},
        "metrics": metrics,
    }
    others = [one for one in results if one.get("dataset") != ours["dataset"]]
    read.data["model-index"] = [{**models[0], "results": [*others, ours]}, *models[1:]]
    return str(read)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


FORMATS: dict[str, Callable[[ExportOptions, Results], Any]] = {
    "pinpoint": lambda options, results: {
        query: {"retrieved_items": names} for query, names in _ranked(options, results).items()
    },
    "top50": lambda options, results: {
        query: names[:50] for query, names in _ranked(options, results).items()
    },
    "mmeb": _mmeb,
    "mteb": _mteb,
    "csv": lambda _, results: numbers(results).to_csv(index=False),
    "latex": lambda options, results: latex(in_per_cent(results, _columns(options, results))),
    "card": lambda options, results: with_evaluation(_card(options.out, results), results),
}
"""Format -> function that returns a text, or data to write as JSON."""
