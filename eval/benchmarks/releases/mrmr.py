"""MRMR (reasoning-intensive multimodal retrieval, arXiv:2510.09510): five tasks of expert-level questions with pictures.

Layout (``MRMRbenchmark/TASK`` on the Hugging Face hub; columns from the card of ``knowledge`` and from the tasks of
github.com/rebeccaz4/MRMR): a folder per task with ``corpus``, ``query`` and ``qrels``, split test. Query and corpus
have ``id``, ``modality`` (text, image or ``image,text``), ``text``, ``image``, ``image 1`` ..., the corpus also
``vision`` (everything as one picture, not used here), and queries of knowledge and theorem a ``category``. Missing
values are null; queries without judgements are left out, as in MTEB.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    ReleaseError,
    ReleaseOptions,
    Row,
    chosen,
    files_of_split,
    read_qrels,
    read_rows,
)
from eval.scoring.output_files import Scored
from eval.scoring.protocol import Protocol
from eval.scoring.results import Results
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query
from rge.common.parts import Content, ImagePart, Part, TextPart

INSTRUCTIONS = {
    "knowledge": "Retrieve relevant documents that help answer the question.",
    "theorem": "Retrieve relevant theorems that are involved in solving the problem.",
    "design": "Given a vehicle design, retrieve the design requirements that it violates.",
    "traffic": "Given a traffic case, retrieve the driving rule documents that it violates.",
    "negation": "Given an image caption, retrieve descriptions that have contradictory information with the image.",
}
"""Task -> query prompt of the released code."""
_DISCIPLINES = {
    "Art": "Art Art_Theory Design Music",
    "Humanities": "Sociology Literature History Psychology",
    "Medicine": "Clinical_Medicine Diagnostics_and_Laboratory_Medicine Basic_Medical_Science Pharmacy",
    "Science": "Biology Chemistry Geography Agriculture",
    "Business": "Accounting Finance Manage Marketing Economics",
    "Engineering": "Electronics Computer_Science Mechanical_Engineering Materials Architecture_and_Engineering",
    "Math": "Math",
    "Physics": "Physics Energy_and_Power",
}
DISCIPLINES = {name: discipline for discipline, names in _DISCIPLINES.items() for name in names.split()}
"""Domain of a query -> discipline, as reported in the paper; the released code maps the rest to ``other``."""
MAIN = {"negation": "recall@1"}
"""Main score of tasks for which it is not `USUAL`."""
USUAL = "ndcg@10"


@dataclass
class MrmrOptions(ReleaseOptions):
    """Make a suite of retrieval sets from the release of MRMR."""

    tasks: tuple[str, ...] = ("all",)
    """Tasks: knowledge, theorem, design, traffic, negation; by default all."""
    query_images: Literal["image", "numbered", "in_place"] = "image"
    """image: the query's one picture, as in the released evaluation; numbered: ``image 1``, ``image 2``, ... if
    present; in_place: these, where the text names them (``<image 1>``), the others first."""


def import_mrmr(options: MrmrOptions) -> list[str]:
    """Read MRMR's tasks and write a suite; returns their names."""
    tasks = chosen("tasks", options.tasks, INSTRUCTIONS)
    return options.write_members(
        {task: {} for task in tasks},
        lambda task: _import_one(task, options),
        name="MRMR" if len(tasks) == len(INSTRUCTIONS) else f"MRMR, {', '.join(tasks)}",
        benchmark="mrmr",
        column="task",
        query_images=options.query_images,
    )


def _import_one(task: str, options: MrmrOptions) -> None:
    folder = options.src / task

    def rows_of(part: str) -> Iterator[Row]:
        return read_rows(files_of_split(folder / part, "test"))

    judged = read_qrels(files_of_split(folder / "qrels", "test"))
    rows = [(row.id("id"), row) for row in rows_of("query")]
    queries = [_query(name, row, task, options) for name, row in rows if name in judged]
    if lost := sorted(judged.keys() - {name for name, _ in rows}):
        raise ReleaseError("the query is not in query/: fetch the release again", folder / "qrels", lost[0])
    options.write(
        task,
        meta={
            "name": f"MRMR {task}",
            "benchmark": "mrmr",
            "source": f"MRMRbenchmark/{task}, imported by eval.benchmarks.releases.mrmr",
            "task": task,
            "query_images": options.query_images,
            "report_by": ["discipline", "domain"],
            "queries_without_judgements": len(rows) - len(queries),
        },
        queries=queries,
        corpus=(Candidate(row.id("id"), *_content(row)) for row in rows_of("corpus")),
        qrels=[(query.id, *pair) for query in queries for pair in judged[query.id].items() if pair[1] > 0],
    )


def _query(name: str, row: Row, task: str, options: MrmrOptions) -> Query:
    text, image = _content(row)
    numbers = () if options.query_images == "image" else range(1, 100)
    found = {number: _picture(row.get(f"image {number}")) for number in numbers}
    numbered = {number: picture for number, picture in found.items() if picture is not None}
    images = list(numbered.values()) or ([] if image is None else [image])
    content: Content = ()
    if options.query_images == "in_place" and numbered and text:
        content = _in_place(text, numbered)
        text, images = None, []
    domain = row.get("category") or task
    discipline = task if domain == task else DISCIPLINES.get(domain, "other")
    return Query(
        name,
        text,
        tuple(images),
        group=hashlib.sha256(image or name.encode()).hexdigest()[:20],
        instruction=INSTRUCTIONS[task],
        content=content,
        columns={"domain": domain, "discipline": discipline},
    )


def _in_place(text: str, pictures: Mapping[int, bytes]) -> Content:
    """Text and pictures in order: a picture stands where the text first names it, one that it does not name stands first."""
    content: list[Part] = []
    left = dict(pictures)
    for place, piece in enumerate(re.split(r"<image (\d+)>", text)):
        if place % 2 and int(piece) in pictures:
            if (picture := left.pop(int(piece), None)) is not None:
                content.append(ImagePart(picture))
        elif words := (f"<image {piece}>" if place % 2 else piece).strip():
            content.append(TextPart(words))
    return (*map(ImagePart, left.values()), *content)


def _picture(cell: Any) -> bytes | None:
    return cell.get("bytes") if isinstance(cell, dict) else cell


def _content(row: Row) -> tuple[str | None, bytes | None]:
    """(text, picture) of an item, limited to its modality; as in the release, the text of an image-only item is not used."""
    parts = str(row.value("modality")).replace(" ", "").split(",")
    if unknown := sorted(set(parts) - {"text", "image"}):
        raise row.error(f"{unknown[0]!r} is neither text nor image", "modality")
    text, image = row.text("text") or None, _picture(row.get("image"))
    if empty := [part for part in parts if {"text": text, "image": image}[part] is None]:
        raise row.error(f"it is empty, but modality is {','.join(parts)}", empty[0])
    return text if "text" in parts else None, image if "image" in parts else None


@dataclass(frozen=True)
class Mrmr(Protocol):
    """MRMR: five tasks, each with its main score."""

    def main_metric(self, wanted: RetrievalSet) -> str:
        """recall@1 for negation, nDCG@10 for the other tasks."""
        return MAIN.get(str(wanted.meta.get("task")), USUAL)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """The task's main score; official rounded to five digits, as the released code does."""
        score = self.main_score(wanted, scored)
        return {
            "main_score": score | ({"value": round(score["value"], 5)} if self.profile == "official" else {})
        }

    def suite_figures(self, results: Mapping[str, Results]) -> dict[str, Any]:
        """Main scores of all tasks; the release does not average them."""
        return {"main_scores": {name: result.main_score for name, result in results.items()}}


PROTOCOLS = (
    Mrmr("mrmr", "clean", (USUAL, "recall@1"), (
        "nDCG@10 with linear gains; the main score of negation is recall@1, see main_scores",
        "every task has one pool, negation too",
        "macro is the mean of tasks, which the release does not publish",
    )),
    Mrmr("mrmr", "official", (USUAL, "recall@1"), (
        "as the released fork of MTEB: nDCG@10 (negation: recall@1) of trec_eval over the top 1,000, rounded to five digits",
        "equal scores are in trec_eval's order, the larger id first",
        "negation against its whole pool, the released default; with split_corpus=true the release gives each query four "
        "documents, by an unpublished rule",
        "the release skips items that cannot be embedded, which shifts the ids of queries; here this is an error",
    ), ties="trec", skips_missing=True),
)  # fmt: skip
register_benchmark(Benchmark("mrmr", import_mrmr, PROTOCOLS))
