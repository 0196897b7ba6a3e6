"""MMEB."""
