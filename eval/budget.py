"""What accuracy costs at test time: rationales or none, several of them, only where needed, and a judge on top.

    python -m eval budget checkpoint=DIR set=DIR out=DIR [k=8] [gate=0.25,0.5] [judge=DIR_OR_ADDRESS]

Every way of asking gets an evaluation directory of its own under ``out``, like those of ``run``, so that `compare` and
`report` take them; ``budget.json``, ``budget.svg`` and the page put accuracy against generated tokens and against
milliseconds.

``direct``, ``reasoning``    no rationale, one greedy rationale
``mean-K``, ``max-K``        K drawn rationales: mean of the embeddings, or each candidate's best score
``gate-P``                   the P per cent of queries with the smallest margin between their first and second candidate
                             in direct mode reason; the others do not
``*-both``                   candidates reason too
``judge-N-of-*``             a vision-language model reorders the first N (`eval.rerank`)

The embeddings of every rationale are cached under its seed, so a larger k draws only what is new.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.answers import Answers
from eval.budget_plot import Curve, Mark, standalone
from eval.encode import Embeds, write_atomically
from eval.fuse import choose, gated, margin, max_score, mean_embedding, together
from eval.options import UserError, one_of
from eval.outputs import FORMAT, PER_QUERY, check_out, versions
from eval.rerank import Judge, load_judge, rerank
from eval.run import Condition, RunOptions, Session, start
from eval.search import Ranking
from eval.stats import cluster_bootstrap, index_of, interval
from rge.schema import Encoded

JSON, PLOT, PAGE = "budget.json", "budget.svg", "report.html"
FUSIONS = ("mean", "max")
GATED = "direct to reasoning, gated"
CHUNK = 512
"""Pairs that a judge scores before they are kept."""


@dataclass(kw_only=True)
class BudgetOptions(RunOptions):
    """Options of ``python -m eval budget``; those of ``run``, and these."""

    k: int = 8
    """Rationales drawn for a query; 0: none, so neither fusion."""
    draw_temperature: float = 0.7
    """Of these draws."""
    fuse: tuple[str, ...] = FUSIONS
    """mean of embeddings and/or max of scores."""
    gate: tuple[str, ...] = ("0.1", "0.25", "0.5", "0.75")
    """Shares of the queries that reason, those with the smallest margins."""
    margin: tuple[str, ...] = ()
    """Margins below which a query reasons, where a threshold is known, as from another set."""
    both_sides: bool = False
    """Also with candidates that reason."""
    judge: str | None = None
    """Vision-language model that reorders the top: a directory, or the address of an OpenAI-compatible endpoint."""
    judge_model: str | None = None
    """Its name at that address."""
    judge_key_env: str | None = None
    """Environment variable with the key of that address."""
    top_n: tuple[str, ...] = ("5", "10", "20")
    """Candidates that it sees."""
    yes: str = "yes"
    """Its word for a match; one token."""
    no: str = "no"
    """Its word for none; one token."""
    metric: str | None = None
    """Metric of table and plot; null: the benchmark's first."""


@dataclass(frozen=True)
class Point:
    """One way of asking.

    Attributes:
        name: its directory.
        curve: what it is a point of.
        at: k, share or n; where it stands on its curve.
        ranking: of all queries.
        encoded: rationales and costs of the embedder.
        judge_ms_Q: milliseconds of the judge, or None.
        about: for results.json.
    """

    name: str
    curve: str
    at: float
    ranking: Ranking
    encoded: Encoded
    judge_ms_Q: np.ndarray | None = None
    about: Mapping[str, Any] | None = None


def budget(options: BudgetOptions, load: Callable[..., Embeds] | None = None) -> Path:
    """Evaluate every way of asking, print the table, write curves and page.

    Args:
        options: see `BudgetOptions`.
        load: makes the encoder; as in `eval.run.run`.

    Returns:
        ``out``.

    Raises:
        UserError: something given is wrong.
    """
    shares, margins, depths = _check(options)
    condition = Condition("reasoning", "both", options.out / "reasoning")
    session = start(options, [condition], load)
    if session.seed is not None:
        raise UserError(
            "temperature= makes the one rationale a drawn one: draw_temperature= is for those of k="
        )
    drawn = _drawing(session, options.draw_temperature)
    sides = [session.candidate_mode, *(["reasoning"] if options.both_sides else [])]
    for side in dict.fromkeys(sides):
        session.embeddings.fill_candidates(side)  # type: ignore[arg-type]
    for mode in ("direct", "reasoning"):
        session.embeddings.fill_queries(mode, "both")  # type: ignore[arg-type]
    for number in range(options.k):
        drawn.embeddings.fill_queries("reasoning", "both", options.seed + number)
    if not session.team.is_first:
        return options.out
    judge = None if options.judge is None else load_judge(options)
    metric = options.metric or session.protocol.headline[0]
    rows: list[dict[str, Any]] = []
    values: dict[str, pd.Series] = {}
    for point in _points(options, session, drawn, shares, margins, depths, judge):
        row, values[point.name] = _write(options, session, point, metric)
        rows.append(row)
        print(f"{point.name:24} {metric} {100 * row['value']:6.2f}  {row['tokens']:7.1f} tokens", flush=True)
    _compare(rows, values, session, options.seed)
    content = _content(options, session, metric, rows)
    print(f"\n{table(content)}")
    curves = curves_of(content)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(options.out / JSON, text.encode() + b"\n")
    write_atomically(options.out / PLOT, standalone(curves, metric).encode())
    if options.report:
        from eval.report import write_report

        dirs = [options.out / name for name in ("direct", "reasoning")]
        page = write_report(dirs, options.out / PAGE, metric=metric, budget=content)
        print(f"\n{page}")
    return options.out


def table(content: Mapping[str, Any]) -> str:
    """Accuracy, gain over direct mode and costs of every way of asking, for the terminal."""
    metric = content["metric"]
    frame = pd.DataFrame(
        {
            "": [row["name"] for row in content["points"]],
            f"{metric}, %": [
                f"{100 * row['value']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
                for row in content["points"]
            ],
            "over direct": [
                ""
                if row["gain"] is None
                else f"{100 * row['gain']['value']:+.1f} [{100 * row['gain']['low']:+.1f}, {100 * row['gain']['high']:+.1f}]"
                for row in content["points"]
            ],
            "tokens": [f"{row['tokens']:.1f}" for row in content["points"]],
            "ms": [f"{row['ms']:.1f}" for row in content["points"]],
        }
    )
    return frame.to_string(index=False)


def curves_of(content: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """The points of budget.json as curves, once against ``tokens`` and once against ``ms``."""
    out: dict[str, list[Curve]] = {}
    for cost in ("tokens", "ms"):
        marks: dict[str, list[Mark]] = {}
        for row in content["points"]:
            mark = Mark(row["name"], row[cost], row["value"], row["low"], row["high"])
            marks.setdefault(row["curve"], []).append(mark)
        out[cost] = [Curve(name, sorted(found, key=lambda m: m.x)) for name, found in marks.items()]
    return out


def _check(options: BudgetOptions) -> tuple[list[float], list[float], list[int]]:
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
    shares = _numbers("gate", options.gate, 0.0, 1.0)
    margins = _numbers("margin", options.margin, 0.0, float("inf"))
    depths = [int(n) for n in _numbers("top_n", options.top_n, 0.5, float("inf"), whole=True)]
    if max(depths) > options.depth:
        raise UserError(f"top_n={max(depths)} is deeper than depth={options.depth}")
    return shares, margins, depths


def _numbers(key: str, words: Sequence[str], low: float, high: float, *, whole: bool = False) -> list[float]:
    found = []
    for word in words:
        try:
            value = float(int(word) if whole else float(word))
        except ValueError:
            raise UserError(f"{key} must list {'whole ' if whole else ''}numbers, got {word!r}") from None
        if not low < value < high:
            raise UserError(f"{key}={word} must be between {low:g} and {high:g}")
        found.append(value)
    return sorted(set(found))


def _drawing(session: Session, temperature: float) -> Session:
    """The same session with an encoder that draws its rationales."""
    encoder = copy.copy(session.encoder)
    generation = encoder.settings["generation"] | {"temperature": temperature}
    encoder.settings = encoder.settings | {"generation": generation}
    return replace(
        session, encoder=encoder, embeddings=replace(session.embeddings, encoder=encoder, _filled={})
    )


def _points(
    options: BudgetOptions,
    session: Session,
    drawn: Session,
    shares: Sequence[float],
    margins: Sequence[float],
    depths: Sequence[int],
    judge: Judge | None,
) -> Iterator[Point]:
    embeddings = session.embeddings
    candidate_CD = embeddings.candidates(session.candidate_mode)
    encoded = {mode: embeddings.queries(mode, "both") for mode in ("direct", "reasoning")}  # type: ignore[arg-type]
    ranked = {mode: session.rank(one.embeddings, candidate_CD) for mode, one in encoded.items()}
    for mode in ("direct", "reasoning"):
        yield Point(mode, mode, 1, ranked[mode], encoded[mode])

    samples: list[Encoded] = []
    rankings: list[Ranking] = []
    for number in range(options.k):
        samples.append(drawn.embeddings.queries("reasoning", "both", options.seed + number))
        about = {"k": number + 1, "draw_temperature": options.draw_temperature}
        if "mean" in options.fuse:
            fused = together(samples, mean_embedding([one.embeddings for one in samples]))
            ranking = session.rank(fused.embeddings, candidate_CD)
            yield Point(f"mean-{number + 1}", "mean of k", number + 1, ranking, fused, about=about)
        if "max" in options.fuse:
            rankings.append(session.rank(samples[-1].embeddings, candidate_CD))
            fused = together(samples, mean_embedding([one.embeddings for one in samples]))
            yield Point(f"max-{number + 1}", "max of k", number + 1, max_score(rankings), fused, about=about)

    margin_Q = margin(ranked["direct"])
    thresholds = [(f"gate-{100 * share:g}", float(np.quantile(margin_Q, share))) for share in shares]
    thresholds += [(f"gate-below-{value:g}", value) for value in margins]
    for name, threshold in thresholds:
        reason_Q = margin_Q < threshold
        share = float(reason_Q.mean())
        about = {"gate": {"margin_below": threshold, "share": share}}
        ranking = choose(reason_Q, ranked["reasoning"], ranked["direct"])
        chosen = gated(reason_Q, encoded["reasoning"], encoded["direct"])
        yield Point(name, GATED, share, ranking, chosen, about=about)

    if options.both_sides:
        reasoned_CD = embeddings.candidates("reasoning")
        costs = embeddings.candidate_costs("reasoning")
        for mode in ("direct", "reasoning"):
            about = {"candidate_mode": "reasoning", "a_candidate_costs": costs}
            ranking = session.rank(encoded[mode].embeddings, reasoned_CD)
            yield Point(f"{mode}-both", "candidates reason too", 1, ranking, encoded[mode], about=about)

    if judge is not None:
        answers = Answers(embeddings.root / "judge.sqlite")
        for mode in ("direct", "reasoning"):
            for n in depths:
                found = rerank(session.wanted, ranked[mode], judge, answers, top_n=n, chunk=CHUNK)
                about = {"judge": judge.name, "top_n": n, "num_pairs": found.num_pairs}
                about["num_unanswered"] = found.num_unanswered
                name = f"judge-{n}-of-{mode}"
                yield Point(name, f"judge over {mode}", n, found.ranking, encoded[mode], found.ms_Q, about)
        answers.close()


def _write(
    options: BudgetOptions, session: Session, point: Point, metric: str
) -> tuple[dict[str, Any], pd.Series]:
    mode = "direct" if point.name.startswith("direct") or point.name.endswith("-of-direct") else "reasoning"
    condition = Condition(mode, "both", options.out / point.name)  # type: ignore[arg-type]
    known = point.about or {}
    identity = {
        "set.fingerprint": session.wanted.fingerprint,
        "checkpoint_hash": session.encoder.checkpoint_hash,
        "budget.draw_temperature": known.get("draw_temperature"),
        "budget.judge": known.get("judge"),
    }
    check_out(condition.out, identity, overwrite=options.overwrite)
    ms_Q = point.encoded.generate_ms + point.encoded.embed_ms
    if point.judge_ms_Q is not None:
        ms_Q = ms_Q + point.judge_ms_Q
    costs = {"tokens": float(point.encoded.num_rationale_tokens.mean()), "ms": float(ms_Q.mean())}
    about = {"name": point.name, "curve": point.curve, "at": point.at, **costs, **(point.about or {})}
    results = session.write(condition, point.ranking, point.encoded, {"budget": about}, tag=point.name)
    figure = results["micro"].get(metric)
    if figure is None:
        raise UserError(f"metric must be one of {', '.join(results['micro'])}, got {metric!r}")
    column = pd.read_parquet(condition.out / PER_QUERY, columns=[metric])[metric]
    return about | {"metric": metric, **figure}, column


def _compare(
    rows: list[dict[str, Any]], values: Mapping[str, pd.Series], session: Session, seed: int
) -> None:
    """Add the paired gain over direct mode, and to gates what as many queries chosen at random would give."""
    group_Q = index_of(session.wanted.columns["group"])
    for row in rows:
        row["curve"] = _curve(row)
        row["gain"] = None
        if row["name"] != "direct":
            found = cluster_bootstrap(
                (values[row["name"]] - values["direct"]).to_numpy(np.float64)[:, None], group_Q, seed=seed
            )
            low_M, high_M = interval(found)
            row["gain"] = {
                "value": float(found.estimate_M[0]),
                "low": float(low_M[0]),
                "high": float(high_M[0]),
            }
        if "gate" in row:
            share = row["gate"]["share"]
            means = {mode: float(values[mode].mean()) for mode in ("direct", "reasoning")}
            row["at_random"] = (1 - share) * means["direct"] + share * means["reasoning"]


def _curve(row: Mapping[str, Any]) -> str:
    """A gate leads from direct mode, where no query reasons, to reasoning, where all do."""
    return GATED if row["name"] in ("direct", "reasoning") else row["curve"]


def _content(
    options: BudgetOptions, session: Session, metric: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    keys = (
        "k",
        "draw_temperature",
        "fuse",
        "gate",
        "margin",
        "both_sides",
        "judge",
        "top_n",
        "batch_size",
        "seed",
    )
    return {
        "format": FORMAT,
        "set": {"name": session.wanted.name, "fingerprint": session.wanted.fingerprint},
        "num_queries": len(session.wanted.queries),
        "checkpoint_hash": session.encoder.checkpoint_hash,
        "metric": metric,
        "settings": {key: getattr(options, key) for key in keys},
        "costs": "means over queries: tokens generated; milliseconds of a batch divided by its rows, search not counted",
        "points": list(rows),
        "versions": versions(),
    }
