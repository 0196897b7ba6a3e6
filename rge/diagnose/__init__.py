"""Diagnoses beyond accuracy: leakage, and sensitivity to the rationale."""
