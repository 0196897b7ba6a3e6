"""Oracle rationales for training records: written by a model that sees the answer, checked one by one.

``prompts``  what the writer is asked, per task
``checks``   length, forbidden phrases, language
``leak``     what it gives away of the target
``gain``     what it does for an embedder, which chooses
``main``     the command line
"""
