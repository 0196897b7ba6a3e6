"""Retrieval sets, suites of them, and run files."""
