"""Leaderboards: many models on one set, with published rows beside measured ones."""
