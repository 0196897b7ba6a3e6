"""Checkpoints of rge in other libraries."""
