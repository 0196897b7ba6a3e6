"""RMIR."""
