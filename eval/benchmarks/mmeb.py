"""MMEB-V1: 36 sets of about 1,000 queries, each query with its own candidates of which the first is right.

Layout (``TIGER-Lab/MMEB-eval``, split test): a folder or file a set, Parquet or JSON lines, with ``qry_text``,
``qry_img_path``, ``tgt_text`` (a list) and ``tgt_img_path`` (a list); "" stands for a missing part, ``<|image_1|>`` in a
text for the picture; pictures below one folder.

The released scorers take candidate 0 as the answer and `argmax` as the prediction, so equal scores (a collapsed model, a
NaN) count as right. Here a candidate's id is a hash of its content: nothing says where it stood, equal candidates are one,
and ties are resolved against the model unless ``profile=official`` asks for the released rule.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.common import (
    Candidate,
    Pictures,
    Query,
    ReleaseError,
    as_list,
    content_id,
    iter_rows,
    write_set,
)
from eval.options import one_of
from eval.suite import is_suite, write_suite

CLASSIFICATION, VQA, RETRIEVAL, GROUNDING = "classification", "VQA", "retrieval", "grounding"
_TASKS = {
    CLASSIFICATION: (
        "ImageNet-1K N24News HatefulMemes VOC2007 SUN397",
        "Place365 ImageNet-A ImageNet-R ObjectNet Country211",
    ),
    VQA: ("OK-VQA A-OKVQA DocVQA InfographicsVQA ChartQA Visual7W", "ScienceQA VizWiz GQA TextVQA"),
    RETRIEVAL: (
        "VisDial CIRR VisualNews_t2i VisualNews_i2t MSCOCO_t2i MSCOCO_i2t NIGHTS WebQA",
        "FashionIQ Wiki-SS-NQ OVEN EDIS",
    ),
    GROUNDING: ("MSCOCO", "RefCOCO RefCOCO-Matching Visual7W-Pointing"),
}
SETS: dict[str, dict[str, str]] = {
    name: {"meta_task": task, "distribution": distribution}
    for task, halves in _TASKS.items()
    for distribution, names in zip(("IND", "OOD"), halves, strict=True)
    for name in names.split()
}
"""The 36 sets with their meta-task, and whether MMEB-train holds their training split (IND) or not (OOD)."""
INSTRUCTIONS = ("vlm2vec", "rge")
COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")

# The wordings of the released RGE evaluation: (wording in MMEB, wording of RGE) for queries ...
_OBJECT = "Identify the category of the main object in the given image for classification"
_SCENE = (
    "Identify the scene shown in the image",
    "Identify the category of the scene in the given image for classification",
)
_CLASSIFY = ("Represent the given image for classification", _OBJECT)
_SHOWN = ("Identify the object shown in the image", _OBJECT)
_ASKED = "Represent the given image with the following question:"
_REFERRED = (
    "Select the portion of the image that follows the language expressions",
    "Describe and focus on the object in the image that follows the following language expressions",
)
RGE_QUERY: dict[str, tuple[str, str]] = {
    "ImageNet-1K": _CLASSIFY,
    "N24News": (
        "Represent the given news image with the following caption for domain classification",
        "Identify the category of the given news with the following caption for domain classification",
    ),
    "HatefulMemes": (
        "Represent the given image for binary classification to determine whether it constitutes hateful speech or not",
        "Determine whether the given image contains hateful speech or not for binary classification",
    ),
    "VOC2007": _SHOWN,
    "SUN397": _SCENE,
    "Place365": _SCENE,
    "ImageNet-A": _CLASSIFY,
    "ImageNet-R": _CLASSIFY,
    "ObjectNet": _SHOWN,
    "Country211": (
        "Identify the country depicted in the image",
        "Identify the category of the country depicted in the given image for classification",
    ),
    "ChartQA": (_ASKED, "Answer a chart-related question based on the given image:"),
    "DocVQA": (_ASKED, "Answer a document-related question based on the given image:"),
    "InfographicsVQA": (_ASKED, "Answer an infographic-related question based on the given image:"),
    "ScienceQA": (_ASKED, "Answer a science-related question based on the given image:"),
    **dict.fromkeys(
        ("OK-VQA", "A-OKVQA", "Visual7W"), (_ASKED, "Answer the question based on the given image:")
    ),
    **dict.fromkeys(("VizWiz", "GQA", "TextVQA"), (_ASKED, "Answer a question based on the given image:")),
    "VisDial": (
        "Represent the given dialogue about an image, which is used for image retrieval",
        "Describe and represent the following dialogue about an image for image retrieval",
    ),
    "CIRR": (
        "Given an image, find a similar everyday image with the described changes",
        "Describe and represent the above image and the following described changes about the given image for composed "
        "image retrieval",
    ),
    "VisualNews_t2i": (
        "Retrieve an image of this news caption",
        "Describe and represent the following news caption for news photo retrieval",
    ),
    "VisualNews_i2t": (
        "Find a caption for the news in the given photo",
        "Describe and represent the above image for news caption retrieval",
    ),
    "MSCOCO_t2i": (
        "Find me an everyday image that matches the given caption",
        "Describe and represent the following descriptive caption for everyday image retrieval",
    ),
    "MSCOCO_i2t": (
        "Find an image caption describing the given everyday image",
        "Describe and represent the above everyday image for a corresponding description retrieval",
    ),
    "NIGHTS": (
        "Find a day-to-day image that looks similar to the provided image",
        "Describe and represent the above day-to-day image for a similar image retrieval",
    ),
    "WebQA": (
        "Find a Wikipedia image that answers this question",
        "Answer and represent the following question for a Wikipedia image retrieval",
    ),
    "OVEN": (
        "Retrieve a Wikipedia image-description pair that provides evidence for the question of this image",
        "Describe and represent the above image and the following question for a Wikipedia image-description pair "
        "retrieval",
    ),
    "FashionIQ": (
        "Find an image to match the fashion image and style note",
        "Describe and represent the above fashion image and the following described modification on style note for a "
        "fashion image retrieval",
    ),
    "EDIS": (
        "Find a news image that matches the provided caption",
        "Describe and represent the following provided caption for a news image retrieval",
    ),
    "Wiki-SS-NQ": (
        "Find the document image that can answer the given query",
        "Describe and represent the following query for a document image retrieval",
    ),
    "MSCOCO": (
        "Crop the image to to isolate the object labeled as",  # sic, in MMEB and in the released rules
        "Describe and focus on the object in the image labeled as",
    ),
    "Visual7W-Pointing": (
        "Select the portion of the image that answers the question",
        "Describe and focus on the object in the image that answers the following question",
    ),
    "RefCOCO": _REFERRED,
    "RefCOCO-Matching": _REFERRED,
}
# ... and for candidates: a prefix, a replacement, or whole values.
_IMAGE = ("Represent the given image", "Summarize the given image in one word")
_WIKI = (
    "Represent the given Wikipedia image with related text information",
    "Summarize the given Wikipedia image with the following related text information in one word",
)
_CROP = (
    "Represent the given cropped image of the object",
    "Summarize the given cropped image of the object in one word",
)
_WORDS = {
    "object category": "ImageNet-1K VOC2007 ImageNet-A ImageNet-R ObjectNet",
    "news category": "N24News",
    "scene category": "SUN397 Place365",
    "country category": "Country211",
    "answer": " ".join(name for name, about in SETS.items() if about["meta_task"] == VQA),
    "news caption": "VisualNews_i2t",
    "sentence": "MSCOCO_i2t",
}
RGE_PREFIX: dict[str, str] = {
    name: f"Summarize the following {what} in one word: "
    for what, names in _WORDS.items()
    for name in names.split()
}
RGE_CANDIDATE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("VisDial", "CIRR", "VisualNews_t2i", "MSCOCO_t2i", "NIGHTS", "FashionIQ", "Wiki-SS-NQ"), _IMAGE
    ),
    **dict.fromkeys(("WebQA", "OVEN"), _WIKI),
    "EDIS": (
        "Represent the given image with related text information",
        "Summarize the given image with the following related text information in one word",
    ),
    **dict.fromkeys(("MSCOCO", "Visual7W-Pointing", "RefCOCO"), _CROP),
    "RefCOCO-Matching": _REFERRED,
}
RGE_VALUES: dict[str, dict[str, str]] = {
    "HatefulMemes": {
        "Yes": "Summarize the following statement in one word: Yes, it contains hateful speech.",
        "No": "Summarize the following statement in one word: No, it does not contain hateful speech.",
    }
}


@dataclass
class MmebOptions:
    """Options of ``python -m eval import mmeb``."""

    src: Path
    """Directory with a folder or file for each set."""
    out: Path
    """Suite to write, a retrieval set for each MMEB set."""
    sets: tuple[str, ...] = ("all",)
    """Which sets, by name; all 36 by default."""
    images: Path | None = None
    """Folder that the image paths start from; null: src/images, src/MMEB-images, src."""
    instructions: str = "vlm2vec"
    """vlm2vec leaves the texts as released; rge rewords them as the released RGE evaluation does."""
    pictures: str = "embed"
    """embed copies pictures into the sets, link writes their paths."""
    decode: bool = True
    """Open every picture once."""
    overwrite: bool = False
    """Replace sets that are already at out."""


def import_mmeb(options: MmebOptions) -> list[str]:
    """Read MMEB's evaluation sets and write a suite; returns the names of its sets.

    Raises:
        UserError: a set is missing, a row has no candidates, or a picture is not there.
    """
    one_of("instructions", [options.instructions], INSTRUCTIONS)
    one_of("pictures", [options.pictures], ("embed", "link"))
    names = tuple(SETS) if options.sets == ("all",) else options.sets
    one_of("sets", names, tuple(SETS))
    files = {name: _file(options.src, name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise ReleaseError(
            f"{options.src} lacks {len(missing)} of {len(names)} sets: {', '.join(missing)}. The average of fewer than 36 "
            "is no MMEB score; sets=NAME,... imports some on purpose"
        )
    if is_suite(options.out) and not options.overwrite:
        raise ReleaseError(f"out {options.out} already holds a suite: give another, or overwrite=true")
    roots = [
        root
        for root in (options.images, options.src / "images", options.src / "MMEB-images", options.src)
        if root
    ]
    pictures = Pictures(roots)
    for name, file in files.items():
        assert file is not None
        _import_one(name, file, pictures, options)
    write_suite(
        options.out,
        name="MMEB" if len(names) == len(SETS) else f"MMEB, {len(names)} of {len(SETS)} sets",
        benchmark="mmeb",
        column="set",
        members={name: SETS[name] for name in names},
        instructions=options.instructions,
    )
    return list(names)


def reword(name: str, text: str, side: str) -> str:
    """A text of MMEB in RGE's words: whole values first, then the replacement, then the prefix.

    Args:
        name: of the set.
        text: without the picture's placeholder.
        side: query or candidate.
    """
    if side == "query":
        old, new = RGE_QUERY[name]
        return text.replace(old, new)
    text = RGE_VALUES.get(name, {}).get(text, text)
    old, new = RGE_CANDIDATE.get(name, ("", ""))
    return RGE_PREFIX.get(name, "") + (text.replace(old, new) if old else text)


def plain(text: str | None) -> str:
    """A text without the placeholders of pictures; our prompts put pictures first by themselves."""
    return re.sub(r"<\|image_\d+\|>\s*", "", text or "").strip()


def _file(src: Path, name: str) -> Path | None:
    found = [
        *(src / name).glob("*.parquet"),
        *(src / name).glob("*.jsonl"),
        src / f"{name}.parquet",
        src / f"{name}.jsonl",
    ]
    found = [path for path in found if path.is_file()]
    tests = [path for path in found if "test" in path.name]
    if len(tests or found) > 1:
        raise ReleaseError(f"{src}: {', '.join(map(str, tests or found))} could all be {name}: leave one")
    return next(iter(tests or found), None)


def _import_one(name: str, file: Path, pictures: Pictures, options: MmebOptions) -> None:
    corpus: dict[str, tuple[str, str]] = {}
    queries: list[Query] = []
    qrels: list[tuple[str, str, int]] = []
    candidates: list[tuple[str, str]] = []
    num_equal = 0
    for number, row in enumerate(iter_rows(file)):
        lacking = [column for column in COLUMNS if column not in row]
        if lacking:
            raise ReleaseError(f"{file}: column {lacking[0]!r} is missing; there are {', '.join(row)}")
        where = f"{file}, row {number + 1}"
        texts, paths = _targets(row, where)
        ids: list[str] = []
        for text, path in zip(texts, paths, strict=True):
            text = plain(text)
            if not text and not path:
                raise ReleaseError(f"{where}: candidate {len(ids)} has neither text nor picture")
            ids.append(content_id(text, path))
            corpus.setdefault(ids[-1], (text, path))
        text, path = plain(row["qry_text"]), row["qry_img_path"] or ""
        query = f"{name}-{number:05d}"
        queries.append(
            Query(
                id=query,
                text=reword(name, text, "query") if options.instructions == "rge" else text,
                images=(_picture(pictures, path, where),) if path else (),
                category=None,
                group=content_id(path or text),
            )
        )
        own = list(dict.fromkeys(ids))
        num_equal += len(own) < len(ids)
        qrels.append((query, ids[0], 1))
        candidates += [(query, one) for one in own]
    if not queries:
        raise ReleaseError(f"{file} has no rows")

    def rows() -> Any:
        for one in sorted(corpus):
            text, path = corpus[one]
            if options.instructions == "rge" and text:
                text = reword(name, text, "candidate")
            yield Candidate(
                one, text or None, _picture(pictures, path, f"{file}: candidate") if path else None
            )

    write_set(
        options.out / name,
        meta={
            "name": f"MMEB {name}",
            "benchmark": "mmeb",
            "source": "TIGER-Lab/MMEB-eval, imported by eval.benchmarks.mmeb",
            "instructions": options.instructions,
            # the texts carry their instructions already: the checkpoint's own wording must not be put around them
            "prompts": "plain",
            "queries_with_equal_candidates": num_equal,
            **SETS[name],
        },
        queries=queries,
        corpus=rows(),
        qrels=qrels,
        candidates=candidates,
        embed=options.pictures == "embed",
        decode=options.decode,
        overwrite=options.overwrite,
    )


def _targets(row: dict[str, Any], where: str) -> tuple[Sequence[str], Sequence[str]]:
    texts = [one or "" for one in _cells(row["tgt_text"])]
    paths = [one or "" for one in _cells(row["tgt_img_path"])]
    # a set without pictures (or texts) may leave that list empty or short
    size = max(len(texts), len(paths))
    if size == 0:
        raise ReleaseError(f"{where}: no candidates")
    if min(len(texts), len(paths)) not in (size, 0):
        raise ReleaseError(f"{where}: {len(texts)} texts and {len(paths)} pictures for the candidates")
    return texts or [""] * size, paths or [""] * size


def _cells(value: Any) -> list[Any]:
    return [value] if value == "" else as_list(value)


def _picture(pictures: Pictures, path: str, where: str) -> bytes | Path:
    found = pictures.find(path, by_stem=False)
    if found is None:
        raise ReleaseError(
            f"{where}: picture {path!r} is in none of {', '.join(map(str, pictures.roots))}: unpack images.zip and give "
            "images=DIR"
        )
    return found
