"""Embedding pictures on a Ray cluster, through Daft: each worker loads the encoder once and keeps it.

The project and the encoder's weights must be there on every node, and the pictures on a file system that all share.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from data_prep.rmir.config import EncoderConfig
from data_prep.rmir.frames import absolute, cluster_size, daft_frame
from data_prep.rmir.pictures.encoders import image_encoder, in_use
from rge.common.images import picture_bytes
from rge.common.schema import ImageRef


def embed_on_ray(config: EncoderConfig, refs: Sequence[ImageRef]) -> np.ndarray:
    """Embed pictures with as many workers as the cluster has GPUs, or else nodes.

    Args:
        config: of the encoder; a local path must be the same on every node.
        refs: of the pictures, one or more; bytes travel to the workers.

    Returns:
        (N, D) float32, unit norm, in the order of `refs`.
    """
    import daft
    from daft import DataType, col

    # The fallback is decided here: a worker that lacks the weights must fail, not mix in vectors of its own.
    config = replace(in_use(config), fallback=None)
    if config.path is not None and os.path.isdir(config.path):
        config.path = os.path.abspath(config.path)
    paths = [ref for ref in refs if isinstance(ref, str)]
    given = absolute(paths) if len(paths) == len(refs) else [picture_bytes(ref) for ref in refs]
    table = pa.table({"row": pa.array(range(len(refs)), pa.int64()), "file": given})
    frame = daft_frame(table, "ray")
    num_gpus = cluster_size("GPU")

    @daft.cls(gpus=int(num_gpus > 0), max_concurrency=num_gpus or cluster_size("node"))
    class Embedder:
        def __init__(self, config: EncoderConfig):
            self.encoder = image_encoder(config)

        @daft.method.batch(return_dtype=DataType.list(DataType.float32()), batch_size=config.batch_size)
        def vectors(self, files):
            return list(self.encoder.pictures(files.to_pylist()))

    found = frame.select(col("row"), Embedder(config).vectors(col("file")).alias("vector"))
    vectors = found.to_arrow().sort_by("row")["vector"].combine_chunks()
    return vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(refs), -1)
