"""Oracle rationales for training records: written by a model that sees the answer, checked one by one.

``prompts``  what the writer is asked, per task
``checks``   length, forbidden phrases, language, leak
``main``     the command line
"""
