"""Mining of hard negatives against sentence-transformers' `mine_hard_negatives`.

`python scripts/bench.py mining`. Both get the vectors for free, the same rules, and write no file; the share of queries with equal lists is
the last column. Each measurement is a process of its own; memory is its largest growth.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benches.harness import Rows, in_new_process, peak_growth, show
from rge.common.schema import Record
from rge.mining.config import MiningRules
from rge.mining.rules import limits
from rge.mining.search import nearest
from rge.mining.table import RecordTable
from rge.vectors.contents import content_digest


@dataclass
class Options:
    """Sizes of the text set."""

    candidates: tuple[int, ...] = (1_000, 10_000, 100_000)
    """Sizes of the pool."""
    queries: int = 5_000
    """Queries, at most one for each candidate."""
    dim: int = 384
    """Components of a vector."""
    num: int = 8
    """Negatives of a query."""
    others: bool = True
    """Whether to measure sentence-transformers too."""


def measure(options: Options) -> Rows:
    """Measure both at every size."""
    rows: Rows = {}
    for size in options.candidates:
        names = ["rge", *(["sentence-transformers"] if options.others else [])]
        found = {name: in_new_process(_measured, name, size, options) for name in names}
        for name, (figures, lists) in found.items():
            same = [lists[query] == found["rge"][1].get(query) for query in lists]
            rows[f"{name}, {size:,}"] = figures | {"equal lists": float(np.mean(same))}
    return show(rows)


def _measured(name: str, size: int, options: Options) -> tuple[dict[str, float], dict[str, list[str]]]:
    texts, candidate_CD, query_QD = _made(size, options)
    found: list[dict[str, list[str]]] = []
    work = _ours if name == "rge" else _theirs
    began, cpu_began = time.perf_counter(), time.process_time()
    grown = peak_growth(lambda: found.append(work(texts, candidate_CD, query_QD, options)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return {"wall s": wall, "CPU s": cpu, "memory MB": grown / 2**20}, found[0]


def _made(size: int, options: Options) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Texts, their vectors, and those of queries, each near its text; clusters, so that near candidates exist."""
    chance = np.random.default_rng(0)
    centre_KD = chance.standard_normal((max(size // 50, 1), options.dim), dtype=np.float32)
    candidate_CD = centre_KD[chance.integers(len(centre_KD), size=size)]
    candidate_CD += 0.7 * chance.standard_normal(candidate_CD.shape, dtype=np.float32)
    query_QD = candidate_CD[: min(options.queries, size)].copy()
    query_QD += 0.9 * chance.standard_normal(query_QD.shape, dtype=np.float32)
    for vectors in (candidate_CD, query_QD):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [f"text {number:07d}" for number in range(size)], candidate_CD, query_QD


def _ours(
    texts: list[str], candidate_CD: np.ndarray, query_QD: np.ndarray, options: Options
) -> dict[str, list[str]]:
    def record(number: int) -> Record:
        target = {"id": texts[number], "text": texts[number]}
        query = {"text": f"query {number}"}
        about = {"id": f"r{number}", "group": "g", "source": "s", "split": "train"}
        return Record.model_validate(about | {"query": query, "positives": [target]})

    rules = MiningRules(num=options.num)
    pool = [record(number).positives[0] for number in range(len(texts))]
    table = RecordTable(map(record, range(len(query_QD))), content_digest, pool)
    most = limits(rules, table.lowest_positive(query_QD, candidate_CD))
    found = nearest(query_QD, candidate_CD, table.groups(), most, depth=rules.depth())
    return {
        query.item.text or "": [texts[row] for row in rows if row >= 0]
        for query, rows in zip(table.queries, found.row_QK.tolist(), strict=True)
    }


class _Stub:
    """As much of a `SentenceTransformer` as mining uses; its vectors are given."""

    device = "cpu"

    def __init__(self, candidate_CD: np.ndarray, query_QD: np.ndarray):
        from sentence_transformers.util import cos_sim, pairwise_cos_sim

        self.candidate_CD, self.query_QD = candidate_CD, query_QD
        self.similarity, self.similarity_pairwise = cos_sim, pairwise_cos_sim

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        return self.candidate_CD[[int(text.split()[1]) for text in texts]]

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return self.query_QD[[int(text.split()[1]) for text in texts]]


def _theirs(
    texts: list[str], candidate_CD: np.ndarray, query_QD: np.ndarray, options: Options
) -> dict[str, list[str]]:
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    asked = [f"query {number}" for number in range(len(query_QD))]
    mined = mine_hard_negatives(
        Dataset.from_dict({"anchor": asked, "positive": texts[: len(asked)]}),
        _Stub(candidate_CD, query_QD),  # type: ignore[arg-type]
        corpus=texts,
        relative_margin=0.05,
        num_negatives=options.num,
        range_max=100,
        output_format="n-tuple",
        verbose=False,
    )
    return {
        row["anchor"]: [row[f"negative_{number}"] for number in range(1, options.num + 1)] for row in mined
    }
