"""MR²-Bench (arXiv:2509.26378): 1,309 reasoning-intensive queries in 12 sub-tasks; queries and documents have several pictures.

The files of ``JUNJIE99/MR2-Bench`` could not be seen when this was written, only its README: their names and columns are looked for
under many names, an unknown column is an error that says how to name it, and the published counts are checked. What is expected:

a folder a sub-task, in it ``queries`` and ``corpus`` (a table, or a folder of tables as the hub has them), and the right answers either
in a column of the queries (ids) or in a table ``qrels``. Pictures are bytes, paths, or lists of them.

A candidate of a retrieval set has one picture: those of a document with several are put one below the other.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    TABLES,
    Fields,
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    column_names,
    iter_rows,
    some,
    stack,
)
from eval.benchmarks.suite import refuse_old_suite, write_suite
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.options import one_of
from rge.common.schema import safe_id

NUM_TASKS, NUM_QUERIES = 12, 1309
_IMAGES = ("image", "images", "image_path", "image_paths", "image_list", "img", "imgs")
QUERY = {
    "id": ("id", "_id", "qid", "query_id", "query-id"),
    "text": ("text", "query", "question", "query_text"),
    "images": (*_IMAGES, "query_image", "query_images"),
    "positives": (
        "positives",
        "positive_ids",
        "pos",
        "pos_ids",
        "gold_ids",
        "gt",
        "target_ids",
        "relevant_docs",
    ),
    "instruction": ("instruction", "task_instruction", "prompt"),
}
DOCUMENT = {
    "id": ("id", "_id", "did", "doc_id", "corpus_id", "corpus-id", "candidate_id"),
    "text": ("text", "content", "document", "caption"),
    "images": _IMAGES,
}
JUDGEMENT = {
    "query": ("query-id", "query_id", "qid"),
    "document": ("corpus-id", "corpus_id", "docid", "doc_id", "did"),
    "gain": ("score", "relevance", "label"),
}
IGNORED = (
    "modality",
    "source",
    "category",
    "title",
    "metadata",
    "language",
    "answer",
    "explanation",
    "split",
)
FILES = {
    "queries": ("queries", "query", "test"),
    "corpus": ("corpus", "candidates", "documents", "docs"),
    "qrels": ("qrels", "qrel"),
}


@dataclass
class Mr2benchOptions(PictureOptions):
    """Make a suite of retrieval sets from the release of MR²-Bench."""

    tasks: tuple[str, ...] = ("all",)
    """Which sub-tasks, by the names of their folders."""
    images: Path | None = None
    """Folder that paths of pictures start from; null: src/images, the sub-task's folder, src."""
    field_map: tuple[str, ...] = ()
    """Columns with other names: theirs=ours, theirs=ignore; for queries id, text, images, positives, instruction."""
    counts: bool = True
    """Insist on the published counts: 12 sub-tasks, 1,309 queries."""


def import_mr2bench(options: Mr2benchOptions) -> list[str]:
    """Read MR²-Bench's sub-tasks and write a suite; returns their names.

    Raises:
        UserError: a table, a column, a picture or a right answer is missing, or the counts are not the published ones.
    """
    there = sorted(path.name for path in options.src.glob("*") if path.is_dir() and _tables(path, "queries"))
    tasks = tuple(there) if options.tasks == ("all",) else options.tasks
    one_of("tasks", tasks, tuple(there))
    if not tasks:
        raise ReleaseError(
            f"{options.src}: no folder below it holds a table of queries ({', '.join(FILES['queries'])})"
        )
    refuse_old_suite(options.out, options.overwrite)
    num = sum(1 for task in tasks for _ in _rows(options.src / task, "queries", QUERY, options))
    if options.counts and options.tasks == ("all",) and (len(tasks), num) != (NUM_TASKS, NUM_QUERIES):
        raise ReleaseError(
            f"{options.src} has {len(tasks)} sub-tasks with {num} queries, the published benchmark {NUM_TASKS} with {NUM_QUERIES}: "
            "another release? counts=false takes it as it is"
        )
    for task in tasks:
        _import_one(task, options)
    write_suite(
        options.out,
        name="MR2-Bench",
        benchmark="mr2bench",
        column="task",
        members={task: {} for task in tasks},
    )
    return list(tasks)


def _import_one(task: str, options: Mr2benchOptions) -> None:
    folder = options.src / task
    pictures = Pictures(
        [root for root in (options.images, options.src / "images", folder, options.src) if root]
    )
    judged: dict[str, dict[str, int]] = {}
    if _tables(folder, "qrels"):
        for row, where in _rows(folder, "qrels", JUDGEMENT, options):
            query, document = (safe_id(str(_given(row, key, where))) for key in ("query", "document"))
            gain = row.get("gain")
            judged.setdefault(query, {})[document] = 1 if gain is None else int(gain)
    queries = []
    for row, where in _rows(folder, "queries", QUERY, options):
        name = safe_id(str(_given(row, "id", where)))
        judged.setdefault(name, {}).update({safe_id(str(one)): 1 for one in as_list(row.get("positives"))})
        if not any(gain > 0 for gain in judged[name].values()):
            raise ReleaseError(f"{where}: query {name!r} has no right answer, in no column and in no qrels")
        images = _pictures(row, pictures, where)
        group = hashlib.sha256(_bytes(images[0]) if images else name.encode()).hexdigest()[:20]
        queries.append(
            Query(name, row.get("text") or None, images, None, group, row.get("instruction") or None)
        )

    meta: dict[str, Any] = {
        "name": f"MR2-Bench {task}",
        "benchmark": "mr2bench",
        "source": "JUNJIE99/MR2-Bench, imported by eval.benchmarks.mr2bench.importer",
        "task": task,
        "documents_with_several_pictures": 0,
    }

    def corpus() -> Iterator[Candidate]:
        for row, where in _rows(folder, "corpus", DOCUMENT, options):
            images = _pictures(row, pictures, where)
            meta["documents_with_several_pictures"] += len(images) > 1
            image = stack([_bytes(one) for one in images]) if len(images) > 1 else next(iter(images), None)
            yield Candidate(safe_id(str(_given(row, "id", where))), row.get("text") or None, image)

    write_set(
        options.out / task,
        meta=meta,
        queries=queries,
        corpus=corpus(),
        qrels=[
            (query.id, one, gain) for query in queries for one, gain in judged[query.id].items() if gain > 0
        ],
        embed=options.pictures == "embed",
        decode=options.decode,
        overwrite=options.overwrite,
    )


def _tables(folder: Path, kind: str) -> list[Path]:
    for name in FILES[kind]:
        files = [folder / f"{name}{ending}" for ending in TABLES if (folder / f"{name}{ending}").is_file()]
        files += sorted(path for path in (folder / name).glob("*") if path.suffix in TABLES)
        if files:
            return files
    return []


def _rows(
    folder: Path, kind: str, aliases: dict[str, tuple[str, ...]], options: Mr2benchOptions
) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows under our names, and where each stands."""
    files = _tables(folder, kind)
    if not files:
        raise ReleaseError(f"{folder} has no table of {kind} ({', '.join(FILES[kind])})")
    for file in files:
        names = column_names(file)
        words = [word for word in options.field_map if word.partition("=")[0].strip() in names]
        columns = Fields(aliases, words).columns(file, names, IGNORED)
        for number, row in enumerate(iter_rows(file)):
            yield {ours: row.get(theirs) for ours, theirs in columns.items()}, f"{file}, row {number}"


def _given(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ReleaseError(
            f"{where}: {name} is missing or empty; give field_map=COLUMN={name} if it goes by another name"
        )
    return row[name]


def _pictures(row: dict[str, Any], pictures: Pictures, where: str) -> tuple[bytes | Path, ...]:
    out = []
    for ref in as_list(row.get("images")):
        if ref is None or ref == "":
            continue
        found = pictures.find(ref, by_stem=False)
        if found is None:
            raise ReleaseError(
                f"{where}: picture {ref!r} is in none of {some([str(root) for root in pictures.roots])}: give images=DIR"
            )
        out.append(found)
    return tuple(out)


def _bytes(picture: bytes | Path) -> bytes:
    return picture if isinstance(picture, bytes) else picture.read_bytes()
