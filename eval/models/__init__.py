"""Embedders that `eval.run` can measure: a registry, and one small adapter a family."""
