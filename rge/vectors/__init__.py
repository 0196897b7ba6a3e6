"""Embeddings of items, computed by one or more processes and cached in shards."""
