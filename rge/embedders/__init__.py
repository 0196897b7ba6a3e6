"""Embedders that can be measured and mined with: a registry, and one small adapter per family."""
