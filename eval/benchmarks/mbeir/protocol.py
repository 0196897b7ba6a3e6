"""The protocol of M-BEIR: the share of queries with a right candidate in the top 5 (top 10 for fashion), by task.

Shape suffixes: Q = queries, M = metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.output_files import Scored
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet

MAIN = "task_hit"
"""Metric that is averaged over tasks: hit@10 for tasks whose `CUTS` begin with 10, else hit@5."""
CUTS = {"fashion200k": (10, 20, 50), "fashioniq": (10, 20, 50)}
"""Cutoffs that the released configuration reports for a data set, the main one first; ``USUAL`` for the others."""
USUAL = (5, 1, 10)


def cuts_of(task: str) -> tuple[int, ...]:
    """Cutoffs of a task, the main one first."""
    return CUTS.get(task.partition("_")[0], USUAL)


@dataclass(frozen=True)
class Mbeir(Protocol):
    """M-BEIR: ``task_hit`` of each task, averaged over tasks."""

    def score(self, wanted: RetrievalSet, ranking: Ranking, names: Sequence[str] = ()) -> Scored:
        """As `Protocol.score`, with `MAIN` as a further metric."""
        scored = super().score(wanted, ranking, names)
        hits = [f"hit@{cuts_of(task)[0]}" for task in wanted.columns["category"]]
        place_Q1 = np.array(list(map(scored.names.index, hits)))[:, None]
        more = {
            name: np.column_stack([table_QM, np.take_along_axis(table_QM, place_Q1, axis=1)])
            for name in ("value_QM", "best_QM", "worst_QM")
            for table_QM in [getattr(scored, name)]
        }
        more["random_QM"] = np.column_stack([scored.random_QM, np.full(len(hits), np.nan)])  # varies by task
        return replace(scored, names=(*scored.names, MAIN), **more)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Official: the released code's names and rounding, by task."""
        if self.profile == "clean":
            return {}
        task_Q = np.array(wanted.columns["category"], dtype=object)
        column = dict(zip(scored.names, scored.value_QM.T, strict=True))
        return {
            "official": {
                task: {
                    f"Recall@{k}": round(float(np.nanmean(column[f"hit@{k}"][task_Q == task])), 4)
                    for k in cuts_of(task)
                }
                for task in sorted(set(task_Q))
            }
        }

    def suite_figures(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Official: the figures of all tasks, as in the released table."""
        if self.profile == "clean":
            return {}
        return {
            "official": dict(chain.from_iterable(result["official"].items() for result in results.values()))
        }


_SAID = (
    "M-BEIR's Recall@k is hit@k: 1 if any right candidate is among the first k",
    "task_hit is hit@10 for Fashion200K and FashionIQ and hit@5 for the others; overall is its unweighted mean over tasks",
    "right candidates in another task's pool (OVEN and InfoSeek) are left out of a local set, which does not change hit@k",
    "one instruction for all queries of a task; the released code draws one of four for each query",
    "equal scores are ordered by id; the released search does not define their order",
)
PROTOCOLS = (
    Mbeir("mbeir", "clean", (MAIN, "hit@1", "recall@10"), (*_SAID, "a query without a ranking counts 0")),
    Mbeir("mbeir", "official", (MAIN,), (
        *_SAID, "official: figures under the released names, rounded to four digits per task",
    )),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(Benchmark("mbeir", "eval.benchmarks.mbeir.importer:import_mbeir", PROTOCOLS, PUBLISHED))
