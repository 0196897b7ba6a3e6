"""Retrieval sets as MTEB tasks, for any model that MTEB knows.

    results = mteb.evaluate(mteb.get_model("intfloat/mmE5-mllama-11b-instruct"), tasks("runs/sets/rmir", benchmark="rmir"))

MTEB and ``rge eval run`` compute the same nDCG, MAP, recall, precision, hit rate and MRR (by trec_eval's definitions),
including per-query candidates, exclusions and positives missing from the pool. MTEB does not support intervals and
categories; PinPoint's AP@10 over min(positives, 10), negatives and paraphrases; MMEB's rule for equal scores (MTEB uses
trec_eval's: larger id first); or MM-BRIGHT's means of rounded domains. `eval run` does.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List, Value, Video
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.task_metadata import TaskMetadata

from eval.benchmarks.registry import GENERIC, protocol_for
from eval.benchmarks.suite import is_suite, load_suite
from eval.scoring.metrics import CUTOFFS
from eval.sets.contents import with_content
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import picture_bytes
from rge.common.parts import ImagePart, TextPart, VideoPart
from rge.common.schema import Item

SPLIT, SUBSET = "test", "default"
_LETTERS: dict[type, str] = {ImagePart: "i", VideoPart: "v", TextPart: "t"}
METRICS = {name: name for name in ("ndcg", "map", "recall", "precision")} | {"hit": "hit_rate"}
"""MTEB's names of our metrics with a cutoff."""


class SetTask(AbsTaskRetrieval):
    """A retrieval set as an MTEB task; each set is a subclass, see `tasks`."""

    k_values = tuple(sorted({*AbsTaskRetrieval.k_values, *CUTOFFS}))
    wanted: RetrievalSet  # the set, prepared by the protocol
    query_kinds: str  # MTEB's category letters of the queries' modalities
    candidate_kinds: str  # the same for the candidates
    data_loaded: bool = False  # MTEB's attribute, redeclared for type checks without MTEB

    def load_data(self, num_proc: int | None = None, **_: Any) -> None:
        """Load the set; called by MTEB."""
        if self.data_loaded:
            return
        wanted = self.wanted
        named = len(_instructions(wanted)) > 1
        names = wanted.corpus_ids
        relevant = {
            query.id: {names[row]: int(gain) for row, gain in zip(*positives, strict=True)}
            for query, positives in zip(wanted.queries, wanted.positives, strict=True)
        }
        if wanted.num_missing_Q is not None:
            for query, count in zip(wanted.queries, wanted.num_missing_Q.tolist(), strict=True):
                # ids with spaces, which no candidate has: they count in denominators but are never ranked
                relevant[query.id] |= {f"not in the pool {number}": 1 for number in range(count)}
        self.dataset = {
            SUBSET: {
                SPLIT: RetrievalSplitData(
                    corpus=_table(wanted, "corpus", self.candidate_kinds, named=False),
                    queries=_table(wanted, "queries", self.query_kinds, named=named),
                    relevant_docs=relevant,
                    top_ranked=_ranked(wanted),
                )
            }
        }
        self.data_loaded = True


def tasks(path: str | Path, *, benchmark: str = GENERIC, profile: str = "clean") -> list[Any]:
    """The MTEB tasks of a retrieval set or a suite's members, with the exclusions of the benchmark and profile."""
    root = find_shipped(path)
    folders = [root / name for name in load_suite(root).members] if is_suite(root) else [root]
    return [_task(folder, benchmark, profile) for folder in folders]


def _task(folder: Path, benchmark: str, profile: str) -> SetTask:
    wanted = load_set(folder)
    protocol = protocol_for(benchmark, profile, wanted)
    wanted = with_content(protocol.prepare(wanted))
    headline = (protocol.main_metric(wanted), *protocol.headline) if protocol.benchmark != GENERIC else ()
    parts_of = (name.partition("@") for name in (*headline, "ndcg@10"))
    known = (f"{METRICS[kind]}_at_{k}" for kind, _, k in parts_of if k and kind in METRICS)
    queries, candidates = _kinds(wanted.queries), _kinds(wanted.corpus_items())
    parts = {
        "metadata": _metadata(wanted, queries, candidates, next(known)),
        "wanted": wanted,
        "query_kinds": queries,
        "candidate_kinds": candidates,
    }
    return type("SetTask", (SetTask,), parts)()


def _metadata(wanted: RetrievalSet, queries: str, candidates: str, main_score: str) -> TaskMetadata:
    both = queries + candidates
    about: dict[str, Any] = {
        "name": wanted.name.replace("/", "-"),
        "description": f"Retrieval set {wanted.name}.",
        "dataset": {"path": str(wanted.path), "revision": str(wanted.content)},
        "type": "Any2AnyRetrieval" if set(both) - {"t"} else "Retrieval",
        "category": f"{queries}2{candidates}",
        "modalities": [name for name in ("text", "image", "video") if name[0] in both],
        "eval_splits": [SPLIT],
        "eval_langs": ["eng-Latn"],
        "main_score": main_score,
    }
    if len(instructions := _instructions(wanted)) == 1:
        # Models take it as a prompt; of a column, MTEB would append it to each text. Empty: otherwise MTEB uses the model's default.
        about["prompt"] = {"query": instructions.pop()}
    return TaskMetadata(**about)


def _instructions(wanted: RetrievalSet) -> set[str]:
    """The different instructions of the queries; empty: none."""
    return {query.instruction or "" for query in wanted.queries}


def _kinds(items: Any) -> str:
    """MTEB's category letters for the modalities that any item has."""
    kinds: set[str] = set()
    for item in items:
        order = "".join(_LETTERS.get(type(part), "?") for part in item.content)
        clips = [part for part in item.content if isinstance(part, VideoPart)]
        if not re.fullmatch("i*v?t*", order) or any(
            isinstance(part.video, tuple) or part != VideoPart(part.video) for part in clips
        ):
            raise UserError(
                "MTEB's tables have pictures, a whole clip and a text, in this order; `rge eval run` takes more",
                place=f"item {item.id}",
            )
        kinds |= set(order)
    return "".join(sorted(kinds, key="ivt".index))


def _table(wanted: RetrievalSet, side: str, kinds: str, *, named: bool) -> Dataset:
    """An MTEB table, cached on disk by the set's content, since a pool's pictures may exceed the memory."""
    items = wanted.queries if side == "queries" else wanted.corpus_items()
    several = "i" in kinds and any(len(item.pictures) > 1 for item in items)
    features: dict[str, Any] = {"id": Value("string")}
    if "t" in kinds:
        features["text"] = Value("string")
    if "i" in kinds:
        features["image"] = List(Image()) if several else Image()
    if "v" in kinds:
        features["video"] = Video()
    if named:
        features["instruction"] = Value("string")
    source = {"path": str(wanted.path), "content": wanted.content, "side": side}
    kwargs = source | {"columns": tuple(features), "several": several}
    return Dataset.from_generator(_rows, features=Features(features), gen_kwargs=kwargs)


def _rows(
    path: str, content: str, side: str, columns: tuple[str, ...], several: bool
) -> Iterator[dict[str, Any]]:
    wanted = load_set(path)
    for item in wanted.queries if side == "queries" else wanted.corpus_items():
        yield {name: _cell(item, name, several) for name in columns}


def _cell(item: Item, name: str, several: bool) -> Any:
    if name == "id":
        return item.id
    if name == "video":
        return next((part.video for part in item.content if isinstance(part, VideoPart)), None)
    if name != "image":
        return getattr(item, name) or ""
    pictures = [{"bytes": picture_bytes(ref), "path": None} for ref in item.pictures]
    return pictures if several else pictures[0] if pictures else None


def _ranked(wanted: RetrievalSet) -> dict[str, list[str]] | None:
    """Each query's candidates; None if they are the whole pool."""
    if wanted.candidates is None and wanted.excluded is None:
        return None
    every = range(len(wanted.corpus_ids))
    ranked = {}
    for number, query in enumerate(wanted.queries):
        rows = every if wanted.candidates is None else wanted.candidates[number].tolist()
        excluded = set() if wanted.excluded is None else set(wanted.excluded[number].tolist())
        ranked[query.id] = [wanted.corpus_ids[row] for row in rows if row not in excluded]
    return ranked
