"""Turn requests into calls and make them, singly or in batches."""
