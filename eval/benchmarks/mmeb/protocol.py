"""The protocol of MMEB: hit@1 within each query's own candidates, with a rule for equal scores."""

from dataclasses import dataclass, replace
from pathlib import Path

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.output_files import Scored, score_ranking
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet


@dataclass(frozen=True)
class Mmeb(Protocol):
    """MMEB: equal scores count for the model (official) or against it (clean)."""

    def score(self, wanted: RetrievalSet, ranking: Ranking) -> Scored:
        """As `Protocol.score`, with ties resolved for or against the model."""
        scored = score_ranking(wanted, ranking, self.names(wanted))
        return replace(scored, value_QM=scored.best_QM if self.profile == "official" else scored.worst_QM)


PROTOCOLS = (
    Mmeb("mmeb", "clean", ("hit@1", "mrr"), (
        "hit@1 within each query's own candidates; equal scores count against the model",
        "overall is the unweighted mean of the sets, likewise IND, OOD and each meta-task",
    )),
    Mmeb("mmeb", "official", ("hit@1",), (
        "hit@1 as argmax over candidates with the answer first: equal scores count for the model",
        "overall is the unweighted mean of the sets, likewise IND, OOD and each meta-task",
    )),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(Benchmark("mmeb", "eval.benchmarks.mmeb.importer:import_mmeb", PROTOCOLS, PUBLISHED))
