"""Reasoning-intensive retrieval data from any pictures: the stages of the RMIR pipeline.

    seed -> generate -> filter -> retrieve -> judge -> keep -> pool -> split

``config``      all settings, with the paper's values as defaults
``arithmetic``  confidence, doubted images, TSR, candidates and splits as pure functions
``prompts``     the models' prompts
``stages``      one function per stage: Parquet in, Parquet out, resumable
``main``        the command line
"""
