"""Small base models for CPUs, tests and the demo: built from nothing or from packages, and taught to name pictures."""
