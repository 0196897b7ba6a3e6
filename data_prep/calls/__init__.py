"""Paid calls to multimodal models: asked once, kept for ever, counted to the cent.

``request``  what is asked, and the key under which the answer is kept
``cache``    the append-only file of answers, shared by processes
``client``   the calls: limits, retries, budgets
``replies``  the answer taken apart, with an error for every way it can be malformed
"""
