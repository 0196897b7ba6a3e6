"""Arithmetic on embeddings."""

import numpy as np


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to unit length; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
