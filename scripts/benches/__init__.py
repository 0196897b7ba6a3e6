"""Benches behind `scripts/bench.py`: a file each, with `Options` and `measure(options)`, which gives the figures."""
