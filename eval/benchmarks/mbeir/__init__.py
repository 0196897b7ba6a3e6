"""M-BEIR."""

from pathlib import Path

from eval.benchmarks.mbeir.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(
    Benchmark(
        "mbeir",
        "eval.benchmarks.mbeir.importer:import_mbeir",
        PROTOCOLS,
        Path(__file__).with_name("published"),
    )
)
