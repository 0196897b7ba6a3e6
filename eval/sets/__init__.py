"""Retrieval sets: the format, and writing it."""
