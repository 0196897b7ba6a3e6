"""Importers of known benchmarks into the retrieval-set format, and the protocols their figures are computed by."""
