"""Evaluate embedders on retrieval sets: ``rge eval run|score|compare|report``.

Import from the modules (``from eval.scoring.metrics import compute``); ``import eval`` would hide Python's builtin.
"""
