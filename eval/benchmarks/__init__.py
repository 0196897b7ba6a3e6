"""Importers of known benchmarks into the retrieval-set format, and the protocols that define their figures."""
