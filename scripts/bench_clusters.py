"""Time and memory of the seed stage's k-means and of retrieval, on synthetic embeddings, and what the paper's size needs.

    python scripts/bench_clusters.py [images=200000] [width=768] [clusters=1000] [per_cluster=10] [iterations=10] [queries=1000]

Both run through the pipeline's own functions (`data_prep.rmir.stages`). Each part is a process of its own, and the peak of
its memory is set back once the embeddings are made (Linux), so that it is that of the work. K-means grows with images sampled (256 a cluster at most) x clusters x width; the last lines multiply
the measured rate by the paper's 2,018,175 images and 50,000 clusters. Last line: the figures as JSON.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from rge.common.commands import start
from rge.common.options import parse_options


@dataclass
class Options:
    """Time and memory of clustering and retrieval over made-up embeddings."""

    images: int = 200_000
    """Pictures of the library."""
    width: int = 768
    """Dimensions of an embedding."""
    clusters: int = 1000
    """Clusters of k-means."""
    per_cluster: int = 10
    """Pictures drawn of each, which make up the seed set."""
    iterations: int = 10
    """Of k-means."""
    queries: int = 1000
    """Retrieved for, in the seed set."""


PAPER = {
    "images": 2_018_175, "width": 1152, "clusters": 50_000, "iterations": 20, "seed": 500_000, "queries": 100_000,
}  # fmt: skip
"""SigLIP 2 So400m has 1,152 dimensions. Iterations: the pipeline's default. Queries: ours, a round number."""
POINTS_A_CLUSTER = 256


def embeddings(num: int, width: int) -> np.ndarray:
    """(num, width) float32 of unit norm around 1,000 centres: real embeddings are no even cloud either."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1000, width), dtype=np.float32)
    found = np.empty((num, width), np.float32)
    for first in range(0, num, 20_000):
        rows = slice(first, min(first + 20_000, num))
        size = rows.stop - rows.start
        found[rows] = centres[rng.integers(0, 1000, size)] + rng.standard_normal(
            (size, width), dtype=np.float32
        )
        found[rows] /= np.linalg.norm(found[rows], axis=1, keepdims=True)
    return found


def part(name: str, sizes: dict[str, int]) -> dict[str, float]:
    """Measure one part in this process.

    Args:
        name: kmeans or retrieval.
        sizes: see `Options`.

    Returns:
        Seconds, CPU seconds, memory before the work and its peak in bytes.
    """
    import faiss

    from data_prep.rmir import seed_set

    vectors = embeddings(sizes["images"], sizes["width"])
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    held = peak_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    if name == "kmeans":
        cluster_N = seed_set.cluster(vectors, sizes["clusters"], sizes["iterations"], 0)
        chosen = seed_set.sample_clusters(cluster_N, sizes["per_cluster"], 0)
        assert 0 < len(chosen) <= sizes["clusters"] * sizes["per_cluster"]
    elif name == "retrieval":
        index = faiss.IndexFlatIP(sizes["width"])
        index.add(vectors)
        found = index.search(vectors[: sizes["queries"]], 17)[1]
        assert (found[:, 0] == np.arange(len(found))).mean() > 0.99
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "held_bytes": held, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Peak of this process' memory since it was set back."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def needed(
    sizes: dict[str, int], kmeans_cpu_s: float, search_cpu_s: float, beyond: float
) -> dict[str, float]:
    """What the paper's size needs, from the measured rates.

    Args:
        sizes: measured.
        kmeans_cpu_s: CPU seconds of k-means, all images assigned.
        search_cpu_s: CPU seconds of retrieval.
        beyond: memory that k-means took besides the embeddings, as a multiple of the sampled points' bytes.
    """
    sampled = min(sizes["images"], POINTS_A_CLUSTER * sizes["clusters"])
    work = (sampled * sizes["iterations"] + sizes["images"]) * sizes["clusters"] * sizes["width"]
    paper_sampled = min(PAPER["images"], POINTS_A_CLUSTER * PAPER["clusters"])
    paper_work = (paper_sampled * PAPER["iterations"] + PAPER["images"]) * PAPER["clusters"] * PAPER["width"]
    search = sizes["images"] * sizes["width"] * sizes["queries"]
    paper_search = PAPER["seed"] * PAPER["width"] * PAPER["queries"]
    vectors = 4 * PAPER["images"] * PAPER["width"]
    return {
        "paper_vectors_gb": vectors / 1e9,
        "paper_kmeans_peak_gb": (vectors + beyond * 4 * paper_sampled * PAPER["width"]) / 1e9,
        "paper_kmeans_cpu_hours": kmeans_cpu_s * paper_work / work / 3600,
        "paper_kmeans_pflop": 2 * paper_work / 1e15,
        "paper_index_gb": 4 * PAPER["seed"] * PAPER["width"] / 1e9,
        "paper_search_cpu_hours": search_cpu_s * paper_search / search / 3600,
    }


def main(words: list[str]) -> None:
    """Measure and print."""
    if words[:1] == ["part"]:
        print(json.dumps(part(words[1], json.loads(words[2]))))
        return
    sizes = asdict(parse_options(Options, words))
    found = {}
    for name in ("kmeans", "retrieval"):
        command = [sys.executable, __file__, "part", name, json.dumps(sizes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    sampled = 4 * min(sizes["images"], POINTS_A_CLUSTER * sizes["clusters"]) * sizes["width"]
    beyond = (found["kmeans"]["peak_bytes"] - found["kmeans"]["held_bytes"]) / sampled
    figures = {
        **sizes,
        "vectors_gb": 4 * sizes["images"] * sizes["width"] / 1e9,
        "before_gb": found["kmeans"]["held_bytes"] / 1e9,
        "kmeans_s": found["kmeans"]["seconds"],
        "kmeans_cpu_s": found["kmeans"]["cpu_s"],
        "kmeans_peak_gb": found["kmeans"]["peak_bytes"] / 1e9,
        "retrieval_s": found["retrieval"]["seconds"],
        "retrieval_cpu_s": found["retrieval"]["cpu_s"],
        "retrieval_peak_gb": found["retrieval"]["peak_bytes"] / 1e9,
        **needed(sizes, found["kmeans"]["cpu_s"], found["retrieval"]["cpu_s"], beyond),
    }
    figures = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }
    for name, value in figures.items():
        print(f"{name:<24} {value:,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    start(main)
