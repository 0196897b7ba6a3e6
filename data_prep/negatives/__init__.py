"""Hard negatives for training records: mined with any embedder, checked and scored by a judge."""
