"""Evaluate embedders on retrieval sets: ``python -m eval run|score|compare|report``.

Import from the modules (``from eval.scoring.metrics import compute``); ``import eval`` would hide Python's builtin.
"""
