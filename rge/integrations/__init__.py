"""Checkpoints of rge behind other libraries' own entry points."""
