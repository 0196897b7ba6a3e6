"""Benches behind `scripts/bench.py`: one file each, with `Options` and `measure(options)`, which returns the figures."""
