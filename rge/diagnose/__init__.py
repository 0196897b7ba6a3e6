"""Questions to a checkpoint that no accuracy answers: does it leak, does its rationale matter, is it one and the same."""
