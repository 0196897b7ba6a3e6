"""Accuracy against test-time cost: no rationale, one, several, or only for some queries.

    rge eval budget checkpoint=DIR set=DIR out=DIR [k=8] [gate=0.25,0.5]

Every way of asking gets an evaluation directory of its own under ``out``, like those of ``run``, so that `compare` and
`report` take them; ``budget.json``, ``budget.svg`` and the page put accuracy against generated tokens and against
milliseconds.

``direct``, ``reasoning``    no rationale, one greedy rationale
``mean-K``, ``max-K``        K drawn rationales: mean of the embeddings, or each candidate's best score
``gate-P``                   the P per cent of queries with the smallest margin between their first and second candidate
                             in direct mode reason; the others do not. Which end of the margins, and the threshold, are
                             learned on another set with gate_from=
``adaptive``, ``always``     where a checkpoint decides to write nothing for some queries: as it decides, and kept from
                             deciding; compared with as many queries chosen at random to reason
``auto-P``                   of a checkpoint trained to decide: as `mode=auto` with `generation.direct_above` P decides
``*-both``                   candidates reason too

The embeddings of every rationale are cached under its seed, so a larger k draws only what is new. On a suite every member
is asked in every way, and each way is joined as `eval.benchmarks.suite` joins evaluations: accuracy, gains and costs are means over
members, and a gate takes its share of every member's queries. `eval.commands.rerank` takes any of these directories.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.suite import (
    aggregate,
    each_member,
    is_suite,
    load_suite,
    loaded_once,
    mean_of,
    member_bootstraps,
    member_options,
)
from eval.commands.run import Condition, RunOptions, Session, default_loader, start
from eval.embedding.fill_cache import Embeds
from eval.embedding.identity import versions
from eval.embedding.processes import join
from eval.pages.budget_curves import BASES, BUDGET, as_file
from eval.scoring.fuse import max_score, mean_embedding, together
from eval.scoring.gate import Gate, choose, gate_for, gated, large_minus_small, margin
from eval.scoring.output_files import FORMAT, PER_QUERY, again, check_out, read_results
from eval.scoring.search import Ranking
from eval.scoring.tables import write_tables
from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.common.options import one_of
from rge.common.schema import Encoded
from rge.stats.intervals import OF_DIFFERENCES, Bootstrap, cluster_bootstrap, figures, in_words, index_of

PLOT, PAGE, TABLE = "budget.svg", "report.html", "budget"
FUSIONS = ("mean", "max")
GATED = "direct to reasoning, gated"
DECIDED = "direct to reasoning, decided by the model"


@dataclass(kw_only=True)
class BudgetOptions(RunOptions):
    """Evaluate every way of asking a checkpoint: accuracy against tokens and time."""

    k: int = 8
    """Rationales sampled per query, for fusion; 0: none."""
    draw_temperature: float = 0.7
    """Temperature of these samples."""
    fuse: tuple[str, ...] = FUSIONS
    """How to fuse: mean of embeddings and/or max of scores."""
    gate: tuple[float, ...] = ()
    """Shares of queries that reason (those with the smallest margins), such as 0.25,0.5."""
    gate_from: Path | None = None
    """Evaluations of this checkpoint in both modes on another set, by `run query_mode=reasoning,direct` or `budget`.
    From these the gate learns whether queries with small or with large margins should reason, and the thresholds; if it
    learns nothing, there is no gate. null: small margins, with thresholds from this set, which only describes it."""
    margin: tuple[float, ...] = ()
    """Margins below which a query reasons, if a threshold is known, from another set for example."""
    auto: tuple[float, ...] = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
    """For a checkpoint that decides for itself (docs/modes.md): thresholds on the probability of `<emb>` as the first
    token, from which on it writes no rationale; each is a point of a curve."""
    both_sides: bool = False
    """Evaluate with candidates that reason, too."""
    metric: str | None = None
    """Metric of the table and the plot; null: the benchmark's first."""


@dataclass(frozen=True)
class Point:
    """One way of asking.

    Attributes:
        at: k or share; where it stands on its curve.
        about: for results.json.
    """

    name: str
    curve: str
    at: float
    ranking: Ranking
    encoded: Encoded
    about: Mapping[str, Any] | None = None


def budget(options: BudgetOptions, load: Callable[..., Embeds] | None = None) -> Path:
    """Evaluate every way of asking, print the table, write curves and page.

    Args:
        options: see `BudgetOptions`.
        load: makes the encoder; as in `eval.commands.run.run`.

    Returns:
        ``out``.

    Raises:
        UserError: something given is wrong.
    """
    _check(options)
    metric = options.metric or options.protocol().headline[0]
    measure = _of_suite if is_suite(options.set) else _of_set
    found = measure(options, metric, loaded_once(load or default_loader(options)))
    if found is None:
        return options.out
    about, rows = found
    for row in rows:
        if row["name"] in BASES:  # where no query reasons, and where all do
            row["curve"] = GATED
    content = about | _content(options, metric, rows)
    shown = table(content)
    print(f"\n{shown.to_string(index=False)}")
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_bytes(options.out / BUDGET, text.encode() + b"\n")
    write_bytes(options.out / PLOT, as_file(content).encode())
    write_tables(options.out / TABLE, pd.json_normalize(rows, sep=" "), shown)
    if options.report:
        print(f"\n{_page(options, content)}")
    return options.out


def _page(options: BudgetOptions, content: Mapping[str, Any]) -> Path:
    page = options.out / PAGE
    if is_suite(options.set):
        from eval.pages.boards.leaderboard import write_leaderboard

        return write_leaderboard([str(options.out)], page)
    from eval.pages.report import write_report

    dirs = [options.out / name for name in BASES]
    return write_report(dirs, page, metric=content["metric"], budget=content)


def _of_set(
    options: BudgetOptions, metric: str, load: Callable[..., Embeds]
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """One set: what budget.json says of it, and the points; None in all processes but the first."""
    found = _measure(options, metric, load)
    if found is None:
        return None
    session, rows = found

    def mean(frame: pd.DataFrame) -> Bootstrap:
        return cluster_bootstrap(
            frame[["value"]].to_numpy(np.float64), index_of(frame["group"].tolist()), seed=options.seed
        )

    _add_gains(rows, {row["name"]: _values(options.out / row["name"], metric) for row in rows}, mean)
    about = {
        "set": {key: getattr(session.wanted, key) for key in ("name", "fingerprint", "content")},
        "num_queries": len(session.wanted.queries),
        "checkpoint_hash": session.encoder.checkpoint_hash,
    }
    return about, rows


def _of_suite(
    options: BudgetOptions, metric: str, load: Callable[..., Embeds]
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The same for all members of a suite, joined point by point."""
    suite = load_suite(options.set)
    of_member: dict[str, list[dict[str, Any]]] = {}

    def one(name: str, path: Path, out: Path) -> None:
        found = _measure(member_options(options, path, out), metric, load)
        if found is not None:
            of_member[name] = found[1]

    dirs = each_member(suite, options.out, one)
    if not join().is_first:
        return None
    rows, values, content = [], {}, dict[str, Any]()
    shared = set.intersection(*({row["name"] for row in found} for found in of_member.values()))
    alike = [[row for row in found if row["name"] in shared] for found in of_member.values()]
    for parts in zip(*alike, strict=True):  # a model may decide for itself in some members only
        row = _joined(dict(zip(of_member, parts, strict=True)))
        name, out = row["name"], options.out / row["name"]
        inner = {member: path / name for member, path in dirs.items()}
        more = {"budget": row}
        content = aggregate(suite, inner, out, seed=options.seed, overwrite=options.overwrite, more=more)
        if metric not in content["macro"]:
            raise UserError(f"metric {metric} has no mean over members: not every member has it")
        rows.append(row | {"metric": metric, **content["macro"][metric]})
        values[name] = _values(out, metric)

    def mean(frame: pd.DataFrame) -> Bootstrap:
        return mean_of(list(member_bootstraps(frame, ["value"], seed=options.seed).values()))

    _add_gains(rows, values, mean)
    about = {
        "set": {key: content["set"][key] for key in ("name", "fingerprint", "content")},
        "num_queries": content["set"]["num_queries"],
        "num_members": len(dirs),
        "checkpoint_hash": content["checkpoint_hash"],
    }
    return about, rows


def _measure(
    options: BudgetOptions, metric: str, load: Callable[..., Embeds]
) -> tuple[Session, list[dict[str, Any]]] | None:
    """Ask one set in every way and write an evaluation for each; None in all processes but the first."""
    condition = Condition("reasoning", "both", options.out / "reasoning")
    session = start(options, [condition], load)
    if session.seed is not None:
        raise UserError(
            "temperature= makes the one rationale a drawn one: draw_temperature= is for those of k="
        )
    drawn = _generating(session, temperature=options.draw_temperature)
    sides = [options.candidate_mode, *(["reasoning"] if options.both_sides else [])]
    for side in dict.fromkeys(sides):
        session.embeddings.fill_candidates(side)  # type: ignore[arg-type]
    for mode in BASES:
        session.embeddings.fill_queries(mode, "both")  # type: ignore[arg-type]
    for number in range(options.k):
        drawn.embeddings.fill_queries("reasoning", "both", options.seed + number)
    base = _base(session) if session.team.is_first else None
    decides = session.team.once(lambda: base is not None and _decides(base.encoded["reasoning"]))
    always = _kept_writing(session) if decides else None
    if always is not None:
        always.embeddings.fill_queries("reasoning", "both")
    if base is None:
        return None
    rows = []
    for point in _points(options, session, drawn, metric, base, always):
        row = _write(options, session, point, metric)
        rows.append(row)
        print(
            f"{point.name:24} {metric} {100 * row['value']:6.2f}  {row['tokens']:7.1f} tokens",
            flush=True,
        )
    return session, rows


def _learned(directory: Path, session: Session, metric: str, shares: Sequence[float]) -> dict[float, Gate]:
    """A gate for each share, from evaluations in both modes on another set; none where that does not tell the direction.

    Raises:
        UserError: they are not there, of another checkpoint, or of the set that is measured.
    """
    paths = [
        next(
            (path for path in (directory / mode, directory / f"{mode}-both") if path.is_dir()),
            directory / mode,
        )
        for mode in BASES
    ]
    for path in paths:
        results = read_results(path)
        if results.get("checkpoint_hash") != session.encoder.checkpoint_hash:
            raise UserError(f"gate_from: {path} is an evaluation of another checkpoint")
        if results["set"]["fingerprint"] == session.wanted.fingerprint:
            raise UserError(
                f"gate_from: {path} is of the set that is measured here: a gate learned on it would only describe it"
            )
    direct, reasoned = (pd.read_parquet(path / PER_QUERY).set_index("query_id") for path in paths)
    if metric not in direct or set(direct.index) != set(reasoned.index):
        raise UserError(f"gate_from: {paths[0]} and {paths[1]} need the metric {metric} of the same queries")
    margin_Q = np.array([one[0] - one[1] if len(one) > 1 else np.inf for one in direct["top10_scores"]])
    gain_Q = (reasoned[metric].loc[direct.index] - direct[metric]).to_numpy(np.float64)
    found = large_minus_small(margin_Q, gain_Q, index_of(direct["group"].tolist()), seed=session.options.seed)
    said = f"in {directory} queries with large margins gain {_signed(found)} points more than those with small ones"
    if found["low"] is None or found["low"] <= 0 <= found["high"]:
        print(f"WARNING: no gate: {said}, which does not tell the direction", file=sys.stderr, flush=True)
        return {}
    print(f"gate: {said}")
    return {share: gate_for(margin_Q, share, above=found["value"] > 0) for share in shares}


def table(content: Mapping[str, Any]) -> pd.DataFrame:
    """Accuracy, gain over direct mode and costs of every way of asking, as people read them."""
    metric = content["metric"]
    return pd.DataFrame(
        {
            "": [row["name"] for row in content["points"]],
            f"{metric}, %": [
                f"{100 * row['value']:.1f} {in_words(row['low'], row['high'])}" for row in content["points"]
            ],
            "over direct": [_signed(row["gain"]) for row in content["points"]],
            "over random": [_signed(row.get("over_random")) for row in content["points"]],
            "tokens": [f"{row['tokens']:.1f}" for row in content["points"]],
            "ms": [f"{row['ms']:.1f}" for row in content["points"]],
        }
    )


def _signed(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    return f"{100 * figure['value']:+.1f} {in_words(figure['low'], figure['high'], '+.1f')}"


def _check(options: BudgetOptions) -> None:
    if options.query_mode != ("reasoning",) or options.query_modality != ("both",):
        raise UserError(
            "budget asks with and without a rationale and shows everything: leave out query_mode=, query_modality="
        )
    if options.k < 0:
        raise UserError(f"k must be at least 0, got {options.k}")
    if options.k and options.draw_temperature <= 0:
        raise UserError(
            f"draw_temperature must be above 0, got {options.draw_temperature:g}: greedy rationales are all the same"
        )
    one_of("fuse", options.fuse, FUSIONS)
    for key, most in (("gate", 1.0), ("margin", np.inf), ("auto", 1.0)):
        for value in getattr(options, key):
            if not 0 < value < most:
                raise UserError(f"{key}={value:g} must be between 0 and {most:g}")


def _generating(session: Session, **generation: Any) -> Session:
    """The same session with an encoder that generates in another way."""
    encoder = session.encoder.with_(**generation)
    embeddings = replace(session.embeddings, encoder=encoder, _filled={})
    return replace(session, encoder=encoder, embeddings=embeddings)


def _decides(reasoned: Encoded) -> bool:
    """Whether the model writes something for some queries and nothing for others."""
    return bool((reasoned.num_rationale_tokens == 0).any() and (reasoned.num_rationale_tokens > 0).any())


def _kept_writing(session: Session) -> Session | None:
    """The same session with an encoder that always writes; None where it cannot be told to, as with vLLM."""
    if session.encoder.settings.engine is not None:
        print(
            "WARNING: engine=vllm cannot be kept from writing nothing: no point `adaptive`", file=sys.stderr
        )
        return None
    return _generating(session, min_new_tokens=1)


@dataclass(frozen=True)
class _Base:
    """The pool's embeddings (C, D), and what both modes gave, by mode."""

    candidate_CD: np.ndarray
    encoded: dict[str, Encoded]
    ranked: dict[str, Ranking]

    def gated(self, name: str, curve: str, reason_Q: np.ndarray, about: Mapping[str, Any]) -> Point:
        """The point where some queries reason and the others do not."""
        share = float(reason_Q.mean())
        ranking = choose(reason_Q, self.ranked["reasoning"], self.ranked["direct"])
        chosen = gated(reason_Q, self.encoded["reasoning"], self.encoded["direct"])
        return Point(name, curve, share, ranking, chosen, {"gate": {**about, "share": share}})


def _base(session: Session) -> _Base:
    embeddings = session.embeddings
    candidate_CD = embeddings.candidates(session.options.candidate_mode)
    encoded = {mode: embeddings.queries(mode, "both") for mode in BASES}  # type: ignore[arg-type]
    ranked = {mode: session.rank(one.embeddings, candidate_CD) for mode, one in encoded.items()}
    return _Base(candidate_CD, encoded, ranked)


def _points(
    options: BudgetOptions,
    session: Session,
    drawn: Session,
    metric: str,
    base: _Base,
    always: Session | None,
) -> Iterator[Point]:
    encoded, ranked = base.encoded, base.ranked
    for mode in BASES:
        yield Point(mode, mode, 1, ranked[mode], encoded[mode])
    yield from _fused(options, session, drawn, base.candidate_CD)
    margin_Q = margin(ranked["direct"])
    for name, gate, learned in _gates(options, session, metric, margin_Q):
        yield base.gated(name, GATED, gate.opens(margin_Q), gate.about() | learned)
    if always is not None:
        written = always.embeddings.queries("reasoning", "both")
        yield Point("always", DECIDED, 1, session.rank(written.embeddings, base.candidate_CD), written)
        share = float((encoded["reasoning"].num_rationale_tokens > 0).mean())
        about = {"gate": {"decided_by": "the model", "share": share}}
        yield Point("adaptive", DECIDED, share, ranked["reasoning"], encoded["reasoning"], about)
    if session.encoder.settings.decides_itself:
        yield from _thresholds(session, sorted(set(options.auto)), base)
    if options.both_sides:
        reasoned_CD = session.embeddings.candidates("reasoning")
        costs = session.embeddings.candidate_costs("reasoning")
        for mode in BASES:
            both = {"candidate_mode": "reasoning", "a_candidate_costs": costs}
            ranking = session.rank(encoded[mode].embeddings, reasoned_CD)
            yield Point(f"{mode}-both", "candidates reason too", 1, ranking, encoded[mode], both)


def _fused(
    options: BudgetOptions, session: Session, drawn: Session, candidate_CD: np.ndarray
) -> Iterator[Point]:
    """One to k drawn rationales as one ranking."""
    samples: list[Encoded] = []
    rankings: list[Ranking] = []
    for number in range(1, options.k + 1):
        samples.append(drawn.embeddings.queries("reasoning", "both", options.seed + number - 1))
        fused = together(samples, mean_embedding([one.embeddings for one in samples]))
        about = {"k": number, "draw_temperature": options.draw_temperature}
        if "mean" in options.fuse:
            ranking = session.rank(fused.embeddings, candidate_CD)
            yield Point(f"mean-{number}", "mean of k", number, ranking, fused, about)
        if "max" in options.fuse:
            rankings.append(session.rank(samples[-1].embeddings, candidate_CD))
            yield Point(f"max-{number}", "max of k", number, max_score(rankings), fused, about)


def _gates(
    options: BudgetOptions, session: Session, metric: str, margin_Q: np.ndarray
) -> Iterator[tuple[str, Gate, dict[str, str]]]:
    """Names, gates, and what is said of where they were learned."""
    asked, learned = sorted(set(options.gate)), dict[str, str]()
    if options.gate_from is None:
        gates = {share: gate_for(margin_Q, share) for share in asked}
    else:
        gates = _learned(options.gate_from, session, metric, asked)
        learned = {"learned_from": str(options.gate_from)}
    for share, gate in gates.items():
        yield f"gate-{100 * share:g}", gate, learned
    for value in sorted(set(options.margin)):
        yield f"gate-below-{value:g}", Gate(value), {}


def _thresholds(session: Session, above: Sequence[float], base: _Base) -> Iterator[Point]:
    """A model that decides by the probability of writing nothing, at several thresholds."""
    if not above:
        return
    probability_Q = session.encoder.direct_probabilities(session.wanted.query_items("both"))  # type: ignore[attr-defined]
    for threshold in above:
        reason_Q = probability_Q < threshold
        about = {"decided_by": "the model", "direct_above": threshold}
        point = base.gated(f"auto-{threshold:g}", DECIDED, reason_Q, about)
        # the prompt is encoded once: what reasons has no direct answer beside it
        spent = np.where(reason_Q, base.encoded["reasoning"].embed_ms, base.encoded["direct"].embed_ms)
        yield replace(point, encoded=replace(point.encoded, embed_ms=spent))


def _write(options: BudgetOptions, session: Session, point: Point, metric: str) -> dict[str, Any]:
    """Write a point's evaluation; its row of budget.json without what needs other points."""
    mode = "direct" if point.name.startswith("direct") else "reasoning"
    condition = Condition(mode, "both", options.out / point.name)  # type: ignore[arg-type]
    known = point.about or {}
    identity = {
        "set.fingerprint": session.wanted.fingerprint,
        "set.content": session.wanted.content,
        "checkpoint_hash": session.encoder.checkpoint_hash,
        "budget.draw_temperature": known.get("draw_temperature"),
    }
    check_out(condition.out, identity, overwrite=options.overwrite)
    ms_Q = point.encoded.generate_ms + point.encoded.embed_ms
    costs = {"tokens": float(point.encoded.num_rationale_tokens.mean()), "ms": float(ms_Q.mean())}
    about = {"name": point.name, "curve": point.curve, "at": point.at, **costs, **(point.about or {})}
    more = {"budget": about, "again": again("budget", options)}
    results = session.write(condition, point.ranking, point.encoded, more, tag=point.name)
    figure = results["micro"].get(metric)
    if figure is None:
        raise UserError(f"metric must be one of {', '.join(results['micro'])}, got {metric!r}")
    return about | {"metric": metric, **figure}


def _values(directory: Path, metric: str) -> pd.DataFrame:
    """An evaluation's per-query ``value`` of a metric, with ``category`` and ``group``."""
    frame = pd.read_parquet(directory / PER_QUERY, columns=["category", "group", metric])
    return frame.rename(columns={metric: "value"})


def _add_gains(
    rows: Sequence[dict[str, Any]],
    values: Mapping[str, pd.DataFrame],
    mean: Callable[[pd.DataFrame], Bootstrap],
) -> None:
    """Add the paired gain over direct mode to each row; ``mean`` takes per-query differences."""
    direct, reasoned = values["direct"], values["reasoning"]["value"]

    def figure(difference: pd.Series) -> dict[str, float | None]:
        (found,) = figures(mean(direct.assign(value=difference)), OF_DIFFERENCES)
        return found

    for row in rows:
        own = values[row["name"]]["value"]
        row["gain"] = None if row["name"] == "direct" else figure(own - direct["value"])
        if "gate" in row:  # against as many queries of each member chosen at random
            share = row["gate"]["share"]
            share_Q = direct["category"].map(row["gate"]["shares"]) if "shares" in row["gate"] else share
            written = values["always"]["value"] if row["name"] == "adaptive" else reasoned
            expected = (1 - share_Q) * direct["value"] + share_Q * written
            row["over_random"] = figure(own - expected)
            row["at_random"] = row["value"] - row["over_random"]["value"]


def _joined(of_member: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One way of asking, of all members: costs are means over members, counts are sums."""
    parts = list(of_member.values())
    own = ("metric", "value", "low", "high")
    row = {key: value for key, value in parts[0].items() if key not in own}
    row |= {key: _mean(parts, key) for key in ("at", "tokens", "ms")}
    if "gate" in row:
        gates = {name: part["gate"] for name, part in of_member.items()}
        apart = {"shares": "share"} | {key: key for key in row["gate"] if key.startswith("margin_")}
        row["gate"] |= {ours: {name: one[key] for name, one in gates.items()} for ours, key in apart.items()}
        row["gate"]["share"] = _mean(list(gates.values()), "share")
    if "a_candidate_costs" in row:
        costs = [part["a_candidate_costs"] for part in parts]
        row["a_candidate_costs"] = {key: _mean(costs, key) for key in costs[0]}
    return row


def _mean(parts: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([part[key] for part in parts]))


def _content(options: BudgetOptions, metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = (
        "k", "draw_temperature", "fuse", "gate", "gate_from", "margin", "auto", "both_sides", "batch_size", "seed",
    )  # fmt: skip
    return {
        "format": FORMAT,
        "metric": metric,
        "settings": {key: getattr(options, key) for key in keys},
        "costs": f"means over {'members' if is_suite(options.set) else 'queries'}: tokens generated; milliseconds of a batch divided by its rows, search not counted",
        "points": list(rows),
        "versions": versions(),
    }
