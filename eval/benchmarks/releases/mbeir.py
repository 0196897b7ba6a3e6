"""M-BEIR (UniIR, arXiv:2311.17136): 16 tasks on ten data sets, each with its own pool or with a global one of 5.6 million.

Layout (``TIGER-Lab/M-BEIR``, read by github.com/TIGER-AI-Lab/UniIR, 98dc570):

``query/test/mbeir_TASK_test.jsonl``             qid, query_txt, query_img_path, query_modality
``qrels/test/mbeir_TASK_test_qrels.txt``         qid, 0, did, relevance, task
``cand_pool/local/mbeir_TASK_cand_pool.jsonl``   did, txt, img_path, modality (of MSCOCO ``mbeir_TASK_test_cand_pool.jsonl``)
``cand_pool/global/mbeir_union_test_cand_pool.jsonl``
``instructions/query_instructions.tsv``          query_modality, cand_modality, dataset_name, dataset_id, prompt_1 ... prompt_4
``mbeir_images``                                 prefix of all picture paths

Ids are ``DATASET:NUMBER``. Judgements of OVEN and InfoSeek name right candidates of both data sets; a task's own pool
holds only those of one. All queries get the same of a data set's four instructions, in their instruction field.

Shape suffixes: Q = queries, M = metrics.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    PictureOptions,
    Pictures,
    ReleaseError,
    Row,
    chosen,
    content_id,
    existing,
    iter_rows,
)
from eval.scoring.output_files import Scored
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet, some
from eval.sets.write_set import Candidate, Query

TASKS = (
    "visualnews_task0", "mscoco_task0", "fashion200k_task0", "webqa_task1", "edis_task2", "webqa_task2", "visualnews_task3",
    "mscoco_task3", "fashion200k_task3", "nights_task4", "oven_task6", "infoseek_task6", "fashioniq_task7", "cirr_task7",
    "oven_task8", "infoseek_task8",
)  # fmt: skip
"""In the order of the published tables; the number is the kind of task, see `KINDS`."""
KINDS = {
    "0": ("text", "image"),
    "1": ("text", "text"),
    "2": ("text", "image,text"),
    "3": ("image", "text"),
    "4": ("image", "image"),
    "6": ("image,text", "text"),
    "7": ("image,text", "image"),
    "8": ("image,text", "image,text"),
}
"""Modalities of queries and candidates."""
REPOSITORY = "TIGER-Lab/M-BEIR (rge eval fetch mbeir out=DIR)"
GLOBAL_POOL = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
MAIN = "task_hit"
"""Metric that is averaged over tasks: hit@10 for tasks whose `CUTS` begin with 10, else hit@5."""
CUTS = {"fashion200k": (10, 20, 50), "fashioniq": (10, 20, 50)}
"""Cutoffs that the released configuration reports for a data set, the main one first; ``USUAL`` for the others."""
USUAL = (5, 1, 10)


@dataclass
class MbeirOptions(PictureOptions):
    """Make a suite of retrieval sets, or one set with the global pool, from the release of M-BEIR."""

    tasks: tuple[str, ...] = ("all",)
    """Tasks, such as cirr_task7; by default all 16."""
    pool: Literal["local", "global"] = "local"
    """local: a suite in which each task has its own pool; global: one set with all queries and the pool of 5.6 million."""
    instructions: Literal["1", "2", "3", "4", "none"] = "1"
    """Which of a task's four instructions to use."""
    images: Path | None = None
    """Folder that the picture paths are relative to; null: src."""


def import_mbeir(options: MbeirOptions) -> list[str] | RetrievalSet:
    """Read M-BEIR's test queries and write a suite (returns the names of its tasks) or one set."""
    names = chosen("tasks", options.tasks, TASKS)
    title = "M-BEIR" if len(names) == len(TASKS) else f"M-BEIR, {len(names)} of {len(TASKS)} tasks"
    if options.pool == "global":
        return _write(f"{title}, global pool", names, GLOBAL_POOL, options, "")
    return options.write_members(
        {name: {"kind": " to ".join(KINDS[name[-1]])} for name in names},
        lambda name: _write(f"M-BEIR {name}", [name], local_pool(name), options, name),
        name=title,
        benchmark="mbeir",
        column="task",
        pool=options.pool,
        instructions=options.instructions,
    )


def query_file(task: str) -> str:
    """Path of a task's queries in the release."""
    return f"query/test/mbeir_{task}_test.jsonl"


def local_pool(task: str) -> str:
    """Path of a task's own pool in the release."""
    return f"cand_pool/local/mbeir_{task}{'_test' * task.startswith('mscoco')}_cand_pool.jsonl"


def sentence(text: str) -> str:
    """A text as the released loader formats it: no surrounding quotes, a capital letter first and a full stop last."""
    text = text.replace("\r", "").strip().strip('"')
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def _write(title: str, tasks: Iterable[str], pool: str, options: MbeirOptions, member: str) -> RetrievalSet:
    hint = "unpack mbeir_images.tar.gz and pass images=DIR"
    pictures, prompts = Pictures(options.images or options.src, hint=hint), _prompts(options)
    queries: list[Query] = []
    pairs: list[tuple[str, str]] = []
    for task in tasks:
        right = _right(options.src / f"qrels/test/mbeir_{task}_test_qrels.txt")
        for row in iter_rows(existing(options.src / query_file(task), REPOSITORY)):
            query = _query(row, task, prompts, pictures)
            queries.append(query)
            pairs += [(query.id, name) for name in right.get(query.id, [])]
    pool_file = existing(options.src / pool, REPOSITORY)
    lost = {name for _, name in pairs} - {str(row.value("did")) for row in iter_rows(pool_file)}
    own = {name for query, name in pairs if options.pool == "global" or _dataset(name) == _dataset(query)}
    if missing := sorted(lost & own):
        raise ReleaseError(f"{pool_file} lacks {len(missing)} right candidates: {some(missing)}")
    return options.write(
        member,
        meta={
            "name": title,
            "benchmark": "mbeir",
            "source": "TIGER-Lab/M-BEIR, imported by eval.benchmarks.releases.mbeir",
            "pool": options.pool,
            "instructions": options.instructions,
            "right_candidates_of_another_pool": len(lost),
        },
        queries=queries,
        corpus=(
            Candidate(
                str(row.value("did")),
                sentence(row.text("txt")) or None,
                *_images(pictures, row, "img_path"),
            )
            for row in iter_rows(pool_file)
        ),
        qrels=[(query, name, 1) for query, name in pairs if name not in lost],
    )


def _images(pictures: Pictures, row: Row, column: str) -> tuple[bytes | Path, ...]:
    return (pictures.find(row[column], row.where),) if row.get(column) else ()


def _query(row: Row, task: str, prompts: dict[tuple[str, ...], str], pictures: Pictures) -> Query:
    name, modality = str(row.value("qid")), str(row.value("query_modality"))
    prompt = ""
    if prompts:
        key = (_dataset(name), modality, KINDS[task[-1]][1])
        if key not in prompts:
            raise row.error(f"no instruction for data set {key[0]}, {key[1]} to {key[2]}")
        prompt = sentence(prompts[key])
    # the released code joins instruction and text with a space into one sentence
    text = sentence(f"{prompt} {row.text('query_txt')}").removeprefix(prompt).strip()
    return Query(
        name,
        text or None,
        _images(pictures, row, "query_img_path"),
        category=task,
        group=content_id(row.get("query_img_path") or text),
        instruction=prompt or None,
    )


def _right(path: Path) -> dict[str, list[str]]:
    right: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(existing(path, REPOSITORY).read_text("utf-8-sig").splitlines(), 1):
        parts = line.split()
        if len(parts) not in (4, 5):
            raise ReleaseError(f"{path}, line {number}: expected qid, 0, did and relevance, got {line!r}")
        query, _, candidate, relevance, *_ = parts
        if int(relevance) > 0 and candidate not in right[query]:
            right[query].append(candidate)
    return right


def _prompts(options: MbeirOptions) -> dict[tuple[str, ...], str]:
    """(data set, query modality, candidate modality) -> instruction; empty with ``instructions=none``."""
    if options.instructions == "none":
        return {}
    file = existing(options.src / "instructions/query_instructions.tsv", REPOSITORY)
    prompt, names = f"prompt_{options.instructions}", ("dataset_id", "query_modality", "cand_modality")
    return {tuple(str(row.value(name)) for name in names): str(row.value(prompt)) for row in iter_rows(file)}


def _dataset(name: str) -> str:
    return name.partition(":")[0]


def cuts_of(task: str) -> tuple[int, ...]:
    """Cutoffs of a task, the main one first."""
    return CUTS.get(task.partition("_")[0], USUAL)


@dataclass(frozen=True)
class Mbeir(Protocol):
    """M-BEIR: ``task_hit`` of each task, averaged over tasks."""

    def main_metric(self, wanted: RetrievalSet) -> str:
        """The hit rate that `MAIN` is in a task's set; hit@5 if tasks differ."""
        return f"hit@{min(cuts_of(task)[0] for task in wanted.columns['category'])}"

    def score(self, wanted: RetrievalSet, ranking: Ranking) -> Scored:
        """As `Protocol.score`, with `MAIN` as a further metric."""
        scored = super().score(wanted, ranking)
        hits = [f"hit@{cuts_of(task)[0]}" for task in wanted.columns["category"]]
        place_Q1 = np.array(list(map(scored.names.index, hits)))[:, None]
        more = {
            name: np.column_stack([table_QM, np.take_along_axis(table_QM, place_Q1, axis=1)])
            for name in ("value_QM", "best_QM", "worst_QM")
            for table_QM in [getattr(scored, name)]
        }
        more["random_QM"] = np.column_stack([scored.random_QM, np.full(len(hits), np.nan)])  # varies by task
        return replace(scored, names=(*scored.names, MAIN), **more)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Official: the released code's names and rounding, by task."""
        if self.profile == "clean":
            return {}
        table = pd.DataFrame(scored.value_QM, columns=scored.names)
        means = table.groupby(np.array(wanted.columns["category"])).mean().iterrows()
        return {
            "official": {
                task: {f"Recall@{k}": round(float(mean[f"hit@{k}"]), 4) for k in cuts_of(task)}
                for task, mean in means
            }
        }

    def suite_figures(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Official: the figures of all tasks, as in the released table."""
        if self.profile == "clean":
            return {}
        of_all = (result["official"].items() for result in results.values())
        return {"official": dict(chain.from_iterable(of_all))}


_SAID = (
    "M-BEIR's Recall@k is hit@k: 1 if any right candidate is among the first k",
    "task_hit is hit@10 for Fashion200K and FashionIQ and hit@5 for the others; overall is its unweighted mean over tasks",
    "right candidates in another task's pool (OVEN and InfoSeek) are left out of a local set, which does not change hit@k",
    "one instruction for all queries of a task; the released code draws one of four for each query",
    "equal scores are ordered by id; the released search does not define their order",
)
PROTOCOLS = (
    Mbeir("mbeir", "clean", (MAIN, "hit@1", "recall@10"), (*_SAID, "a query without a ranking counts 0")),
    Mbeir("mbeir", "official", (MAIN,), (
        *_SAID, "official: figures under the released names, rounded to four digits per task",
    )),
)  # fmt: skip
register_benchmark(Benchmark("mbeir", import_mbeir, PROTOCOLS, Path(__file__).with_name("published")))
