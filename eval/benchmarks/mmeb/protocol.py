"""The protocol of MMEB: hit@1 within each query's own candidates, with a rule for equal scores."""

from pathlib import Path

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.protocol import Protocol

_OVERALL = "overall is the unweighted mean of the sets, likewise IND, OOD and each meta-task"
PROTOCOLS = (
    Protocol("mmeb", "clean", ("hit@1", "mrr"), (
        "hit@1 within each query's own candidates; equal scores count against the model", _OVERALL,
    ), ties="worst"),
    Protocol("mmeb", "official", ("hit@1",), (
        "hit@1 as argmax over candidates with the answer first: equal scores count for the model", _OVERALL,
    ), ties="best"),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(Benchmark("mmeb", "eval.benchmarks.mmeb.importer:import_mmeb", PROTOCOLS, PUBLISHED))
