"""The protocol of MM-BRIGHT: nDCG@10 by domain; official as in the released code, with trec_eval's tie-breaking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.output_files import Scored, means
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet

CUTS = (1, 5, 10, 25, 50, 100)
_TREC = {"NDCG": "ndcg", "MAP": "map", "Recall": "recall", "P": "precision"}


@dataclass(frozen=True)
class Mmbright(Protocol):
    """MM-BRIGHT: the mean over domains of nDCG@10."""

    def prepare(self, wanted: RetrievalSet) -> RetrievalSet:
        """Official: hard negatives (tasks 1 and 2) and pairs with a negative picture (task 4) are excluded from rankings."""
        removes = self.profile == "official" and wanted.meta.get("task") in (1, 2, 4)
        return replace(wanted, excluded=wanted.negatives) if removes else wanted

    def score(self, wanted: RetrievalSet, ranking: Ranking, names: Sequence[str] = ()) -> Scored:
        """As `Protocol.score`; official at the released code's cutoffs."""
        if self.profile == "clean":
            return super().score(wanted, ranking)
        if wanted.meta.get("task") == 3 and ranking.score_QW.dtype == np.float32:
            # The released code of this task scales float32 scores by 100, whose rounding makes some of them equal.
            ranking = replace(ranking, score_QW=ranking.score_QW * np.float32(100))
        extra = [f"{metric}@{k}" for metric in _TREC.values() for k in CUTS]
        return super().score(wanted, ranking, self.names(wanted, extra, negatives=False))

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Official: the released code's names, rounded to five digits."""
        if self.profile == "clean":
            return {}
        value = means(scored.names, scored.value_QM)
        figures = {f"{t}@{k}": round(value[f"{o}@{k}"], 5) for t, o in _TREC.items() for k in CUTS}
        return {"official": figures | {"MRR": round(value["mrr"], 5)}}

    def suite_figures(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Official: the mean of the domains' rounded figures, rounded again."""
        if self.profile == "clean":
            return {}
        blocks = [result["official"] for result in results.values()]
        return {"official": {key: round(sum(b[key] for b in blocks) / len(blocks), 5) for key in blocks[0]}}


PROTOCOLS = (
    Mmbright("mmbright", "clean", ("ndcg@10", "recall@10"), (
        "nDCG@10 with linear gains, mean over domains",
        "hard negatives stay in the ranking",
        "task 4 is graded as in the paper: 2 for a gold document with a positive picture, 1 for it without picture",
        "queries without any positive are not part of the set",
    )),
    Mmbright("mmbright", "official", ("ndcg@10",), (
        "as the released code (143ae35): nDCG@10 of trec_eval over the top 1,000, rounded to five digits per domain, mean "
        "over domains",
        "tasks 1 and 2: the query's hard negatives are removed from its ranking",
        "task 4: graded 2 and 1; pairs with a picture judged wrong are removed. With keys=legacy at import this is what "
        "the code calls the protocol of Table 6",
        "equal scores are in trec_eval's order, the larger id first",
    ), ties="trec", skips_missing=True),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(
    Benchmark("mmbright", "eval.benchmarks.mmbright.importer:import_mmbright", PROTOCOLS, PUBLISHED)
)
