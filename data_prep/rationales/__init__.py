"""Oracle rationales for training records: written by a model that sees the answer, checked one by one.

``prompts``  the writer's prompts, by task
``checks``   length, forbidden phrases, language
``leak``     how much a rationale gives away of the target
``gain``     selection by an embedder
``main``     the command line
"""
