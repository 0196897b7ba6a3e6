"""Embeddings of a retrieval set, and what they and an evaluation depend on."""
