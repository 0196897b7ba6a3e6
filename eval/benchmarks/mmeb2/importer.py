"""MMEB-V2 (arXiv:2507.04590), its image and its visual-document part; the video part is not here.

Layouts, as ``src/data/eval_dataset`` of github.com/TIGER-AI-Lab/VLM2Vec (6e1e1d4) reads them:

``image``   the 36 sets of MMEB with instructions apart (``ziyjiang/MMEB_Test_Instruct``): a folder or file a set with
            ``qry_inst``, ``qry_text``, ``qry_img_path``, ``tgt_inst``, ``tgt_text`` and ``tgt_img_path`` (lists, the right one first);
            pictures below ``image-tasks`` of ``TIGER-Lab/MMEB-V2``
``visdoc``  24 sets: a folder a set with ``queries``, ``corpus`` and ``qrels`` (``query-id``, ``query``; ``corpus-id``, ``image``; ``score``)

What the release does with them, and so do we: texts are put together as for MMEB-V1, each kind of task in its own way. A candidate
is known by a name, its text, its picture's path or both, and of candidates with one name only the first is embedded: in EDIS and WebQA
a picture's second caption is never seen. Judgements of 0 are none, of two for one document the higher one counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    content_id,
    files_of_split,
    iter_rows,
)
from eval.benchmarks.suite import refuse_old_suite, write_suite
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.mmeb_prompts import PLACEHOLDER, SETS, plain
from rge.common.options import one_of
from rge.common.schema import safe_id

PARTS = ("image", "visdoc")
ASKED = "Find a document image that matches the given query:"
SHOWN = "Understand the content of the provided document image."
"""Of the release, for all visual documents."""
_TEXT_TO_IMAGE = ("VisDial", "MSCOCO_t2i", "VisualNews_t2i", "WebQA", "EDIS", "Wiki-SS-NQ")
_IMAGE_TO_IMAGE = (
    "CIRR", "NIGHTS", "OVEN", "FashionIQ", "MSCOCO", "RefCOCO", "RefCOCO-Matching", "Visual7W-Pointing",
)  # fmt: skip
_VIDORE1 = (
    "arxivqa docvqa infovqa tabfquad tatdqa shiftproject syntheticDocQA_artificial_intelligence syntheticDocQA_energy "
    "syntheticDocQA_government_reports syntheticDocQA_healthcare_industry"
)
_VIDORE2 = "esg_reports_human_labeled_v2 biomedical_lectures_v2_multilingual economics_reports_v2_multilingual esg_reports_v2_multilingual"
DOCUMENTS: dict[str, tuple[str, str]] = {
    **{f"ViDoRe_{name}": ("ViDoRe-V1", "test") for name in _VIDORE1.split()},
    **{f"ViDoRe_{name}": ("ViDoRe-V2", "test") for name in _VIDORE2.split()},
    **{
        f"VisRAG_{name}": ("VisRAG", "train")
        for name in "ArxivQA ChartQA MP-DocVQA SlideVQA InfoVQA PlotQA".split()
    },
    **{
        name: ("VisDoc-OOD", "test")
        for name in "ViDoSeek-page ViDoSeek-doc MMLongBench-page MMLongBench-doc".split()
    },
}
"""The 24 sets of the leaderboard, with their meta-task and the hub's split."""
COLUMNS = ("qry_inst", "qry_text", "qry_img_path", "tgt_inst", "tgt_text", "tgt_img_path")


@dataclass
class Mmeb2Options(PictureOptions):
    """Make a suite of retrieval sets from one part of the release of MMEB-V2."""

    part: str = "image"
    """image or visdoc."""
    sets: tuple[str, ...] = ("all",)
    """Which sets, by the release's names; all 36 or 24 by default."""
    images: Path | None = None
    """Folder that the image part's paths start from (image-tasks of TIGER-Lab/MMEB-V2); null: src/image-tasks, src."""
    verbatim: bool = False
    """Keep every blank, line break and picture's place of the texts, as released code reads them: for `eval run as=release`."""


def import_mmeb2(options: Mmeb2Options) -> list[str]:
    """Read one part of MMEB-V2 and write a suite; returns the names of its sets.

    Raises:
        UserError: a set, a column or a picture is missing.
    """
    one_of("part", [options.part], PARTS)
    if options.part == "visdoc" and options.images is not None:
        raise ReleaseError(
            "images= is of part=image; the tables of part=visdoc hold their pictures: leave it away"
        )
    members = (
        SETS
        if options.part == "image"
        else {name: {"meta_task": task} for name, (task, _) in DOCUMENTS.items()}
    )
    names = tuple(members) if options.sets == ("all",) else options.sets
    one_of("sets", names, tuple(members))
    if missing := [name for name in names if not (options.src / name).is_dir()]:
        raise ReleaseError(
            f"{options.src} lacks {len(missing)} of {len(names)} sets: {', '.join(missing)}. The average of fewer than "
            f"{len(members)} is no MMEB-V2 score; sets=NAME,... imports some on purpose"
        )
    refuse_old_suite(options.out, options.overwrite)
    for name in names:
        (_import_images if options.part == "image" else _import_documents)(name, options)
    write_suite(
        options.out,
        name=f"MMEB-V2 {options.part}" + ("" if len(names) == len(members) else f", {len(names)} sets"),
        benchmark="mmeb2",
        column="set",
        members={name: members[name] for name in names},
        part=options.part,
    )
    return list(names)


def query_text(name: str, instruction: str, text: str) -> str:
    """A query of the image part as the release puts it together, with the placeholder where its picture goes."""
    if name in _TEXT_TO_IMAGE:  # the placeholder stays, though such a query has no picture
        return f"{instruction} {text}\n" + "\n" * (name == "VisDial")
    instruction = instruction.replace(PLACEHOLDER, "")
    if name in _IMAGE_TO_IMAGE or SETS[name]["meta_task"] == "VQA":
        instruction = "\n" + instruction.strip()
    return _beside(f"{instruction} {text}" if text else instruction) + "\n"


def candidate_text(name: str, instruction: str, caption: str, *, captioned: bool) -> str:
    """A candidate with a picture as the release puts it together.

    Args:
        name: of the set.
        instruction: ``tgt_inst``.
        caption: ``tgt_text``.
        captioned: whether the query's first candidate has a caption, by which the release decides for all of them.
    """
    instruction = instruction.replace(PLACEHOLDER, "")
    if captioned:
        return _beside(f"{instruction} {caption}") + "\n"
    return _beside(instruction) + ("\n" if name in _TEXT_TO_IMAGE else "")


def _beside(text: str) -> str:
    return f"{PLACEHOLDER} {text}".replace(" \n", "\n")


def _import_images(name: str, options: Mmeb2Options) -> None:
    pictures = Pictures([root for root in (options.images, options.src / "image-tasks", options.src) if root])
    clean = str if options.verbatim else plain
    corpus: dict[str, tuple[str, str]] = {}
    queries: list[Query] = []
    qrels: list[tuple[str, str, int]] = []
    candidates: list[tuple[str, str]] = []
    num_hidden = 0
    for number, (row, where) in enumerate(_rows(options.src / name, "test")):
        if lacking := [column for column in COLUMNS if column not in row]:
            raise ReleaseError(
                f"{where}: column {lacking[0]!r} is missing; there are {', '.join(row)}. Files of MMEB-eval (V1) go through "
                "import mmeb"
            )
        texts = [one or "" for one in as_list(row["tgt_text"]) or [""]]
        paths = [one or "" for one in as_list(row["tgt_img_path"])]
        if len(paths) not in (0, len(texts)):
            raise ReleaseError(f"{where}: {len(texts)} texts and {len(paths)} pictures for the candidates")
        own: list[str] = []
        for caption, path in zip(texts, paths or [""] * len(texts), strict=True):
            if name in _TEXT_TO_IMAGE:
                known_as = path
            elif name in _IMAGE_TO_IMAGE:
                known_as = path + ":" + caption.strip('"')
            else:
                known_as = caption
            one = content_id(known_as)
            shown = path if name in (*_TEXT_TO_IMAGE, *_IMAGE_TO_IMAGE) else ""
            text = (
                candidate_text(name, row["tgt_inst"] or "", caption, captioned=bool(texts[0].strip()))
                if shown
                else caption
            )
            if not (text.strip() or shown):
                raise ReleaseError(f"{where}: candidate {len(own)} has neither text nor picture")
            num_hidden += corpus.setdefault(one, (text, shown)) != (text, shown)
            own.append(one)
        path = "" if name in _TEXT_TO_IMAGE else row["qry_img_path"] or ""
        query = f"{name}-{number:05d}"
        text = query_text(name, row["qry_inst"] or "", row["qry_text"] or "")
        images = (_picture(pictures, path, where),) if path else ()
        queries.append(Query(query, clean(text), images, None, content_id(path or text)))
        qrels.append((query, own[0], 1))
        candidates += [(query, one) for one in dict.fromkeys(own)]

    def rows() -> Iterator[Candidate]:
        for one in sorted(corpus):
            text, path = corpus[one]
            yield Candidate(one, clean(text) or None, _picture(pictures, path, name) if path else None)

    _write(name, options, queries, rows(), qrels, candidates, candidates_never_seen=num_hidden)


def _import_documents(name: str, options: Mmeb2Options) -> None:
    split = DOCUMENTS[name][1]
    clean = str if options.verbatim else plain
    judged: dict[str, dict[str, int]] = {}
    for row, where in _rows(options.src / name / "qrels", split):
        query, document, gain = (_cell(row, key, where) for key in ("query-id", "corpus-id", "score"))
        if gain > 0:
            of_query = judged.setdefault(safe_id(str(query)), {})
            one = safe_id(str(document))
            of_query[one] = max(of_query.get(one, 0), int(gain))
    queries = []
    for row, where in _rows(options.src / name / "queries", split):
        query = safe_id(str(_cell(row, "query-id", where)))
        if query not in judged:
            raise ReleaseError(
                f"{where}: query {query!r} has no judgement above 0, at which the released code ends too"
            )
        queries.append(Query(query, f"{ASKED} {_cell(row, 'query', where)}", (), None, query))
    ids = {query.id for query in queries}

    def rows() -> Iterator[Candidate]:
        for row, where in _rows(options.src / name / "corpus", split):
            image = _cell(row, "image", where)
            image = image["bytes"] if isinstance(image, dict) else image
            text = clean(f"{PLACEHOLDER} {SHOWN}")
            yield Candidate(safe_id(str(_cell(row, "corpus-id", where))), text, image)

    qrels = [
        (query, one, gain) for query, found in judged.items() if query in ids for one, gain in found.items()
    ]
    _write(name, options, queries, rows(), qrels, None)


def _write(
    name: str, options: Mmeb2Options, queries: Sequence[Query], corpus: Iterator[Candidate],
    qrels: Sequence[tuple[str, str, int]], candidates: Sequence[tuple[str, str]] | None, **more: int,
) -> None:  # fmt: skip
    about = SETS[name] if options.part == "image" else {"meta_task": DOCUMENTS[name][0]}
    write_set(
        options.out / name,
        meta={
            "name": f"MMEB-V2 {name}",
            "benchmark": "mmeb2",
            "source": "MMEB-V2, imported by eval.benchmarks.mmeb2.importer",
            "part": options.part,
            "instructions": "vlm2vec",
            # the texts carry their instructions already: the checkpoint's own wording must not be put around them
            "prompts": "verbatim" if options.verbatim else "plain",
            "verbatim": options.verbatim or None,
            **more,
            **about,
        },
        queries=queries,
        corpus=corpus,
        qrels=qrels,
        candidates=candidates,
        embed=options.pictures == "embed",
        decode=options.decode,
        overwrite=options.overwrite,
    )


def _rows(folder: Path, split: str) -> Iterator[tuple[dict[str, Any], str]]:
    for file in files_of_split(folder, split):
        for number, row in enumerate(iter_rows(file)):
            yield row, f"{file}, row {number}"


def _cell(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ReleaseError(f"{where}: column {name!r} is missing or empty; there are {', '.join(row)}")
    return row[name]


def _picture(pictures: Pictures, path: str, where: str) -> bytes | Path:
    found = pictures.find(path, by_stem=False)
    if found is None:
        raise ReleaseError(
            f"{where}: picture {path!r} is in none of {', '.join(map(str, pictures.roots))}: unpack image-tasks of "
            "TIGER-Lab/MMEB-V2 and give images=DIR"
        )
    return found
