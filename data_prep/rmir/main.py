"""The command ``rge data rmir``, and what it checks before a run."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from data_prep.rmir.config import JudgeSpec, RmirConfig, load_config, models_used
from data_prep.rmir.decisions import REVIEWED, about_panel
from data_prep.rmir.oracle import Oracle, write_library
from data_prep.rmir.pictures.download import is_address
from data_prep.rmir.pictures.library import Library
from data_prep.rmir.results import report
from data_prep.rmir.run import STAGES, Run, stages_of
from data_prep.rmir.seed_set import settle_library
from data_prep.rmir.stages import WORK
from data_prep.rmir.wording import wording
from rge.calls.local_server import LocalServer
from rge.calls.model_config import CHARACTERS_PER_TOKEN, ModelConfig
from rge.calls.prices import confirm
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.files import write_text

SETTINGS = "settings.yaml"
"""File in a run's folder with the settings of the last command, which `data_prep.rmir.review` reuses."""


@dataclass
class RmirCommand(RmirConfig):
    """Make reasoning-intensive retrieval data from any pictures, with models behind endpoints; resumable.

    Takes ``config=NAME``, these options, and every key of the config; ``config=demo`` needs no model, key or network.
    """

    stage: Literal[("all", *STAGES)] = "all"  # type: ignore[valid-type]
    """Stage to run; by default all, in order."""
    dry_run: bool = False
    """Make no calls; print the number of calls, tokens and the cost."""
    yes: bool = False
    """On a terminal, do not ask for confirmation before the first paid call; the estimate is still printed."""
    status: bool = False
    """Show progress and costs; short form: the word ``status``."""


def main(words: Sequence[str]) -> None:
    """Run stages, show progress, or estimate the cost."""
    config = load_config(["status=true" if word == "status" else word for word in words], RmirCommand)
    if config.oracle and config.library.path is None:
        config.library.path = str(Path(config.out) / "library.csv")
        if not config.status:
            write_library(Path(config.library.path))
    if config.dry_run:
        print(estimate(config))
        return
    if config.status:
        with closing(Run(config, read_only=True)) as run:
            print(status(run))
        return
    with ExitStack() as stack:
        if config.oracle:
            server = stack.enter_context(LocalServer(Oracle()))
            for model in config.models.values():
                model.base_url = server.url
        run = stack.enter_context(closing(Run(config)))
        stages = STAGES if config.stage == "all" else (config.stage,)
        asked = _models_asked(run, stages)
        if not config.oracle and any(model.paid() for model in asked):
            confirm(estimate(config), yes=config.yes)
        run_stages(run, stages)
        page = report.write(run)
        print(page.read_text(encoding="utf-8"))
        print(f"{page}\n{run.out / 'dataset'}" if config.stage in ("all", "split", "audit") else page)
        if run.done("split") is not None:
            advice = report.about_split(run.rows("split", "splits"), config.split.tsr_threshold)
            if advice is not None:
                print(advice)


def _models_asked(run: Run, stages: Sequence[str]) -> list[ModelConfig]:
    """The models that unfinished stages call.

    Raises `UserError`, before hours of embedding instead of after: a key is missing, or ``budget`` could not hold without a price.
    """
    config = run.config
    todo = [stage for stage in stages_of(config) if stage in stages and run.done(stage) is None]
    asked = {name: config.models[name] for key, name in models_used(config) if key.partition(".")[0] in todo}
    for model in config.models.values() if asked else ():
        model.key()
    for name, model in asked.items():
        if config.budget is not None and not model.has_price():
            raise UserError(
                "budget needs its price, which no table lists: set its input_price and output_price (0 if it is free)",
                key=f"models.{name}",
                kind="price",
            )
    return [*asked.values()]


def run_stages(run: Run, stages: Sequence[str]) -> None:
    """Run the stages that are not finished. Raises `UserError`: an earlier one is not, or none is part of the run."""
    present = stages_of(run.config)
    todo = [stage for stage in stages if stage in present]
    if not todo:
        raise UserError(
            "stage=caption needs a model that writes captions: set, for example, caption.model=writer",
            key="caption.model",
        )
    # Later stages show no model a picture, and the export checks its own.
    if STAGES.index(todo[0]) <= STAGES.index("judge"):
        settle_library(run)
    for before in present[: present.index(todo[0])]:
        if run.done(before) is None:
            raise UserError(
                f"{todo[0]} needs {before}, which is not finished with these settings",
                place=todo[0],
                key="stage",
                kind=before,
            )
    whole = asdict(run.config)
    kept = {item.name: whole[item.name] for item in fields(RmirConfig)}
    write_text(run.out / SETTINGS, yaml.safe_dump(json.loads(json.dumps(kept, default=str)), sort_keys=False))
    for stage in todo:
        earlier = run.done(stage)
        finished = earlier is not None and not earlier.get("unanswered")
        found = run.run(stage, WORK[stage])
        counts = ", ".join(
            f"{key} {value:,}" for key, value in found["counts"].items() if isinstance(value, int)
        )
        took = "finished before" if finished else f"{found['seconds']:.1f} s"
        left = f"; {found['unanswered']:,} calls unanswered" if found.get("unanswered") else ""
        print(f"{stage}: {took}; {counts}{left}", flush=True)
    if (run.out / REVIEWED).is_file() and about_panel(run.out / REVIEWED) is None:
        print(
            f"{run.out / REVIEWED} is about earlier questions or judgements and does not count: python -m data_prep review "
            f"run={run.out} apply=FILES applies the verdicts that are still about the same questions",
            file=sys.stderr,
            flush=True,
        )


def status(run: Run) -> str:
    """Progress of the stages, and costs so far."""
    lines = []
    for stage in stages_of(run.config):
        found = run.done(stage)
        parts = len(list(run.path(stage).rglob("part-*.parquet")))
        state = f"done in {found['seconds']:.1f} s, {found['calls']:,} calls" if found else "not done"
        if found and found.get("unanswered"):
            state += f", {found['unanswered']:,} unanswered"
        lines.append(f"{stage:<9} {state}{f' ({parts} parts written)' if parts and not found else ''}")
    for entry in run.store.ledger():
        batches = f" ({entry.batch_calls:,} in batches)" if entry.batch_calls else ""
        line = f"{entry.endpoint}: {entry.calls:,} calls{batches}, {entry.cost:.4f} spent"
        if entry.lost_calls:
            line += (
                f", plus at most {entry.lost_cost:.4f} for {entry.lost_calls:,} attempts lost or in flight"
            )
        lines.append(line)
    return "\n".join(lines)


Range = tuple[float, float]
"""Expected and maximum value of a number."""
QUERIES_PER_INPUT, SHARE_VALID = 2.5, 0.6
"""Guesses; in the paper, about 60 % of the queries are valid."""
OUTPUT_TOKENS = {"caption": 60, "generate": 600, "filter": 200, "judge": 200}
"""Guessed tokens of an answer."""
GUESSES = {
    "caption": "captions missing as often in the seed set as in the library",
    "generate": f"{QUERIES_PER_INPUT:g} queries per input",
    "filter": f"{SHARE_VALID:.0%} valid",
    "retrieve": "no candidate found by more than one index",
}
"""What is guessed about each stage until it is finished."""


@dataclass
class _Asked:
    """A stage's calls to one model."""

    model: str
    calls: Range
    characters: int  # of one prompt
    pictures: int = 1  # in one prompt
    answers: float = 1.0  # to one call


def _seed_counts(config: RmirConfig) -> tuple[dict[str, Any], int]:
    """Counts of the seed stage, guessed from the library, and how many pictures will be downloaded."""
    rows = [(row["ref"], row["caption"]) for row in Library(config.library).rows(pictures=False)]
    chosen = min(len(rows), config.seed.clusters * config.seed.per_cluster)
    without = chosen * sum(caption is None for _, caption in rows) / len(rows)
    counts = {"listed": len(rows), "usable": len(rows), "seed": chosen, "with_caption": chosen - without}
    return counts, sum(is_address(ref) for ref, _ in rows)


def _asked(config: RmirConfig, finished: dict[str, Any], seed: dict[str, Any]) -> dict[str, list[_Asked]]:
    """Calls, by stage; counts of finished stages replace the guesses."""

    def counted(stage: str, key: str, about: float, most: float) -> Range:
        return (finished[stage][key],) * 2 if stage in finished else (about, most)

    texts, retrieve, limit = wording(config.prompts), config.retrieve, config.generate.max_inputs
    inputs = seed["seed"] if limit is None else min(seed["seed"], limit)
    categories = len(config.generate.categories)
    per_input = min(QUERIES_PER_INPUT, categories)
    queries = counted("generate", "queries", inputs * per_input, inputs * categories)
    valid = counted("filter", "valid", queries[0] * SHARE_VALID, queries[1])
    found = retrieve.by_image + retrieve.by_caption + sum(spec.count for spec in retrieve.more)
    found = min(found, max(seed["usable"] - retrieve.exclude_input, 0))
    about, most = counted("retrieve", "triplets", valid[0] * found, valid[1] * found)
    captions = (seed["seed"] - seed["with_caption"],) * 2

    def judged(spec: JudgeSpec) -> _Asked:
        num_calls = -(-spec.count // config.models[spec.model].draws_a_call)  # of a triplet
        calls = about * num_calls, most * num_calls
        return _Asked(spec.model, calls, len(texts.judge) + 80, 2, spec.count / num_calls)

    return {
        "caption": [_Asked(config.caption.model or "", captions, len(texts.caption))],
        "generate": [_Asked(config.generate.model, (inputs, inputs), len(texts.generate))],
        "filter": [_Asked(config.filter.model, queries, len(texts.filter) + 200)],
        "judge": [judged(spec) for spec in config.judge.judges],
    }


def estimate(config: RmirConfig) -> str:
    """Estimate calls, tokens and cost of every stage without making a call.

    Counts of finished stages replace the guesses. So, after a run over a few inputs (``generate.max_inputs``), the
    estimate for all inputs is based on your own pictures and prompts.
    """
    lines = [
        "| stage | model | calls | input tokens | output tokens | cost |",
        "|---|---|---:|---:|---:|---:|",
    ]
    total = left = most_left = 0.0
    unpriced = set()
    with closing(Run(config, read_only=True)) as run:
        stages = stages_of(config)
        finished = {stage: found["counts"] for stage in stages if (found := run.done(stage))}
        seed, num_addresses = (finished["seed"], 0) if "seed" in finished else _seed_counts(config)
        asked = _asked(config, finished, seed)
        for stage in stages:
            mark = f"{stage} (done)" if stage in finished else stage
            for calls in asked.get(stage, ()):
                if not config.models[calls.model].has_price():
                    unpriced.add(f"models.{calls.model}")
                row, cost, most = _costs(config, run.store, stage, calls)
                total += cost
                if stage not in finished:
                    left, most_left = left + cost, most_left + most
                lines.append(f"| {mark} | {row} |")
            if stage not in asked:
                lines.append(f"| {mark} | none | 0 | 0 | 0 | 0.00 |")
    guesses = [GUESSES[stage] for stage in stages if stage in GUESSES and stage not in finished]
    costs = (
        f"{total:,.2f} in total, {left:,.2f} of it in stages not done yet (at most {most_left:,.2f}, if every question is valid, "
        "every answer max_tokens long and no call repeated)"
    )
    names = " and ".join(sorted(unpriced))
    if unpriced == {
        f"models.{calls.model}" for of_stage in asked.values() for calls in of_stage if calls.model
    }:
        costs = f"the cost is not known, {_no_price(names)}"
    elif unpriced:
        costs += f", without the calls of {names}, {_no_price('it' if len(unpriced) == 1 else 'these')}"
    lines += [
        f"\n{seed['listed']:,} pictures listed; {costs}.",
        f"No calls were made yet. Guesses: {', '.join([*guesses, 'tokens of prompts and answers'])}.",
    ]
    if num_addresses:
        lines.append(f"{num_addresses:,} pictures are at web addresses; the seed stage will download them.")
    keys = {config.models[name].key_env for _, name in models_used(config)}
    if unset := sorted(key for key in keys if key and not os.environ.get(key)):
        lines.append(f"Not set in the environment: {', '.join(unset)}")
    return "\n".join(lines)


def _no_price(names: str) -> str:
    return f"since no price is given for {names}: set input_price and output_price (0 if a model costs nothing), or prices=FILE"


def _costs(config: RmirConfig, store: AnswerStore, stage: str, asked: _Asked) -> tuple[str, float, float]:
    """The cells of a row, the expected cost and the maximum cost."""
    model = config.models[asked.model]
    stats = store.billing_stats(model.endpoint, pictures=True)
    number, most = asked.calls
    per_call = asked.characters / CHARACTERS_PER_TOKEN + asked.pictures * model.picture_tokens
    tokens_in = number * per_call * stats.mean_input
    tokens_out = number * asked.answers * OUTPUT_TOKENS[stage]
    most_in = most * per_call * stats.max_input
    most_out = most * asked.answers * getattr(config, stage).max_tokens * stats.max_output
    batch = model.mode == "batch"
    cost = model.cost(int(tokens_in), int(tokens_out), batch=batch)
    most_cost = model.cost(int(most_in), int(most_out), batch=batch)
    shown = f"{cost:,.2f}" if model.has_price() else "unknown"
    row = f"{model.name} | {number:,.0f} | {tokens_in:,.0f} | {tokens_out:,.0f} | {shown}"
    return row, cost, max(cost, most_cost)
