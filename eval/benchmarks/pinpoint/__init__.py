"""PinPoint."""

from pathlib import Path

from eval.benchmarks.pinpoint.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(
    Benchmark(
        "pinpoint",
        "eval.benchmarks.pinpoint.importer:import_pinpoint",
        PROTOCOLS,
        Path(__file__).with_name("published"),
    )
)
