"""A local page to look into a checkpoint: what it writes, what it retrieves, and what the rationale changes."""
