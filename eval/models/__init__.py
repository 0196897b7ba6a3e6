"""Embedders that `eval.commands.run` can measure: a registry, and one small adapter per family."""
