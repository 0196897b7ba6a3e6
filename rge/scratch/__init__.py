"""Small models from nothing, for CPUs, tests and the demo."""
