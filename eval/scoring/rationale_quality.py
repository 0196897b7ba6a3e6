"""What finished evaluations say beyond their headline: shortcuts, and what rationales have to do with results.

    rge eval audit evals=DIR[,DIR]

Everything derives from ``per_query.parquet``; nothing is embedded again.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.scoring.output_files import PER_QUERY, read_results
from rge.common.errors import UserError
from rge.stats import intervals
from rge.stats.intervals import cluster_bootstrap, index_of

NUM_BINS = 4
"""Bins of about equal size that lengths are put into; equal lengths stay together."""
GRAM = 3
"""Words in a row that count as copied."""
COPIED = (0.0, 0.25)
"""Bounds of the bins of copied shares: none, up to a quarter, more."""


def shortcut_rates(dirs: Sequence[Path], metric: str) -> dict[str, Any]:
    """How many queries can be answered without their picture or without their text.

    Args:
        dirs: evaluations of one set and checkpoint in one mode, with ``query_modality`` both, text and image.
        metric: a query counts as answered where this is above zero, such as ``hit@1`` or ``recall@20``.

    Returns:
        Shares of all queries with 95 % intervals: answered with ``both``, with ``text`` alone, ``image`` alone, with
        ``either`` of the two alone; ``needs_both`` is answered with both and with neither alone.

    Raises:
        UserError: a modality is missing or double, or the evaluations do not belong together.
    """
    found: dict[str, pd.DataFrame] = {}
    identity: set[tuple[Any, ...]] = set()
    for path in dirs:
        results = read_results(path)
        modality = results.get("query_modality")
        if modality in found or modality not in ("both", "text", "image"):
            raise UserError(
                f"{path} has query_modality {modality!r}: shortcuts need one evaluation each of both, text, image"
            )
        identity.add(
            (results["set"]["fingerprint"], results.get("checkpoint_hash"), results.get("query_mode"))
        )
        found[modality] = _read(path, metric)
    if len(found) < 3 or len(identity) > 1:
        raise UserError(
            "shortcuts need three evaluations of one set, checkpoint and query mode: "
            "rge eval run ... query_modality=both,text,image"
        )
    index = found["both"].index
    solved = {name: frame.loc[index, metric].to_numpy(np.float64) > 0 for name, frame in found.items()}
    either = solved["text"] | solved["image"]
    columns = solved | {"either": either, "needs_both": solved["both"] & ~either}
    group_Q = index_of(found["both"]["group"].tolist())
    table = np.stack(list(columns.values()), axis=1).astype(np.float64)
    return {"metric": metric, "num_queries": len(index), **_figures(table, group_Q, list(columns))}


def rationale_quality(directory: Path, questions: Mapping[str, str], metric: str) -> dict[str, Any] | None:
    """Results by length of the rationale, by forced stop, and by how much of it copies the question.

    ``metric``: whose mean every bin has.

    Returns:
        ``by_length`` (bins of equal size, in tokens), ``by_stop``, ``by_copy`` (share of the rationale's words that stand
        in three words in a row of the question), each bin with its number of queries and a 95 % interval, and rank
        correlations with the metric. None where no rationale was written.
    """
    frame = _read(directory, metric)
    frame = frame[frame["stop_reason"].isin(["emb", "forced"])]
    if not len(frame):
        return None
    copied = pd.Series(
        [
            copied_share(text or "", questions.get(str(query), ""))
            for query, text in frame["rationale"].items()
        ],
        frame.index,
    )
    tokens = frame["rationale_tokens"].astype(float)
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, NUM_BINS + 1)))
    lengths = pd.Series(
        np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, max(len(edges) - 2, 0)), frame.index
    )
    shares = pd.Series(np.searchsorted(COPIED, copied, side="left"), frame.index)
    words = ("nothing copied", f"up to {100 * COPIED[1]:.0f} %", "more")
    return {
        "metric": metric,
        "num_rationales": len(frame),
        "copied_share_mean": float(copied.mean()),
        "by_length": [
            {"from": float(tokens[lengths == bin_].min()), "to": float(tokens[lengths == bin_].max())}
            | _bin(frame[lengths == bin_], metric)
            for bin_ in sorted(set(lengths))
        ],
        "by_stop": {str(stop): _bin(rows, metric) for stop, rows in frame.groupby("stop_reason")},
        "by_copy": {words[bin_]: _bin(frame[shares == bin_], metric) for bin_ in sorted(set(shares))},
        "rank_correlation": {
            "tokens": _correlation(tokens, frame[metric]),
            "copied_share": _correlation(copied, frame[metric]),
        },
    }


def copied_share(rationale: str, question: str) -> float:
    """Share of a rationale's words that lie in three words in a row which the question has too.

    Case and punctuation do not count. A rationale of fewer than three words copies nothing.
    """
    said, asked = (re.findall(r"\w+", text.lower()) for text in (rationale, question))
    known = {tuple(asked[start : start + GRAM]) for start in range(len(asked) - GRAM + 1)}
    taken = np.zeros(len(said), bool)
    for start in range(len(said) - GRAM + 1):
        if tuple(said[start : start + GRAM]) in known:
            taken[start : start + GRAM] = True
    return float(taken.mean()) if len(said) else 0.0


def _read(path: Path, metric: str) -> pd.DataFrame:
    frame = pd.read_parquet(path / PER_QUERY).set_index("query_id")
    if metric not in frame:
        raise UserError(f"metric must be a column of {path / PER_QUERY}, got {metric!r}")
    return frame


def _bin(rows: pd.DataFrame, metric: str) -> dict[str, Any]:
    table = rows[[metric]].to_numpy(np.float64)
    return {"n": len(rows), **_figures(table, index_of(rows["group"].tolist()), ["value"])["value"]}


def _figures(
    table: np.ndarray, group_Q: np.ndarray, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    found = intervals.figures(cluster_bootstrap(table, group_Q, seed=0), (0.0, 1.0))
    return dict(zip(names, found, strict=True))


def _correlation(x: pd.Series, y: pd.Series) -> float | None:
    """Spearman's: Pearson's on mid ranks; None where either does not vary."""
    if x.nunique() < 2 or y.nunique() < 2:
        return None
    return float(np.corrcoef(x.rank(), y.astype(float).rank())[0, 1])
