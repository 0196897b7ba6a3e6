"""MR²-Bench."""

from eval.benchmarks.mr2bench.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(Benchmark("mr2bench", "eval.benchmarks.mr2bench.importer:import_mr2bench", PROTOCOLS))
