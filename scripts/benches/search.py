"""Exact search against the bare faiss call it is built on, numpy and torch; scoring. `python scripts/bench.py search others=true`.

Random unit vectors; the best of the repeats counts. ``others=true`` adds a product with a partial sort in numpy and `torch.topk`, in
blocks of queries, with arbitrary order of ties. ``score`` is every metric of every query from the ranking, with both tie orders.
"""

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch

from benches.harness import Rows, in_turns, show
from eval.scoring.metrics import compute, cut, judge, names_of, tied_order
from eval.scoring.search import Ranking, rows_within, search

MEMORY_MB = 2048.0
"""Of candidates that `search` holds at a time."""
BLOCK_QUERIES = 64
"""Queries whose scores against the whole pool numpy and torch hold at a time."""


@dataclass
class Options:
    """Sizes; the defaults are those of RMIR."""

    candidates: int = 35_803
    queries: int = 1_634
    dim: int = 2_048
    depth: int = 1_000
    repeats: int = 3
    others: bool = False


def measure(options: Options) -> Rows:
    """Time all in turns."""
    rng = np.random.default_rng(0)

    def unit(rows: int) -> np.ndarray:
        x = rng.standard_normal((rows, options.dim), dtype=np.float32)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    candidate_CD, query_QD, depth = unit(options.candidates), unit(options.queries), options.depth
    blocks = [query_QD[first : first + BLOCK_QUERIES] for first in range(0, len(query_QD), BLOCK_QUERIES)]
    block_rows = rows_within(MEMORY_MB, options.dim)
    work = {
        "faiss": lambda: faiss.knn(query_QD, candidate_CD, depth, metric=faiss.METRIC_INNER_PRODUCT),
        "search": lambda: search(query_QD, candidate_CD, depth=depth, block_rows=block_rows),
    }
    if options.others:
        work["numpy"] = lambda: [_with_numpy(block_BD, candidate_CD, depth) for block_BD in blocks]
        candidate_DC = torch.from_numpy(candidate_CD).T
        work["torch"] = lambda: [
            torch.topk(torch.from_numpy(block_BD) @ candidate_DC, depth, dim=1).indices for block_BD in blocks
        ]
    ranking: Any = work["search"]()
    positives = [
        (np.sort(rng.choice(options.candidates, 12, replace=False)).astype(np.int32), np.ones(12))
        for _ in range(options.queries)
    ]
    work["score"] = lambda: _score(ranking, positives, options.candidates)
    wall, cpu = ({name: min(x) for name, x in found.items()} for found in in_turns(work, options.repeats))
    return show({name: {"wall s": wall[name], "CPU s": cpu[name]} for name in work}, over="faiss")


def _with_numpy(query_BD: np.ndarray, candidate_CD: np.ndarray, depth: int) -> np.ndarray:
    score_BC = query_BD @ candidate_CD.T
    top_BK = np.argpartition(-score_BC, depth - 1, axis=1)[:, :depth]
    order_BK = np.argsort(-np.take_along_axis(score_BC, top_BK, axis=1), axis=1)
    return np.take_along_axis(top_BK, order_BK, axis=1)


def _score(ranking: Ranking, positives: list[tuple[np.ndarray, np.ndarray]], candidates: int) -> None:
    """As `eval.scoring.output_files.score_ranking`."""
    wide = judge(ranking.rows_QW, positives, None, num_candidates=candidates)
    for order in (wide, *(tied_order(wide, ranking.score_QW, best=best) for best in (True, False))):
        for name in names_of():
            compute(name, cut(order, ranking.depth))
