"""Reasoning-intensive retrieval data from any pictures: the stages of the RMIR pipeline."""
