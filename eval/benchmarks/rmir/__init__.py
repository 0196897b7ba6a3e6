"""RMIR."""

from pathlib import Path

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.rmir.protocol import PROTOCOLS

register_benchmark(
    Benchmark(
        "rmir", "eval.benchmarks.rmir.importer:import_rmir", PROTOCOLS, Path(__file__).with_name("published")
    )
)
