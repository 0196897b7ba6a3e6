"""MM-BRIGHT."""

from pathlib import Path

from eval.benchmarks.mmbright.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(
    Benchmark(
        "mmbright",
        "eval.benchmarks.mmbright.importer:import_mmbright",
        PROTOCOLS,
        Path(__file__).with_name("published"),
    )
)
