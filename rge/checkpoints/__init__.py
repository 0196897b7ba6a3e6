"""What a run keeps: states to resume from, exported checkpoints, which of them stay."""
