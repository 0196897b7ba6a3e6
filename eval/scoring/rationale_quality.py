"""Further analyses of finished evaluations: shortcuts, and how rationales relate to results.

    rge eval audit evals=DIR[,DIR]

Everything is computed from ``per_query.parquet``, over the queries for which the metric is defined.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.scoring.output_files import PER_QUERY, read_results
from eval.sets.retrieval_set import MODALITIES
from rge.common.errors import UserError
from rge.stats.intervals import cluster_bootstrap, figures, index_of

NUM_BINS = 4
"""Number of bins of lengths, of about equal size; equal lengths stay together."""
GRAM = 3
"""Number of consecutive words that count as copied."""
COPIED = (0.0, 0.25)
"""Bounds of the bins of copied shares: none, up to a quarter, more."""


def shortcut_rates(dirs: Sequence[Path], metric: str) -> dict[str, Any]:
    """Shares of queries that can be answered without their picture or without their text.

    ``dirs``: evaluations of one set and checkpoint in one mode, with ``query_modality`` both, text and image. ``metric``: a
    query counts as answered if this is above zero, such as ``hit@1`` or ``recall@20``.

    Returns:
        Shares of all queries with 95 % intervals: answered with ``both``, with ``text`` alone, ``image`` alone, with
        ``either`` of the two alone; ``needs_both`` is answered with both but with neither alone.

    Raises:
        UserError: a modality is missing or repeated, or the evaluations do not belong together.
    """
    results = [read_results(path) for path in dirs]
    modalities = [str(result.get("query_modality")) for result in results]
    same = {(one["set"]["fingerprint"], one.get("checkpoint_hash"), one.get("query_mode")) for one in results}
    if sorted(modalities) != sorted(MODALITIES) or len(same) > 1:
        raise UserError(
            "shortcuts need three evaluations of one set, checkpoint and query mode, with query_modality=both,text,image; "
            f"{', '.join(map(str, dirs))} have {', '.join(modalities)}"
        )
    tables = {modality: _read(path, metric) for modality, path in zip(modalities, dirs, strict=True)}
    solved = pd.DataFrame({name: table[metric] for name, table in tables.items()}).dropna() > 0
    either = solved["text"] | solved["image"]
    shares = solved.assign(either=either, needs_both=solved["both"] & ~either)
    groups = tables["both"].loc[shares.index, "group"]
    return {"metric": metric, "num_queries": len(shares), **_figures(shares, groups)}


def rationale_quality(directory: Path, questions: Mapping[str, str], metric: str) -> dict[str, Any] | None:
    """Means of a metric by length of the rationale, by forced stop, and by how much of it copies the question.

    Returns:
        ``by_length`` (bins of equal size, in tokens), ``by_stop``, ``by_copy`` (share of the rationale's words that are
        part of three consecutive words of the question), each bin with its number of queries and a 95 % interval, and rank
        correlations with the metric. None if no rationale was written.
    """
    frame = _read(directory, metric)
    frame = frame[frame["stop_reason"].isin(["emb", "forced"])]
    if frame.empty:
        return None
    texts = frame["rationale"].items()
    shares = [copied_share(text or "", questions.get(str(query), "")) for query, text in texts]
    copied, tokens = pd.Series(shares, frame.index), frame["rationale_tokens"].astype(float)
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, NUM_BINS + 1)))
    lengths = np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, max(len(edges) - 2, 0))
    words = ("nothing copied", f"up to {100 * COPIED[1]:.0f} %", "more")
    return {
        "metric": metric,
        "num_rationales": len(frame),
        "copied_share_mean": float(copied.mean()),
        "by_length": [
            {"from": float(rows["rationale_tokens"].min()), "to": float(rows["rationale_tokens"].max())}
            | _bin(rows, metric)
            for _, rows in frame.groupby(lengths)
        ],
        "by_stop": {str(stop): _bin(rows, metric) for stop, rows in frame.groupby("stop_reason")},
        "by_copy": {
            words[number]: _bin(rows, metric)
            for number, rows in frame.groupby(np.searchsorted(COPIED, copied, side="left"))
        },
        "rank_correlation": {
            "tokens": _correlation(tokens, frame[metric]),
            "copied_share": _correlation(copied, frame[metric]),
        },
    }


def copied_share(rationale: str, question: str) -> float:
    """Share of a rationale's words that are part of three consecutive words of the question, ignoring case and punctuation."""
    words, of_question = (re.findall(r"\w+", text.lower()) for text in (rationale, question))
    grams = {tuple(of_question[start : start + GRAM]) for start in range(len(of_question) - GRAM + 1)}
    copied = np.zeros(len(words), bool)
    for start in range(len(words) - GRAM + 1):
        if tuple(words[start : start + GRAM]) in grams:
            copied[start : start + GRAM] = True
    return float(copied.mean()) if words else 0.0


def _read(path: Path, metric: str) -> pd.DataFrame:
    frame = pd.read_parquet(path / PER_QUERY).set_index("query_id")
    if metric not in frame or not pd.api.types.is_numeric_dtype(frame[metric]):
        raise UserError(f"metric must be a column of numbers in {path / PER_QUERY}, got {metric!r}")
    return frame.dropna(subset=[metric])


def _bin(rows: pd.DataFrame, metric: str) -> dict[str, Any]:
    return {"n": len(rows), **_figures(rows[[metric]], rows["group"])[metric]}


def _figures(table: pd.DataFrame, group: pd.Series) -> dict[str, dict[str, float | None]]:
    means = cluster_bootstrap(table.to_numpy(np.float64), index_of(group.tolist()), seed=0)
    return dict(zip(table.columns, figures(means, (0.0, 1.0)), strict=True))


def _correlation(x: pd.Series, y: pd.Series) -> float | None:
    """Spearman's correlation, with mid ranks for ties; None if either does not vary."""
    if x.nunique() < 2 or y.nunique() < 2:
        return None
    return float(np.corrcoef(x.rank(), y.astype(float).rank())[0, 1])
