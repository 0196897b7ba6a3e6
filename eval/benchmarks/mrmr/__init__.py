"""MRMR."""

from eval.benchmarks.mrmr.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(Benchmark("mrmr", "eval.benchmarks.mrmr.importer:import_mrmr", PROTOCOLS))
