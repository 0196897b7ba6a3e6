"""Rankings as TREC run files: ``query Q0 candidate rank score tag``, one line per rank.

trec_eval ignores the rank column and the order of the lines: it sorts by score as float32, and ties by descending id. Only
a run whose float32 scores are strictly decreasing is therefore ranked alike by all tools. `strictly_decreasing` ensures
that: a score that is not below its predecessor becomes the next smaller float32, a relative step of 6e-8. Other scores are
unchanged, unless a query has one beyond float32, whose scores are all scaled.

Any valid run can be read: lines in any order, ranks like ``1.0`` or all equal, gzip.
"""

import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv

from eval.scoring.search import Ranking, from_ordered_integers, ordered_integers
from eval.sets.retrieval_set import RetrievalSet
from rge.common.errors import UserError
from rge.common.files import write_bytes

COLUMNS = {
    "query": pa.dictionary(pa.int32(), pa.string()),
    "Q0": pa.string(),
    "candidate": pa.dictionary(pa.int32(), pa.string()),
    "rank": pa.float64(),
    "score": pa.float64(),
    "tag": pa.string(),
}
"""Columns of a run file, and their types."""


def strictly_decreasing(score_QK: np.ndarray) -> np.ndarray:
    """Lower scores by the minimum that makes them strictly decreasing as float32.

    ``score_QK``: rows are non-increasing, padded with -inf; rows beyond float32 are scaled.
    """
    peak_Q1 = np.abs(np.where(np.isfinite(score_QK), score_QK, 0.0)).max(axis=1, initial=0.0, keepdims=True)
    most = float(np.finfo(np.float32).max) / 2  # steps downwards must not end in -inf
    if (peak_Q1 > most).any():
        score_QK = np.where(peak_Q1 > most, score_QK / np.maximum(peak_Q1, most) * most, score_QK)
    # With floats as ordered integers: t[i] = min(s[i], t[i-1] - 1), so t[i] + i is a running minimum of s[i] + i.
    step_K = np.arange(score_QK.shape[1])
    lowered_QK = from_ordered_integers(
        np.minimum.accumulate(ordered_integers(score_QK) + step_K, axis=1) - step_K
    )
    return np.where(np.isfinite(score_QK), lowered_QK, score_QK)


def write_run(
    path: Path, ranking: Ranking, query_ids: Sequence[str], corpus_ids: Sequence[str], tag: str
) -> None:
    """Write a ranking of ``corpus_ids`` up to its depth; white space in ``tag`` becomes a hyphen."""
    rows_QK = ranking.rows_QW[:, : ranking.depth]
    score_QK = strictly_decreasing(ranking.score_QW[:, : ranking.depth])
    tag = re.sub(r"\s+", "-", tag)
    lines = []
    for query, rows, scores in zip(query_ids, rows_QK.tolist(), score_QK.tolist(), strict=True):
        lines += [
            f"{query} Q0 {corpus_ids[row]} {rank} {score:.9g} {tag}\n"  # nine digits restore a float32
            for rank, (row, score) in enumerate(zip(rows, scores, strict=True), 1)
            if row >= 0
        ]
    write_bytes(path, "".join(lines).encode())


@dataclass(frozen=True)
class ReadRun:
    """A run file read for a retrieval set."""

    ranking: Ranking  # one row per query of the set; the depth is the longest list
    missing: list[str]  # queries of the set without a line
    num_excluded: int  # number of lines dropped because the set excludes the candidate for the query
    tag: str  # last column of the first line


def read_run(path: Path, wanted: RetrievalSet, *, allow_ties: bool = False) -> ReadRun:
    """Read and check a ranking from any program.

    ``allow_ties``: order equal scores within a query by candidate id; otherwise they are an error, because tools disagree
    on their order.

    Raises:
        UserError: the file is not a run, a query or candidate is not in the set (or a candidate not in the query's list), a
            candidate is ranked twice, or scores are NaN, infinite, or increase with the rank.
    """
    table = read_lines(path)
    lines = pd.DataFrame(
        {
            "query": _codes(path, table, "query", wanted.query_ids, wanted),
            "row": _codes(path, table, "candidate", wanted.corpus_ids, wanted),
            "score": table["score"].to_numpy(),
            "rank": table["rank"].to_numpy(),
        }
    )
    _check(path, lines, wanted, allow_ties=allow_ties)
    lines = lines.sort_values(["query", "score", "row"], ascending=[True, False, True])
    ranked = set(lines["query"])
    kept = lines[~_among(lines, wanted, wanted.excluded or ())]
    return ReadRun(
        ranking=_pad(kept, len(wanted.queries)),
        missing=[name for query, name in enumerate(wanted.query_ids) if query not in ranked],
        num_excluded=len(lines) - len(kept),
        tag=table["tag"][0].as_py(),
    )


def _check(path: Path, lines: pd.DataFrame, wanted: RetrievalSet, *, allow_ties: bool) -> None:
    # scores decide, as in trec_eval
    lines = lines.sort_values(["query", "score", "rank"], ascending=[True, False, True])
    above = lines.groupby("query").shift()
    tied = above["score"] == lines["score"]
    wrong = {
        "its score is {score}, which cannot be ranked": ~np.isfinite(lines["score"]),
        "it has rank {rank:g} and score {score:.9g}, while a higher score has rank {above:g}: are the scores distances? "
        "They must decrease with the rank (or all ranks be equal)": above["rank"] > lines["rank"],
        "it has the same score as another candidate, {score:.9g}; {num} lines tie. Tools disagree on the order of ties, "
        "so make scores strictly decreasing (1000 - rank will do), or pass allow_ties=true to order ties by id and report "
        "their best and worst case": tied & (not allow_ties),
        "it is ranked twice": lines.duplicated(["query", "row"]),
    }
    if wanted.candidates is not None:
        outside = ~_among(lines, wanted, wanted.candidates)
        wrong["it is not in the query's list in candidates.parquet"] = outside
    for reason, bad in wrong.items():
        if bad.any():
            line = lines[bad].iloc[0]
            query, candidate = wanted.query_ids[int(line["query"])], wanted.corpus_ids[int(line["row"])]
            words = reason.format(
                score=line["score"],
                rank=line["rank"],
                above=above[bad].iloc[0]["rank"],
                num=bad.sum(),
            )
            raise UserError(words, path, query, candidate)


def read_lines(path: Path) -> pa.Table:
    """The lines of a run file in file order, with `COLUMNS`.

    Raises:
        UserError: it cannot be read, is empty, or is not a run.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        data.decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"it cannot be read: {getattr(error, 'strerror', None) or error}", path, kind="unreadable"
        ) from None
    except UnicodeDecodeError:
        raise UserError("it is not UTF-8 (UTF-16, perhaps): save it as UTF-8", path, kind="UTF-8") from None
    if re.search(rb"(?m)^ |\t|  | $|\r", data):
        lines = (line.strip() for line in re.sub(rb"[ \t]+", b" ", data).splitlines())
        data = b"\n".join(line for line in lines if line)
    if not data.strip():
        raise UserError(
            f"it ranks no candidate for any query; its lines should be {' '.join(COLUMNS)}",
            path,
            kind="empty",
        )
    try:
        return pyarrow.csv.read_csv(
            pa.py_buffer(data),
            read_options=pyarrow.csv.ReadOptions(column_names=list(COLUMNS), use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(delimiter=" ", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=COLUMNS, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"it is not a TREC run ({' '.join(COLUMNS)}): {error}", path, kind="TREC") from None


def _codes(
    path: Path, table: pa.Table, column: str, known: Sequence[str], wanted: RetrievalSet
) -> np.ndarray:
    """Index of each line's id in ``known``, (N,) int64."""
    position = {name: index for index, name in enumerate(known)}
    values = table[column].unify_dictionaries().combine_chunks()
    names = values.dictionary.to_pylist()
    code = np.array([position.get(name, -1) for name in names], np.int64)
    code_N = code[values.indices.to_numpy()]
    bad = np.flatnonzero(code_N < 0)
    if len(bad):
        line = {name: table[name][int(bad[0])].as_py() for name in ("query", "candidate")}
        pair = f"query {line['query']!r}, candidate {line['candidate']!r}"
        raise UserError(
            f"the {column} is not in the set {wanted.path} ({pair})", path, bad[0] + 1, line[column]
        )
    return code_N


def _among(lines: pd.DataFrame, wanted: RetrievalSet, lists: Sequence[np.ndarray]) -> pd.Series:
    size = len(wanted.corpus_ids)
    codes = [query * size + rows.astype(np.int64) for query, rows in enumerate(lists)]
    return (lines["query"] * size + lines["row"]).isin(np.concatenate(codes) if codes else [])


def _pad(lines: pd.DataFrame, num_queries: int) -> Ranking:
    """Lines, sorted by query and rank, as one padded array."""
    query_N, rank_N = lines["query"].to_numpy(), lines.groupby("query").cumcount().to_numpy()
    width = int(rank_N.max(initial=-1)) + 1
    rows_QW = np.full((num_queries, width), -1, np.int32)
    score_QW = np.full((num_queries, width), -np.inf)
    rows_QW[query_N, rank_N], score_QW[query_N, rank_N] = lines["row"], lines["score"]
    return Ranking(rows_QW, score_QW, width)
