"""Whether a checkpoint gives the same embeddings over every route, and if not, why."""
