"""Reasoning-intensive retrieval data from any pictures: the pipeline of RMIR, stage by stage.

    seed -> generate -> filter -> retrieve -> judge -> keep -> pool -> split

``config``      every setting, with the paper's value as its default
``arithmetic``  confidence, doubted images, TSR, candidates, splits: pure functions, tested by hand-worked examples
``prompts``     what the models are asked
``stages``      one function a stage: Parquet in, Parquet out, resumable
``main``        the command line
"""
