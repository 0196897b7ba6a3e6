"""MMEB-V2, its image and visual-document parts."""

from eval.benchmarks.mmeb2.protocol import PROTOCOLS
from eval.benchmarks.registry import Benchmark, register_benchmark

register_benchmark(Benchmark("mmeb2", "eval.benchmarks.mmeb2.importer:import_mmeb2", PROTOCOLS))
