"""Everything before training: raw collections become training records and retrieval sets."""
