"""The protocol of RMIR: the paper's definition, since no scorer was released."""

from pathlib import Path

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.protocol import Protocol

_RMIR = (
    "recall@k is positives in the top k over all positives, averaged over queries (micro), as section 4.1 of the paper "
    "defines it; the mean over categories is also given",
    "the paper's Average columns are micro means with 546 functional, 432 temporal and 656 causal queries, while its text "
    "counts 656 temporal and 432 causal",
    "the query's own picture stays in the pool, which the paper does not mention; see self_retrieval",
)

PROTOCOLS = (
    Protocol("rmir", "clean", ("recall@20", "recall@50"), (*_RMIR, "equal scores are ordered by id")),
    Protocol("rmir", "official", ("recall@20", "recall@50"), (
        *_RMIR, "no scorer or evaluation prompt is published: this is the paper's definition",
    )),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(Benchmark("rmir", "eval.benchmarks.rmir.importer:import_rmir", PROTOCOLS, PUBLISHED))
