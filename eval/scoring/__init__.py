"""From embeddings to figures: search, metrics, statistics, the files of an evaluation."""
