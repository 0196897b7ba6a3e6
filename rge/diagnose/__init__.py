"""Diagnoses beyond accuracy: leakage, sensitivity to the rationale, and invariance to batching."""
