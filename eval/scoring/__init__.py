"""From embeddings to figures: search, metrics, statistics and output files."""
