"""From record files to batches: sources and their mixture, prompts, pictures, collation."""
