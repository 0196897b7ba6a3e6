"""Embeddings of a set: filled by one process or many, kept in shards that cannot be stale."""
