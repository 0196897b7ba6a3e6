"""Leaderboards: many models on one set, with published and measured rows."""
