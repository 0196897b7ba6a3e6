"""Embeddings of a set, computed by one or more processes and cached in shards."""
