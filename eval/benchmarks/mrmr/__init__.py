"""MRMR."""
