"""Accuracy against test-time cost: caps on rationales, or rationales for some queries only.

    rge eval budget checkpoint=DIR set=DIR out=DIR [caps=4,8,16] [auto=0.25,0.5]

Each point (docs/evaluation.md lists them) gets an evaluation directory under ``out``, which `compare`, `report` and `rerank`
accept like those of ``run``. On a suite, accuracy, gains and costs are means over members.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from eval.benchmarks.suite import is_suite, load_suite, mean_over, measure_members
from eval.commands.run import Condition, RunOptions, Session, write_page
from eval.embedding.set_embeddings import Embeddings
from eval.pages.charts import COSTS, budget_file
from eval.pages.evaluations import BASES, BUDGET
from eval.pages.wording import number
from eval.scoring.identity import versions
from eval.scoring.output_files import PER_QUERY, read_results, rerun_command
from eval.scoring.results import FORMAT
from eval.scoring.search import Ranking, choose
from eval.scoring.tables import write_tables
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.modes import Mode
from rge.common.options import Count, one_of
from rge.common.schema import Encoded
from rge.stats.intervals import OF_DIFFERENCES, Bootstrap, figures, in_words
from rge.vectors.fill_cache import Embeds

PLOT, TABLE = "budget.svg", "budget"
DECIDED = "direct to reasoning, decided by the model"
FIXED = "the same cap for all queries"
WRONG_KIND = "wrong_kind@1"
OVER_CAPS = {"over_caps": ("over caps", "tokens"), "over_caps_flops": ("over caps by FLOP", "gflops")}
"""Comparison with the curve of fixed caps -> its column, and the cost that is equal."""
SETTINGS = ("caps", "auto", "batch_size", "seed")
"""Options that budget.json records."""
Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(kw_only=True)
class BudgetOptions(RunOptions):
    """Evaluate a checkpoint in all modes: accuracy against tokens and time."""

    caps: tuple[Count, ...] | None = None
    """Caps on every rationale, in tokens: each is a point of a curve from direct to reasoning. null: 1, 2, 4, ... below
    the longest rationale."""
    auto: tuple[Fraction, ...] = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
    """For a checkpoint that decides for itself (docs/modes.md): it writes no rationale if the probability of `<emb>` as
    the first token is at least this high; each threshold is a point of a curve."""
    metric: str | None = None
    """Metric of the table and the plot; null: the benchmark's first."""


@dataclass(frozen=True)
class Point:
    """One point of the accuracy-cost plot."""

    name: str
    curve: str
    at: float  # position on its curve: k or share
    ranking: Ranking
    encoded: Encoded
    about: Mapping[str, Any] = field(default_factory=dict)  # further content for results.json
    writes: bool = True  # all queries, though maybe not a single token; else `<emb>` is given


def budget(options: BudgetOptions, load: Callable[[], Embeds] | None = None) -> Path:
    """Evaluate all points, print the table, write curves and page; returns ``out``. ``load``: see `eval.commands.run.run`."""
    given = (options.query_mode, options.query_modality, options.max_rationale_tokens)
    if given != (("reasoning",), ("both",), None):
        raise UserError("budget sets query mode, modality and cap itself: leave them out").about(
            "query_mode", "query_modality", "max_rationale_tokens"
        )
    options.check_model()
    metric = options.metric or options.protocol().headline[0]
    suite, load = is_suite(options.set), cache(load or options.loader())  # all members share one model
    if suite:
        dirs = measure_members(
            load_suite(options.set),
            replace(options, cache=options.root),  # members share it
            lambda _, of_member: _of_set(of_member, metric, load),
            more=lambda results: {
                "budget": _joined({name: one.budget.as_json() for name, one in results.items() if one.budget})
            },
        )
    else:
        dirs = _of_set(options, metric, load)
    if not dirs:
        return options.out
    rows = [_row(path, metric) for path in dirs]
    _add_gains(
        rows, options.out, metric, partial(mean_over, names=["value"], members=suite, seed=options.seed)
    )
    is_capped = any(row["curve"] == FIXED for row in rows)
    for row in rows:
        if row["name"] in BASES:  # the ends of the curve: no query reasons, all queries reason
            row["curve"] = FIXED if is_capped else DECIDED
    content = _content(options, metric, rows)
    formatted = table(content)
    print(f"\n{formatted.to_string(index=False)}", *content["notes"], sep="\n")
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_text(options.out / BUDGET, text + "\n")
    write_text(options.out / PLOT, budget_file(content))
    write_tables(options.out / TABLE, pd.json_normalize(rows, sep=" "), formatted)
    if options.report and not suite:
        write_page(options.out, [options.out], metric)
    return options.out


def _of_set(options: BudgetOptions, metric: str, load: Callable[[], Embeds]) -> list[Path]:
    """Measure all points of one set and return the directories of their evaluations; none except in the first process."""
    condition = Condition("reasoning", "both", options.out / "reasoning", rerun_command("budget", options))
    session = Session(options, [condition], load)
    protocol, wanted = session.measurement.protocol, session.measurement.wanted
    one_of("metric", [metric], tuple(dict.fromkeys((*protocol.names(wanted), *protocol.headline))))
    session.embeddings.fill_candidates()
    for mode in BASES:
        session.embeddings.fill_queries(mode, "both")
    process_group, written_Q, longest = session.embeddings.process_group, np.array([]), 0
    if process_group.is_first:
        candidate_CD = session.embeddings.candidates()
        encoded: dict[Mode, Encoded] = {mode: session.embeddings.queries(mode, "both") for mode in BASES}
        ranked = {mode: session.rank(of_mode.embeddings, candidate_CD) for mode, of_mode in encoded.items()}
        base = _Base(session, candidate_CD, encoded, ranked)
        longest = int(encoded["reasoning"].num_rationale_tokens.max(initial=0))
        written_Q = encoded["reasoning"].num_rationale_tokens > 0
    decides = process_group.once(lambda: bool(written_Q.any() and not written_Q.all()))
    always = _always_writing(session.embeddings) if decides else None
    capped = _capped(session.embeddings, options.caps, process_group.once(lambda: longest))
    if not process_group.is_first:
        return []
    points = chain(
        (Point(mode, mode, 1, ranked[mode], encoded[mode], writes=mode != "direct") for mode in BASES),
        _at_caps(base, capped),
        _decided(base, always) if always else (),
        _thresholds(base, options.auto),
    )
    dirs, gflops_of = [], _gflops(session)
    for point in points:
        asked: Mode = "direct" if point.name == "direct" else "reasoning"
        place = replace(condition, mode=asked, out=options.out / point.name)
        tokens_Q, ms_Q = (
            point.encoded.num_rationale_tokens,
            point.encoded.generate_ms + point.encoded.embed_ms,
        )
        costs = {"tokens": float(tokens_Q.mean()), "ms": float(ms_Q.mean())}
        if gflops_of is not None:
            costs["gflops"] = float(gflops_of(tokens_Q, point.writes).mean())
        block = {"name": point.name, "curve": point.curve, "at": point.at, **costs, **point.about}
        more = {"budget": block}
        session.write(place, point.ranking, point.encoded, more, tag=point.name)
        row = _row(place.out, metric)
        print(f"{point.name:24} {metric} {100 * row['value']:6.2f}  {row['tokens']:7.1f} tokens", flush=True)
        dirs.append(place.out)
    return dirs


def _row(directory: Path, metric: str) -> dict[str, Any]:
    """A point's row of budget.json, except comparisons with other points."""
    results = read_results(directory)
    one_of("metric", [metric], tuple(results.overall))
    assert results.budget is not None
    kinds = {WRONG_KIND: results.overall[WRONG_KIND]} if WRONG_KIND in results.overall else {}
    return results.budget.as_json() | {"metric": metric, **results.overall[metric], **kinds}


def _gflops(session: Session) -> Callable[[np.ndarray, bool], np.ndarray] | None:
    """Function of `rge.plan.costs.embedding_flops`'s arguments: 1e9 FLOPs of each query; None if rge does not make the prompts."""
    encoder: Any = session.embeddings.encoder
    builder = getattr(encoder, "builder", None)
    if builder is None:
        return None
    from rge.model.backbone import skeleton
    from rge.plan.costs import embedding_flops

    queries = session.measurement.wanted.query_items("both")
    outline, sizes = skeleton(encoder.model.model.config), [builder.measure(one, "query") for one in queries]
    return lambda tokens_Q, writes: embedding_flops(outline, sizes, tokens_Q, writes=writes) / 1e9


def table(content: Mapping[str, Any]) -> pd.DataFrame:
    """Accuracy, gain over direct mode and costs of all points, formatted for printing; no empty columns."""
    rows = content["points"]
    columns = {
        "": [row["name"] for row in rows],
        f"{content['metric']}, %": [_per_cent(row) for row in rows],
        f"{WRONG_KIND}, %": [_per_cent(row.get(WRONG_KIND)) for row in rows],
        "over direct": [_signed(row["gain"]) for row in rows],
        "over random": [_signed(row.get("over_random")) for row in rows],
        **{words: [_signed(row.get(key)) for row in rows] for key, (words, _) in OVER_CAPS.items()},
        "tokens": [f"{row['tokens']:.1f}" for row in rows],
        "ms": [f"{row['ms']:.1f}" for row in rows],
        "GFLOP": [number(row["gflops"]) if "gflops" in row else "" for row in rows],
    }
    return pd.DataFrame({name: cells for name, cells in columns.items() if any(cells)})


def _per_cent(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    return f"{100 * figure['value']:.1f} {in_words(figure['low'], figure['high'])}"


def _signed(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    return f"{100 * figure['value']:+.1f} {in_words(figure['low'], figure['high'], '+.1f')}"


def _always_writing(embeddings: Embeddings) -> Embeddings | None:
    """The same with an encoder forced to write; None if that is not possible, as with vLLM."""
    if embeddings.encoder.settings.engine is not None:
        print(
            "WARNING: engine=vllm cannot force a rationale: no points `adaptive` and `always`",
            file=sys.stderr,
        )
        return None
    always = embeddings.asking(min_new_tokens=1)
    always.fill_queries("reasoning", "both")
    return always


def _capped(embeddings: Embeddings, caps: Sequence[int] | None, longest: int) -> dict[int, Embeddings]:
    """The same with every cap, embedded; a cap of 0 is direct mode, which is measured anyway."""
    if caps is None:
        caps = [1 << place for place in range(max(longest - 1, 0).bit_length())]
        caps = caps if embeddings.encoder.settings.recipe is not None else []  # trained here
    found = {cap: embeddings.asking(max_rationale_tokens=cap) for cap in sorted({*caps} - {0})}
    for at_cap in found.values():
        at_cap.fill_queries("reasoning", "both")
    return found


@dataclass(frozen=True)
class _Base:
    """A set measured in both modes: the pool's embeddings (C, D), and the results of each mode."""

    session: Session
    candidate_CD: np.ndarray
    encoded: Mapping[Mode, Encoded]
    ranked: Mapping[Mode, Ranking]

    def rank(self, encoded: Encoded) -> Ranking:
        return self.session.rank(encoded.embeddings, self.candidate_CD)

    def choosing(self, name: str, reason_Q: np.ndarray, about: Mapping[str, Any]) -> Point:
        """The point at which the queries in `reason_Q` reason."""
        ranking = choose(reason_Q, self.ranked["reasoning"], self.ranked["direct"])
        chosen = _either(reason_Q, self.encoded["reasoning"], self.encoded["direct"])
        return Point(name, DECIDED, float(reason_Q.mean()), ranking, chosen, about)


def _either(reason_Q: np.ndarray, reasoned: Encoded, direct: Encoded) -> Encoded:
    """Results and costs if the queries in `reason_Q` reason, and the others are embedded directly, from one pass over the prompt."""

    def either(name: str) -> list[str]:
        pairs = zip(reason_Q, getattr(reasoned, name), getattr(direct, name), strict=True)
        return [one if chosen else other for chosen, one, other in pairs]

    return Encoded(
        embeddings=np.where(reason_Q[:, None], reasoned.embeddings, direct.embeddings),
        rationales=either("rationales"),
        num_rationale_tokens=np.where(reason_Q, reasoned.num_rationale_tokens, 0),
        stop_reasons=either("stop_reasons"),
        generate_ms=np.where(reason_Q, reasoned.generate_ms, 0.0),
        embed_ms=np.where(reason_Q, reasoned.embed_ms, direct.embed_ms),
    )


def _at_caps(base: _Base, capped: Mapping[int, Embeddings]) -> Iterator[Point]:
    """Every rationale ends after as many tokens."""
    for cap, embeddings in capped.items():
        written = embeddings.queries("reasoning", "both")
        yield Point(f"cap-{cap}", FIXED, cap, base.rank(written), written, {"cap": cap})


def _decided(base: _Base, always: Embeddings) -> Iterator[Point]:
    """A model that writes nothing for some queries: forced to write, and as it decides."""
    written, reasoned = always.queries("reasoning", "both"), base.encoded["reasoning"]
    yield Point("always", DECIDED, 1, base.rank(written), written)
    share = float((reasoned.num_rationale_tokens > 0).mean())
    about = {"decided": {"share": share}}
    yield Point("adaptive", DECIDED, share, base.ranked["reasoning"], reasoned, about)


def _thresholds(base: _Base, above: Sequence[float]) -> Iterator[Point]:
    """A model trained to decide, at several thresholds on the probability of writing nothing, and at that of ``mode=auto``."""
    encoder: Any = base.session.embeddings.encoder
    if not above or not encoder.settings.decides_itself:
        return
    probability_Q = encoder.direct_probabilities(base.session.measurement.wanted.query_items("both"))
    own = encoder.settings.generation.direct_above
    for threshold in sorted({*above, own}):
        reason_Q = probability_Q < threshold
        about = {"decided": {"direct_above": threshold, "share": float(reason_Q.mean())}}
        yield base.choosing(
            f"auto-{threshold:.12g}", reason_Q, about | ({"mode": "auto"} if threshold == own else {})
        )


def _add_gains(
    rows: Sequence[dict[str, Any]], out: Path, metric: str, mean: Callable[[pd.DataFrame], Bootstrap]
) -> None:
    """Add the paired gain over direct mode to each row; ``mean`` takes per-query differences as ``value``."""
    values = {
        row["name"]: pd.read_parquet(out / row["name"] / PER_QUERY, columns=["category", "group", metric])
        for row in rows
    }
    direct = values["direct"]

    def figure(difference: pd.Series) -> dict[str, float | None]:
        return figures(mean(direct.assign(value=difference)), OF_DIFFERENCES)[0]

    for row in rows:
        value_Q = values[row["name"]][metric]
        row["gain"] = None if row["name"] == "direct" else figure(value_Q - direct[metric])
        if "decided" in row:  # compare with the same number of random queries of each member
            share = row["decided"]["share"]
            share_Q = (
                direct["category"].map(row["decided"]["shares"]) if "shares" in row["decided"] else share
            )
            written = values["always" if row["name"] == "adaptive" else "reasoning"][metric]
            expected = (1 - share_Q) * direct[metric] + share_Q * written
            row["over_random"] = figure(value_Q - expected)
            row["at_random"] = row["value"] - row["over_random"]["value"]
    fixed = [row for row in rows if row["curve"] == FIXED or row["name"] in BASES]
    for row in rows if len(fixed) > len(BASES) else ():
        for key, (_, cost) in OVER_CAPS.items():
            if "decided" in row and cost in row:
                expected = _between(row[cost], cost, fixed, values, metric)
                row[key] = figure(values[row["name"]][metric] - expected)


def _between(
    spent: float,
    cost: str,
    fixed: Iterable[Mapping[str, Any]],
    values: Mapping[str, pd.DataFrame],
    metric: str,
) -> pd.Series:
    """Per-query values on the curve of fixed caps at the same cost: a share of the queries has one cap, the others the next."""
    fixed = sorted(fixed, key=lambda row: float(row[cost]))
    after = next((place for place, row in enumerate(fixed) if row[cost] >= spent), len(fixed) - 1)
    high, low = fixed[after], fixed[max(after - 1, 0)]
    span = high[cost] - low[cost]
    share = min((spent - low[cost]) / span, 1.0) if span > 0 else 1.0
    return (1 - share) * values[low["name"]][metric] + share * values[high["name"]][metric]


def _joined(of_member: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join one point over all members: means of costs and shares."""
    parts = list(of_member.values())
    row = dict(parts[0]) | _means(parts, ("at", *(cost for cost in COSTS if cost in parts[0])))
    if "decided" in row:
        shares = {name: part["decided"]["share"] for name, part in of_member.items()}
        row["decided"] |= {"shares": shares, "share": float(np.mean(list(shares.values())))}
    return row


def _means(parts: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, float]:
    return {key: float(np.mean([part[key] for part in parts])) for key in keys}


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which point is ``mode=auto``, and which of the model's own decisions are no better than one cap for all queries."""
    notes = [f"{row['name']} is mode=auto." for row in rows if row.get("mode") == "auto"]
    for key, (column, cost) in OVER_CAPS.items():
        below = [row["name"] for row in rows if key in row and not (row[key]["low"] or 0) > 0]
        if below:
            equal = cost.replace("gflops", "FLOPs")
            notes.append(
                f"Not above the curve of fixed caps at as many {equal}: {', '.join(below)} (the interval of `{column}` is not above 0)."
            )
    return notes


def _content(options: BudgetOptions, metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    results = read_results(options.out / BASES[0])
    measured = results.set
    members = {} if measured.num_members is None else {"num_members": measured.num_members}
    return {
        "set": {"name": measured.name, "fingerprint": measured.fingerprint, "content": measured.content},
        "num_queries": measured.num_queries,
        **members,
        "checkpoint_hash": results.checkpoint_hash,
        "format": FORMAT,
        "metric": metric,
        "settings": {key: getattr(options, key) for key in SETTINGS},
        "costs": f"means over {'members' if results.suite else 'queries'}: tokens generated; milliseconds of a batch divided by its rows, search not counted; FLOPs of a query alone by rge plan's formulas",
        "points": list(rows),
        "notes": _notes(rows),
        "versions": versions(),
    }
