"""Optimizers and learning rates."""
