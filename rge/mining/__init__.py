"""Mining of hard negatives: which candidates, by which rules, found block by block."""
