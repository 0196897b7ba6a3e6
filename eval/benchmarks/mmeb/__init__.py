"""MMEB."""

from pathlib import Path

from eval.benchmarks.mmeb.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(
    Benchmark(
        "mmeb", "eval.benchmarks.mmeb.importer:import_mmeb", PROTOCOLS, Path(__file__).with_name("published")
    )
)
