"""The nearest vectors by inner product, by faiss on a CPU, by torch on a GPU.

Shape suffixes: Q = queries, N = vectors, D = dimensions, K = found.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

SCORES = 1 << 27
"""Scores that a device holds at once: 512 MB."""


def search_device() -> str | None:
    """The GPU to search on; None: there is none, or nothing has been embedded on it in this process."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else None


def top(
    query_QD: np.ndarray, vector_ND: np.ndarray, k: int, device: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of the K best of N vectors, best first, each (Q, K); equal scores in any order. K is at most N."""
    if device is None:
        import faiss

        score_QK, row_QK = faiss.knn(query_QD, vector_ND, k, metric=faiss.METRIC_INNER_PRODUCT)
        return score_QK, row_QK
    import torch

    with _full_precision():
        vectors = torch.tensor(vector_ND, device=device)
        best = [score_QN.topk(k, dim=1) for score_QN in _scores(query_QD, vectors)]
        score = torch.cat([part.values for part in best])
        row = torch.cat([part.indices for part in best])
        return score.cpu().numpy(), row.cpu().numpy()


def within(
    query_QD: np.ndarray, vectors: "torch.Tensor", mask_N: np.ndarray | None, k: int, margin: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query, rows and scores of the k best of some vectors (N, D) on a device, and of all that are less than a margin worse.

    Only vectors where the mask is set count; None: all.
    """
    import torch

    found = []
    with _full_precision():
        hidden = None if mask_N is None else torch.from_numpy(~mask_N).to(vectors.device)
        for score_QN in _scores(query_QD, vectors):
            if hidden is not None:
                score_QN.masked_fill_(hidden, float("-inf"))
            last_Q1 = score_QN.topk(min(k, len(vectors)), dim=1).values[:, -1:]
            keep_QN = (score_QN >= last_Q1 - margin) & torch.isfinite(score_QN)
            for score_N, keep_N in zip(score_QN, keep_QN, strict=True):
                row_K = keep_N.nonzero()[:, 0]
                found.append((row_K.cpu().numpy(), score_N[row_K].cpu().numpy()))
    return found


def _scores(query_QD: np.ndarray, vectors: "torch.Tensor") -> "Iterator[torch.Tensor]":
    """Scores of some queries with all vectors at a time."""
    import torch

    queries = torch.from_numpy(np.ascontiguousarray(query_QD)).to(vectors.device)
    for some in queries.split(max(1, SCORES // max(1, len(vectors)))):
        yield some @ vectors.T


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TensorFloat-32, whose ten bits of mantissa would make ties of what differs."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
