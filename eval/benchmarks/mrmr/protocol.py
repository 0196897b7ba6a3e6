"""The protocol of MRMR: nDCG@10 (recall@1 for negation); official with trec_eval's tie-breaking and rounding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.output_files import Scored
from eval.scoring.protocol import Protocol
from eval.sets.retrieval_set import RetrievalSet

MAIN = {"negation": "recall@1"}
"""Main score of tasks for which it is not `USUAL`."""
USUAL = "ndcg@10"


@dataclass(frozen=True)
class Mrmr(Protocol):
    """MRMR: five tasks, each with its main score."""

    def main_metric(self, wanted: RetrievalSet) -> str:
        """recall@1 for negation, nDCG@10 for the other tasks."""
        return MAIN.get(str(wanted.meta.get("task")), USUAL)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """The task's main score; official rounded to five digits, as the released code does."""
        score = self.main_score(wanted, scored)
        return {
            "main_score": score | {"value": round(score["value"], 5)} if self.profile == "official" else score
        }

    def suite_figures(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Main scores of all tasks; the release does not average them."""
        return {"main_scores": {name: result["main_score"] for name, result in results.items()}}


PROTOCOLS = (
    Mrmr("mrmr", "clean", (USUAL, "recall@1"), (
        "nDCG@10 with linear gains; the main score of negation is recall@1, see main_scores",
        "every task has one pool, negation too",
        "macro is the mean of tasks, which the release does not publish",
    )),
    Mrmr("mrmr", "official", (USUAL, "recall@1"), (
        "as the released fork of MTEB: nDCG@10 (negation: recall@1) of trec_eval over the top 1,000, rounded to five digits",
        "equal scores are in trec_eval's order, the larger id first",
        "negation against its whole pool, the released default; with split_corpus=true the release gives each query four "
        "documents, by an unpublished rule",
        "the release skips items that cannot be embedded, which shifts the ids of queries; here this is an error",
    ), ties="trec", skips_missing=True),
)  # fmt: skip
register_benchmark(Benchmark("mrmr", "eval.benchmarks.mrmr.importer:import_mrmr", PROTOCOLS))
