"""Output directory of an evaluation: per-query values, and all other figures derived from them.

``run.trec``           the ranking, with strictly decreasing scores
``per_query.parquet``  one row per query, see `per_query_table`
``results.json``       figures with 95 % intervals, and settings; written last, so that it marks a complete directory
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from eval.scoring.identity import differences, set_mismatch
from eval.scoring.metrics import Judged, compute, cut, first_hit_rank, judge, random_floor, tied_order
from eval.scoring.results import (
    Figures,
    ImportedWith,
    Measured,
    Rerun,
    Results,
    SetFacts,
    decided_differently,
)
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RESULT_COLUMNS, RetrievalSet
from rge.common.errors import UserError
from rge.common.files import find_shipped, write_bytes
from rge.common.options import given
from rge.common.schema import Encoded
from rge.stats import intervals
from rge.stats.intervals import LEVEL, NUM_RESAMPLES, Bootstrap, cluster_bootstrap, index_of

RESULTS, PER_QUERY, RUN = "results.json", "per_query.parquet", "run.trec"
NUM_TOP = 10
SELF_RANKS = (1, 20)
PLACES = ("out", "cache", "overwrite", "report")
"""Options of a command that do not affect its figures."""
USED_WITH = ("settings.", "prompts.", "asked.rewriter_at")
"""Parts of an identity that say how an embedder is used."""
OF_ENCODED = {
    "rationale": "rationales",
    "stop_reason": "stop_reasons",
    "rationale_tokens": "num_rationale_tokens",
    "generate_ms": "generate_ms",
    "embed_ms": "embed_ms",
}
"""Columns of per_query.parquet, with the attributes of `Encoded` that they hold."""


@dataclass(frozen=True)
class Scored:
    """A judged ranking."""

    names: tuple[str, ...]  # of the metrics
    value_QM: np.ndarray  # per-query values; NaN if a metric is undefined for a query
    best_QM: np.ndarray  # the same with ties broken in favour of the ranking
    worst_QM: np.ndarray  # the same with ties broken against it
    random_QM: np.ndarray  # expected values under a random ranking
    first_hit_Q: np.ndarray  # rank of the first positive, or 0


def values_of(names: Sequence[str], judged: Judged) -> np.ndarray:
    """Values of metrics, (Q, M)."""
    return np.stack([compute(name, judged) for name in names], axis=1)


def judged_rows(wanted: RetrievalSet, rows_QK: np.ndarray) -> Judged:
    """`judge` with the judgements of a set."""
    num, missing_Q = len(wanted.corpus_ids), wanted.num_missing_Q
    return judge(
        rows_QK,
        wanted.positives,
        wanted.negatives,
        num_candidates=num,
        num_missing_Q=missing_Q,
        kind_C=wanted.kind_C,
    )


def score_ranking(
    wanted: RetrievalSet,
    ranking: Ranking,
    names: Sequence[str],
    judged: Judged | None = None,
    values: Callable[[Sequence[str], Judged], np.ndarray] = values_of,
) -> Scored:
    """Compute metrics for every query of the set; the ranking must be deep enough for all of them.

    ``judged``: all ranks of the ranking, if not by the set's judgements. ``values``: (Q, M) of the metrics.
    """
    wide = judged or judged_rows(wanted, ranking.rows_QW)
    top, pool_Q = cut(wide, ranking.depth), wanted.pool_sizes()

    def with_ties(*, best: bool) -> np.ndarray:
        return values(names, cut(tied_order(wide, ranking.score_QW, best=best), ranking.depth))

    floors = [random_floor(name, top, pool_Q, depth=ranking.depth) for name in names]
    return Scored(
        names=tuple(names),
        value_QM=values(names, top),
        best_QM=with_ties(best=True),
        worst_QM=with_ties(best=False),
        random_QM=np.stack(floors, axis=1),
        first_hit_Q=first_hit_rank(top),
    )


def per_query_table(
    wanted: RetrievalSet, ranking: Ranking, scored: Scored, encoded: Encoded | None
) -> pa.Table:
    """The per-query table, from which all figures derive.

    Columns: ``query_id``, ``category``, ``group``, those of ``report_by``; ``num_positives``; ``first_hit_rank`` (null if the
    ranking has no positive); one per metric; ``top10`` (candidate ids, best first), ``top10_scores``; ``rationale``,
    ``rationale_tokens``, ``stop_reason``, ``generate_ms``, ``embed_ms`` (null for an external ranking).
    """
    head = slice(min(NUM_TOP, ranking.depth))
    found_Q = np.array([len(rows) for rows, _ in wanted.positives], np.int64)
    missing_Q = 0 if wanted.num_missing_Q is None else wanted.num_missing_Q
    first = pa.array(scored.first_hit_Q, pa.int64(), mask=scored.first_hit_Q == 0)
    columns: dict[str, Any] = {"query_id": wanted.query_ids, **wanted.columns}
    columns |= {"num_positives": found_Q + missing_Q, "first_hit_rank": first}
    for m, name in enumerate(scored.names):
        columns[name] = pa.array(scored.value_QM[:, m], pa.float64(), from_pandas=True)  # NaN becomes null
    rows_QK, score_QK = ranking.rows_QW[:, head].tolist(), ranking.score_QW[:, head].tolist()
    columns["top10"] = [[wanted.corpus_ids[row] for row in rows if row >= 0] for rows in rows_QK]
    columns["top10_scores"] = [list(filter(np.isfinite, scores)) for scores in score_QK]
    for name, attribute in OF_ENCODED.items():
        columns[name] = [None] * len(wanted.queries) if encoded is None else getattr(encoded, attribute)
    kinds = (
        dict.fromkeys(wanted.columns, pa.string())
        | dict.fromkeys(scored.names, pa.float64())
        | RESULT_COLUMNS
    )
    return pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})


def figures(wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
    """Micro, macro, per category and per ``report_by`` column, each with a 95 % interval; ties and random floor.

    Micro is the mean over queries, macro the mean of the categories' means. Groups are resampled, see `eval.scoring.stats`; a
    single group has no interval. Metrics that are undefined for all queries of a slice are left out of it.
    """
    group_Q, category_Q = index_of(wanted.columns["group"]), index_of(wanted.columns["category"])

    def block(rows: slice | np.ndarray, stratum_Q: np.ndarray | None = None) -> Figures:
        bootstrap = cluster_bootstrap(scored.value_QM[rows], group_Q[rows], stratum_Q=stratum_Q, seed=seed)
        return by_name(scored.names, bootstrap)

    out: dict[str, Any] = {"micro": block(slice(None)), "macro": block(slice(None), category_Q)}
    for column in ("category", *wanted.report_by):
        values = np.array(wanted.columns[column], dtype=object)
        out[f"by_{column}"] = {name: block(np.flatnonzero(values == name)) for name in sorted(set(values))}
    best, worst = means(scored.names, scored.best_QM), means(scored.names, scored.worst_QM)
    out["ties"] = {name: {"best": best[name], "worst": worst[name]} for name in best}
    out["random"] = means(scored.names, scored.random_QM)
    return out


def by_name(names: Sequence[str], bootstrap: Bootstrap) -> Figures:
    """Figures by metric, without those that are undefined for all queries."""
    figures_M = zip(names, intervals.figures(bootstrap, (0.0, 1.0)), strict=True)
    return {name: figure for name, figure in figures_M if figure["value"] is not None}


def rationale_figures(table: pd.DataFrame) -> dict[str, float | None]:
    """Share of rationales cut at the cap, and their length in tokens; null without rationales.

    ``table``: ``stop_reason`` and ``rationale_tokens`` of each query, as in per_query.parquet.
    """
    table = table.dropna(subset="stop_reason")
    if (table["stop_reason"] == "prefilled").all():
        return dict.fromkeys(("forced_rate", "tokens_mean", "tokens_p50", "tokens_p95"))
    tokens = table["rationale_tokens"].to_numpy(np.float64)
    return {
        "forced_rate": float((table["stop_reason"] == "forced").mean()),
        "tokens_mean": float(tokens.mean()),
        "tokens_p50": float(np.quantile(tokens, 0.5)),
        "tokens_p95": float(np.quantile(tokens, 0.95)),
    }


def self_retrieval(ranking: Ranking, own: Sequence[np.ndarray]) -> dict[str, Any]:
    """How often a query finds its own picture instead of an answer.

    ``own``: for each query the candidate rows with a byte-identical copy of one of its pictures.

    Returns:
        ``num_queries`` whose picture is in the pool, and the share ``rate@k`` of these with it in the top k (null if none).
    """
    rows_QK = ranking.rows_QW[:, : ranking.depth]
    in_pool = [query for query, rows in enumerate(own) if len(rows)]
    out: dict[str, Any] = {"num_queries": len(in_pool)}
    for k in SELF_RANKS:
        hits = [bool(np.isin(rows_QK[query, :k], own[query]).any()) for query in in_pool]
        out[f"rate@{k}"] = sum(hits) / len(hits) if hits else None
    return out


def rerun_command(command: str, options: Any) -> Rerun:
    """The command that reproduces an evaluation, for results.json, without its output directory."""
    words = {key: value for key, value in given(options).items() if key not in PLACES}
    return Rerun(command=command, options=words)


def set_facts(wanted: RetrievalSet, limit: int | None = None) -> SetFacts:
    """The measured set; ``limit``: how many of its queries are used."""
    return SetFacts(
        name=wanted.name,
        fingerprint=wanted.fingerprint,
        content=wanted.content,
        made_with=ImportedWith.model_validate(wanted.meta).as_json(),
        num_queries=len(wanted.queries),
        num_candidates=len(wanted.corpus_ids),
        num_groups=len(set(wanted.columns["group"])),
        report_by=list(wanted.report_by),
        path=str(wanted.path.resolve()),
        limit=limit,
        **{key: wanted.meta[key] for key in ("split", "licence", "source") if key in wanted.meta},
    )


def set_path(measured: SetFacts, given: Path | None, *, otherwise: str = "") -> Path:
    """Location of an evaluation's retrieval set or suite: as given, else as recorded; a `UserError` if there is none.

    ``otherwise``: what else the user can do, for the message.
    """
    path = given or Path(measured.path or "unknown")
    if not find_shipped(path).is_dir():
        raise UserError(
            f"the retrieval set does not exist; if it was moved, pass set=DIR{otherwise}", path, key="set"
        )
    return path


def check_measured_on(wanted: RetrievalSet, measured: SetFacts) -> None:
    """Raise a `UserError` if a set is not the one of an evaluation, or has changed since."""
    if mismatch := set_mismatch(set_facts(wanted), measured):
        raise UserError(
            f"it is not the retrieval set that was measured ({mismatch[1]}): pass set=DIR",
            wanted.path,
            key="set",
            kind=mismatch[0],
        )


def statistics_settings(seed: int) -> dict[str, Any]:
    """Settings of the intervals, for results.json."""
    settings = {
        "interval": "BCa, for few groups with Student's t",
        "level": LEVEL,
        "resampled": "group",
        "num_resamples": NUM_RESAMPLES,
    }
    return settings | {"seed": seed}


def means(names: Sequence[str], value_QM: np.ndarray) -> dict[str, float]:
    """Means over the queries for which a metric is defined; metrics without any are left out."""
    return {
        name: float(np.nanmean(column))
        for name, column in zip(names, value_QM.T, strict=True)
        if not np.isnan(column).all()
    }


def check_out(out: Path, measured: Measured, *, overwrite: bool) -> None:
    """Refuse to replace the output of a different evaluation.

    ``measured``: the new one, as far as it is known.
    """
    if out.is_file():
        raise UserError("it is a file", out, key="out")
    if overwrite or not (out / RESULTS).exists():
        return
    old, new = read_results(out), measured.as_read()
    apart = decided_differently(old, new)
    if old.identity:
        apart |= {key: pair for key, pair in differences(old, new).items() if key.startswith(USED_WITH)}
    if apart:
        told = "; ".join(f"{key} = {was!r}, this one has {value!r}" for key, (was, value) in apart.items())
        raise UserError(
            f"it already holds an evaluation with {told}: choose another out=, or pass overwrite=true", out
        ).about("out", *apart)


def read_results(directory: Path) -> Results:
    """Read ``results.json`` of a finished output directory; a `UserError` if it is missing or invalid."""
    path = directory / RESULTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_finite)
        return Results.model_validate(content)
    except FileNotFoundError:
        inner = sorted(child.parent.name for child in directory.glob(f"*/{RESULTS}"))
        if inner:
            raise UserError(
                f"it holds {len(inner)} evaluations: pass one of {', '.join(inner)}",
                directory,
                kind="several",
            ) from None
        raise UserError(
            "it does not exist: the evaluation is unfinished or in another directory", path, kind="missing"
        ) from None
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror}", path) from None
    except ValidationError as error:
        wrong = {".".join(map(str, one["loc"])): one["msg"] for one in error.errors()}
        told = "; ".join(f"{key}: {message}" for key, message in wrong.items())
        raise UserError(
            f"it is damaged ({told}): evaluate again with overwrite=true", path, kind="damaged"
        ).about(*wrong) from None
    except ValueError as error:
        raise UserError(
            f"it is damaged ({error}): evaluate again with overwrite=true", path, kind="damaged"
        ) from None


def _not_finite(name: str) -> None:
    raise ValueError(f"it contains {name} instead of a number")


def invalidate(out: Path) -> None:
    """Create an output directory, or delete its results.json before other files are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).unlink(missing_ok=True)


def write_tables(out: Path, table: pa.Table, results: Results) -> None:
    """Write the per-query table and then results.json; a `ValueError` if a figure is not finite."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes(out / PER_QUERY, sink.getvalue().to_pybytes())
    text = json.dumps(results.as_json(), indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_bytes(out / RESULTS, text.encode() + b"\n")
