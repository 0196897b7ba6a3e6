"""A local page to look into a checkpoint: what it writes, what it finds, and what the words change."""
